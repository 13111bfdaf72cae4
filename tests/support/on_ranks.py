"""Tests whose body runs on ranks."""

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest

from ddp_by_hand.lm.rank_pool import Context


def on_ranks(world_size: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a test of a function of a `Context`, which so many ranks of `cpu_ranks` call.

    Its further arguments are those of the test: its parameters and fixtures.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        def test(request: pytest.FixtureRequest, **arguments: Any) -> None:
            __tracebackhide__ = True
            pool = request.getfixturevalue("cpu_ranks")
            pool.run(world_size, _run, body.__module__, body.__name__, arguments)

        _, *further = inspect.signature(body).parameters.values()
        given = inspect.Parameter("request", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = inspect.Signature([given, *further])
        test.__name__, test.__doc__, test.body = body.__name__, body.__doc__, body
        test.__module__ = body.__module__
        return test

    return decorate


def _run(context: Context, module: str, name: str, arguments: dict[str, Any]) -> None:
    """Runs the body that a test was made of; the module has the test under its name."""
    getattr(import_module(module), name).body(context, **arguments)
