"""This process among its peers: ranks, devices, process group and seeds.

The environment is read here and in `lm.programs`, and nowhere else.
"""

import gc
import os
import random
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from ddp_by_hand.lm.programs import launched, program_words

INVOCATION = "LM_INVOCATION"
LAUNCHED_HERE = "LM_LAUNCHED_HERE"


@dataclass(frozen=True)
class Hardware:
    """Backend, device type and number of processes that this machine offers.

    Attributes:
        backend: `"nccl"` with GPUs, otherwise `"gloo"`.
        device_type: `"cuda"` or `"cpu"`.
        num_processes: one per GPU, or two on a CPU.
        sentence: the choice and its reason, for the user.
    """

    backend: str
    device_type: str
    num_processes: int
    sentence: str

    @property
    def world_size(self) -> int:
        """Returns the number of all ranks: of the launcher, or those that this machine gets."""
        return launched_world_size() if launched() else self.num_processes

    @property
    def device_name(self) -> str:
        return device_name(torch.device(self.device_type))


@dataclass(frozen=True)
class Worker:
    """This process among its peers."""

    rank: int
    world_size: int
    device: torch.device
    store: dist.Store

    @property
    def is_first(self) -> bool:
        return self.rank == 0


def launched_rank() -> int:
    """Returns the rank that the launcher gave this process; 0 without a launcher."""
    return int(os.environ["RANK"]) if launched() else 0


def launched_world_size() -> int:
    """Returns the number of ranks that the launcher started; 1 without a launcher."""
    return int(os.environ["WORLD_SIZE"]) if launched() else 1


def device_name(device: torch.device) -> str:
    """Returns the name by which results know a device: that of the GPU, or `cpu`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def invocation() -> str:
    """Returns a name for this call of a program: its start, `YYYYMMDD_HHMMSS_process`.

    The workers that a call starts share it.
    """
    return os.environ.setdefault(INVOCATION, f"{time.strftime('%Y%m%d_%H%M%S')}_{os.getpid()}")


def has_parent() -> bool:
    """Returns whether `lm.launch` started this worker; its process then reports the results."""
    return LAUNCHED_HERE in os.environ


def typed_command(module: str, arguments: Sequence[str]) -> list[str]:
    """Returns the command that starts the same run of a program again.

    A worker of `lm.launch` returns the command of the process that started it.
    """
    words = program_words(module)
    if not launched() or has_parent():
        return [*words, *arguments]
    local = int(os.environ.get("LOCAL_WORLD_SIZE", launched_world_size()))
    nodes = launched_world_size() // local
    start = ["torchrun", *([f"--nnodes={nodes}"] if nodes > 1 else []), f"--nproc_per_node={local}"]
    program = words[1:] if words[0] == "python" else ["--no-python", *words]
    return [*start, *program, *arguments]


def find_hardware(device: str = "auto", num_processes: int | None = None) -> Hardware:
    """Chooses backend, device and number of processes for this machine.

    Args:
        device: `"auto"`, `"cpu"` or `"cuda"`.
        num_processes: overrides the number of processes.

    Raises:
        ValueError: if CUDA is asked for and cannot be used, or there are fewer GPUs than processes
            (those that a launcher has started on this host, too).
    """
    count, obstacle = _usable_gpus()
    if device == "cuda" and not count:
        reason = obstacle or "this machine has no NVIDIA GPU"
        raise ValueError(f"--device cuda: {reason}; give --device cpu, or auto")
    if device == "cpu" or not count:
        n = num_processes or 2
        reason = "as asked" if device == "cpu" else obstacle or "no GPU here"
        processes = "1 process" if n == 1 else f"{n} processes"
        return Hardware("gloo", "cpu", n, f"gloo, {processes} on CPU ({reason})")
    n = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if launched() else num_processes or count
    if n > count:
        option = "--nproc_per_node" if launched() else "--num-processes"
        raise ValueError(
            f"{option} {n}: NCCL needs a GPU for each process; give {count} or fewer, or "
            "--device cpu"
        )
    name = torch.cuda.get_device_name(0)
    where = f"1 process on {name}" if n == 1 else f"{n} processes, one on each {name}"
    return Hardware("nccl", "cuda", n, f"NCCL, {where}")


def _usable_gpus() -> tuple[int, str | None]:
    """Returns the number of usable GPUs, and why others that seem present cannot be used."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    if available:
        return torch.cuda.device_count(), None
    driver = Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidia0").exists()
    if torch.version.cuda is None and driver:
        build = f"PyTorch {torch.__version__} is a build without CUDA"
        return 0, f"an NVIDIA driver is here, but {build}"
    if driver and os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return 0, "CUDA_VISIBLE_DEVICES hides this machine's GPUs"
    if caught or driver:
        detail = str(caught[0].message).split("\n")[0] if caught else "no device answered"
        return 0, f"an NVIDIA driver is here, but PyTorch cannot use it: {detail}"
    return 0, None


@contextmanager
def process_group(hardware: Hardware, timeout_s: float) -> Iterator[Worker]:
    """Joins the process group of the ranks that the launcher started, and leaves it at the end.

    Args:
        hardware: the hardware of this machine; its backend and device type are used.
        timeout_s: after this many seconds without progress a run is given up (`lm.watch`); a
            collective gives up somewhat later, so that the first cause can be named.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    device = _claim_device(hardware, local_rank)
    limit = timedelta(seconds=timeout_s * 1.5 + 10)
    store = connect_store(limit, host_it=rank == 0)
    dist.init_process_group(
        hardware.backend,
        store=dist.PrefixStore("process_group", store),
        rank=rank,
        world_size=world_size,
        timeout=limit,
        device_id=device if device.type == "cuda" else None,
    )
    try:
        yield Worker(rank, world_size, device, store)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()  # a gloo process that has built an optimizer may abort at exit without this


def connect_store(limit: timedelta, host_it: bool = False) -> dist.Store:
    """Connects to the key-value store of this run.

    Args:
        limit: how long a call may wait.
        host_it: open the store in this process, unless the launcher already hosts it.
    """
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ.get("MASTER_PORT", 29500)),
        is_master=host_it and not hosted,
        timeout=limit,
        wait_for_workers=False,
    )
    return dist.PrefixStore(f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


def _claim_device(hardware: Hardware, local_rank: int) -> torch.device:
    if hardware.device_type == "cpu":
        if "OMP_NUM_THREADS" not in os.environ:
            local_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_size))
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)
    # Multicast is neither used nor needed by ddp_copy_engine, which asks for this setting.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    return torch.device("cuda", local_rank)


def seed_everything(seed: int) -> None:
    """Seeds Python's and torch's generators (all devices): the same model on every rank."""
    random.seed(seed)
    torch.manual_seed(seed)
