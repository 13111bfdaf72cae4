"""What the tests of sharded models share: steps and runs beside one process, and what is counted.

A file says how a network is sharded, `shard(context, network)`, and hands it to the bodies here,
which run on ranks.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from ddp_by_hand.experiments.verify_correctness import reference as oracle
from ddp_by_hand.lm.layout import whole
from ddp_by_hand.lm.rank_pool import Context
from dp_clipping.model import PrivateModel
from dp_clipping.step.state import BatchNorms
from dp_clipping.step.sums.plain import Plain
from tests.dp_clipping.conftest import private, private_loss
from tests.support import zoo
from tests.support.replicas import build

LIMIT = 0.5
Shard = Callable[[Context, nn.Module], nn.Module]


def transformer() -> nn.Module:
    return zoo.seeded(lambda: zoo.transformer(d_ff=23)).double()  # 23 rows on 2 or 4 ranks


def shard_fsdp2(network: nn.Module, wrap: str, mesh, **options) -> nn.Module:
    """`fully_shard` on every layer with parameters, on every block, or on the root alone."""
    if wrap == "leaf":
        for module in network.modules():
            if module is not network and any(True for _ in module.parameters(recurse=False)):
                fully_shard(module, mesh=mesh, **options)
    elif wrap == "block":
        for block in network.blocks:
            fully_shard(block, mesh=mesh, **options)
    return fully_shard(network, mesh=mesh, **options)


def whole_gradients(model: PrivateModel) -> dict[str, Tensor]:
    """Name -> `.grad` with the parts of all ranks, on every rank."""
    if not isinstance(model.network, FullyShardedDataParallel):
        named = model.network.named_parameters()
        return {name: whole(p.grad) for name, p in named if p.requires_grad}
    group = model.network.process_group
    found = {}
    for one in model.capture.trained:
        parts: list = [None] * dist.get_world_size(group)
        dist.all_gather_object(parts, one.parameter.grad.flatten(), group=group)
        found[one.name] = torch.cat(parts).view(one.shape)
    return found


def whole_parameters(run: SimpleNamespace) -> list[Tensor]:
    network = run.model.network
    if not isinstance(network, FullyShardedDataParallel):
        return [whole(p).detach().clone() for p in network.parameters()]
    with FullyShardedDataParallel.summon_full_params(network, writeback=False):
        return [p.detach().clone() for p in network.parameters()]


def one_step(
    model: PrivateModel, batch: oracle.Batch, per_sample_loss: oracle.PerSampleLoss
) -> None:
    private_loss(model, batch, per_sample_loss).backward()
    model.finish_synchronization()


def check_sums(model: PrivateModel, expected: dict[str, Tensor]) -> None:
    found = whole_gradients(model)
    assert list(found) == list(expected)
    for name, total in found.items():
        torch.testing.assert_close(total, expected[name], rtol=1e-6, atol=1e-8)


def failed_steps(context: Context, shard: Shard, modes=("bookkeeping", "ghost")) -> None:
    """Passes fail half-way on all ranks, the first while it looks for the samples.

    Each step after one is right, with other parameters than those that may still be gathered.
    """
    batch = zoo.tokens(4, 6)
    mine = slice(2 * context.rank, 2 * context.rank + 2)
    for mode in modes:
        reference = transformer()
        model = private(shard(context, transformer()), mode, LIMIT)
        if mode == "ghost":
            model.skip_checks()
        first, second = model.network.blocks
        for register, hook in (
            (second.register_forward_pre_hook, fail),
            (first.register_forward_hook, fail_in_backward),
            (second.register_forward_pre_hook, fail),
        ):
            registered = register(hook)
            with pytest.raises(ArithmeticError):
                private_loss(model, oracle.pick(batch, mine), zoo.cross_entropy).backward()
            registered.remove()
            with torch.no_grad():
                for parameter in (*model.capture.parameters, *reference.parameters()):
                    parameter.mul_(1.25)
            one_step(model, oracle.pick(batch, mine), zoo.cross_entropy)
            gradients = oracle.per_sample_gradients(reference, batch, zoo.cross_entropy)
            check_sums(model, oracle.clipped_sum(gradients, LIMIT))
            model.clear_gradients()


def fail(*_):
    raise ArithmeticError("failed on purpose")


def fail_in_backward(module, args, output):
    output.register_hook(fail)


class Counted(TorchDispatchMode):
    """How often which collective is issued inside, by its name."""

    def __init__(self):
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            self.calls.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))

    @property
    def gathers(self) -> int:
        return sum("gather" in name for name in self.calls)

    @property
    def reductions(self) -> int:
        return sum("reduce" in name for name in self.calls)


@contextmanager
def norm_passes(counted: Counted) -> Iterator[list[int]]:
    """How much has been reduced when coefficients are known, of each backward inside."""
    found: list[int] = []
    clip = Plain.set_coefficients

    def clipping(*args: Any) -> BatchNorms:
        found.append(counted.reductions)
        return clip(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Plain, "set_coefficients", clipping)
        yield found


def ordinary_collectives(network: nn.Module, batch: oracle.Batch) -> Counted:
    """Of a step without privacy; the first one is not like the others."""
    for _ in range(2):
        with Counted() as counted:
            zoo.cross_entropy(network(batch[0]), batch[1]).sum().backward()
    return counted


def private_collectives(network: nn.Module, mode: str, batch: oracle.Batch) -> Counted:
    """Of a step with privacy, in whose norm pass nothing is reduced.

    In the first step samples are found.
    """
    model = private(network, mode, LIMIT)
    model.skip_checks()
    for _ in range(2):
        model.clear_gradients()
        with Counted() as counted, norm_passes(counted) as in_norms:
            one_step(model, batch, zoo.cross_entropy)
        assert in_norms == [0]
    return counted


class Outside(nn.Module):
    """A weight that is used where nothing captures it."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(x) + F.linear(x, self.a.weight)


