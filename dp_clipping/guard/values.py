"""Keeps values of tensors, to find writes and to undo them."""

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor, nn

from dp_clipping.torch_compat import versions_of


class Values:
    """Values of tensors before some code runs.

    They show writes that raise no version counter, as those through `.data`, with one wait of the
    host, and without a look at every operator.

    Args:
        tensors: whose values are kept.
        with_parameters: copies of parameters are kept, too. Otherwise checksums of their bits tell
            whether they were written to, and they keep what was written.
    """

    def __init__(self, tensors: Sequence[Tensor], with_parameters: bool = True):
        self._tensors = tensors
        self._aliases = [x.detach() for x in tensors]
        self._versions = versions_of(tensors)
        self._is_copied = [with_parameters or not isinstance(x, nn.Parameter) for x in tensors]
        self._kept = [
            alias.clone() if is_copied else _sum_of_bits(alias)
            for alias, is_copied in zip(self._aliases, self._is_copied, strict=True)
        ]

    @torch.no_grad()
    def changed(self) -> list[int]:
        """Returns which tensors have other values now, or other memory."""
        differs = [
            (_bits(kept) != _bits(alias)).any() if is_copied else kept != _sum_of_bits(alias)
            for alias, kept, is_copied in zip(
                self._aliases, self._kept, self._is_copied, strict=True
            )
        ]
        flags = [False] * len(differs)
        on = [str(x.device) for x in differs]
        for _, group in groupby(sorted(range(len(on)), key=on.__getitem__), on.__getitem__):
            there = list(group)
            told = torch.stack([differs[n] for n in there]).tolist()
            for n, differ in zip(there, told, strict=True):
                flags[n] = differ
        versions = versions_of(self._tensors)
        moved = [a != b for a, b in zip(versions, self._versions, strict=True)]
        return [
            n
            for n, (tensor, alias) in enumerate(zip(self._tensors, self._aliases, strict=True))
            if flags[n] or (moved[n] and not self._is_copied[n]) or _is_elsewhere(tensor, alias)
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


def _is_elsewhere(now: Tensor, alias: Tensor) -> bool:
    """Returns whether a tensor has other memory: x.data = another."""
    return now.data_ptr() != alias.data_ptr() or now.shape != alias.shape


def _sum_of_bits(x: Tensor) -> Tensor:
    return _bits(x).sum(dtype=torch.int64)


def _bits(x: Tensor) -> Tensor:
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    return x.contiguous().view(whole[x.element_size()])
