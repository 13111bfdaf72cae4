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


def on_ranks(world_size: int | None = None, pool: str = "cpu_ranks") -> Callable[[Test], Test]:
    """Makes a test of a function of a `Context`, which so many ranks of a pool call.

    Its further arguments are those of the test: its parameters and fixtures. The number of ranks
    may be a parameter, `world_size`, too.
    """

    def decorate(body: Test) -> Test:
        def test(**arguments: Any) -> None:
            __tracebackhide__ = True
            run = arguments.pop(pool).run
            count = arguments.pop("world_size") if world_size is None else world_size
            run(count, Body(body.__module__, body.__name__), arguments)

        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        _, *further = inspect.signature(body).parameters.values()
        own = [pool, *["world_size"] * (world_size is None)]
        test.__signature__ = inspect.Signature(
            [*(inspect.Parameter(name, kind) for name in own), *further]
        )
        test.__name__, test.__doc__, test.body = body.__name__, body.__doc__, body
        test.__module__ = body.__module__
        return test

    return decorate
