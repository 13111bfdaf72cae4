"""One forward and backward of the plain network, and what each layer sees of each sample in it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from dp_clipping.capture.checks.summaries import summary
from dp_clipping.capture.checks.terms import leaves_of
from dp_clipping.capture.network import Arguments, CapturedNetwork, plain_run
from dp_clipping.capture.samples.batch import Batch, tensors_of
from dp_clipping.clipping.accumulation import full_float32, product_dtype
from dp_clipping.distributed.dtensor import is_sharded
from dp_clipping.guard.rounding import rounded
from dp_clipping.layers.batch_layout import (
    FLATTENED,
    Layout,
    LayoutUnknown,
    SomeSamples,
    all_tokens,
    check_size,
)
from dp_clipping.layers.handle import LayerState, expanded_input, expanded_output
from dp_clipping.layers.tensor_parallel import local
from dp_clipping.layers.vmap.own import UnknownOperation
from dp_clipping.layers.vmap.refusals import recomputation_of
from dp_clipping.layers.vmap.whole_batch import Call, on_whole_batch
from dp_clipping.torch_compat import (
    every_module,
    flush_ready_nodes,
    gradients_in_modes,
    is_in_backward,
    tree_map,
    version_of,
)
from dp_clipping.trials.perturb import LARGE, SIDES, Perturbed
from dp_clipping.trials.randomness import RandomStates
from dp_clipping.trials.seen import Seen, Summary

FACTORS = (4.0, -2.0, 0.25, -1.0)  # of gradients of samples that do not stay
OF_RANKS = (
    "the model returns a DTensor, as with use_local_output=False or for loss_parallel: each rank's "
    "loss needs a tensor of its own; let its last layer return one, in the plan of "
    "parallelize_module: ColwiseParallel(output_layouts=Replicate())"
)
LayoutsOf = Callable[[list[Tensor]], Sequence[Layout | None]]


class Observer:
    """A captured network with some samples of a batch: a `probe.Subject`.

    It runs as it is, with the random numbers that it would draw next: one forward, and one backward
    from random output gradients. Each run starts from the same state of the network and of all
    generators, which are put back. Where samples do not stay, their gradients are others too.

    Args:
        layouts_of: the network's output tensors -> their layouts; None: it has no samples, and is
            given no gradient.
        rows: of the batch, the samples of the first run.
    """

    repeats = 5

    def __init__(
        self, capture: CapturedNetwork, layouts_of: LayoutsOf, batch: Batch, rows: Sequence[int]
    ):
        self._capture, self._layouts_of, self._batch = capture, layouts_of, batch
        self._rows, self.device = torch.tensor(rows, device="cpu"), capture.trigger.device

    def run(self, perturbed: Perturbed | None = None, seed: int | None = None) -> Seen:
        """Observes a run.

        Args:
            seed: seed of the errors, of the size of rounding, that are added to the network's
                arguments, to inputs and outputs of layers, and to gradients; None: none are added.
        """
        batch, rows, first = self._batch, self._rows, 1
        drawn = len(rows) + len(SIDES)  # gradients: the same for a sample that has other places
        scale = torch.ones(len(rows), device="cpu")
        if perturbed is not None:
            rows = rows[perturbed.rows]
            first = 0 if perturbed.more == "front" else 1
            others = torch.tensor(FACTORS, device="cpu").repeat(len(rows) // len(FACTORS) + 1)[
                : len(rows)
            ]
            scale = torch.where(perturbed.same, 1.0, others)
            if perturbed.larger is not None:
                batch = batch.with_factor(int(rows[perturbed.larger]), LARGE)
        given, chosen = batch.with_rows(rows), slice(first, first + len(rows))
        rounding = None if seed is None else torch.Generator(self.device).manual_seed(seed)
        try:
            return self._observed(given, scale.to(self.device), drawn, chosen, rounding)
        except (LayoutUnknown, SomeSamples) as error:
            error.arguments = given
            raise

    def _observed(
        self, arguments: Arguments, scale: Tensor, drawn: int, chosen: slice,
        rounding: torch.Generator | None,
    ) -> Seen:  # fmt: skip
        """Observes a run with these arguments.

        Args:
            scale: [B], what each sample's gradients are multiplied by.
            drawn: the number of samples to draw gradients for, or B if that is more.
            chosen: of them, those that are used.
        """
        calls = _Calls(len(scale), rounding)
        modules = every_module(self._capture.network) if self._capture.sharding is None else ()
        states = RandomStates(modules, self.device)
        arguments = tree_map(
            lambda x: rounded(_apart(x), rounding) if isinstance(x, Tensor) else x, arguments
        )
        with (
            full_float32(layers=True),
            nullcontext() if rounding is None else calls.errors_inside(self._capture.network),
            plain_run(
                self._capture, *arguments, calls.watch, has_graph=True, has_dropout=True
            ) as outputs,
        ):  # fmt: skip
            calls.last_input = None
            outputs = tensors_of(outputs)
            if any(map(is_sharded, outputs)):
                raise ValueError(OF_RANKS)
            starts = []
            for output, layout in zip(outputs, self._layouts_of(outputs), strict=True):
                if layout is None or layout.kind == "shared":
                    continue
                calls.seen.add("", "output", summary(output, layout, len(scale)))
                if output.requires_grad and output.is_floating_point():
                    gradient = self._gradient(output, layout, scale, drawn, chosen)
                    starts.append((output, rounded(gradient, rounding)))
            if starts:
                self._backward(starts, calls.triggers)
            calls.seen.is_random = states.have_moved
        return calls.seen

    def _backward(self, starts: list[tuple[Tensor, Tensor]], triggers: list[Tensor]) -> None:
        """Runs from gradients of outputs down to all layers, without a gradient of a parameter.

        It also runs down to every other leaf, such as an input that requires a gradient. A Function
        that computes layers in its own backward, as reentrant checkpointing does, may lead to such
        a leaf alone. A private step would not reach it, and its layers would not train: it is
        refused here.
        """
        sharding, device = self._capture.sharding, self.device
        ys, gradients = zip(*starts, strict=True)
        leaves = set[Tensor]().union(*map(leaves_of, ys))
        others = [x for x in leaves if not isinstance(x, nn.Parameter)]
        anchor = torch.zeros((), requires_grad=True, device="cpu")  # there may be no other leaf
        inputs = list({id(x): x for x in [*triggers, *others, anchor]}.values())
        with (
            nullcontext() if sharding is None else sharding.backward(),
            torch.autocast(device.type, enabled=False),
            torch.autograd.set_multithreading_enabled(False),
        ):
            try:
                gradients_in_modes(ys, inputs, gradients)
            except BaseException as error:
                flush_ready_nodes()
                meaning = recomputation_of(error, (one.kind for one in self._capture.handles))
                if meaning is None:
                    raise
                raise meaning from error

    def _gradient(
        self, y: Tensor, layout: Layout, scale: Tensor, drawn: int, chosen: slice
    ) -> Tensor:
        """Returns random numbers of the output's shape, the same in each run, of norm 1."""
        draw = torch.Generator(y.device).manual_seed(0)
        size = len(scale)
        shape = layout.batch_first(y.detach(), size).shape[1:]
        shape = (max(size, drawn), *shape)
        rows = torch.randn(shape, generator=draw, device=y.device, dtype=torch.float32)
        rows = rows[chosen]
        factors = scale.to(rows).view(-1, *[1] * (rows.dim() - 1))
        rows.mul_(factors / max(1, rows[0].numel()) ** 0.5)
        return layout.restore(rows).to(y.dtype)


