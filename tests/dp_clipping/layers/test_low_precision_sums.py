"""16-bit factors that are scaled in place: no contribution exceeds the threshold."""

import pytest
import torch
from torch.nn import Parameter

from dp_clipping.clipping.accumulation import Weights
from dp_clipping.clipping.coefficients import coefficients
from dp_clipping.clipping.norms import Norms
from dp_clipping.layers.linear_factors import LinearFactors
from dp_clipping.layers.low_precision_sums import rescale
from dp_clipping.layers.recorder import Trainable
from tests.dp_clipping.conftest import trained

LIMIT = 0.5


def weight(group: int = 0) -> Trainable:
    return trained(Parameter(torch.zeros(64, 64)), group=group)


def factors_of(seed: int = 0, cancel: bool = False) -> LinearFactors:
    draw = torch.Generator().manual_seed(seed)
    a = torch.randn(4, 8, 64, generator=draw).bfloat16()
    y = torch.randn(4, 8, 64, generator=draw).bfloat16()
    if cancel:
        a, y = torch.cat([a, a], 1), torch.cat([y, -y * (1 + 2.0**-7)], 1)
    return LinearFactors(a, y, False)


def scaled(saved: dict[Trainable, LinearFactors], over_parts=lambda bounds: bounds):
    count, zero = max(one.group for one in saved) + 1, torch.zeros(4)
    norms = Norms(count, zero)
    for parameter, factors in saved.items():
        norms.add(parameter, factors.norm())
    limits = torch.full((count,), LIMIT)
    c = coefficients(norms.bounds(), limits, "abadi")
    others = norms.only(set())
    return c, rescale(saved, saved, others, c, limits, set(saved), over_parts)


def contributions(saved: dict[Trainable, LinearFactors]) -> torch.Tensor:
    """‖what each sample adds‖ over all parameters, in float64."""
    g = [torch.bmm(f.y.double().mT, f.a.double()).square().sum((1, 2)) for f in saved.values()]
    return torch.stack(g).sum(0).sqrt()


@pytest.mark.parametrize("cancel", [False, True])
def test_contributions_are_below_the_threshold_and_not_far(cancel):
    saved = {weight(): factors_of(n, cancel) for n in range(2)}
    scaled(saved)
    found = contributions(saved)
    assert (found <= LIMIT).all()
    if not cancel:
        assert (found >= 0.98 * LIMIT).all()
    assert all(f.is_scaled for f in saved.values())


def test_the_sum_needs_no_weights_any_more():
    parameter = weight()
    saved = {parameter: factors_of()}
    scaled(saved)
    found = saved[parameter].weighted_sum(Weights(torch.full((4,), 9.0), [9.0] * 4))
    y, a = saved[parameter].y.double(), saved[parameter].a.double()
    torch.testing.assert_close(found.double(), torch.bmm(y.mT, a).sum(0), rtol=1e-4, atol=1e-6)


def test_a_sample_that_exceeds_on_another_rank_is_halved_here():
    parameter = weight()
    alone, shared = {parameter: factors_of()}, {parameter: factors_of()}
    _, before = scaled(alone)

    def over_parts(bounds):
        return bounds + torch.tensor([2 * LIMIT**2, 0, 0, 0]) * (bounds > LIMIT**2 / 8)

    _, after = scaled(shared, over_parts=over_parts)
    ratio = after / before
    assert ratio[0, 0] < 1
    assert torch.log2(ratio[0, 0]).frac() == 0
    assert (ratio[0, 1:] == 1).all()


def test_one_output_gradient_of_two_layers_is_scaled_for_each_group():
    one, other = weight(0), weight(1)
    first = factors_of()
    second = LinearFactors(factors_of(1).a, first.y, False)
    saved = {one: first, other: second}
    expected = {
        p: LinearFactors(f.a.clone(), f.y.clone(), False)
        for p, f in ((one, first), (other, second))
    }
    scaled(saved)
    for parameter, factors in expected.items():
        alone = {weight(): factors}
        scaled(alone)
        assert torch.equal(factors.y, saved[parameter].y)


def test_only_16_bit_linear_factors_are_rescaled():
    assert factors_of().is_rescaled
    assert not LinearFactors(torch.ones(1, 2, 64), torch.ones(1, 2, 64), False).is_rescaled
