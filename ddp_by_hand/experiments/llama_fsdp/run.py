"""Measures cells of a Llama, each in processes of its own, and resumes: a harness for programs.

A cell that runs out of memory or fails is a row like the others, and is not tried again in the next
rounds of the same call. A rerun measures what is not finished.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ddp_by_hand.experiments.llama_fsdp.cell import write_result
from ddp_by_hand.experiments.llama_fsdp.network import SHAPES, config_of, files_of, without_token
from ddp_by_hand.experiments.llama_fsdp.results import (
    GridCell,
    GridSettings,
    differs,
    single_result,
)
from ddp_by_hand.lm.interrupt import INTERRUPTED
from ddp_by_hand.lm.launch import Outcome, run_my_rank, run_ranks
from ddp_by_hand.lm.programs import is_first_of_host
from ddp_by_hand.lm.runtime import (
    Hardware,
    connect_store,
    launched,
    launched_rank,
    launched_world_size,
    typed_command,
)
from ddp_by_hand.measure import OK, Progress, Results
from ddp_by_hand.measure.command_line import check_folder
from ddp_by_hand.measure.options import as_arguments
from ddp_by_hand.measure.words import counted

A_DAY = timedelta(days=1)
Start = Callable[[list[str]], Outcome]


@dataclass(frozen=True)
class Run:
    """The cells of one call of a program.

    Attributes:
        options: the program's, as they were given; `for_cell` makes those that measure a cell and
            write its result to a file.
        folder: receives `results.jsonl`.
    """

    program: str
    options: Any
    cells: Sequence[GridCell]
    settings: GridSettings
    folder: Path
    hardware: Hardware

    @cached_property
    def keys(self) -> dict[GridCell, str]:
        """Returns what each cell is recognised by on these devices."""
        return {cell: self.key_of(cell) for cell in self.cells}

    def key_of(self, cell: GridCell) -> str:
        place = self.hardware.world_size, self.hardware.device_name
        return cell.key(self.settings, *place, torch.__version__)

    @property
    def todo(self) -> list[GridCell]:
        results = Results(self.folder)
        return [cell for cell, key in self.keys.items() if not results.finished(key)]

    def say_finished(self) -> str:
        """Says how many cells are finished; empty if none is."""
        done = len(self.keys) - len(self.todo)
        if not done:
            return ""
        verb = "is" if len(self.keys) == 1 else "are"
        return f"{done} of {counted(len(self.keys), 'cell')} {verb} finished in {self.folder}"

    def check(self, differs: Callable[[dict], str]) -> None:
        """Checks that the folder can take the results.

        Raises:
            ValueError: it cannot be written, or holds results of something else, which would be
                tabled together with these: `differs` says of what, or is empty.
        """
        check_folder("--output-dir", self.folder, create=False)
        for row in Results(self.folder).rows():  # refuses those of another version
            if what := differs(row):
                raise ValueError(
                    f"--output-dir {self.folder} holds results of {what}; name another folder"
                )

    def differs(self, row: dict) -> str:
        """Says in which settings a row is of another experiment; empty if in none."""
        return differs(self.settings, self.hardware.world_size, row)

    def measure(self, cell: GridCell, start: Start, output: Path) -> dict:
        """Runs a cell in processes of its own; returns what is in `output`, or the failure."""
        output.parent.mkdir(parents=True, exist_ok=True)
        output.unlink(missing_ok=True)
        words = as_arguments(self.options.for_cell(cell, output))
        outcome = start([sys.executable, "-m", self.program, *words])
        if not output.exists():  # the rank that writes it was killed
            cause = outcome.cause
            reason = f"{cause.blame}{cause.message}" if cause else f"exit status {outcome.status}"
            result = single_result(
                cell, self.settings, self.hardware, self.hardware.world_size,
                status=cause.status if cause else "error", reason=reason,
            )  # fmt: skip
            write_result(output, result)
        return json.loads(output.read_text())

    def measure_all(
        self,
        start: Start,
        describe: Callable[[GridCell, dict], str],
        recorded: Callable[[GridCell, list[dict]], None] = lambda cell, rows: None,
    ) -> list[dict]:
        """Measures every unfinished cell. Returns the newest row of each cell that has one.

        Args:
            describe: says in one line how a cell went.
            recorded: called with a cell that was measured, and all rows of the folder.
        """
        results, todo = Results(self.folder), self.todo
        words = [without_token(word) for word in as_arguments(self.options)]
        command = typed_command(self.program, words)
        if finished := self.say_finished():
            print(finished, flush=True)
        temporary, given_up = self.folder / ".cell.json", set()
        with Progress(len(todo), weights=[cell.seq_length for cell in todo]) as progress:
            for number, cell in enumerate(todo, 1):
                progress.update(cell.label)
                if cell.place in given_up:  # what failed in this call would fail again
                    continue
                result = self.measure(cell, start, temporary)
                temporary.unlink()
                results.record({"key": self.keys[cell], **result, "command": command})
                if result["status"] != OK:
                    given_up.add(cell.place)
                recorded(cell, results.rows())
                progress.close()
                left = progress.left()
                print(f"[{number}/{len(todo)}] {describe(cell, result)}{left}", flush=True)
        newest = {row["key"]: row for row in results.rows()}
        return [newest[key] for key in self.keys.values() if key in newest]


def check_model(name: str, weights: bool = True) -> None:
    """Fetches a model's config, and its weights, once for each host, before a cell's time counts.

    Raises:
        ValueError: it cannot be had.
    """
    if is_first_of_host():
        config_of(name)
        if weights and name not in SHAPES:
            files_of(name)


def from_first(do: Callable[[Run, Start], int], run: Run) -> int:
    """Calls `do` in the first process, with what starts a cell's command on all ranks.

    torchrun's processes stay; each starts its own rank of every cell, as the first one says. After
    Ctrl-C it says how to go on.
    """
    try:
        return _from_first(do, run)
    except KeyboardInterrupt:
        print(f"interrupted: what is finished is in {run.folder}; the same command with "
              f"--output-dir {run.folder} resumes", file=sys.stderr)  # fmt: skip
        return INTERRUPTED


def _from_first(do: Callable[[Run, Start], int], run: Run) -> int:
    hardware = run.hardware
    if not launched():
        print(hardware.sentence, flush=True)
        return do(run, lambda command: run_ranks(command, hardware.num_processes))
    rank, world_size = launched_rank(), launched_world_size()
    store = connect_store(A_DAY, host_it=rank == 0)
    if rank > 0:
        return follow(store)
    print(hardware.sentence, flush=True)
    started = 0

    def start(cell_command: list[str]) -> Outcome:
        nonlocal started
        started += 1
        store.set(f"cell_{started}", json.dumps(cell_command))
        return _run_with_others(store, started, cell_command, world_size)

    try:
        return do(run, start)
    finally:
        store.set(f"cell_{started + 1}", json.dumps(None))
        if world_size > 1:
            store.wait(["everyone_has_left"], timedelta(seconds=30))


def follow(store: torch.distributed.Store) -> int:
    """Starts this rank of each cell, on a process that is not the first, until none is left."""
    world_size, started = launched_world_size(), 0
    while True:
        started += 1
        store.wait([f"cell_{started}"])
        told = json.loads(store.get(f"cell_{started}"))
        if told is None:
            if store.add("left", 1) == world_size - 1:
                store.set("everyone_has_left", "")
            return 0  # the first process's status is that of all: torchrun stops it at another's
        _run_with_others(store, started, told, world_size)


def _run_with_others(
    store: torch.distributed.Store, number: int, cell_command: list[str], world_size: int
) -> Outcome:
    outcome = run_my_rank([sys.executable, *cell_command[1:]], number)
    if store.add(f"cell_{number}_left", 1) == world_size:
        store.set(f"cell_{number}_over", "")
    store.wait([f"cell_{number}_over"])
    return outcome