def refused_steps(context: Context, shard: Shard, shard_root: Shard) -> PrivateModel:
    """A weight outside of its module, and an ordinary backward; the model that has made it."""
    x = torch.randn(3, 4)
    model = private(shard_root(context, Outside()), "bookkeeping")
    with pytest.raises(RuntimeError, match=r"a\.weight: used outside of the module"):
        private_loss(model, (x, x), zoo.product).backward()

    batch = zoo.tokens(2, 6)
    model = private(shard(context, transformer()), "bookkeeping")
    one_step(model, batch, zoo.cross_entropy)
    zoo.cross_entropy(model.network(batch[0]), batch[1]).sum().backward()
    with pytest.raises(RuntimeError, match="an ordinary backward"):
        model.gradient_buffer.watch.refuse_unclipped()
    return model


def refused_after_noise(context: Context, shard: Shard) -> None:
    """An ordinary backward between noise and step is seen; clipping and new tensors are allowed."""
    run = build(
        context, shard=partial(shard, context), name="transformer", grad_sample_mode="bookkeeping"
    )
    parameters, batches = list(run.model.network.parameters()), iter(run.loader)

    def prepare() -> None:
        run.optimizer.zero_grad()
        inputs, targets, _ = next(batches)
        run.criterion(run.model(inputs), targets).backward()
        run.optimizer.pre_step()

    inputs, targets = zoo.tokens(2, 6)
    for module, trains in ((run.model.network, True), (run.model, False)):
        prepare()
        before = whole_parameters(run)
        run.model.train(trains)
        zoo.cross_entropy(module(inputs), targets).sum().backward()
        run.model.train()
        with pytest.raises(RuntimeError, match="an ordinary backward"):
            run.optimizer.step()
        assert all(map(torch.equal, before, whole_parameters(run)))
    prepare()
    torch.nn.utils.clip_grad_norm_(parameters, 1e-3)
    run.optimizer.step()
    prepare()
    for parameter in parameters:
        parameter.grad = 0.5 * parameter.grad
    run.optimizer.step()
    assert run.optimizer.steps == 4