class _Calls:
    """The calls of captured layers in one run of `size` samples.

    A zero that requires a gradient is added to each output, so that autograd comes to all layers,
    and computes no gradient of a parameter.

    Attributes:
        seen: what layers see of each sample, and the gradients that arrive at their outputs.
        triggers: these zeros.
        last_input: a key of the last tensor that layers have read, the tensor, and its summary.
    """

    def __init__(self, size: int, rounding: torch.Generator | None):
        self._size, self._rounding = size, rounding
        self.seen, self.triggers = Seen(), list[Tensor]()
        self.last_input: tuple[tuple, Tensor, Summary] | None = None
        self._anchors: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    @contextmanager
    def errors_inside(self, network: nn.Module) -> Iterator[None]:
        """Enters a context in which modules in those that are captured whole round, too.

        It is left after the backward, which calls checkpointed ones again.
        """

        def after(_: nn.Module, args: Any, output: Any) -> Any:
            return tree_map(
                lambda y: rounded(y, self._rounding) if isinstance(y, Tensor) else y, output
            )

        captured = [m for m in every_module(network) if "_private" in vars(m)]
        whole = [m for m in captured if not vars(m)["_private"].operations]
        with ExitStack() as hooks:
            for inner in {m for one in whole for m in every_module(one)}.difference(captured):
                hooks.callback(inner.register_forward_hook(after).remove)
            yield

    def watch(
        self, module: nn.Module, run: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Runs a layer; see `capture.network.Watch`."""
        handle: LayerState = vars(module)["_private"]
        if self._rounding is not None:
            args, kwargs = _rounded_arguments(args, kwargs, self._rounding)
        inputs = [local(x) for x in handle.tensors((args, kwargs), whole=True)]
        layouts = handle.seen(inputs)
        if not is_in_backward():  # a checkpointed block is computed again in it
            for x, layout in zip(inputs, layouts, strict=False):
                if layout.kind != "shared":
                    if layout.kind in FLATTENED or x.shape[layout.dim] != self._size:
                        check_size(x, layout, handle, self._size)
                    self.seen.add(handle.name, "input", self._of_input(x, layout))
        args, kwargs = expanded_input(handle, inputs, args, kwargs, self._size)
        if handle.operations:
            output = self._with_own_parameters(handle, module, args, kwargs)
        else:
            output = expanded_output(handle, inputs, run(*args, **kwargs), self._size)
        places = iter(handle.seen_outputs(inputs) if handle.learns_outputs else layouts)

        def note(y: Any) -> Any:
            if isinstance(y, PackedSequence):
                return y._replace(data=self._of_output(handle, y.data, next(places, None), y))
            return self._of_output(handle, y, next(places, None)) if isinstance(y, Tensor) else y

        if isinstance(output, Tensor):
            return note(output)
        return tree_map(note, output, is_leaf=lambda y: isinstance(y, PackedSequence))

    def _of_output(
        self, handle: LayerState, y: Tensor, layout: Layout | None,
        packed: PackedSequence | None = None,
    ) -> Tensor:  # fmt: skip
        if layout is None or not y.is_floating_point() or is_sharded(y):
            return y
        if layout.kind == "shared":
            if y.shape[:1] != (self._size,):
                return y  # no sample has a gradient of its own there
            layout = Layout("dimension", 0)

        def arrived(gradient: Tensor) -> Tensor:
            gradient = rounded(gradient, self._rounding)
            rows = local(gradient)
            if packed is not None:
                rows = all_tokens(packed._replace(data=rows))
            self.seen.add(handle.name, "gradient", summary(rows, layout, self._size), number)
            return gradient

        # Under autocast a recurrent layer computes in 16 bit, and returns float32.
        dtype = product_dtype(y) if handle.kind == "recurrent" else y.dtype
        y = rounded(y, self._rounding, dtype) + self._trigger(y)
        if y.requires_grad:
            number = self.seen.number(handle.name, "gradient")
            y.register_hook(arrived)
            y = y.view_as(y)  # hooks of the user's on the output run before this one
        return y

    def _with_own_parameters(
        self, handle: LayerState, module: nn.Module, args: tuple, kwargs: dict
    ) -> Any:
        """Runs a module, and records the operators of its own parameters.

        Each of them takes a sample's copy of the parameter for a row of the batch.
        """

        def watch(what: str, x: Tensor, layout: Layout) -> Tensor:
            if what == "operand" and not is_in_backward():  # where checkpointing runs it again
                self.seen.add(handle.name, "operand", summary(x, layout, self._size))
            if what == "operand" or not x.is_floating_point():
                return x

            def arrived(gradient: Tensor) -> None:
                self.seen.add(handle.name, "result", summary(gradient, layout, self._size))

            trigger = self._trigger(x)
            x = x.add_(trigger) if what == "written" else x + trigger
            if x.requires_grad:
                x.register_hook(arrived)
            return x

        copies = handle.copies(module, self._size)
        call = Call(handle.title(module), self._size, handle.operations, watch=watch)
        try:
            return on_whole_batch(module, call, copies, args, kwargs)
        except UnknownOperation as error:  # it computes otherwise
            raise handle.unseen(error) from error

    def _of_input(self, x: Tensor, layout: Layout) -> Summary:
        """Returns the summary of a layer's input; layers that read one tensor in turn share it."""
        key = (x.data_ptr(), x.shape, x.stride(), x.dtype, version_of(x), layout)
        if self.last_input is None or self.last_input[0] != key:
            self.last_input = (key, x, summary(x, layout, self._size))
        return self.last_input[2]

    def _trigger(self, y: Tensor) -> Tensor:
        """Returns the zero that is added to a tensor."""
        place = y.dtype, y.device
        if place not in self._anchors:
            zero = torch.zeros((), dtype=y.dtype, device=y.device, requires_grad=True)
            self._anchors[place] = zero
        self.triggers.append(self._anchors[place])
        return self._anchors[place]


def _rounded_arguments(args: tuple, kwargs: dict, draw: torch.Generator) -> Arguments:
    """Returns a layer's arguments with errors in their tensors; equal ones stay one tensor.

    Tensors in objects are left: the layer may write to these objects.
    """
    done: dict[int, Any] = {}

    def one(x: Any) -> Any:
        if id(x) not in done:
            if isinstance(x, PackedSequence):
                done[id(x)] = x._replace(data=rounded(x.data, draw))
            else:
                done[id(x)] = rounded(x, draw) if isinstance(x, Tensor) else x
        return done[id(x)]

    return tuple(map(one, args)), {key: one(x) for key, x in kwargs.items()}


def _apart(x: Tensor) -> Tensor:
    """Returns an input without the graph that is before it, which backwards would free."""
    return x if x.is_leaf else x.detach().requires_grad_()
