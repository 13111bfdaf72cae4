"""Stops all ranks when one dies or hangs, and names the first cause.

Collective libraries wait for a peer that will never come, and when they give up they blame whoever
they happened to be connected to. So every rank says through the store how far it has come, from a
thread that goes on when the main thread is stuck. The rank that is furthest behind when nobody
moves any more is the one that the others wait for; one that no longer speaks is gone.

Times are this process's own, of when it *saw* a change: clocks of hosts need not agree.
"""

import contextlib
import json
import os
import sys
import textwrap
import threading
import time
import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from ddp_by_hand.lm.failures import concerns_user, describe_traceback, locate, locate_threads

EXIT_FAILED = 70  # a run failed, and the cause is in the store
CAUSE = "first_cause"
DOING = "doing"
HANDED_OVER = "handed_over"
NOBODY = -1
PRINTED = "printed"  # the cause is on stderr
RECORDED = "recorded"  # the first rank has done what it does about the cause
MESSAGE_LENGTH = 200  # characters


@dataclass(frozen=True)
class Cause:
    """Why a run stops: rank, status and message.

    Attributes:
        rank: whose fault it is, or `NOBODY`.
        status: `oom`, `error` or `timeout`.
        message: one line.
        traceback: several lines, from the user's own code downwards; empty where it is not known.
    """

    rank: int
    status: str
    message: str
    traceback: str = ""

    @property
    def blame(self) -> str:
        return "the run failed: " if self.rank == NOBODY else f"rank {self.rank} failed first: "


def publish_cause(store: dist.Store, cause: Cause) -> bool:
    """Publishes the cause unless another was before; returns whether this one is the first."""
    mine = f"{uuid.uuid4().hex} {json.dumps(vars(cause))}"  # two may come to the same conclusion
    return store.compare_set(CAUSE, "", mine).decode() == mine


def read_cause(store: dist.Store) -> Cause | None:
    if not store.check([CAUSE]):
        return None
    return Cause(**json.loads(store.get(CAUSE).decode().partition(" ")[2]))


def left_early(store: dist.Store, rank: int) -> bool:
    """Returns whether a rank that has ended had a watch and did not close it."""
    return store.check([f"rank_{rank}"]) and not store.check([_left(rank)])


def _left(rank: int) -> str:
    """Returns the key that says that a rank has closed its watch."""
    return f"left_{rank}"


def read_text(store: dist.Store, key: str) -> str:
    """Returns the text under `DOING` or `HANDED_OVER`; empty if there is none."""
    return store.get(key).decode() if store.check([key]) else ""


