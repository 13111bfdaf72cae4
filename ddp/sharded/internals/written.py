"""Takes what was written to gathered values into the slice that they came from.

Nothing counts what a forward writes through `.data`, so behind each forward the values are
compared. Behind a backward they are where a counter of writes has changed, or a parameter got
other `.data`.

Traffic of the kernel: both are read once, and written is what differs. With PyTorch's operators the
same takes six passes over memory.
"""

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # no Triton on this platform: the reference implementation runs
    triton = None

BLOCK = 4096


def take_written_plain(own: Tensor, shard: Tensor) -> None:
    """Makes `shard` what `own` is, where that is not `shard` rounded to the dtype of `own`.

    The digits of the rest, which `own` may not have, are kept.

    Args:
        own: [n], contiguous; the slice of the gathered values.
        shard: [n], contiguous; any dtype.
    """
    if own.dtype != shard.dtype:
        same = own == shard.to(own.dtype)
        own = torch.where(same, shard, own.to(shard.dtype))
    shard.copy_(own)


def take_written(own: Tensor, shard: Tensor) -> None:
    """Computes `take_written_plain` in one pass over memory on a GPU."""
    if triton is None or not shard.is_cuda or not shard.is_floating_point():
        take_written_plain(own, shard)
    else:
        take_written_kernel_launch(own, shard)


def take_written_kernel_launch(own: Tensor, shard: Tensor) -> None:
    n = shard.numel()
    if n:
        _take_written_kernel[(triton.cdiv(n, BLOCK),)](own, shard, n, BLOCK=BLOCK, num_warps=8)


if triton is not None:

    @triton.jit
    def _take_written_kernel(p_own, p_shard, n, BLOCK: tl.constexpr):
        o_n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        m_n = o_n < n
        b_own = tl.load(p_own + o_n, mask=m_n, other=0)
        b_kept = tl.load(p_shard + o_n, mask=m_n, other=0).to(p_own.dtype.element_ty)
        b_new = b_own.to(p_shard.dtype.element_ty)
        tl.store(p_shard + o_n, b_new, mask=m_n & (b_own != b_kept))
