"""Gradients of the weights of norm layers, against the reference implementation in float64."""

from itertools import product
from unittest.mock import patch

import torch

from dp_clipping.kernels import norm_layer_gradients
from dp_clipping.kernels.norm_layer_gradients import Normalized
from dp_clipping.layers.norm import plain_gradients
from tests.support.kernel_cases import (
    SUM_BOUND,
    Place,
    assert_squares,
    assert_within,
    lay_out,
    on_kernels,
)


@on_kernels()
def test_norm_layers(place: Place) -> None:
    """With and without mean and bias, and of a bias alone, of one program a sample and of several
    pieces; what shares a launch changes no bit."""
    block = norm_layer_gradients.BLOCK
    steps = norm_layer_gradients.LEAST_STEPS * norm_layer_gradients.ELEMENTS
    tokens = 2 * steps // block + 7
    shapes = [*place.shapes, (2, tokens, block + 5, 0), (1, tokens, block, 0)]
    uses = []
    for (batch_size, tokens, d, _), layouts in product(shapes, place.layouts):
        x = lay_out(place.normal(batch_size, tokens, d, seed=1, shift=0.5), layouts[0])
        y = lay_out(place.normal(batch_size, tokens, d, seed=2, shift=0.1), layouts[1])
        mean = x.double().mean(2).float()
        variance = (x.double() - mean[..., None]).square().mean(2)
        rstd = (variance + 1e-2).rsqrt().float().t().contiguous().t()
        uses.append(Normalized(y, x, rstd))
        uses.append(Normalized(y, x, rstd, mean, layouts[0] != "contiguous"))
        uses.append(Normalized(2 * y, x, rstd))
        uses.append(Normalized(y, with_bias=True))
    alone = [norm_layer_gradients.norm_layer_gradients([use])[0] for use in uses]
    for use, found, by_itself in zip(
        uses, norm_layer_gradients.norm_layer_gradients(uses), alone, strict=True
    ):
        expected = plain_gradients(use)
        y = use.y.double()
        magnitudes = [None, y.abs().sum(1)]
        if use.x is not None:
            x, rstd = use.x.double(), use.rstd.double()[..., None]
            shift = 0 if use.mean is None else use.mean.double().abs()[..., None]
            magnitudes[0] = (y.abs() * (x.abs() + shift) * rstd).sum(1)
        assert (found[0] is None) == (expected[0] is None) == (use.x is None)
        assert (found[1] is None) == (expected[1] is None) == (not use.with_bias)
        for f, e, one, magnitude in zip(found, expected, by_itself, magnitudes, strict=True):
            if f is not None:
                assert f.dtype == torch.float32
                assert torch.equal(f, one)
                assert_within(f, e, SUM_BOUND[torch.float32] * magnitude)
                if y.shape[1] > 1:
                    assert_squares(f.square().sum(1), e.double().square().sum(1))


@on_kernels()
def test_few_copies_at_a_time(place: Place) -> None:
    """Copies operands that the kernel cannot read in parts, where they are large."""
    x, rstd = place.normal(2, 20, 24, seed=1), torch.ones(2, 20, device=place.device)
    uses = [Normalized((n * x).mT.contiguous().mT, x, rstd) for n in (1, 2, 3)]
    found, sizes, run = [], [], norm_layer_gradients._launch
    noted = lambda some, *its: (sizes.append(len(some)), run(some, *its))[1]  # noqa: E731
    for most in (1 << 26, 4 * x.nbytes):
        with (
            patch.object(norm_layer_gradients, "COPIED_BYTES", most),
            patch.object(norm_layer_gradients, "_launch", noted),
        ):
            found.append([g for g, _ in norm_layer_gradients.norm_layer_gradients(uses)])
    assert sizes == [3, 2, 1]
    assert all(map(torch.equal, *found))


@on_kernels()
def test_norm_layers_of_two_dtypes(place: Place) -> None:
    """Under autocast inputs may be wider than output gradients."""
    y, x = place.normal(2, 20, 24, seed=1), place.normal(2, 20, 24, seed=2).float() / 3
    use = Normalized(y, x, torch.ones(2, 20, device=place.device))
    found, _ = norm_layer_gradients.norm_layer_gradients([use])[0]
    expected, _ = plain_gradients(use)
    assert_squares(found.square().sum(1), expected.double().square().sum(1))


@on_kernels()
def test_rows_are_read_16_bytes_at_a_time_where_all_are_aligned(place: Place) -> None:
    """Looks at addresses after copying, as one operand may be copied beside one that is not."""
    whole, rstd = place.normal(2, 8, 49, seed=1), torch.ones(2, 8, device=place.device)
    permuted = place.normal(2, 32, 8, seed=2).mT  # as before a normalisation of channels
    right, aligned = norm_layer_gradients.launch, []
    noted = lambda *its, **options: (aligned.append(options["ALIGNED"]), right(*its, **options))  # noqa: E731
    with patch.object(norm_layer_gradients, "launch", noted):
        for first in (0, 1):
            y = whole[..., :48].contiguous()[..., first : first + 32]
            for x in (y, permuted):
                use = Normalized(y, x, rstd, None, True)
                (found,) = norm_layer_gradients.norm_layer_gradients([use])
                assert_within(found[0], plain_gradients(use)[0], 1e-2)
    assert aligned == [16, 16, 1, 1]
