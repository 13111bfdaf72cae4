"""The floor: the same step without any communication.

Every rank trains on its own shard as if it were alone, so the replicas drift apart: useless for
training, but a measure of what synchronisation costs. The time by which a variant's step is
longer than this is its exposed communication, and the slowdown of the model's kernels beside the
transfer.
"""

from torch import nn

from ddp.base import DataParallel
from ddp.buckets import Bucket


class NoCommunication(DataParallel):
    """Runs the hooks and bookkeeping of the other variants, and reduces no gradient."""

    def __init__(self, module: nn.Module, **options):
        super().__init__(module, **options)
        self.reduction.contributors = 1  # no other rank has added anything

    def launch(self, bucket: Bucket) -> None:
        pass

    def wait(self, bucket: Bucket, handle: None) -> None:
        pass
