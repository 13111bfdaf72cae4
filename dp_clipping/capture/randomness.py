"""Gives two runs that are compared the same random numbers, or turns randomness off."""

import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from dp_clipping.torch_compat import dropouts

DROPOUTS = {
    torch.dropout, functional.dropout, functional.dropout1d, functional.dropout2d,
    functional.dropout3d, functional.alpha_dropout, functional.feature_alpha_dropout,
}  # fmt: skip


@contextmanager
def fork_randomness(device: torch.device) -> Iterator[None]:
    """Restores the states of PyTorch's generators, of the CPU and the device, at the end."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        yield


@contextmanager
def same_generators(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Restores the generators of Python, NumPy and modules' attributes at the end."""
    generators = [
        (value, value.get_state())
        for module in modules
        for value in vars(module).values()
        if isinstance(value, torch.Generator)
    ]
    python = random.getstate()
    numpy = sys.modules["numpy"].random if "numpy" in sys.modules else None
    legacy = None if numpy is None else numpy.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.set_state(legacy)
        for generator, state in generators:
            generator.set_state(state)


def generator_states(modules: Iterable[nn.Module], device: torch.device) -> list[Any]:
    """Returns the states of all generators, in a form that can be compared.

    These are PyTorch's, Python's and NumPy's generators, and those in attributes of modules.
    """
    values = [value for module in modules for value in vars(module).values()]
    states = [torch.get_rng_state()]
    states += [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    states += [value.get_state() for value in values if isinstance(value, torch.Generator)]
    numpy = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else ()
    return [
        *(x.numpy().tobytes() for x in states),
        random.getstate(),
        *map(str, numpy[2:]),
        *map(bytes, numpy[1:2]),
    ]


class _NoDropout(TorchFunctionMode):
    """Disables functional dropout, and the dropout of attention."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in DROPOUTS:
            return args[0]
        if function is scaled_dot_product_attention:
            args, kwargs = args[:4], {**(kwargs or {}), "dropout_p": 0.0, **_causal(args)}
        return function(*args, **(kwargs or {}))


def _causal(args: tuple) -> dict[str, bool]:
    return {"is_causal": args[5]} if len(args) > 5 else {}


@contextmanager
def without_dropout(network: nn.Module) -> Iterator[None]:
    """Turns dropout off, because it would make one sample differ between two runs."""
    layers = [m for m in network.modules() if isinstance(m, dropouts())]
    before = [m.training for m in layers]
    between = [(m, m.dropout) for m in network.modules() if isinstance(m, nn.RNNBase) and m.dropout]
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
