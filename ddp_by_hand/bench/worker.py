"""Benchmark mode on one rank: the correctness gate, then interleaved rounds of timing."""

import json
import sys
from dataclasses import dataclass
from statistics import fmean, median

import torch
import torch.distributed as dist

from ddp import Unavailable
from ddp_by_hand.bench.gate import Gate, tolerance
from ddp_by_hand.bench.options import PROGRAM
from ddp_by_hand.bench.settings import Settings, Subject, source_digest
from ddp_by_hand.bench.training import building, noted_phases, train
from ddp_by_hand.lm.runtime import (
    Worker,
    device_name,
    has_parent,
    invocation,
    typed_command,
)
from ddp_by_hand.lm.timing import PeakMemory, StepClock, max_over_ranks
from ddp_by_hand.lm.watch import Cause, Watch
from ddp_by_hand.measure import (
    FINISHED,
    OK,
    UNAVAILABLE,
    Progress,
    Results,
    cell_key,
    environment,
    plan_rounds,
)
from ddp_by_hand.measure.files import say_unwritten

GATE, TIMING = "gate", "timing"


@dataclass(frozen=True)
class BenchmarkCell:
    """One measurement: the gate of an implementation (round -1), or one of its timed rounds."""

    subject: Subject
    kind: str
    round: int

    def row(self, settings: Settings, world_size: int, device: str) -> dict:
        """Returns the beginning of its row in the results, with the key that identifies it."""
        name = self.subject.implementation
        mine = {"implementation": name, "kind": self.kind, "round": self.round}
        config = {
            **settings.identity(self.subject),
            **mine,
            "world_size": world_size,
            "device": device,
            "torch": torch.__version__,
        }
        if digest := source_digest(name):
            config["source"] = digest
        if self.subject.is_private:
            mine["clipping"] = self.subject.clipping
        return {"key": cell_key(config), **mine, "config": config}

    @property
    def label(self) -> str:
        part = "gate" if self.kind == GATE else f"round {self.round}"
        return f"{self.subject.label} ({part})"


def plan(settings: Settings) -> list[BenchmarkCell]:
    """Returns the cells in one order for all ranks: all gates, then interleaved rounds.

    Gates of ordinary training come first: it and private training have different references, as
    have ranks that share a batch, and only one of them is in memory.
    """

    def reference(subject: Subject) -> tuple[bool, int]:
        return subject.is_private, subject.layout.tensor_ranks or 0

    by_reference = sorted(settings.subjects, key=reference)
    rounds = plan_rounds(settings.subjects, settings.rounds, settings.seed)
    return [
        *(BenchmarkCell(subject, GATE, -1) for subject in by_reference),
        *(BenchmarkCell(subject, TIMING, number) for number, subject in rounds),
    ]


def failure_row(row_text: str, cause: Cause) -> dict:
    """Returns the row of the cell that was running when the run failed."""
    who = f"rank {cause.rank}: " if cause.rank >= 0 else ""
    told = {"traceback": cause.traceback} if cause.traceback else {}
    return {**json.loads(row_text), "status": cause.status, "reason": who + cause.message, **told}


def record_failure(settings: Settings, failed: dict) -> None:
    """Record it, unless the cell has a row of this call: several may come to write it."""
    results = Results(settings.output_dir)
    newest = next((r for r in results.rows() if r["key"] == failed["key"]), {})
    if newest.get("invocation") != failed["invocation"]:
        results.record(failed)


def describe_row(row: dict) -> str:
    """Describes a finished cell, for a line of progress."""
    if row["status"] != OK:
        return f"{row['status']}: {row['reason']}"
    if row["kind"] == GATE:
        wrong = f", wrong: {row['worst_gradient']}" if "worst_gradient" in row else ""
        return f"gradient error {row['gradient_error']:.1e}{wrong}"
    return f"median step {median(row['step_ms']):.2f} ms"


