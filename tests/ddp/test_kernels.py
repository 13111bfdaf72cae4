"""Compares the two kernels of the course with their definitions and reference implementations."""

import torch

from ddp.internals import kernels
from tests.support.kernel_cases import Place, on_kernels

SIZES = [0, 1, 127, 4096, 2 * 4096 + 5]
LARGE = 1_000_003  # on a GPU
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
TOLERANCE = dict(zip(DTYPES, (1e-6, 2e-3, 2e-2, 1e-14), strict=True))


def sizes(place: Place) -> list[int]:
    return SIZES if place.device == "cpu" else [*SIZES, LARGE]


def guarded(place: Place, n: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns normal values [n], and what lies behind them, which is NaN."""
    around = torch.full((n + 8,), torch.nan, dtype=dtype, device=place.device)
    around[:n] = place.normal(n, seed=n)
    return around[:n], around[n:]


@on_kernels(DTYPES)
def test_the_sum_of_pulled_chunks(place: Place) -> None:
    close = {"rtol": TOLERANCE[place.dtype], "atol": TOLERANCE[place.dtype]}
    for n in sizes(place):
        for rows, scale in ((0, 1.0), (1, 0.5), (3, 0.25)):
            mine, behind = guarded(place, n, place.dtype)
            pulled = place.normal(rows, n + 3)[:, :n]
            expected = mine.clone()
            exact = (mine.double() + pulled.double().sum(0)) * scale
            kernels.combine_plain(expected, pulled, scale)
            kernels.combine_kernel_launch(mine, pulled, scale)
            torch.testing.assert_close(mine, expected, **close)
            torch.testing.assert_close(mine.double(), exact, **close)
            assert behind.isnan().all(), "written behind its end"


def test_the_sum_is_of_float32_or_wider():
    """Sixteen-bit values are rounded once: 2048 + 1 + 1 is 2050, not 2048."""
    for dtype in DTYPES:
        mine, pulled = torch.tensor([2048.0], dtype=dtype), torch.ones(2, 1, dtype=dtype)
        kernels.combine(mine, pulled, 1.0)
        assert mine.item() == torch.tensor(2050.0, dtype=dtype).item()


@on_kernels(DTYPES)
def test_what_was_written_to_gathered_values_is_kept(place: Place) -> None:
    wide = torch.promote_types(place.dtype, torch.float32)
    for n in sizes(place):
        shard, behind = guarded(place, n, wide)
        own = shard.to(place.dtype, copy=True)
        own[::3] += 1
        own[1::300] = torch.nan
        own[2::300] = torch.inf
        expected = shard.clone()
        is_other = own != shard.to(place.dtype)
        by_definition = torch.where(is_other, own.to(wide), shard)
        kernels.take_written_plain(own, expected)
        kernels.take_written_kernel_launch(own, shard)
        for found in (expected, shard):
            torch.testing.assert_close(found, by_definition, rtol=0, atol=0, equal_nan=True)
        assert behind.isnan().all(), "written behind its end"
