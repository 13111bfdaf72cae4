"""Norms, pieces and whole gradients of a sharded network are those of one process."""

import copy
import gc
import io
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn

from ddp import wrap
from ddp.sharded.internals.interface import STATUS_BYTES
from ddp.torch_compat import without_torch_functions
from ddp_by_hand.lm.rank_pool import Context
from tests.support.beside import Beside, Chain, chain_loss, numbers, small_buckets, whole_values
from tests.support.differences import any_order
from tests.support.on_ranks import on_ranks


def clipped(context: Context, name: str) -> None:
    for max_norm in (0.1, 1e9):
        pair = Beside(context, name, Chain(), **small_buckets(name))
        pair.backward(chain_loss(0))
        pair.finish()
        expected = torch.nn.utils.clip_grad_norm_(pair.reference.parameters(), max_norm)
        torch.testing.assert_close(pair.model.clip_grad_norm_(max_norm), expected)
        pair.compare()


def test_clipping_takes_the_norm_over_all_ranks(cpu_ranks):
    for world_size, name in ((3, "zero1"), (2, "zero2")):
        cpu_ranks.run(world_size, clipped, name)


@pytest.mark.parametrize("name", ["zero1", "zero2", "fsdp"])
@on_ranks(2)
def test_clipping_by_pytorch_is_refused_with_what_to_call(context: Context, name: str) -> None:
    """What it says is right; nothing has changed before; other reading gives NaN."""
    pair = Beside(context, name, Chain(), **small_buckets(name))
    pair.backward(chain_loss(0))
    pair.finish()
    utils, gradients = torch.nn.utils, [p.grad for p in pair.model.parameters()]
    for foreach in (None, False):
        for refused in (
            lambda f=foreach: utils.clip_grad_norm_(pair.model.parameters(), 0.01, foreach=f),
            lambda f=foreach: utils.clip_grad_value_(pair.model.parameters(), 0.01, foreach=f),
            lambda: utils.get_total_norm(gradients),
            lambda: utils.clip_grad_norm_(pair.model.parameters(), 0.1, error_if_nonfinite=True),
            *(gradients[0].norm, gradients[0].numpy, gradients[0].tolist),
            lambda: gradients[0].div_(2),
        ):
            with pytest.raises(RuntimeError, match=r"model\.clip_grad_norm_\(max_norm\) in place"):
                refused()
    assert all(g.sum().isnan() and copy.deepcopy(g).isnan().all() for g in gradients)
    torch.save(gradients, file := io.BytesIO())
    file.seek(0)
    assert all(g.isnan().all() for g in torch.load(file))
    pair.compare()
    utils.clip_grad_value_(pair.reference.parameters(), 0.01)
    for *_, g in pair.model.gradient_pieces():
        g.clamp_(-0.01, 0.01)
    pair.compare()


@pytest.mark.parametrize("name", ["zero1", "zero2", "fsdp"])
@on_ranks(2)
def test_views_of_divided_gradients(context: Context, name: str) -> None:
    """What is written to a view of `.grad` is refused, of one element too; zero clears it."""
    pair = Beside(context, name, OfOneAndOfMany())
    for clear in (lambda g: g.data.zero_(), lambda g: g.detach().view(-1).fill_(0)):
        pair.backward(lambda model, rank: model(numbers(5, seed=rank, rank=rank, like=model)))
        pair.finish()
        for p in pair.model.parameters():
            for write in (
                lambda g: g.data.clamp_(-0.01, 0.01),
                lambda g: g.detach()[..., :1].mul_(2),
                lambda g: g.data.view(-1).div_(2),
                lambda g: g.clamp_(-0.01, 0.01),
                lambda g: torch.nan_to_num_(g.data),
                lambda g: torch._foreach_mul_([g.data], 2),
                lambda g: torch.mul(torch.ones_like(g), 2, out=g.data),
                lambda g: g.data.norm(),
                lambda g: g.unbind(0)[0].mul_(2),
                lambda g: g.data.chunk(1)[0].mul_(2),
                lambda g: g.fill_(3.0),
                lambda g: torch.frexp(torch.ones_like(g), out=(g.data, g.int())),
                lambda g: dist.all_reduce(g, group=context.group),
                lambda g: functional.all_reduce(g, "sum", context.group),
            ):
                with pytest.raises(RuntimeError, match="gradients are divided among ranks"):
                    write(p.grad)
            assert "divided among ranks" in repr(p.grad.data)
        for clear_part in (
            lambda g: g[0].zero_(), lambda g: g.data[:1].fill_(0), lambda g: g.split(1)[0].zero_(),
            lambda g: g.__setitem__(slice(0, 2), 0),
        ):  # fmt: skip
            with pytest.raises(RuntimeError, match="gradients are divided among ranks"):
                clear_part(pair.model.module.weight.grad)
        pair.compare()
        for model in (pair.model, pair.reference):
            for p in model.parameters():
                clear(p.grad)
        pair.compare()


