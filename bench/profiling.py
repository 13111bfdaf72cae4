"""Profile mode: each rank records its trace, the first one draws and sums up what they show."""

import re
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from bench.settings import Settings, label
from bench.training import Phase, Run, building, train
from ddp import Unavailable
from lm.runtime import StepClock, Worker
from lm.watch import Cause, Watch
from measure import Progress
from tracing import draw_timeline, load_trace, overlap, phase, profile, slowest_operators
from tracing import write_summary as write_summary_file

MIB = 1 << 20


class Profiling:
    """Traces of the chosen implementations, in `folder`."""

    def __init__(self, settings: Settings, worker: Worker, folder: Path):
        self.settings, self.worker, self.folder = settings, worker, folder
        self.watch: Watch | None = None
        self.unavailable: dict[str, str] = {}

    def on_failure(self, cause: Cause) -> None:
        """What has been written is whole; nothing is recorded of what was under way."""

    def run(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        names = self.settings.implementations
        with Progress(len(names), None if self.worker.is_first else False) as progress:
            for name in names:
                progress.update(name)
                self._profile(name)
        if self.worker.is_first:
            self._report([name for name in names if name not in self.unavailable])

    def _profile(self, name: str) -> None:
        self.watch.at(f"{label(name)} (profile)")
        try:
            self._record(name)
        except Unavailable as reason:
            self.unavailable[name] = str(reason)
            return
        dist.barrier()  # every trace is written
        if self.worker.is_first:
            self._summarize(name)

    def _record(self, name: str) -> None:
        device = self.worker.device
        trace_path = trace_file(self.folder, name, self.worker.rank)
        with building(self.settings, name, self.worker) as run:
            for number in range(min(3, self.settings.num_steps)):  # build, allocate, connect
                run.step(number, phase)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            dist.barrier()
            with profile(trace_path, device_type=device.type) as profiler:
                train(run, StepClock(device), lambda number: self._phase(name, number))
            self._operators = slowest_operators(profiler)
            self._memory = self._record_memory(name, run)
            self._stats = run.model.stats() if hasattr(run.model, "stats") else {}
            self._launches = describe_launches(run.model)
            del run

    def _record_memory(self, name: str, run: Run) -> dict[str, str]:
        """Peak of this rank, and a snapshot of one more step.

        Recording allocations slows the host down, which would show in the trace: hence a step of
        its own. The functions are private in name, documented all the same
        (https://docs.pytorch.org/docs/stable/torch_cuda_memory.html).
        """
        if self.worker.device.type != "cuda":
            return {}
        peak = torch.cuda.max_memory_allocated() / MIB
        snapshot = self.folder / f"{file_stem(name)}_rank_{self.worker.rank}_memory.pickle"
        torch.cuda.memory._record_memory_history(max_entries=100_000, stacks="python")
        run.step(0, phase)
        torch.cuda.memory._dump_snapshot(str(snapshot))
        torch.cuda.memory._record_memory_history(enabled=None)
        return {"peak allocated, MiB": f"{peak:.0f}", "snapshot": str(snapshot)}

    def _phase(self, name: str, number: int) -> Phase:
        @contextmanager
        def noted(part: str):
            self.watch.at(f"{label(name)}, step {number}, {part}")
            with phase(part):
                yield

        return noted

    def _summarize(self, name: str) -> None:
        files = self._trace_files(name)
        traces = [load_trace(path) for path in files]
        settings = self.settings
        configuration = {
            "implementation": name,
            "ranks": self.worker.world_size,
            "device": str(self.worker.device.type),
            "dtype": settings.dtype,
            "compiled": settings.compile,
            "sequences a rank": settings.batch_size,
            **vars(settings.model),
            "epochs": f"{settings.num_epochs}, of which warmup {settings.warmup_epochs}",
            "steps an epoch": settings.steps_per_epoch,
            **{f"{key} a step": value for key, value in self._stats.items()},
            "torch": torch.__version__,
        }
        stem = file_stem(name)
        write_summary_file(
            self.folder / f"{stem}_summary.txt",
            configuration,
            traces,
            self._operators,
            [str(path) for path in files],
            self._memory,
            self._launches,
        )
        picture = self.folder / f"{stem}_timeline.png"
        draw_timeline({label(name): traces}, picture, title=self._title())

    def _report(self, names: list[str]) -> None:
        traces = {
            label(name): [load_trace(path) for path in self._trace_files(name)] for name in names
        }
        for name in traces:
            whole = overlap(traces[name][0])
            measured = whole.per_step() or whole
            share = measured.overlap_fraction
            print(
                f"{name}: step {measured.span / 1e3:.2f} ms, communication "
                f"{measured.communication / 1e3:.2f} ms, exposed {measured.exposed / 1e3:.2f} ms"
                + ("" if share is None else f", overlap {share:.0%}")
                + f" (rank 0, mean of {whole.steps} steps, {measured.basis})"
            )
        for name, reason in self.unavailable.items():
            print(f"{label(name)}: unavailable: {reason}")
        if len(names) > 1:
            picture = self.folder / "all_timeline.png"
            draw_timeline(traces, picture, title=self._title())
            print(f"picture of all: {picture}")
        print(f"traces, summaries and timelines: {self.folder}")

    def _title(self) -> str:
        settings = self.settings
        return (
            f"One training step on {self.worker.world_size} ranks "
            f"({self.worker.device.type}, {settings.dtype}, {settings.batch_size} × "
            f"{settings.model.context_length} tokens a rank)"
        )

    def _trace_files(self, name: str) -> list[Path]:
        """Of all ranks whose traces are in this folder: other hosts may have their own."""
        paths = [trace_file(self.folder, name, r) for r in range(self.worker.world_size)]
        return [path for path in paths if path.exists()]


def describe_launches(model: nn.Module) -> list[str]:
    """What left after how many gradients; empty for a variant that does not tell."""
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


def trace_file(folder: Path, name: str, rank: int) -> Path:
    return folder / f"{file_stem(name)}_rank_{rank}_trace.json"


def file_stem(name: str) -> str:
    """A plug-in's class name, without its path."""
    return re.sub(r"[^\w.-]", "_", label(name))