class Benchmark:
    """The cells of this run, measured by all ranks together and recorded by the first."""

    def __init__(self, settings: Settings, worker: Worker):
        self.settings, self.worker = settings, worker
        self.watch: Watch | None = None
        self.unwritten: list[dict] = []  # rows that the results' file did not take
        self._doing = ""
        self._gate: Gate | None = None

    def on_failure(self, cause: Cause) -> None:
        if self.worker.is_first and self._doing:
            try:
                record_failure(self.settings, failure_row(self._doing, cause))
            except OSError as error:
                if not has_parent():  # which tries it again, and says it
                    say_unwritten(Results(self.settings.output_dir).path, error)

    def run(self) -> None:
        cells = self._agree_on(self._unfinished())
        enabled = None if self.worker.is_first else False
        total = len(plan(self.settings))
        with Progress(total, enabled, done=total - len(cells)) as progress:
            unavailable = set()
            for cell in cells:
                progress.update(cell.label)
                if cell.subject in unavailable:
                    progress.finished(f"{cell.label}: unavailable")
                    continue
                row = self._measure(cell)
                if row["status"] == UNAVAILABLE:
                    unavailable.add(cell.subject)
                progress.finished(f"{cell.label}: {describe_row(row)}")

    def _unfinished(self) -> list[BenchmarkCell]:
        """Lists cells that are left, without those of a subject that has just failed."""
        if not self.worker.is_first:
            return []
        results = Results(self.settings.output_dir)
        rows = {row["key"]: row for row in results.rows()}
        cells = plan(self.settings)
        known = {cell: rows.get(self._row(cell)["key"]) for cell in cells}
        given_up = {
            cell.subject
            for cell, row in known.items()
            if row and row["status"] != OK
            and (row["status"] == UNAVAILABLE or row["invocation"] == invocation())
        }  # fmt: skip
        return [
            cell
            for cell, row in known.items()
            if not (row and row["status"] in FINISHED) and cell.subject not in given_up
        ]

    def _agree_on(self, cells: list[BenchmarkCell]) -> list[BenchmarkCell]:
        """Broadcasts the first rank's list of cells; other hosts may not have the results file."""
        box = [cells]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def _row(self, cell: BenchmarkCell) -> dict:
        row = cell.row(self.settings, self.worker.world_size, device_name(self.worker.device))
        command = typed_command(PROGRAM, sys.argv[1:])
        return {**row, "invocation": invocation(), "command": command}

    def _measure(self, cell: BenchmarkCell) -> dict:
        """Returns the cell's row, which the first rank has recorded.

        All ranks are in the same cell, so that what fails is that cell's: none begins before the
        first has said which it is, and it is recorded when all have come to its end. A collective
        that an implementation has left behind is found there and not in the next cell.
        """
        self._doing = json.dumps(self._row(cell))
        if self.worker.is_first:
            self.watch.say(self._doing)
        self.watch.at(cell.label)
        self.watch.speak()
        dist.barrier()
        try:
            measured = self._prove(cell) if cell.kind == GATE else self._time(cell)
            status = OK
        except Unavailable as reason:
            measured, status = {"reason": str(reason)}, UNAVAILABLE
        self.watch.at(f"{cell.label}, end")
        dist.barrier()
        row = {**self._row(cell), "status": status, **measured}
        if self.worker.is_first:
            self._record({**row, "environment": environment()})
        self._doing = ""
        return row

    def _record(self, row: dict) -> None:
        """Records a row. If the disk is full, the row is kept for the table."""
        try:
            Results(self.settings.output_dir).record(row)
        except OSError as error:
            if not self.unwritten:
                path = Results(self.settings.output_dir).path
                say_unwritten(path, error, "the table will have what was measured, no file has it")
            self.unwritten.append(row)
            self.watch.hand_over(json.dumps(self.unwritten))

    def _prove(self, cell: BenchmarkCell) -> dict:
        self._gate = self._gate or Gate(self.settings, self.worker, self.watch.at)
        worst = self._gate.error(cell.subject)
        limit = tolerance(cell.subject, self.settings)
        wrong = {} if worst.error <= limit else {"worst_gradient": worst.describe()}
        return {"gradient_error": worst.error, "tolerance": limit, **wrong}

    def _time(self, cell: BenchmarkCell) -> dict:
        self._gate = None  # its reference gradients would count as memory
        memory = PeakMemory(self.worker.device)
        with building(self.settings, cell.subject, self.worker) as run:
            clock = StepClock(self.worker.device)
            loss = train(run, clock, noted_phases(self.watch, cell.label))
            milliseconds = max_over_ranks(clock.milliseconds(), self.worker.device)
            outside = getattr(run.model, "bytes_outside_allocator", 0)
            peak = memory.bytes()
            stats = run.model.stats() if hasattr(run.model, "stats") else {}
            plan = run.model.step_context.plans.last if cell.subject.is_fused else None
            del run
        untimed = self.settings.untimed_steps
        if (round_ := self.settings.local_steps(cell.subject)) > 1:  # the last step ends a round
            stats |= {key: stats[key] / round_ for key in ("collectives", "bytes")}
        timed = means_of(milliseconds[untimed:], round_)
        peak = max_over_ranks([-1.0 if peak is None else peak + outside], self.worker.device)[0]
        return {
            "step_ms": timed,
            "total_batch_size": self.settings.batch_size * self._data_ranks(cell),
            "untimed_step_ms": milliseconds[:untimed],
            "peak_memory_bytes": None if peak < 0 else int(peak),
            "loss": float(loss),
            **stats,
            **({"plan": plan.table()} if plan and cell.round == 0 else {}),
        }

    def _data_ranks(self, cell: BenchmarkCell) -> int:
        """Returns the number of ranks that have a batch each; ranks of a tensor axis share one."""
        return cell.subject.layout.sizes(self.worker.world_size)[0]


def means_of(steps: list[float], round_: int) -> list[float]:
    """Returns the mean of each whole round among the last of these steps.

    As many steps in succession as a round has include one exchange, wherever they begin.
    """
    rounds = len(steps) // round_
    last = steps[len(steps) - rounds * round_ :]
    return [fmean(last[i * round_ : (i + 1) * round_]) for i in range(rounds)]
