"""Finds layers whose output may not get a dimension for the samples.

A layer whose input all samples share gets it expanded to the batch, so that each sample has a
gradient of its own. Most code broadcasts the layer's output, and computes what it did before.
Code that counts dimensions from the front computes something else: `F.normalize(self.table(ids))`.

What differs is repeated in float64: other shapes are other kernels, and gradients of a deep network
in 16 bits differ by more than one product's rounding.
"""

from collections.abc import Callable, Collection
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from dp_clipping.capture.checks.summaries import summary
from dp_clipping.capture.network import Arguments, CapturedNetwork, gradients_of, plain_run
from dp_clipping.capture.samples.batch import map_tensors, tensors_of
from dp_clipping.clipping.accumulation import (
    doubled,
    full_float32,
    network_in_float64,
    product_dtype,
)
from dp_clipping.layers.batch_layout import FEW, Layout, NeedsVmap
from dp_clipping.layers.handle import LayerState, expanded_input, expanded_output
from dp_clipping.layers.tensor_parallel import local
from dp_clipping.torch_compat import is_in_backward
from dp_clipping.trials.seen import Summary, differ
from dp_clipping.trials.tolerances import BESIDE

FAILURES = (RuntimeError, ValueError, IndexError)  # of code that is given a dimension more


def refuse_other_results(
    capture: CapturedNetwork, few: Arguments, failure: Exception | None = None
) -> None:
    """Compares a run in which shared inputs are expanded with one in which they are not.

    Args:
        few: arguments of a forward of `FEW` samples. Where inputs are shared is known.
        failure: of an expanded run of more samples, which runs where none is expanded.

    Raises:
        NeedsVmap: naming the layers with whose expanded outputs the network computes something
            else, or cannot run.
    """
    shared = list(dict.fromkeys(capture.shared_layers()))
    if not shared:
        return
    with full_float32(layers=True):
        plain, why = _Run(capture, few), "computes something else with that"
        try:
            if failure is not None:
                raise failure
            if _Run(capture, few, shared, plain).is_like(plain):
                return
            if _is_rounding(capture, few, shared):
                return
        except FAILURES as error:
            first = str(error).partition("\n")[0] or type(error).__name__
            why = f"cannot run with that ({first})"
        found = [name for name in shared if not _runs_alike(capture, few, name, plain)] or shared
    refusal = NeedsVmap(
        found[0],
        f"{', '.join(found)}: given the same values for every sample (a relative position bias or "
        "an embedded prompt, for example), so its output got a dimension for the samples, and the "
        f"code that uses it {why}: freeze it, as "
        f'network.get_submodule("{found[0]}").requires_grad_(False), before make_private, or give '
        "it an input with a row for each sample, as ids.expand(batch_size, -1); in place of PEFT's "
        "prompt tuning use PrefixTuningConfig",
    )
    refusal.layers.update(found)
    raise refusal


def _is_rounding(capture: CapturedNetwork, few: Arguments, shared: list[str]) -> bool:
    """Returns whether the network computes the same in float64 where these layers are expanded.

    Not on ranks that share its parameters, which FSDP gathers in their own dtype.
    """
    if capture.sharding is not None:
        return False
    try:
        with network_in_float64(capture.network):
            args, kwargs = map_tensors(doubled, few)
            plain = _Run(capture, (args, kwargs))
            return _Run(capture, (args, kwargs), shared, plain).is_like(plain)
    except FAILURES:  # say, a cast to another dtype
        return False


def _runs_alike(capture: CapturedNetwork, few: Arguments, name: str, plain: "_Run") -> bool:
    """Returns whether the network computes the same where this layer alone is expanded."""
    if capture.sharding is not None:  # its layers cannot run under vmap, whichever it is
        return False
    try:
        return _Run(capture, few, [name], plain).is_like(plain)
    except FAILURES:
        return False


