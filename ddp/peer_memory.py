"""Memory of every GPU of one host, readable by all of them.

torch's symmetric memory (https://docs.pytorch.org/docs/stable/symmetric_memory.html) allocates a
buffer of one size on every rank and maps each rank's into the address space of all others. Reading
a peer's buffer with an ordinary copy is then a job for the copy engines.
"""

import os
import socket

import torch
import torch.distributed as dist
from torch import Tensor

MULTICAST_OFF = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


class Unavailable(RuntimeError):
    """This variant cannot work on this machine; the message says why."""


class PeerMemory:
    """`nbytes` of symmetric memory on every rank of `group`. Construction is a collective.

    Attributes:
        rank, world_size: of the group.
    """

    def __init__(self, nbytes: int, device: torch.device, group: dist.ProcessGroup):
        from torch.distributed import _symmetric_memory as symmetric_memory

        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self._own = symmetric_memory.empty(nbytes, dtype=torch.uint8, device=device)
        self._handle = symmetric_memory.rendezvous(self._own, group)

    def view(self, rank: int, start: int, numel: int, dtype: torch.dtype) -> Tensor:
        """`numel` elements of `rank`'s memory from byte `start` on."""
        return self._handle.get_buffer(rank, (numel,), dtype, start // dtype.itemsize)

    def barrier(self) -> None:
        """Work queued behind this on the current stream starts when all ranks have come here."""
        self._handle.barrier(channel=0)


def why_not(device: torch.device, group: dist.ProcessGroup) -> str | None:
    """The reason why peer memory cannot be used, agreed by all ranks; None if it can."""
    answers: list[tuple[str | None, str, int]] = [(None, "", 0)] * dist.get_world_size(group)
    mine = (_own_obstacle(device), socket.gethostname() + _boot_id(), device.index or 0)
    dist.all_gather_object(answers, mine, group=group)
    for obstacle, _, _ in answers:
        if obstacle:
            return obstacle
    if len({host for _, host, _ in answers}) > 1:
        return "the ranks are on several hosts; peer-to-peer memory needs GPUs of one host"
    return None


def _own_obstacle(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"needs NVIDIA GPUs of one host with peer access; this model is on {device.type}"
    if os.environ.get(MULTICAST_OFF) != "1":
        return f"set {MULTICAST_OFF}=1 before the start: multicast is neither used nor needed"
    for other in range(torch.cuda.device_count()):
        if other != device.index and not torch.cuda.can_device_access_peer(device.index, other):
            return f"GPU {device.index} has no peer access to GPU {other}"
    return None


def _boot_id() -> str:
    """Tells two hosts of one name apart, where the system has it."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""
