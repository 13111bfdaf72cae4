"""The arguments of a forward, and what their rows are.

Where the samples are is found by calls on other rows than the user's. What an error of such a call
says of the user's own network is told here too.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from opcode import opmap
from typing import Any

import torch
from torch import Tensor

from dp_clipping.capture.network import plain_run
from dp_clipping.capture.samples.batch import Batch, are_samples, tensors_of
from dp_clipping.guard.carried import Restored
from dp_clipping.layers.vmap.refusals import escape_of
from dp_clipping.step.context import StepContext
from dp_clipping.step.state import StepState
from dp_clipping.torch_compat import flush_ready_nodes, is_passed_on

OF_ANY_SIZE = (
    "let it take any number of samples, as x.view(len(x), -1) does and x.view(64, -1) does not; a "
    "tensor without a row for each sample, as a mask [T, T], is made in forward, or is a buffer"
)
JOINED = (
    "row i of each tensor must be of sample i, and a number in it must not be that of another row, "
    "as in graphs that are joined into one; pad them to one number of nodes, as x [batch, nodes, "
    "features] and adjacency [batch, nodes, nodes], adjacency @ x"
)
LISTED = (
    "the model is given a list with an entry for each of {samples} samples, and its samples are "
    "rows of tensors: give it a tensor [batch, ...], as torch.stack(images) of one size, and lists "
    "of targets to the criterion alone, as criterion(model(torch.stack(images)), targets)"
)
OF_ZEROS = (
    "the batch has no sample, as a Poisson batch may, and the network cannot run on the row of "
    "zeros that takes its place ({error}): let forward take one, of which nothing is used, or give "
    "make_private rand_on_empty=True, whose row is of random zeros and ones; with units of several "
    "rows, BatchMemoryManager pad_batches=True, whose rows are copies of a sample"
)

WITHOUT_GRAPH = (
    "the network differentiates in its forward ({error}), and where ranks share its parameters it "
    'is run without a graph to find its samples: train replicas, ddp.wrap("ddp_bucketed", network)'
)


@dataclass(frozen=True, eq=False)
class Inputs:
    """Holds what is known of a forward in training before the network runs.

    Attributes:
        args, kwargs: what the network gets. A row of zeros stands in for an empty batch.
        given: the batch as the user gives it.
        batch: the batch that the network gets.
        seen: the samples among its rows, which checks look at.
        real: how many of its rows are examples or fill, the first ones.
        examples_per_unit: k; so many rows, side by side, are one sample of the step.
        padding: [rows] bool, True for rows that are padding; None: none is.
        fill: [rows] bool, True for rows that fill up a sample, or are padding; None: no sample has
            fewer than k examples.
        is_due: the samples are to be looked for, or compared with others.
        is_looked_at: the batch is checked, so the host may wait for the device.
        is_through: its inputs have gradients: another network may be trained through this one.
        is_compiled: a part of the network is compiled.
    """

    args: tuple
    kwargs: dict
    given: Batch
    batch: Batch
    seen: Batch
    real: int
    examples_per_unit: int
    padding: Tensor | None
    fill: Tensor | None
    is_due: bool
    is_looked_at: bool
    is_through: bool
    is_compiled: bool


class InputReader:
    """Reads the arguments of each forward in training.

    Args:
        context: what all steps of the model have in common.
        state: the state of the step.
        establishment: finds where the samples are, a `guard.guard.LayoutDiscovery`.
        recover: puts a sharded network back after a call that failed.

    Attributes:
        unlooked: batches to come whose padding is not looked at.
    """

    def __init__(
        self, context: StepContext, state: StepState, establishment: Any,
        recover: Callable[[], None],
    ):  # fmt: skip
        self.context, self.state, self.establishment = context, state, establishment
        self.capture = context.capture
        self._recover, self.unlooked = recover, 0
        self._expected: int | None = None

    def of(self, args: tuple, kwargs: dict, has_objects: bool, padding: Tensor | None) -> Inputs:
        """Returns what the arguments of a forward are.

        Args:
            has_objects: they hold objects beside tensors.
            padding: which rows are padding, in a CUDA graph.
        """
        usage = self.state.usage
        ticket, device = usage.ticket, self.capture.trigger.device
        handed = usage.handed  # 0 where `rand_on_empty` has made up a sample
        self._expected = ticket.rows or (usage.batch_size if handed is None else handed or 1)
        find = partial(self.establishment.batch_of, args, kwargs, self._expected)
        given = batch = self.own_errors_first(find, args, kwargs)
        if given.bags and ticket.rows is not None:
            raise ValueError(
                "pad_batches=True adds a row for each sample that a batch lacks, and ids "
                "with offsets have no rows: leave it out, as BatchMemoryManager(data_loader=loader,"
                " max_physical_batch_size=.., optimizer=optimizer), or give nn.EmbeddingBag ids "
                "[batch, tokens] of one length, padded with padding_idx"
            )
        real = ticket.real_of(given.size)
        each = self.context.examples_per_unit if given.size else 1
        if each > 1 and given.size % each:
            raise ValueError(
                f"a batch of {given.size} examples, and each {each} that lie side by side are one "
                "unit of examples_per_unit, examples_per_step or views: give whole units, and "
                "drop_last=True to a loader whose last batch is shorter"
            )
        if each > 1:
            usage.refuse_parts(given.size)
        if not given.size:
            args, kwargs = given.stand_in()
            batch = self.establishment.batch_of_run(args, kwargs)
        seen = batch if real == given.size else batch.first(max(1, real))
        if padding is None and real < given.size:
            padding = torch.arange(batch.size, device=device) >= real
        fill = None if each == 1 else ticket.fill_of(batch.size)
        tensors = tensors_of((args, kwargs)) if has_objects else batch.leaves
        is_due = self.establishment.is_due(seen.size)
        return Inputs(
            args, kwargs, given, batch, seen, real, each, padding,
            fill=None if fill is None else fill.to(device),
            is_due=is_due,
            is_looked_at=is_due or ticket.alone is not None,  # the rule of `looks_at`
            is_through=any([getattr(x, "requires_grad", False) for x in tensors]),
            is_compiled=self.capture.is_compiled,
        )  # fmt: skip

    def looks_at(self, samples: int) -> bool:
        """Returns whether the next batch, of this size, will be checked: its step takes longer."""
        return self.establishment.is_due(samples) or self.state.ticket.alone is not None

    def lengths(self, inputs: Inputs, repacking: Callable[[], AbstractContextManager]) -> list[Any]:
        """Returns what compares padded samples of a forward, if the loader has collated some alone.

        Args:
            repacking: enters the context in which forwards of its samples can run.
        """
        self.unlooked -= self.unlooked > 0
        found = self.state.usage.take_alone()
        if found is None or self.unlooked:
            return []
        lengths: list[Any] = []  # of `guard.lengths.Lengths`
        with self.state.refused_together():
            lengths = self.establishment.lengths(*found, inputs.given.size, inputs.seen)
        device = self.capture.trigger.device.type
        cast = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)

        @contextmanager
        def as_now() -> Iterator[None]:
            with torch.autocast(device, cast[0], enabled=cast[1]), repacking():
                yield

        for one in lengths:
            one.around = as_now
        return lengths

    def own_errors_first(
        self, run: Callable[[], Any], args: tuple, kwargs: dict, size: int = -1
    ) -> Any:
        """Returns what a run with other samples than a call has returns.

        If it fails, and the user's own call with all of its samples does, too, that error is
        raised, otherwise one that says what it means. Ranks of a sharded network cannot repeat a
        call alone.

        Args:
            run: the run; nothing of a step is left in the network afterwards.
            args, kwargs: of the user's call.
            size: of the call's batch; -1: it is not known yet.
        """
        try:
            return run()
        except BaseException as error:
            self._recover()
            if not isinstance(error, Exception):
                raise
            is_lost = "CUDA error" in str(error)  # after which nothing more can be computed
            is_sharded = self.capture.sharding is not None
            if is_sharded and "of tensors does not require grad" in str(error):
                raise RuntimeError(WITHOUT_GRAPH.format(error=shown(error))) from error
            if is_sharded or (is_passed_on(error) and not is_lost):
                raise
            if size and not is_lost:
                self._as_it_is(args, kwargs, has_backward=not _is_refusal(error))
            if any(are_samples(x, self._expected) for x in (*args, *kwargs.values())):
                raise ValueError(LISTED.format(samples=self._expected)) from error
            if _is_refusal(error) or "use_reentrant=True" in str(error):
                raise
            if (meaning := escape_of(error)) is not None:
                raise meaning from error
            if not size:
                raise ValueError(OF_ZEROS.format(error=shown(error))) from error
            is_index = is_lost or isinstance(error, IndexError)
            cure = JOINED if is_index else OF_ANY_SIZE
            raise ValueError(
                "the network runs on its batch, and not on some of the rows in it, as it does "
                f"to find where the samples are ({shown(error)}): {cure}"
            ) from error

    def _as_it_is(self, args: tuple, kwargs: dict, has_backward: bool) -> None:
        """Calls the network as the user does, without a step, and puts back what that changes.

        Args:
            has_backward: a backward follows, which no gradient is kept of.
        """
        try:
            with (
                Restored(self.establishment.carried.state),
                plain_run(self.capture, args, kwargs, has_graph=True, has_dropout=True) as outputs,
            ):
                ends = [y for y in tensors_of(outputs) if y.requires_grad]
                if has_backward and ends:
                    ones = list(map(torch.ones_like, ends))
                    torch.autograd.grad(ends, self.capture.parameters, ones, allow_unused=True)
        except Exception as error:
            flush_ready_nodes()
            raise error from None


def _is_refusal(error: Exception) -> bool:
    """Returns whether a `raise` of this package raised the error, and not what it calls."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or not isinstance(error, ValueError | RuntimeError):
        return False
    frame = trace.tb_frame
    is_raised = frame.f_code.co_code[trace.tb_lasti] == opmap["RAISE_VARARGS"]
    return is_raised and frame.f_globals.get("__name__", "").startswith("dp_clipping.")


def shown(error: Exception) -> str:
    """Returns the kind of an error and the first line of its text."""
    said = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {said}"
