"""The two kernels of the course, each below what it computes in plain PyTorch.

`combine` is the sum that the copy engines cannot do. `take_written`, of `fsdp`, takes what was
written to gathered values into the slice that they came from. Both pass over memory once: imported
late, since Triton takes a second to import.
"""

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # no Triton on this platform: the reference implementations run
    triton = None

BLOCK = 4096


def combine_plain(mine: Tensor, pulled: Tensor, scale: float) -> None:
    """Computes `mine ← scale · (mine + Σ pulled)`, accumulated in float32 or wider, in place.

    Args:
        mine: [n], any floating dtype, contiguous.
        pulled: [W − 1, n], the same dtype; rows contiguous.
        scale: 1/W for a mean, 1 for a sum.
    """
    wide = torch.promote_types(mine.dtype, torch.float32)
    total = mine.to(wide) + pulled.to(wide).sum(dim=0)
    mine.copy_(total.mul_(scale))


def combine(mine: Tensor, pulled: Tensor, scale: float) -> None:
    """Computes `combine_plain` in one pass over memory on a GPU.

    W chunks are read once and one is written, (W + 1) · n bytes for chunks of n bytes. A chain of
    `torch.add` would move 3(W − 1) · n and round 16-bit values W − 1 times.
    """
    if triton is None or not mine.is_cuda:
        combine_plain(mine, pulled, scale)
    else:
        combine_kernel_launch(mine, pulled, scale)


def combine_kernel_launch(mine: Tensor, pulled: Tensor, scale: float) -> None:
    n = mine.numel()
    if n == 0:
        return
    # Many short programs fill the gaps that the model's kernels leave. A few long ones, each
    # holding its multiprocessor, were slower on an H200: 16 of them by 2 ms in 59.
    _combine_kernel[(triton.cdiv(n, BLOCK),)](
        mine, pulled, n, pulled.stride(0), float(scale), pulled.shape[0],
        WIDE=tl.float64 if mine.dtype == torch.float64 else tl.float32,
        BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip


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
    """Computes `take_written_plain` in one pass over memory on a GPU.

    Both are read once, and written is what differs. PyTorch's operators would take six passes.
    """
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
    def _combine_kernel(
        p_mine, p_pulled, n, row_stride, scale,
        ROWS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        o_n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        m_n = o_n < n
        b_sum = tl.load(p_mine + o_n, mask=m_n, other=0).to(WIDE)
        for i_row in tl.static_range(ROWS):
            b_sum += tl.load(p_pulled + i_row * row_stride + o_n, mask=m_n, other=0).to(WIDE)
        tl.store(p_mine + o_n, (b_sum * scale).to(p_mine.dtype.element_ty), mask=m_n)

    @triton.jit
    def _take_written_kernel(p_own, p_shard, n, BLOCK: tl.constexpr):
        o_n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        m_n = o_n < n
        b_own = tl.load(p_own + o_n, mask=m_n, other=0)
        b_kept = tl.load(p_shard + o_n, mask=m_n, other=0).to(p_own.dtype.element_ty)
        b_new = b_own.to(p_shard.dtype.element_ty)
        tl.store(p_shard + o_n, b_new, mask=m_n & (b_own != b_kept))
