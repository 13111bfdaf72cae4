"""Norms, pieces and whole gradients of a sharded network are those of one process."""

import copy
import gc
import io

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn

from ddp.sharded.internals.interface import STATUS_BYTES
from ddp_by_hand.lm.rank_pool import Context
from tests.support.beside import Beside, chain_loss, numbers, wrapped
from tests.support.on_ranks import on_ranks

TWO = (None, False)


@pytest.mark.parametrize("name", ["zero1", "zero2", "fsdp"])
@on_ranks(2)
def test_clipping_by_pytorch_is_refused_with_what_to_call(context: Context, name: str) -> None:
    """Checks that what is said is right, and that no gradient was changed, read or copied."""
    pair = Beside(context, name)
    pair.backward(chain_loss(0))
    pair.finish()
    utils, gradients = torch.nn.utils, [p.grad for p in pair.model.parameters()]
    one = gradients[0]
    for refused in (
        *(one.norm, one.numpy, one.tolist, one.sum, one.clone, one.isnan, one.data.zero_),
        *(lambda: copy.deepcopy(one), lambda: torch.save(one, io.BytesIO()), lambda: one.div_(2)),
        *(lambda: one.fill_(0), lambda: torch.nan_to_num_(one), lambda: one[:1].zero_()),
        lambda: one.__setitem__(0, 0),
        lambda: torch._foreach_mul_([one], 2),
        lambda: torch.mul(torch.ones_like(one), 2, out=one),
        lambda: dist.all_reduce(one, group=context.group),
        lambda: functional.all_reduce(one, "sum", context.group),
        lambda: utils.get_total_norm(gradients),
        lambda: utils.clip_grad_norm_(pair.model.parameters(), 0.1, error_if_nonfinite=True),
        *(lambda f=f: utils.clip_grad_norm_(pair.model.parameters(), 0.01, foreach=f) for f in TWO),
        *(lambda f=f: utils.clip_grad_value_(pair.model.parameters(), 0.1, foreach=f) for f in TWO),
    ):
        with pytest.raises(RuntimeError, match=r"model\.clip_grad_norm_\(max_norm\) in place"):
            refused()
    assert f"{one}" == f"layers.0.weight, {list(one.shape)}, divided among ranks"
    pair.compare()
    utils.clip_grad_value_(pair.reference.parameters(), 0.01)
    for *_, g in pair.model.gradient_pieces():
        g.clamp_(-0.01, 0.01)
    pair.compare()


