"""The all-reduce of one bucket by copies: which bytes move where, and in what order."""

from torch import Tensor

from ddp.copy_engine.peer_memory import PeerMemory


class Exchange:
    """Plans and runs the all-reduce of one range of every rank's memory, by copies.

    Args:
        memory: the memory of all ranks.
        start: the byte at which the range begins.
        mine: that range of this rank's memory, as a tensor [numel].
        scratch: bytes for what is pulled; it may be shared by exchanges on one stream.
    """

    def __init__(self, memory: PeerMemory, start: int, mine: Tensor, scratch: Tensor):
        numel, dtype = mine.numel(), mine.dtype
        me, size = memory.rank, memory.world_size
        low, high = chunk_of(me, numel, size)
        # Each rank begins with another peer, so that no GPU serves all others at once.
        peers = [(me + k) % size for k in range(1, size)]

        def part(rank: int, a: int, b: int) -> Tensor:
            return memory.view(rank, start + a * dtype.itemsize, b - a, dtype)

        from ddp.internals.kernels import combine  # Triton takes a second to import

        self._combine = combine
        self._memory = memory
        self._sums: list[tuple[Tensor, Tensor, list[Tensor]]] = []  # mine, pulled, sources
        rows = max(1, len(peers))
        step = max(128, scratch.numel() // (rows * dtype.itemsize) // 128 * 128)
        for a in range(low, high, step):
            b = min(a + step, high)
            pulled = scratch[: len(peers) * (b - a) * dtype.itemsize].view(dtype)
            sources = [part(peer, a, b) for peer in peers]
            self._sums.append((part(me, a, b), pulled.view(len(peers), b - a), sources))
        self._mine = part(me, low, high)
        self._targets = [part(peer, low, high) for peer in peers]

    def run(self, scale: float) -> None:
        """Queues everything on the current stream; afterwards every rank holds scale · sum."""
        self._memory.signal()
        self._memory.wait_for_peers()
        for mine, pulled, sources in self._sums:
            for row, source in zip(pulled, sources, strict=True):
                row.copy_(source)
            self._combine(mine, pulled, scale)
        for target in self._targets:
            target.copy_(self._mine)
        self._memory.signal()
        self._memory.wait_for_peers()


def chunk_of(rank: int, numel: int, world_size: int) -> tuple[int, int]:
    """Returns the half-open range of elements that `rank` reduces; the last ranks' may be empty."""
    step = -(-numel // world_size)
    step = -(-step // 128) * 128  # whole cache lines
    return min(rank * step, numel), min((rank + 1) * step, numel)
