"""Runs without dropout, or with expected values in place of some random numbers."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
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
ATTENTION = "attn_mask", "dropout_p", "is_causal"  # arguments behind query, key and value


class NoDropout(TorchFunctionMode):
    """Disables functional dropout, and the dropout of attention.

    Attributes:
        was_needed: there was some.
    """

    was_needed = False

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in DROPOUTS:
            x, drops = _of_dropout(*args, **(kwargs or {}))
            self.was_needed |= drops
            return x
        if function is scaled_dot_product_attention:
            given = dict(zip(ATTENTION, args[3:], strict=False)) | (kwargs or {})
            self.was_needed |= bool(given.get("dropout_p"))
            args, kwargs = args[:3], given | {"dropout_p": 0.0}
        if function is multi_head_attention_forward:  # inside of it this mode is off
            self.was_needed, kwargs = True, {**(kwargs or {}), "training": False}
        return function(*args, **(kwargs or {}))


def _of_dropout(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, train: bool = True
) -> tuple[Tensor, bool]:
    """Returns the input of a call of `DROPOUTS`, and whether it drops something."""
    return input, training and train and p > 0


@contextmanager
def without_dropout(network: nn.Module, in_functions: bool = True) -> Iterator[Any]:
    """Turns dropout off, because it would make one sample differ between two runs.

    Args:
        in_functions: also where functions are called for it; then each operator costs a call in
            Python.

    Yields:
        The `NoDropout`, which tells whether there was some in functions; None: it is not looked.
    """
    modules = every_module(network)
    layers = [m for m in modules if isinstance(m, DROPOUT)]
    before = [m.training for m in layers]
    between = [(m, m.dropout) for m in modules if isinstance(m, nn.RNNBase) and m.dropout]
    for module in layers:
        module.training = False
    for module, _ in between:
        module.dropout = 0.0
    try:
        with NoDropout() if in_functions else nullcontext() as mode:
            yield mode
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
