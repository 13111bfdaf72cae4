"""`gradient_dtype`: float32 sums for 16-bit parameters, handed over by hand or by autograd."""

import gc
import time

import pytest
import torch
from torch import Tensor, nn

from ddp import IMPLEMENTATIONS, implementation, wrap
from ddp.copy_engine import CopyEngineDDP
from ddp_by_hand.lm.rank_pool import Context
from tests.support.beside import (
    chain_loss,
    is_sharded,
    is_torch,
    numbers,
    small_buckets,
    whole_gradients,
    wrapped,
)
from tests.support.differences import is_divided
from tests.support.on_ranks import on_ranks
from tests.support.recorder import RecordingGroup, recording

ODD = 1 + 2**-12  # rounded away in 16 bits
TUNED = "torch_ddp_tuned"


class Mixed(nn.Module):
    """Parameters of 16, 32 and 64 bit, a frozen one and one that is not contiguous."""

    def __init__(self):
        super().__init__()
        self.low = nn.Linear(6, 6, dtype=torch.bfloat16)
        self.norm = nn.LayerNorm(6)
        self.fine = nn.Parameter(torch.ones(6, dtype=torch.float64))
        self.large = nn.Parameter(torch.ones(6, 500, dtype=torch.bfloat16) / 500)
        self.other = nn.Linear(6, 6, dtype=torch.float16)
        self.frozen = nn.Linear(6, 6, dtype=torch.bfloat16).requires_grad_(False)
        self.picture = nn.Conv2d(2, 6, 3, dtype=torch.bfloat16).to(
            memory_format=torch.channels_last
        )

    def forward(self, x):
        picture = x.new_ones(len(x), 2, 3, 3, dtype=torch.bfloat16)
        x = x * self.fine.float() * self.large.float().sum(dim=1)
        x = self.norm(self.low(x.bfloat16()).float() + self.picture(picture).flatten(1).float())
        return self.other(x.half()).float() + self.frozen(x.bfloat16()).float()


def mixed_loss(model: nn.Module, seed: int, rank: int) -> Tensor:
    return model(numbers(4, 6, seed=seed, rank=rank, like=model)).square().sum()


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def gradients_of(model: nn.Module) -> list[Tensor | None]:
    """Whole ones, of the trainable parameters."""
    gradients = zip(model.parameters(), whole_gradients(model), strict=True)
    return [gradient for p, gradient in gradients if p.requires_grad]


def wide(parameter: nn.Parameter) -> torch.dtype:
    return torch.float64 if parameter.dtype == torch.float64 else torch.float32


