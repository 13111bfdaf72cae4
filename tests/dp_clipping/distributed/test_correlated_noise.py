"""Correlated noise on ranks: rows of the dense matrix in every layout, and after a resume."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from dp_clipping import CorrelatedNoise
from dp_clipping.noise.gaussian import NoiseStream, standard_normal
from dp_clipping.noise.keys import fixed_keys
from lm.parallel import parallelize
from tests.dp_clipping.distributed import test_fsdp1, test_fsdp2
from tests.dp_clipping.noise.test_correlated import dense
from tests.support import zoo
from tests.support.meshes import square
from tests.support.replicas import build, train
from tests.support.sharded_steps import whole_parameters

BANDS, BEFORE, STEPS = 3, 3, 5
# Sums of at most 4e-7 under noise of σC = 1: what a step applies is its noise, over 4 samples.
OPTIONS = {
    "name": "transformer", "noise_mechanism": CorrelatedNoise(bands=BANDS), "sampling": "cyclic",
    "max_grad_norm": 1e-7, "noise_multiplier": 1e7,
}  # fmt: skip


def over_two_axes(context, network):
    return parallelize(network, square("data", "tensor"))


def over_tensor(context, network):
    mesh = DeviceMesh.from_group(context.group, "cpu", mesh_dim_names=("tensor",))
    return parallelize(network, mesh)


SHARDS = {
    "alone": (1, None),
    "fsdp1": (2, test_fsdp1.sharded),
    "fsdp2": (2, test_fsdp2.sharded),
    "fsdp2 on four": (4, test_fsdp2.sharded),
    "tensor": (2, over_tensor),
    "fsdp2 x tensor": (4, over_two_axes),
    **{variant: (2, variant) for variant in ("ddp_bucketed", "zero1", "zero2", "fsdp")},
}


def started(context, how: str):
    ranks, shard = SHARDS[how]
    if ranks == 1:
        return build(**OPTIONS)
    if isinstance(shard, str):
        return build(context, shard, **OPTIONS)
    return build(context, shard=partial(shard, context), **OPTIONS)


def trained(context, how: str, path: str | None = None, resume: bool = False):
    run = started(context, how)
    checkpoint = {"path": path, "module": run.model, "optimizer": run.optimizer}
    if resume:
        run.engine.load_checkpoint(**checkpoint, data_loader=run.loader)
        assert run.optimizer.steps == BEFORE
        train(run, STEPS - BEFORE)
    elif path is not None:
        train(run, BEFORE)
        run.engine.save_checkpoint(**checkpoint, data_loader=run.loader)
    else:
        train(run, STEPS)
    return values_of(run)


def values_of(run) -> list[torch.Tensor]:
    whole = getattr(run.optimizer.model.module, "whole_parameters", nullcontext)  # of ddp's fsdp
    with whole():
        return whole_parameters(run)


def at(cpu_ranks, how: str, *arguments):
    ranks = SHARDS[how][0]
    if ranks == 1:
        return [trained(None, how, *arguments)]
    return cpu_ranks.run(ranks, trained, how, *arguments)


def expected(steps: int = STEPS) -> list[torch.Tensor]:
    """Parameters after steps of SGD (lr 0.1, momentum 0.9) on rows of W z / 4, in float64."""
    key = fixed_keys(torch.Generator().manual_seed(5)).noise
    found = []
    for name, parameter in zoo.BY_NAME["transformer"].build().named_parameters():
        streams = [NoiseStream.derive(key, step=t, parameter=name, share=0) for t in range(steps)]
        z = [standard_normal(parameter.numel(), one, device="cpu").double() for one in streams]
        value, velocity = parameter.detach().double(), torch.zeros(parameter.shape).double()
        for row in dense(BANDS, steps) @ torch.stack(z):
            velocity = 0.9 * velocity + row.view(parameter.shape) / 4
            value = value - 0.1 * velocity
        found.append(value)
    return found


def check(found: list[list[torch.Tensor]]) -> None:
    for of_rank in found:
        for one, other in zip(of_rank, expected(), strict=True):
            torch.testing.assert_close(one.double(), other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("how", SHARDS)
def test_noise_is_that_of_the_dense_matrix(cpu_ranks, how):
    check(at(cpu_ranks, how))


@pytest.mark.filterwarnings("ignore:.*so noise and samples come from a new key")
@pytest.mark.parametrize(
    ("before", "after"),
    [("fsdp2 x tensor", "fsdp2"), ("fsdp2", "fsdp2 x tensor"), ("tensor", "alone")],
)
def test_a_resume_on_another_layout_takes_back_the_same_noise(cpu_ranks, tmp_path, before, after):
    """The new key of another number of ranks is the same one, since keys are fixed here."""
    path = str(tmp_path / "checkpoint")
    at(cpu_ranks, before, path)
    check(at(cpu_ranks, after, path, True))
