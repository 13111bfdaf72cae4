"""Keeps values of tensors, to find writes and to undo them."""

from itertools import groupby

import torch
from torch import Tensor, nn

from dp_clipping.guard.places import Named
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

    def __init__(self, tensors: list[Named], with_parameters: bool = True):
        held = [(named, named.tensor.detach()) for named in tensors]
        self._held = sorted(held, key=lambda pair: str(pair[1].device))
        self._versions = versions_of(named.tensor for named, _ in self._held)
        self._is_copied = [
            with_parameters or not isinstance(named.tensor, nn.Parameter) for named, _ in self._held
        ]
        self._kept = [
            alias.clone() if is_copied else _sum_of_bits(alias)
            for (_, alias), is_copied in zip(self._held, self._is_copied, strict=True)
        ]

    @torch.no_grad()
    def changed(self) -> list[Named]:
        """Returns the tensors that have other values now, or other memory."""
        return [self._held[n][0] for n in self._changed()]

    @torch.no_grad()
    def put_back(self) -> list[Named]:
        """Gives tensors their memory and values; returns those that had others."""
        changed = self._changed()
        for n in changed:
            named, alias = self._held[n]
            if _is_elsewhere(named.tensor, alias):
                named.tensor.data = alias
            if self._is_copied[n]:
                alias.copy_(self._kept[n])
        return [self._held[n][0] for n in changed]

    def _changed(self) -> list[int]:
        flags: list[bool] = []
        items = list(zip(self._held, self._kept, self._is_copied, strict=True))
        for _, group in groupby(items, lambda item: item[0][1].device):
            differ = [
                (_bits(kept) != _bits(alias)).any() if is_copied else kept != _sum_of_bits(alias)
                for (_, alias), kept, is_copied in group
            ]
            flags += torch.stack(differ).tolist()
        versions = versions_of(named.tensor for named, _ in self._held)
        moved = [a != b for a, b in zip(versions, self._versions, strict=True)]
        return [
            n
            for n, (named, alias) in enumerate(self._held)
            if flags[n]
            or (moved[n] and not self._is_copied[n])
            or _is_elsewhere(named.tensor, alias)
        ]


def _is_elsewhere(now: Tensor, alias: Tensor) -> bool:
    """Returns whether a tensor has other memory: x.data = another."""
    return now.data_ptr() != alias.data_ptr() or now.shape != alias.shape


def _sum_of_bits(x: Tensor) -> Tensor:
    return _bits(x).sum(dtype=torch.int64)


def _bits(x: Tensor) -> Tensor:
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    return x.contiguous().view(whole[x.element_size()])
