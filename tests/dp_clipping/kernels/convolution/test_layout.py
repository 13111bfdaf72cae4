"""Convolutions on the kernels of linear layers, against the reference implementation in float64."""

from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from dp_clipping.clipping.accumulation import full_float32
from dp_clipping.kernels.coefficients import SortedCoefficients
from dp_clipping.kernels.convolution import factors as of_factors
from dp_clipping.kernels.convolution import layout as of_layout
from dp_clipping.kernels.convolution.factors import take_norms
from dp_clipping.kernels.convolution.geometry import (
    NONE,
    ONE,
    Geometry,
    Packed,
    gradients_plain,
)
from dp_clipping.kernels.convolution.layout import ConvolutionFactors, weight_of
from dp_clipping.kernels.convolution.packing import pack, packed_at_a_time
from dp_clipping.kernels.gradient import squares_of_tiles
from dp_clipping.kernels.weighted_product import weighted_products
from dp_clipping.kernels.weighted_sum import weighted_sums
from tests.support.convolution_cases import DTYPES, TF32, WIDE, operands
from tests.support.kernel_cases import Place, on_kernels


def factors(x: Tensor, y: Tensor, case: tuple, tf32: bool = True) -> ConvolutionFactors:
    size, _, channels, outputs, _, geometry = case
    shape = torch.Size((outputs, channels // geometry.groups, *geometry.taps))
    with nullcontext() if tf32 else full_float32(layers=True):
        return ConvolutionFactors(x, y, shape, size, geometry)


def total_of(use: ConvolutionFactors, c: Tensor) -> Tensor:
    """Returns Σ_i c_i G_i, as `Fused.sums` forms it."""
    c = c if use.scale is None else c * use.scale
    if use.gradients is not None:
        totals = weighted_sums([use.gradients], c[None], [0])
    else:
        pairs = use.summands
        totals = weighted_products(pairs, SortedCoefficients.of(c), [0] * len(pairs))
    return weight_of(totals, use.layout, use.shape)


def norm_of(use: ConvolutionFactors, keep: bool = True, most: int = 1 << 26) -> tuple[Tensor, bool]:
    """Returns squared norms [B], and whether they are exact."""
    norms, tiled = take_norms([use], keep, most)
    if tiled:
        ((_, tiles, groups, scale),) = tiled
        return squares_of_tiles([tiles], [groups], [scale], use.batch_size)[0], True
    ((_, (squares,), _, _, _),) = norms
    return squares, False


def kept(use: ConvolutionFactors) -> tuple[Tensor, bool]:
    """Takes the norm and keeps G, also where operands are smaller."""
    with patch.object(of_factors, "samples_at_a_time", lambda *_: max(1, use.batch_size)):
        return norm_of(use)


def not_kept(use: ConvolutionFactors) -> tuple[Tensor, bool]:
    return norm_of(use, keep=False)


@on_kernels(tf32=True)
def test_norms_and_sums(place: Place) -> None:
    device, dtype, tf32 = place.device, place.dtype, place.tf32
    bound = TF32 if tf32 else DTYPES[dtype]
    for case in WIDE:
        size = case[0]
        x, y, right = operands(case, dtype, device)
        squares = right.square().sum((1, 2, 3))
        x[-1], y[-1] = torch.nan, torch.inf  # a sample that is left out is not read
        c = torch.rand(size, device=device)
        c[-1] = 0
        expected = (c[:-1, None, None, None] * right[:-1]).sum(0)
        for take in (kept, not_kept):
            use = factors(x, y, case, tf32)
            norms, are_exact = take(use)
            if are_exact:  # norms from Gram matrices have a test of their own
                torch.testing.assert_close(
                    norms[:-1].double(), squares[:-1], rtol=2 * bound, atol=0
                )
            assert not norms[-1].isfinite()
            total = total_of(use, c).flatten(2).double()
            assert (total - expected).abs().max() <= bound * expected.abs().max()


@on_kernels(tf32=True)
def test_what_is_normed_is_what_is_summed(place: Place) -> None:
    """The kept G have the norms that were taken, whether or not operands were scaled."""
    for case in WIDE:
        x, y, _ = operands(case, place.dtype, place.device)
        use = factors(x, y, case, place.tf32)
        norms, _ = kept(use)
        for i in range(case[0]):
            one = torch.zeros(case[0], device=place.device)
            one[i] = 1
            found = total_of(use, one).double().square().sum()
            torch.testing.assert_close(norms[i].double(), found, rtol=1e-6, atol=0)


@on_kernels(dtypes=(), tf32=True)
def test_small_numbers(place: Place) -> None:
    """Norms of samples whose scale has a square below float32's least number."""
    case = WIDE[0]
    x, y, right = operands(case, torch.float32, place.device)
    norms, _ = kept(factors(x * 2.0**-24, y * 2.0**-26, case))
    expected = right.square().sum((1, 2, 3)) * 2.0**-100
    torch.testing.assert_close(norms.double(), expected, rtol=2 * TF32, atol=0)


@on_kernels()
def test_pieces(place: Place) -> None:
    """Packed one sample after another, large operands have the same G and norms.

    Where a launch would have too few programs, all are packed.
    """
    case = (3, 2, 16, 8, (1, 9, 9), Geometry((1, 3, 3), (1, 1, 1), (0, 1, 1), (1, 1, 1), 1))
    x, y, right = operands(case, place.dtype, place.device)
    found, packs = [], []

    def counting(x: Tensor, *rest: Any) -> Packed:
        packs.append(len(x))
        return pack(x, *rest)

    for most, programs in ((1 << 26, 1), (1, 1), (1, 10)):
        of_factors.samples_at_a_time.cache_clear()
        with (
            patch.object(of_factors, "LEAST_PROGRAMS", programs),
            patch.object(of_factors, "pack", counting),
            patch.object(of_layout, "pack", counting),
        ):
            use = factors(x, y, case)
            squares, _ = norm_of(use, most=most)
            found.append((squares, total_of(use, torch.ones(3, device=place.device))))
    of_factors.samples_at_a_time.cache_clear()
    assert packs == [6] + [2] * 3 + [6]
    for one, other, as_before in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6 * one.abs().max().item())
        assert torch.equal(one, as_before)
    bound = TF32 if place.dtype == torch.float32 else DTYPES[place.dtype]  # PyTorch's default
    error = (found[1][1].flatten(2).double() - right.sum(0)).abs().max()
    assert error <= bound * right.abs().max()


def test_pieces_grow_with_the_memory_that_is_freed():
    """In MiB: half of it, a power of two, and never less than what may be packed in any case."""
    for freed, packed in ((-1, 64), (0, 64), (255, 64), (256, 128), (511, 128), (9999, 256)):
        assert packed_at_a_time(freed << 20) == packed << 20


@on_kernels(tf32=True)
def test_nothing(place: Place) -> None:
    """No samples, and output gradients of zero."""
    geometry = Geometry((1, 1, 1), (1, 1, 1), (0, 0, 0), (1, 1, 1), 1)
    for size in (0, 2):
        case = (size, 1, 16, 16, (1, 2, 2), geometry)
        zeros = torch.zeros(size, 16, 1, 2, 2, device=place.device, dtype=place.dtype)
        for take in (kept, not_kept):
            use = factors(zeros, zeros, case)
            norms, _ = take(use)
            assert norms.shape == (size,)
            assert not norms.any()
            if size:
                assert not total_of(use, torch.ones(size, device=place.device)).any()


@on_kernels(dtypes=(), tf32=True)
def test_several_uses_have_scales_of_their_own(place: Place) -> None:
    """Packs uses together; pixels that no tap meets have no part in the scale of a folded one."""
    geometry = Geometry((1, 3, 3), ONE, (0, 1, 1), ONE, 1)
    few = Geometry((1, 2, 2), (1, 3, 3), NONE, ONE, 1)
    uses, expected = [], []
    for scale, channels, own in ((1e-12, 8, geometry), (1e6, 8, geometry), (1.0, 2, few)):
        x = torch.randn(2, channels, 1, 8, 8) * scale
        y = torch.randn(2, 8, 1, *((8, 8) if own is geometry else (3, 3)))
        if own is few:
            x[..., 2::3] = 1e30
        g = gradients_plain(x.double(), y.double(), own, 2)
        expected.append(g.square().flatten(1).sum(1))
        shape = torch.Size((8, channels, *own.taps))
        given = x.to(place.device), y.to(place.device)
        uses.append(ConvolutionFactors(*given, shape, 2, own, rounds=True))
    _, tiled = take_norms(uses, True)
    numbers, *tiles = zip(*tiled, strict=True)
    found = squares_of_tiles(*tiles, 2).double().cpu()
    wanted = torch.stack([expected[n] for n in numbers])
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=0)