def clipped(parameters: list[nn.Parameter], step: int, rank: int) -> list[Tensor]:
    """Small whole numbers times `ODD`: their sums are exact in float32, in any order."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    draws = [torch.randint(-8, 9, p.shape, generator=generator) for p in parameters]
    return [(d * ODD).to(p.device) for d, p in zip(draws, parameters, strict=True)]


def hand_over(model: nn.Module, sums: list[Tensor]) -> None:
    for p, s in reversed(list(zip(trainable(model), sums, strict=True))):
        model.before_gradient(p)
        p.grad = s.to(p.grad_dtype) if p.grad is None else p.grad.add_(s)
        model.gradient_ready(p)


def reduced(context: Context, model: nn.Module, steps: list[int]) -> list[Tensor]:
    sums = [torch.zeros_like(p, dtype=wide(p)) for p in trainable(model)]
    for step in steps:
        for rank in range(context.world_size):
            for total, s in zip(sums, clipped(trainable(model), step, rank), strict=True):
                total.add_(s)
    return sums


def replace_gradients(model: nn.Module) -> None:
    """What an optimizer of 16-bit parameters wants, with the noise in it."""
    for p in trainable(model):
        noisy, p.grad = p.grad + 1, None
        p.grad_dtype = p.dtype
        p.grad = noisy.to(p.dtype)


def float32_sums(context: Context, name: str) -> None:
    with recording(context.group) as recorder:
        group = recorder if context.device.type == "cpu" else context.group
        model = wrap(name, Mixed().to(context.device), process_group=group, **small_buckets(name))
        model.reduce, model.gradient_dtype = "sum", torch.float32
        model.gradients_come_by_hand = name == TUNED
        optimizer = torch.optim.AdamW(trainable(model), lr=0.01)
        assert model.module.frozen.weight.grad_dtype == torch.bfloat16
        for step in range(6):
            recorder.events.clear()
            rounds = [2 * step, 2 * step + 1][: 1 + step % 2]
            for seed in rounds:
                mixed_loss(model, seed, context.rank)
                hand_over(model, clipped(trainable(model), seed, context.rank))
            model.finish_gradient_synchronization()
            for p, g, s in zip(
                trainable(model), gradients_of(model), reduced(context, model, rounds), strict=True
            ):
                assert g.stride() == p.stride() or is_divided(name)
                assert torch.equal(g, s), "not exact, or rounded on the way"
            if recorder is group and not issubclass(implementation(name), CopyEngineDDP):
                assert types_recorded(recorder) == {"torch.float32", "torch.float64"}
            rest = model.stats()["bytes"] % sum(p.grad.nbytes for p in trainable(model))
            assert rest == 0 or is_divided(name), "not gradients alone, without padding"
            if not is_sharded(model):
                replace_gradients(model)
                optimizer.step()
            optimizer.zero_grad(set_to_none=step % 3 == 0)
        check_that_it_can_be_undone(context, model)


def types_recorded(recorder: RecordingGroup) -> set[str]:
    return {e.dtype for e in recorder.gradient_collectives() if "int" not in e.dtype}


def check_that_it_can_be_undone(context: Context, model: nn.Module) -> None:
    model.zero_grad()
    model.gradient_dtype = None
    assert all(p.grad_dtype == p.dtype for p in trainable(model))
    hand_over(model, clipped(trainable(model), 0, context.rank))
    model.finish_gradient_synchronization()
    for g, p, s in zip(
        gradients_of(model), trainable(model), reduced(context, model, [0]), strict=True
    ):
        torch.testing.assert_close(g, s.to(p.dtype), rtol=2e-2, atol=2e-1)
    sent = sum(p.nbytes for p in trainable(model))
    assert model.stats()["bytes"] == sent or hasattr(model, "whole_parameters")


def by_autograd(context: Context, name: str) -> None:
    """16-bit gradients are added up in float32, over microbatches and over ranks."""
    model = wrapped(context, name, Mixed())
    model.gradient_dtype = torch.float32
    for step in range(3):
        expected = [torch.zeros_like(p, dtype=wide(p)) for p in trainable(model)]
        for seed in (2 * step, 2 * step + 1):
            mixed_loss(model, seed, context.rank).backward()
            for rank in range(context.world_size):
                loss = mixed_loss(model.module, seed, rank)
                gradients = torch.autograd.grad(loss, trainable(model))
                for e, g in zip(expected, gradients, strict=True):
                    e.add_(g, alpha=1 / context.world_size)
        model.finish_gradient_synchronization()
        for g, e in zip(gradients_of(model), expected, strict=True):
            torch.testing.assert_close(g, e, rtol=1e-6, atol=1e-5)
        if not is_sharded(model):
            replace_gradients(model)
        model.zero_grad(set_to_none=step == 1)


def unused(context: Context, name: str) -> None:
    """Each rank hands over one of two parameters, and nobody the third."""
    network = nn.ParameterList(torch.zeros(3, dtype=torch.bfloat16) for _ in range(3))
    options = dict(small_buckets(name), find_unused_parameters=True, reduce="sum")
    model = wrapped(context, name, network, **options)
    model.gradient_dtype = torch.float32
    for _ in range(3):
        mine = model.module[context.rank]
        model.before_gradient(mine)
        mine.grad = torch.full_like(mine, ODD, dtype=torch.float32)
        model.gradient_ready(mine)
        model.finish_gradient_synchronization()
        *used, untouched = gradients_of(model)
        for g in used:
            assert torch.equal(g, torch.full_like(g, ODD))
        assert untouched is None
        if not is_sharded(model):
            replace_gradients(nn.ParameterList(list(model.module)[:2]))
        model.zero_grad()


def refused_dtypes(context: Context, name: str) -> None:
    model = wrapped(context, name, Mixed())
    model.reduce = "sum"
    with pytest.raises(ValueError, match=r"gradient_dtype: torch.int32 is not a floating type"):
        model.gradient_dtype = torch.int32
    with pytest.raises(ValueError, match="before_gradient: not a trainable"):
        model.before_gradient(model.module.frozen.weight)
    last = trainable(model)[-1]
    last.grad = torch.ones_like(last)
    model.gradient_ready(last)
    with pytest.raises(RuntimeError, match="gradient_dtype cannot change in the middle of a step"):
        model.gradient_dtype = torch.float32
    assert model.gradient_dtype is None
    with pytest.raises(RuntimeError, match="got no gradient"):
        model.finish_gradient_synchronization()
    model.gradient_dtype = torch.float32
    last.grad_dtype, last.grad = None, torch.ones_like(last)  # any type may be assigned
    with pytest.raises(RuntimeError, match=r"picture\.bias has a gradient of torch.bfloat16"):
        model.gradient_ready(last)
    model.zero_grad()
    hand_over(model, clipped(trainable(model), 0, context.rank))
    model.finish_gradient_synchronization()
    for g, s in zip(gradients_of(model), reduced(context, model, [0]), strict=True):
        assert torch.equal(g, s)
    wrap(name, model.module, process_group=context.group)
    assert all(p.grad.dtype == p.grad_dtype == p.dtype for p in trainable(model))


def unchanged(context: Context, name: str) -> None:
    """A float32 network: gradients and their memory stay what they were."""
    model = wrapped(context, name)
    chain_loss(0)(model, context.rank).backward()
    model.finish_gradient_synchronization()
    before = [p.grad for p in model.parameters()]
    model.gradient_dtype = torch.float32
    assert all(p.grad is gradient for p, gradient in zip(model.parameters(), before, strict=True))


def types_of_the_user(context: Context, name: str) -> None:
    """A `grad_dtype` that was set before `wrap` is kept, used, and given back."""
    network = nn.Linear(6, 6, dtype=torch.bfloat16).to(context.device)
    network.weight.grad_dtype, network.bias.grad_dtype = torch.float32, None
    model = wrapped(context, name, network)

    def loss(rank: int) -> Tensor:
        return network(numbers(4, 6, seed=1, rank=rank, like=model).bfloat16()).float().sum()

    def check_types(weight: torch.dtype, bias: torch.dtype | None) -> None:
        assert (network.weight.grad_dtype, network.bias.grad_dtype) == (weight, bias)

    check_types(torch.float32, None)
    if is_torch(name):
        with pytest.raises(RuntimeError, match="weight has a gradient of another type"):
            model(torch.ones(1, 6, device=context.device).bfloat16()).sum().backward()
    else:
        for _ in range(2):
            network.weight.grad = torch.full_like(network.weight, ODD, dtype=torch.float32)
            with model.no_sync():
                model.gradient_ready(network.weight)
            loss(context.rank).backward()
            model.finish_gradient_synchronization()
            gradients = [
                torch.autograd.grad(loss(r), network.weight)[0] for r in range(context.world_size)
            ]
            mean = sum(g.float() for g in gradients) / context.world_size + ODD
            torch.testing.assert_close(gradients_of(model)[0], mean, rtol=1e-6, atol=1e-5)
            model.zero_grad()
        network.bias.grad = torch.ones_like(network.bias, dtype=torch.float32)
        with pytest.raises(RuntimeError, match=r"bias has a gradient of torch\.float32 in place"):
            model.gradient_ready(network.bias)
        network.zero_grad()
    for leave in ("undone", *([] if is_divided(name) else ["wrapped again"]), "gone"):
        model.gradient_dtype = torch.float32
        check_types(torch.float32, torch.float32)
        if leave == "undone":
            model.gradient_dtype = None
        elif leave == "wrapped again":
            model = wrapped(context, name, network)
        else:
            del model
            for _ in range(200):  # autograd's thread may still hold the error of the backward above
                gc.collect()
                if network.bias.grad_dtype is None:
                    break
                time.sleep(0.01)
        check_types(torch.float32, None)


def half_means(context: Context, name: str) -> None:
    """The mean of float16 gradients is there where their sum overflows, as in PyTorch's DDP."""
    model = wrapped(context, name, nn.Linear(3, 2, dtype=torch.float16))
    x = torch.ones(1, 3, dtype=torch.float16, device=context.device)
    (model(x) * 40_000).sum().backward()
    model.finish_gradient_synchronization()
    for g in whole_gradients(model):
        assert g.eq(40_000).all(), g


