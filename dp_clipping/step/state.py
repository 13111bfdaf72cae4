"""The state of a private step, shared by model, criterion, optimizer and checkpoint.

    phase      `.grad` of the trainable parameters
    IDLE       is empty, or holds what the optimizer has applied
    OPEN       holds clipped sums; the settings of the step are fixed
    NOISY      holds what the optimizer may apply

    from       open     add_noise  apply    drop
    IDLE       OPEN     refused    refused  IDLE
    OPEN       refused  NOISY      refused  IDLE
    NOISY      OPEN     refused    IDLE     IDLE

A backward after `pre_step` opens another step, once `.grad` is empty. Mode `no_dp` has no sums: its
step goes from IDLE to NOISY, and back.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from torch import Tensor

from dp_clipping.arguments.thresholds import check_max_grad_norm
from dp_clipping.clipping.coefficients import clip_norms_of
from dp_clipping.sampling.usage import SampleUsage, Ticket


class Phase(Enum):
    """The phases of a step, by what `.grad` holds."""

    IDLE = auto()
    OPEN = auto()
    NOISY = auto()


@dataclass(frozen=True)
class StepSettings:
    """The settings of a step's noise and divisor, fixed at its first backward."""

    noise_multiplier: float
    expected_batch_size: float
    loss_reduction: str


@dataclass(frozen=True)
class BatchNorms:
    """Unclipped norms of one backward.

    Attributes:
        norms: [B] float32 (float64).
        squared: [K, B], squared, by clipping group.
        nonfinite: samples that were left out; a count on the device in fused steps.
    """

    norms: Tensor
    squared: Tensor
    nonfinite: int | Tensor = 0

    def first(self, samples: int) -> "BatchNorms":
        """Returns the norms of the first samples; the others are not counted."""
        return BatchNorms(self.norms[:samples], self.squared[:, :samples], self.nonfinite)


