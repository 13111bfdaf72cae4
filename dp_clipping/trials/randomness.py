"""Gives runs that are compared the same random numbers, or turns randomness off."""

import copy
import pickle
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
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


class RandomStates:
    """The states of all random generators, to be compared and restored.

    These are PyTorch's of the CPU and of a device, Python's, NumPy's if it is imported, and
    generators among the attributes of some objects.

    Args:
        owners: modules, or other objects with attributes.
        device: whose generator is saved too, if it is a GPU.
    """

    def __init__(self, owners: Iterable[Any] = (), device: torch.device | None = None):
        self._generators = list(_generators(owners, device))
        self._states = [get() for get, _ in self._generators]

    def restore(self) -> None:
        """Gives all generators their states."""
        for (_, give), state in zip(self._generators, self._states, strict=True):
            give(state)

    @property
    def have_moved(self) -> bool:
        """Returns whether a number was drawn since. The host waits for no GPU."""
        now = [get() for get, _ in self._generators]
        pairs = zip(self._states, now, strict=True)
        return any(_comparable(before) != _comparable(after) for before, after in pairs)


@contextmanager
def same_randomness(
    owners: Iterable[Any] = (), device: torch.device | None = None
) -> Iterator[RandomStates]:
    """Restores all generators at the end: see `RandomStates`, which it yields."""
    states = RandomStates(owners, device)
    try:
        yield states
    finally:
        states.restore()


def _generators(
    owners: Iterable[Any], device: torch.device | None
) -> Iterator[tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """Yields, of each generator, what gets its state and what sets it."""
    yield torch.get_rng_state, torch.set_rng_state
    if device is not None and device.type == "cuda":
        yield partial(torch.cuda.get_rng_state, device), _setting(device)
    yield random.getstate, random.setstate
    numpy = sys.modules["numpy"].random if "numpy" in sys.modules else None
    kinds: set[type] = {torch.Generator, random.Random}
    if numpy is not None:
        yield numpy.get_state, numpy.set_state
        kinds |= {numpy.RandomState, numpy.Generator}
    values = chain.from_iterable([vars(owner).values() for owner in owners])
    for value in [value for value in values if type(value) in kinds]:
        if isinstance(value, random.Random):
            yield value.getstate, value.setstate
        elif hasattr(value, "bit_generator"):
            bits = value.bit_generator
            yield partial(_state_of, bits), partial(setattr, bits, "state")
        else:
            yield value.get_state, value.set_state


def _setting(device: torch.device) -> Callable[[Tensor], None]:
    return lambda state: torch.cuda.set_rng_state(state, device)


def _state_of(bits: Any) -> Any:
    return copy.deepcopy(bits.state)


def _comparable(state: Any) -> Any:
    return state.numpy().tobytes() if isinstance(state, Tensor) else pickle.dumps(state)


def seed_all(seed: int) -> None:
    """Seeds PyTorch's, Python's and, if it is imported, NumPy's generator."""
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


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