class OfOneAndOfMany(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(1))

    def forward(self, x):
        return ((self.weight * x).sum() * self.scale).sum()


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


def clipped_in_several_dtypes(context: Context, name: str) -> None:
    pair = Beside(context, name, OfSeveralDtypes(), bucket_size_mb=None)
    pair.backward(lambda model, rank: model(numbers(5, seed=0, rank=rank, like=model)).square())
    pair.finish()
    expected = torch.nn.utils.clip_grad_norm_(pair.reference.parameters(), 0.1)
    norm = pair.model.clip_grad_norm_(0.1)
    torch.testing.assert_close(norm, expected, check_dtype=False)
    pair.compare()


def test_ranks_without_pieces_take_part_in_the_norm(cpu_ranks):
    for world_size, name in ((4, "zero1"), (2, "zero2")):
        cpu_ranks.run(world_size, clipped_in_several_dtypes, name)


def set_to_zero(context: Context, name: str) -> None:
    """A `.grad` that is set to zero is zero for the norm, the optimizer and the next reduction."""
    pair = Beside(context, name, Chain(), **small_buckets(name))
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
        for p, q in zip(pair.model.parameters(), pair.reference.parameters(), strict=True):
            torch.testing.assert_close(p, q)
    pair.model.gradient_dtype = torch.float64
    assert all(not gradient.any() for gradient in pair.model.whole_gradients())


def test_a_gradient_that_is_set_to_zero(cpu_ranks):
    for name in ("zero1", "zero2"):
        cpu_ranks.run(2, set_to_zero, name)


def too_early(context: Context, name: str) -> None:
    """Pieces of an earlier step, or of memory that a collective is writing to, are not used."""
    pair = Beside(context, name, Chain(), **small_buckets(name))
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


def test_gradients_that_are_not_reduced_are_refused(cpu_ranks):
    for name in ("zero1", "zero2", "fsdp"):
        cpu_ranks.run(2, too_early, name)


def wrapper_has_gone(context: Context, name: str) -> None:
    """Its stand-ins and slices are known without it; sparse gradients beside them are none."""
    module = nn.ModuleList([nn.Linear(3, 3), nn.Linear(1, 1, bias=False)])
    model = wrap(name, module, process_group=context.group)
    plain = torch.optim.SGD(module.parameters(), lr=0.1)
    with model.no_sync() if name == "fsdp" else nullcontext():
        for layer in module:
            layer.weight.sum().backward() if name == "fsdp" else None
    if name != "fsdp":
        for p in module.parameters():
            p.grad = torch.ones_like(p)
            model.gradient_ready(p)
        model.finish_gradient_synchronization()
    before = [p.detach().clone() for p in module.parameters()]
    del model
    gc.collect()
    for optimizer in (plain, torch.optim.SGD([module[1].weight], lr=0.1)):
        with pytest.raises(RuntimeError, match=r"SGD steps whole parameters.*wrap the network"):
            optimizer.step()
    for p, value in zip(module.parameters(), before, strict=True):
        if name == "fsdp":
            with pytest.raises(RuntimeError, match="the wrapper that has divided it is deleted"):
                torch.equal(p, value)
        else:
            assert torch.equal(p, value)
    table = nn.Embedding(2, 2, sparse=True)
    table(torch.tensor([0])).sum().backward()
    torch.optim.SGD(table.parameters(), lr=0.1).step()


