"""Commands that measure, or verify, private training; each is `python -m experiments.NAME`."""

from lm.interrupt import begin_program

begin_program()
