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
    """Leave out of Triton's interpreter what it does again and again: three quarters of its time.

    Its arithmetic is untouched. As in a compiled kernel, integers are not checked for overflow.
    """
    from triton.language import core
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    interpreter.interpreter_builder.options = replace(
        interpreter.interpreter_builder.options, sanitize_overflow=False
    )
    _make_types_once(core)
    _pass_semantics(interpreter)
    _look_types_up_once(interpreter)
    _translate_once(interpreter)
    _broadcast_where_needed(TritonSemantic)


def _make_types_once(core: ModuleType) -> None:
    """Makes one type for all blocks of a shape and an element, with its values' size and shape.

    The interpreter makes them for each value that a kernel computes.
    """
    make, fill, known = core.block_type.__init__, core.tensor.__init__, {}

    def of_values(type_):
        fill(value := object.__new__(core.tensor), None, type_)
        return value.numel, value.shape

    def make_once(cls, element, shape):
        key = element.name, *(getattr(size, "value", size) for size in shape)
        if key not in known:
            new = object.__new__(cls)
            make(new, element, shape)
            new.of_values = of_values(new)
            known[key] = new
        return known[key]

    def fill_from_type(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = type.of_values

    core.dtype.of_values = of_values(core.int32)
    core.block_type.__new__ = make_once
    core.block_type.__init__ = lambda self, element, shape: None
    core.tensor.__init__ = fill_from_type


def _pass_semantics(interpreter: ModuleType) -> None:
    """Calls what a function of the language does, without two others around it."""

    def patch(owner, name, member, builder, scope):
        function = getattr(member, "__wrapped__", member)
        semantic = interpreter.interpreter_semantic

        def call(*args, **options):
            options["_semantic"] = semantic
            return function(*args, **options)

        scope.set_attr(owner, name, call)

    interpreter._patch_attr = patch


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
