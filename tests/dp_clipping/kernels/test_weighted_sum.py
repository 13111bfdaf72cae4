"""Weighted sums of per-sample gradients, against the reference implementation in float64."""

from unittest.mock import patch

import pytest
import torch

from dp_clipping.kernels import weighted_sum as weighted_sum_file
from dp_clipping.kernels.weighted_sum import weighted_sum, weighted_sum_plain, weighted_sums
from tests.support.kernel_cases import SUM_BOUND, Place, assert_within, on_kernels, poison


@on_kernels()
def test_weighted_sum(place: Place) -> None:
    """Few samples and many, whose loads are not unrolled, in several shapes."""
    many = weighted_sum_file.UNROLLED + 3
    rows = [(1, 1), (2, 5), (3, 7, 11), (many, 2 * weighted_sum_file.BLOCK + 3), (0, 4), (3, 0)]
    for shape in (*rows, *((b, d, p) for b, _, d, p in place.shapes)):
        some = place.coefficients(shape[0])
        for c in (some, torch.zeros_like(some)):
            gradients = poison(place.normal(*shape), c)
            expected = weighted_sum_plain(gradients, c)
            good = torch.where(c > 0, c, 0)
            magnitude = weighted_sum_plain(gradients.abs(), good).double()
            for values in (gradients, gradients.mT.contiguous().mT):
                for weights in (c, torch.stack((c, c - 1), dim=1)[:, 0]):
                    found = weighted_sum(values, weights)
                    assert found.dtype == torch.float32
                    assert_within(found, expected, SUM_BOUND[torch.float32] * magnitude)


@on_kernels()
def test_many_samples_of_few_values(place: Place) -> None:
    """Several samples at once, in one part and in many, beside longer ones in the same call."""
    narrow, wide = weighted_sum_file.FEW
    groups = [0, 1, 0, 1, 1]
    shapes = [(1,), (narrow,), (narrow + 1,), (wide // 8, 8), (wide + 1,)]
    for batch_size in (8, 3 * weighted_sum_file.UNROLLED, weighted_sum_file.BLOCK + 50):
        c = torch.stack([place.coefficients(batch_size) for _ in range(2)])
        several = [
            poison(place.normal(batch_size, *shape), c[group])
            for shape, group in zip(shapes, groups, strict=True)
        ]
        with patch.object(weighted_sum_file, "MANY", 8):
            sums = weighted_sums(several, c, groups)
        for g, group, found in zip(several, groups, sums, strict=True):
            magnitude = weighted_sum_plain(g.abs(), torch.where(c[group] > 0, c[group], 0)).double()
            expected = weighted_sum_plain(g, c[group])
            assert_within(found, expected, SUM_BOUND[torch.float32] * magnitude)


@pytest.mark.gpu
def test_more_elements_than_32_bits_count():
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB of free device memory")
    n = 2**31 + 5
    gradients = torch.empty(2, n, dtype=torch.bfloat16, device="cuda").normal_()
    c = torch.tensor([0.5, 2.0], device="cuda")
    total = weighted_sum(gradients, c)
    for start in (0, 2**30, 2**31 - 500, n - 1000):
        part = gradients[:, start : start + 1000]
        torch.testing.assert_close(total[start : start + 1000], weighted_sum_plain(part, c))
