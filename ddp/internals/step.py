"""One step, from its first forward or gradient to `finish_gradient_synchronization`.

Every event of a step (a forward, an arriving gradient, the end of a backward, a failure) has a
method here, so that the allowed orders are defined in this class alone.
"""

import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ddp.internals.gradients import Gradients
from ddp.internals.unused import agree_on_use, parameters_reached_by, tensors_in
from ddp.internals.watch import Watch
from ddp.schedule import Bucket, Schedule
from ddp.torch_compat import at_end_of_backward, in_backward, version_of


@dataclass(frozen=True)
class Launch:
    """A bucket that was launched once `ready` gradients had arrived; names in bucket order."""

    ready: int
    nbytes: int
    names: tuple[str, ...]


@dataclass
class Record:
    """Each launch of a step with the gradients ready by then, and what else was sent.

    Attributes:
        collectives, nbytes: beside those launches that have sent their bucket once.
        counted: launches that have counted what they have sent, by their place.
    """

    launches: list[tuple[int, Bucket]] = field(default_factory=list)
    collectives: int = 0
    nbytes: int = 0
    buckets: int = 0
    counted: set[int] = field(default_factory=set)

    def count(self, nbytes: int, collectives: int = 1) -> None:
        self.collectives += collectives
        self.nbytes += nbytes

    def stats(self) -> dict[str, int]:
        once = [bucket for n, (_, bucket) in enumerate(self.launches) if n not in self.counted]
        collectives = self.collectives + len(once)
        nbytes = self.nbytes + sum(bucket.nbytes for bucket in once)
        return {"collectives": collectives, "bytes": nbytes, "buckets": self.buckets}


