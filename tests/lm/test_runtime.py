"""Where a process runs: hardware and its sentence, launch variables, seeds."""

import warnings
from pathlib import Path

import pytest
import torch

from ddp_by_hand.lm import programs, runtime
from ddp_by_hand.lm.runtime import find_hardware


@pytest.fixture
def machine(monkeypatch):
    """Make this machine look like another one."""
    for variable in ("CUDA_VISIBLE_DEVICES", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)

    def become(*, gpus=0, driver=False, cuda="13.0", warning=None):
        def is_available():
            if warning:
                warnings.warn(warning, stacklevel=2)
            return gpus > 0

        monkeypatch.setattr(torch.cuda, "is_available", is_available)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(Path, "exists", lambda path: driver and "nvidia" in str(path))

    return become


GPUS = {"gpus": 4, "driver": True}


@pytest.mark.parametrize(
    ("machine_is", "asked", "expected", "sentence"),
    [
        ({}, (), ("gloo", "cpu", 2), "gloo, 2 processes on CPU (no GPU here)"),
        (GPUS, (), ("nccl", "cuda", 4), "NCCL, 4 processes, one on each NVIDIA H200"),
        (GPUS, (None, 2), ("nccl", "cuda", 2), "NCCL, 2 processes, one on each NVIDIA H200"),
        (GPUS, ("cpu", 3), ("gloo", "cpu", 3), "gloo, 3 processes on CPU (as asked)"),
    ],
)
def test_what_is_found(machine, machine_is, asked, expected, sentence):
    machine(**machine_is)
    found = find_hardware(*asked)
    assert (found.backend, found.device_type, found.num_processes) == expected
    assert found.sentence == sentence


TOO_OLD = "CUDA initialization: the driver is too old"
OBSTACLES = {
    "a build without CUDA": {"driver": True, "cuda": None},
    f"PyTorch cannot use it: {TOO_OLD}": {"driver": True, "warning": f"{TOO_OLD}\n(version 11)"},
    "PyTorch cannot use it: no device answered": {"driver": True},
}


@pytest.mark.parametrize("reason", OBSTACLES)
def test_a_driver_that_pytorch_cannot_use_is_said(machine, reason):
    machine(**OBSTACLES[reason])
    sentence = find_hardware().sentence
    assert sentence.startswith("gloo, 2 processes on CPU (an NVIDIA driver is here, but ")
    assert reason in sentence
    assert "\n" not in sentence
    with pytest.raises(ValueError, match=f"--device cuda: .*{reason}.*give --device cpu"):
        find_hardware("cuda")


def test_hidden_gpus_are_said(machine, monkeypatch):
    machine(driver=True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "CUDA_VISIBLE_DEVICES hides" in find_hardware().sentence


LAUNCHED = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "x", "LOCAL_WORLD_SIZE": "4"}


@pytest.mark.parametrize(
    ("gpus", "variables", "asked", "says"),
    [
        (0, {}, ("cuda",), "--device cuda: this machine has no NVIDIA GPU; give"),
        (2, {}, (None, 3), r"--num-processes 3: .*give 2 or fewer"),
        (2, LAUNCHED, (), r"--nproc_per_node 4: .*give 2 or fewer"),
    ],
)
def test_more_than_there_is_is_refused(machine, monkeypatch, gpus, variables, asked, says):
    machine(gpus=gpus, driver=gpus > 0)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=says):
        find_hardware(*asked)
    if variables:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        assert find_hardware().num_processes == 2


@pytest.mark.parametrize("missing", programs.LAUNCH_VARIABLES)
def test_a_launcher_is_recognised_by_all_its_variables(monkeypatch, missing):
    variables = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "host", "LOCAL_RANK": "0"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert runtime.launched()
    assert (runtime.launched_rank(), runtime.launched_world_size()) == (3, 8)
    assert programs.is_first_of_host()
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert not programs.is_first_of_host()
    monkeypatch.delenv(missing)
    assert not runtime.launched()
    assert (runtime.launched_rank(), runtime.launched_world_size()) == (0, 1)
    assert programs.is_first_of_host()


def test_the_command_that_was_typed(monkeypatch):
    def typed() -> str:
        return " ".join(runtime.typed_command("x", ["--y", "1"]))

    for name in (*programs.LAUNCH_VARIABLES, runtime.LAUNCHED_HERE, "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert typed() == "python -m x --y 1"
    for name in programs.LAUNCH_VARIABLES:
        monkeypatch.setenv(name, "8")
    assert typed() == "torchrun --nproc_per_node=8 -m x --y 1"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert typed() == "torchrun --nnodes=2 --nproc_per_node=4 -m x --y 1"
    monkeypatch.setattr("sys.argv", ["/bin/dp-verify"])
    assert typed() == "torchrun --nnodes=2 --nproc_per_node=4 --no-python dp-verify --y 1"
    monkeypatch.setenv(runtime.LAUNCHED_HERE, "1")
    assert typed() == "dp-verify --y 1"
    monkeypatch.setattr("sys.argv", ["benchmark_ddp.py"])
    assert typed() == "python benchmark_ddp.py --y 1"
    monkeypatch.setattr("sys.argv", ["/bin/pytest"])
    assert typed() == "python -m x --y 1"
