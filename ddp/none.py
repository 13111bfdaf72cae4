"""The floor: the same step without any communication.

Every rank trains on its own shard as if it were alone, so the replicas drift apart. This variant
trains nothing useful: it measures what synchronisation costs. A step of another variant takes
longer for two reasons: exposed communication, and kernels of the model that run slower during a
transfer.
"""

from torch import nn

from ddp.base import DataParallel
from ddp.buckets import Bucket


class NoCommunication(DataParallel):
    """Runs the hooks and bookkeeping of the other variants, and reduces no gradient."""

    def __init__(self, module: nn.Module, **options):
        super().__init__(module, **options)
        self.reduction.contributors = 1  # no other rank contributes

    def launch(self, bucket: Bucket) -> None:
        pass

    def wait(self, bucket: Bucket, handle: None) -> None:
        pass

    def take_last_values(self) -> None:
        """Takes buffers alone: what the ranks have trained stays apart."""
        self.replicas.broadcast_buffers()
