"""Finds samples that depend on each other, by exchanging some of the others.

Clipping bounds a sample's influence only if the other samples' gradients do not depend on it. A
network that centres its inputs by the batch's mean violates this, and no module's type shows it. So
a batch is run twice with the same random numbers, the second time with other samples in some
places. For the samples that stay, the inputs of each layer, the outputs and the gradients must not
change. Shapes, places and noise are the same in both runs, so nothing else can change them.

`losses` checks the criterion.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from dp_clipping.capture.checks.summaries import Seen, compared, differ
from dp_clipping.capture.network import CapturedNetwork
from dp_clipping.capture.samples.batch import Batch
from dp_clipping.layers.batch_layout import TRIMMED, Layout
from dp_clipping.trials.draws import ConstantDraws, without_dropout
from dp_clipping.trials.perturb import half, one_more, thirds
from dp_clipping.trials.randomness import same_randomness
from dp_clipping.trials.tolerances import TIMES

RANDOM = 100  # tolerances: what changes more in a repeated run is no rounding
PLACES = 3  # different samples of the first batch, each exchanged in turn
PART = 8  # samples of a check in between
LARGE = 1024.0
REPEATS = 5  # of a run with errors
CAUSES = {
    "input": "what {layer} sees of a sample depends on the other samples of the batch, or on "
    "how many there are (a mean over the batch, for example), so the sample has no gradient of its "
    "own; use statistics of the sample, or fixed ones",
    "output": "what the end of the network sees of a sample depends on the other samples of the "
    "batch, or on how many there are (a mean over the batch, for example), so the sample has no "
    "gradient of its own; use statistics of the sample, or fixed ones",
    "gradient": "the gradient that {layer} is given for a sample depends on the other samples of "
    "the batch, or on how many there are (outputs centred over the batch, or a hook that "
    "normalises gradients over it, for example), so the sample has no gradient of its own; use "
    "statistics of the sample, or fixed ones",
}

OWN = ("operand", "result")  # of a module's own parameters, without vmap

Layouts = Sequence[Layout | None]
Key = tuple[str, str, int]


class Company:
    """Runs batches of a captured network beside batches with exchanged samples.

    Args:
        observe: runs the network forward and backward and returns a `Seen` (`Observer.run`).
        layouts_of: output tensors of the network -> where the samples are in each.
    """

    def __init__(
        self,
        capture: CapturedNetwork,
        observe: Callable[..., Seen],
        layouts_of: Callable[[list[Tensor]], Layouts],
    ):
        self._capture, self._observe = capture, observe
        self._layouts_of = layouts_of

    def check_places(self, batch: Batch, distinct: list[int], extremes: bool) -> None:
        """Exchanges each third of the samples in turn, for a sample of another third.

        The first three different samples are in different thirds. With `extremes`, one sample is
        then made `LARGE` times larger, which not every network takes.

        Raises:
            ValueError: naming the first layer that sees a sample differently.
        """
        rows = list(range(batch.size))
        if batch.size < PLACES:
            rows = (distinct * PLACES)[: max(2, len(distinct))]
        size = len(rows)
        base = self._run(batch, rows, drawn=size + 1)
        is_alone = self._capture.sharding is None
        for perturbed in thirds(rows, distinct, min(size, PLACES) if is_alone else PLACES):
            self._exchange(batch, rows, perturbed.stays, base, batch, perturbed.of(rows))
        if extremes and len(distinct) > 1 and batch.has_floats:
            place = size // 2
            with suppress(ArithmeticError, LookupError, AssertionError, RuntimeError):
                larger = batch.with_factor(rows[place], LARGE)
                stays = [i != place for i in range(size)]
                self._exchange(batch, rows, stays, base, larger, rows)
        self._check_size(batch, rows, base)

    def _exchange(
        self, batch: Batch, rows: list[int], stays: list[bool], base: Seen, other: Batch,
        company: list[int],
    ) -> None:  # fmt: skip
        """Compares with a run of another batch, in which some places have another sample."""
        drawn = len(rows) + 1
        beside = partial(self._run, other, company, stays, drawn=drawn)
        self._compare(batch, rows, stays, base, beside, drawn)

    def _check_size(self, batch: Batch, rows: list[int], base: Seen) -> None:
        """Compares with a run of one sample more, in front: all have other places among more.

        Random numbers of another shape are others. Dropout is off, therefore, and a network that
        draws numbers then is not compared. `base` is of a run with dropout, which serves where
        nothing was drawn.
        """
        size = len(rows)
        has_drawn = self._on_any_rank(base.is_random)
        try:
            with without_dropout(self._capture.network):
                if has_drawn:
                    base = self._run(batch, rows, drawn=size + 1)
                stays = [False] + [True] * size
                more = self._run(batch, [rows[i] for i in one_more(size)], stays, drawn=size + 1)
        except Exception:
            if self._capture.sharding is not None:
                raise
            return  # it cannot run with so many: nothing can be told
        if base.is_random or more.is_random:
            more.summaries = {}
        more.summaries = {key: found.without_first() for key, found in more.summaries.items()}
        with without_dropout(self._capture.network):
            self._compare(batch, rows, [True] * size, base, lambda: more, drawn=size + 1)

    def check_batch(self, batch: Batch, number: int, whole: bool) -> None:
        """Exchanges about half of the samples: which ones differs from check to check.

        All samples take part in a whole check, at most `PART` in others.

        Raises:
            ValueError: naming the first layer that sees a sample differently.
        """
        size = batch.size
        if not whole:
            size = min(size, max(2, min(PART, size // 4)))
        start = (number * PART) % (batch.size - size + 1)
        rows = list(range(start, start + size))
        perturbed = half(size, number)
        beside = partial(self._run, batch, perturbed.of(rows), perturbed.stays)
        self._compare(batch, rows, perturbed.stays, self._run(batch, rows), beside)

    def _run(
        self,
        batch: Batch,
        rows: list[int],
        stays: list[bool] | None = None,
        seed: int | None = None,
        drawn: int = 0,
    ) -> Seen:
        scale = torch.ones(len(rows))
        if stays is not None:
            others = torch.tensor([4.0, -2.0, 0.25, -1.0]).repeat(len(rows) // 4 + 1)[: len(rows)]
            scale = torch.where(torch.tensor(stays), scale, others)
        scale = scale.to(self._capture.trigger.device)
        return self._observe(batch.with_rows(rows), len(rows), self._layouts_of, scale, seed, drawn)

    def _compare(
        self,
        batch: Batch,
        rows: list[int],
        stays: list[bool],
        base: Seen,
        run_beside: Callable[[], Seen],
        drawn: int = 0,
    ) -> None:
        """Compares a run of these rows with one in which the other samples were exchanged.

        Where the two differ, the first run is repeated with errors of the size of rounding. What
        changes as much by them, or by numbers that the network draws of its own, tells nothing.
        """
        stays = torch.tensor(stays, device=self._capture.trigger.device)
        beside = run_beside()
        changed = _changed(base, beside, stays)
        draws: AbstractContextManager = nullcontext()
        if self._on_any_rank(bool(changed) and base.is_random):
            with self._constant_draws() as of_base:
                again = self._run(batch, rows, drawn=drawn)
            with self._constant_draws() as of_beside:
                again_beside = run_beside()
            if self._on_any_rank(ConstantDraws.by_values(of_base, of_beside)):
                base, beside, draws = again, again_beside, self._constant_draws()
                changed = _changed(base, beside, stays)
        with draws:
            changed = self._beyond_rounding(batch, rows, stays, base, beside, changed, drawn)
        self._use_vmap({layer for layer, what, _ in changed if what in OWN})
        changed = [key for key in changed if key[1] not in OWN]
        self._refuse(_cause(changed[0], base, beside) if changed else None)

    @contextmanager
    def _constant_draws(self) -> Iterator[ConstantDraws]:
        with same_randomness(device=self._capture.trigger.device), ConstantDraws() as draws:
            yield draws

    def _beyond_rounding(
        self,
        batch: Batch,
        rows: list[int],
        stays: Tensor,
        base: Seen,
        beside: Seen,
        changed: list[Key],
        drawn: int,
    ) -> list[Key]:
        """Returns what has changed by more than errors of the size of rounding change it."""
        rooms: dict[Key, Tensor] = {}
        for seed in range(REPEATS):
            if not self._on_any_rank(bool(changed)):
                break
            again = self._run(batch, rows, seed=seed, drawn=drawn)
            for key in changed:
                room = _by_rounding(key, base, again, stays)
                rooms[key] = torch.maximum(room, rooms.get(key, room))
            changed = [key for key in changed if _is_larger(key, base, beside, rooms[key], stays)]
        return changed

    def _use_vmap(self, layers: set[str]) -> None:
        """Lets modules run under vmap in whose code a sample has not a row of its own.

        As in that of one that sorts the samples, and puts them back. Under vmap it has one sample.
        """
        for handle in self._capture.handles:
            if handle.name in layers:
                handle.whole_batch = None

    def _on_any_rank(self, flag: bool) -> bool:
        sharding = self._capture.sharding
        if sharding is None:
            return flag
        flags = [flag] * dist.get_world_size(sharding.everyone)
        dist.all_gather_object(flags, flag, group=sharding.everyone)
        return any(flags)

    def _refuse(self, found: str | None) -> None:
        """Raises ValueError on all ranks if one of them has found something, with its message."""
        sharding = self._capture.sharding
        everything = [found]
        if sharding is not None:
            everything *= dist.get_world_size(sharding.everyone)
            dist.all_gather_object(everything, found, group=sharding.everyone)
        for one in everything:
            if one is not None:
                raise ValueError(one)


def _changed(base: Seen, beside: Seen, stays: Tensor) -> list[Key]:
    """Returns what two runs have seen differently of samples that stay."""
    keys = [key for key in base.summaries if key in beside.summaries]
    flags = differ([(base.summaries[key], beside.summaries[key]) for key in keys], stays)
    return [key for key, flag in zip(keys, flags, strict=True) if flag]


def _cause(key: Key, base: Seen, beside: Seen) -> str:
    layer, what, _ = key
    if base.summaries[key].shape != beside.summaries[key].shape:
        return f"{what} of {layer or 'the network'} {TRIMMED}"
    return CAUSES[what].format(layer=layer or "the network")


def _by_rounding(key: Key, base: Seen, again: Seen, stays: Tensor) -> Tensor:
    """Returns how much samples that stay may change [1, S, 1], from a run repeated with errors."""
    one = base.summaries[key]
    other = again.summaries.get(key)
    if other is None:
        return one.values.new_full((1, int(stays.sum()), 1), torch.inf)
    change, _ = compared([(other, one)], stays)
    _, size = compared([(one, one)], stays)
    change = change.amax(2, keepdim=True)
    return (TIMES * change).where(change <= RANDOM * size, torch.inf)


def _is_larger(key: Key, base: Seen, beside: Seen, by_rounding: Tensor, stays: Tensor) -> bool:
    """Returns whether a sample that stays has changed by more than what may be rounding."""
    change, room = compared([(base.summaries[key], beside.summaries[key])], stays)
    return bool((change > torch.maximum(room, by_rounding)).any())
