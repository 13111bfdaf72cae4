"""The floor: the same step without any communication.

Every rank trains on its own shard as if it were alone, so the replicas drift apart. This variant
trains nothing useful: it measures what synchronisation costs. A step of another variant takes
longer for two reasons: exposed communication, and kernels of the model that run slower during a
transfer.
"""

from ddp.base import DataParallel
from ddp.internals.gradients import Reduction
from ddp.schedule import Bucket


class NoCommunication(DataParallel):
    """Runs the hooks and bookkeeping of the other variants, and reduces no gradient."""

    def make_reduction(self, name: str) -> Reduction:
        return Reduction(name, contributors=1)

    def launch(self, bucket: Bucket) -> None:
        pass

    def wait(self, bucket: Bucket, handle: None) -> None:
        pass

    def stats(self) -> dict[str, int]:
        return {**super().stats(), "collectives": 0, "bytes": 0}
