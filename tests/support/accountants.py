"""Opacus's accountants, without what they compute again and again: importing this patches them.

A Rényi divergence is a function of rate, noise and order; others do not change with steps. A
statement, a search for the noise, or a report every few steps asks for the same ones each time.
"""

import functools

from opacus.accountants.analysis import rdp

rdp._compute_rdp = functools.cache(rdp._compute_rdp)
