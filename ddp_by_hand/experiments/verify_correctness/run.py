"""Runs `experiments.verify_correctness`: chooses and starts the ranks, prints the results."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from ddp_by_hand.experiments.verify_correctness.cases import (
    DTYPES,
    NETWORKS,
    PRIVATE_MODES,
    SMALL,
    Ranks,
    plan,
)
from ddp_by_hand.experiments.verify_correctness.findings import MOST, TOLERANCES, Finding
from ddp_by_hand.experiments.verify_correctness.phases import phase_table
from ddp_by_hand.experiments.verify_correctness.step import verify
from ddp_by_hand.lm.launch import run_ranks
from ddp_by_hand.lm.layout import DATA, Layout, mesh_of
from ddp_by_hand.lm.ranks import watched_rank
from ddp_by_hand.lm.runtime import (
    Hardware,
    Worker,
    find_hardware,
    has_parent,
    launched,
    launched_rank,
    launched_world_size,
)
from ddp_by_hand.lm.watch import Cause
from ddp_by_hand.measure import Column, Progress, format_table
from ddp_by_hand.measure.extras import MissingExtra, require
from ddp_by_hand.measure.options import option, positive
from ddp_by_hand.measure.words import counted
from dp_clipping.clipping.norms import GRAM_ROUNDING
from dp_clipping.modes import REFERENCE_MODE
from dp_clipping.profiling.profile import switch_on

DEVICES = {"auto": "auto", "gloo": "cpu", "nccl": "cuda"}
SILENCE = 5.0  # seconds without a line, where there is no terminal
TENSOR_RANKS = 2  # of a mesh of two axes


# fmt: off
@dataclass(frozen=True)
class Options:
    """Command-line options; `remarks` are further lines for the result."""

    use_fsdp: bool = option(False, group="what to check", help=(
        "FSDP2: ranks have shards of the parameters and different samples, one rank none "
        "(default: not sharded)"))
    use_tp: bool = option(False, help=(
        "tensor parallel: ranks have parts of each layer and the same samples; with "
        "--use-fsdp two ranks each, and at least four in all. Each case runs three times, as norms "
        "travel: sync, async, layerwise (default: not split)"))
    modes: tuple[str, ...] = option(PRIVATE_MODES, choices=PRIVATE_MODES, unique=True,
        metavar="MODE", help=(
        f"what is checked: any of {', '.join(PRIVATE_MODES)} (default: all)"))
    networks: tuple[str, ...] = option(tuple(NETWORKS), choices=tuple(NETWORKS), unique=True,
        metavar="NAME", help=(
        "on what: transformer (ddp_by_hand/lm/model.py), llama (Hugging Face's, where transformers "
        "is installed) (default: both)"))
    dtype: str = option("float32", choices=tuple(DTYPES),
        help="dtype of the parameters; tolerances follow from it")

    backend: str = option("auto", group="run and output", choices=("auto", "gloo", "nccl"),
        help="nccl: GPUs; gloo: the CPU; auto: GPUs where there are some")
    num_processes: int | None = option(None, metavar="N", check=positive, help=(
        "ranks, unless torchrun sets them (default: one; with --use-fsdp or --use-tp one per GPU "
        "or two on a CPU, with both at least four)"))
    timeout: float = option(600.0, metavar="S", check=positive,
        help="seconds without progress after which several ranks give up")
    enable_profiling: bool = option(False, help=(
        "also each mode's phases, in milliseconds, after the result: what "
        "DP_CLIPPING_PROFILE=1 times in any private step (default: off, and nothing is timed)"))
    verbose: bool = option(False, help=(
        "also the norms that each rank has before and after ranks exchange them "
        "(default: tables only)"))
    remarks: tuple[str, ...] = ()
# fmt: on


def prepare(options: Options) -> tuple[Options, Hardware]:
    """Returns options and hardware; removes networks whose library is missing, with a remark.

    Raises:
        ValueError: the requested setting is not available here.
    """
    others = tuple(name for name in options.networks if name != "llama")
    try:
        if others != options.networks:
            require("transformers")
    except MissingExtra as error:
        if not others:
            raise
        remark = f"Hugging Face's Llama is left out: {error}"
        options = replace(options, networks=others, remarks=(remark,))
    hardware = hardware_for(options)
    check_ranks(options, hardware.num_processes)
    return options, hardware


def run(options: Options, hardware: Hardware, command: Sequence[str]) -> int:
    """Runs all cases. Returns the exit status. `command` starts one of several ranks."""
    if options.enable_profiling:
        switch_on()
    if launched():
        return work(options, hardware)
    if hardware.num_processes == 1 and not (options.use_fsdp or options.use_tp):
        return alone(options, hardware)
    print(hardware.sentence, flush=True)
    return int(run_ranks(command, hardware.num_processes).status != 0)


def hardware_for(options: Options) -> Hardware:
    device, sharded = DEVICES[options.backend], options.use_fsdp or options.use_tp
    count = options.num_processes or (None if sharded else 1)
    try:
        if launched():
            world_size = launched_world_size()
            return replace(find_hardware(device, world_size), num_processes=world_size)
        found = find_hardware(device, count)
        if count is None and options.use_fsdp and options.use_tp:
            found = find_hardware(device, _mesh_size(found))
    except ValueError as error:
        text = str(error).replace("--device cuda", "--backend nccl")
        raise ValueError(text.replace("--device cpu", "--backend gloo")) from error
    return found


def _mesh_size(hardware: Hardware) -> int:
    """Returns the largest number of ranks that a mesh of two axes can have."""
    if hardware.device_type == "cpu":
        return 2 * TENSOR_RANKS
    gpus = hardware.num_processes
    if gpus < 2 * TENSOR_RANKS:
        raise ValueError(
            f"--use-fsdp --use-tp need {2 * TENSOR_RANKS} GPUs, and this machine has {gpus}: add "
            "--backend gloo"
        )
    return gpus - gpus % TENSOR_RANKS


def check_ranks(options: Options, world_size: int) -> None:
    """Raises ValueError if the networks cannot be spread over `world_size` ranks."""
    given = "--use-fsdp --use-tp" if options.use_fsdp else "--use-tp"
    for name in options.networks:
        try:
            layout_of(options).check(world_size, lambda name=name: NETWORKS[name](SMALL))
        except ValueError as error:
            raise ValueError(
                f"{given} on {world_size} ranks, {name}: {error}, with --num-processes"
            ) from error


def layout_of(options: Options) -> Layout:
    tensor_ranks = 1
    if options.use_tp:
        tensor_ranks = TENSOR_RANKS if options.use_fsdp else None
    return Layout(tensor_ranks, "block" if options.use_fsdp else None)


def ranks_of(options: Options, worker: Worker) -> Ranks:
    mesh = None
    if options.use_fsdp or options.use_tp:
        mesh = mesh_of(layout_of(options), worker.world_size, worker.device.type)
    return Ranks(worker.device, dist.group.WORLD, mesh)


def alone(options: Options, hardware: Hardware) -> int:
    on_gpu = hardware.device_type == "cuda"
    place = torch.cuda.get_device_name(0) if on_gpu else hardware.sentence.partition(" on ")[2]
    print(f"one process on {place}", flush=True)
    report = Report(options, Ranks(torch.device(hardware.device_type)))
    try:
        report.check()
    except KeyboardInterrupt:
        report.print_unfinished()
        raise
    return report.finish()


def work(options: Options, hardware: Hardware) -> int:
    """Runs one rank. The first rank prints, and its exit status is that of all."""
    report: Report | None = None

    def print_what_is_done(*_: Cause) -> None:
        if launched_rank() == 0 and report is not None:
            report.print_unfinished()

    with watched_rank(
        hardware, options.timeout, print_what_is_done, on_interrupt=print_what_is_done
    ) as (worker, watch):
        report = Report(options, ranks_of(options, worker))
        if worker.is_first and has_parent():  # which ends its ranks so, also after Ctrl-C
            signal.signal(signal.SIGTERM, signal.default_int_handler)
        if worker.is_first and not has_parent():
            print(hardware.sentence, flush=True)
        report.check(watch.at, speaks=worker.is_first)
        return report.finish() if worker.is_first else 0


class Report:
    """The cases, their findings so far, and the printed report."""

    def __init__(self, options: Options, ranks: Ranks):
        self.options, self.ranks = options, ranks
        self.dtype = DTYPES[options.dtype]
        self._cases = plan(options.networks, options.modes, ranks, self.dtype)
        self.findings: list[Finding] = []
        self._spoke = time.monotonic()

    @property
    def total(self) -> int:
        return len(self._cases)

    def check(self, at: Callable[[str], None] = lambda label: None, speaks: bool = True) -> None:
        """Checks all cases; calls `at` with the label of each case that begins.

        `speaks`: whether this process, one of several ranks, shows progress.
        """
        with Progress(self.total, enabled=None if speaks else False) as progress:

            def note(label: str) -> None:
                at(label)
                progress.update(label)
                if speaks and not progress.enabled:
                    self.say_progress(label)

            for finding in verify(self._cases, self.ranks, self.dtype, note, self.options.verbose):
                self.findings.append(finding)

    def say_progress(self, label: str) -> None:
        """Prints a line after SILENCE seconds without one, where `Progress` has no terminal."""
        if time.monotonic() - self._spoke >= SILENCE:
            self._spoke = time.monotonic()
            print(f"{self.say_done()}; now {label}", flush=True)

    def say_done(self) -> str:
        verb = "was" if self.total == 1 else "were"
        wrong = sum(bool(f.faults) for f in self.findings)
        but = f", {wrong} of them wrong" if wrong else ""
        return f"{len(self.findings)} of {counted(self.total, 'case')} {verb} checked{but}"

    def print_unfinished(self) -> None:
        """Prints the table of the cases checked before the run ended early; nothing if none was."""
        if self.findings:
            print(f"{self.table()}\n{self.say_done()} until then", flush=True)

    def finish(self) -> int:
        """Print everything; the exit status."""
        wrong = [f for f in self.findings if f.faults]
        lines = [*(self.norms() if self.options.verbose else []), self.table()]
        lines += [phase_table(self.findings)] if any(f.phases for f in self.findings) else []
        lines += [f"FAIL {f.case.label}: {fault}" for f in wrong for fault in f.faults]
        lines += self.remarks()
        tolerance, agree = TOLERANCES[self.dtype], "agrees" if self.total == 1 else "agree"
        lines.append(
            f"{self.total - len(wrong)} of {counted(self.total, 'case')} {agree} with one float64 "
            f"backward per sample ({self.options.dtype}: norms to {tolerance.norm:g}, gradients to "
            f"{tolerance.gradient:g}, a sample adds at most {MOST:.6f} C)"
        )
        print("\n".join(lines), flush=True)
        return int(bool(wrong))

    def remarks(self) -> list[str]:
        """Lists modes that ran as another, and ranks that have nothing to share."""
        plain = {f.case.mode for f in self.findings if f.case.norm_algorithm is None}
        references = [
            f"{mode} ran as {REFERENCE_MODE[mode]}" for mode in REFERENCE_MODE if mode in plain
        ]
        found = list(self.options.remarks)
        if references:
            found.append(f"{', '.join(references)}: no fused kernels for {self.options.dtype} here")
        if any(f.case.norm_algorithm == "width" for f in self.findings):
            found.append(
                "norms by width have an allowance for rounding, so gradients may be up to "
                f"{GRAM_ROUNDING * self.ranks.sizes.tokens:.1e} smaller"
            )
        if self.ranks.group is not None and self.ranks.size == 1:
            more = "--num-processes 2" if self.ranks.device.type == "cpu" else "--backend gloo"
            found.append(f"one rank shares nothing: {more} checks two on the CPU")
        elif self.ranks.axes == (DATA,):
            found.append(
                "sync, async and layerwise are how norms travel over a tensor axis, which is not "
                "here: each case ran once (--use-tp has one)"
            )
        return found

    def table(self) -> str:
        columns = [
            "mode", "clipping", "where", Column("norm", format=".1e"),
            Column("gradient", format=".1e"), Column("adds", "adds / C", ".6f"),
            Column("seconds", format=".2f"), "verdict",
            Column("parameter", "worst parameter"),
        ]  # fmt: skip
        tables = []
        for network in self.options.networks:
            rows = [self._row(f) for f in self.findings if f.case.network == network]
            tables += [format_table(columns, rows, title=network)] if rows else []
        return "\n" + "\n\n".join(tables) + "\n"

    def _row(self, finding: Finding) -> dict:
        case = finding.case
        where = ", ".join(filter(None, (self.ranks.where, case.norm_reduction)))
        row = {"mode": case.how, "clipping": case.clipping, "where": where}
        if finding.failure:
            return {**row, "status": "FAIL", "reason": finding.failure}
        return {
            **row, "norm": finding.norm_error, "gradient": finding.gradient_error,
            "adds": finding.contribution, "seconds": finding.seconds,
            "verdict": "FAIL" if finding.faults else "ok", "parameter": finding.parameter,
        }  # fmt: skip

    def norms(self) -> list[str]:
        """Formats each case's first-step norms by rank, before and after ranks exchange them."""
        lines = []
        for finding in (f for f in self.findings if not f.failure):
            lines.append(f"\n{finding.case.label}: norms of the batch's samples")
            lines.append(f"  reference      {_numbers(finding.reference)}")
            for rank, (before, after) in enumerate(zip(finding.parts, finding.norms, strict=True)):
                if self.ranks.size > 1:
                    lines.append(f"  rank {rank} before  {_numbers(before)}")
                lines.append(f"  rank {rank} after   {_numbers(after)}")
        return lines


def _numbers(values: Sequence[float | None]) -> str:
    return "  ".join("–".rjust(9) if x is None else f"{x:9.6f}" for x in values)
