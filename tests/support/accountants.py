"""Opacus's accountants, without what they compute again and again: importing this patches them.

A Rényi divergence is a function of rate, noise and order; others do not change with steps. A
statement, a search for the noise, or a report every few steps asks for the same ones each time.
What a search asks for is new with each noise: there most of the time goes to functions of SciPy,
which are called for whole rows of the series here. All values are those of Opacus, bit for bit.
"""

import functools
import itertools
import math

import numpy as np
from opacus.accountants.analysis import rdp
from scipy import special

ROW = 64  # terms of a series


@functools.cache
def log_binomials(alpha: float, start: int) -> list[tuple[float, bool]]:
    """Returns the logarithms and the signs of a row of binomial coefficients."""
    row = special.binom(alpha, np.arange(start, start + ROW)).tolist()
    return [(math.log(abs(x)) if x else -math.inf, x > 0) for x in row]


def log_erfc(x: np.ndarray) -> list[float]:
    return (math.log(2) + special.log_ndtr(-x * 2**0.5)).tolist()


def log_a_for_frac_alpha(q: float, sigma: float, alpha: float) -> float:
    """Returns what Opacus's function of this name does, whose names these are."""
    log_a0 = log_a1 = -math.inf
    z0, scale = sigma**2 * math.log(1 / q - 1) + 0.5, math.sqrt(2) * sigma
    log_q, log_p, half = math.log(q), math.log(1 - q), math.log(0.5)
    for start in itertools.count(0, ROW):
        places = np.arange(start, start + ROW)
        e0, e1 = log_erfc((places - z0) / scale), log_erfc((z0 - (alpha - places)) / scale)
        coefficients = log_binomials(alpha, start)
        for i, (log_coef, is_positive) in enumerate(coefficients, start):
            j = alpha - i
            log_t0, log_t1 = log_coef + i * log_q + j * log_p, log_coef + j * log_q + i * log_p
            log_s0 = log_t0 + (i * i - i) / (2 * (sigma**2)) + (half + e0[i - start])
            log_s1 = log_t1 + (j * j - j) / (2 * (sigma**2)) + (half + e1[i - start])
            combine = rdp._log_add if is_positive else rdp._log_sub
            log_a0, log_a1 = combine(log_a0, log_s0), combine(log_a1, log_s1)
            if max(log_s0, log_s1) < -30:
                return rdp._log_add(log_a0, log_a1)
    raise AssertionError


rdp._compute_rdp = functools.cache(rdp._compute_rdp)
rdp._compute_log_a_for_frac_alpha = log_a_for_frac_alpha
