"""Refuses networks and losses for which a sample's gradient depends on the length of its batch.

A collate function pads samples to the longest one of a batch, so the tensors of the batch show how
long that is. Clipping bounds what this one sample does only if the gradients of others do not
depend on it. For one padded sample of a batch, these are compared:

    the gradient by outputs at padded positions    must be zero
    its outputs, and gradients of parameters       from arguments without padding, and from those of
                                                   the batch, beside a sample of the batch's length
    its loss                                       from arguments of the criterion without padding,
                                                   and from those of the batch

What differs is repeated in float64, and with other random numbers if the network draws some.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from dp_clipping.capture.checks.summaries import summary
from dp_clipping.capture.network import CapturedNetwork
from dp_clipping.capture.samples.batch import Batch, map_tensors, tensors_of
from dp_clipping.capture.samples.padded import Padded, Sizes, cut, sizes_of
from dp_clipping.clipping.accumulation import doubled, full_float32, network_in_float64
from dp_clipping.layers.batch_layout import Layout
from dp_clipping.torch_compat import every_module, gradients_in_modes
from dp_clipping.trials.randomness import RandomStates, same_randomness, seed_all
from dp_clipping.trials.tolerances import SHORTER, SHORTER_IN_FLOAT64, TIMES

UNCONFIRMED = 10  # times a tolerance, where the network does not run in float64
SEEDS = 3  # repeated runs with random numbers
CURE = (
    "so its gradient depends on who else is in the batch: let collate_fn (data_collator of a "
    "Trainer) pad all batches to one fixed length, or let network and loss leave padding out (read "
    "the last token of the sample, pack sequences, mask attention and means, begin positions at "
    "the sample's first token)"
)
CHANGED = (
    "the {what} of a sample changes by {change} when it is padded to the length of another one, "
    "from {alone} to {beside}, " + CURE
)
AT_PADDING = (
    "the loss of a sample uses what the network returns for padding, where the sample is padded to "
    "the length of another one, from {alone} to {beside}, " + CURE
)
TRUNCATED = (
    "collate_fn cuts a sample to the length of another one, from {alone} to {beside}, so its "
    "gradient depends on who else is in the batch: cut samples to a fixed length, in the data "
    "set's __getitem__"
)

LossOf = Callable[..., float | None]
"""`losses.Criterion.of_sample`."""


class DependsOnLength(ValueError):
    """A sample's loss or gradient depends on the length of its batch."""


@dataclass
class Observed:
    """One sample in one run.

    Attributes:
        outputs: its part [1, ..] of each output that its loss depends on.
        starts: the gradients of its loss by these.
        gradients: a summary of each parameter's gradient [P, ..].
        is_random: numbers were drawn.
    """

    outputs: list[Tensor]
    starts: list[Tensor]
    gradients: Tensor
    is_random: bool

    def change(self, other: "Observed", at_end: bool) -> float:
        """Returns the relative difference of this one, in the batch, from another one alone.

        Outputs count where the loss depends on them.
        """
        found = [_relative(self.gradients - other.gradients, other.gradients[:, -1])]
        for x, y, start in zip(self.outputs, other.outputs, other.starts, strict=True):
            x = cut(x, sizes_of(x, y), at_end)
            x, y = ((z.double() * (start != 0)).nan_to_num(0, 0, 0) for z in (x, y))
            found.append(_relative(x - y, y))
        return max(found)


