"""Each kind of layer: a sample beside others, whose tokens cancel or whose numbers are large."""

import pytest
import torch

from ddp_by_hand.experiments.verify_correctness import reference as oracle
from dp_clipping.capture.layer_kinds import ALL, kind_of
from tests.dp_clipping.neighbours.replay import HOSTILE, Row, check
from tests.dp_clipping.ops.records import CASES, QUIET, UNLIKE, cancelling, mode_of
from tests.support import zoo
from tests.support.private_steps import SAMPLES, gradients_of
from tests.support.turns import in_turn

pytestmark = QUIET
REMOVED = {"flat": (SAMPLES - 1, HOSTILE), "per_layer": (1, 1.0)}
"""Clipping -> which sample comes, and what its loss is multiplied by: that of large numbers, or one
whose tokens cancel if the record has tokens."""


@pytest.mark.parametrize(("record", "clipping"), in_turn(UNLIKE[::2], list(REMOVED)))
def test_a_sample_moves_the_sum_by_at_most_c(record, clipping):
    check(row_of(record, clipping, REMOVED[clipping]))


@pytest.mark.slow
@pytest.mark.parametrize("clipping", REMOVED)
@pytest.mark.parametrize("record", CASES)
def test_any_sample_moves_the_sum_by_at_most_c(record, clipping):
    check(row_of(record, clipping, *REMOVED.values()))


def row_of(record, clipping, *removed):
    case = record.case(is_first=True)
    x, y = cancelling(case.batch(SAMPLES), record.tokens, torch.float32)
    norms = oracle.norms(gradients_of(case, torch.float32))
    return Row(
        record.name, case.build, list(zip(x, y, strict=True)),
        lambda: {
            "criterion": zoo.Criterion(case.per_sample_loss, "sum"), "loss_reduction": "sum",
            "sample_rate": 1.0, "steps": 1, "noise_multiplier": 0.0, "clipping": clipping,
            "max_grad_norm": max(0.3 * float(norms.median()), 1e-6),
            "grad_sample_mode": mode_of(record, 1),
        },
        removed=removed, is_exact=clipping == "flat",
    )  # fmt: skip


def test_each_kind_has_a_record():
    records = [case.values[0] for case in CASES if not any(m.args[0] for m in case.marks)]
    modules = [module for record in records for module in record.layer().modules()]
    assert {kind_of(module) for module in modules} == set(ALL)
