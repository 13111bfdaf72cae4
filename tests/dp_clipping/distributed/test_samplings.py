"""Other samplings on several ranks: batches, steps and ε are those of one process."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from lm.rank_pool import Context
from tests.dp_clipping.distributed import test_fsdp2
from tests.dp_clipping.distributed.test_units_of_privacy import on_a_mesh
from tests.support import replicas
from tests.support.draws import joined
from tests.support.sharded_steps import whole_parameters

DELTA = 1e-3
STEPS = 8  # of epochs of 6
SAMPLINGS = [
    {"sampling": "truncated_poisson", "max_batch_size": 5},
    {"sampling": "balls_in_bins"},
    {"sampling": "cyclic"},
]
every_sampling = pytest.mark.parametrize("options", SAMPLINGS, ids=lambda x: x["sampling"])
SHARDS = {"fsdp2": test_fsdp2.sharded, "fsdp2 x tensor": on_a_mesh}


def built(context: Context | None, where: str, options: dict):
    if context is None:
        return replicas.build(name="transformer", **options)
    if where in SHARDS:
        shard = partial(SHARDS[where], context)
        return replicas.build(context, name="transformer", shard=shard, **options)
    return replicas.build(context, where, name="transformer", **options)


def found(run, drawn):
    """Returns batches, parameters and the statement after a training."""
    sharded = run.optimizer.model.sharding is not None
    values = replicas.flat(whole_parameters(run)) if sharded else replicas.parameters(run)
    batches = [sorted(joined(pieces)) for pieces in drawn]
    return batches, values, run.engine.privacy_statement(DELTA).as_dict()


def trained(context: Context | None, where: str, options: dict, microbatch: int | None = None):
    run = built(context, where, options)
    return found(run, replicas.train(run, STEPS, microbatch))


LAYOUTS = {  # ranks, microbatch, and the sampling that is drawn there in the fast suite
    "ddp_bucketed": (2, None, "truncated_poisson"),
    "zero1": (2, 1, "balls_in_bins"),
    "fsdp2": (2, None, "cyclic"),
    "fsdp2 x tensor": (4, None, "balls_in_bins"),
}


@pytest.mark.parametrize(
    ("where", "options"),
    [
        pytest.param(
            where,
            options,
            id=f"{where}-{options['sampling']}",
            marks=[] if options["sampling"] == fast else [pytest.mark.slow],
        )
        for where, (_, _, fast) in LAYOUTS.items()
        for options in SAMPLINGS
    ],
)
def test_ranks_are_one_process(cpu_ranks, where, options):
    world_size, microbatch, _ = LAYOUTS[where]
    expected, values, statement = trained(None, where, options)
    answers = cpu_ranks.run(world_size, trained, where, options, microbatch)
    shared = 2 if world_size == 4 else 1  # ranks of a tensor-parallel group have the same samples
    groups = [[batches for batches, _, _ in answers[r::shared]] for r in range(shared)]
    for ranks in groups:
        for parts, whole in zip(zip(*ranks, strict=True), expected, strict=True):
            assert sorted(joined(parts)) == whole
            assert max(map(len, parts)) - min(map(len, parts)) <= 1
    for _, others, said in answers:
        np.testing.assert_allclose(others, values, rtol=0, atol=2e-5)
        assert said == statement


def saved(context: Context, where: str, options: dict, path: Path):
    run = built(context, where, options)
    replicas.train(run, 2)
    run.optimizer.zero_grad()
    run.engine.save_checkpoint(path=path, module=run.model, optimizer=run.optimizer)
    return found(run, replicas.train(run, STEPS - 2))


def resumed(context: Context, where: str, options: dict, path: Path):
    run = built(context, where, options | {"seed": 5})
    run.engine.load_checkpoint(path=path, module=run.model, optimizer=run.optimizer)
    return found(run, replicas.train(run, STEPS - 2))


@every_sampling
def test_a_run_is_resumed_on_another_layout(cpu_ranks, tmp_path, options):
    """In the middle of an epoch: the batches are the same, however they are dealt out."""
    path = tmp_path / "run.pt"
    expected = cpu_ranks.run(2, saved, "ddp_bucketed", options, path)
    for one, other in zip(cpu_ranks.run(2, resumed, "zero2", options, path), expected, strict=True):
        assert one[0] == other[0]
        np.testing.assert_allclose(one[1], other[1], rtol=0, atol=2e-5)
        assert one[2] == other[2]


def other_caps(context: Context) -> None:
    most = 5 + context.rank
    with pytest.raises(ValueError, match=r"max_batch_size \(5 .*6"):
        replicas.build(context, sampling="truncated_poisson", max_batch_size=most)
    sampling = ("cyclic", "balls_in_bins")[context.rank]
    with pytest.raises(ValueError, match=r"sampling \('?cyclic"):
        replicas.build(context, sampling=sampling)


def test_ranks_with_other_settings_are_refused(cpu_ranks):
    cpu_ranks.run(2, other_caps)
