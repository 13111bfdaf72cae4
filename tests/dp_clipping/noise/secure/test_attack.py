"""The attack on the support of floating-point noise, arXiv:2112.05307.

An attacker knows two sums of which one got noise, x without and x' with one person's contribution,
and the result. Noise in floating point does not reach every number: the sum of 0 and a small number
keeps the small number's low bits, and the sum of ⅛ and a number near −⅛ has none below 2⁻²⁷. So the
lowest bits of the result say which sum it was, whatever σ is. I. Mironov, On significance of the
least significant bits for differential privacy (2012), and J. Jin et al., Are we there yet? Timing
and floating-point attacks on differential privacy systems (2022, arXiv:2112.05307), which succeeds
on the noise of DP-SGD in 92.6 % of cases.
"""

import numpy as np
import pytest
import torch

from dp_clipping.noise.add_noise import AddressedNoise
from dp_clipping.noise.secure.source import SecureNoise

KEY = bytes(range(32))
WIDTH = 64  # numbers that a person's contribution has, a row of an embedding
TRIALS = 3000
SOURCES = {"default": AddressedNoise(), "secure": SecureNoise(WIDTH)}


def results(source, present: bool, step: int, std: float, divisor: float) -> np.ndarray:
    """Returns noisy sums [TRIALS, WIDTH], times the divisor: of 0, or of a vector of norm 1."""
    sums = torch.full((TRIALS, WIDTH), WIDTH**-0.5 if present else 0.0)
    how = {"key": KEY, "step": step, "std": std, "divisor": divisor, "dtypes": [torch.float32]}
    return source.add([sums], ["row"], **how)[0].double().numpy() * divisor


def lowest_bits(x: np.ndarray, of_row) -> np.ndarray:
    """Returns the exponents of the lowest bits that are set in each row's numbers, as one."""
    mantissas, exponents = np.frexp(x)
    whole = np.ldexp(mantissas, 53).astype(np.int64)
    lowest = np.log2((whole & -whole).astype(np.float64), where=whole != 0, out=np.zeros(x.shape))
    return of_row(np.where(whole == 0, 0, exponents - 53 + lowest), 1)


def accuracy(source, std: float, divisor: float, of_row=np.min) -> float:
    """Returns the share of sums that the attack tells apart by a threshold learnt before."""
    without, present = (
        [
            lowest_bits(results(source, is_present, step, std, divisor), of_row)
            for step in (s, s + 1)
        ]
        for is_present, s in ((False, 0), (True, 2))
    )
    limits = np.unique(np.concatenate((without[0], present[0]))) + 1e-6
    learnt = [(without[0] < limit).mean() + (present[0] >= limit).mean() for limit in limits]
    best, side = limits[np.argmax(np.abs(np.array(learnt) - 1))], max(learnt) - 1 > 1 - min(learnt)
    found = ((without[1] < best).mean() + (present[1] >= best).mean()) / 2
    return found if side else 1 - found


@pytest.mark.parametrize("divisor", [1.0, 64.0])
@pytest.mark.parametrize("std", [1.0, 4.0])
def test_the_attack_tells_sums_apart_under_the_default_noise(std, divisor):
    """At σ = 4 the best test of real numbers, Φ(1/2σ), is right in 55 % of cases."""
    assert accuracy(SOURCES["default"], std, divisor) > (0.9 if std == 1.0 else 0.65)


@pytest.mark.parametrize("divisor", [1.0, 64.0])
@pytest.mark.parametrize("std", [1.0, 4.0])
@pytest.mark.parametrize("of_row", [np.min, np.mean])
def test_it_is_at_chance_in_secure_mode(std, divisor, of_row):
    deviation = 0.5 * (2 * TRIALS) ** -0.5
    assert abs(accuracy(SOURCES["secure"], std, divisor, of_row) - 0.5) < 4 * deviation


def test_every_result_of_secure_mode_is_possible_under_both_sums():
    """Results are all multiples of one grid, and the integers reach each one from either sum."""
    grid = 2.0**-13
    for present in (False, True):
        x = results(SOURCES["secure"], present, 0, 1.0, 1.0)
        assert (x / grid == np.round(x / grid)).all()
        assert {n % 2 for n in (x / grid).astype(int).ravel().tolist()} == {0, 1}
