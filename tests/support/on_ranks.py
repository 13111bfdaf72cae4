"""Tests whose body runs on ranks."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from ddp_by_hand.lm.rank_pool import Context

Test = Callable[..., None]


@dataclass
class Body:
    """Runs what a test was made of on a rank, where its module has the test by its name."""

    __module__: str
    __name__: str

    def __call__(self, context: Context, arguments: dict[str, Any]) -> None:
        getattr(import_module(self.__module__), self.__name__).body(context, **arguments)


def on_ranks(world_size: int, pool: str = "cpu_ranks") -> Callable[[Test], Test]:
    """Makes a test of a function of a `Context`, which so many ranks of a pool call.

    Its further arguments are those of the test: its parameters and fixtures.
    """

    def decorate(body: Test) -> Test:
        def test(**arguments: Any) -> None:
            __tracebackhide__ = True
            run = arguments.pop(pool).run
            run(world_size, Body(body.__module__, body.__name__), arguments)

        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        _, *further = inspect.signature(body).parameters.values()
        test.__signature__ = inspect.Signature([inspect.Parameter(pool, kind), *further])
        test.__name__, test.__doc__, test.body = body.__name__, body.__doc__, body
        test.__module__ = body.__module__
        return test

    return decorate
