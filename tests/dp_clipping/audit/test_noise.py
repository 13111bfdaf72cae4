"""Tests of noise: right noise passes, and what is not as it is stated is found, and named."""

import math

import pytest
import torch

from dp_clipping.audit.noise import Parameter, faults_of

SHAPES = {"0.weight": (16, 6), "0.bias": (16,), "2.weight": (4, 16), "2.bias": (4,)}
STEPS = 8


def parameters():
    places, start = [], 0
    for name, shape in SHAPES.items():
        stop = start + math.prod(shape)
        places.append(Parameter(name, start, stop, math.prod(shape[1:])))
        start = stop
    return places


def faults(change=None, seed=0, steps=STEPS):
    """Faults of noise that `change(a dict of name -> z [steps, numbers])` has changed."""
    draw = torch.Generator().manual_seed(seed)
    own = {p.name: torch.randn(steps, p.stop - p.start, generator=draw, dtype=torch.float64)
           for p in parameters()}  # fmt: skip
    if change is not None:
        change(own)
    return faults_of(torch.cat(list(own.values()), 1), parameters(), 1e-6)


def test_right_noise_passes():
    assert [faults(seed=seed) for seed in range(10)] == [[]] * 10
    assert faults(steps=1) == []


def of_one(name, change):
    return lambda z: z.__setitem__(name, change(z[name]))


def one_stream(z):
    for name in z:
        z[name] = z["0.weight"][:, : z[name].shape[1]].clone()


def half_from_step_2(z):
    for value in z.values():
        value[2:] /= 2


def repeated(z):
    """Each second step has the noise of the one before."""
    for value in z.values():
        value[1::2] = value[::2]


def a_step_later(z):
    z["2.weight"][1:] = z["0.weight"][:-1, :64]


def half(value):
    value[:, : value.shape[1] // 2] = 0
    return value


def same_shares(value):
    """Two ranks have the same noise for their halves."""
    value[:, value.shape[1] // 2 :] = value[:, : value.shape[1] // 2]
    return value


def uniform(value):
    draw = torch.Generator().manual_seed(5)
    return (torch.rand(value.shape, generator=draw, dtype=value.dtype) - 0.5) * math.sqrt(12)


def two_sizes(value):
    """Right variance of all, of numbers with much and with little noise."""
    value[:, ::2] *= math.sqrt(1.75)
    value[:, 1::2] /= 2
    return value


PLANTED = {
    "no noise on a layer": (lambda z: (z["2.weight"].zero_(), z["2.bias"].zero_()), "2.weight"),
    "no noise on a bias": (of_one("2.bias", torch.zeros_like), "2.bias"),
    "one stream for all": (one_stream, "equal offsets"),
    "half from step 2 on": (half_from_step_2, "step"),
    "each second step again": (repeated, "steps 0 and 1"),
    "another's a step later": (a_step_later, "a step later"),
    "half of a parameter": (of_one("0.weight", half), "0.weight"),
    "0.8 of one parameter": (of_one("0.weight", lambda z: 0.8 * z), "0.weight"),
    "a mean": (of_one("0.weight", lambda z: z + 0.25), "mean 0."),
    "a mean of a step": (lambda z: z["0.weight"][3].add_(0.8), "step 3"),
    "same noise for two shares": (of_one("0.weight", same_shares), "parts of 0.weight"),
    "uniform": (of_one("0.weight", uniform), "is not Gaussian"),
    "of two sizes": (of_one("0.weight", two_sizes), "is not Gaussian"),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_what_is_wrong_is_found_and_named(name):
    change, what = PLANTED[name]
    found = faults(change)
    assert any(what in fault for fault in found), found