class Watch:
    """A thread that reports this rank's progress and watches that of the others.

    Args:
        store: a connection of its own, because a blocked call of the main thread holds its.
        timeout_s: seconds without any progress until the run ends; half of them without a word
            from a rank.
        on_failure: called once with the cause before this process exits.
        own: files of the user's code. If given, a cause says where in it the run failed or
            stands still, with the traceback.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        timeout_s: float,
        on_failure: Callable[[Cause], None],
        own: Collection[str] | None = None,
    ):
        self._own, self._located = own, 0
        self._store, self._rank, self._world_size = store, rank, world_size
        self._timeout_s, self._on_failure = timeout_s, on_failure
        self._interval_s = min(1.0, timeout_s / 8)
        self._beat, self._progress = 0, (0, "start")  # places passed, and the last of them
        now = time.monotonic()  # a rank that never says a word is missed from here on
        everyone = range(world_size)
        self._heard = dict.fromkeys(everyone, (0, now))  # rank -> (beat, when it changed)
        self._moved = dict.fromkeys(everyone, (0, now, "start"))  # rank -> (count, when, place)
        self._peer_is_gone = False
        self.speak()
        self._stop = threading.Event()
        self._naming, self._leaving = threading.Lock(), threading.Lock()
        self._thread = threading.Thread(target=self._run, daemon=True, name="watch")
        self._thread.start()

    def at(self, place: str) -> None:
        """Notes that this rank is at `place`. All ranks pass the same places in the same order."""
        self._progress = (self._progress[0] + 1, place)

    def speak(self) -> None:
        """Publishes now how far this rank has come; the thread does so once in each interval."""
        self._beat += 1
        count, place = self._progress
        self._store.set(f"rank_{self._rank}", f"{self._beat} {count} {place}")

    def say(self, what: str) -> None:
        """Tells the launcher what this run is doing, for the case that it fails."""
        self._store.set(DOING, what)

    def hand_over(self, what: str) -> None:
        """Passes a text to the launcher, which returns it with the outcome; the last one counts.

        Rank 0's text counts.
        """
        self._store.set(HANDED_OVER, what)

    def close(self) -> None:
        """Stops watching, when all ranks have finished: the silence of one looks like its death."""
        self._stop.set()
        self._thread.join()
        with contextlib.suppress(RuntimeError):  # the process that hosts the store has gone
            self._store.set(_left(self._rank), "")

    def fail(self, error: BaseException) -> None:
        """Ends this process because of `error`, once the first cause is known."""
        status = status_of(error)
        cause = Cause(self._rank, status, *self._locate(error))
        if status == "oom" or not is_consequence(error):
            self._end(cause)
        # A peer is gone: its own word, its launcher's or its silence will tell which.
        self._peer_is_gone = True
        self._stop.wait(self._interval_s * 6)
        self._end(cause)

    def _locate(self, error: BaseException) -> tuple[str, str]:
        """Returns message and traceback of a cause."""
        if self._own is None or error.__traceback__ is None:
            return describe(error), ""
        if isinstance(error, OSError) and not concerns_user(error, self._own):
            return describe(error), ""  # a file that cannot be read or written: it is named
        place = locate(error, self._own)
        return f"{describe(error)}, at {place}", describe_traceback(error, self._own)

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            try:
                self.speak()
                self._tell_where_it_stands()
                cause, suspicion = read_cause(self._store), self._look_around()
            except RuntimeError:  # DistError: the process that hosts the store has gone
                if self._stop.is_set():
                    return
                message = "the launcher, or the rank that hosts the store, is gone"
                cause, suspicion = None, Cause(NOBODY, "error", message)
            if cause:
                with self._naming:  # this rank's own main thread may be about to print it
                    self._leave(cause)
            elif suspicion:
                self._end(suspicion)

    def _tell_where_it_stands(self) -> None:
        """Publishes this rank's stack when its place has not changed for half of the timeout."""
        count, seen, _ = self._moved[self._rank]
        is_stuck = time.monotonic() - seen > self._timeout_s / 2
        if self._own is not None and is_stuck and self._located != count + 1:
            self._located = count + 1  # once for each place
            self._store.set(f"stack_{self._rank}", json.dumps(locate_threads(self._own)))

    def _look_around(self) -> Cause | None:
        now = time.monotonic()
        for rank in range(self._world_size):
            self._listen(rank, now)
        silent = min(self._heard, key=lambda rank: self._heard[rank][1])
        patience = 3 * self._interval_s if self._peer_is_gone else self._timeout_s / 2
        if now - self._heard[silent][1] > patience:
            message = f"stopped responding, last seen at {self._moved[silent][2]}"
            return Cause(
                silent, "error", f"{message}; rank {self._rank} waits at {self._progress[1]}"
            )
        if now - max(when for _, when, _ in self._moved.values()) > self._timeout_s:
            return self._name_the_last()
        return None

    def _listen(self, rank: int, now: float) -> None:
        key = f"rank_{rank}"
        if not self._store.check([key]):
            return
        beat, count, place = self._store.get(key).decode().split(" ", 2)
        if self._heard[rank][0] != int(beat):
            self._heard[rank] = (int(beat), now)
        if self._moved[rank][0] != int(count):
            self._moved[rank] = (int(count), now, place)

    def _name_the_last(self) -> Cause:
        """Blames the rank that is furthest behind; of several, one that waits for no other."""
        least = min(count for count, _, _ in self._moved.values())
        behind = [rank for rank, (count, _, _) in self._moved.items() if count == least]
        keys = {rank: f"stack_{rank}" for rank in behind if self._store.check([f"stack_{rank}"])}
        stacks = {rank: json.loads(self._store.get(key)) for rank, key in keys.items()}
        busy = [rank for rank, (_, _, waits) in stacks.items() if not waits]
        rank = (busy or behind)[0]
        together = len(busy or behind) == self._world_size
        who = "all ranks stand still" if together else "stalled"
        message = f"{who} at {self._moved[rank][2]}: no progress for {self._timeout_s:g} s"
        line, stack, _ = stacks.get(rank, ("", "", False))
        message += f", at {line}" if line else ""
        return Cause(NOBODY if together else rank, "timeout", message, stack)

    def _end(self, cause: Cause) -> None:
        """Publishes the cause if there is none yet, and ends this process."""
        with self._naming:
            try:
                first = publish_cause(self._store, cause)
                cause = read_cause(self._store) or cause
            except RuntimeError:
                first = True
            if first:
                print_cause(cause, self._store)
            self._leave(cause)

    def _leave(self, cause: Cause) -> None:
        """Calls `on_failure` with the cause that was published, and ends this process at once."""
        with self._leaving:
            try:
                self._on_failure(cause)
                self._wait_until_recorded()
                sys.stdout.flush()
            finally:
                os._exit(EXIT_FAILED)  # the main thread may never come back from a collective

    def _wait_until_recorded(self) -> None:
        """Blocks until rank 0 has recorded: torchrun ends all ranks as soon as one exits."""
        with contextlib.suppress(RuntimeError):  # the first rank, or the store, is gone
            if self._rank == 0:
                self._store.set(RECORDED, "")
            else:
                self._store.wait([RECORDED], timedelta(seconds=2 * self._interval_s + 1))


def print_cause(cause: Cause, store: dist.Store) -> None:
    """Prints the cause, and says so: a rank that has published one may be ended before it can."""
    lines = f"{cause.blame}{cause.message}\n" + textwrap.indent(cause.traceback, "    ")
    print(lines.rstrip(), file=sys.stderr, flush=True)
    with contextlib.suppress(RuntimeError):  # the process that hosts the store has gone
        store.set(PRINTED, "")


def status_of(error: BaseException) -> str:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return "oom"
    signs = ("out of memory", "can't allocate memory")  # of CUDA, of a CPU
    return "oom" if any(sign in str(error).lower() for sign in signs) else "error"


def describe(error: BaseException) -> str:
    """Returns one line: the type of the error and the beginning of its message."""
    text = " ".join(str(error).split("\n\n")[0].split())
    named = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return textwrap.shorten(named, MESSAGE_LENGTH, placeholder=" ...")


def is_consequence(error: BaseException) -> bool:
    """Returns whether this error is what a rank sees when a *peer* has failed."""
    if isinstance(error, dist.DistBackendError | dist.DistNetworkError):
        return True
    text = str(error).lower()
    signs = ("connection closed by peer", "connection reset", "gloo", "broken pipe", "timed out")
    return isinstance(error, RuntimeError) and any(sign in text for sign in signs)
