"""A wrapped network and its single-process reference, taken through the same steps."""

import copy
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ddp import implementation, options_of, wrap
from ddp_by_hand.lm.rank_pool import Context
from tests.support.differences import is_apart

Loss = Callable[[nn.Module, int], Tensor]
"""`loss(model, rank)`: what a rank's own data make of a model."""


def wrapped(
    context: Context, name: str, module: nn.Module | None = None, **options: Any
) -> nn.Module:
    """Returns a network, a chain if none is given, wrapped with small buckets if it has some."""
    module = Chain() if module is None else module
    options = {"process_group": context.group, **small_buckets(name), **options}
    return wrap(name, module.to(context.device), **options)


def ranks_of(context: Context, name: str) -> Sequence[int]:
    """Returns the ranks whose data are in a rank's gradient after finish."""
    return [context.rank] if is_apart(name) else range(context.world_size)


class Beside:
    """The reference sees the data of all ranks; its gradients are what every rank must end with.

    Where ranks step apart, that of each sees its own data.
    """

    def __init__(
        self, context: Context, name: str, module: nn.Module | None = None, **options: Any
    ):
        self.rank, self.world_size = context.rank, context.world_size
        self.ranks = ranks_of(context, name)
        if is_apart(name):
            options.pop("reduce", None)
        self.model = wrapped(context, name, module, **options)
        with whole_parameters(self.model):
            self.reference = copy.deepcopy(self.model.module)
        self.scale = 1 if options.get("reduce") == "sum" else 1 / len(self.ranks)

    def backward(self, loss: Loss, synchronise: bool = True) -> None:
        with nullcontext() if synchronise else self.model.no_sync():
            loss(self.model, self.rank).backward()
        self.reference_backward(loss)

    def reference_backward(self, loss: Loss) -> None:
        """Scaled behind the backward, not in the loss: 16-bit layers would round differently."""
        parameters = [p for p in self.reference.parameters() if p.requires_grad]
        for rank in self.ranks:
            value = loss(self.reference, rank)
            gradients = torch.autograd.grad(value, parameters, allow_unused=True)
            for p, gradient in zip(parameters, gradients, strict=True):
                if gradient is not None:
                    scaled = gradient * self.scale
                    p.grad = scaled if p.grad is None else p.grad + scaled

    def finish(self) -> None:
        self.model.finish_gradient_synchronization()
        self.compare()

    def compare(self) -> None:
        assert_same_gradients(self.model, self.reference)

    def optimizers(
        self, cls: type[torch.optim.Optimizer], **options: Any
    ) -> list[torch.optim.Optimizer]:
        """Returns the wrapper's optimizer and the reference's."""
        return [make_optimizer(module, cls, **options) for module in (self.model, self.reference)]

    def train(
        self, optimizers: Iterable[torch.optim.Optimizer], loss: Loss, set_to_none: bool = True
    ) -> None:
        """A step of both optimizers, before and behind which both networks are the same."""
        self.backward(loss)
        self.finish()
        for optimizer in optimizers:
            optimizer.step()
        self.compare_values()
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)

    def compare_values(self) -> None:
        for p, q in zip(whole_values(self.model), self.reference.parameters(), strict=True):
            torch.testing.assert_close(p, q.detach())

    def zero_grad(self, set_to_none: bool) -> None:
        for module in (self.model, self.reference):
            module.zero_grad(set_to_none=set_to_none)

    def step(self, loss: Loss, set_to_none: bool = True) -> None:
        self.backward(loss)
        self.finish()
        self.zero_grad(set_to_none)


def whole_gradients(model: nn.Module) -> list[Tensor | None]:
    """Returns the gradient of each parameter; of a sharded wrapper, by a collective call."""
    if hasattr(model, "whole_gradients"):
        return model.whole_gradients()
    return [p.grad for p in model.parameters()]


def whole_values(model: nn.Module) -> list[Tensor]:
    """Returns the values of each parameter; of a divided network, by a collective call."""
    with getattr(model, "whole_parameters", nullcontext)():
        return [p.detach().clone() for p in model.parameters()]


def make_optimizer(
    model: nn.Module, cls: type[torch.optim.Optimizer], **options
) -> torch.optim.Optimizer:
    """Returns the optimizer of a wrapper, or of a network without one."""
    if hasattr(model, "make_optimizer"):
        return model.make_optimizer(cls, **options)
    return cls(options.pop("params", model.parameters()), **options)


def whole_parameters(model: nn.Module) -> AbstractContextManager:
    """A context in which the parameters of any variant are whole."""
    return getattr(model, "whole_parameters", nullcontext)()


def assert_same_gradients(model: nn.Module, reference: nn.Module) -> None:
    for (name, p), gradient, q in zip(
        model.named_parameters(), whole_gradients(model), reference.parameters(), strict=True
    ):
        assert (gradient is None) == (q.grad is None), f"{name}: {gradient} instead of {q.grad}"
        if q.grad is not None:
            coarse = p.dtype in (torch.bfloat16, torch.float16)
            torch.testing.assert_close(
                gradient,
                q.grad,
                rtol=2e-2 if coarse else 1e-5,
                atol=2e-2 if coarse else 1e-6,
                msg=lambda m, name=name: f"{name}.grad: {m}",
            )


def numbers(*shape: int, seed: int, rank: int, like: nn.Module) -> Tensor:
    """Seeded normal numbers of a rank, on the model's device."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(*shape, generator=generator).to(next(like.parameters()).device)


def small_buckets(name: str, bucket_size_mb: float = 1e-4) -> dict:
    """The option that makes several buckets of a small network, where a variant has it."""
    has_it = "bucket_size_mb" in options_of(implementation(name))
    return {"bucket_size_mb": bucket_size_mb} if has_it else {}


class Chain(nn.Module):
    """Three layers and a tied one: `layers[0]` is used at both ends."""

    def __init__(self, width: int = 6):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        for layer in [*self.layers, self.layers[0]]:
            x = torch.tanh(layer(x))
        return x


def chain_loss(seed: int) -> Loss:
    return lambda model, rank: model(numbers(4, 6, seed=seed, rank=rank, like=model)).square().sum()


class Branches(nn.Module):
    """A common layer, and branches of which a forward takes those it is told, in that order."""

    def __init__(self, count: int = 4, width: int = 5):
        super().__init__()
        self.width = width
        self.common = nn.Linear(width, width)
        self.branches = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

    def forward(self, x, which):
        x = self.common(x)
        for i in which:
            x = torch.tanh(self.branches[i](x))
        return x


def branches_loss(seed: int, which: Callable[[int], list[int]]) -> Loss:
    """Each rank takes the branches `which(rank)`."""

    def loss(model: nn.Module, rank: int) -> Tensor:
        width = getattr(model, "module", model).width
        x = numbers(3, width, seed=seed, rank=rank, like=model)
        return model(x, which(rank)).square().sum()

    return loss


def is_sharded(model: nn.Module) -> bool:
    return hasattr(model, "gradient_pieces")


def is_torch(name: str) -> bool:
    return name.startswith("torch_ddp")
