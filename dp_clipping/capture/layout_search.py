"""Finds where the samples are in every layer of a captured network, with two batch sizes.

`batch_layout` finds the samples in one tensor; this file runs the network and stores the results.
It also counts how often a parameter is used, since the cross terms of several uses belong to its
norm.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.forward_ad import unpack_dual
from torch.nn.utils.rnn import PackedSequence

from dp_clipping.capture.network import CapturedNetwork, LayerCall, plain_run
from dp_clipping.capture.samples.batch import tensors_of
from dp_clipping.capture.samples.packed import Sequences
from dp_clipping.clipping.accumulation import product_dtype
from dp_clipping.distributed.dtensor import is_sharded, owner_of
from dp_clipping.layers import tensor_parallel
from dp_clipping.layers.batch_layout import (
    AT_ONCE,
    FEW,
    FLATTENED,
    MORE,
    CalledDifferently,
    Layout,
    LayoutUnknown,
    NeedsVmap,
    NoLayout,
    find_layout,
    rows_unknown,
)
from dp_clipping.layers.handle import LayerState, expanded_input, expanded_output
from dp_clipping.layers.recorder import Joint, Trainable
from dp_clipping.layers.tensor_parallel import local
from dp_clipping.layers.vmap.refusals import refuse_transforms
from dp_clipping.torch_compat import every_module, is_in_backward, own_parameters
from dp_clipping.trials.routing import Routing

UNSURE = "unsure"
MOVED = (
    "{name} gets rows that were picked or sorted by their values, so which sample a row "
    "is of differs from batch to batch; give the layer [batch, tokens, features] and mask its "
    "output; for mixtures of experts of transformers call "
    'network.set_experts_implementation("batched_mm") before make_private'
)
PARTED = (
    "{name} gets rows of some samples of the batch and not of all, as for part in x.split(32), and "
    "what calls it cannot run on single samples: " + AT_ONCE
)
NETWORK = "\0"  # no module has this name: the network's outputs


class Search:
    """Finds the layouts of a network's layers, and stores them in the layers' state.

    Args:
        joins_all: the step forms G of each use anyway, so all parameters are joined: they may have
            more uses later than in these batches.
    """

    def __init__(self, capture: CapturedNetwork, joins_all: bool = False):
        self.capture, self._joins_all = capture, joins_all
        self._uses: dict[Trainable, int] = {}
        self.routing = Routing()  # of the forward in which it is looked for
        self.differentiated: set[LayerState] = set()  # by the network's own forward
        self.packs = False  # sequences, for a recurrent layer
        self.parted: set[str] = set()  # layers that are called on parts of larger batches
        self.checks_values = False  # a GPU may stop at numbers that are out of range
        self.output_layouts: dict[tuple[int, ...], list[Layout | None]] = {}
        self.last_outputs: tuple[int, ...] = ()

    def forget(self) -> None:
        """Discards where the samples are and how often parameters are used."""
        self._uses.clear()
        self.differentiated.clear()
        self.output_layouts.clear()
        for handle in self.capture.handles:
            handle.layouts.clear()
            handle.output_layouts.clear()
            if handle.operations:
                handle.operations.clear()
            handle.one_by_one, handle.whole_because, handle.is_unseen = "", "", False
            handle.flattened = handle.sought = 0

    def establish(
        self,
        few: tuple[tuple, dict],
        more: tuple[tuple, dict],
        other: tuple[tuple, dict],
        refuse_expansion: Callable[..., None],
    ) -> None:
        """Finds the layouts of layers and outputs from three batches' arguments: see `layout`.

        `more` has one sample more than `few`, and `other` has it in the place of the last one.

        A layer whose input is shared by all samples gets it expanded to the batch, which changes
        the shapes that later layers see: the search is repeated until no other one is found.

        Args:
            refuse_expansion: called before runs in which inputs are expanded, and with what more
                samples raise in one (code may take them for tokens); raises if the network
                would compute something else.

        Raises:
            ValueError: naming the layer whose input or output has no layout.
        """
        known = None
        while known != (known := self.capture.shared_layers()):
            if known:
                refuse_expansion()
            self.routing = Routing(few, FEW)
            with self.routing:
                runs = [self.observe(*few, FEW)]
            self.checks_values |= self.routing.checks_values
            try:
                runs += [self.observe(*more, MORE), self.observe(*other, FEW)]
            except RuntimeError as error:
                if known:  # without expansion they have run
                    refuse_expansion(error)
                raise
            uses: dict[Trainable, int] = {}
            failures: list[NeedsVmap] = []
            for handle in self.capture.handles:
                try:
                    calls = _paired(handle.name, [run[handle.name] for run in runs])
                    found = sum([self._learn(handle, *call) for call in calls])
                    handle.flattened = max(found, handle.flattened)
                except NeedsVmap as error:
                    failures.append(error)
                    continue
                for parameter in handle.records.values():
                    uses[parameter] = uses.get(parameter, 0) + len(calls)
            if failures:
                failures[0].layers.update(*(error.layers for error in failures))
                raise failures[0]
        self.learn_outputs(*(run[NETWORK][0].outputs for run in runs))
        for parameter, count in uses.items():
            self._uses[parameter] = max(count, self._uses.get(parameter, 0))
        self._join()

    def _join(self) -> None:
        """Joins the parameters of layers that share one, or are used several times."""
        several = {
            r for r, count in self._uses.items() if count > 1 or r.is_reused or self._joins_all
        }
        looked_up: set[Trainable] = set()
        others: set[Trainable] = set()
        joints: list[set[Trainable]] = []
        for handle in self.capture.handles:
            own = set(handle.records.values())
            is_embedding = handle.kind in ("embedding", "embedding_bag")
            if is_embedding:
                looked_up |= own
            elif not handle.is_linear:
                others |= own
            if not own.isdisjoint(several):
                linked = [joint for joint in joints if not joint.isdisjoint(own)]
                joints = [joint for joint in joints if joint.isdisjoint(own)]
                joints.append(own.union(*linked))
        for handle in self.capture.handles:
            handle.sites.clear()
        for record in self.capture.trained:
            record.joint = None
        for records in joints:
            factored = frozenset(r for r in records - others if len(r.shape) == 2)
            joint = Joint(
                tuple(sorted(records, key=attrgetter("number"))), factored - looked_up, factored
            )
            for record in joint.records:
                record.joint = joint

    def learn_outputs(self, few: list[Tensor], more: list[Tensor], other: list[Tensor]) -> None:
        """Returns where the samples are in the network's outputs."""
        layouts: list[Layout | None] = []
        for y in zip(few, more, other, strict=False):
            try:
                layouts.append(find_layout(*y[:2], "an output", y[2], unsure=UNSURE))
            except ValueError:  # of the whole batch: nothing private may come of it
                layouts.append(None)
        self.output_layouts[tuple(y.dim() for y in few)] = layouts
        self.last_outputs = tuple(y.dim() for y in few)

    def layouts_of(self, outputs: list[Tensor]) -> list[Layout | None]:
        """Returns where the samples are in the network's outputs.

        Raises:
            LayoutUnknown: it has not returned such tensors in the search.
        """
        found = self.output_layouts.get(tuple(y.dim() for y in outputs))
        if found is None:
            raise LayoutUnknown("the end of the network")
        return found

    def guesses(self) -> Iterator[None]:
        """Yields once for each order to be tried where values of flattened outputs do not tell.

        The one at which an iteration is left is the one that is known from then on.
        """
        layouts = self.output_layouts[self.last_outputs]
        unsure = [y is not None and y.kind == UNSURE for y in layouts]
        for kind in FLATTENED if any(unsure) else FLATTENED[:1]:
            guess = [
                replace(y, kind=kind) if is_unsure else y
                for y, is_unsure in zip(layouts, unsure, strict=True)
            ]
            self.output_layouts[self.last_outputs] = guess
            yield

    def _learn(self, handle: LayerState, few: LayerCall, more: LayerCall, other: LayerCall) -> int:
        """Learns where the samples are in calls; returns how many inputs have flattened ones."""
        name = handle.name or type(self.capture.network).__name__
        dims = tuple(x.dim() for x in few.inputs)
        runs = (few, more, other)
        if few.has_moved:
            raise NeedsVmap(handle.name, MOVED.format(name=name))
        if handle.name in self.parted and self.capture.sharding is None:
            raise NeedsVmap(handle.name, PARTED.format(name=name))
        sides = [("input", handle.layouts, [run.inputs for run in runs])]
        if handle.learns_outputs:
            sides.append(("output", handle.output_layouts, [run.outputs for run in runs]))
        for side, known, tensors in sides:
            if len({len(of_run) for of_run in tensors}) > 1:
                raise CalledDifferently(name)
            try:
                layouts = tuple(
                    find_layout(a, b, f"{side} {n} of {name}", c)
                    for n, (a, b, c) in enumerate(zip(*tensors, strict=True))
                )
            except NoLayout as error:
                raise NeedsVmap(handle.name, str(error)) from error
            if known.setdefault(dims, layouts) != layouts:
                raise NeedsVmap(
                    handle.name,
                    f"{name} is called with its samples in different places "
                    f"({known[dims]}, {layouts}): use two modules, or one layout",
                )
        if handle.kind == "vectorized" and handle.operations is None:
            given, made = handle.layouts[dims], handle.output_layouts[dims]
            if all(x.kind == "shared" for x in given) and any(x.kind != "shared" for x in made):
                raise rows_unknown(handle.name)
        return sum([layout.kind in FLATTENED for layout in handle.layouts[dims]])

    def _note_backwards(self, handle: LayerState, outputs: list[Tensor], hooks: ExitStack) -> None:
        """Notes a layer from which a backward passes while the network's forward still runs.

        An output may be a parameter, so `hooks` removes what is registered.
        """
        if _can_be_differentiated(handle):
            return
        for y in outputs:
            if y.requires_grad:
                hook = y.register_hook(lambda _: self.differentiated.add(handle))
                hooks.callback(hook.remove)

    def _compare_rows(self, hooks: ExitStack) -> None:
        """Lets each captured layer compare rows around the hooks of `parallelize_module`."""
        for module in every_module(self.capture.network):
            handle: LayerState | None = vars(module).get("_private")
            if handle is None or handle.inner is not None:  # whose call is within its forward
                continue
            inputs: list[Tensor] = []

            def before(module: nn.Module, args: tuple, kwargs: dict, inputs: Any = inputs) -> None:
                given = module._private.tensors((args, kwargs))
                inputs[:] = [tensor_parallel.local(x) for x in given]

            def after(module: nn.Module, args: tuple, output: Any, inputs: Any = inputs) -> None:
                handle: LayerState = module._private
                if not handle.seen(inputs):
                    outputs = [tensor_parallel.local(y) for y in handle.tensors(output)]
                    tensor_parallel.refuse_split_rows(handle, inputs, outputs)

            first = module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
            for one in (first, module.register_forward_hook(after)):
                hooks.callback(one.remove)

    def observe(self, args: tuple, kwargs: dict, batch_size: int) -> dict[str, list[LayerCall]]:
        """Returns name of a layer -> its calls in a plain forward of `batch_size` samples."""
        calls: dict[str, list[LayerCall]] = {}

        def watch(module: nn.Module, run: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
            handle: LayerState = module._private
            if is_in_backward():  # a checkpointed part of it is computed again
                return run(*args, **kwargs)
            _refuse_packed(handle, module, (*args, *kwargs.values()))
            if self.capture.sharding is None:
                _refuse_exchanged(handle, module)
            given = handle.tensors((args, kwargs))
            inputs = [tensor_parallel.local(x) for x in given]
            refuse_transforms(handle.name)
            # Dual numbers are of `torch.autograd.forward_ad`.
            is_dual = any(unpack_dual(x).tangent is not None for x in given)
            if is_dual and not _can_be_differentiated(handle):
                self.differentiated.add(handle)
            self.packs |= any(isinstance(x, PackedSequence) for x in args)
            dtype = product_dtype(inputs[0]) if inputs else None
            shapes = [_if_flattened(x, batch_size, handle) for x in inputs]
            has_moved = any(map(self.routing.has_moved, inputs))
            call = LayerCall(shapes, [], dtype, has_moved)
            calls.setdefault(handle.name, []).append(call)
            args, kwargs = expanded_input(handle, inputs, args, kwargs, batch_size)
            output = run(*args, **kwargs)
            self._note_backwards(handle, tensors_of(output), hooks)  # of packed sequences, too
            outputs = [tensor_parallel.local(y) for y in handle.tensors(output)]
            call.outputs[:] = [_if_flattened(y, batch_size, handle) for y in outputs]
            return expanded_output(handle, inputs, output, batch_size)

        with ExitStack() as hooks:
            if any(map(is_sharded, self.capture.parameters)):
                self._compare_rows(hooks)
            with plain_run(self.capture, args, kwargs, watch) as found:
                outputs = tensors_of(found)
        calls[NETWORK] = [
            LayerCall([], [_if_flattened(local(y), batch_size) for y in outputs], None)
        ]
        return calls | {h.name: [] for h in self.capture.handles if h.name not in calls}


def _can_be_differentiated(handle: LayerState) -> bool:
    """Returns whether gradients of what a module computes have gradients of their own."""
    return handle.kind == "vectorized" and not handle.children_apart


def _refuse_exchanged(handle: LayerState, module: nn.Module) -> None:
    """Refuses a call in which other tensors are in the place of a layer's parameters.

    Under vmap, with its caller, it is called with these too, and its parameters may have none.
    """
    for name, record in handle.records.items():
        owner, last = owner_of(module, name)
        if own_parameters(owner).get(last, record.parameter) is not record.parameter:
            raise NeedsVmap(
                handle.name,
                f"{handle.title(module)} is called with another tensor in the place of its {name}, "
                "as by torch.func.functional_call, whose gradient is not that of the parameter: "
                'use torch.nn.utils.parametrize.register_parametrization(layer, "weight", ..), or '
                "the function itself, as torch.nn.functional.linear(x, weight)",
            )


def _refuse_packed(handle: LayerState, module: nn.Module, inputs: tuple) -> None:
    """Refuses packed sequences for a module under vmap, which is given one sample's rows."""
    is_packed = any(isinstance(x, PackedSequence | Sequences) for x in inputs)
    if is_packed and handle.kind == "vectorized":
        why = "computes with parameters of its own and"
        if isinstance(module, nn.RNNBase):
            why = "is differentiated in the network's forward and"
        raise ValueError(
            f"{handle.title(module)} {why} is given packed "
            "sequences, in which a sample has no rows of its own: give it padded ones, as x, "
            "lengths = pad_packed_sequence(packed, batch_first=True), or let these parameters be "
            "in a module that is called with such x, as def forward(self, x): return x * self.scale"
        )


def _paired(name: str, runs: list[list[LayerCall]]) -> list[tuple[LayerCall, ...]]:
    """Returns a layer's calls in several runs side by side.

    Raises:
        ValueError: naming the layer, where there are more in one run than in another.
    """
    counts = sorted({len(calls) for calls in runs})
    if len(counts) > 1:
        raise NeedsVmap(
            name,
            f"{name or 'the network'} is called {counts[0]} times for some samples and "
            f"{counts[-1]} times for others, so whether it is called follows from their values, or "
            f"from how many there are: {AT_ONCE}, and mask what it returns; of "
            "nn.AdaptiveLogSoftmaxWithLoss call log_prob(x).gather(1, y[:, None]).squeeze(1) in "
            "place of forward(x, y).output",
        )
    return list(zip(*runs, strict=True))


def _if_flattened(x: Tensor, batch_size: int, handle: LayerState | None = None) -> Tensor:
    """Returns x if it may hold flattened samples, which values tell apart; else its shape alone.

    States of recurrent layers may hold them in dimension 1.
    """
    flattened = x.dim() > 0 and x.shape[0] != batch_size and x.shape[0] % batch_size == 0
    is_recurrent = handle is not None and handle.kind == "recurrent"
    if flattened or is_recurrent:
        return x.detach()
    return torch.empty_like(x, device="meta", requires_grad=False)
