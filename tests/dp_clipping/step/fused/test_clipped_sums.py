"""Clipped sums of many parameters in few launches, beside sums one by one."""

import pytest
import torch

pytest.importorskip("triton")

from contextlib import nullcontext
from types import SimpleNamespace

from dp_clipping.capture.checks.kept import Kept
from dp_clipping.kernels.embedding import TokenSums
from dp_clipping.kernels.sorted_coefficients import Coefficients
from dp_clipping.kernels.weighted_product import weighted_product_plain
from dp_clipping.kernels.weighted_sum import weighted_sum_plain
from dp_clipping.layers.linear_factors import LinearFactors
from dp_clipping.step.fused.clipped_sums import FusedSums, clipped_sums
from dp_clipping.step.fused.launch_schedule import LaunchSchedule
from tests.dp_clipping.conftest import trained
from tests.support.kernel_cases import Place, on_kernels


@on_kernels()
def test_clipped_sums(place: Place) -> None:
    """Of every kind, in the order of arrival; what they were formed of is let go."""
    device, dtype, tile = place.device, place.dtype, place.tile
    torch.manual_seed(0)
    c = torch.tensor([[0.5, 0.0, 2.0], [1.0, 0.25, 1e-6]], device=device)
    ids = torch.tensor([[0, 1, 1], [2, 2, 2], [3, 0, 3]], device=device)
    draw = lambda *shape: torch.randn(3, *shape).to(device, dtype)  # noqa: E731
    y, tokens, arrived = draw(20, 16), draw(3, 8), [draw(5, 6), draw(20, 24), draw(7)]
    single = draw(1, 20), draw(1, 16)
    for x in single:
        x[1] = float("nan")  # a sample of which c is 0 is not read
    one_hot = torch.nn.functional.one_hot(ids, 4).to(dtype)
    parts = {  # arrival -> what it leaves, its clipping group, and the same as a product y aᵀ
        "linear": (LinearFactors(arrived[1], y, False), 4, (y, arrived[1])),
        "dense": (arrived[0], 9, None),
        "embedding": (TokenSums.of(ids, tokens), 4, (one_hot, tokens)),
        "transposed": (LinearFactors(arrived[1], y, True), 9, (arrived[1], y)),
        "bias": (arrived[2], 4, None),
        "one token": (LinearFactors(single[1], single[0], False), 9, single),
        "one token, transposed": (LinearFactors(*single, True), 9, single),
    }
    table = torch.nn.Parameter(torch.empty(4, 8))  # only an embedding's shape is asked for
    names = {trained(table, name, parts[name][1]): name for name in parts}
    saved = [(p, parts[name][0]) for p, name in names.items()]
    size = None if tile is None else tile.rows
    label = lambda *_: nullcontext()  # noqa: E731
    totals = clipped_sums(saved, Coefficients(c, {9: 0, 4: 1}), size, label)
    assert [names[p] for p, _ in totals] == list(parts)
    assert saved == []
    for parameter, total in totals:
        one, group, product = parts[names[parameter]]
        own = c[{9: 0, 4: 1}[group]]
        expected = (
            weighted_sum_plain(one, own) if product is None
            else weighted_product_plain(*product, own)
        )  # fmt: skip
        torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-5)


def test_a_sum_that_takes_more_than_it_frees_is_formed_last(monkeypatch):
    """An embedding's, of which compiled code delivers the operands first."""
    capture = SimpleNamespace(sharding=None)
    timer = SimpleNamespace(layers=None)
    schedule = LaunchSchedule(None, torch.device("cpu"))
    sums = FusedSums(capture, None, timer, None, schedule, Kept(), compiled=True)
    sums.begin()
    table, *weights = (trained(torch.nn.Parameter(torch.empty(n))) for n in (1000, 10, 20))
    sums.kept = {p: torch.empty(8, 30) for p in (table, *weights)}
    formed, sums.scale = [], None
    monkeypatch.setattr(sums, "form", lambda saved, scale: formed.extend(p for p, _ in saved))
    sums.end()
    assert [id(p) for p in formed] == [id(p) for p in (*weights, table)]
