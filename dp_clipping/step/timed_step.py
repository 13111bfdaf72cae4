"""Sessions with the profiling switch on: the same steps, and more of their ranges are timed.

The sessions proper have no branch for it. What they do in a method of their own becomes a range
here, around the method.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from dp_clipping.clipping.norms import Norms
from dp_clipping.step.fused_step import FusedStep
from dp_clipping.step.private_step import PrivateStep


class TimedNorms(Norms):
    """Stacking and sums over layers are ranges."""

    def __init__(self, norms: Norms, profile: Any):
        self.__dict__.update(vars(norms))
        self._profile = profile

    def _stack(self) -> Tensor:
        with self._profile.range("norm_stack"):
            return super()._stack()

    def _by_group(self, values: Tensor) -> Tensor:
        with self._profile.range("norm_local_sum"):
            return super()._by_group(values)


class _Profiled(PrivateStep):
    """What both kinds of sessions time."""

    def _forget(self) -> None:
        super()._forget()
        self._parts: list[Tensor] = []  # this rank's squared norms, chunk by chunk

    def _phase(self, name: str) -> Any:
        return self.context.profile.range(name)

    def _range(self, what: str, *parameters: Parameter) -> Any:
        return self._phase(f"{what}/{'+'.join(self.capture.names[p] for p in parameters)}")

    def backward(
        self,
        losses: Tensor,
        clip_norms: Tensor,
        accumulate: Callable[[Parameter, Tensor | None], None],
    ) -> Tensor:
        profile = self.context.profile

        def hand_over(parameter: Parameter, total: Tensor | None) -> None:
            with profile.range("hand_over"):
                accumulate(parameter, total)

        try:
            norms = super().backward(losses, clip_norms, accumulate if profile.alone else hand_over)
        except BaseException:
            profile.abandon()
            raise
        profile.note_norms(self._own_squares, self.squares)
        return norms

    def _run_backward(self, losses: Tensor, triggers: list[Tensor], retain_graph: bool) -> None:
        if not self._summing:
            super()._run_backward(losses, triggers, retain_graph)
            return
        with self._phase("second_backward"):
            super()._run_backward(losses, triggers, retain_graph)

    def _clip(self, clip_norms: Tensor) -> Tensor:
        norms = super()._clip(clip_norms)
        self._own_squares = torch.stack(self._parts).sum(0) if self._parts else None
        return norms

    def _note_norms(self) -> None:
        if self._partial is None:
            return
        with self._phase("norm_all_reduce"):  # chunks leave here
            super()._note_norms()

    def _squares_and_bounds(self) -> tuple[Tensor, Tensor]:
        if self._partial is None:
            self._parts.clear()  # groups that were clipped on their own are among all again
        return super()._squares_and_bounds()

    def _table_of(self, parameters: Any) -> Tensor:
        table = super()._table_of(parameters)
        self._parts.append(table[0])
        return table

    def _table(self, groups: int, samples: Tensor | None = None) -> Norms:
        return TimedNorms(super()._table(groups, samples), self.context.profile)


class TimedStep(_Profiled):
    """See `PrivateStep`."""


class TimedFusedStep(_Profiled, FusedStep):
    """See `FusedStep`."""


PROFILED = {PrivateStep: TimedStep, FusedStep: TimedFusedStep}
