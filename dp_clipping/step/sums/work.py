"""Decides when norms and sums are formed from what layers leave in backward.

    take        a use of a layer leaves G, or the operands that G follows from
    clip        its norms have been taken -> coefficients
    sum         Σ_i c_i G_i of each parameter, handed over as soon as it is final

A launch serves many layers, so what is left waits. Two events end that before backward does: a
sync point of a sharded model (`sync_points`), and memory. What waits and nothing else would hold
may take the memory that backward has freed. Each rank decides this for itself, and such work needs
no other rank.

How norms, coefficients and sums are computed is said by a subclass: `fused.Fused` on kernels,
`plain.Plain` in PyTorch.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from torch import Tensor

from dp_clipping.capture.checks.terms import is_reached
from dp_clipping.clipping.accumulation import full_float32
from dp_clipping.layers.recorder import (
    DENSE,
    FACTORS,
    Accumulate,
    Count,
    Joint,
    Left,
    Summand,
    Trainable,
)
from dp_clipping.planning.cost_model import SUM_BYTES
from dp_clipping.step.state import BatchNorms
from dp_clipping.step.sums.backward_state import Kept, PlainPlans, StepNorms
from dp_clipping.step.sums.sync_points import SyncPoints
from dp_clipping.torch_compat import allocated, current_backward, current_stream, version_of
from dp_clipping.trials.randomness import RandomStates

PENDING_BYTES = 1 << 28  # of what waits for a common launch, in any case,
PENDING_SHARE = 32  # but not above this part of what the forward has saved,
LEAST_PENDING_BYTES = 1 << 23  # if that is more
MOST_PENDING_BYTES = 1 << 31  # the same, in memory that backward has freed
ON_SEVERAL_STREAMS = (
    "layers of one backward ran on several CUDA streams, and norms and sums of several layers are "
    "launched together: run the forward on one stream"
)


class Work(ABC):
    """The work of one private step on what its layers leave.

    Args:
        context: what all steps of the model have in common, a `context.StepContext`.
        batch_size: samples of the batch.
        versions: refuses changes of what is kept.
        joining: makes a `plain.Uses`, which joins what several uses of a parameter leave.
        padding: [B] bool, True for samples that are padding; None: none is.
        plans: how each linear layer is handled.
        compiled: operands arrive in another order than activations are freed, those of linear
            layers last.

    Attributes:
        fused: it runs on kernels.
        waiting: what is left and has no norms yet.
        staying: the same, of what is kept until the sums in any case.
        pending: bytes of what waits that nothing else would hold.
        kept: parameter -> what its sum will be formed of.
        recomputed: parameters whose G a second backward computes again.
        seen: parameters whose uses have left something in the backward under way.
        taken: those that the first backward keeps, or that have a sum, while a second one runs.
        counts: how often compiled code has used weights.
        freed: bytes that backward has freed when the memory was looked at; below 0 if it took more.
        norms: the norms that have been taken.
        streams: groups are summed as soon as their norms are there.
        two_passes: of the mode: sums are formed in a second backward.
    """

    fused: bool

    def __init__(
        self, context: Any, batch_size: int, versions: Kept, joining: Callable[[int, Kept], Any],
        padding: Tensor | None = None, plans: PlainPlans | None = None, compiled: bool = False,
    ):  # fmt: skip
        self.context, self.batch_size, self.padding = context, batch_size, padding
        self.plans, self.compiled = plans or PlainPlans(), compiled
        self.norms, self.versions = StepNorms(context, batch_size), versions
        self.points: SyncPoints | None = None
        if context.sharding is not None:
            self.points = SyncPoints(context.sharding, context.sums or context.departures)
        self.two_passes, self._is_dense = context.policy.two_passes, context.policy.dense_always
        self._make_uses = joining
        self._joining: Joint | None = None  # whose uses are taken together
        # Labels and times work for some parameters, if that is recorded.
        self._label: Any = context.timer.layers if context.timer.labels_layers() else None
        self.forget()

    def forget(self) -> None:
        """Drops what a backward has left."""
        self.waiting: list[Left] = []
        self.staying: list[Left] = []
        self._order: dict[Trainable, None] = {}  # in which parameters have arrived
        self.kept: dict[Trainable, Summand] = {}
        self.recomputed: list[Trainable] = []
        self.seen: set[Trainable] = set()
        self.taken: set[Trainable] = set()
        self.counts: list[Count] = []
        self.streams = self.is_summing = False
        # What is kept for its sum as it has been left: by kind, or of these weights.
        self._kinds: tuple[str, ...] = ()
        self._staying: Collection[Trainable] = ()
        self._joined: Any = None  # what several uses have left, once there are some
        self._accumulate: Accumulate = lambda sums: None
        self.backward = -1  # the number of the one under way, within which others may run
        self._stream: int | None = None  # that layers run on, if launches read what several leave
        self._least = PENDING_BYTES  # that may wait in any case
        self._reset()

    def _reset(self) -> None:
        """Begins with nothing that waits: a backward, or the sums after it."""
        self.pending = self.freed = 0
        self._room = self._least  # of `pending`, before the next look at the memory
        if self.points is not None:
            self.points.begin()

    @abstractmethod
    def take_norms(self, lefts: list[Left], everything: bool) -> None:
        """Takes the norms of what is left, and keeps what is to be summed of it.

        Norms of what is kept in any case may wait for a launch with others until `everything`.
        """

    @abstractmethod
    def set_coefficients(self, groups: list[int]) -> BatchNorms | None:
        """Sets the coefficients of clipping groups; returns the norms if it is all of them."""

    @abstractmethod
    def summands(self, lefts: list[Left]) -> tuple[list[Trainable], list[Summand]]:
        """Returns what a second backward has left for sums of parameters not `taken` yet."""

    @abstractmethod
    def sums(self, records: Sequence[Trainable], values: list[Any]) -> Iterable[Tensor]:
        """Returns Σ_i c_i G_i of each; `values` is emptied as sums are formed."""

    def begin(self, losses: Tensor, clip_norms: Tensor, accumulate: Accumulate) -> None:
        """Begins a backward; sums will go to `accumulate`."""
        self.plans.make()
        self._device = device = self.context.capture.trigger.device
        self._is_on_gpu = device.type == "cuda"
        self._held = allocated(self._device)
        saved = self._held - self.plans.at_first
        if saved > 0:
            self._room = self._least = min(
                PENDING_BYTES, max(LEAST_PENDING_BYTES, saved // PENDING_SHARE)
            )
        self.streams = self.fused and self.context.streams
        self._staying = () if self.streams else self.plans.kept_as_they_are
        if not (self.streams or self.two_passes):
            self._kinds = (DENSE,) if self.fused else (DENSE, FACTORS)  # kernels pack factors
        self._accumulate = accumulate
        self.clip_norms = clip_norms

    @property
    def runs_twice(self) -> bool:
        """Returns whether a second backward follows the clipping."""
        return self.two_passes or self.plans.runs_twice

    def take(
        self, kind: str, records: tuple[Trainable, ...], value: Any, tensors: tuple[Tensor, ...]
    ) -> None:
        """Takes what a use of parameters has left; see `layers.recorder`.

        Raises:
            RuntimeError: the norm would miss something.
        """
        if current_backward() != self.backward and not is_reached(records[0].trigger):
            return  # it is of a gradient by other tensors, which is taken within the backward
        if not self.seen.isdisjoint(records):
            raise RuntimeError(
                f"{records[0].name} was used more often in this step than in the "
                "first one, so its norm would miss the cross terms: call "
                "model.reset_batch_layouts() before a forward that differs; a loop in forward "
                "must run equally often for all data"
            )
        if self.is_summing and self.taken.issuperset(records):
            return
        if self._is_dense and kind is not DENSE:
            for record, gradients in self._uses.gradients(kind, records, value, tensors):
                self.take(DENSE, (record,), None, (gradients,))
            return
        if self._is_on_gpu:
            stream = current_stream(self._device.index)
            if self._stream not in (None, stream):
                raise RuntimeError(ON_SEVERAL_STREAMS)
            self._stream = stream
        if records[0].joint is not self._joining:
            self._uses.add(kind, records, value, tensors)
            return
        self.seen.update(records)
        # `Left(..)` would call a function in Python for each.
        values = (kind, records, value, tensors, tuple(map(version_of, tensors)))
        left = tuple.__new__(Left, values)
        for record in records:
            self._order[record] = None
        if (values := self.versions.values) is not None:
            values.note(records[0], tensors)
            if self.runs_twice:
                values.compare_backwards(records[0], kind, tensors)
        size = 0
        for tensor in tensors:
            size += tensor.nbytes
        if kind is FACTORS and self.fused:
            size *= 2  # kernels pack them, and a launch holds both
        if kind in self._kinds or records[0] in self._staying:
            self.staying.append(left)
        else:
            self.waiting.append(left)
            self.pending += max(size, self.plans.gradient_bytes.get(records[0], 0))
            if self.streams or self.is_summing:
                self.pending += self.bytes_of(records)
        if self.points is not None and self.points.is_at(records) and self._sends_early():
            self._meet(self.points)
        elif self.pending > self._room and not self._has_room():
            self._make_room()

    @property
    def _uses(self) -> Any:
        """Returns what joins the uses of the backward under way."""
        if self._joined is None:
            self._joined = self._make_uses(self.batch_size, self.versions)
        return self._joined

    def join(self, joint: Joint) -> None:
        """Takes what all uses of parameters have left, as one."""
        self._joining = joint
        try:
            for left in self._uses.joined(joint):
                self.take(*left)
        finally:
            self._joining = None

    def bytes_of(self, records: tuple[Trainable, ...]) -> int:
        """Returns the bytes that forming sums takes temporarily.

        It is 0 where sums of a sharded model are deferred to the next sync point: memory is no
        reason to form them early then.
        """
        if self.points is not None and self.points.defers_sums:
            return 0
        return sum([SUM_BYTES * record.shape.numel() for record in records])

    def _sends_early(self) -> bool:
        """Returns whether sync points send something before the end of a backward."""
        return self.streams or self.norms.leave_early or self.is_summing

    def _meet(self, points: SyncPoints) -> None:
        """Launches what waits at a sync point, and sends its results."""
        self.freed = self._held - allocated(self._device)
        self._launch(everything=True)
        self.norms.launch()
        if self.streams:
            self._clip_complete_groups()
        points.send()

    def _make_room(self) -> None:
        """Launches what waits because memory is short."""
        self._launch(everything=self.streams)
        if self.streams:
            self._clip_complete_groups()

    def _has_room(self) -> bool:
        """Returns whether memory is left, and allows what waits half of it.

        The launch itself, above all its sums, needs the other half.
        """
        self.freed = self._held - allocated(self._device)
        free = self.freed - self.pending
        room = min(MOST_PENDING_BYTES, self.pending + free // 2)
        if room < self.pending + self._least // 4:
            return False
        self._room = room
        return True

    def _launch(self, everything: bool) -> None:
        """Takes norms of what waits, or forms its sums in a second backward.

        Args:
            everything: also norms of what is kept until the sums in any case.
        """
        waiting, self.waiting = self.waiting, []
        if everything:
            waiting, self.staying = self.staying + waiting, []
        self.pending, self._room = 0, self._least
        if self.is_summing:
            self._form(*self.summands(waiting))
            return
        self.versions.refuse_changed([(one.records, one.tensors, one.versions) for one in waiting])
        self.take_norms(waiting, everything)

    def keep(self, several: Iterable[tuple[Trainable, Any]]) -> None:
        """Keeps what sums of parameters are formed of: G, or an object that knows what it holds."""
        for record, value in several:
            tensors = (value,) if isinstance(value, Tensor) else value.held(value)
            self.kept[record] = (value, tensors, tuple(map(version_of, tensors)))
            if self.versions.values is not None:
                self.versions.values.note(record, tensors)

    def _clip_complete_groups(self) -> None:
        """Forms the sums of clipping groups whose norms are all known."""
        members = self.context.capture.members
        counts = Counter(record.group for record in self.kept if record in self.norms.table.known)
        groups = sorted([k for k, count in counts.items() if count == len(members[k])])
        if groups:
            self.set_coefficients(groups)
            mine = set(groups)
            here = [r for r in self._order if r in self.kept and r.group in mine]
            self._form(here, [self.kept.pop(record) for record in here])

    def clip(self) -> BatchNorms:
        """Turns all norms into coefficients."""
        self.freed = self._held - allocated(self._device)
        self._launch(everything=True)
        self.norms.launch()
        found = self.set_coefficients(list(range(len(self.context.capture.members))))
        assert found is not None
        return found

    def begin_sums(self) -> None:
        """Begins the sums, before the second backward if there is one."""
        self._reset()
        self.is_summing, self._kinds, self._staying = True, (), ()
        self.taken = set(self.kept)
        if self.points is not None:
            self.end_sums()  # beside what the second backward brings of the same modules
            self.points.skip()

    def second_triggers(self, randomness: RandomStates) -> list[Tensor]:
        """Returns triggers as deep as needed, and all if the first backward drew random numbers.

        Ranks of a sharded model draw the same numbers, so they agree on what they gather.
        """
        everything = self.recomputed and randomness.have_moved
        chosen = self.context.capture.trained if everything else self.recomputed
        return [record.trigger for record in chosen]

    def end_sums(self) -> None:
        """Forms all sums that are left."""
        if self.waiting:
            self._launch(everything=True)
        left = [(record, self.kept[record]) for record in self._order if record in self.kept]
        self.kept.clear()
        if self.compiled and self.points is None:
            left = _late_last(left)
        if self.points is not None:
            self.points.is_at([record for record, _ in left])
        left.reverse()
        while left:  # what sums are formed of is freed with them
            records, summands, size = [], [], 0
            while left:
                record, summand = left.pop()
                records.append(record)
                summands.append(summand)
                # The sum, and as much for what its launch adds up; operands are there already.
                size += 2 * SUM_BYTES * record.shape.numel()
                if size > self._room:
                    self.pending = size
                    if not self._has_room():
                        break
            del summand
            self._form(records, summands)
            self.pending, self._room = 0, self._least

    def _form(self, records: list[Trainable], summands: list[Summand]) -> None:
        """Forms sums of several parameters; `summands` is emptied."""
        if not records:
            return
        self.versions.refuse_changed(
            [((r,), tensors, v) for r, (_, tensors, v) in zip(records, summands, strict=True)]
        )
        values = [value for value, _, _ in summands]
        summands.clear()
        self.taken.update(records)
        with full_float32():
            totals = self.sums(records, values)
            self._accumulate(zip(records, totals, strict=True))


def _late_last(left: list[tuple[Trainable, Any]]) -> list[tuple[Trainable, Any]]:
    """Returns them with those parameters last whose sum takes more than it frees."""
    early, late = list[Any](), list[Any]()
    for one in left:
        record, (_, tensors, _) = one
        size = SUM_BYTES * record.shape.numel()
        for tensor in tensors:
            size -= tensor.nbytes
        (late if size > 0 else early).append(one)
    return early + late
