"""`gradient_ready` driven by hand, as the private engine does: no autograd hook speaks."""

from contextlib import nullcontext

import pytest
import torch

from ddp_by_hand.lm.rank_pool import Context
from tests.ddp.test_step import FailingChain
from tests.support.beside import chain_loss, make_optimizer, small_buckets, whole_gradients, wrapped


def clipped_sum(rank: int, step: int, index: int, like: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10_000 * rank + 100 * step + index)
    return torch.randn(like.shape, generator=generator).to(like.device)


def order_of(count: int, seed: int) -> list[int]:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()


def driven_by_hand(context: Context, name: str) -> None:
    """Fresh tensors in arbitrary order, another on each rank; `sum` is switched on afterwards."""
    check_driven_by_hand(context, wrapped(context, name))
    if small_buckets(name):
        check_driven_by_hand(context, wrapped(context, name, bucket_size_mb=25))


def check_driven_by_hand(context: Context, model: torch.nn.Module) -> None:
    model.reduce = "sum"
    assert model.reduce == "sum"
    parameters = list(model.parameters())
    optimizer = make_optimizer(model, torch.optim.SGD, lr=0.1)
    for step in range(5):
        if step < 3:  # with a forward before it, and without
            x = chain_loss(step)(model, context.rank)
            assert x.requires_grad
        for i in order_of(len(parameters), seed=step * 10 + context.rank * (step > 1)):
            parameters[i].grad = clipped_sum(context.rank, step, i, parameters[i])
            model.gradient_ready(parameters[i])
        model.finish_gradient_synchronization()
        for _ in range(2):
            for i, (p, got) in enumerate(zip(parameters, whole_gradients(model), strict=True)):
                expected = sum(clipped_sum(r, step, i, p) for r in range(context.world_size))
                torch.testing.assert_close(got, expected)
            model.finish_gradient_synchronization()  # does nothing
        optimizer.step()
        if step % 2:
            optimizer.zero_grad(set_to_none=step == 3)


def refused(context: Context, name: str) -> None:
    model = wrapped(context, name)
    with pytest.raises(ValueError, match="gradient_ready"):
        model.gradient_ready(torch.nn.Parameter(torch.zeros(3)))
    with pytest.raises(RuntimeError, match=r"layers\.1\.weight has no gradient"):
        model.gradient_ready(model.module.layers[1].weight)
    with pytest.raises(ValueError, match=r"reduce: 'median' is unknown.*mean, sum"):
        model.reduce = "median"


def incomplete(context: Context, name: str) -> None:
    model = wrapped(context, name)
    for p in list(model.parameters())[2:]:
        p.grad = torch.ones_like(p)
        model.gradient_ready(p)
    with pytest.raises(RuntimeError, match=r"layers\.0\.weight, layers\.0\.bias got no gradient"):
        model.finish_gradient_synchronization()
    check_driven_by_hand(context, model)


