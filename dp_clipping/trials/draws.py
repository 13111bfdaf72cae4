"""Runs without dropout, or with expected values in place of some random numbers."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import multi_head_attention_forward, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from dp_clipping.torch_compat import DROPOUT, TorchDispatchMode, every_module

DROPOUTS = {
    torch.dropout, functional.dropout, functional.dropout1d, functional.dropout2d,
    functional.dropout3d, functional.alpha_dropout, functional.feature_alpha_dropout,
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
    modules = every_module(network)
    layers = [m for m in modules if isinstance(m, DROPOUT)]
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


class ExpectedDraws(TorchDispatchMode):
    """A context in which no operator draws numbers whose amount depends on values.

    As for negative numbers in `rrelu`, and for gamma variates: samples behind one that is exchanged
    would get other numbers. Such an operator returns what is expected of its inputs.
    """

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        expected = EXPECTED.get(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {})) if expected is None else expected(*args)


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
