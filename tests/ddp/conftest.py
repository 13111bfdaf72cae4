"""Which variants the behaviour tests run on, and where."""

import zlib

import pytest
import torch

from ddp import IMPLEMENTATIONS
from tests.support.differences import Behaviours

HAND_BUILT = ["ddp", "ddp_individual", "ddp_individual_v2", "ddp_bucketed"]
COPY_ENGINE = "ddp_copy_engine"
CPU_COPY_ENGINE = "tests/support/cpu_copy_engine.py:CpuCopyEngineDDP"
SHARDED = ["zero1", "zero2", "fsdp"]
SLOW = ["zero2", "diloco"]  # differ from others in what test_zero2.py and test_diloco.py test
BUILT_IN = [*HAND_BUILT, CPU_COPY_ENGINE, *SHARDED, "diloco", "torch_ddp"]
IN_TURN = [["ddp", "ddp_individual", "ddp_individual_v2"], [CPU_COPY_ENGINE, "zero1", "torch_ddp"]]
"""A fast behaviour is tried on ddp_bucketed, on fsdp, and on one of each of these; slow on all."""


@pytest.hookimpl(tryfirst=True)  # before slow ones are left out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--implementation"):
        return
    for item in items:
        given = item.callspec.params if hasattr(item, "callspec") else {}
        variant = given.get("implementation", given.get("hand_built"))
        for group in IN_TURN:
            names = [name for name in group if "implementation" in given or name != "torch_ddp"]
            if variant in names and given["device_type"] == "cpu":
                behaviour = item.nodeid.replace(f"{_short(variant)}-cpu", "")
                if variant != names[zlib.crc32(behaviour.encode()) % len(names)]:
                    item.add_marker(pytest.mark.slow)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`implementation`: every variant; `hand_built`: those that are not PyTorch's own."""
    chosen = metafunc.config.getoption("--implementation") or BUILT_IN
    for fixture, names in {
        "implementation": chosen,
        "hand_built": [name for name in chosen if not name.startswith("torch_ddp")],
    }.items():
        if fixture in metafunc.fixturenames:
            metafunc.parametrize((fixture, "device_type"), _cases(names))


def _cases(names: list[str]) -> list:
    cases = [
        pytest.param(
            name, "cpu", id=f"{_short(name)}-cpu", marks=[pytest.mark.slow] * (name in SLOW)
        )
        for name in names
    ]
    if torch.cuda.device_count() >= 2:
        gpu_names = [COPY_ENGINE if name == CPU_COPY_ENGINE else name for name in names]
        cases += [
            pytest.param(name, "cuda", id=f"{_short(name)}-cuda", marks=pytest.mark.gpu)
            for name in gpu_names
        ]
    return cases


def _short(name: str) -> str:
    return name if name in IMPLEMENTATIONS else name.rpartition(":")[2]


@pytest.fixture
def ranks(device_type: str, request: pytest.FixtureRequest):
    """The pool on which the implementation at hand is tested, which may refuse a behaviour."""
    pool = request.getfixturevalue("cpu_ranks" if device_type == "cpu" else "gpu_ranks")
    held = {"implementation", "hand_built"}.intersection(request.fixturenames)
    return Behaviours(pool, request.getfixturevalue(held.pop()))
