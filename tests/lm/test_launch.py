"""Starting ranks, and the watch that names the first cause; the ranks here are tiny scripts."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ddp_by_hand.lm import launch, watch
from ddp_by_hand.lm.launch import run_ranks
from ddp_by_hand.lm.rank_pool import RankPool
from ddp_by_hand.lm.watch import (
    Cause,
    Watch,
    describe,
    is_consequence,
    status_of,
)
from tests.support.forked import run_forked

ROOT = Path(__file__).parents[2]

PRINT_VARIABLES = """
import json
import os
names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR OMP_NUM_THREADS LM_LAUNCHED_HERE"
print(*(os.environ[name] for name in names.split()))
"""


def script(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", code]


def test_every_rank_gets_its_variables(capfd, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert run_ranks(script(PRINT_VARIABLES), 2).status == 0
    threads = max(1, os.cpu_count() // 2)
    expected = [f"{rank} {rank} 2 2 127.0.0.1 {threads} 1" for rank in range(2)]
    assert sorted(capfd.readouterr().out.splitlines()) == expected


def test_the_first_failing_status_is_returned_and_the_rest_are_ended(monkeypatch):
    monkeypatch.setattr(launch, "GRACE_S", 0.2)
    code = "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(3)\ntime.sleep(60)"
    start = time.monotonic()
    outcome = run_ranks(script(code), 3)
    assert (outcome.status, outcome.cause) == (3, None)
    assert time.monotonic() - start < 50


def test_a_killed_rank_is_named_once(capfd, monkeypatch):
    monkeypatch.setattr(launch, "GRACE_S", 0.2)
    code = "import os, time\nif os.environ['RANK'] == '1': os.kill(os.getpid(), 9)\ntime.sleep(60)"
    outcome = run_ranks(script(code), 2)
    assert outcome.status == watch.EXIT_FAILED
    assert (outcome.cause.rank, outcome.cause.status) == (1, "error")
    assert outcome.cause.message.startswith("killed by SIGKILL")
    assert outcome.cause.message.endswith("last seen at start")
    assert capfd.readouterr().err == f"rank 1 failed first: {outcome.cause.message}\n"


def test_ranks_that_ignore_everything_are_ended_after_an_interrupt(monkeypatch):
    """A stopped rank cannot follow SIGTERM, and SIGINT does not reach the ranks."""
    monkeypatch.setattr(launch, "TERMINATION_S", 0.3)
    code = "import os, signal\nos.kill(os.getppid(), 15)\nos.kill(os.getpid(), signal.SIGSTOP)"
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_ranks(script(code), 2)
    assert time.monotonic() - start < 50
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def by_run_ranks(code: str) -> str:
    command = script(code)
    return f"import sys; from ddp_by_hand.lm.launch import run_ranks; run_ranks({command!r}, 2)"


def in_pool(code: str) -> str:
    return (
        "from ddp_by_hand.lm.rank_pool import RankPool; from tests.lm.test_launch import call; "
        f"RankPool(2).run(2, call, {code!r})"
    )


def call(_context, code: str) -> None:
    exec(code)


@pytest.mark.skipif(sys.platform != "linux", reason="prctl, /proc")
@pytest.mark.parametrize("started", [by_run_ranks, pytest.param(in_pool, marks=pytest.mark.slow)])
def test_ranks_die_with_a_killed_parent(started):
    child = "import os, time; os.write(1, b'%d\\n' % os.getpid()); time.sleep(600)"
    process = subprocess.Popen(
        [sys.executable, "-c", started(child)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    ranks = [int(process.stdout.readline()) for _ in range(2)]
    process.kill()
    process.communicate(timeout=60)
    deadline = time.monotonic() + 60
    while any(is_running(rank) for rank in ranks):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_pool_leaves_no_files(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    pool = RankPool(1)
    pool.run(1, call, "pass")
    pool.close()
    left = [path.name for path in tmp_path.iterdir()]
    assert [name for name in left if not name.startswith("pymp-")] == []  # those of Python


def is_running(number: int) -> bool:
    try:
        with open(f"/proc/{number}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def watches(monkeypatch):
    """Make the watch of a rank, with a timeout of 0.8 s; `ended` has (rank, cause) of each end."""
    store, made, ended = dist.HashStore(), {}, []

    def leave(self, cause):
        ended.append((self._rank, cause))
        self._stop.set()

    monkeypatch.setattr(Watch, "_leave", leave)

    def make(rank, world_size=3):
        made[rank] = Watch(store, rank, world_size, 0.8, lambda cause: None)
        return made[rank]

    make.ended, make.store = ended, store
    yield make
    for one in made.values():
        one.close()


def wait_for_end(watches, count=1, limit_s=60.0):
    deadline = time.monotonic() + limit_s
    while len(watches.ended) < count:
        assert time.monotonic() < deadline, watches.ended
        time.sleep(0.01)
    return [cause for _, cause in watches.ended]


def test_the_rank_that_is_behind_is_named(watches, capfd):
    ranks = [watches(rank) for rank in range(3)]
    for one in ranks:
        one.at("step 0, backward_pass")
    for number in (0, 2):
        ranks[number].at("step 0, gradient_sync")
    causes = wait_for_end(watches, 3)
    message = "stalled at step 0, backward_pass: no progress for 0.8 s"
    assert causes == [Cause(1, "timeout", message)] * 3
    assert capfd.readouterr().err == f"rank 1 failed first: {message}\n"


def test_of_ranks_at_one_place_the_one_that_waits_for_no_other_is_named(watches):
    one = watches(0, 1)
    one._world_size, one._moved = 3, {rank: (7, 0.0, "step 2") for rank in range(3)}
    for rank, (line, waits) in enumerate([("a.py:7", True), ("a.py:6", False), ("a.py:7", True)]):
        watches.store.set(f"stack_{rank}", json.dumps((line, f"stack of {line}", waits)))
    message = "stalled at step 2: no progress for 0.8 s, at a.py:6"
    assert one._name_the_last() == Cause(1, "timeout", message, "stack of a.py:6")


def test_a_standstill_of_all_is_nobody_in_particular(watches, capfd):
    for rank in range(3):
        watches(rank).at("step 7, forward_pass")
    (cause, *_) = wait_for_end(watches, 3)
    assert (cause.rank, cause.status) == (watch.NOBODY, "timeout")
    said = "the run failed: all ranks stand still at step 7, forward_pass: no progress"
    assert capfd.readouterr().err.startswith(said)


def test_a_slow_run_is_not_ended_while_one_rank_moves(watches):
    ranks = [watches(rank) for rank in range(3)]
    for number in range(8):
        ranks[1].at(f"step {number}")
        time.sleep(0.2)
    assert watches.ended == []


def test_a_silent_rank_is_named_with_the_place_of_the_observer(watches):
    first, silent = watches(0, 2), watches(1, 2)
    silent.at("step 1")
    time.sleep(0.3)
    silent.close()
    for number in range(40):
        first.at(f"step {number}")  # progress of others does not hide it
        time.sleep(0.02)
    (cause,) = wait_for_end(watches)
    assert (cause.rank, cause.status) == (1, "error")
    assert cause.message.startswith("stopped responding, last seen at step 1; rank 0 waits at step")


def test_a_rank_that_never_says_a_word_is_missed(watches):
    watches(0, 2)
    (cause,) = wait_for_end(watches)
    assert (cause.rank, cause.message[:36]) == (1, "stopped responding, last seen at sta")


def test_two_failures_at_once_have_one_first_cause(watches, capfd):
    ranks = [watches(rank) for rank in range(3)]
    monkey = [KeyError("a"), torch.OutOfMemoryError("CUDA out of memory")]
    for one, error in zip(ranks, monkey, strict=False):
        one._end(Cause(one._rank, status_of(error), describe(error)))
    causes = wait_for_end(watches, 3)
    assert causes == [Cause(0, "error", "KeyError: 'a'")] * 3
    assert capfd.readouterr().err == "rank 0 failed first: KeyError: 'a'\n"


def test_a_lost_connection_waits_for_the_word_of_the_peer(watches):
    """The rank that only *sees* a failure does not put itself in the place of its cause."""
    first, second = watches(0, 2), watches(1, 2)
    first._timeout_s = 1000  # its silence alone would take 500 s to tell
    second.close()  # dead
    first.fail(RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:1234"))
    assert wait_for_end(watches)[0].rank == 1


def test_a_store_that_is_gone_ends_the_run(watches, monkeypatch):
    def gone(*_):
        raise dist.DistNetworkError("Broken pipe")

    monkeypatch.setattr(watch, "read_cause", gone)
    watches(0, 2)
    assert "the rank that hosts the store, is gone" in wait_for_end(watches)[0].message


def test_the_process_ends_even_if_recording_fails(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import torch.distributed as dist\nfrom ddp_by_hand.lm.watch import Watch\n"
        "def full(cause): raise OSError('disk full')\n"
        "Watch(dist.HashStore(), 0, 1, 60, full).fail(KeyError('x'))"
    )
    environment = {"PYTHONPATH": str(ROOT), **os.environ}
    run = run_forked([sys.executable, str(program)], tmp_path, environment, 60)
    assert run.returncode == watch.EXIT_FAILED
    assert "rank 0 failed first: KeyError: 'x'" in run.stderr


@pytest.mark.slow
def test_the_watch_does_not_end_the_process_before_the_cause_is_printed():
    """Its thread reads the cause in the store while the main thread is about to print it."""
    code = (
        "import time\nimport torch.distributed as dist\nfrom ddp_by_hand.lm import watch\n"
        "publish = watch.publish_cause\n"
        "def slow(store, cause):\n"
        "    first = publish(store, cause)\n    time.sleep(0.5)\n    return first\n"
        "watch.publish_cause = slow\n"
        "watch.Watch(dist.HashStore(), 0, 1, 0.8, lambda cause: None).fail(KeyError('x'))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.returncode == watch.EXIT_FAILED, run.stderr
    assert run.stderr.count("rank 0 failed first: KeyError: 'x'") == 1


@pytest.mark.parametrize(
    ("error", "status", "consequence"),
    [
        (KeyError("x"), "error", False),
        (MemoryError(), "oom", False),
        (torch.OutOfMemoryError("CUDA out of memory"), "oom", False),
        (RuntimeError("CUDA error: out of memory"), "oom", False),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "oom", False),
        (RuntimeError("[enforce fail] gloo: Connection reset by peer"), "error", True),
        (dist.DistBackendError("NCCL watchdog"), "error", True),
        (ValueError("gloo"), "error", False),
    ],
)
def test_errors_are_sorted(error, status, consequence):
    assert (status_of(error), is_consequence(error)) == (status, consequence)


WATCHED = """
import os, sys, time
from datetime import timedelta
from ddp_by_hand.lm.runtime import connect_store
from ddp_by_hand.lm.watch import Watch
rank = int(os.environ["RANK"])
watch = Watch(connect_store(timedelta(seconds=60)), rank, 2, 60, lambda cause: None)
watch.at("step 3")
watch.speak()
if rank == 1:
    os._exit(STATUS)
time.sleep(60)
"""


@pytest.mark.parametrize("status", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_a_rank_that_leaves_without_a_word_is_named(monkeypatch, capfd, status):
    monkeypatch.setattr(launch, "GRACE_S", 0.2)
    code = WATCHED.replace("STATUS", str(status))
    outcome = run_ranks([sys.executable, "-c", code], 2)
    message = f"ended the process with exit status {status}, last seen at step 3"
    assert outcome.cause == Cause(1, "error", message)
    assert outcome.status == (status or watch.EXIT_FAILED)
    assert f"rank 1 failed first: {message}\n" in capfd.readouterr().err


def test_a_standstill_says_on_which_line(watches):
    """The main thread of this process is in `wait_for_end` while the watch looks."""
    for rank in range(2):
        watches(rank, 2)._own = [__file__]
    cause = wait_for_end(watches)[0]
    assert cause.status == "timeout"
    assert re.search(r"test_launch.py:\d+ in \w+: ", cause.message), cause.message
    assert "in wait_for_end" in cause.traceback
