"""A long-lived pool of ranks: value tests share it, because starting ranks takes seconds.

A test hands a module-level function to some ranks; each calls it as
`function(Context, *arguments)` and its assertions are the test's. Sub-groups of every size exist
from the start, so that a test on two ranks and one on four use the same processes.
"""

import gc
import os
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT = timedelta(seconds=90)  # of one collective: a busy machine may stand still for long
START_SECONDS = 180  # importing torch in every rank takes long on a busy machine
GRACE_SECONDS = 2


@dataclass(frozen=True)
class Context:
    """Rank, device and process group of a function that runs on a rank."""

    rank: int
    world_size: int
    device: torch.device
    group: dist.ProcessGroup


class RankPool:
    """A pool of `size` processes with a process group (gloo, or NCCL with one GPU each).

    On a CPU they are forked from a server process, which has imported what
    `multiprocessing.set_forkserver_preload` names: that is done once for all ranks of all pools.

    Attributes:
        environment: variables of these processes, beside those of this one.
        seconds: that a function may take. Each rank begins it with this process's seed.
    """

    def __init__(
        self,
        size: int,
        device_type: str = "cpu",
        environment: Mapping[str, str] | None = None,
        seconds: float = 3 * TIMEOUT.total_seconds(),
    ):
        self.size, self.device_type = size, device_type
        self.environment, self.seconds = environment or {}, seconds
        self._processes: list = []
        self._pipes: Sequence[Connection] = ()
        self._folder: tempfile.TemporaryDirectory | None = None  # where the ranks meet

    def run(self, world_size: int, function: Callable, *arguments: Any) -> list[Any]:
        """Calls `function(context, *arguments)` on the first ranks; returns what each returned.

        Raises:
            AssertionError: with the tracebacks of all ranks that raised; the pool starts afresh.
        """
        __tracebackhide__ = True  # what the ranks say is the failure
        if not self._processes:
            self._start()
        pipes = self._send(world_size, function, *arguments)
        answers = self._collect(pipes, self.seconds)
        failures = [f"rank {r}:\n{text}" for r, (ok, text) in enumerate(answers) if not ok]
        if failures:
            self.close(kill=True)
            raise AssertionError("\n".join(failures))
        return [value for _, value in answers]

    def _send(self, world_size: int, function: Callable, *arguments: Any) -> Sequence[Connection]:
        """Starts a function on the first ranks; returns the pipes that their answers come by."""
        pipes = self._pipes[:world_size]
        for pipe in pipes:
            pipe.send((world_size, torch.initial_seed(), function, arguments))
        return pipes

    def close(self, kill: bool = False) -> None:
        for pipe in self._pipes:
            if not kill:
                pipe.send(None)
        for process in self._processes:
            if kill:
                process.kill()
            process.join(20)
        self._processes, self._pipes = [], ()
        if self._folder is not None:
            self._folder.cleanup()

    def _start(self) -> None:
        context = mp.get_context("spawn" if self.device_type == "cuda" else "forkserver")
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        store = Path(self._folder.name) / "store"
        self._pipes, ends = zip(*(context.Pipe() for _ in range(self.size)), strict=True)
        self._processes = [
            context.Process(
                target=_serve,
                args=(
                    {**os.environ, **self.environment},
                    r,
                    self.size,
                    self.device_type,
                    str(store),
                    end,
                ),
                daemon=True,
            )
            for r, end in enumerate(ends)
        ]
        for process in self._processes:
            process.start()
        ready = self._collect(self._pipes, START_SECONDS)
        if not all(started for started, _ in ready):
            self.close(kill=True)
            raise RuntimeError(f"the ranks did not start: {ready}")

    def _collect(self, pipes: Sequence[Connection], seconds: float) -> list[tuple[bool, Any]]:
        """Returns every rank's answer; after a failure the others have GRACE_SECONDS for theirs."""
        answers: list[tuple[bool, Any]] = [(False, "no answer")] * len(pipes)
        waiting = list(pipes)
        deadline = monotonic() + seconds
        while waiting and (left := deadline - monotonic()) > 0:
            for pipe in wait(waiting, left):
                waiting.remove(pipe)
                try:
                    answer = pipe.recv()
                except EOFError:
                    answer = False, self._death(pipe)
                answers[pipes.index(pipe)] = answer
                if not answer[0]:
                    deadline = min(deadline, monotonic() + GRACE_SECONDS)
        return answers

    def _death(self, pipe: Connection) -> str:
        """Returns that a rank's process died, and of what: its exit code, below zero a signal."""
        process = self._processes[self._pipes.index(pipe)]
        process.join(GRACE_SECONDS)
        return f"the process died (exit code {process.exitcode})"


def _serve(
    environment: Mapping[str, str],
    rank: int,
    size: int,
    device_type: str,
    store: str,
    pipe: Connection,
) -> None:
    threading.Thread(target=_end_with_caller, daemon=True).start()
    os.environ.clear()  # what the server had when it started
    os.environ.update(environment)
    torch.set_num_threads(1)
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    if device_type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device_type == "cuda" else "gloo",
        store=dist.FileStore(store, size),
        rank=rank,
        world_size=size,
        timeout=TIMEOUT,
        device_id=device if device_type == "cuda" else None,
    )
    groups = {n: dist.new_group(list(range(n)), timeout=TIMEOUT) for n in range(1, size + 1)}
    pipe.send((True, "ready"))
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the caller was killed
        while (task := pipe.recv()) is not None:
            world_size, seed, function, arguments = task
            try:
                torch.manual_seed(seed)
                context = Context(rank, world_size, device, groups[world_size])
                pipe.send((True, function(context, *arguments)))
            except BaseException:
                pipe.send((False, traceback.format_exc()))
            gc.collect()
            gc.freeze()  # the rest, mostly modules, stays alive: later collections skip it
    dist.destroy_process_group()
    gc.collect()  # a gloo process that has built an optimizer may abort at exit without this


def _end_with_caller() -> None:
    """Ends this process when the caller has ended, in the middle of a function too."""
    if (caller := mp.parent_process()) is not None:
        caller.join()
        os._exit(1)
