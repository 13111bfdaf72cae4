"""Ensures that each sampled example contributes to exactly one optimizer step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dp_clipping.sampling.parts import Slice, apart

BOTH_OUTPUTS = (
    "make a module private whose forward returns both outputs, as def forward(self, real, fake): "
    "return self.body(real), self.body(fake), and call backward() of the sum of their losses"
)


@dataclass(frozen=True)
class Ticket:
    """Describes the (micro)batch that a loader yields.

    Attributes:
        samples: how many there are.
        number: the number of the batch; None: it is not of a Poisson loader.
        rows: the rows of the batch, if padding follows its samples; None: none does.
        fill: bool for each sample, True where it only fills up a unit of privacy; None: there is no
            such one.
        is_dummy: it is the made-up sample of `rand_on_empty`. Its gradient must be masked: were it
            added, taking away the only real sample of a batch could move the sum by 2C.
        largest: the most samples that a part of the batch has on a rank, if `BatchMemoryManager`
            splits it; None: it is not split, or not by that.
        alone: the (micro)batch, and samples of it that were collated alone (a
            `collate_check.Alone`); None: their lengths are those of the batch, or are not due.
        same_parts: all ranks have the batch in as many parts; Opacus's manager does not see to it.
    """

    samples: int = 0
    number: int | None = None
    rows: int | None = None
    fill: Tensor | None = None
    is_dummy: bool = False
    largest: int | None = None
    alone: tuple[Any, Any] | None = None
    same_parts: bool = True

    def real_of(self, rows: int) -> int:
        """Returns the number of a batch's rows that are samples, which come first.

        Raises ValueError for a part of a batch in which padding follows them.
        """
        if self.rows is None:
            return rows
        if rows != self.rows:
            raise ValueError(
                f"forward of {rows} samples, and with pad_batches=True the loader has yielded "
                f"{self.rows} rows, of which only the first are samples: give the model the whole "
                "batch in the loader's order, or use pad_batches=False"
            )
        return self.samples

    def fill_of(self, rows: int) -> Tensor | None:
        """Returns which rows only fill up a unit, or are padding; None: each unit is full."""
        if self.fill is None:
            return None
        found = torch.ones(rows, dtype=torch.bool, device="cpu")
        found[: len(self.fill)] = self.fill
        return found


class SampleUsage:
    """Counts the samples that the loader has yielded and no backward has used yet.

    The loader calls `hand_over` for each batch that it yields, the model calls `use` before each
    backward and `close` when a step is released. A batch whose backward ran three times would move
    a sum by 3C, and two Poisson batches in one step would be accounted for as one. A batch may be
    used in parts that have no sample in common: slices of one tensor, or declared by
    `signal_skip_step`. Each batch that is yielded replaces the one before.

    Without a Poisson loader only the samples of a step are counted: `batch_size` of them are a
    batch, and those of several batches would be divided by the size of one.

    Attributes:
        batch_size: the batch size of a loader without Poisson sampling; None: not known.
        handed: samples of the (micro)batch that was yielded last; None without a Poisson loader.
        left: those of them that no backward has used.
        uses: backwards since they were handed out; all ranks count alike.
        due: the number of the batch that the next step must have, as ε does not cover a choice.
        is_owed: that batch was yielded in training: it comes again until a step has used it.
        shown: the number of the first batch that was never yielded.
        ticket: what the loader says of the batch that it has yielded last.
        refusal: why the loader's next iteration is refused; "" if it is not.
    """

    def __init__(self) -> None:
        self.refusal = ""
        self.batch_size: int | None = None
        self.handed: int | None = None
        self.left = 0
        self._in_step = 0
        self._more_to_come = False
        self._parts: list[Sequence[Slice | None]] = []  # of the batch, that backwards have used
        self.uses = 0
        self.due = self.shown = 0
        self.is_owed = False
        self.ticket = Ticket()

    def restart(self, position: int) -> None:
        """Records that batch `position` is the next one, whatever was yielded before."""
        self.refusal, self.ticket = "", Ticket()
        self.is_owed = self.is_owed and position == self.due
        self.due = self.shown = position

    def next(self, in_training: bool, in_order: bool) -> int:
        """Returns the number of the batch that an iteration begins with.

        In training it is the one that a step must have: a batch that was yielded for it, or was
        looked at alone in evaluation.

        Args:
            in_order: each step has the batch after that of the last one.
        """
        was_looked_at = in_training and self.shown == self.due + 1
        return self.due if self.is_owed or was_looked_at or in_order else self.shown

    def begin(self, number: int, in_training: bool) -> None:
        """Records that batch `number` is about to be yielded.

        In evaluation a loop may pass over batches, which it has looked at: no step follows on one
        that comes after them, unless another iteration has begun in training (`due`).
        """
        self.shown = max(self.shown, number + 1)
        self.is_owed = self.is_owed or (in_training and number == self.due)

    def hand_over(self, ticket: Ticket) -> None:
        """Records a batch that a Poisson loader is about to yield."""
        self.ticket = ticket
        self.handed = self.left = ticket.samples
        self._parts = []
        self.uses = 0

    def end_padding(self) -> None:
        """Declares all rows as samples from here on."""
        self.ticket = replace(self.ticket, rows=None)

    def take_alone(self) -> tuple[Any, Any] | None:
        """Returns the batch with those of its samples that were collated alone, once."""
        found = self.ticket.alone
        if found is not None:
            self.ticket = replace(self.ticket, alone=None)
        return found

    def refuse_parts(self, rows: int) -> None:
        """Raises ValueError for a forward of a part of a batch: it may hold parts of units."""
        handed = self.handed if self.ticket.rows is None else self.ticket.rows
        if handed is not None and rows != handed:
            raise ValueError(
                f"forward of {rows} examples, and the loader has yielded {handed}, units of "
                "examples_per_unit or views side by side: give the model the whole batch in the "
                "loader's order, and split it with BatchMemoryManager(data_loader=loader, "
                "max_physical_batch_size=.., optimizer=optimizer)"
            )

    def is_part(self, rows: int) -> bool:
        """Returns whether a forward of so many rows has a part of the batch."""
        return self.handed is not None and self.ticket.rows is None and rows < self.handed

    def use(
        self,
        samples: int,
        on_any_rank: Callable[[bool], bool] = bool,
        *,
        part: bool = False,
        slices: Sequence[Slice | None] = (),
    ) -> None:
        """Counts samples that a backward is about to add.

        Args:
            on_any_rank: whether a flag is set on any rank; called from the second backward of a
                batch on, since a rank without samples would block where others raise.
            part: more of the batch is to come, as `signal_skip_step` has said; without a Poisson
                loader.
            slices: where the samples are in memory, if they are a part of the batch.

        Raises:
            RuntimeError: if they are more than are unused, or may be used already.
        """
        if self.handed is None:
            self._use_of_batch(samples, part)
            return
        number = self.ticket.number
        if number is not None and number > self.due:
            raise RuntimeError(
                f"backward of batch {number} of the loader, and no step has used batch "
                f"{self.due}, which was passed over while the model was in evaluation: ε "
                "does not cover a choice among batches, so begin another iteration to train, "
                "for x, y in loader:, after model.train()"
            )
        too_many = samples > self.left
        is_again = bool(samples) and not self._are_apart(slices)
        ask = on_any_rank if self.ticket.same_parts else bool
        elsewhere = bool(self.uses) and ask(too_many or is_again)
        if too_many or elsewhere:
            raise RuntimeError(self._twice(samples, too_many, is_again))
        self.uses += 1
        self.left -= samples
        if samples:
            self._parts.append(slices)

    def end_part(self) -> None:
        """Records that a step was skipped: what follows are other samples of the batch.

        `BatchMemoryManager` skips steps too. What follows there is another microbatch.
        """
        if self.ticket.largest is None:
            self._parts = []

    def _are_apart(self, slices: Sequence[Slice | None]) -> bool:
        return all(apart(slices, used) for used in self._parts)

    def _twice(self, samples: int, too_many: bool, is_again: bool) -> str:
        once = "a sample is in one backward of one step only"
        if is_again and not too_many:
            return (
                f"backward of {samples} samples, and an earlier one of this batch may have had "
                f"some of them: {once}, so add up the losses of a batch before one backward(), "
                "with a factor of 0 for samples that a loss leaves out, as (mask * loss_a + "
                "loss_b).backward(), and split a batch by BatchMemoryManager"
            )
        if too_many and self.uses and self.handed:
            return (
                f"backward of {samples} samples, and an earlier one of this step had samples of "
                f"the same batch: {once}, so for two losses of a batch {BOTH_OUTPUTS}"
            )
        what = "samples that another rank has used already"
        if too_many:
            left = f"{self.left} of {self.handed}" if self.handed else "none"
            what = f"{samples} samples, and of the loader's last batch {left} are unused"
        return (
            f"backward of {what}: {once}, so take a new batch for each step from the loader that "
            "make_private returned with this model, for x, y in loader:, give several views of a "
            "sample as one sample, and call optimizer.step() after the last part of a batch that "
            "is split, as by x.split(3)"
        )

    def _use_of_batch(self, samples: int, part: bool) -> None:
        before, declared = self._in_step, self._more_to_come
        fits = self.batch_size is None or before + samples <= self.batch_size
        if fits or declared or not before:
            self._in_step, self._more_to_come = before + samples, part
            return
        raise RuntimeError(
            f"backward of {samples} samples in a step that has {before} already, and the loader's "
            f"batch has {self.batch_size}: the gradient would be divided, and the step counted, as "
            f"if it were one batch. For two losses of one batch {BOTH_OUTPUTS}; for several "
            "batches, let the loader's batch_size be that of a step and split it with "
            "BatchMemoryManager(data_loader=.., max_physical_batch_size=.., optimizer=..)"
        )

    def give_back(self) -> None:
        """Accepts the batch of a step whose sums were dropped once more."""
        self._in_step = 0
        self._parts = []
        self.left = self.handed or 0

    def close(self) -> None:
        """Records that a step is about to be released: its batch cannot be used again."""
        if self.ticket.number is not None:
            self.due, self.is_owed = self.ticket.number + 1, False
        self.take_back()

    def take_back(self) -> None:
        """Refuses further backwards of the yielded batch."""
        self._in_step = 0
        self._parts = []
        if self.handed is not None:
            self.handed = self.left = 0
