"""Clipping coefficients in one launch, against the reference implementation in float64."""

import torch

from dp_clipping.clipping.coefficients import HIGHEST, LOWEST
from dp_clipping.kernels.coefficients import clip_coefficients, clip_coefficients_plain
from tests.support.kernel_cases import Place, on_kernels


@on_kernels(dtypes=[torch.float32])
def test_coefficients(place: Place) -> None:
    device = place.device
    torch.manual_seed(0)
    inf, nan = torch.inf, torch.nan
    for batch_size in (1, 5, 130):
        table = torch.rand(7, batch_size, device=device) * 10 ** torch.randn(7, 1, device=device)
        scales = table.sqrt() * 3
        errors = torch.tensor([[0, 0], [2.0**-16, 1e-4]] * 3 + [[0, 0]], device=device)
        starts = torch.tensor([0, 3, 3, 7], dtype=torch.int32, device=device)
        clip_norms = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64, device=device)
        for wrong in (None, inf, -inf, nan, -1e-3):
            if wrong is not None:
                table[4, -1] = wrong
            for gamma in (None, 0.01):
                before = torch.zeros(batch_size, dtype=torch.bool, device=device)
                before[::50] = batch_size > 5
                bad, expected_bad = before.clone(), before.clone()
                arguments = (table, scales, errors, starts, clip_norms, 1 + 2e-5, gamma)
                found = clip_coefficients(*arguments, bad)
                expected = clip_coefficients_plain(*arguments, expected_bad)
                torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
                assert not found[:, bad].any()
                assert torch.equal(bad, expected_bad)
                before[-1] |= wrong is not None and not abs(wrong) < inf
                assert torch.equal(bad, before)
    many = torch.full((1001, 1), 2.9e-8, device=device)  # each lost beside the first in float32
    many[0] = 1.0
    starts = torch.tensor([0, 1001], dtype=torch.int32, device=device)
    nothing = torch.zeros(1001, 2, device=device)
    clip_norms = torch.tensor([0.5], dtype=torch.float64, device=device)
    bad = torch.zeros(1, dtype=torch.bool, device=device)
    c = clip_coefficients(many, many, nothing, starts, clip_norms, 1.0, None, bad)
    assert (c.double() * many.double().sum().sqrt() / 0.5 - 1).abs().item() < 1e-6
    squares = torch.tensor([[0.0, 1e-38, 1.0, 3e38]], device=device)
    starts, bad = starts.clone().fill_(1), torch.zeros(4, dtype=torch.bool, device=device)
    starts[0] = 0
    for limit in (LOWEST, HIGHEST):
        clip_norms = torch.tensor([limit], dtype=torch.float64, device=device)
        for gamma in (None, LOWEST):
            arguments = (squares, squares, nothing[:1], starts, clip_norms, 1.0, gamma)
            c = clip_coefficients(*arguments, bad.clone())
            assert c.isfinite().all(), "an infinite one times zero would be NaN"
            assert (c.double() * squares.double().sqrt() <= limit * (1 + 1e-6)).all()
            expected = clip_coefficients_plain(*arguments, bad.clone())
            torch.testing.assert_close(c, expected, rtol=1e-3, atol=0)
