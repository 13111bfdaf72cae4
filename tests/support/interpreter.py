"""Triton's interpreter, in which kernels run without a GPU: in processes of its own.

It must be chosen before a kernel is decorated, so that no other test sees it.
"""

import warnings
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

from ddp_by_hand.lm.rank_pool import Context
from tests.support import seeds
from tests.support.servers import INTERPRETED


class Interpreter:
    """Two processes for the whole session, because importing all that they need takes seconds.

    Attributes:
        ranks: both, as a pool; most tests need one.
    """

    def __init__(self) -> None:
        self.ranks = seeds.Ranks(2, environment=INTERPRETED, prepare=_prepare, seconds=400)

    def run(self, function: Callable, *arguments: Any) -> None:
        """Call a module-level function there; its assertions are the test's."""
        __tracebackhide__ = True
        self.ranks.run(1, _call, function, *arguments)


def _call(context: Context, function: Callable, *arguments: Any) -> None:
    function(*arguments)


def _prepare() -> None:
    seeds.replace_entropy()
    warnings.simplefilter("ignore")
    _hasten()


def _hasten() -> None:
    """Leave out of Triton's interpreter what it does again and again: two thirds of its time.

    Its arithmetic is untouched. As in a compiled kernel, integers are not checked for overflow.
    """
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    interpreter.interpreter_builder.options = replace(
        interpreter.interpreter_builder.options, sanitize_overflow=False
    )
    _look_types_up_once(interpreter)
    _translate_once(interpreter)
    _broadcast_where_needed(TritonSemantic)


def _look_types_up_once(interpreter: ModuleType) -> None:
    """numpy's type for one of Triton's: the interpreter writes its table anew in every call."""
    look_up, found = interpreter._get_np_dtype, {}

    def look_up_once(dtype):
        if dtype.name not in found:
            found[dtype.name] = look_up(dtype)
        return found[dtype.name]

    interpreter._get_np_dtype = look_up_once


def _translate_once(interpreter: ModuleType) -> None:
    """Triton's language is replaced by what the interpreter computes once a module.

    The interpreter itself does so in every launch and again in every call of a device function. It
    undoes it at the end of a launch; here nothing but kernels uses the language.
    """
    patch, done = interpreter._patch_lang, set()

    def patch_once(function: Callable) -> SimpleNamespace:
        if id(function.__globals__) not in done:
            done.add(id(function.__globals__))
            patch(function)
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = patch_once


def _broadcast_where_needed(semantic: type) -> None:
    """Two blocks of one shape stay what they are (it copies both)."""
    broadcast = semantic.broadcast_impl_value

    def broadcast_if_unlike(self, left, right):
        if left.type.is_block() and right.type.is_block() and left.type.shape == right.type.shape:
            return left, right
        return broadcast(self, left, right)

    semantic.broadcast_impl_value = broadcast_if_unlike
