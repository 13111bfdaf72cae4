"""Makes a reduce-scatter or an all-gather deliver its result at `wait()`, as on a GPU.

On a CPU a collective has often finished before the next line runs, so a missing wait, or a buffer
freed too early, would show now and then only. Here the collective works on copies. Until it is
waited for, its output is NaN, and it holds its tensors, as the handle of a real collective does.
"""

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

SCATTERS = ("reduce_scatter_single", "reduce_scatter_tensor")
GATHERS = ("all_gather_single", "all_gather_into_tensor")


class Transfer:
    """One collective from `source` to `output`, of which one may be a part of the other.

    Attributes:
        sent, received: what the collective works on.

    Raises:
        ValueError: for a tensor whose storage was resized to nothing. Writing to it would end the
            process.
    """

    def __init__(self, name: str, output: Tensor, source: Tensor):
        if any(t.numel() and not t.untyped_storage().size() for t in (output, source)):
            raise ValueError(f"{name} of a tensor whose memory was freed: resize its storage first")
        self.sent, self.received = source.detach().clone(), torch.empty_like(output).detach()
        self._output, self._source = output.detach(), source.detach()
        if output.is_floating_point():
            self._output.fill_(torch.nan)
        if name in GATHERS:
            self._source.copy_(self.sent)
        self._expected = self._source.clone()

    def deliver(self) -> str:
        """Writes the result. Returns "freed" or "overwritten" if a tensor did not last, or ""."""
        output, source = self._output, self._source
        if not (output.untyped_storage().size() and source.untyped_storage().size()):
            return "freed"
        kept = torch.allclose(source, self._expected, rtol=0, atol=0, equal_nan=True)
        output.copy_(self.received)
        return "" if kept else "overwritten"


def has_memory(storage: StorageWeakRef | None) -> bool:
    """Returns whether a tensor's memory is still allocated, whoever holds it."""
    alive = None
    if storage is not None and not storage.expired():
        alive = torch.UntypedStorage._new_with_weak_ptr(storage.cdata)
    return alive is not None and alive.nbytes() > 0
