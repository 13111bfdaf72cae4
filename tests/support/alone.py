"""What a command's rank has around it, for ranks of a test's pool."""

from ddp_by_hand.lm.rank_pool import Context
from ddp_by_hand.lm.runtime import Worker


class Watching:
    def at(self, place: str) -> None:
        """Nobody watches."""


def worker_of(context: Context) -> Worker:
    return Worker(context.rank, context.world_size, context.device, None)