class Lengths:
    """Compares a padded sample of a forward with the same sample without its padding.

    Args:
        padded: the sample.
        batch: arguments of the forward; what is needed of them is copied.
        capture: the network.
        run: a context in which it has run, plain and without dropout; yields its outputs.
        layouts_of: its output tensors -> their layouts.

    Attributes:
        outputs: the tensors that the forward has returned.
        around: makes a context for runs of the network.
    """

    def __init__(
        self, padded: Padded, batch: Batch, capture: CapturedNetwork,
        run: Callable[[tuple, dict], AbstractContextManager],
        layouts_of: Callable[[list[Tensor]], Sequence[Layout | None]],
    ):  # fmt: skip
        part = padded.part()
        if part is not None:
            raise DependsOnLength(TRUNCATED.format(alone=part[1], beside=part[0]))
        self._padded, self._capture, self._run = padded, capture, run
        self._layouts_of, self._size = layouts_of, batch.size
        self._parameters = [p for p in capture.network.parameters() if p.requires_grad]
        rows = [padded.row, *padded.company]
        self._rows, self._beside = len(rows), batch.with_rows(rows)
        self._alone = padded.arguments(batch) if padded.is_padded else []
        self._starts: dict[int, Tensor] = {}  # gradients of the loss, by number of the output
        self.outputs: list[Tensor] = []
        self.around: Callable[[], AbstractContextManager] = nullcontext

    def note(self, losses: Tensor) -> None:
        """Notes the gradient of the sample's loss by the outputs, while there is a graph.

        Args:
            losses: of all samples.
        """
        graded = [n for n, y in enumerate(self.outputs) if y.requires_grad]
        outputs, self.outputs = self.outputs, [y.detach() for y in self.outputs]
        if not (self._alone and graded and losses.requires_grad):
            return
        ys, row = [outputs[n] for n in graded], self._padded.row
        found = torch.autograd.grad(losses[row], ys, retain_graph=True, allow_unused=True)
        layouts = self._layouts_of(self.outputs)
        for n, gradient in zip(graded, found, strict=True):
            layout = layouts[n]
            if gradient is not None and layout is not None and layout.kind != "shared":
                rows = layout.batch_first(gradient, self._size)
                self._starts[n] = rows[row : row + 1].clone()

    def check(self, loss_of: LossOf | None = None) -> None:
        """Compares the sample, after the backward: its runs need the memory of the step's graph.

        Args:
            loss_of: calls the criterion for the sample; None: the network has computed the losses.

        Raises:
            DependsOnLength: its loss or gradient depends on its padding.
        """
        if not self._starts:
            return
        try:
            base = self._observe(self._beside, self._rows)
        except Exception:  # it does not run with other numbers of samples: nothing can be told
            return
        refusal, alone = self._compared(base)
        if refusal is None and alone is not None and loss_of is not None:
            refusal = self._difference_of_losses(base, alone, loss_of)
        if refusal is not None:
            raise DependsOnLength(refusal)

    def _compared(self, base: Observed) -> tuple[str | None, Observed | None]:
        """Compares with each of the arguments without padding, until one agrees.

        Returns:
            What to say of the first one if none does, and a run without padding.
        """
        refusal, alone = None, None
        for arguments in self._alone:
            try:
                alone = self._observe(arguments, 2)
                found = self._difference(arguments, base, alone)
            except Exception:  # it does not take such arguments
                continue
            if found is None:
                return None, alone
            refusal = refusal or found
        return refusal, alone

    def _difference(
        self, arguments: tuple[tuple, dict], base: Observed, alone: Observed
    ) -> str | None:
        """Returns what to say of a run without padding that differs; None: it does not."""
        tolerance = self._tolerance(base)
        if _part_outside(base.starts, alone.starts) > tolerance:
            return AT_PADDING.format(**self._lengths())
        change = base.change(alone, self._padded.at_end)
        if not change > tolerance or not self._is_confirmed(arguments, base, change, tolerance):
            return None
        return CHANGED.format(what="gradient", change=f"{100 * change:.3g} %", **self._lengths())

    def _difference_of_losses(self, base: Observed, alone: Observed, loss_of: LossOf) -> str | None:
        """Returns what to say of a loss that changes with the length of the criterion's arguments.

        Outputs of the network and tensors of the batch have the lengths that they have there: the
        classes of a sample may be as many as its tokens. Where two dimensions of an argument have
        the size of a length, nothing can be told.
        """
        pairs = list(zip(base.outputs, alone.outputs, strict=True))
        outputs: dict[torch.Size, Sizes | None] = {}
        for x, y in pairs:
            own = sizes_of(x, y)
            outputs[x.shape] = own if outputs.setdefault(x.shape, own) == own else None
        sizes = self._padded.sizes | dict(p for x, y in pairs for p in sizes_of(x, y).values())
        cuts: list[int] = []

        def shorter(own: Tensor) -> Tensor:
            lengths = {d: (n, sizes[n]) for d, n in enumerate(own.shape) if d and n in sizes}
            cuts.append(len(lengths))
            known = outputs.get(own.shape) if own.requires_grad else self._padded.sizes_in(own)
            return cut(own, lengths if known is None else known, self._padded.at_end)

        before = loss_of(self._padded.row, lambda own: own)
        after = loss_of(self._padded.row, shorter, sizes)
        if before is None or after is None or max(cuts, default=0) != 1:
            return None
        change, size = abs(before - after), max(abs(before), abs(after))
        if change <= self._tolerance(base) * size + 1e-6:
            return None
        return CHANGED.format(what="loss", change=f"{100 * change / size:.3g} %", **self._lengths())

    def _observe(
        self, arguments: tuple[tuple, dict], count: int, seed: int | None = None
    ) -> Observed:
        """Runs `count` samples without dropout, and backward from the loss of the first.

        Random numbers are those that the network would draw next, or begin at `seed`.
        """
        device, modules = self._capture.trigger.device, every_module(self._capture.network)
        with (
            self.around(), full_float32(layers=True), same_randomness(device=device),
        ):  # fmt: skip
            if seed is not None:
                seed_all(seed)
            states = RandomStates(modules, device)
            with self._run(*arguments) as outputs:
                is_random, tensors = states.have_moved, tensors_of(outputs)
                layouts = self._layouts_of(tensors)
                ys = [layouts[n].batch_first(tensors[n], count)[:1] for n in self._starts]
                starts = [
                    cut(start, sizes_of(start, y), self._padded.at_end).to(y)
                    for start, y in zip(self._starts.values(), ys, strict=True)
                ]
                gradients = self._gradients(ys, starts)
                return Observed([y.detach() for y in ys], starts, gradients, is_random)

    def _gradients(self, ys: list[Tensor], starts: list[Tensor]) -> Tensor:
        """Returns a summary of each parameter's gradient, none of which is kept."""
        found: dict[int, Tensor] = {}

        def note(n: int, gradient: Tensor) -> Tensor:
            found[n] = summary(gradient[None], Layout(), 1).values[0].double()
            return gradient.new_zeros(()).expand(gradient.shape)

        hooks = [
            p.register_hook(lambda gradient, n=n: note(n, gradient))
            for n, p in enumerate(self._parameters)
        ]
        try:
            gradients_in_modes(ys, self._parameters, starts)
        finally:
            for hook in hooks:
                hook.remove()
        nothing = torch.zeros_like(next(iter(found.values())))
        every = [found.get(n, nothing).to(nothing.device) for n in range(len(self._parameters))]
        return torch.stack(every).nan_to_num(0, 0, 0)

    def _is_confirmed(
        self, arguments: tuple[tuple, dict], base: Observed, change: float, tolerance: float
    ) -> bool:
        """Returns whether a change is more than rounding, and than what random numbers change."""
        at_end = self._padded.at_end
        if base.is_random:
            again = [self._observe(self._beside, self._rows, seed) for seed in range(SEEDS)]
            if change <= TIMES * max(base.change(one, at_end) for one in again):
                return False
        try:
            with network_in_float64(self._capture.network):
                whole, short = (map_tensors(doubled, x) for x in (self._beside, arguments))
                exact = self._observe(whole, self._rows)
                return exact.change(self._observe(short, 2), at_end) > SHORTER_IN_FLOAT64
        except Exception:  # say, a table or a cast in float32
            return change > UNCONFIRMED * tolerance

    def _lengths(self) -> dict[str, int]:
        n, m = max(self._padded.sizes.items(), key=lambda pair: pair[0] - pair[1])
        return {"beside": n, "alone": m}

    def _tolerance(self, base: Observed) -> float:
        dtypes = {y.dtype for y in base.outputs} | {p.dtype for p in self._parameters}
        return SHORTER.of(*dtypes)


def _part_outside(whole: list[Tensor], within: list[Tensor]) -> float:
    """Returns the part of a gradient by outputs that is at padded positions."""
    squares, rest = 0.0, 0.0
    for x, y in zip(whole, within, strict=True):
        square = float(x.double().square().sum())
        squares, rest = squares + square, rest + max(0.0, square - float(y.double().square().sum()))
    return (rest / squares) ** 0.5 if squares else 0.0


def _relative(change: Tensor, base: Tensor) -> float:
    norm, size = float(change.norm()), float(base.norm())
    return norm / size if size else float(norm > 0)
