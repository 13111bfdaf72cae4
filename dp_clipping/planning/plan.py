"""The plan: for each linear layer how its norms are taken and what is kept for its clipped sum.

| algorithm | norms | kept | clipped sum | operations | values kept |
| --- | --- | --- | --- | --- | --- |
| `gradient` | of G_i as it is written | G_i | one pass over G | u | B·d·p |
| `width` | token-by-token Gram matrices | both factors | a product | g + u | B·T·(p+d) |
| `input_length` | G_i accumulated over tokens | both factors | a product | u + u | B·T·(p+d) |

with u = 2·B·T·p·d, factors the inputs and output gradients, and g = B·T·(T + block)·(p + d), half
of what full Gram matrices take. What is not kept is formed again in a second backward pass
(`recomputed`), which goes only as deep as it must: layers nearest the input are kept first.

Of one token (T = 1) the norm is ‖y_i‖‖a_i‖ (Goodfellow 2015) and the sum one product over the
samples, under the name of `input_length`, whose factors are kept.

`cost_model.predict` says how long each takes. The plan starts from each layer's fastest algorithm.
While what is kept exceeds the budget, it changes the layer that loses the least time per byte
saved. The budget is one for each point of backward: what a forward has saved before a layer is
still there when backward has come to it, as are the gradients that backward has at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from dp_clipping.clipping.statistics import NOT_COVERED
from dp_clipping.modes import REFERENCE_MODE
from dp_clipping.planning.cost_model import (
    ACCUMULATE,
    ALGORITHMS,
    GRAM,
    INSTANTIATE,
    LONGEST_GRAM,
    LayerPlan,
    LinearShape,
    Rates,
    predict,
)
from dp_clipping.table import aligned

NORM_ALGORITHMS = ("auto", ACCUMULATE, GRAM)
MOST_PLANS = 128  # of each kind that are kept; a network's takes about 100 kB


def allowed(use: LinearShape, norm_algorithm: str) -> tuple[str, ...]:
    """Returns the algorithms that may serve a layer.

    Where the rank that takes the norm plans for itself, G is not stored in 16 bit: its rounding may
    make a contribution larger than what the other rank has normed.
    """
    if norm_algorithm != "auto":
        return (norm_algorithm,)
    if use.tokens == 1:
        return (ACCUMULATE,)
    has_gram = use.element_size != 4 and use.tokens <= LONGEST_GRAM
    found = ALGORITHMS if has_gram else (INSTANTIATE, ACCUMULATE)
    if use.is_normed_elsewhere and use.gradient_size < 4:
        return found[1:]
    return found


class Plan:
    """Choices by layer, in the order of the forward.

    Args:
        uses: the uses of the linear layers, in the order of the forward.
        rates: the rates of the device.
        budget: bytes that may be kept from backward to the sums; None: no limit.
        rooms: pairs (n, bytes): at a point of backward so much may be kept of the uses from n on;
            None: `budget` at every point.
        norm_algorithm: `auto`, or the one that every layer takes.
        may_recompute: what does not fit the budget even so takes part in a second backward.
    """

    def __init__(
        self,
        uses: Sequence[LinearShape],
        rates: Rates,
        budget: int | None = None,
        norm_algorithm: str = "auto",
        may_recompute: bool = False,
        rooms: Sequence[tuple[int, int]] | None = None,
    ):
        self.uses, self.budget = list(uses), budget
        options = [
            [predict(use, algorithm, rates) for algorithm in allowed(use, norm_algorithm)]
            for use in self.uses
        ]
        self.choices = [min(own, key=lambda choice: choice.seconds) for own in options]
        if budget is not None:
            for first, room in sorted(rooms or (), reverse=True):  # in backward's order
                self._shrink(options, room, first)
            self._shrink(options, budget)
            if may_recompute:
                self._recompute(options, budget)
        self._number = {use.name: n for n, use in enumerate(self.uses)}

    def __getitem__(self, name: str) -> LayerPlan:
        return self.choices[self._number[name]]

    @property
    def bytes(self) -> int:
        """Returns the bytes kept in all."""
        return sum(choice.bytes for choice in self.choices)

    @cached_property
    def is_one_pass(self) -> bool:
        return not any(choice.recomputed for choice in self.choices)

    def _shrink(self, options: list[list[LayerPlan]], budget: int, first: int = 0) -> None:
        """Takes smaller algorithms, the cheapest changes first, until the budget holds.

        It is that of the uses from `first` on, with which backward begins.
        """
        excess = sum(choice.bytes for choice in self.choices[first:]) - budget
        while excess > 0:
            changes = [
                ((other.seconds - own.seconds) / (own.bytes - other.bytes), n, other)
                for n, own in enumerate(self.choices[first:], first)
                for other in options[n]
                if other.bytes < own.bytes
            ]
            if not changes:
                return
            _, n, other = min(changes, key=lambda change: change[0])
            excess -= self.choices[n].bytes - other.bytes
            self.choices[n] = other

    def _recompute(self, options: list[list[LayerPlan]], budget: int) -> None:
        """Keeps layers from the input on while they fit; those behind run a second backward."""
        used, full = 0, False
        for n, choice in enumerate(self.choices):
            full = full or used + choice.bytes > budget
            if full:
                norm_only = [o for o in options[n] if o.algorithm != INSTANTIATE] or options[n]
                best = min(norm_only, key=lambda option: option.seconds)
                self.choices[n] = replace(best, bytes=0, recomputed=True)
            else:
                used += choice.bytes

    def measured(self, ranges: Mapping[str, float]) -> dict[str, float]:
        """Returns seconds of each layer's norm and sum, from the ranges in a profiler's trace.

        A launch that several layers have in common, `sum/a+b`, is split by their operations. What
        adds up squares of tiles is left out: convolutions share it, which are not in the plan.
        """
        found: dict[str, float] = {}
        for name, seconds in ranges.items():
            if name.startswith("norm/tiles/"):
                continue
            layers = name.split("/", 1 if name.startswith("sum/") else 2)[-1].split("+")
            uses = [self.uses[self._number[one]] for one in layers if one in self._number]
            is_gram = name.startswith(f"norm/{GRAM}/")
            parts = [u.tokens * (u.inputs + u.outputs) if is_gram else u.operations for u in uses]
            for use, part in zip(uses, parts, strict=True):
                found[use.name] = found.get(use.name, 0.0) + seconds * part / sum(parts)
        return found

    def table(self, measured: Mapping[str, float] | None = None) -> str:
        """Returns one line per layer: shapes, algorithm, predicted (and measured) ms, MiB kept."""
        head = ["layer", "B x T x in x out", "algorithm", "predicted ms", "MiB kept"]
        rows = [head + (["measured ms"] if measured else [])]
        for use, choice in zip(self.uses, self.choices, strict=True):
            shape = f"{use.batch_size} x {use.tokens} x {use.inputs} x {use.outputs}"
            algorithm = choice.algorithm + (", recomputed" if choice.recomputed else "")
            row = [use.name, shape, algorithm, f"{choice.seconds * 1e3:.3f}"]
            row.append(f"{choice.bytes / 2**20:.1f}")
            if measured:
                found = measured.get(use.name)
                row.append("" if found is None else f"{found * 1e3:.3f}")
            rows.append(row)
        total = [
            "all", "", "one pass" if self.is_one_pass else "two passes",
            f"{sum(c.seconds for c in self.choices) * 1e3:.3f}", f"{self.bytes / 2**20:.1f}",
        ]  # fmt: skip
        rows.append(total + ([f"{sum(measured.values()) * 1e3:.3f}"] if measured else []))
        return "\n".join(aligned(rows, [False] * len(rows[0])))


class Recent(dict[Any, Any]):
    """Keeps the values that were set or asked for last: batches and sequences vary in length."""

    def get(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            return default
        value = self.pop(key)
        super().__setitem__(key, value)
        return value

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        if len(self) > MOST_PLANS:
            del self[next(iter(self))]


@dataclass
class Plans:
    """Plans of the steps so far, of those that were used last.

    Attributes:
        known: shapes of all linear layers -> their plan.
        of_calls: uses in a forward -> what follows from their plan (`step.sums.layer_plans`).
        measured: samples in batches whose forward was measured.
        saved: shapes that compiled layers were expected to have -> bytes that their forward saves.
        slots: what determines the slots of a compiled forward -> these (`step.slots`).
        last: the plan of the last step on fused kernels.
    """

    known: dict[tuple, Plan] = field(default_factory=Recent)
    of_calls: dict[tuple, Any] = field(default_factory=Recent)
    measured: dict[int, bool] = field(default_factory=Recent)
    saved: dict[tuple, int] = field(default_factory=Recent)
    slots: dict[tuple, Any] = field(default_factory=Recent)
    last: Plan | None = None

    def table(self, mode: str, slow: Mapping[str, str | None]) -> str:
        """Returns the last plan's table, and which modules run one sample after another, and why.

        Raises:
            RuntimeError: there is neither.
        """
        parts = [] if self.last is None else [self.last.table(), ""]
        parts += [f"{name}: one sample after another: {why}" for name, why in slow.items() if why]
        if not parts:
            raise RuntimeError(
                f"mode {mode} has no plan: choose grad_sample_mode={' or '.join(REFERENCE_MODE)} "
                "and parameters that have fused kernels (on a GPU, in 16 or 32 bit), and call "
                "plan_table() after loss.backward()"
            )
        return "\n".join([*parts, NOT_COVERED])

    def forget(self) -> None:
        """Drops what is known about networks with other shapes."""
        for known in (self.known, self.of_calls, self.measured, self.saved, self.slots):
            known.clear()
