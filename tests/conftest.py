"""Fixtures shared by all rooms."""

import gc
import os
import signal

os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
# Networks are small, and two processes run tests: more threads would only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # TRL reports each use
# A shell that starts this in the background has Ctrl-C ignored here, and in all that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import hypothesis
import pytest
import torch
from hypothesis.database import DirectoryBasedExampleDatabase

from tests.support import seeds, servers
from tests.support.interpreter import Interpreter

# The examples of a property follow from its name. Those of a night are others each time, and what
# failed is tried first in the next: HYPOTHESIS_PROFILE=nightly pytest tests/dp_clipping/properties.
hypothesis.settings.register_profile("ours", derandomize=True, deadline=None, max_examples=20)
hypothesis.settings.register_profile(
    "nightly", deadline=None, max_examples=1000, print_blob=True,
    database=DirectoryBasedExampleDatabase(".hypothesis/nightly"),
)  # fmt: skip
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ours"))

servers.preload()


@pytest.hookimpl(optionalhook=True)  # pytest-xdist may not be there
def pytest_xdist_auto_num_workers() -> int:
    """Two, each with ranks of its own; on GPUs, which they would share, tests run one by one."""
    return 0 if torch.cuda.is_available() else 2


LONGEST = (
    "tests/experiments/test_llama_fsdp.py",
    "tests/dp_clipping/contract/test_contract.py",
    "tests/dp_clipping/ops/test_ops.py",
    "tests/bench/test_benchmark.py",
    "tests/dp_clipping/checkpoint/test_distributed_format.py",
    "tests/dp_clipping/ranks/test_runs.py",
    "tests/dp_clipping/ranks/test_steps.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begins with the longest files: a process that began one last would end alone.

    Raises:
        UsageError: A test's name has an address in it, so two processes would not agree on it.
    """
    for item in items:
        if " at 0x" in item.nodeid:
            raise pytest.UsageError(f"give ids= without an address to {item.nodeid}")
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
    items.sort(key=lambda item: not item.path.as_posix().endswith(LONGEST))


def pytest_collection(session: pytest.Session) -> None:
    gc.disable()  # nearly all that is made stays: each collection would look at it again


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.enable()
    _keep_what_is_there()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is None or nextitem.path != item.path:
        _keep_what_is_there()


def _keep_what_is_there() -> None:
    """Takes modules and collected tests, a million objects, out of later garbage collections.

    Each would take half a second, and programs that are tested collect before they measure.
    """
    gc.collect()
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--implementation",
        action="append",
        metavar="FILE.py:CLASS",
        help="run the behaviour tests of tests/ddp on this variant instead of the built-in ones",
    )
    parser.addoption(
        "--seed-offset",
        type=int,
        default=0,
        metavar="N",
        help="add N to the seed of each test, which follows from its name",
    )


@pytest.fixture(autouse=True)
def repeatable(request: pytest.FixtureRequest):
    """Makes what a test draws follow from its name, so that it repeats."""
    with pytest.MonkeyPatch.context() as patch:  # a test may undo what it has patched itself
        seeds.replace_entropy(patch.setattr)
        seeds.begin_test(
            seeds.seed_of(request.node.nodeid, request.config.getoption("--seed-offset"))
        )
        yield


@pytest.fixture(scope="session")
def cpu_ranks():
    """Four gloo ranks for the whole session."""
    pool = seeds.Ranks(4, groups_by_all=True)
    yield pool
    pool.close()


@pytest.fixture
def own_ranks():
    """Four gloo ranks for one test that lets collectives time out.

    What gloo has left of them, as buffers and connections, must not meet a later test.
    """
    pool = seeds.Ranks(4)
    yield pool
    pool.close(kill=True)


@pytest.fixture(scope="session")
def interpreter():
    """Processes in which kernels run without a GPU."""
    pytest.importorskip("triton")
    processes = Interpreter()
    yield processes
    processes.ranks.close()


class GpuPools:
    """A pool of NCCL ranks for each world size.

    Sub-groups of one pool would not do: torch numbers the rendezvous of symmetric memory once a
    process, so ranks that have taken part in different ones cannot meet again.
    """

    def __init__(self, size: int):
        self.size = size
        self._pools = {n: seeds.Ranks(n, "cuda") for n in range(1, size + 1)}

    def run(self, world_size: int, *arguments):
        if world_size > self.size:
            pytest.skip(f"needs {world_size} GPUs")
        return self._pools[world_size].run(world_size, *arguments)

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


@pytest.fixture(scope="session")
def gpu_ranks():
    """One NCCL rank a GPU, at most four."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    pools = GpuPools(min(4, torch.cuda.device_count()))
    yield pools
    pools.close()
