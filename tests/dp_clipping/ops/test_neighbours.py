"""A step recorded on neighbouring data: without one of its samples, the clipped sum moves by ≤ C.

A sample alone is in test_ops.py. Here the others are there too, so that what samples share counts:
a norm that is added to another's, a sum in 16 bit, a scale of the batch.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ddp_by_hand.experiments.verify_correctness import reference as oracle
from tests.dp_clipping.conftest import skip_all_checks
from tests.dp_clipping.ops.test_ops import ALIKE, CASES, cancelling, mode_of
from tests.support import zoo
from tests.support.private_steps import SAMPLES, Way, gradients_of, make_private, step
from tests.support.turns import in_turn

pytestmark = [
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
    pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight"),
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN"),
    pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask"),
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True"),
]
EVERYONE = tuple(range(SAMPLES))
REMOVED = ((1, 1.0), (SAMPLES - 1, -1000.0))
"""A sample, and what its loss is multiplied by: one whose tokens cancel, if the record has tokens,
and one with large numbers, which points the other way."""


def sums_of(run, way: Way, samples: list[int], factors: list[float]) -> Tensor:
    """Returns the clipped sum of a step on these samples, in one vector."""
    weights = torch.tensor([factors[i] for i in samples], dtype=way.dtype)
    _, sums = step(run, way, oracle.pick(run.batch, samples), weights)
    return torch.cat([one.flatten() for one in sums.values()])


def check_neighbours(case: zoo.Case, way: Way, limit: float) -> None:
    run = make_private(case, way, limit)
    skip_all_checks(run.model)
    rounding = 4 * SAMPLES * torch.finfo(torch.float32).eps
    for i, factor in REMOVED:
        rest = [other for other in EVERYONE if other != i]
        factors = [factor if other == i else 1.0 for other in EVERYONE]
        groups = ([*EVERYONE], rest, [i])
        whole, without, alone = (sums_of(run, way, samples, factors) for samples in groups)
        moved = whole - without
        assert moved.norm() <= limit * (1 + rounding), f"sample {i}: {moved.norm() / limit} C"
        assert (moved - alone).norm() <= limit * rounding
        if factor != 1.0 and way.clipping == "flat":
            assert alone.norm() >= 0.98 * limit, "or nothing was clipped"


UNLIKE = [case for case in CASES if case.id not in ALIKE]


@pytest.mark.parametrize(
    ("record", "clipping"),
    [*in_turn(UNLIKE, ("flat", "per_layer")), *in_turn(CASES, ("per_layer", "flat"), fast=0)],
)
def test_a_sample_moves_the_sum_by_at_most_c(record, clipping):
    case = record.case(is_first=True)
    batch = cancelling(case.batch(SAMPLES), record.tokens, torch.float32)
    case = replace(case, batch=lambda _: batch)
    way = Way(mode=mode_of(record, 1), dtype=torch.float32, clipping=clipping)
    norms = oracle.norms(gradients_of(case, torch.float32))
    check_neighbours(case, way, max(0.3 * float(norms.median()), 1e-6))