class Engine:
    """A private engine in miniature: the wrapper's forward, `autograd.grad`, then by hand.

    Attributes:
        expected: of each parameter, what every rank must hold at the end of the step.
        own: this rank's part of it.
    """

    def __init__(self, context: Context, name: str, **options):
        self.rank, self.world_size = context.rank, context.world_size
        network = FailingChain()  # untied: zeros of one layer stay its own
        self.model = wrapped(context, name, network, **options)
        self.parameters = list(self.model.parameters())
        self.scale = 1 if self.model.reduce == "sum" else 1 / self.world_size
        self.expected = [torch.zeros_like(p) for p in self.parameters]
        self.own = [torch.zeros_like(p) for p in self.parameters]

    def sums(self, model: torch.nn.Module, seed: int, rank: int) -> list[torch.Tensor]:
        """All zero on the last rank now and then: its share of a Poisson draw was empty."""
        loss = chain_loss(seed)(model, rank)
        before = [p.grad for p in self.parameters]
        gradients = torch.autograd.grad(loss, self.parameters)
        assert all(p.grad is b for p, b in zip(self.parameters, before, strict=True))
        empty = seed % 3 == 2 and rank == self.world_size - 1
        return [torch.zeros_like(g) if empty else g for g in gradients]

    def round(self, seed: int, stop_before: int = -1) -> None:
        """One microbatch; the exception, if any, comes before that parameter is handed over."""
        sums = self.sums(self.model, seed, self.rank)
        for i in reversed(range(len(sums))):
            if i == stop_before:
                raise ArithmeticError("failed on purpose")
            self.add(self.parameters[i], sums[i])
        for rank in range(self.world_size):
            for e, s in zip(self.expected, self.sums(self.model.module, seed, rank), strict=True):
                e.add_(s, alpha=self.scale)
        for o, s in zip(self.own, self.sums(self.model.module, seed, self.rank), strict=True):
            o.add_(s)

    def add(self, parameter: torch.nn.Parameter, clipped: torch.Tensor) -> None:
        self.model.before_gradient(parameter)
        if parameter.grad is None:
            parameter.grad = clipped
        else:
            parameter.grad.add_(clipped)
        self.model.gradient_ready(parameter)

    def finish(self) -> None:
        self.model.finish_gradient_synchronization()
        for gradient, e in zip(whole_gradients(self.model), self.expected, strict=True):
            torch.testing.assert_close(gradient, e, rtol=1e-5, atol=1e-5)

    def check_that_nothing_travelled(self) -> None:
        for p, o in zip(self.parameters, self.own, strict=True):
            torch.testing.assert_close(p.grad, o, rtol=1e-5, atol=1e-5)

    def zero_grad(self, set_to_none: bool) -> None:
        self.model.zero_grad(set_to_none=set_to_none)
        for tensor in [*self.expected, *self.own]:
            tensor.zero_()


def rounds_by_hand(context: Context, name: str, reductions=("sum", "mean")) -> None:
    """Rounds with and without `no_sync`, in every order, before one finish."""
    for reduce in reductions:
        engine = Engine(context, name, reduce=reduce)
        plans = [[True], [True, True], [False, False, True], [True, False], [True, False, True]]
        for step, synchronise in enumerate(plans):
            for micro, sync in enumerate(synchronise):
                with nullcontext() if sync else engine.model.no_sync():
                    engine.round(10 * step + micro)
                if not any(synchronise[: micro + 1]):
                    engine.model.finish_gradient_synchronization()  # there is nothing to finish
                    engine.check_that_nothing_travelled()
            engine.finish()
            if step != 2:  # once not zeroed: the next step adds to what is reduced
                engine.zero_grad(set_to_none=step % 2 == 0)


def failed_by_hand(context: Context, name: str, find_unused=(False, True)) -> None:
    """An exception between two parameters, not the same two on each rank."""
    for unused in find_unused:
        engine = Engine(context, name, reduce="sum", find_unused_parameters=unused)
        for step, set_to_none in enumerate((True, False, True)):
            with pytest.raises(ArithmeticError):
                engine.round(50 + step, stop_before=[2, 4, 5, 0][context.rank])
            engine.zero_grad(set_to_none)
            engine.round(10 * step)
            engine.round(10 * step + 1)
            engine.finish()
            engine.zero_grad(set_to_none)


def autograd_behind_by_hand(context: Context, name: str) -> None:
    """Private and ordinary steps in turn, and nobody zeroes."""
    for reduce, first in (("sum", 0), ("mean", 1)):
        engine = Engine(context, name, reduce=reduce)
        for step in range(first, first + 3):
            if step % 2:
                engine.round(3 * step)
            else:
                chain_loss(3 * step)(engine.model, context.rank).backward()
                for rank in range(context.world_size):
                    sums = engine.sums(engine.model.module, 3 * step, rank)
                    for e, s in zip(engine.expected, sums, strict=True):
                        e.add_(s, alpha=engine.scale)
            engine.finish()


@pytest.mark.parametrize(
    "body",
    [driven_by_hand, refused, incomplete, rounds_by_hand, failed_by_hand, autograd_behind_by_hand],
)
def test_gradient_ready(ranks, implementation, body):
    ranks.run(2, body, implementation)


def test_gradient_ready_on_four_ranks(ranks, implementation):
    ranks.run(min(4, ranks.size), failed_by_hand, implementation, [False])
