"""Redirects a network's calls to private steps, and keeps its copies plain.

Private training adds attributes to the module, and only to that object. `copy.deepcopy` and pickle
(and so `torch.save` and an average of weights) take the module without them: a copy belongs to no
engine, and training it is not private.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from torch import nn

from dp_clipping.torch_compat import (
    ADDED,
    Intercepted,
    call_intercepted,
    is_intercepted,
    stop_intercepting,
)


def let_copies_be_plain(module: nn.Module) -> None:
    """Makes copies and pickles of a module omit the attributes `ADDED`."""
    module.__dict__["__reduce_ex__"] = partial(_without_what_was_added, module)


def let_copies_be(module: nn.Module) -> None:
    """Takes `let_copies_be_plain` back, unless `Calls` needs it."""
    if not is_intercepted(module):
        module.__dict__.pop("__reduce_ex__", None)


def _without_what_was_added(module: nn.Module, protocol: Any) -> Any:
    reduced: Any = type(module).__reduce_ex__(module, protocol)
    function, arguments, *rest = reduced
    if rest and isinstance(rest[0], dict):
        rest[0] = {name: value for name, value in rest[0].items() if name not in ADDED}
        here = vars(module)
        own = here["_private"].own_forward if "_private" in here else here.get("forward")
        if own is not None:
            rest[0]["forward"] = own
    return function, arguments, *rest


def without_repr(run: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `run` as a function, which is printed without the module that it is bound to.

    `nn.EmbeddingBag` prints all of its attributes, a bound forward, and so itself, among them.
    """
    return lambda *args, **kwargs: run(*args, **kwargs)


def with_signature_of(run: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
    """Returns `run`, which `inspect.signature` takes for the module's forward."""
    call = partial(run)
    with suppress(TypeError, ValueError):  # a forward that tells none
        call.__signature__ = inspect.signature(module.forward)  # type: ignore[attr-defined]
    return call


def plain_names(state: Mapping[str, Any], network: nn.Module) -> Mapping[str, Any]:
    """Returns a state dict without the prefix that a wrapper around the network gave each name."""
    own = next((name for name, _ in network.named_parameters()), "")
    for prefix in ("module.module.", "_module.", "module."):
        if state and not own.startswith(prefix) and all(name.startswith(prefix) for name in state):
            return {name.removeprefix(prefix): value for name, value in state.items()}
    return state


class Calls:
    """Sends calls of a module to `run`, within which they reach the module.

    Args:
        module: the user's own, which keeps its class.
        run: called with the arguments of each call.
        methods: called in the place of the module's own, or beside them.
    """

    def __init__(self, module: nn.Module, run: Callable[..., Any], **methods: Callable[..., Any]):
        self.module, self._run, self._methods = module, run, methods
        self._is_inside = False
        Intercepted(module, self._call)
        vars(module).update(methods)
        let_copies_be_plain(module)

    def remove(self) -> None:
        """Stops redirecting: calls reach the module again."""
        stop_intercepting(self.module)
        for name in self._methods:
            vars(self.module).pop(name, None)
        let_copies_be(self.module)

    @contextmanager
    def reached(self) -> Iterator[None]:
        """Enters a context in which calls reach the module."""
        before, self._is_inside = self._is_inside, True
        try:
            yield
        finally:
            self._is_inside = before

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_inside:
            return call_intercepted(self.module, *args, **kwargs)
        with self.reached():
            return self._run(*args, **kwargs)
