"""Finds where the samples are before a step, on one rank or on all ranks of a sharded model.

`layout_search` finds them with three forwards, and `guard.network` checks that no sample depends on
another. This file decides when to run them, and on whose samples. All ranks of a sharded model run
the same forwards, whatever their own batches, because they gather parameters together.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dp_clipping.capture.callers import Uses
from dp_clipping.capture.checks.expansion import refuse_other_results
from dp_clipping.capture.compile_forecast import CompiledShapes, Forecaster
from dp_clipping.capture.layout_search import Search
from dp_clipping.capture.network import CapturedNetwork, gradients_of, plain_run
from dp_clipping.capture.samples.bags import KnownBags
from dp_clipping.capture.samples.batch import (
    Batch,
    Constants,
    hold_objects,
    map_tensors,
    refuse_iterators,
    tensors_of,
)
from dp_clipping.capture.samples.padded import padded_samples
from dp_clipping.capture.samples.refusals import meaning_of
from dp_clipping.capture.samples.trees import opened
from dp_clipping.capture.vmap_trial import unfit_modules
from dp_clipping.guard.carried import Carried, Restored
from dp_clipping.guard.lengths import DependsOnLength, Lengths
from dp_clipping.guard.network import PLACES, Company
from dp_clipping.guard.observer import Observer
from dp_clipping.layers.batch_layout import (
    FEW,
    CalledDifferently,
    Layout,
    LayoutUnknown,
    NeedsVmap,
    SomeSamples,
)
from dp_clipping.layers.handle import LayerState
from dp_clipping.sampling.alone import Alone
from dp_clipping.torch_compat import tensors_in
from dp_clipping.trials.objects import State
from dp_clipping.trials.randomness import same_randomness
from dp_clipping.trials.schedule import Schedule

TOLD_AT = 8  # checks of batches without different samples
ALIKE = (
    f"{TOLD_AT} batches had fewer than three samples that differ, so the places of samples are "
    "checked in every step, which takes several times as long as a step: give data that differ, "
    "as torch.randn makes"
)


class LayoutDiscovery:
    """Finds where the samples are in a captured network, before a forward that needs it.

    `ForwardBackward` calls `ensure` before each training forward. A batch of one sample shows
    little, because any dimension of size one may then count samples; its result is provisional
    until a larger batch comes. The search and the checks follow one schedule, on one rank or on all
    together, since a check may require another search. `level` is that of the schedule.
    """

    def __init__(
        self, capture: CapturedNetwork, batch_first: bool, joins_all: bool = False,
        level: str = "first",
    ):  # fmt: skip
        network, sharding = capture.network, capture.sharding
        self._capture, self._batch_first, self._sharding = capture, batch_first, sharding
        self._bags, self.constants = KnownBags(network, opened), Constants()
        if capture.state is None:
            capture.state = State(network, sharding is not None)
        self.carried = Carried(capture.state, self._forward_and_backward, self.batch_of_run)
        self._search = Search(capture, joins_all)
        observed = partial(Observer, capture, self._search.layouts_of)
        self._company = Company(capture, observed, self._widen)
        self._level, self._schedule = level, Schedule(level)
        self._forecaster = Forecaster(capture, self._search.observe)
        self._looked_at = 0  # samples of the batch of the search; of one, it is provisional
        self._is_settled = False  # a batch with `PLACES` different samples has been checked
        self._unsettled = 0  # checks of large enough batches without

    def batch_of(self, args: tuple, kwargs: dict, expected: int | None = None) -> Batch:
        """Returns the arguments of the user's forward as a batch, of what the loader has yielded.

        A network with `nn.EmbeddingBag` is run once, as it is, to see which of them are bags.

        Raises:
            ValueError: the arguments do not determine a layer's bags.
        """
        if hold_objects(args, kwargs):
            refuse_iterators("", args, kwargs)
        self.constants.now = {}
        known = self._bags.of(args, kwargs) if self._bags.modules else ()
        batch = Batch(args, kwargs, self._batch_first, known or (), self.constants, expected)
        if self._sharding is None and known is None:
            args, kwargs = (args, kwargs) if batch.size else batch.with_a_row_of_zeros()
            with Restored(self.carried.state):
                self._bags.learn(args, kwargs, self._run, is_empty=not batch.size)
            batch = self.batch_of_run(batch.args, batch.kwargs, expected)
        self.constants.now = batch.others
        return batch

    def batch_of_run(self, args: tuple, kwargs: dict, expected: int | None = None) -> Batch:
        """Returns arguments like those of the user's last forward, of other samples, as a batch."""
        bags = (self._bags.of(args, kwargs) if self._bags.modules else None) or ()
        return Batch(args, kwargs, self._batch_first, bags, self.constants, expected)

    def ensure(self, batch: Batch) -> int | None:
        """Finds the samples unless they are known. All ranks of a sharded model call it together.

        Returns:
            The number of the check, if this batch has been looked at for samples that see each
            other: its losses are to be looked at too.

        Raises:
            ValueError: naming the layer whose samples cannot be found, or that sees one differently
                beside other samples.
        """
        try:
            return self._ensure(batch)
        except (RuntimeError, ValueError) as error:
            meaning = meaning_of(error, bool(batch.bags), self._search.packs)
            if meaning is None:
                raise
            raise ValueError(meaning.format(error=str(error).partition("\n")[0])) from error

    def _ensure(self, batch: Batch) -> int | None:
        alone = self._sharding is None
        is_due = self._schedule.next_is_due(batch.size if alone else 0)
        is_due = is_due or (self._level == "off" and not self._is_settled)
        if not alone:
            self._ensure_together(batch)
        elif self._looked_at < min(FEW, max(1, batch.size)):
            self.look(batch)
        if is_due or (alone and not self._is_settled and batch.size >= PLACES):
            return self.check(batch)
        return None

    def is_due(self, size: int) -> bool:
        """Returns whether `ensure` will check the next batch if it has `size` samples."""
        is_open = not self._is_settled and (size >= PLACES or self._level == "off")
        return is_open or self._schedule.is_due(size) or self._looked_at < FEW

    def look(self, batch: Batch) -> None:
        """Finds where the samples are, on this rank."""
        for first in range(PLACES):
            try:
                self._look(self._arguments(batch, first), batch.size)
                return
            except CalledDifferently:  # the first sample is in all runs, and may make them alike
                if first == PLACES - 1:
                    raise

    def forget(self) -> None:
        """Discards all findings: the next batch is examined again."""
        self._looked_at, self._is_settled, self._schedule = 0, False, Schedule(self._level)
        self._capture.restart()
        for one in (self._search, self._forecaster, self._bags, self.constants):
            one.forget()

    def skip_checks(self, batches: int) -> None:
        """Counts this number of batches as checked."""
        self._schedule.skip(batches)

    def lengths(self, whole: Any, alone: Alone, rows: int, batch: Batch) -> list[Lengths]:
        """Returns what compares padded samples with themselves alone, one object for each.

        Args:
            whole: the loader's batch.
            alone: samples of it that were collated alone.
            rows: of the batch; padding may follow the samples.
            batch: its samples, as arguments of the network.

        Raises:
            ValueError: a sample is not whole in the batch.
        """
        if self._sharding is not None or batch.bags or batch.size != alone.size:
            return []
        try:
            return [
                Lengths(padded, batch, self._capture, self._plain, self._search.layouts_of)
                for padded in padded_samples(whole, alone, rows)
            ]
        except DependsOnLength:
            raise
        except Exception:  # of tensors that cannot be compared, say
            return []

    @contextmanager
    def _plain(self, args: tuple, kwargs: dict) -> Iterator[Any]:
        """Runs the plain network without dropout, and yields its outputs; nothing is left of it."""
        with (
            Restored(self.carried.state),
            plain_run(self._capture, args, kwargs, has_graph=True) as outputs,
        ):
            yield outputs

    def _run(self, *args: Any, **kwargs: Any) -> None:
        with plain_run(self._capture, args, kwargs):
            pass

    def forecast(self, batch: Batch) -> CompiledShapes:
        """Returns the expected inputs of linear layers, which compiled code needs beforehand."""
        one = batch.first(1)
        return self._forecaster.of((one.args, one.kwargs), batch.with_samples)

    def layouts_of(self, outputs: Any) -> list[Layout | None]:
        """Returns the layouts of the tensors that were returned; None: without samples."""
        return self._search.layouts_of(tensors_of(outputs))

    def _arguments(self, batch: Batch, first: int = 0) -> list[tuple]:
        """Returns the arguments of three forwards: see `Search.establish`.

        And of one that repeats a sample of the first in the place of the one that joins.
        """
        rows = batch.distinct(PLACES)
        rows = rows + [i % batch.size for i in range(PLACES) if i % batch.size not in rows]
        rows = (rows * PLACES)[first : first + PLACES]
        again = [*rows[:FEW], rows[0]]
        return [batch.with_rows(r) for r in (rows[:FEW], rows, [rows[0], rows[-1]], again)]

    def _look(self, arguments: list[tuple], size: int) -> None:
        """Examines a batch of `size` samples, with the arguments of forwards made from it."""
        if 0 < self._looked_at < FEW or size < FEW:
            self._search.forget()
            self._forecaster.forget()
        try:
            with Restored(self.carried.state, lambda: self.carried.refuse(arguments[0])):
                self._establish(arguments)
        finally:
            self._search.parted.clear()
        self._looked_at = max(1, size)
        # Fewer calls than before may be parts of a larger batch.
        self._schedule.every_larger = any([one.flattened > 1 for one in self._capture.handles])

    def _establish(self, arguments: list[tuple]) -> None:
        """Finds the layouts, and how modules run that compute with parameters of their own.

        Modules that cannot run on the whole batch run under vmap, with their children.
        """
        capture, refusal = self._capture, None
        differentiated: set[LayerState] = set()
        if self._sharding is None:
            capture.let_read(Uses(capture, arguments[0]).weights_read_elsewhere())
        while True:
            try:
                unfit = self._unfit(arguments)
            except NeedsVmap as error:
                refusal = refusal or error
                if not self._widen(arguments, error.layers):
                    raise refusal from error
            except LayoutUnknown:  # of other tensors, as a module `varies` from now on
                pass
            except CalledDifferently:
                raise
            except ValueError as error:
                raise refusal or error from error
            else:
                if found := self._search.differentiated - differentiated:
                    capture.make_whole(found)
                    differentiated |= found
                elif not unfit:
                    return
                else:
                    capture.make_whole(unfit)
            self._search.forget()

    def _widen(self, arguments: list[tuple], layers: set[str]) -> bool:
        """Moves what calls these layers under vmap; returns False if it is there already."""
        uses = [Uses(self._capture, one) for one in arguments]
        callers = [m for one in uses for m in one.callers_of(layers)]
        return self._capture.widen(dict.fromkeys(callers), layers)

    def _unfit(self, arguments: list[tuple]) -> list[LayerState]:
        """Finds the layouts; returns the modules that must take their children under vmap.

        What has been packed is padded to the longest sequence, and one that joins may be longer.
        Then two dimensions grow, and no sample joins but one that is there.
        """
        capture = self._capture
        few, more, other, again = arguments
        if capture.is_compiled and capture.apart:
            return capture.apart
        try:
            refuse_expansion = partial(refuse_other_results, capture, few)
            self._search.establish(few, more, other, refuse_expansion)
            return unfit_modules(capture, few, more)
        except CalledDifferently:
            raise
        except ValueError as error:
            if self._search.packs and more is not again:
                self._search.forget()
                return self._unfit([few, again, few, again])
            if capture.inner:
                return capture.inner
            gathers = self._sharding is not None and self._sharding.gathered
            if isinstance(error, NeedsVmap) or not capture.apart or gathers:
                raise
            return capture.apart

    def check(self, batch: Batch, error: LayoutUnknown | SomeSamples | None = None) -> int | None:
        """Checks a batch; where a module has to run otherwise for it, searches and checks again.

        A search is of the samples that a module runs otherwise for; see also `LayerState.unseen`.

        Args:
            error: what the network has raised on the batch, if it has run.
        """
        # Of each layer: it is called more often, on parts, and twice as of `LayerState.unseen`.
        for _ in range(1 + 4 * len(self._capture.handles)):
            if error is not None:
                if self._sharding is not None:
                    raise error.on_ranks() from error
                if isinstance(error, SomeSamples):  # in the search its caller splits them
                    self._search.parted.add(error.layer)
                given, self._is_settled = error.arguments, False
                self.look(batch if given is None else self.batch_of_run(*given))
                error = None
            try:
                return self._check(batch)
            except (LayoutUnknown, SomeSamples) as raised:
                error = raised
        assert error is not None
        raise error.lasting() from error

    def _check(self, batch: Batch) -> int | None:
        """Returns the number of the check; None: a sample alone has no company."""
        if self._sharding is None and batch.size < FEW:
            return None
        places, alone = not self._is_settled, self._sharding is None
        # Not on sharded ranks, of which one may have no samples.
        carries = (lambda: self.carried.refuse(batch.with_samples(FEW))) if alone else None
        self._company.refuse(None if batch.bags else self.constants.changed(batch))
        with Restored(self.carried.state, carries, is_of_runs=alone):
            number, is_whole = self._schedule.next_check(batch.size)
            self._schedule.is_open = alone  # until it has passed: ranks may fail one by one
            if places:
                self._check_places(batch)
            else:
                self._company.check_batch(batch, number, is_whole)
            self._schedule.passed(batch.size)
        return number if batch.size >= FEW else None

    def _check_places(self, batch: Batch) -> None:
        distinct = batch.distinct(PLACES)
        extremes = self._sharding is None and not self._search.checks_values
        failure: ValueError | None = None
        for _ in self._search.guesses():
            try:
                self._company.check_places(batch, distinct, extremes)
                break
            except ValueError as error:
                failure = failure or error
        else:
            raise failure
        most = max(self._company.of_all_ranks(len(distinct)))
        self._is_settled = most == PLACES or self._level == "off"
        if not self._is_settled and batch.size >= PLACES:
            self._unsettled += 1
            if self._unsettled == TOLD_AT:
                warnings.warn(ALIKE, stacklevel=2)

    def _forward_and_backward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns outputs of a plain step and, unless ranks compute them together, gradients."""
        with plain_run(self._capture, args, kwargs, keeps_state=True) as outputs:
            # Squares, so that gradients depend on the samples.
            ends = [y.float().square().sum() for y in tensors_in(outputs)]
            return outputs, gradients_of(ends, self._capture.parameters)

    def _ensure_together(self, batch: Batch) -> None:
        """Finds the samples on all ranks, with a batch of the rank that has the most.

        Once all have done so with a batch of some samples no rank asks the others again.
        """
        if self._looked_at >= FEW:
            return
        everyone = self._sharding.everyone
        sizes = self._company.of_all_ranks(batch.size)
        largest = max(sizes)
        if self._looked_at and largest < FEW:
            return
        source = sizes.index(largest)
        given = [None]
        if dist.get_rank(everyone) == source:
            given = [map_tensors(Tensor.cpu, self._arguments(batch))]
        dist.broadcast_object_list(given, group=everyone, group_src=source)
        device = self._capture.trigger.device
        with same_randomness(device=device):
            torch.manual_seed(0)  # random numbers of the network must not make ranks differ
            self._look(map_tensors(lambda x: x.to(device), given[0]), largest)
