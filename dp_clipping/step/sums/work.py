"""Decides when norms and sums are formed from what layers leave in backward.

    take        a use of a layer leaves G, or the operands that G follows from
    clip        its norms have been taken -> coefficients
    sum         Σ_i c_i G_i of each parameter, handed over as soon as it is final

A launch serves many layers, so what is left waits. Two events end that before backward does.

*Sync points.* Collectives of norms and sums are issued between those of the layers. Every rank of a
sharded model must issue all of them in the same order, whatever its batch, its memory and its plan.
So they are issued once enough complete FSDP units are ready (a unit is what one FSDP module
gathers).

*Memory.* What waits and nothing else would hold may take the memory that backward has freed. Each
rank decides this for itself, and such work needs no other rank.

How norms, coefficients and sums are computed is the arithmetic's: `fused` on kernels, `plain` in
PyTorch.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor

from dp_clipping.capture.checks.kept import Kept
from dp_clipping.clipping.accumulation import full_float32
from dp_clipping.kernels.launch.tiles import AT_ONCE
from dp_clipping.layers.recorder import DENSE, FACTORS, Accumulate, Joint, Left, Summand, Trainable
from dp_clipping.planning.cost_model import SUM_BYTES
from dp_clipping.step.state import BatchNorms
from dp_clipping.step.sums.step_norms import StepNorms
from dp_clipping.step.sums.uses import Uses, gradients_left
from dp_clipping.torch_compat import allocated, current_stream, version_of
from dp_clipping.trials.randomness import RandomStates

PENDING_BYTES = 1 << 28  # of what waits for a common launch, in any case,
PENDING_SHARE = 32  # but not above this part of what the forward has saved
MOST_PENDING_BYTES = 1 << 31  # the same, in memory that backward has freed
UNIT_BYTES = 1 << 30  # of sums that leave together where FSDP's modules are smaller,
MEETINGS = 8  # and where all of them are few: this part of them
ON_SEVERAL_STREAMS = (
    "layers of one backward ran on several CUDA streams, and norms and sums of several layers are "
    "launched together: run the forward on one stream"
)


class Arithmetic(Protocol):
    """Computes norms, coefficients and sums of one batch."""

    fused: bool

    def begin(self, losses: Tensor, clip_norms: Tensor, streams: bool) -> None:
        """Prepares for a backward; with `streams` groups are clipped one by one."""
        ...

    def norms(self, lefts: list[Left], work: "Work", everything: bool) -> None:
        """Takes the norms of what is left, and gives `work` what is to be summed of it.

        Norms of what is kept in any case may wait for a launch with others until `everything`.
        """
        ...

    def clip(self, work: "Work", groups: list[int]) -> BatchNorms | None:
        """Sets the coefficients of clipping groups; returns the norms if it is all of them."""
        ...

    def summands(
        self, lefts: list[Left], taken: set[Trainable]
    ) -> tuple[list[Trainable], list[Summand]]:
        """Returns what a second backward has left for the sums of parameters not `taken` yet."""
        ...

    def sums(self, records: Sequence[Trainable], values: list[Any]) -> Iterable[Tensor]:
        """Returns Σ_i c_i G_i of each; `values` is emptied as sums are formed."""
        ...


class Work:
    """The work of one private step on what its layers leave.

    Args:
        context: what all steps of the model have in common, a `context.StepContext`.
        batch_size: samples of the batch.
        arithmetic: computes norms, coefficients and sums.
        plans: how each linear layer is handled: `layer_plans.FusedPlans` or `PlainPlans`.
        compiled: operands arrive in another order than activations are freed, those of linear
            layers last.

    Attributes:
        waiting: what is left and has no norms yet.
        pending: bytes of what waits that nothing else would hold.
        kept: parameter -> what its sum will be formed of.
        recomputed: parameters whose G a second backward computes again.
        seen: parameters whose uses have left something in the backward under way.
        norms: the norms that have been taken.
        versions: what is kept, compared by value in steps that are looked at.
        streams: groups are summed as soon as their norms are there.
    """

    def __init__(
        self,
        context: Any,
        batch_size: int,
        arithmetic: Arithmetic,
        plans: Any,
        compiled: bool = False,
    ):
        self.context, self.batch_size = context, batch_size
        self.arithmetic, self.plans, self.compiled = arithmetic, plans, compiled
        self.norms, self.versions = StepNorms(context, batch_size), Kept()
        self._sharding, self._departures = context.sharding, context.sums or context.departures
        self._two_passes, self._is_dense = context.policy.two_passes, context.policy.dense_always
        # Kinds of what is left of one parameter alone, as it is kept: kernels pack factors.
        self._of_one = (DENSE,) if arithmetic.fused else (DENSE, FACTORS)
        self._uses = Uses(batch_size, self.versions)
        self._joining: Joint | None = None  # whose uses are taken together
        self.forget()

    def forget(self) -> None:
        """Drops what a backward has left."""
        self.waiting: list[Left] = []
        self._order: dict[Trainable, None] = {}  # in which parameters have arrived
        self.kept: dict[Trainable, Summand] = {}
        self.recomputed: list[Trainable] = []
        self.seen: set[Trainable] = set()
        self.taken: set[Trainable] = set()  # before and while a second backward runs
        self.streams = self.is_summing = self._is_in_backward = False
        self._staying: Collection[Trainable] = ()  # weights whose factors are kept in any case
        self._keeps_all = False  # G, and factors that no plan is about, are kept in any case
        self.versions.forget()
        self._uses.forget()
        self._accumulate: Accumulate = lambda sums: None
        self._stream: int | None = None  # that layers run on, if launches read what several leave
        self._least = PENDING_BYTES  # that may wait in any case
        self._reset()

    def _reset(self) -> None:
        """Begins with nothing that waits: a backward, or the sums after it."""
        self.pending = 0
        self._room = self._least  # of `pending`, before the next look at the memory
        self._arrivals: dict[int, int] = defaultdict(int)  # of parameters, by their unit
        self._complete = 0  # bytes of the units that have all, since the last sync point

    # ---- backward -------------------------------------------------------------------------------

    def begin(self, losses: Tensor, clip_norms: Tensor, accumulate: Accumulate) -> None:
        """Begins a backward; sums will go to `accumulate`."""
        self.plans.make()
        self._device = device = self.context.capture.trigger.device
        self._is_on_gpu = device.type == "cuda"
        self._held = allocated(self._device)
        saved = self._held - self.plans.at_first
        if saved > 0:
            self._room = self._least = min(PENDING_BYTES, max(AT_ONCE, saved // PENDING_SHARE))
        per_layer = self.arithmetic.fused and self.context.policy.per_layer
        self.streams = per_layer and not self.runs_twice
        self._staying = () if self.streams else self.plans.kept_as_they_are
        self._keeps_all = not (self.streams or self._two_passes)
        self._accumulate = accumulate
        self.norms.begin(len(clip_norms))
        self.arithmetic.begin(losses, clip_norms, self.streams)

    @property
    def runs_twice(self) -> bool:
        """Returns whether a second backward follows the clipping."""
        return self._two_passes or self.plans.runs_twice

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        """Surrounds a backward, which sends sums only at sync points and at its end."""
        self._is_in_backward = True
        if self._departures is not None:
            self._departures.deferred = True
        try:
            yield
        finally:
            self._is_in_backward = False
            if self._departures is not None:
                self._departures.deferred = False
        self._send()

    def take(
        self, kind: str, records: tuple[Trainable, ...], value: Any, tensors: tuple[Tensor, ...]
    ) -> None:
        """Takes what a use of parameters has left; see `layers.recorder`.

        Raises:
            RuntimeError: the norm would miss something.
        """
        if not self.seen.isdisjoint(records):
            raise RuntimeError(
                f"{records[0].name} was used more often in this step than in the "
                "first one, so its norm would miss the cross terms: call "
                "model.reset_batch_layouts() before a forward that differs"
            )
        if self.is_summing and self.taken.issuperset(records):
            return
        if self._is_dense and kind is not DENSE:
            for record, gradients in gradients_left(kind, records, value, self.batch_size):
                self.take(DENSE, (record,), (gradients, None), (gradients,))
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
        if self.versions.reads_values:
            self.versions.note(records[0], tensors)
            if self.runs_twice:
                self.versions.compare_backwards(records[0], kind, tensors)
        size = 0
        for tensor in tensors:
            size += tensor.nbytes
        packs = kind is FACTORS and self.arithmetic.fused and not self.is_summing
        if packs and size > AT_ONCE:
            self._take_norms([left], everything=self.streams)
            stays = not self.streams  # what is kept of them waits for their group
        else:
            self.waiting.append(left)
            stays = records[0] in self._staying or (self._keeps_all and kind in self._of_one)
        if not (stays or (kind is DENSE and self._stays(left))):
            self.pending += max(size, self.plans.gradient_bytes.get(records[0], 0))
            if self.streams or self.is_summing:
                self.pending += self.bytes_of(records)
        if self._sharding is not None and self._is_sync_point(records) and self._sends_early():
            self._meet()
        elif self.pending > self._room and not self._has_room():
            self._make_room()

    def join(self, joint: Joint) -> None:
        """Takes what all uses of parameters have left, as one."""
        self._joining = joint
        try:
            for left in self._uses.joined(joint):
                self.take(*left)
        finally:
            self._joining = None

    def _stays(self, left: Left) -> bool:
        """Returns whether its tensors are kept until the sums in any case."""
        if left.records[0] in self._staying or (self._keeps_all and left.kind in self._of_one):
            return True
        is_kept = left.kind is DENSE and self.keeps(left.value[0])
        return is_kept and not self.streams and not self.is_summing

    def keeps(self, gradients: Tensor) -> bool:
        """Returns whether G is kept for its sum; vectors always are."""
        return not self._two_passes or (gradients.dim() == 2 and self.arithmetic.fused)

    def bytes_of(self, records: tuple[Trainable, ...]) -> int:
        """Returns the bytes that forming sums takes temporarily.

        It is 0 where sums of a sharded model are deferred to the next sync point: memory is no
        reason to form them early then.
        """
        if self._departures is not None and self._departures.deferred:
            return 0
        return sum([SUM_BYTES * record.shape.numel() for record in records])

    def _sends_early(self) -> bool:
        """Returns whether sync points send something before the end of the backward under way."""
        leaves = self.streams or self.norms.leave_early or self.is_summing
        return leaves and self._is_in_backward

    def _meet(self) -> None:
        """Launches what waits at a sync point, and sends its results."""
        self._launch(everything=True)
        self.norms.launch()
        if self.streams:
            self._clip_complete_groups()
        self._send()

    def _make_room(self) -> None:
        """Launches what waits because memory is short."""
        clips = self.streams and not self.norms.split.is_split  # else that is a collective
        self._launch(everything=clips)
        if clips:
            self._clip_complete_groups()

    def _is_sync_point(self, records: tuple[Trainable, ...]) -> bool:
        """Returns whether the arrival of these parameters is a sync point. Called once for each."""
        for record in records:
            unit = self._sharding.parts[record.parameter].unit
            self._arrivals[unit] += 1
            if self._arrivals[unit] == len(self._sharding.units[unit]):
                self._complete += self._sharding.unit_bytes[unit]
        enough = min(UNIT_BYTES, self._sharding.bytes // MEETINGS)
        return self._complete > 0 and self._complete >= enough

    def _has_room(self) -> bool:
        """Returns whether memory is left, and allows what waits half of it.

        The launch itself, above all its sums, needs the other half.
        """
        free = self._held - allocated(self._device) - self.pending
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
        if self.is_summing:
            self._sum_waiting()
            return
        waiting = self._taken_out()
        if not everything:
            self.waiting = [left for left in waiting if self._stays(left)]
            waiting = [left for left in waiting if not self._stays(left)]
        self._take_norms(waiting, everything)

    def _sum_waiting(self) -> None:
        """Forms sums of what a second backward has left."""
        self._form(*self.arithmetic.summands(self._taken_out(), self.taken))

    def _taken_out(self) -> list[Left]:
        """Returns what waits, and begins with nothing that does."""
        waiting, self.waiting = self.waiting, []
        self.pending, self._room = 0, self._least
        return waiting

    def _take_norms(self, lefts: list[Left], everything: bool) -> None:
        self.versions.refuse_changed(
            [(left.records, left.tensors, left.versions) for left in lefts]
        )
        self.arithmetic.norms(lefts, self, everything)

    def found(
        self, records: Sequence[Trainable], squares: Tensor, scales: Tensor | None = None,
        gram_error: float = 0.0, sum_error: float = 0.0,
    ) -> None:  # fmt: skip
        """Notes norms [n, B] of n parameters; see `Norms.add_rows`."""
        self.norms.table.add_rows(records, squares, scales, gram_error, sum_error)
        self.norms.known.update(records)

    def keep(self, record: Trainable, value: Any, tensors: tuple[Tensor, ...]) -> None:
        """Keeps what the sum of a parameter is formed of."""
        self.kept[record] = (value, tensors, tuple(map(version_of, tensors)))
        if self.versions.reads_values:
            self.versions.note(record, tensors)

    def keep_gradients(self, several: Iterable[tuple[Trainable, Tensor | None]]) -> None:
        """Keeps G of several parameters."""
        for record, gradients in several:
            if gradients is not None:
                tensors = (gradients,)
                self.kept[record] = (gradients, tensors, tuple(map(version_of, tensors)))
                if self.versions.reads_values:
                    self.versions.note(record, tensors)

    def _clip_complete_groups(self) -> None:
        """Forms the sums of clipping groups whose norms are all known."""
        members = self.context.capture.members
        counts = Counter(record.group for record in self.kept if record in self.norms.known)
        # Norms of split parameters are added up over ranks row by row: the order is the same on
        # all, in whichever order each has taken them.
        groups = sorted([k for k, count in counts.items() if count == len(members[k])])
        if groups:
            self.arithmetic.clip(self, groups)
            mine = set(groups)
            here = [r for r in self._order if r in self.kept and r.group in mine]
            self._form(here, [self.kept.pop(record) for record in here])

    def _send(self) -> None:
        """Sends the sums that have been formed, at a sync point or the end of a backward."""
        self._complete = 0
        if self._departures is not None:
            self._departures.launch_ready()

    # ---- clipping and sums ----------------------------------------------------------------------

    def clip(self) -> BatchNorms:
        """Turns all norms into coefficients."""
        self._launch(everything=True)
        self.norms.launch()
        found = self.arithmetic.clip(self, list(range(len(self.context.capture.members))))
        assert found is not None
        return found

    def begin_sums(self) -> None:
        """Begins the sums, before the second backward if there is one."""
        self._reset()
        self.is_summing, self._staying, self._keeps_all = True, (), False
        self.taken = set(self.kept)
        if self._sharding is not None:
            self.end_sums()  # beside what the second backward brings of the same modules
            self._complete = 0

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
            self._sum_waiting()
        left = [(record, self.kept[record]) for record in self._order if record in self.kept]
        self.kept.clear()
        if self.compiled and self._departures is None:
            # A sum that takes more than it frees is late.
            left.sort(key=lambda one: self.bytes_of((one[0],)) > _nbytes(one[1]))
        if self._sharding is not None:
            self._is_sync_point(tuple([record for record, _ in left]))
        left.reverse()
        while left:  # what sums are formed of is freed with them
            records, summands, size = [], [], 0
            while left:
                record, summand = left.pop()
                records.append(record)
                summands.append(summand)
                size += SUM_BYTES * record.shape.numel()
                for tensor in summand[1]:
                    size += tensor.nbytes
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
            totals = self.arithmetic.sums(records, values)
            self._accumulate(zip(records, totals, strict=True))


def _nbytes(summand: Summand) -> int:
    return sum([tensor.nbytes for tensor in summand[1]])
