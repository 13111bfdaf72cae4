"""Tracks one step, and raises errors that say why it is incomplete or has failed."""

import warnings
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist

from ddp.buckets import Bucket
from ddp.internals.gradients import Gradients
from ddp.internals.hooks import Backward
from ddp.internals.ownership import Owner, activate
from ddp.internals.unused import agree_on_use, parameters_reached_by, tensors_in
from ddp.internals.watch import Watch
from ddp.schedule import Schedule


class Variant(Owner, Protocol):
    """The interface that a step calls; `ddp.base.DataParallel` implements it."""

    training: bool
    process_group: dist.ProcessGroup
    find_unused_parameters: bool
    require_backward_grad_sync: bool
    gradients_come_by_hand: bool
    launches_in_backward: ClassVar[bool]

    def adopt_order(self, order: list[int]) -> None: ...
    def agree(self) -> None: ...
    def launch_buckets(self, everything: bool = False) -> None: ...
    def wait_for(self, *buckets: Bucket) -> None: ...


@dataclass(frozen=True)
class Launch:
    """A bucket that was launched once `ready` gradients had arrived; names in bucket order."""

    ready: int
    nbytes: int
    names: tuple[str, ...]


@dataclass
class Record:
    """Counts a step's collectives and bytes, and each launch with the gradients ready by then.

    Attributes:
        noted: of the bytes, those that belong to a launch that was noted, or to none.
    """

    collectives: int = 0
    nbytes: int = 0
    noted: int = 0
    buckets: int = 0
    launches: list[tuple[int, int, Bucket]] = field(default_factory=list)  # ready, bytes, bucket

    def note_launch(self, ready: int, bucket: Bucket) -> None:
        """Notes a launch; its bytes are those just counted, or the bucket's if none were."""
        sent, self.noted = self.nbytes - self.noted, self.nbytes
        self.launches.append((ready, sent or bucket.nbytes, bucket))