class StepState:
    """Phase, settings, norms and counts of one model's private steps.

    Args:
        usage: the samples that the loader has handed out.
        is_private: False in mode `no_dp`, whose steps have neither sums nor noise.

    Attributes:
        phase: what `.grad` holds.
        is_idle: no step is open.
        is_open: `.grad` holds sums without noise.
        is_noisy: `.grad` holds what the optimizer may apply.
        clip_norms: C_k of each clipping group in the step that is open, or was last.
        settings: the settings of that step.
        on_open: called when a step opens; fixes its settings.
        norms: the norms of each backward of the step that is open, or was last; none once its sums
            were dropped.
        losses: sum and number of the losses of each of these, if `keeps_losses`.
        keeps_losses: metrics show the mean loss.
        pending: the private step of the last forward, until its backward.
        steps: steps counted so far, which is the number of the next one.
        had_finite: some step had a sample whose norm was finite; until then each is looked at.
        batch_number: the number of the Poisson batch that was handed out and that no step has used.
        held_back: sums are this rank's alone, because of `no_sync()`.
        accumulating: more parts of the Poisson batch follow, so sums stay on this rank.
        skips_next: the next `optimizer.step()` belongs to a part that is not the last.
        keeps_sums: the last `optimizer.step()` belonged to such a part, so `zero_grad` drops
            nothing.
        refuses_late: ranks agree on each step in `optimizer.step()`, and refuse samples there too.
        refusal: why this rank refuses its samples, which its next step says on all ranks.
    """

    def __init__(self, usage: SampleUsage | None = None, is_private: bool = True):
        self.usage = SampleUsage() if usage is None else usage
        self.is_private = is_private
        self._enter(Phase.IDLE)
        self.clip_norms: list[float] = []
        self.settings: StepSettings | None = None
        self.on_open: Callable[[], None] = lambda: None
        self.norms: list[BatchNorms] = []
        self.losses: list[Tensor] = []
        self.keeps_losses = False
        self.pending: Any = None
        self.steps = 0
        self.had_finite = False
        self.batch_number: int | None = None
        self.held_back = False
        self.end_parts()
        self.refuses_late = False
        self.refusal: str | None = None

    @property
    def ticket(self) -> Ticket:
        """Returns what the loader says of the batch that it has yielded last."""
        return self.usage.ticket

    @property
    def sensitivity(self) -> float:
        """Returns C of the step: how far one sample can move the sum."""
        return sum([c * c for c in self.clip_norms]) ** 0.5

    @contextmanager
    def refused_together(self) -> Iterator[None]:
        """Surrounds a check of this rank's samples: if it refuses them, all ranks' step raises.

        Raised on one rank alone, the others would wait for it. Where ranks agree before the last
        backward of a step, as on GPUs, it is raised at once: a later refusal would be too late.
        """
        try:
            yield
        except ValueError as error:
            if not self.refuses_late:
                raise
            self.refusal = self.refusal or str(error)

    def signal_part(self, do_skip: bool) -> None:
        """Records whether the next part is not the last one (`do_skip`)."""
        self.skips_next = self.accumulating = do_skip

    def take_signal(self) -> bool:
        """Returns whether this `optimizer.step()` is to be skipped; the signal is used up."""
        self.keeps_sums, self.skips_next = self.skips_next, False
        return self.keeps_sums

    def end_parts(self) -> None:
        """Records that no further part comes."""
        self.accumulating = self.skips_next = self.keeps_sums = False

    def _enter(self, phase: Phase) -> None:
        self.phase, self.is_idle = phase, phase is Phase.IDLE
        self.is_open, self.is_noisy = phase is Phase.OPEN, phase is Phase.NOISY

    def open(self, clip_norms: list[float]) -> None:
        """Opens a step with its first backward: its settings are fixed, or it is dropped."""
        if self.is_open:
            raise RuntimeError("a step is open already: its settings are those of its start")
        self.clip_norms = clip_norms
        self.norms, self.losses = [], []  # after a step that no `zero_grad` has ended
        self._enter(Phase.OPEN)
        try:
            self.on_open()
        except BaseException:
            self.drop()
            raise

    def require_sums(self) -> None:
        """Raises RuntimeError if there is nothing that noise could be added to."""
        if self.is_private and not self.is_open:
            raise RuntimeError(
                "optimizer.step() without a backward since the last one: also an empty batch runs "
                "forward and backward, so that noise is added on every rank"
            )

    def count(self) -> int:
        """Counts the step and returns its number; call it before noise is generated."""
        number, self.steps = self.steps, self.steps + 1
        self.usage.close()
        return number

    def add_noise(self) -> None:
        """Records that noise has been added to `.grad`."""
        self.require_sums()
        self._enter(Phase.NOISY)

    def apply(self) -> None:
        """Records that the optimizer applies `.grad`."""
        if not self.is_noisy:
            raise RuntimeError("sums without noise must not be applied: call optimizer.step()")
        self._enter(Phase.IDLE)

    def drop(self) -> None:
        """Records that `.grad` is emptied. Its samples may be used again if not yet counted."""
        self._enter(Phase.IDLE)
        self.held_back = False
        self.losses = []
        self.norms = []
        self.refusal = None
        self.usage.give_back()

    def resume(self, steps: int) -> None:
        """Continues between two steps, after `steps` of them."""
        self._enter(Phase.IDLE)
        self.had_finite |= bool(steps)
        self.steps, self.batch_number = steps, None
        self.refusal = None
        self.usage.take_back()
        self.end_parts()

    def begin_batch(self, number: int, in_training: bool) -> None:
        """Begins a new batch, which the loader is about to yield."""
        passes_over = in_training and self.usage.is_owed and number > self.usage.due
        if self.is_open or passes_over:
            raise RuntimeError(
                f"batch {number} of the loader begins before optimizer.step() has used "
                "the last one: a step is one batch, an empty one too; to split it use "
                "BatchMemoryManager, and to leave the loader's iteration begin another, after "
                "optimizer.zero_grad()"
            )
        self.batch_number = number


class Thresholds:
    """C of the next step, and the threshold C_k of each of its clipping groups.

    Args:
        max_grad_norm: C, or a list of thresholds, one per group.
        clipping: `"flat"` or `"per_layer"`.
        groups: names of the clipping groups; None: mode `no_dp` has none.

    Raises:
        ValueError: for a threshold that is no finite number above 0, or not one per group.
    """

    def __init__(
        self, max_grad_norm: float | list[float], clipping: str, groups: Sequence[str] | None
    ):
        self._clipping, self._groups = clipping, groups
        self._known: list[float] = []
        self.set(max_grad_norm)

    def set(self, max_grad_norm: float | list[float]) -> None:
        """Sets C from the next step on."""
        self._known = self._checked(max_grad_norm)
        self.max_grad_norm = max_grad_norm

    def clip_norms(self) -> list[float]:
        """Returns C_k of each clipping group."""
        if isinstance(self.max_grad_norm, list):  # whose entries may have changed
            return self._checked(self.max_grad_norm)
        return list(self._known)

    def _checked(self, max_grad_norm: float | list[float]) -> list[float]:
        groups = self._groups
        if groups is None:
            return []
        check_max_grad_norm(max_grad_norm, self._clipping)
        clip_norms = clip_norms_of(max_grad_norm, len(groups), self._clipping)
        if len(clip_norms) != len(groups):
            raise ValueError(
                f"max_grad_norm has {len(clip_norms)} thresholds for {len(groups)} clipping groups "
                f"({', '.join(groups[:4])}{', ...' if len(groups) > 4 else ''}): give one per "
                "group, or one number"
            )
        return clip_norms
