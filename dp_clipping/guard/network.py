"""Checks that a network treats a sample as it would beside other samples, or among more.

What a layer sees of a sample, its gradient there, and the outputs must not depend on the others. A
network that centres its inputs by the batch's mean violates this, and no module's type shows it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from dp_clipping.capture.network import CapturedNetwork
from dp_clipping.capture.samples.batch import Batch
from dp_clipping.layers.batch_layout import FEW, TRIMMED, LayoutUnknown
from dp_clipping.trials.draws import without_dropout
from dp_clipping.trials.perturb import Perturbed, enlarged, halves, one_more, thirds
from dp_clipping.trials.probe import Probe, Subject
from dp_clipping.trials.seen import Seen

PLACES = 3  # different samples of the first batch, each exchanged in turn
PART = 8  # samples of a check in between
CAUSE = (
    "{what} depends on the other samples of the batch, or on how many there are ({example}, for "
    "example), so the sample has no gradient of its own; use statistics of the sample, or fixed "
    "ones"
)
MEAN = "a mean over the batch"
CAUSES = {
    "input": CAUSE.format(what="what {layer} sees of a sample", example=MEAN),
    "output": CAUSE.format(what="what the end of the network sees of a sample", example=MEAN),
    "gradient": CAUSE.format(
        what="the gradient that {layer} is given for a sample",
        example="outputs centred over the batch, or a hook that normalises gradients over it",
    ),
}
OWN = ("operand", "result")  # of a module's own parameters, on the whole batch
OF_OWN = (
    "what {layer} computes with parameters of its own has samples in another order than the batch, "
    "or depends on others of them: keep their order there, or make the network private unsharded"
)


class Company:
    """Checks batches of a captured network beside batches with exchanged samples.

    Args:
        observed: a batch and some of its rows -> the network with these samples, an `Observer`.
        widen: arguments of forwards and names of layers -> whether their callers move under vmap.
    """

    def __init__(
        self, capture: CapturedNetwork, observed: Callable[[Batch, Sequence[int]], Subject],
        widen: Callable[[list[tuple], set[str]], bool],
    ):  # fmt: skip
        self._capture, self._observed, self._widen = capture, observed, widen

    def check_places(self, batch: Batch, distinct: list[int], extremes: bool) -> None:
        """Exchanges each third of the samples in turn, for a sample of another third.

        The first three different samples are in different thirds. With `extremes`, one sample is
        then made `LARGE` times larger, which not every network takes. At last all are among more,
        in front of them and behind: places may be counted from either end. One sample is left out
        where enough remain, so that no run needs more memory than the batch.

        Raises:
            ValueError: naming the first layer that sees a sample differently.
        """
        rows = list(range(batch.size))
        if batch.size < PLACES:
            rows = (distinct * PLACES)[: max(2, len(distinct))]
        elif batch.size > PLACES:
            rows.remove(max(set(rows).difference(distinct[:PLACES])))
            distinct = [row for row in distinct if row in rows]
        size, is_alone = len(rows), self._capture.sharding is None
        changes = list(thirds(rows, distinct, min(size, PLACES) if is_alone else PLACES))
        if extremes and len(distinct) > 1 and batch.has_floats:
            changes.append(enlarged(size, size // 2))
        among_more = [one._replace(may_fail=is_alone) for one in one_more(size)]
        network = self._capture.network
        with without_dropout(network) as dropout:  # one more would draw other numbers
            probe = self._probe(batch, rows)
        with without_dropout(network, in_functions=dropout.was_needed):
            self._check(batch, probe, changes)
        with without_dropout(network):
            self._check(batch, probe, among_more)

    def check_batch(self, batch: Batch, number: int, is_whole: bool) -> None:
        """Exchanges about half of the samples: which ones differs from check to check.

        All samples take part in a whole check, at most `PART` in others.

        Raises:
            ValueError: naming the first layer that sees a sample differently.
        """
        size = batch.size
        if not is_whole:
            size = min(size, max(2, min(PART, size // 4)))
        start = (number * PART) % (batch.size - size + 1)
        exchange = halves(size, 1 + number // 2)[number % 2]
        self._check(batch, self._probe(batch, range(start, start + size)), [exchange])

    def _probe(self, batch: Batch, rows: Sequence[int]) -> Probe:
        return Probe(self._observed(batch, rows), self._on_any_rank)

    def _check(self, batch: Batch, probe: Probe, changes: list[Perturbed]) -> None:
        for perturbed in changes:
            changed = probe.differing(perturbed) or []
            others = [key for key in changed if key[1] not in OWN]
            if changed and self._capture.sharding is None:
                layers = {layer for layer, *_ in changed}
                if not others:
                    self._use_vmap(layers)
                if layers.issubset(self._capture.shared_layers()):
                    self._use_vmap_around(layers, batch)
            changed = others or changed
            self.refuse(_cause(changed[0], probe.base, probe.beside) if changed else None)

    def _use_vmap(self, layers: set[str]) -> None:
        """Moves modules under vmap whose own operators mix the rows of samples, as one that sorts.

        Under vmap such code has one sample.

        Raises:
            LayoutUnknown: where the samples are has to be found again.
        """
        handles = [handle for handle in self._capture.handles if handle.name in layers]
        self._capture.make_whole(handles)
        raise LayoutUnknown(handles[0].name)

    def _use_vmap_around(self, layers: set[str], batch: Batch) -> None:
        """Moves modules under vmap that take one row of what got one for each sample: `table[0]`.

        There all samples would have the gradient of the first one, and no other has one.

        Raises:
            LayoutUnknown: where the samples are has to be found again.
        """
        if self._widen([batch.with_samples(FEW)], layers):
            raise LayoutUnknown(min(layers))

    def _on_any_rank(self, flag: bool) -> bool:
        return any(self.of_all_ranks(flag))

    def refuse(self, found: str | None) -> None:
        """Raises ValueError on all ranks if one of them has found something, with its message."""
        for one in self.of_all_ranks(found):
            if one is not None:
                raise ValueError(one)

    def of_all_ranks(self, mine: Any) -> list:
        """Returns an object of each rank that runs the same forwards."""
        sharding = self._capture.sharding
        if sharding is None:
            return [mine]
        found = [mine] * dist.get_world_size(sharding.everyone)
        dist.all_gather_object(found, mine, group=sharding.everyone)
        return found


def _cause(key: tuple[str, str, int], base: Seen, beside: Seen) -> str:
    layer, what, _ = key
    if base.summaries[key].shape != beside.summaries[key].shape:
        return f"{what} of {layer or 'the network'} {TRIMMED}"
    return CAUSES.get(what, OF_OWN).format(layer=layer or "the network")