class Step:
    """The state of a wrapper's step; methods take the wrapper, which is a `DataParallel`.

    Attributes:
        unfinished: something has happened that `finish_gradient_synchronization` must complete.
        in_backward: a backward has begun and has not come to its end; it may have failed.
        awaits_backward: a synchronising forward has had no backward yet.
        by_hand: some gradients of this step did not come from autograd's hook.
        record, finished: what this step has sent, and what the last finished one had.
    """

    def __init__(self, gradients: Gradients, schedule: Schedule, watch: Watch):
        self._gradients, self._schedule, self._watch = gradients, schedule, watch
        self._order_is_observed = False
        self.finished = Record()
        self.begin()

    def begin(self) -> None:
        self.unfinished = self.by_hand = self.in_backward = False
        self.record = Record()
        self._reached: set[int] = set()  # the forwards of this step lead to these
        self._reduces: bool | None = None  # whether the next backward does: the last forward's word
        self.awaits_backward = False
        self._entered_to_reduce = False  # the backward that has begun does, so other ranks launch
        self._gradients.begin_step()
        self._schedule.begin_step()
        self._watch.arrived.clear()

    def is_in_the_middle(self) -> bool:
        """Returns whether gradients have arrived, or were launched, that are not finished."""
        return bool(self._schedule.arrivals or self._schedule.launched or self.in_backward)

    def begin_forward(self, wrapper: Any) -> bool:
        """Returns whether buffers are to be synchronised: in training, and not under `no_sync`.

        Raises:
            RuntimeError: if parameters were replaced, or changed before they were reduced, or the
                network was wrapped again.
        """
        if not torch.is_grad_enabled():
            return False
        self._watch.raise_if_replaced(wrapper.module)
        synchronises = wrapper.require_backward_grad_sync
        if not wrapper.training:  # one rank alone may call it: no communication
            self._raise_if_changed()
            self._reduces = synchronises or self.awaits_backward
            return False
        wrapper.refuse_retired()
        self._raise_if_changed(discard_in=wrapper)
        self._gradients.dtypes.conform()
        if self.has_failed():
            self.discard(wrapper)
        if synchronises:
            self._complete_rounds(wrapper)
            self.unfinished = self.awaits_backward = True
        self._reduces = self.awaits_backward
        return synchronises

    def end_forward(self, wrapper: Any, output: Any) -> None:
        if not torch.is_grad_enabled() or wrapper.gradients_come_by_hand:
            return
        reduces = bool(self._reduces)
        for x in tensors_in(output):
            if x.grad_fn is not None:
                x.register_hook(lambda _gradient: self.begin_backward(reduces))
        if wrapper.find_unused_parameters and wrapper.training and self.awaits_backward:
            self._reached |= set(map(self._gradients.index_of, parameters_reached_by(output)))

    def _raise_if_changed(self, discard_in: Any = None) -> None:
        """Raises if an optimizer has stepped with gradients that were not reduced."""
        if not in_backward() and (complaint := self._watch.complaint()):
            if discard_in is not None:
                self.discard(discard_in)
            raise RuntimeError(complaint)

    def _complete_rounds(self, wrapper: Any) -> None:
        """Issues the collectives that other ranks have issued, before buffers are broadcast."""
        if wrapper.find_unused_parameters and not self.by_hand:
            if self.unfinished and self._missing() and wrapper.launches_in_backward:
                wrapper.launch_buckets(everything=True)  # others may have, where this rank has none
        elif self._schedule.arrivals and (missing := self._missing()):
            warnings.warn(
                f"a step is discarded, gradients included: {self._gradients.show(missing)} got "
                "none in its backward; if that is meant, pass find_unused_parameters=True",
                stacklevel=3,
            )
            self.discard(wrapper)
        wrapper.wait_for(*self._schedule.in_flight)

    def begin_backward(self, reduces: bool | None = None) -> None:
        """Called with the gradient of an output, or with the first one of a parameter."""
        if not self.in_backward:
            self.in_backward = True
            self._entered_to_reduce = bool(self._reduces if reduces is None else reduces)
            self._arrived_before = sum(self._schedule.arrivals.values())
            at_end_of_backward(self._end_backward)

    def _end_backward(self) -> None:
        self.in_backward = False

    def has_failed(self) -> bool:
        """Returns whether the last backward has not come to its end."""
        return self.in_backward and not in_backward()

    def arrive(self, wrapper: Any, i: int) -> bool:
        """Notes that `.grad` of `i`, or its absence, is final; returns whether it is reduced now.

        Autograd's node runs without a gradient too, where a custom function returns None. It
        counts as zero, and with `find_unused_parameters` as unused on this rank.
        """
        parameter, schedule = self._gradients.parameters[i], self._schedule
        if parameter.grad is not None:
            if schedule.bucket_of[i] in schedule.in_flight:
                wrapper.wait_for(schedule.bucket_of[i])
            self._gradients.settle(i)
        if not self.in_backward or self._reduces is None:
            self.by_hand |= not self.in_backward
            reduces = wrapper.require_backward_grad_sync
        else:
            reduces, self.awaits_backward = self._reduces, False
        if not reduces:
            return False
        if schedule.launched == len(schedule.buckets):
            self._begin_round(wrapper)
        self._watch.arrived[i] = version_of(parameter)
        self.unfinished = True
        schedule.arrive(i)
        if self._reached and len(schedule.arrivals) == 1:  # others stay away: buckets complete
            schedule.ready |= set(range(len(self._gradients.parameters))) - self._reached
        return True

    def _begin_round(self, wrapper: Any) -> None:
        """Begins the round of a second backward before finish; unused parameters take none."""
        schedule = self._schedule
        if not wrapper.find_unused_parameters and schedule.launched == len(schedule.buckets):
            wrapper.wait_for(*schedule.in_flight)
            schedule.begin_round()

    def is_complete(self, wrapper: Any) -> bool:
        """Returns False for a step in which all parameters are frozen: nothing to reduce.

        Raises:
            RuntimeError: naming parameters that got no gradient, or one that was changed before
                its gradient was reduced, or where the backward has failed; the step is discarded.
        """
        self._raise_if_changed(discard_in=wrapper)
        if wrapper.find_unused_parameters:
            if self.has_failed():  # what it has not reached would pass for unused
                self.discard(wrapper)
                raise RuntimeError(
                    "the backward of this step has failed, so its gradients are discarded: go on "
                    "with the next batch"
                )
            return True
        trainable = any([p.requires_grad for p in self._gradients.parameters])
        if not self._schedule.arrivals and not trainable:
            self.begin()
            return False
        if missing := self._missing():
            self._raise_incomplete(wrapper, missing)
        return True

    def end(self, wrapper: Any) -> None:
        """Ends a round: reduces unused or late gradients, and completes the step."""
        self._gradients.clear_filled(self._meet(wrapper, self._schedule.arrivals))
        self._gradients.restore_strides()
        self.record.buckets = len(self._schedule.buckets)
        self.finished = self.record
        self.begin()

    def _meet(self, wrapper: Any, arrivals: dict[int, int]) -> set[int]:
        """Does what ranks do together once all is launched; returns what any rank has used."""
        is_shared = self._schedule.launched > 0  # else each rank has gradients of its own
        parameters = self._gradients.parameters
        used = {i for i, p in enumerate(parameters) if p.grad is not None}
        anything_late = bool(used - self._gradients.reduced)
        if wrapper.find_unused_parameters and is_shared:
            used -= self._gradients.filled
            used, anything_late = agree_on_use(
                parameters, used, anything_late, wrapper.process_group
            )
        if anything_late:  # a gradient has grown since it was sent
            self._schedule.begin_round()
            wrapper.launch_buckets(everything=True)
            wrapper.wait_for(*self._schedule.in_flight)
        if not self._order_is_observed and is_shared:
            self._agree_on_order(wrapper, arrivals)
        return used

    def _agree_on_order(self, wrapper: Any, arrivals: dict[int, int]) -> None:
        """Rebuilds the plan once, in the order in which rank 0 saw gradients become ready.

        Not in a step that rank 0 discards: it has no arrivals then.
        """
        order = [*arrivals, *(i for i in self._schedule.order if i not in arrivals)]
        message = torch.tensor([len(arrivals), *order], device=self._gradients.parameters[0].device)
        dist.broadcast(message, group=wrapper.process_group, group_src=0)
        is_observed, *order = message.tolist()
        if is_observed:
            wrapper.adopt_order(order)
            self._order_is_observed = True

    def _missing(self) -> list[int]:
        """Lists parameters that received fewer gradients than others in this step."""
        arrivals = self._schedule.arrivals
        expected = max(arrivals.values(), default=1)
        return [i for i in range(len(self._gradients.parameters)) if arrivals.get(i, 0) < expected]

    def _raise_incomplete(self, wrapper: Any, missing: list[int]) -> None:
        others = (  # each has arrived in some backward
            ", or others got several in one, as reentrant checkpointing of a module that is called "
            "twice gives them"
        )
        message = (
            f"unfinished reduction: {self._gradients.show(missing)} got no gradient in a backward "
            f"of this step{others if all(map(self._schedule.arrivals.get, missing)) else ''}; if "
            "that is meant, pass find_unused_parameters=True; if the network was converted, as by "
            "model.half(), wrap it again"
        )
        try:
            self.discard(wrapper)
        except RuntimeError as error:  # the other ranks never launched what this one waits for
            raise RuntimeError(message) from error
        raise RuntimeError(message)

    def discard(self, wrapper: Any) -> None:
        """Discards an incomplete step and its gradients, of which some are reduced and some not.

        Ranks may have been stopped in different places, so each completes the round, and meets
        those that were not stopped where they end the step. These see NaN.
        """
        self._gradients.drop()
        schedule, reduces = self._schedule, self.in_backward and self._entered_to_reduce
        if self.in_backward and sum(schedule.arrivals.values()) == self._arrived_before:
            self._begin_round(wrapper)  # as others do with its first gradient, or with late ones
        if schedule.arrivals or reduces:
            wrapper.launch_buckets(everything=True)
        wrapper.wait_for(*schedule.in_flight)
        if schedule.launched:
            self._meet(wrapper, {})
        self.begin()
