"""Programs that search for noise, and report what is spent every few steps."""

import functools

import tests.support.accountants  # noqa: F401 - makes them fast
from ddp_by_hand.examples import functions_table

# What is spent after so many steps is asked for before and after each epoch, by each run of a test.
functions_table.independent_epsilon = functools.cache(functions_table.independent_epsilon)
