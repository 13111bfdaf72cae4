"""Keeps values of tensors, to find writes and to undo them.

Version counters tell writes by PyTorch's own operators. Those through `.data`, NumPy and kernels of
other libraries show in the values alone.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from dp_clipping.torch_compat import version_of

WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
WORD = torch.int64
SHORT = 1 << 16  # numbers of a tensor that is compared together with others


class Values:
    """Values of tensors before some code runs.

    Args:
        tensors: whose values are kept.
        with_parameters: parameters are copied, too. Otherwise they are compared, and keep what was
            written to them.
    """

    def __init__(self, tensors: Sequence[Tensor], with_parameters: bool = True):
        self._tensors = tensors
        self._aliases = [x.detach() for x in tensors]
        self._versions = list(map(version_of, tensors))
        self._is_copied = [with_parameters or not isinstance(x, nn.Parameter) for x in tensors]
        self._kept = [
            alias.clone() if is_copied else checksum(alias)
            for alias, is_copied in zip(self._aliases, self._is_copied, strict=True)
        ]

    @torch.no_grad()
    def changed(self) -> list[int]:
        """Returns which tensors have other values now, or other memory. The host waits once."""
        kept = [bits(x) if own else x for x, own in zip(self._kept, self._is_copied, strict=True)]
        now = [
            bits(x) if own else checksum(x)
            for x, own in zip(self._aliases, self._is_copied, strict=True)
        ]
        are_others, versions = others(kept, now), list(map(version_of, self._tensors))
        moved = [a != b for a, b in zip(versions, self._versions, strict=True)]
        return [
            n
            for n, (tensor, alias) in enumerate(zip(self._tensors, self._aliases, strict=True))
            if are_others[n]
            or (moved[n] and not self._is_copied[n])
            or _is_elsewhere(tensor, alias)
        ]

    @torch.no_grad()
    def put_back(self) -> list[int]:
        """Gives tensors their memory and values; returns which had others."""
        changed = self.changed()
        for n in changed:
            tensor, alias = self._tensors[n], self._aliases[n]
            if _is_elsewhere(tensor, alias):
                tensor.data = alias
            if self._is_copied[n]:
                alias.copy_(self._kept[n])
        return changed


def checksum(x: Tensor) -> Tensor:
    """Returns sums of the rows' bits, taken as whole numbers. The host waits for no GPU.

    Rows that only together are whole words, as two of an odd number of float32, have one sum.
    """
    rows = bits(x.detach())
    rows = rows.flatten(1) if rows.dim() > 1 else rows.view(1, -1)
    count, length = rows.shape
    size = length * rows.element_size()
    together = WORD.itemsize // math.gcd(size, WORD.itemsize)
    groups, rest = divmod(count, together)
    if not groups or rows.data_ptr() % WORD.itemsize:
        return rows.sum(1, dtype=WORD)
    # Fewer and wider numbers are added up in less time. They are read of one row, as the stride
    # of a dimension of size 1 may be any, and PyTorch looks at it.
    words = (rows[: count - rest] if rest else rows).view(-1).view(WORD)
    sums = words.view(groups, together * size // WORD.itemsize).sum(1)
    return torch.cat((sums, rows[count - rest :].sum(1, dtype=WORD))) if rest else sums


def others(before: Iterable[Tensor], now: Iterable[Tensor]) -> list[bool]:
    """Returns which tensors of whole numbers are others now.

    The short ones of a device are compared at once. The host waits once for a device, and again
    where something differs.
    """
    pairs = list(zip(before, now, strict=True))
    found = [False] * len(pairs)
    for device in {one.device for one, _ in pairs}:
        there = [n for n, (one, _) in enumerate(pairs) if one.device == device]
        short = [n for n in there if pairs[n][0].numel() <= SHORT]
        alone = [n for n in there if pairs[n][0].numel() > SHORT]
        parts = [(pairs[n][0] != pairs[n][1]).any() for n in alone]
        if short:
            one, other = (torch.cat([pairs[n][side].view(-1) for n in short]) for side in (0, 1))
            are_others = one != other
            parts.append(are_others.any())
        told = torch.stack(parts).tolist()
        if short and told.pop():
            sizes = [pairs[n][0].numel() for n in short]
            told += torch.stack([part.any() for part in are_others.split(sizes)]).tolist()
            alone += short
        for n, is_other in zip(alone, told, strict=False):
            found[n] = is_other
    return found


def equal(one: Tensor, other: Tensor) -> bool:
    """Returns whether two tensors have the same bits; the host waits."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return not others([bits(one)], [bits(other)])[0]


def bits(x: Tensor) -> Tensor:
    """Returns a tensor's numbers as whole ones of the same bits."""
    x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    return x.contiguous().view(WHOLE[x.element_size()])


def copied_bytes(x: Tensor) -> np.ndarray:
    """Returns a tensor's numbers as bytes of their own.

    After `x.numpy()` the memory of x has a fixed size, and FSDP could not free it any more.
    """
    plain = x.detach().cpu().resolve_conj().resolve_neg()
    plain = plain.clone(memory_format=torch.contiguous_format).reshape(-1)
    return plain.view(torch.uint8).numpy()


def _is_elsewhere(now: Tensor, alias: Tensor) -> bool:
    """Returns whether a tensor has other memory: x.data = another."""
    return now.data_ptr() != alias.data_ptr() or now.shape != alias.shape
