"""One round: every bucket is launched once, in the agreed order, and waited for.

Collectives match by call order alone. If two ranks launched the same buckets in another order,
gradients of different parameters would be summed without any error, so nothing is launched in the
order in which it happens to become ready: a bucket waits for its predecessors.

Several backwards before one finish each reduce what they add, in a round each. A reduced gradient
is the same on all ranks; reducing it again together with new local terms leaves its mean unchanged,
and under `reduce="sum"` each rank first takes back its share, 1/W of it (up to rounding, where W
is no power of two). The ranks must run the backwards of a step in one order.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ddp.buckets import Bucket
from ddp.watch import Watch


@dataclass(frozen=True)
class Launch:
    """A bucket that left when `ready` gradients of the step had arrived; names in bucket order."""

    ready: int
    nbytes: int
    names: tuple[str, ...]


class Rounds:
    """The bookkeeping half of `ddp.base.DataParallel`; by itself it does nothing."""

    reduce: str
    world_size: int
    _parameters_by_index: list[Parameter]
    _buckets: list[Bucket]
    _bucket_of: dict[int, int]
    _reduced: set[int]
    _names: dict[Parameter, str]
    _watch: Watch

    def _begin_step(self) -> None:
        self._unfinished = False
        self._absent = 0.0  # what stands for a gradient that this rank does not have
        self._counters = {"collectives": 0, "bytes": 0}
        self._log: list[tuple[int, Bucket]] = []  # gradients ready, and the bucket launched then
        self._arrivals: dict[int, int] = {}  # index -> gradients so far, first arrival first
        self._used: set[int] = set()  # got a local gradient, under no_sync() too
        self._reached: set[int] = set()  # the forwards of this step lead to these
        self._stand_ins: dict[int, Tensor] = {}
        self._in_backward = False  # stays True if that backward has failed
        self._by_hand = False  # some gradients of this step did not come from autograd's hook
        self._backward_reduces: bool | None = None  # as the last forward decided
        self._awaits_backward = False  # a synchronising forward has had no backward yet
        self._watch.end_step()
        self._begin_round()

    def _begin_round(self) -> None:
        self._ready: set[int] = set()
        self._launched = 0  # buckets launched so far, and the next one to launch
        self._in_flight: dict[int, Any] = {}

    def _launch_complete_buckets(self, everything: bool = False) -> None:
        while self._launched < len(self._buckets):
            bucket = self._buckets[self._launched]
            if not (everything or self._ready.issuperset(bucket.members)):
                return
            for i in bucket.members:
                self._conform(i)
                self._take_back_share(i)
            self._in_flight[self._launched] = self.launch(bucket)
            self._log.append((len(self._arrivals), bucket))
            self._launched += 1

    def _finish_round(self) -> None:
        self._launch_complete_buckets(everything=True)
        self._wait_for_all()

    def _wait_for_all(self) -> None:
        for number in list(self._in_flight):
            self._wait_for(number)

    def _wait_for(self, number: int) -> None:
        bucket = self._buckets[number]
        self.wait(bucket, self._in_flight.pop(number))
        self._reduced.update(bucket.members)

    def _settle(self, i: int) -> None:
        """`.grad` of `i` is this rank's own again: not under way, and without the others' part."""
        if self._bucket_of[i] in self._in_flight:
            self._wait_for(self._bucket_of[i])
        if i in self._stand_ins:  # unused here in an earlier backward, used elsewhere perhaps
            self._take_back_share(i)
            self._parameters_by_index[i].grad.add_(self._stand_ins.pop(i))

    def _take_back_share(self, i: int) -> None:
        """Turn a reduced gradient into this rank's part of it, to be reduced again."""
        if i in self._reduced:
            self._reduced.discard(i)
            gradient = self._stand_ins.get(i, self._parameters_by_index[i].grad)
            if gradient is not None and self.reduce == "sum":
                gradient.div_(self.world_size)

    def _is_in_mid_step(self) -> bool:
        """Gradients have arrived, or left, that are not finished."""
        return bool(self._arrivals or self._launched or self._in_backward)

    def _missing(self) -> list[int]:
        """Parameters that got fewer gradients than others in this step."""
        expected = max(self._arrivals.values(), default=1)
        count = len(self._parameters_by_index)
        return [i for i in range(count) if self._arrivals.get(i, 0) < expected]

    # ---- parameters without a gradient ---------------------------------------------------------

    def _raise_if_incomplete(self) -> None:
        missing = self._missing()
        if not missing:
            return
        message = (
            f"unfinished reduction: {self._show_names(missing)} got no gradient in a backward of "
            "this step; if that is meant, pass find_unused_parameters=True"
        )
        try:
            self._discard_step()
        except RuntimeError as error:  # the other ranks never launched what this one waits for
            raise RuntimeError(message) from error
        raise RuntimeError(message)

    def _mark_unreached_ready(self) -> None:
        """What no forward of this step leads to need not hold up the buckets behind it."""
        if self.find_unused_parameters and self._reached and len(self._arrivals) == 1:
            self._ready.update(set(range(len(self._parameters_by_index))) - self._reached)

    def _adopt_stand_ins(self, used: set[int]) -> None:
        for i, reduced in self._stand_ins.items():
            parameter = self._parameters_by_index[i]
            if i in used:
                parameter.grad = reduced.view_as(parameter)
        self._stand_ins.clear()

    def _is_frozen(self) -> bool:
        """All parameters are frozen for a while: there is nothing to reduce."""
        return not self._arrivals and not any(p.requires_grad for p in self._parameters_by_index)

    # ---- gradients as optimizers and messages want them ------------------------------------------

    def _restore_strides(self) -> None:
        """Collectives want contiguous gradients, optimizers those of the parameter's strides."""
        for parameter in self._parameters_by_index:
            if parameter.grad is not None and not parameter.is_contiguous():
                gradient = parameter.grad
                parameter.grad = torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)

    def _show_names(self, indices: list[int]) -> str:
        return ", ".join(self._name(i) for i in indices)

    def _name(self, i: int) -> str:
        return self._names[self._parameters_by_index[i]]
