"""Where a process runs: hardware and its sentence, launch variables, seeds."""

import random
import time
import warnings
from pathlib import Path

import pytest
import torch

from ddp_by_hand.lm import runtime
from ddp_by_hand.lm.runtime import find_hardware, seed_everything

CPU = torch.device("cpu")


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


def test_without_a_gpu_two_processes_on_gloo(machine):
    machine()
    hardware = find_hardware()
    assert (hardware.backend, hardware.device_type, hardware.num_processes) == ("gloo", "cpu", 2)
    assert hardware.sentence == "gloo, 2 processes on CPU (no GPU here)"


def test_all_gpus_with_nccl(machine):
    machine(gpus=4, driver=True)
    hardware = find_hardware()
    assert (hardware.backend, hardware.device_type, hardware.num_processes) == ("nccl", "cuda", 4)
    assert hardware.sentence == "NCCL, 4 processes, one on each NVIDIA H200"
    assert find_hardware(num_processes=2).num_processes == 2


def test_cpu_is_taken_when_asked_for(machine):
    machine(gpus=4, driver=True)
    hardware = find_hardware("cpu", 3)
    assert hardware.sentence == "gloo, 3 processes on CPU (as asked)"


OBSTACLES = {
    "a build without CUDA": {"driver": True, "cuda": None},
    "PyTorch cannot use it: CUDA initialization: the driver is too old": {
        "driver": True,
        "warning": "CUDA initialization: the driver is too old\n(found version 11)",
    },
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


def test_cuda_without_a_gpu_is_refused(machine):
    machine()
    with pytest.raises(ValueError, match="--device cuda: this machine has no NVIDIA GPU; give"):
        find_hardware("cuda")


def test_more_processes_than_gpus_are_refused(machine, monkeypatch):
    machine(gpus=2, driver=True)
    with pytest.raises(ValueError, match=r"--num-processes 3: .*give 2 or fewer"):
        find_hardware(num_processes=3)
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "x"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(ValueError, match=r"--nproc_per_node 4: .*give 2 or fewer"):
        find_hardware()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert find_hardware().num_processes == 2


@pytest.mark.parametrize("missing", runtime.LAUNCH_VARIABLES)
def test_a_launcher_is_recognised_by_all_its_variables(monkeypatch, missing):
    variables = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "host", "LOCAL_RANK": "0"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert runtime.launched()
    assert (runtime.launched_rank(), runtime.launched_world_size()) == (3, 8)
    assert runtime.is_first_of_host()
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert not runtime.is_first_of_host()
    monkeypatch.delenv(missing)
    assert not runtime.launched()
    assert (runtime.launched_rank(), runtime.launched_world_size()) == (0, 1)
    assert runtime.is_first_of_host()


def test_workers_share_the_invocation_of_their_parent(monkeypatch):
    monkeypatch.delenv(runtime.INVOCATION, raising=False)
    first = runtime.invocation()
    assert first == runtime.invocation()
    time.strptime(first[:15], "%Y%m%d_%H%M%S")
    monkeypatch.setenv(runtime.INVOCATION, "another")
    assert runtime.invocation() == "another"


def test_the_command_that_was_typed(monkeypatch):
    def typed() -> str:
        return " ".join(runtime.typed_command("x", ["--y", "1"]))

    for name in (*runtime.LAUNCH_VARIABLES, runtime.LAUNCHED_HERE, "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert typed() == "python -m x --y 1"
    for name in runtime.LAUNCH_VARIABLES:
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


def test_seeds_decide_both_generators():
    def draw(seed):
        seed_everything(seed)
        return random.random(), torch.rand(1).item()

    assert draw(3) == draw(3)
    assert set(draw(3)).isdisjoint(draw(4))
