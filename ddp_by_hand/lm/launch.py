"""Starts one process per rank on this machine, and stops them all when one fails.

The parent takes the part that torchrun's agent has on each node: it hosts the store, gives every
child the same variables, and waits. Children die with it, whatever ends it.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from ddp_by_hand.lm.interrupt import INTERRUPTED
from ddp_by_hand.lm.runtime import LAUNCHED_HERE
from ddp_by_hand.lm.watch import (
    DOING,
    EXIT_FAILED,
    HANDED_OVER,
    PRINTED,
    Cause,
    left_early,
    print_cause,
    publish_cause,
    read_cause,
    read_text,
)

GRACE_S = 5.0  # how long the others may take to leave by themselves
CALLS = 1_000_000  # of `run_my_rank`, more than there will be
TERMINATION_S = 2.0  # how long a rank may take to follow SIGTERM

# Loaded before any fork: after it, a child of a process with threads must not take locks.
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


@dataclass(frozen=True)
class Outcome:
    """How the ranks ended.

    Attributes:
        status: 0, or the first failing rank's exit status.
        cause: what failed first, where it is known.
        doing: what rank 0 had said that it was doing (`Watch.say`), empty if nothing.
        handed_over: what rank 0 has left for the launcher (`Watch.hand_over`), empty if nothing.
    """

    status: int
    cause: Cause | None = None
    doing: str = ""
    handed_over: str = ""


def run_ranks(command: Sequence[str], num_processes: int) -> Outcome:
    """Runs `command` once per rank, and waits for all.

    Raises:
        KeyboardInterrupt: after Ctrl-C or SIGTERM, which end the ranks as well.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    board = dist.PrefixStore("attempt_0", store)
    children: list[subprocess.Popen] = []
    # A flag and no exception: one that is raised while Python forks is lost.
    interrupted = threading.Event()
    previous = {
        number: signal.signal(number, lambda *_: interrupted.set())
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        for rank in range(num_processes):
            environment = _environment(rank, num_processes, store.port)
            children.append(subprocess.Popen(command, env=environment, preexec_fn=_follow_parent))
        status = _wait(children, board, interrupted)
        if interrupted.is_set() or status == INTERRUPTED:
            raise KeyboardInterrupt
        said, left = read_text(board, DOING), read_text(board, HANDED_OVER)
        if (cause := read_cause(board)) and not board.check([PRINTED]):
            print_cause(cause, board)
        return Outcome(status, cause, said, left)
    finally:
        _stop(children, grace_s=0.0)
        for number, handler in previous.items():
            signal.signal(number, handler)


def run_my_rank(command: Sequence[str], number: int) -> Outcome:
    """Runs `command` under torchrun as this process's rank, beside the other ranks' `command`s.

    Args:
        number: from 1 on, the same on every rank, and another for each call.
    """
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) * CALLS + number
    environment = {
        **os.environ,
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # torchrun, or the first rank, hosts it already
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
    }
    rank, port = int(os.environ["RANK"]), int(os.environ.get("MASTER_PORT", 29500))
    store = dist.TCPStore(os.environ["MASTER_ADDR"], port, wait_for_workers=False)
    board = dist.PrefixStore(f"attempt_{attempt}", store)
    child = subprocess.Popen(command, env=environment, preexec_fn=_follow_parent)
    try:
        while child.poll() is None:
            if read_cause(board):  # the others of this call stop, and so must this one
                _stop([child], GRACE_S)
            time.sleep(0.05)
        status = child.returncode
        if status < 0:
            _name_signal(board, rank, -status)
        elif status > 0:  # before it could name a cause: the others would wait for it
            publish_cause(board, Cause(rank, "error", f"ended with exit status {status}"))
        return Outcome(EXIT_FAILED if status < 0 else status, read_cause(board))
    finally:
        _stop([child], grace_s=0.0)


def _environment(rank: int, num_processes: int, port: int) -> dict[str, str]:
    threads = max(1, (os.cpu_count() or 1) // num_processes)
    return {
        "OMP_NUM_THREADS": str(threads),
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_processes),
        "LOCAL_WORLD_SIZE": str(num_processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        LAUNCHED_HERE: "1",
    }


def _wait(children: list[subprocess.Popen], store: dist.Store, interrupted: threading.Event) -> int:
    """Returns 0 when all succeed; otherwise stops the rest and returns the first failing status."""
    while not interrupted.is_set():
        statuses = [child.poll() for child in children]
        failed = [rank for rank, status in enumerate(statuses) if status]
        named = (EXIT_FAILED, INTERRUPTED)  # these have said why
        left = [
            rank
            for rank, status in enumerate(statuses)
            if status is not None and status >= 0 and status not in named
            if left_early(store, rank)
        ]
        if failed or left:
            # One that was killed could not name a cause itself; consequences exit later than it.
            killed = [rank for rank in failed if statuses[rank] < 0]
            if killed:
                _name_signal(store, killed[0], -statuses[killed[0]])
            elif left:
                _name(store, left[0], f"ended the process with exit status {statuses[left[0]]}")
            _stop(children, GRACE_S)
            first = statuses[failed[0]] if failed else EXIT_FAILED
            return EXIT_FAILED if first < 0 else first
        if all(status == 0 for status in statuses):
            return 0
        time.sleep(0.05)
    return INTERRUPTED


def _name_signal(store: dist.Store, rank: int, number: int) -> None:
    name = signal.Signals(number).name
    hint = " (by the system, if memory ran out)" if number == signal.SIGKILL else ""
    _name(store, rank, f"killed by {name}{hint}")


def _name(store: dist.Store, rank: int, what: str) -> None:
    """Names a cause for a rank that did not, with the place where it was last seen."""
    key = f"rank_{rank}"
    place = store.get(key).decode().split(" ", 2)[2] if store.check([key]) else "start"
    cause = Cause(rank, "error", f"{what}, last seen at {place}")
    if publish_cause(store, cause):
        print_cause(cause, store)


def _stop(children: list[subprocess.Popen], grace_s: float) -> None:
    """Terminates the ranks that have not ended after `grace_s`, and then kills them."""
    _wait_for_exit(children, grace_s)
    for child in children:
        child.terminate()  # does nothing to one that has left
    _wait_for_exit(children, TERMINATION_S)  # one that is stopped cannot follow
    for child in children:
        child.kill()
        child.wait()


def _wait_for_exit(children: list[subprocess.Popen], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline and any(child.poll() is None for child in children):
        time.sleep(0.02)


def _follow_parent() -> None:
    """Makes a child, before it starts, ignore Ctrl-C and end when its parent does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if _LIBC is not None:
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG, see man 2 prctl: also after SIGKILL
        _LIBC.prctl(set_parent_death_signal, signal.SIGKILL)