class _Run:
    """A plain forward and backward in which shared inputs of some layers are expanded.

    Inputs of layers are compared, since a weight that is zero at first hides them in the outputs.
    So are the gradients, since a module may own a factor that is zero.

    Args:
        expanded: the names of these layers.
        plain: a run in which no input was expanded; None: this is one.
    """

    def __init__(
        self, capture: CapturedNetwork, few: Arguments, expanded: Collection[str] = (),
        plain: "_Run | None" = None,
    ):  # fmt: skip
        self._expanded, self._plain = expanded, plain
        self._seen: list[Summary] = []  # of inputs in the order of the calls, then of outputs
        self._shapes: list[tuple[torch.Size, bool]] = []  # and whether samples may share it
        with plain_run(capture, *few, self._watch) as outputs:
            found = tensors_of(outputs)
            if capture.sharding is not None:  # there is no graph
                found = [local(y) for y in found]
            found = [self._see(y) for y in found]
            self._seen += _gradients(found, capture.parameters)

    def is_like(self, plain: "_Run") -> bool:
        if len(self._seen) != len(plain._seen):
            return False
        pairs = list(zip(self._seen, plain._seen, strict=True))
        if any(found.shape != wanted.shape for found, wanted in pairs):
            return False
        return not any(differ(pairs, torch.ones(FEW, dtype=torch.bool, device="cpu")))

    def _see(self, x: Tensor, is_shared: bool = True) -> Tensor:
        """Adds a tensor; returns it in the shape that it has in a plain run, if it has that.

        Args:
            is_shared: the samples may share it, so that it may get a dimension for them.
        """
        rows, number = x[None], len(self._shapes)
        if self._plain is not None and number < len(self._plain._shapes):
            shape, is_shared = self._plain._shapes[number]
            if is_shared and x.shape != shape and x.shape[:1] == (FEW,):
                if x.shape[1:] == shape:
                    rows = x
                elif (1, *x.shape[1:]) == shape:
                    rows = x[:, None]
        self._shapes.append((rows.shape[1:], is_shared))
        self._seen.append(_summary(rows))
        return rows[0]

    def _watch(
        self, module: nn.Module, run: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        handle: LayerState = vars(module)["_private"]
        inputs = [local(x) for x in handle.tensors((args, kwargs))]
        if not is_in_backward():  # a checkpointed part of it is computed again
            for x, layout in zip_longest(inputs, handle.seen(inputs)):
                self._see(x.detach().to_dense(), layout is None or layout.kind == "shared")
        if handle.name not in self._expanded:
            return run(*args, **kwargs)
        args, kwargs = expanded_input(handle, inputs, args, kwargs, FEW)
        return expanded_output(handle, inputs, run(*args, **kwargs), FEW)


def _summary(rows: Tensor) -> Summary:
    """Returns the summary of a tensor, or of one with rows of `FEW` samples, for each of these.

    What is not finite counts as zero, as in an attention mask.
    """
    rows = rows.detach()
    is_float = rows.is_floating_point()
    found = summary(rows.nan_to_num(0, 0, 0) if is_float else rows, Layout(), len(rows))
    tolerance = BESIDE.of(rows.dtype, product_dtype(rows)) if is_float else found.tolerance
    values = found.values.double().cpu().expand(FEW, -1)
    return Summary(values, tolerance, tuple(rows.shape[1:]))


def _gradients(outputs: list[Tensor], parameters: list[Parameter]) -> list[Summary]:
    """Returns a summary of all gradients, of which one alone may be rounding, or none."""
    found = gradients_of(outputs, parameters)
    each = [_summary(g.to_dense()[None]) for g in found if g is not None]
    if not each:
        return []
    values = torch.stack([one.values for one in each])
    norm = values[..., -1:].square().sum(0).sqrt()
    values = torch.cat([values[..., :-1].sum(0), norm], 1)
    return [Summary(values, max(one.tolerance for one in each))]
