"""Runs without dropout, or with constant random numbers: what two runs draw may differ."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import multi_head_attention_forward, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from dp_clipping.torch_compat import TorchDispatchMode, dropouts, every_module

DROPOUTS = {
    torch.dropout, functional.dropout, functional.dropout1d, functional.dropout2d,
    functional.dropout3d, functional.alpha_dropout, functional.feature_alpha_dropout,
}  # fmt: skip


CONSTANT = {  # operators that return, or write, numbers that depend on no tensor
    "rand", "randn", "rand_like", "randn_like", "normal_", "uniform_", "exponential_", "geometric_",
    "log_normal_", "cauchy_", "bernoulli_",
}  # fmt: skip


class _NoDropout(TorchFunctionMode):
    """Disables functional dropout, and the dropout of attention."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in DROPOUTS:
            return args[0]
        if function is scaled_dot_product_attention:
            args, kwargs = args[:4], {**(kwargs or {}), "dropout_p": 0.0, **_causal(args)}
        if function is multi_head_attention_forward:  # inside of it this mode is off
            kwargs = {**(kwargs or {}), "training": False}
        return function(*args, **(kwargs or {}))


def _causal(args: tuple) -> dict[str, bool]:
    return {"is_causal": args[5]} if len(args) > 5 else {}


@contextmanager
def without_dropout(network: nn.Module) -> Iterator[None]:
    """Turns dropout off, because it would make one sample differ between two runs."""
    modules, kinds = every_module(network), dropouts()
    layers = [m for m in modules if isinstance(m, kinds)]
    before = [m.training for m in layers]
    between = [(m, m.dropout) for m in modules if isinstance(m, nn.RNNBase) and m.dropout]
    for module in layers:
        module.training = False
    for module, _ in between:
        module.dropout = 0.0
    try:
        with _NoDropout():
            yield
    finally:
        for module, training in zip(layers, before, strict=True):
            module.training = training
        for module, dropout in between:
            module.dropout = dropout


class ConstantDraws(TorchDispatchMode):
    """A context in which random numbers are the same for all samples, whatever their values are.

    How many numbers an operator draws can depend on values, as for negative numbers in `rrelu` and
    for gamma variates. Then samples behind a sample that is exchanged get other numbers. Here such
    an operator returns what is expected of its inputs, and what draws by shape alone a constant.

    Attributes:
        drawn: name and shape of each draw so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in function.tags:
            return function(*args, **kwargs)
        name = function.overloadpacket.__name__
        if name in EXPECTED:
            found = EXPECTED[name](*args)
        else:
            torch.manual_seed(0)  # which numbers it draws does not depend on earlier ones
            found = function(*args, **kwargs)
        first = found[0] if isinstance(found, tuple) else found
        self.drawn.append((name, tuple(first.shape)))
        is_constant = name in CONSTANT and first.is_floating_point() and first.numel() > 1
        return found.fill_(0.5) if is_constant else found

    @staticmethod
    def by_values(one: "ConstantDraws", other: "ConstantDraws") -> bool:
        """Returns whether the numbers of draws in two runs depend, or may depend, on values."""
        return one.drawn != other.drawn or any(name in EXPECTED for name, _ in one.drawn)


def _rrelu(x: Tensor, noise: Tensor, lower: float, upper: float, *_: Any) -> Tensor:
    slopes = torch.where(x <= 0, (lower + upper) / 2, 1.0)
    noise.copy_(slopes)
    return x * slopes


EXPECTED = {
    "rrelu_with_noise": _rrelu,
    "rrelu_with_noise_": lambda x, *rest: x.copy_(_rrelu(x, *rest)),
    "_standard_gamma": lambda x, *_: x.clone(),
    "_sample_dirichlet": lambda x, *_: x / x.sum(-1, keepdim=True),
    "poisson": lambda x, *_: x.clone(),
    "binomial": lambda count, probability, *_: count * probability,
}
