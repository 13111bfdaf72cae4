"""Where a variant does otherwise in the behaviour tests of tests/ddp, which run on all of them.

`REDUCED` lists behaviours that a variant cannot have whose ranks step with gradients of their own.
A row of `REFUSED` is a behaviour (the name of a test's function) that a variant refuses, and what
its message says. The test then expects that, on every rank. A function that goes on beyond a
refusal, or where only a value differs, asks one of the functions below.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from ddp import implementation
from ddp_by_hand.lm.rank_pool import Context, RankPool

DIVIDED = r"fsdp has divided among ranks: build a new network and load"

REFUSED = {
    "fsdp": {
        "wrapped_again": DIVIDED,
        "on_one_trunk": DIVIDED,
        "in_a_loop": DIVIDED,
        "test_a_wrapper_leaves_no_trace": "build the network again",
        "created_graphs": "create_graph=True through a block",
        "loaded_by_assignment": "give assign=False",
        "refused_dtypes": DIVIDED,
        "another_layer": DIVIDED,
        "converted": "fsdp has divided this parameter",
        "thawed": DIVIDED,
        "functional_call": "fsdp has divided this parameter",
    }
}

REDUCED = {  # behaviours that compare with a gradient, or buffers, that all ranks share
    "train_beside_reference", "one_loop", "test_a_wrapper_leaves_no_trace", "wrapped_again",
    "in_a_loop", "refusals", "nothing_in_the_first",
    "post_accumulate", "hook_that_raises", "created_graphs",
    "test_a_gradient_of_none_counts_as_zero",
    "driven_by_hand", "incomplete", "rounds_by_hand", "failed_by_hand", "autograd_behind_by_hand",
    "float32_sums", "by_autograd", "unused", "refused_dtypes", "types_of_the_user",
    "in_step", "left_alone", "one_rank_evaluates", "two_forwards_and_one_backward",
}  # fmt: skip
"""Not tested of variants whose ranks step apart, since they have no such thing."""


def is_divided(name: str) -> bool:
    """Returns whether a variant divides the parameters, so that the network is of no use alone."""
    return hasattr(implementation(name), "whole_parameters")


def is_apart(name: str) -> bool:
    """Returns whether a rank steps with its own gradients, so that none is reduced."""
    return hasattr(implementation(name), "outer_step")


def any_order(name: str) -> dict:
    """The option with which ranks may call modules in any order, where a variant needs one."""
    return {"units": ()} if is_divided(name) else {}


@dataclass
class Refused:
    """A behaviour's function that ends in a message instead, and may be sent to ranks."""

    function: Callable[..., Any]
    says: str

    def __call__(self, context: Context, *arguments: Any) -> None:
        with pytest.raises(Exception, match=self.says):
            self.function(context, *arguments)


class Behaviours:
    """Runs the function of a behaviour on a pool's ranks, as its row of `REFUSED` says."""

    def __init__(self, pool: RankPool, name: str):
        self.pool, self.size, self.name = pool, pool.size, name
        self.rows = REFUSED["fsdp"] if is_divided(name) else REFUSED.get(name, {})

    def run(self, world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        __tracebackhide__ = True
        if function.__name__ in REDUCED and is_apart(self.name):
            pytest.skip("its ranks step apart")
        if (says := self.rows.get(function.__name__)) is not None:
            function = Refused(function, says)
        return self.pool.run(world_size, function, *arguments)