class Step:
    """One step, from its first forward or gradient to `finish_gradient_synchronization`.

    Every event of a step (a forward, an arriving gradient, the end of a backward, a failure) has a
    method here, so that the allowed orders are defined in this class alone.

    Attributes:
        unfinished: something has happened that `finish_gradient_synchronization` must complete.
        by_hand: some gradients of this step did not come from autograd's hook.
        record, finished: what this step has sent, and what the last finished one had.
    """

    def __init__(self, gradients: Gradients, schedule: Schedule, watch: Watch):
        self._gradients, self._schedule, self._watch = gradients, schedule, watch
        self._order_is_observed = False
        self.backward = Backward()
        self.finished = Record()
        self.begin()

    def begin(self) -> None:
        self.unfinished = False
        self.backward.forget()
        self.record = Record()
        self._used: set[int] = set()  # got a local gradient, under no_sync() too
        self._reached: set[int] = set()  # the forwards of this step lead to these
        self.by_hand = False
        self._backward_reduces: bool | None = None  # as the last forward decided
        self._awaits_backward = False  # a synchronising forward has had no backward yet
        self._gradients.begin_step()
        self._schedule.begin_step()
        self._watch.end_step()

    def is_in_the_middle(self) -> bool:
        return bool(self._schedule.arrivals or self._schedule.launched or self.backward.running)

    # ---- forward -------------------------------------------------------------------------------

    def begin_forward(self, variant: Variant) -> bool:
        """Returns whether buffers are to be synchronised: in training, and not under `no_sync`.

        Raises:
            RuntimeError: if parameters were replaced, or changed before they were reduced, or
                another wrapper of this network is in the middle of a step.
        """
        if not torch.is_grad_enabled():
            return False
        self._watch.raise_if_replaced(variant.module)
        if not variant.training:  # one rank alone may call it: no communication
            self._raise_if_changed()
            synchronizes = variant.require_backward_grad_sync
            self._backward_reduces = synchronizes or self._awaits_backward
            return False
        activate(variant)
        self._raise_if_changed(discard_in=variant)
        self._gradients.dtypes.conform()
        if self.backward.has_failed():
            self.discard(variant)
        if variant.require_backward_grad_sync:
            self._complete_rounds(variant)
            self.unfinished = self._awaits_backward = True
        self._backward_reduces = self._awaits_backward
        return variant.require_backward_grad_sync

    def end_forward(self, variant: Variant, output: Any) -> None:
        if torch.is_grad_enabled() and not variant.gradients_come_by_hand:
            reduces = bool(self._backward_reduces)
            for x in tensors_in(output):
                if x.grad_fn is not None:
                    x.register_hook(lambda _gradient: self.backward.enter(reduces))
        trains = variant.training and torch.is_grad_enabled()
        if trains and variant.find_unused_parameters and self._awaits_backward:
            index = self._gradients.index
            self._reached |= {index[p] for p in parameters_reached_by(output) if p in index}

    def _raise_if_changed(self, discard_in: Variant | None = None) -> None:
        """Raises if an optimizer has stepped with gradients that were not reduced."""
        if not self.backward.running and (complaint := self._watch.complaint()):
            if discard_in is not None:
                self.discard(discard_in)
            raise RuntimeError(complaint)

    def _complete_rounds(self, variant: Variant) -> None:
        """Issues the collectives that other ranks have issued, before buffers are broadcast."""
        if variant.find_unused_parameters and not self.by_hand:
            # Others may have launched what this rank has not even begun.
            if self.unfinished and self._missing() and variant.launches_in_backward:
                variant.launch_buckets(everything=True)
        else:
            self.discard_partial(variant)
        variant.wait_for(*self._schedule.in_flight)

    # ---- backward ------------------------------------------------------------------------------

    def arrive(self, variant: Variant, i: int) -> bool:
        """Notes that `.grad` of `i`, or its absence, is final; returns whether it is reduced now.

        Autograd's node runs without a gradient too, where a custom function returns None. It
        counts as zero, and with `find_unused_parameters` as unused on this rank.
        """
        parameter = self._gradients.parameters[i]
        if parameter.grad is not None:
            self._gradients.refuse(i)
            variant.wait_for(self._schedule.bucket_of[i])
            self._gradients.settle(i)
            self._used.add(i)
        if not self._this_backward_reduces(variant):
            return False
        if not variant.find_unused_parameters:
            self._used.add(i)
            if self._schedule.launched == len(self._schedule.buckets):
                variant.wait_for(*self._schedule.in_flight)
                self._schedule.begin_round()  # a second backward before finish
        self._watch.gradient_arrived(parameter)
        self.unfinished = True
        self.by_hand |= not self.backward.running
        self._schedule.arrive(i)
        self._mark_unreached_ready(variant)
        return True

    def _this_backward_reduces(self, variant: Variant) -> bool:
        if not self.backward.running or self._backward_reduces is None:
            return variant.require_backward_grad_sync
        self._awaits_backward = False
        return self._backward_reduces

    def _mark_unreached_ready(self, variant: Variant) -> None:
        """Marks parameters that no forward of this step uses as ready, so that buckets complete."""
        if variant.find_unused_parameters and self._reached and len(self._schedule.arrivals) == 1:
            self._schedule.ready |= set(range(len(self._gradients.parameters))) - self._reached

    # ---- finish --------------------------------------------------------------------------------

    def is_complete(self, variant: Variant) -> bool:
        """Returns False for a step in which all parameters are frozen: nothing to reduce.

        Raises:
            RuntimeError: naming parameters that got no gradient, or one that was changed before
                its gradient was reduced; the step is discarded.
        """
        self._raise_if_changed(discard_in=variant)
        if variant.find_unused_parameters:
            return True
        trainable = any(p.requires_grad for p in self._gradients.parameters)
        if not self._schedule.arrivals and not trainable:
            self.begin()
            return False
        self._raise_if_incomplete(variant)
        return True

    def end(self, variant: Variant) -> None:
        """Ends a round: reduces unused or late gradients, and completes the step."""
        used, anything_late = self._used, bool(self._used - self._gradients.reduced)
        if variant.find_unused_parameters:
            parameters = self._gradients.parameters
            used, anything_late = agree_on_use(
                parameters, used, anything_late, variant.process_group
            )
        self._gradients.adopt_stand_ins(used)
        if anything_late:  # a gradient has grown since it was sent
            self._schedule.begin_round()
            variant.launch_buckets(everything=True)
            variant.wait_for(*self._schedule.in_flight)
            self._gradients.adopt_stand_ins(used)
        self._gradients.restore_strides()
        self.record.buckets = len(self._schedule.buckets)
        self.finished = self.record
        if not self._order_is_observed:
            self._agree_on_order(variant)
        self.begin()

    def _agree_on_order(self, variant: Variant) -> None:
        """Rebuilds the plan once, in the order in which rank 0 saw gradients become ready."""
        arrivals = self._schedule.arrivals
        order = [*arrivals, *(i for i in self._schedule.order if i not in arrivals)]
        message = torch.tensor(order, device=self._gradients.parameters[0].device)
        dist.broadcast(message, group=variant.process_group, group_src=0)
        variant.agree()
        variant.adopt_order(message.tolist())
        self._order_is_observed = True

    # ---- a step that cannot be finished --------------------------------------------------------

    def _missing(self) -> list[int]:
        """Lists parameters that received fewer gradients than others in this step."""
        arrivals = self._schedule.arrivals
        expected = max(arrivals.values(), default=1)
        return [i for i in range(len(self._gradients.parameters)) if arrivals.get(i, 0) < expected]

    def _raise_if_incomplete(self, variant: Variant) -> None:
        missing = self._missing()
        if not missing:
            return
        others = (  # each has arrived in some backward
            ", or others got several in one, as reentrant checkpointing of a module that is called "
            "twice gives them"
        )
        message = (
            f"unfinished reduction: {self._gradients.show(missing)} got no gradient in a backward "
            f"of this step{others if all(map(self._schedule.arrivals.get, missing)) else ''}; if "
            "that is meant, pass find_unused_parameters=True"
        )
        try:
            self.discard(variant)
        except RuntimeError as error:  # the other ranks never launched what this one waits for
            raise RuntimeError(message) from error
        raise RuntimeError(message)

    def discard_partial(self, variant: Variant) -> None:
        if self._schedule.arrivals and (missing := self._missing()):
            warnings.warn(
                f"a step is discarded, gradients included: {self._gradients.show(missing)} got "
                "none in its backward; if that is meant, pass find_unused_parameters=True",
                stacklevel=4,
            )
            self.discard(variant)

    def discard(self, variant: Variant) -> None:
        """Discards an incomplete step and its gradients, of which some are reduced and some not.

        Ranks may have been stopped in different places, so each completes the round. That works
        if every rank was stopped inside its backward; where one was not, it sees NaN.
        """
        self._gradients.drop()
        failed_early = self.backward.is_entered and self.backward.reduces
        if variant.launches_in_backward and (self._schedule.arrivals or failed_early):
            variant.launch_buckets(everything=True)
        variant.wait_for(*self._schedule.in_flight)
        self.begin()
