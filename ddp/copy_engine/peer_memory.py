"""Allocates memory on every GPU of one host that all of them can read.

torch's symmetric memory (https://docs.pytorch.org/docs/stable/symmetric_memory.html) allocates a
buffer of one size on every rank and maps each rank's into the address space of all others. Reading
a peer's buffer with an ordinary copy is then a job for the copy engines.
"""

import ctypes
import os
import socket
from collections.abc import Callable
from itertools import permutations
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from ddp.internals.ranks import told_by_all
from ddp.torch_compat import symmetric_memory

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # tells two hosts of one name apart
FLAG_BYTES = 4096  # one word a peer, and what follows stays aligned
CAN_FLUSH_REMOTE_WRITES = 98  # CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES
WAIT_AND_FLUSH = 1 << 30  # CU_STREAM_WAIT_VALUE_FLUSH
MULTICAST_OFF = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


class Unavailable(RuntimeError):
    """Raised where this variant cannot work on this machine; the message says why."""


class PeerMemory:
    """Symmetric memory of `nbytes` on every rank of `group`, with flags that say what is in it.

    Construction is a collective. torch numbers its rendezvous once per process, so all ranks of a
    group must have constructed as many before, in any group.

    Flags synchronize the ranks: `signal` writes a growing number into a word of every
    peer's memory, `wait_for_peers` holds the stream until theirs have arrived. Both are done by
    the stream itself (stream memory operations of the CUDA driver API). A waiting *kernel* would
    hold a multiprocessor, and a matrix product that is sized for all of them would then need a
    second wave.

    Attributes:
        rank, world_size: of the group.
        nbytes: what it takes of this GPU, which PyTorch's allocator does not count.
    """

    def __init__(self, nbytes: int, device: torch.device, group: dist.ProcessGroup):
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.nbytes = FLAG_BYTES + nbytes
        memory = symmetric_memory()
        self._own = memory.empty(self.nbytes, dtype=torch.uint8, device=device)
        self._handle = memory.rendezvous(self._own, group)
        self._own[:FLAG_BYTES].zero_()
        self._handle.barrier(channel=0)  # no rank signals before all flags are zero
        self._flags = list(self._handle.buffer_ptrs)
        self._write, self._wait, self._wait_flags = _stream_memory_operations(device.index)
        self._signals = 0

    def view(self, rank: int, start: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Returns `numel` elements of `rank`'s memory from byte `start` on, to read or to write.

        A view of this rank's memory keeps it alive, one of a peer's does not.
        """
        if rank == self.rank:
            first = FLAG_BYTES + start
            # .data: gradients that share the memory must not share a count of changes.
            return self._own.data[first : first + numel * dtype.itemsize].view(dtype)
        offset = (FLAG_BYTES + start) // dtype.itemsize
        return self._handle.get_buffer(rank, (numel,), dtype, offset)

    def signal(self) -> None:
        """Signals every peer that the work queued so far on the current stream is done."""
        self._signals += 1
        stream = torch.cuda.current_stream().cuda_stream
        for peer, flags in enumerate(self._flags):
            if peer != self.rank:
                _check(self._write(stream, flags + 4 * self.rank, self._signals, 0))

    def wait_for_peers(self) -> None:
        """Holds the current stream until every peer has signalled as often as this rank."""
        stream = torch.cuda.current_stream().cuda_stream
        for peer in range(self.world_size):
            if peer != self.rank:
                flag = self._flags[self.rank] + 4 * peer
                _check(self._wait(stream, flag, self._signals, self._wait_flags))


def _stream_memory_operations(device: int) -> tuple[Callable[..., int], Callable[..., int], int]:
    """Returns the driver's write and its wait, and the flags that a wait needs on this GPU.

    A write waits for what is queued before it. A wait is for "at least"; where a GPU might let
    later work overtake a peer's earlier writes, it is told to flush them first.
    https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__MEMOP.html
    """
    driver = ctypes.CDLL("libcuda.so.1")
    operations = driver.cuStreamWriteValue32_v2, driver.cuStreamWaitValue32_v2
    for operation in operations:
        operation.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
    can_flush = ctypes.c_int(0)
    _check(driver.cuDeviceGetAttribute(ctypes.byref(can_flush), CAN_FLUSH_REMOTE_WRITES, device))
    return (*operations, WAIT_AND_FLUSH if can_flush.value else 0)


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"the CUDA driver refused a call: error {status}")


def why_not(device: torch.device, group: dist.ProcessGroup) -> str | None:
    """Returns the missing requirement ("needs ..."), the same on all ranks; None if all are met."""
    host = f"{socket.gethostname()} {BOOT_ID.read_text() if BOOT_ID.exists() else ''}"
    mine = (_own_obstacle(device), host, device.index or 0)
    obstacles, hosts, gpus = zip(*told_by_all(mine, group), strict=True)
    if any(obstacles):
        return next(filter(None, obstacles))
    if len(set(hosts)) > 1:
        return "needs all ranks on one host, and they are on several"
    for one, other in permutations(sorted(set(gpus)), 2):
        if not torch.cuda.can_device_access_peer(one, other):
            return f"needs peer access from GPU {one} to GPU {other}"
    return None


def _own_obstacle(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"needs NVIDIA GPUs of one host with peer access; this model is on {device.type}"
    if os.environ.get(MULTICAST_OFF) != "1":
        return f"needs {MULTICAST_OFF}=1 from the start: multicast is neither used nor needed"
    return None
