"""Clip coefficients that stay on the device, for some or all clipping groups."""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from dp_clipping.clipping.coefficients import (
    CLIPPING_FUNCTIONS,
    MARGIN,
    coefficients,
    finite_samples,
)
from dp_clipping.clipping.norms import Norm, on_device
from dp_clipping.kernels.coefficients import clip_coefficients, squared_bounds
from dp_clipping.kernels.sorted_coefficients import Coefficients
from dp_clipping.layers.recorder import Trainable
from dp_clipping.modes import Policy


class FusedCoefficients:
    """Coefficients of one backward, on the device.

    Args:
        clip_norms: [K], the threshold of each clipping group.
        members: the parameters of each group.
        policy: how the mode works.
        left_out: [B] bool, samples that are left out; those with a norm that is not finite join.
    """

    def __init__(
        self,
        clip_norms: Tensor,
        members: Sequence[list[Trainable]],
        policy: Policy,
        left_out: Tensor,
    ):
        self.left_out = left_out
        self._clip_norms, self._members, self._policy = clip_norms, members, policy

    def of(
        self, groups: list[int], found: Mapping[Trainable, Norm], make_zero: Callable[[], Tensor]
    ) -> Coefficients:
        """Returns coefficients of these groups, 0 for samples without finite norms so far.

        Args:
            found: parameter -> its norm.
            make_zero: [B] zeros, for what has none.
        """
        if len(self._members) == 1:
            mine = [list(found.values())]
        else:
            mine = [[found[p] for p in self._members[k] if p in found] for k in groups]
        norms = [norm for own in mine for norm in own] or [Norm(make_zero())]
        squares = torch.stack([norm.squared for norm in norms])
        scales = squares  # if no norm has errors, they are multiplied with 0
        if any([norm.scale is not None for norm in norms]):
            zero = make_zero()
            scales = torch.stack([zero if n.scale is None else n.scale for n in norms])
        errors = tuple([(norm.gram_error, norm.sum_error) for norm in norms])
        starts = tuple(accumulate((len(own) for own in mine), initial=0))
        device, policy = squares.device, self._policy
        if policy.clipping_function not in CLIPPING_FUNCTIONS:
            table = on_device(errors, torch.float32, device)
            return self.of_bounds(squared_bounds(squares, scales, table, starts).float(), groups)
        values = clip_coefficients(
            squares, scales, on_device(errors, torch.float32, device),
            on_device(starts, torch.int32, device), self._clip_norms_of(groups),
            1 + MARGIN[torch.float32],
            policy.gamma if policy.clipping_function == "automatic" else None, self.left_out,
        )  # fmt: skip
        return Coefficients(values, {group: row for row, group in enumerate(groups)})

    def of_bounds(self, bounds: Tensor, groups: list[int]) -> Coefficients:
        """Returns coefficients from upper bounds [K, B] of whole samples' squared norms."""
        clip_norms, policy = self._clip_norms_of(groups), self._policy
        self.left_out |= ~finite_samples(bounds)
        values = coefficients(bounds, clip_norms, policy.clipping_function, policy.gamma)
        values = values.masked_fill(self.left_out, 0).float()
        return Coefficients(values, {group: row for row, group in enumerate(groups)})

    def _clip_norms_of(self, groups: list[int]) -> Tensor:
        clip_norms = self._clip_norms
        if len(groups) == len(clip_norms):
            return clip_norms
        return clip_norms[on_device(tuple(groups), torch.int64, clip_norms.device)]
