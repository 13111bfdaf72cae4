"""Separates computation from communication in a trace without a GPU (gloo).

Read off real traces of two gloo processes, all-reducing from hooks in backward and after it:

communication
    Every event named `gloo:*` or `nccl:*`. Gloo records one on the worker thread that carries
    out the collective, from the moment it starts on it to its end, so it covers moving the bytes,
    adding them and waiting for a slower partner, as an NCCL kernel does. Several may run at once.
neither
    `c10d::*`: the caller's side of a collective. It queues the work and returns; counting it as
    communication would count the bytes twice, counting it as computation would hide a wait.
    Waiting itself (`work.wait()`) is no event at all: the operators just stop.
    `autograd::*`, `torch::autograd::*` and the nodes named `...Backward0`: wrappers around
    operators. They also contain the hooks, so a blocking all-reduce called in a hook lies inside
    one: the wrapper would turn the wait into computation.
computation
    Every other operator (`cpu_op`: `aten::*`, DDP's `torch::distributed::reducer::*` copies,
    compiled graphs) on a thread that carries no collective, less any `c10d::*` time inside it.

This is a proxy. An operator's time is wall time on a core that it shares with gloo's threads and
with other processes, so communication that is hidden here still slows the operators it hides
behind. The interpreter's own time between operators counts as idle.
"""

import re

from .intervals import Interval, by_name, difference, intervals_of, total
from .phases import ACCUMULATION

BASIS = "CPU operators (a proxy)"
COLLECTIVES = ("gloo:", "nccl:")
CALLER_SIDE = ("c10d::", "_c10d_functional::")
WRAPPERS = ("autograd::", "torch::autograd::")
KINDS = {
    "products": re.compile(r"aten::(mm|addmm|bmm|baddbmm|linear)"),
    "attention": re.compile(r"aten::_?(scaled_dot_product|flash_attention|efficient_attention).*"),
}


class Rules:
    """Sorts the events of a trace into computation and communication, by the rules above."""

    basis = BASIS

    def __init__(self, events: list[dict]) -> None:
        self.events = events
        self._collectives = [e for e in events if e["name"].startswith(COLLECTIVES)]
        busy_threads = {e["tid"] for e in self._collectives}
        operators = [
            e
            for e in events
            if e.get("cat") == "cpu_op"
            and e["tid"] not in busy_threads
            and not is_wrapper(e["name"])
        ]
        self.computation = _without_launches(operators)  # sorted, and merged per thread
        self.communication = intervals_of(self._collectives)

    def collectives(self) -> dict[str, list[Interval]]:
        """Returns name → intervals, in order."""
        return by_name(self._collectives)

    def work_by_name(self, span: Interval) -> tuple[list, list]:
        """Returns nothing: operators contain others, and gloo says not what it does."""
        return [], []

    def place_phases(
        self, on_cpu: dict[str, list[Interval]]
    ) -> tuple[dict[str, list[Interval]], str]:
        """Returns the phases as recorded, and where that is."""
        return on_cpu, "ranges on the CPU thread"

    def time_in(self, on_cpu: dict[str, list[Interval]]) -> dict[str, float]:
        """Returns how long ranges lasted."""
        return {name: total(ranges) for name, ranges in on_cpu.items()}

    def gradients(self) -> list[float]:
        """Returns when autograd began to accumulate each gradient, in order."""
        return sorted(e["start"] for e in self.events if e["name"] == ACCUMULATION)

    def kinds(self) -> dict[str, list[Interval]]:
        """Returns the operators of each kind of arithmetic."""
        return {
            kind: intervals_of(e for e in self.events if pattern.fullmatch(e["name"]))
            for kind, pattern in KINDS.items()
        }


def is_wrapper(name: str) -> bool:
    """Returns whether an operator only contains others: a node of the backward graph."""
    return name.startswith(WRAPPERS) or re.fullmatch(r"[^:]*Backward\d*", name) is not None


def _without_launches(operators: list[dict]) -> list[Interval]:
    """Returns, per thread, operators less the caller's side of collectives, also inside a graph."""
    kept: list[Interval] = []
    for thread in {e["tid"] for e in operators}:
        own = [e for e in operators if e["tid"] == thread]
        launches = [e for e in own if e["name"].startswith(CALLER_SIDE)]
        kept += difference(intervals_of(own), intervals_of(launches))
    return sorted(kept)