@pytest.mark.parametrize(
    "body",
    [float32_sums, unused, refused_dtypes, unchanged, types_of_the_user],
)
def test_gradient_dtype(ranks, implementation, body):
    ranks.run(2, body, implementation)


def test_the_mean_is_there_where_the_sum_overflows(ranks, implementation):
    if implementation not in IMPLEMENTATIONS:
        pytest.skip("a learner's variant may divide the sum")
    ranks.run(2, half_means, implementation)


def test_autograd_accumulates_in_the_gradient_dtype(ranks, implementation):
    if is_torch(implementation):
        pytest.skip("PyTorch's reducer works in the parameters' own type: see below")
    ranks.run(2, by_autograd, implementation)


@pytest.mark.parametrize("name", ["torch_ddp", TUNED])
@on_ranks(2)
def test_the_reducer_of_torch_refuses_another_type(context: Context, name: str) -> None:
    model = wrapped(context, name, Mixed())
    model.gradient_dtype = torch.float32
    with pytest.raises(RuntimeError, match=r"gradient_dtype is for gradients .* gradient_ready"):
        mixed_loss(model, 0, context.rank).backward()


@on_ranks(2)
def test_tuned_torch_ddp_by_hand(context: Context) -> None:
    float32_sums(context, TUNED)
    model = wrapped(context, TUNED, Mixed(), reduce="sum")
    torch.autograd.grad(mixed_loss(model, 0, context.rank), trainable(model))
    with pytest.raises(RuntimeError, match="set gradients_come_by_hand = True"):
        hand_over(model, [torch.ones_like(p) for p in trainable(model)])


@on_ranks(2)
def test_none_by_hand(context: Context) -> None:
    """The floor adds up what this rank hands over, and takes nothing back."""
    model = wrapped(context, "none", Mixed(), reduce="sum")
    model.gradient_dtype = torch.float32
    for _ in range(2):
        for _ in range(2):
            hand_over(model, clipped(trainable(model), 0, context.rank))
        model.finish_gradient_synchronization()
        for p, s in zip(trainable(model), clipped(trainable(model), 0, context.rank), strict=True):
            assert torch.equal(p.grad, 2 * s)
        model.zero_grad()