class OfSeveralDtypes(nn.Module):
    """So small that a rank may own nothing, or only what is float32."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5))
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        self.phase = nn.Parameter(torch.ones(1, dtype=torch.complex64))
        self.none = nn.Parameter(torch.empty(0, 3))

    def forward(self, x):
        return (self.weight * x).sum() * self.scale + self.phase.abs().sum() + self.none.sum()


@pytest.mark.parametrize(("world_size", "name"), [(4, "zero1"), (2, "zero2")])
@on_ranks()
def test_ranks_without_pieces_take_part_in_the_norm(context: Context, name: str) -> None:
    pair = Beside(context, name, OfSeveralDtypes(), bucket_size_mb=None)
    pair.backward(lambda model, rank: model(numbers(5, seed=0, rank=rank, like=model)).square())
    pair.finish()
    expected = torch.nn.utils.clip_grad_norm_(pair.reference.parameters(), 0.1)
    norm = pair.model.clip_grad_norm_(0.1)
    torch.testing.assert_close(norm, expected, check_dtype=False)
    pair.compare()


@pytest.mark.parametrize("name", ["zero1", "zero2"])
@on_ranks(2)
def test_a_gradient_that_is_set_to_zero(context: Context, name: str) -> None:
    """A `.grad` that is set to zero is zero for the norm, the optimizer and the next reduction."""
    pair = Beside(context, name)
    optimizer = pair.model.make_optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
    plain = torch.optim.SGD(pair.reference.parameters(), lr=0.1, momentum=0.9)
    pair.backward(chain_loss(0))
    pair.finish()
    for model in (pair.model, pair.reference):
        list(model.parameters())[1].grad.zero_()
    expected = torch.nn.utils.clip_grad_norm_(pair.reference.parameters(), 0.1)
    torch.testing.assert_close(pair.model.clip_grad_norm_(0.1), expected)
    pair.compare()
    for _ in range(2):  # the second one without a backward: of the momentum alone
        for each in (optimizer, plain):
            each.step()
            each.zero_grad(set_to_none=False)
        pair.compare_values()
    pair.model.gradient_dtype = torch.float64
    assert all(not gradient.any() for gradient in pair.model.whole_gradients())


@pytest.mark.parametrize("name", ["zero1", "zero2", "fsdp"])
@on_ranks(2)
def test_gradients_that_are_not_reduced_are_refused(context: Context, name: str) -> None:
    """Pieces of an earlier step, or of memory that a collective is writing to, are not used."""
    pair = Beside(context, name)
    optimizer = pair.model.make_optimizer(torch.optim.SGD, lr=0.1)
    pair.backward(chain_loss(0))
    pair.finish()
    for unit in pair.model.units:
        unit.gradient.fill_(7)
    pair.zero_grad(set_to_none=True)
    with pair.model.no_sync():
        chain_loss(1)(pair.model, context.rank).backward()
    for backward in (False, True):
        if backward:
            chain_loss(2)(pair.model, context.rank).backward()
        before = [unit.shard.clone() for unit in pair.model.units]
        for call in (
            pair.model.gradient_pieces, lambda: pair.model.clip_grad_norm_(1.0), optimizer.step
        ):  # fmt: skip
            with pytest.raises(RuntimeError, match=r"call finish_gradient_synchronization\(\)"):
                call()
        for unit, values in zip(pair.model.units, before, strict=True):
            assert torch.equal(unit.shard, values)
    pair.model.finish_gradient_synchronization()
    assert pair.model.clip_grad_norm_(1.0) > 0


@pytest.mark.parametrize("name", ["zero1", "zero2", "fsdp"])
@on_ranks(2)
def test_a_plain_optimizer_is_refused_without_the_wrapper_too(context: Context, name: str) -> None:
    """Its stand-ins are known without it, and what `fsdp` had gathered is stale."""
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1, bias=False))
    model = wrapped(context, name, module)
    plain = torch.optim.SGD(module.parameters(), lr=0.1)
    output = model(torch.ones(3))
    if name != "fsdp":
        output.sum().backward()
        model.finish_gradient_synchronization()
    before = [p.detach().clone() for p in module.parameters()]
    del model, output
    gc.collect()
    if name == "fsdp":  # with gradients of one's own
        for p in module.parameters():
            p.grad = torch.ones_like(p)
    for optimizer in (plain, torch.optim.SGD([module[1].weight], lr=0.1)):
        with pytest.raises(RuntimeError, match=r"divided .*model\.make_optimizer"):
            optimizer.step()
    for p, value in zip(module.parameters(), before, strict=True):
        if name == "fsdp":
            with pytest.raises(RuntimeError, match="model was deleted, build the network again"):
                torch.equal(p, value)
        else:
            assert torch.equal(p, value)


@on_ranks(3)
def test_pieces_are_what_the_optimizer_uses(context: Context) -> None:
    """They tile the gradient over ranks, and the optimizer uses what is written to them."""
    pair = Beside(context, "zero2")
    assert pair.model.gradient_pieces() == []
    pair.backward(chain_loss(0))
    pair.finish()
    reference = dict(zip(pair.model.parameters(), pair.reference.parameters(), strict=True))
    place = {p: i for i, p in enumerate(reference)}
    owned = torch.zeros(len(reference))
    for parameter, offset, numel, gradient in pair.model.gradient_pieces():
        part = reference[parameter].grad.flatten()[offset : offset + numel]
        torch.testing.assert_close(gradient, part)
        owned[place[parameter]] += numel
        gradient.add_(1)  # as noise
    torch.distributed.all_reduce(owned, group=context.group)
    assert owned.tolist() == [p.numel() for p in reference]
    pair.model.make_optimizer(torch.optim.SGD, lr=0.1).step()
    for p, q in reference.items():
        torch.testing.assert_close(p, q - 0.1 * (q.grad + 1))


@pytest.mark.parametrize(("world_size", "name"), [(1, "zero1"), (3, "zero2"), (2, "fsdp")])
@on_ranks()
def test_ranks_tell_each_other_their_status(context: Context, name: str) -> None:
    model = wrapped(context, name)
    status = "é" * 300 if context.rank == 1 else ""
    cut = "é" * (STATUS_BYTES // 2)
    assert model.exchange(status) == ["", cut, ""][: context.world_size]
    assert model.exchange("") == [""] * context.world_size


def steps_ahead_of_its_gpu(context: Context, name: str) -> None:
    pair = Beside(context, name)
    optimizer = pair.model.make_optimizer(torch.optim.Adam, lr=0.1)
    x = numbers(4, 6, seed=0, rank=context.rank, like=pair.model)
    for is_late in (False, False, True):
        reached = torch.cuda.Event()
        if is_late:
            torch.cuda._sleep(3_000_000_000)  # cycles, at most 2 GHz
            reached.record()
        pair.model(x).square().sum().backward()
        pair.model.finish_gradient_synchronization()
        optimizer.step()
        optimizer.zero_grad()
        assert not is_late or not reached.query()
    torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["zero1", "zero2", "fsdp"])
def test_a_step_waits_for_no_gpu(gpu_ranks, name):
    gpu_ranks.run(2, steps_ahead_of_its_gpu, name)
