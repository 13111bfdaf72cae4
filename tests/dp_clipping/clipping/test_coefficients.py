"""Coefficients: what each function gives, its margin, and which thresholds are taken."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from dp_clipping import register_clipping_function
from dp_clipping.clipping import coefficients as module
from dp_clipping.clipping.coefficients import (
    HIGHEST,
    LOWEST,
    MARGIN,
    check_range,
    clip_norms_of,
    coefficients,
    described,
    finite_samples,
    known_clipping_functions,
)
from tests.support.engine import build


def of(norms: list[float], limit: float, function: str, gamma: float = 0.01) -> torch.Tensor:
    squares = torch.tensor([norms], dtype=torch.float64).square()
    return coefficients(squares, torch.tensor([limit]), function, gamma)[0]


def test_abadi_leaves_small_norms_and_scales_large_ones():
    found = of([0.0, 0.5, 2.0, 8.0], 2.0 * (1 + MARGIN[torch.float64]), "abadi")
    torch.testing.assert_close(found, torch.tensor([1, 1, 1, 0.25], dtype=torch.float64))


def test_automatic_normalises_every_norm():
    found = of([0.0, 1.0, 3.0], 2.0, "automatic", 0.5)
    expected = torch.tensor([4.0, 2 / 1.5, 2 / 3.5], dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=0)


@pytest.mark.parametrize("dtype", MARGIN, ids=str)
@pytest.mark.parametrize("function", ["abadi", "automatic"])
def test_a_contribution_is_below_the_threshold_by_the_margin(dtype, function):
    norms = torch.logspace(-3, 3, 61, dtype=dtype)[None]
    found = coefficients(norms.square(), torch.tensor([0.7]), function, LOWEST)
    contributions, limit = found.double() * norms.double(), 0.7 / (1 + MARGIN[dtype])
    assert (contributions <= limit * (1 + 1e-6)).logical_or(found == 1).all()
    assert (contributions[norms > 1] >= limit * (1 - 1e-6)).all()


@pytest.mark.parametrize("function", ["abadi", "automatic"])
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_a_sample_with_one_bad_group_contributes_nothing_in_any(function, bad):
    squares = torch.tensor([[1.0, 1.0], [1.0, bad]])
    assert finite_samples(squares).tolist() == [True, False]
    found = coefficients(squares, torch.tensor([0.5, 2.0]), function)
    assert (found[:, 1] == 0).all()
    assert (found[:, 0] > 0).all()


def test_each_group_has_its_own_threshold():
    squares = torch.full((2, 1), 16.0, dtype=torch.float64)
    found = coefficients(squares, torch.tensor([1.0, 2.0]), "abadi")
    torch.testing.assert_close(found[:, 0] * 4, torch.tensor([1.0, 2.0], dtype=torch.float64))


def test_thresholds_of_groups_have_the_sensitivity_of_one():
    assert clip_norms_of(2.0, 4, "flat") == [2.0]
    split = clip_norms_of(2.0, 4, "per_layer")
    assert split == [1.0] * 4
    assert sum(c * c for c in split) == 2.0**2
    assert clip_norms_of([1, 3], 2, "per_layer") == [1.0, 3.0]


@pytest.mark.parametrize("value", [0.0, LOWEST / 2, HIGHEST * 2, float("inf"), float("nan"), -1.0])
def test_thresholds_out_of_range_are_refused(value):
    with pytest.raises(ValueError, match="max_grad_norm is"):
        clip_norms_of(value, 1, "flat")
    with pytest.raises(ValueError, match="a clipping group"):
        clip_norms_of([1.0, value], 2, "per_layer")
    with pytest.raises(ValueError, match="gamma is"):
        check_range("gamma", value)


def test_the_ends_of_the_range_are_taken():
    assert clip_norms_of([LOWEST, HIGHEST], 2, "per_layer") == [LOWEST, HIGHEST]


def halving(norms, limit):
    """Never more than half of C."""
    return (0.5 * limit / norms).clamp(max=1)


def smooth(norms, limit):
    return limit / (norms.square() + limit.square()).sqrt()


@pytest.fixture
def names(monkeypatch):
    """Takes back what a test registers."""
    monkeypatch.setattr(module, "_REGISTERED", {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("fn", "bound"), [(halving, 0.5), (smooth, 1)])
def test_a_registered_function_is_used_and_bounded(names, fn, bound, dtype):
    register_clipping_function("mine", fn, bound=bound)
    assert known_clipping_functions() == ("abadi", "automatic", "mine")
    draw = torch.Generator().manual_seed(0)
    norms = 10 ** (8 * torch.rand(2, 50, generator=draw, dtype=dtype) - 4)
    limits = torch.tensor([0.3, 20.0])
    c = coefficients(norms.square(), limits, "mine")
    expected = torch.stack([fn(n, limit.to(n)) for n, limit in zip(norms, limits, strict=True)])
    torch.testing.assert_close(c, expected, rtol=1e-4, atol=0)
    assert (c.double() * norms.double() <= bound * limits.double()[:, None]).all()


def test_what_exceeds_its_bound_where_nobody_looked_is_cut_off(names):
    def wrong(norms, limit):  # at a norm that no check tries
        return torch.where((norms > 4.9) & (norms < 5.1), 100.0, (limit / norms).clamp(max=1))

    register_clipping_function("wrong", wrong)
    c = coefficients(torch.tensor([[25.0, 4.0]]), torch.tensor([1.0]), "wrong")
    assert c[0, 0] * 5 <= 1
    assert 0.49 < c[0, 1] < 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_gradient_whose_squares_underflow_is_not_scaled_up(names, dtype):
    register_clipping_function("bare", lambda norms, limit: limit / norms)
    gradient = torch.tensor([[1e-25 if dtype == torch.float32 else 1e-170]], dtype=dtype)
    squares = gradient.square().T
    assert squares.item() == 0
    c = coefficients(squares, torch.tensor([1e-10]), "bare")
    assert (c * gradient).item() <= 1e-10


def test_samples_without_a_norm_contribute_nothing(names):
    register_clipping_function("bare", lambda norms, limit: limit / norms)
    c = coefficients(torch.tensor([[0.0, torch.inf, torch.nan, 1.0]]), torch.tensor([1.0]), "bare")
    assert c[0, 1:3].tolist() == [0, 0]
    assert (c[0, 0] * 0.0).item() == 0.0
    assert 0.9 < c[0, 3] < 1


@pytest.mark.parametrize(
    ("fn", "bound", "message"),
    [
        (lambda n, c: torch.ones_like(n), 1, r"norm 0.00101 contribute .*min\(c, bound"),
        (lambda n, c: (c / n).clamp(max=1), 0.5, "its bound is 0.5"),
        (lambda n, c: -(c / n).clamp(max=1), 1, "returns -1 for the norm"),
        (lambda n, c: (c / n).clamp(max=1) * torch.nan, 1, "returns nan"),
        (lambda n, c: (c / n).clamp(max=1) * (n / n.max()), 1, "another coefficient alone"),
        (lambda n, c: (c / n).clamp(max=1) * torch.rand_like(n), 1, "another coefficient alone"),
        (lambda n, c: (c / n).clamp(max=1) if n > c else 1, 1, "torch.where in place of if"),
        (lambda n, c: 1.0, 1, "one coefficient per sample|PyTorch's operators"),
        (lambda n, c: torch.zeros(()), 1, "one coefficient per sample"),
        (lambda n: n, 1, "raises TypeError"),
        (halving, 2, "bound is 2: give"),
        (halving, 0, "bound is 0: give"),
        ("halving", 1, "give a name and a function"),
    ],
)
def test_a_wrong_function_is_refused(names, fn, bound, message):
    with pytest.raises(ValueError, match=message):
        register_clipping_function("wrong", fn, bound=bound)
    assert known_clipping_functions() == ("abadi", "automatic")


def test_names_are_taken_once(names):
    for name in ("abadi", "automatic", ""):
        with pytest.raises(ValueError, match=r"taken|give a name"):
            register_clipping_function(name, halving, bound=0.5)
    for _ in range(2):
        register_clipping_function("mine", halving, bound=0.5)
    register_clipping_function(
        "mine", lambda norms, C: halving(norms, C), bound=0.5
    )  # a cell again
    with pytest.raises(ValueError, match="'mine' is taken by one that computes something else"):
        register_clipping_function("mine", smooth)
    with pytest.raises(ValueError, match="'mine' is taken by one"):
        register_clipping_function("mine", halving, bound=0.75)


def test_ranks_and_checkpoints_tell_functions_of_one_name_apart(names, monkeypatch):
    assert described("abadi") == "abadi"
    seen = set()
    for fn, bound in (
        (halving, 0.5),
        (halving, 0.6),
        (smooth, 1),
        (lambda *a: smooth(*a) / 1.01, 1),
    ):
        monkeypatch.setattr(module, "_REGISTERED", {})
        register_clipping_function("mine", fn, bound=bound)
        assert described("mine") == described("mine")
        assert described("mine").startswith("mine (")
        seen.add(described("mine"))
    assert len(seen) == 4


def test_a_name_alone_is_no_other_function(monkeypatch):
    monkeypatch.setattr(module, "CLIPPING_FUNCTIONS", ("abadi", "automatic", "psac"))
    with pytest.raises(ValueError, match="'psac' is not known in this process"):
        coefficients(torch.ones(1, 2), torch.ones(1), "psac")


@pytest.mark.parametrize("mode", ["per_sample", "ghost", "bookkeeping"])
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_a_private_step_clips_by_it(names, mode, clipping):
    register_clipping_function("mine", smooth)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    data = TensorDataset(torch.randn(8, 3), torch.randint(2, (8,)))
    run = build(
        module=network, dataset=data, max_grad_norm=0.3, grad_sample_mode=mode, clipping=clipping,
        clipping_function="mine",
    )  # fmt: skip
    check = run.engine.check(run.model, data[:])
    assert check.ok, str(check)
