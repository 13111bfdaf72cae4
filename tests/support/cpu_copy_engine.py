"""The copy-engine variant on memory that processes share: its logic, without a GPU.

The exchange is the product's own; only the memory (a file mapped by all ranks), the barrier (the
process group's) and the streams (none) are replaced.
"""

import tempfile
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist

from ddp.copy_engine import CopyEngineDDP


class SharedFileMemory:
    def __init__(self, nbytes: int, group: dist.ProcessGroup):
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        paths = [tempfile.mkdtemp(prefix="peer") if self.rank == 0 else None]
        dist.broadcast_object_list(paths, group=group, group_src=0)
        self.nbytes = nbytes
        self._group, folder = group, Path(paths[0])
        if self.rank == 0:
            for rank in range(self.world_size):
                (folder / str(rank)).write_bytes(b"\xff" * nbytes)  # NaN in every float type
        dist.barrier(group=group)
        self._buffers = [
            torch.from_file(str(folder / str(rank)), shared=True, size=nbytes, dtype=torch.uint8)
            for rank in range(self.world_size)
        ]
        dist.barrier(group=group)
        if self.rank == 0:
            for rank in range(self.world_size):
                (folder / str(rank)).unlink()
            folder.rmdir()

    def view(self, rank: int, start: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        # .data: as on a GPU, torch knows nothing of the memory that two such tensors share
        return self._buffers[rank].data[start : start + numel * dtype.itemsize].view(dtype)

    def signal(self) -> None:
        dist.barrier(group=self._group)  # stronger: nobody goes on before all have signalled

    def wait_for_peers(self) -> None:
        """All have signalled."""


class CpuCopyEngineDDP(CopyEngineDDP):
    def open_memory(self, nbytes: int, device: torch.device) -> SharedFileMemory:
        return SharedFileMemory(nbytes, self.process_group)

    def side_stream(self):
        return nullcontext()

    def record_event(self) -> None:
        return None
