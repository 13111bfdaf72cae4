"""Checks every property of a solution on a pool of ranks; explains each failure in one line.

Nothing that a solution does can hang the check: a collective that some rank never issues fails
after `patience_s` on the ranks that wait for it, and a rank that does not answer at all (an endless
loop, say) is killed a little later.
"""

import gc
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic
from types import ModuleType

from ddp_by_hand.exercises.attempt import Try, Verdict, attempt
from ddp_by_hand.exercises.record import POINT_TO_POINT
from ddp_by_hand.lm.rank_pool import Context, RankPool

PATIENCE_S = 6.0  # for one collective, on a machine with a core for each program
KILL_AFTER_S = 3.0  # beyond that, a rank is taken for lost
START_S = 120.0  # a loaded machine may need long to import torch


@dataclass(frozen=True)
class Result:
    """Result of a property: `verdict` is right, wrong or skipped."""

    text: str
    verdict: str
    why: str = ""


class Ranks(RankPool):
    """A pool that has an answer, if only None, from every rank within a time."""

    def try_on(self, world_size: int, task: Try) -> list[Verdict | None]:
        """Returns each rank's verdict; after a None (no answer) the pool is started again."""
        if not self._processes:
            self._start()
            self._collect_verdicts(self._send(self.size, _get_ready), START_S)
        pipes = self._send(world_size, attempt, task)
        verdicts = self._collect_verdicts(pipes, task.patience_s + KILL_AFTER_S)
        if None in verdicts:
            self.close(kill=True)
        return verdicts

    @staticmethod
    def _collect_verdicts(pipes: Sequence[Connection], seconds: float) -> list[Verdict | None]:
        verdicts: dict[int, Verdict | None] = {}
        deadline = monotonic() + seconds
        while len(verdicts) < len(pipes) and (left := deadline - monotonic()) > 0:
            for pipe in wait([p for r, p in enumerate(pipes) if r not in verdicts], left):
                try:
                    ok, answer = pipe.recv()
                except EOFError:
                    ok, answer = True, None
                verdicts[pipes.index(pipe)] = answer if ok else Verdict("raised", answer)
        return [verdicts.get(r) for r in range(len(pipes))]


def _get_ready(context: Context) -> None:
    """Prepares a rank: exempts torch's objects from garbage collection, silences gloo.

    When sizes do not match, gloo ends the process with a message of its own, which would be printed
    between ours. Python's standard error is redirected to its standard output.
    """
    gc.collect()
    gc.freeze()
    sys.stderr = sys.stdout
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)


def patience() -> float:
    """Returns seconds for one collective: a busy machine makes a rank slow, which is no stall."""
    return PATIENCE_S * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def load_check(name: str) -> ModuleType:
    """Returns the check of an exercise: a module with `WORLD_SIZES` and `PROPERTIES`."""
    return import_module(f"ddp_by_hand.exercises.{name}.check")


def judge(
    exercise: str, solution: Path, ranks: Ranks, patience_s: float | None = None
) -> Iterator[Result]:
    """Yields one result per property; after a stall the others are skipped.

    `patience_s`: default `patience()`, anew for each property.
    """
    check = load_check(exercise)
    stalled = False
    for number, body in enumerate(check.PROPERTIES):
        text = body.__doc__.strip().splitlines()[0].rstrip(".")
        if stalled:
            yield Result(text, "skipped", "not tried: repair the stall first")
            continue
        why = ""
        for world_size in check.WORLD_SIZES:
            limit = patience() if patience_s is None else patience_s
            why, stalled = _try(exercise, number, solution.resolve(), ranks, world_size, limit)
            if why:
                several = f"with {world_size} ranks, " if len(check.WORLD_SIZES) > 1 else ""
                why = several + why
                break
        yield Result(text, "wrong" if why else "right", why)


def _try(exercise, number, solution, ranks, world_size, patience_s) -> tuple[str, bool]:
    """Returns why the property does not hold (empty if it does), and whether a rank is blocked."""
    folder = Path(tempfile.mkdtemp(prefix="exercise_"))
    try:
        task = Try(f"ddp_by_hand.exercises.{exercise}.check", number, solution, folder, patience_s)
        verdicts = ranks.try_on(world_size, task)
        return explain(verdicts, [_read_calls(task.log(r)) for r in range(world_size)])
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _read_calls(log: Path) -> list[dict]:
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def explain(verdicts: list[Verdict | None], calls: list[list[dict]]) -> tuple[str, bool]:
    """Returns the first cause (blank, exception, stall, wrong value), and if a rank is blocked."""
    stuck = {r: v for r, v in enumerate(verdicts) if v is None or v.kind == "stalled"}
    for kind, form in (("blank", "fill in: {1}"), ("raised", "rank {0} raised {1}")):
        for rank, verdict in enumerate(verdicts):
            if verdict and verdict.kind == kind:
                return form.format(rank, verdict.text), bool(stuck)
    if stuck:
        where = [f"; rank {r} waits{v.text}" for r, v in stuck.items() if v and v.text]
        return explain_stall(list(stuck), calls) + "".join(where[:1]), True
    return next((v.text for v in verdicts if v.kind == "wrong"), ""), False


def explain_stall(stuck: list[int], calls: list[list[dict]]) -> str:
    """Says which rank did not take part in a collective of the others."""
    for rank in stuck:
        last = calls[rank][-1] if calls[rank] else {"what": ""}
        if last["what"] in POINT_TO_POINT:
            peer = last["peer"]
            theirs = "has gone on"
            if peer in stuck and calls[peer]:
                theirs = f"is in {show(calls[peer][-1])}"
            return (
                f"a {last['what']} was not matched on rank {peer}: rank {rank} waits in "
                f"{show(last)} while rank {peer} {theirs}"
            )
    for number in range(max(map(len, calls), default=0)):
        nth = [c[number] if number < len(c) else None for c in calls]
        if all(call == nth[0] for call in nth):
            continue
        waiting = next(r for r, call in enumerate(nth) if call)
        other = next(r for r, call in enumerate(nth) if call != nth[waiting])
        theirs = f"issued {show(nth[other])}" if nth[other] else f"issued {number or 'none'}"
        return (
            f"a collective was not matched on rank {other}: call {number + 1} of rank {waiting} "
            f"is {show(nth[waiting])}, and rank {other} {theirs}"
        )
    return (
        f"rank {stuck[0]} gave no answer: does it loop for ever, or has its process died? If the "
        "machine is busy, try again"
    )


def show(call: dict) -> str:
    towards = {"send": "to", "isend": "to", "recv": "from", "irecv": "from"}.get(call["what"])
    peer = f" {towards} rank {call['peer']}" if towards else ""
    return f"{call['what']}{peer} of {call['numel']} numbers"