def test_a_plain_optimizer_is_refused_without_the_wrapper_too(cpu_ranks):
    for name in ("zero1", "zero2", "fsdp"):
        cpu_ranks.run(2, wrapper_has_gone, name)


@on_ranks(2)
def test_a_plain_optimizer_is_refused_on_stale_parameters(context: Context) -> None:
    """What `fsdp` had gathered is stale, and a gradient of one's own does not change that."""
    module = nn.Sequential(nn.Linear(3, 3))
    model = wrap("fsdp", module, process_group=context.group)
    output = model(torch.ones(3))
    assert not module[0].weight.isnan().any()
    del model, output
    gc.collect()
    for p in module.parameters():
        p.grad = torch.ones_like(p)
    with pytest.raises(RuntimeError, match="SGD steps whole parameters"):
        torch.optim.SGD(module.parameters(), lr=0.1).step()


def pieces(context: Context) -> None:
    """They tile the gradient over ranks, and the optimizer uses what is written to them."""
    pair = Beside(context, "zero2", Chain(), **small_buckets("zero2"))
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


def test_pieces_are_what_the_optimizer_uses(cpu_ranks):
    cpu_ranks.run(3, pieces)


def in_another_format(context: Context, name: str) -> None:
    """Strides that parameters are given after `wrap` are not kept, and change no number."""
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2))
    pair = Beside(context, name, network, **small_buckets(name), **any_order(name))
    ours = pair.model.make_optimizer(torch.optim.SGD, lr=0.1)
    plain = torch.optim.SGD(pair.reference.parameters(), lr=0.1)
    for step in range(3):
        pair.model.to(memory_format=torch.channels_last)
        loss = partial(squares, step)
        pair.backward(loss)
        pair.finish()
        ours.step()
        plain.step()
        pair.zero_grad(set_to_none=True)
    for p, q in zip(whole_values(pair.model), pair.reference.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def squares(seed: int, model: nn.Module, rank: int) -> torch.Tensor:
    return model(numbers(2, 3, 4, 4, seed=seed, rank=rank, like=model)).square().sum()


def test_a_memory_format_given_after_wrap(cpu_ranks):
    for name in ("zero1", "zero2", "fsdp"):
        cpu_ranks.run(2, in_another_format, name)


def written_to_one_element(context: Context, name: str) -> None:
    """A number other than zero that C++ leaves in a stand-in is no gradient: it shows as NaN."""
    pair = Beside(context, name, OfSeveralDtypes(), **any_order(name))
    optimizer = pair.model.make_optimizer(torch.optim.SGD, lr=0.1)
    pair.backward(lambda model, rank: model(numbers(5, seed=0, rank=rank, like=model)).square())
    pair.finish()
    with without_torch_functions():
        pair.model.module.scale.grad.fill_(2.0)
    optimizer.step()
    values = whole_values(pair.model)
    assert [bool(x.isnan().any()) for x in values] == [False, True, False, False]


def test_a_stand_in_of_one_element_that_is_written_to(cpu_ranks):
    cpu_ranks.run(2, written_to_one_element, "zero1")


def told(context: Context, name: str) -> None:
    model = wrap(name, Chain().to(context.device), process_group=context.group)
    status = "é" * 300 if context.rank == 1 else ""
    cut = "é" * (STATUS_BYTES // 2)
    assert model.exchange(status) == ["", cut, ""][: context.world_size]
    assert model.exchange("") == [""] * context.world_size


def test_ranks_tell_each_other_their_status(cpu_ranks):
    for world_size, name in ((1, "zero1"), (3, "zero2"), (2, "fsdp")):
        cpu_ranks.run(world_size, told, name)


def steps_ahead_of_its_gpu(context: Context, name: str) -> None:
    pair = Beside(context, name, Chain(), **small_buckets(name))
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
