"""Profile mode: each rank records its trace, the first one draws and sums up what they show."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import torch
import torch.distributed as dist
from torch import nn

from ddp import Unavailable
from ddp_by_hand.bench.gate import FLOOR
from ddp_by_hand.bench.messages import describe_messages
from ddp_by_hand.bench.settings import Settings, Subject
from ddp_by_hand.bench.training import TrainingRun, building, noted_phases, train
from ddp_by_hand.lm.launch import Outcome
from ddp_by_hand.lm.runtime import Worker
from ddp_by_hand.lm.timing import StepClock
from ddp_by_hand.lm.watch import Cause, Watch
from ddp_by_hand.measure import Progress, write_atomically
from ddp_by_hand.measure.files import say_unwritten
from ddp_by_hand.measure.runs import flat
from ddp_by_hand.measure.words import counted
from ddp_by_hand.tracing import (
    Trace,
    basis_of,
    budgets,
    describe_budgets,
    disturbance,
    draw_budgets,
    draw_timeline,
    hidden_fraction,
    load_traces,
    overlap,
    phase,
    profile,
    representative_step,
    slowest_operators,
)
from ddp_by_hand.tracing import write_summary as write_summary_file

MIB = 1 << 20
ENDED = "BENCH_PROFILE_ENDED"  # of the environment: what earlier ranks of this call have come to


def leave_out_failed(outcome: Outcome) -> None:
    """Makes the ranks that are started next continue after the implementation that failed."""
    ended = json.loads(outcome.handed_over or os.environ.get(ENDED, "{}"))
    who = f"rank {outcome.cause.rank}: " if outcome.cause.rank >= 0 else ""
    ended[outcome.doing] = f"{outcome.cause.status}: {who}{outcome.cause.message}"
    os.environ[ENDED] = json.dumps(ended)


class Profiling:
    """Records traces of the chosen implementations, in each clipping mode, in `folder`."""

    def __init__(self, settings: Settings, worker: Worker, folder: Path):
        self.settings, self.worker, self.folder = settings, worker, folder
        self.watch: Watch | None = None
        self.ended = json.loads(os.environ.get(ENDED, "{}"))
        """Label -> why it has no profile, empty if it has one."""
        self.is_incomplete = False  # a file could not be written
        self._traces: dict[str, list[Trace]] = {}  # of each label, once they have been read

    def on_failure(self, cause: Cause) -> None:
        """Does nothing: written files are whole, and unfinished ones are not kept."""

    def run(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        subjects = self.settings.subjects
        enabled = None if self.worker.is_first else False
        with Progress(len(subjects), enabled, done=len(self.ended)) as progress:
            for subject in subjects:
                if subject.label not in self.ended:
                    progress.update(subject.label)
                    self._begin(subject)
                    self._profile(subject, progress)
        if self.worker.is_first:
            self._report([subject for subject in subjects if not self.ended[subject.label]])

    def _begin(self, subject: Subject) -> None:
        """Synchronizes all ranks, so that a later failure belongs to this subject."""
        if self.worker.is_first:
            self.watch.hand_over(json.dumps(self.ended))
            self.watch.say(subject.label)
        self.watch.at(f"{subject.label} (profile)")
        self.watch.speak()
        dist.barrier()

    def _profile(self, subject: Subject, progress: Progress) -> None:
        try:
            self._record(subject)
            self.ended[subject.label] = ""
        except Unavailable as reason:
            self.ended[subject.label] = f"unavailable: {reason}"
            return
        dist.barrier()  # every trace is written
        if self.worker.is_first:
            progress.close()  # what is printed starts on a clean line
            self._summarize(subject)

    def _record(self, subject: Subject) -> None:
        device = self.worker.device
        trace_path = trace_file(self.folder, subject, self.worker.rank)
        with building(self.settings, subject, self.worker) as run:
            for number in range(min(3, self.settings.num_steps)):  # build, allocate, connect
                run.step(number, phase)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            dist.barrier()
            with profile(
                trace_path, device_type=device.type, configuration=self._configuration(subject)
            ) as profiler:
                train(run, StepClock(device), noted_phases(self.watch, subject.label))
            self._operators = slowest_operators(profiler)
            self._memory = self._record_memory(subject, run)
            self._stats = run.model.stats() if hasattr(run.model, "stats") else {}
            self._launches = describe_launches(run.model)
            self._plan = run.model.step_context.plans.last if subject.is_fused else None
            is_on = getattr(run.model, "profile", None) is not None
            self._phases = run.model.profile_report() if is_on else ""
            del run

    def _configuration(self, subject: Subject) -> dict:
        """Returns the settings, named as in a row of the benchmark's results."""
        return {
            **self.settings.identity(subject),
            "implementation": subject.implementation,
            "world_size": self.worker.world_size,
            "device": self.worker.device.type,
        }

    def _record_memory(self, subject: Subject, run: TrainingRun) -> dict[str, str]:
        """Records this rank's peak memory and, in one more step, a snapshot of its allocations.

        Recording allocations slows the host down, which would show in the trace: hence a step of
        its own. The functions are private in name, documented all the same
        (https://docs.pytorch.org/docs/stable/torch_cuda_memory.html).
        """
        if self.worker.device.type != "cuda":
            return {}
        peak = torch.cuda.max_memory_allocated() / MIB
        snapshot = self.folder / f"{subject.file_stem}_rank_{self.worker.rank}_memory.pickle"
        torch.cuda.memory._record_memory_history(max_entries=100_000, stacks="python")
        run.step(0, phase)
        torch.cuda.memory._dump_snapshot(str(snapshot))
        torch.cuda.memory._record_memory_history(enabled=None)
        return {"peak allocated, MiB": f"{peak:.0f}", "snapshot": str(snapshot)}

    def _summarize(self, subject: Subject) -> None:
        """Print the figures, then write: what cannot be written has been seen at least."""
        traces = self._traces_of(subject)
        self._print_figures(subject, traces)
        configuration = {
            "implementation": subject.implementation,
            **flat(self._configuration(subject)),
            **{f"{key} per step": value for key, value in self._stats.items()},
            "torch": torch.__version__,
        }
        if subject.layout.splits_tensors:
            configuration["mesh"] = subject.layout.describe(self.worker.world_size)
        if subject.is_private:
            configuration["batches"] = "of fixed size: no ε is stated"
        stem = subject.file_stem
        self._write(
            self.folder / f"{stem}_summary.txt",
            lambda path: write_summary_file(
                path,
                configuration,
                traces,
                self._operators,
                list(map(str, self._trace_files(subject))),
                self._memory,
                self._launches,
                self._describe_plan(traces[0]),
                self._describe_budget(subject, traces),
            ),
        )
        if self._phases:
            text = self._phases + "\n"
            self._write(
                self.folder / f"{stem}_phases.txt", lambda path: write_atomically(path, text)
            )
        self._draw({subject.label: traces}, self.folder / f"{stem}_timeline.png")

    def _draw(self, traces: dict[str, list[Trace]], picture: Path) -> None:
        self._write(picture, lambda path: draw_timeline(traces, path, title=self._title()))

    def _write(self, path: Path, write: Callable[[Path], None]) -> None:
        """Writes a file; if that fails, reports it and lets the exit status say so."""
        try:
            write(path)
        except OSError as error:
            self.is_incomplete = True
            say_unwritten(path, error)

    def _describe_plan(self, trace: Trace) -> list[str]:
        """Describes each linear layer's algorithm and measured time; empty without a plan."""
        if self._plan is None:
            return []
        steps = overlap(trace).steps or 1
        times = {name: us / steps / 1e6 for name, us in trace.layers.items()}
        return [
            *self._plan.table(self._plan.measured(times)).splitlines(),
            "",
            f"Measured: {trace.basis} of each layer's norm and sum, mean of {steps} steps.",
        ]

    def _describe_budget(self, subject: Subject, traces: list[Trace]) -> list[str]:
        """Describes where a step's time went; empty if the floor has not been profiled before."""
        floor = floor_of(subject)
        if subject.label == floor.label or self.ended.get(floor.label) != "":
            return []
        both = {floor.label: self._traces_of(floor), subject.label: traces}
        found = budgets(both, dict.fromkeys(both, floor.label))
        return describe_budgets(found, basis_of(both))

    def _print_figures(self, subject: Subject, traces: list[Trace]) -> None:
        """Prints the numbers of the picture, and whether other programs disturbed them."""
        windows = representative_step(traces)
        measured = [overlap(trace, window) for trace, window in zip(traces, windows, strict=True)]

        def mean(time: str) -> str:
            return f"{fmean(getattr(one, time) for one in measured) / 1e3:.2f} ms"

        hidden = hidden_fraction(measured)
        print(
            f"{subject.label}: step {mean('span')}, communication {mean('communication')}, "
            f"exposed {mean('exposed')}, waiting {mean('waiting')}"
            + ("" if hidden is None else f", {hidden:.0%} hidden")
            + f" (the step of median length, mean over ranks, {measured[0].basis})",
            flush=True,
        )
        if doubt := disturbance(traces):
            print(f"{subject.label}: {doubt}", flush=True)

    def _report(self, subjects: list[Subject]) -> None:
        for label, reason in self.ended.items():
            if reason:
                print(f"{label}: {reason}")
        if len(subjects) > 1:
            picture = self.folder / "all_timeline.png"
            traces = {subject.label: self._traces_of(subject) for subject in subjects}
            self._draw(traces, picture)
            if picture.exists():
                print(f"picture of all: {picture}")
            if len(traces.get("ddp", [])) > 1:
                print(*describe_messages(traces["ddp"]), sep="\n")
            self._report_budgets(subjects, traces)
        print(f"traces, summaries and timelines: {self.folder}", flush=True)

    def _report_budgets(self, subjects: list[Subject], traces: dict[str, list[Trace]]) -> None:
        """Prints and draws what each step's time went into, where the floor was profiled too."""
        found = budgets(traces, {subject.label: floor_of(subject).label for subject in subjects})
        if len(found) < 2:
            return
        print("\nBudget of a step, ms", *describe_budgets(found, basis_of(traces)), "", sep="\n")
        picture = self.folder / "budget.png"
        title = self._title("Where the time of a step goes:")
        self._write(picture, lambda path: draw_budgets(found, path, title, basis_of(traces)))
        if picture.exists():
            print(f"picture of the budgets: {picture}")

    def _title(self, what: str = "One training step on") -> str:
        settings = self.settings
        return (
            f"{what} {counted(self.worker.world_size, 'rank')} "
            f"({self.worker.device.type}, {settings.dtype}, {settings.batch_size} × "
            f"{settings.model.context_length} tokens per rank)"
        )

    def _traces_of(self, subject: Subject) -> list[Trace]:
        """Returns the traces of all ranks, read once: an earlier start may have recorded them."""
        if subject.label not in self._traces:
            self._traces[subject.label] = load_traces(self._trace_files(subject))
        return self._traces[subject.label]

    def _trace_files(self, subject: Subject) -> list[Path]:
        """Returns the trace files of all ranks in this folder; other hosts may have their own."""
        paths = [trace_file(self.folder, subject, r) for r in range(self.worker.world_size)]
        return [path for path in paths if path.exists()]


def describe_launches(model: nn.Module) -> list[str]:
    """Describes each launch: gradients that were ready, and bytes; empty if not recorded."""
    launches = model.launches() if hasattr(model, "launches") else []
    total = sum(len(launch.names) for launch in launches)
    lines = []
    for launch in launches:
        first, *rest = launch.names
        more = f" and {len(rest)} more, last {rest[-1]}" if rest else ""
        lines.append(
            f"after gradient {launch.ready:>3} of {total}: {launch.nbytes / MIB:8.3f} MiB, "
            f"{first}{more}"
        )
    return lines


def floor_of(subject: Subject) -> Subject:
    """Returns the step without communication that a subject is compared with."""
    return Subject(FLOOR, subject.clipping)


def trace_file(folder: Path, subject: Subject, rank: int) -> Path:
    return folder / f"{subject.file_stem}_rank_{rank}_trace.json"
