"""Triton's interpreter, in which kernels run without a GPU: in processes of its own.

It must be chosen before a kernel is decorated, so that no other test sees it.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from tests.ranks import Context, RankPool


class Interpreter:
    """Two processes for the whole session, because importing all that they need takes seconds.

    Attributes:
        ranks: both, as a pool; most tests need one.
    """

    def __init__(self) -> None:
        environment = {"TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"}
        self.ranks = RankPool(2, environment=environment, prepare=_translate_once, seconds=400)

    def run(self, function: Callable, *arguments: Any) -> None:
        """Call a module-level function there; its assertions are the test's."""
        __tracebackhide__ = True
        self.ranks.run(1, _call, function, *arguments)


def _call(context: Context, function: Callable, *arguments: Any) -> None:
    function(*arguments)


def _translate_once() -> None:
    """Triton's language is replaced by what the interpreter computes once a module.

    The interpreter itself does so in every launch and again in every call of a device function,
    which is a third to a half of what small kernels take. It undoes it at the end of a launch; here
    nothing but kernels uses the language.
    """
    from triton.runtime import interpreter

    replace, done = interpreter._patch_lang, set()

    def replace_once(function: Callable) -> SimpleNamespace:
        if id(function.__globals__) not in done:
            done.add(id(function.__globals__))
            replace(function)
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = replace_once
