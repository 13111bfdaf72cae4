"""The interface of a captured network for steps and searches, and calls of its layers."""

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from dp_clipping.layers.handle import LayerState
from dp_clipping.layers.recorder import Recorder, Trainable
from dp_clipping.trials.draws import without_dropout


class CapturedNetwork(Protocol):
    """The interface of `capture.Capture` for steps and searches, which import no layers."""

    network: nn.Module
    sharding: Any  # a `distributed.sharding.Sharding`, or None
    state: Any  # a `checks.state.State`, or None
    handles: list[LayerState]
    parameters: list[Parameter]
    names: dict[Parameter, str]
    groups: dict[Parameter, int]
    group_names: list[str]
    trained: list[Trainable]
    record: dict[Parameter, Trainable]
    members: list[list[Trainable]]
    trigger: Tensor

    @property
    def apart(self) -> list[LayerState]: ...

    @property
    def inner(self) -> list[LayerState]: ...

    @property
    def is_compiled(self) -> bool: ...

    def attached(self, private_step: Recorder | None) -> AbstractContextManager[None]: ...

    def make_slots(self, private_step: Recorder) -> dict[str, dict[str, Tensor]]: ...

    def slot_value(self, parameter: Trainable) -> Tensor: ...

    def zero(self, dtype: torch.dtype) -> Tensor: ...

    def make_whole(self, handles: Collection[LayerState]) -> None: ...

    def widen(self, modules: Collection[nn.Module], layers: Collection[str]) -> bool: ...

    def let_read(self, weights: dict[nn.Module, list[Parameter]]) -> None: ...

    def let_differentiate(self, handles: Collection[LayerState]) -> None: ...

    def remove(self) -> None: ...

    def tried(self, args: tuple, kwargs: dict) -> AbstractContextManager[Any]:
        """Runs a forward, and restores at the end what it has changed; yields its outputs."""
        ...

    def looked_at(
        self, before: Callable[..., Any], after: Callable[..., Any] | None = None
    ) -> AbstractContextManager[None]:
        """Enters a context with plain forwards, in which hooks run around each captured module."""
        ...


def _nothing(*_: Any) -> None:
    """A hook that does nothing."""


@dataclass
class LayerCall:
    """Inputs and outputs of one call of a layer; meta tensors where their shapes suffice.

    `product_dtype` is the dtype in which a matrix product of the first input would be computed.
    """

    inputs: list[Tensor]
    outputs: list[Tensor]
    product_dtype: torch.dtype | None


@contextmanager
def trials(handles: list[LayerState], trial: Callable[..., Any]) -> Iterator[None]:
    """A context in which a plain forward gives calls of these modules to `trial`."""
    for handle in handles:
        handle.trial = trial
    try:
        yield
    finally:
        for handle in handles:
            handle.trial = None


@contextmanager
def plain_run(
    capture: CapturedNetwork, args: tuple, kwargs: dict, before: Callable[..., Any] = _nothing,
    after: Callable[..., Any] | None = None, has_graph: bool | None = None,
) -> Iterator[Any]:  # fmt: skip
    """Runs a forward that is only tried, without dropout; yields its outputs.

    At the end everything is as it was: see `CapturedNetwork.tried` and `looked_at`.

    Args:
        before, after: hooks around each captured module.
        has_graph: a graph is recorded; None: unless the network is sharded, as FSDP would wait for
            its backward.
    """
    has_graph = capture.sharding is None if has_graph is None else has_graph
    with (
        capture.looked_at(before, after), without_dropout(capture.network),
        torch.set_grad_enabled(has_graph), capture.tried(args, kwargs) as outputs,
    ):  # fmt: skip
        yield outputs
