"""One forward and backward of the plain network, and what each layer sees of each sample in it.

A summary of a tensor with B samples is [B, SIGNS + 1]: each sample's sum under several fixed random
signs, and its norm. Two samples of different values have different sums but for chance.
"""

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from dp_clipping.capture.backward import flush_ready_nodes
from dp_clipping.capture.batch import tensors_of
from dp_clipping.capture.capture import Capture, tensors_in
from dp_clipping.distributed.dtensor import is_sharded
from dp_clipping.layers.accumulation import full_float32
from dp_clipping.layers.batch_layout import Layout
from dp_clipping.layers.handle import LayerState, expand_shared
from dp_clipping.layers.tensor_parallel import local
from dp_clipping.torch_compat import tree_map

SIGNS = 4
# Relative to the norm of what a sample has in the tensor. Two runs have the same shapes, so mostly
# the same kernels; what remains is the order in which a GPU's atomic operations add. With a sample
# more it is another kernel, so float32 products are full ones: TensorFloat-32 differs by 5e-4.
TOLERANCES = {torch.float16: 1e-2, torch.bfloat16: 1e-2}
TOLERANCE = 1e-4
WHOLE = 1e-12  # of whole numbers: in float64 only norms round, by the order of their sum
SIMPLE = {bool, int, float, str, type(None), torch.Generator}

Arguments = tuple[tuple, dict]


@dataclass
class Seen:
    """What was seen in one run.

    Attributes:
        summaries: (layer, what, number of its call) -> [B, SIGNS + 1], in the order of the run;
            `what` is `"input"`, `"output"` (of the network) or `"gradient"`.
        tolerances: of the same.
        is_random: the network has drawn random numbers.
    """

    summaries: dict[tuple[str, str, int], Tensor] = field(default_factory=dict)
    tolerances: dict[tuple[str, str, int], float] = field(default_factory=dict)
    is_random: bool = False

    def add(self, name: str, what: str, summary: Tensor, dtype: torch.dtype) -> None:
        number = 0
        while (name, what, number) in self.summaries:
            number += 1
        self.summaries[name, what, number] = summary
        whole = not (dtype.is_floating_point or dtype.is_complex)
        self.tolerances[name, what, number] = WHOLE if whole else TOLERANCES.get(dtype, TOLERANCE)


class Observer:
    """Runs a captured network as it is, with the random numbers that it would draw next."""

    def __init__(self, capture: Capture):
        self._capture = capture
        self._anchors: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def run(
        self,
        arguments: Arguments,
        batch_size: int,
        layouts_of: Callable[[list[Tensor]], Sequence[Layout | None]],
        scale: Tensor,
        seed: int | None = None,
        drawn: int = 0,
    ) -> Seen:
        """What is seen in a forward, and in a backward from random gradients of the outputs.

        Args:
            layouts_of: the network's output tensors -> their layouts; None: it has no samples, and
                is given no gradient.
            scale: [B], what each sample's gradients are multiplied by.
            seed: of errors that are put on the layers' outputs and their gradients, of the size of
                rounding; None: none are.
            drawn: gradients are drawn for so many samples, and the last `batch_size` of them given.
        """
        seen = Seen()
        rounding = None
        if seed is not None:
            rounding = torch.Generator(self._capture.trigger.device).manual_seed(seed)
        modules = list(self._capture.network.modules()) if self._capture.sharding is None else ()
        with untouched(modules), torch.enable_grad(), full_float32(convolutions=True):
            args, kwargs = arguments
            device = self._capture.trigger.device.type
            with self._watched(seen, batch_size, rounding) as triggers:
                before = generator_states(modules, self._capture.trigger.device)
                outputs = tensors_of(self._capture.network(*args, **kwargs))
                starts = []
                for output, layout in zip(outputs, layouts_of(outputs), strict=True):
                    if layout is None or layout.kind == "shared":
                        continue
                    y = local(output)
                    seen.add("", "output", summary(y, layout, batch_size), y.dtype)
                    if output.requires_grad and y.is_floating_point():
                        gradient = self._gradient(output, y, layout, scale, drawn)
                        starts.append((output, gradient))
                triggers.append(self._anchor(torch.float32, self._capture.trigger.device))
                if starts:
                    sharding = self._capture.sharding
                    with (
                        nullcontext() if sharding is None else sharding.backward(),
                        torch.autocast(device, enabled=False),
                        torch.autograd.set_multithreading_enabled(False),
                    ):
                        self._is_backward = True
                        ys, gradients = zip(*starts, strict=True)
                        inputs = list({id(a): a for a in triggers}.values())
                        try:
                            torch.autograd.grad(ys, inputs, gradients, allow_unused=True)
                        except BaseException:
                            flush_ready_nodes()
                            raise
                seen.is_random = generator_states(modules, self._capture.trigger.device) != before
        return seen

    @contextmanager
    def _watched(
        self, seen: Seen, batch_size: int, rounding: torch.Generator | None
    ) -> Iterator[list[Tensor]]:
        """Inside, every call of a captured layer is noted; what is yielded, all of them lead to.

        A zero that requires a gradient is added to each output, so that autograd comes to all
        layers, and computes no gradient of a parameter.
        """
        triggers: list[Tensor] = []
        dims: dict[nn.Module, list[tuple[int, ...]]] = {}
        self._is_backward = False

        def before(module: nn.Module, args: tuple, kwargs: dict) -> Any:
            handle: LayerState = module._private
            inputs = [local(x) for x in tensors_in((args, kwargs))]
            key = tuple(x.dim() for x in inputs)
            dims.setdefault(module, []).append(key)
            layouts = handle.layouts.get(key, ())
            if not self._is_backward:  # a checkpointed block is computed again in it
                for x, layout in zip(inputs, layouts, strict=False):
                    if layout.kind != "shared":
                        values = summary(x, layout, batch_size)
                        seen.add(handle.name, "input", values, x.dtype)
            return expanded_input(handle, layouts, inputs, batch_size)

        def after(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
            handle: LayerState = module._private
            key = dims[module].pop()
            if handle.kind == "vectorized":
                layouts = list(handle.output_layouts.get(key, ()))
            else:
                layouts = list(handle.layouts.get(key, ()))
            output = expanded_output(handle, layouts, output, batch_size)
            places = iter(layouts)

            def note(y: Any) -> Any:
                if not isinstance(y, Tensor):
                    return y
                layout = next(places, None)
                if layout is None or not y.is_floating_point() or is_sharded(y):
                    return y
                if layout.kind == "shared":
                    layout = Layout("dimension", 0)
                trigger = self._anchor(y.dtype, y.device)
                triggers.append(trigger)
                y = _rounded(y, rounding) + trigger
                if y.requires_grad:

                    def arrived(gradient: Tensor) -> Tensor:
                        gradient = _rounded(gradient, rounding)
                        values = summary(local(gradient), layout, batch_size)
                        seen.add(handle.name, "gradient", values, gradient.dtype)
                        return gradient

                    y.register_hook(arrived)
                return y

            return tree_map(note, output)

        with self._capture.looked_at(before, after):
            yield triggers

    def _anchor(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        if (dtype, device) not in self._anchors:
            zero = torch.zeros((), dtype=dtype, device=device, requires_grad=True)
            self._anchors[dtype, device] = zero
        return self._anchors[dtype, device]

    def _gradient(
        self, output: Tensor, y: Tensor, layout: Layout, scale: Tensor, drawn: int
    ) -> Tensor:
        """Random numbers of the output's shape, the same in each run, of a norm of 1 a sample."""
        draw = torch.Generator(y.device).manual_seed(0)
        size = len(scale)
        shape = layout.batch_first(y.detach(), size).shape[1:]
        shape = (max(size, drawn), *shape)
        rows = torch.randn(shape, generator=draw, device=y.device, dtype=torch.float32)[-size:]
        factors = scale.to(rows).view(-1, *[1] * (rows.dim() - 1))
        rows.mul_(factors / max(1, rows[0].numel()) ** 0.5)
        gradient = layout.restore(rows).to(y.dtype)
        if is_sharded(output):
            gradient = type(output).from_local(gradient, output.device_mesh, output.placements)
        return gradient


def _rounded(x: Tensor, draw: torch.Generator | None) -> Tensor:
    """x with errors of the size of its dtype's rounding."""
    if draw is None or is_sharded(x):
        return x
    errors = torch.randn(x.shape, generator=draw, device=x.device, dtype=torch.float32)
    errors *= torch.finfo(x.dtype).eps / 4
    return (x * (1 + errors.to(torch.promote_types(x.dtype, torch.float32)))).to(x.dtype)


@torch.no_grad()
def summary(x: Tensor, layout: Layout, batch_size: int) -> Tensor:
    """[B, SIGNS + 1]; what is not finite is zero: a bad sample is not a mixing network."""
    x = torch.view_as_real(x.detach().resolve_conj()) if x.is_complex() else x.detach()
    if not x.numel():
        return x.new_zeros(batch_size, SIGNS + 1, dtype=torch.float64)
    rows = layout.batch_first(x, batch_size)
    rows = rows.reshape(batch_size, -1, rows.shape[-1] if rows.dim() > 1 else 1)
    is_float = rows.dtype.is_floating_point
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32) if is_float else torch.float64)
    sums = rows @ _signs(rows.shape[2], 0, rows.dtype, rows.device)
    sums = (sums * _signs(rows.shape[1], 1, rows.dtype, rows.device)).sum(1)
    norms = torch.linalg.vector_norm(rows.flatten(1), dim=1, keepdim=True)
    return torch.cat((sums, norms), 1).double().nan_to_num(0, 0, 0)


@lru_cache(maxsize=256)
def _signs(size: int, seed: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[size, SIGNS] of 1 and -1."""
    draw = torch.Generator().manual_seed(seed)
    return (torch.randint(2, (size, SIGNS), generator=draw) * 2 - 1).to(device, dtype)


def expanded_input(
    handle: LayerState, layouts: Sequence[Layout], inputs: list[Tensor], batch_size: int
) -> tuple[tuple, dict] | None:
    """For a hook before a layer: its only input, shared by all samples, expanded to the batch."""
    if handle.kind != "vectorized" and layouts and layouts[0].kind == "shared":
        return (expand_shared(inputs[0], batch_size),), {}
    return None


def expanded_output(
    handle: LayerState, layouts: Sequence[Layout], output: Any, batch_size: int
) -> Any:
    """As what a module under vmap returns: shared outputs get the batch's dimension."""
    if handle.kind != "vectorized" or not any(x.kind == "shared" for x in layouts):
        return output
    return tree_map(lambda y: expand_shared(y, batch_size) if isinstance(y, Tensor) else y, output)


def generator_states(modules: Iterable[nn.Module], device: torch.device) -> list[Any]:
    """Of torch's generators, Python's, NumPy's and those that modules hold: to be compared."""
    values = [value for module in modules for value in vars(module).values()]
    states = [torch.get_rng_state()]
    states += [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    states += [value.get_state() for value in values if isinstance(value, torch.Generator)]
    numpy = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else ()
    return [
        *(x.tolist() for x in states),
        random.getstate(),
        *map(str, numpy[2:]),
        *map(bytes, numpy[1:2]),
    ]


@contextmanager
def untouched(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Afterwards generators, and numbers and strings that are attributes of modules, are what they
    were: a counter of forwards has not moved.

    Attributes that are objects, as lists and caches, keep what a forward put into them.
    """
    modules = list(modules)
    before = [(vars(module), set(vars(module)), _simple(vars(module))) for module in modules]
    try:
        with same_generators(modules):
            yield
    finally:
        for attributes, keys, found in before:
            for key, value in _simple(attributes).items():
                if key not in keys:
                    del attributes[key]
                elif key in found and found[key] is not value:
                    attributes[key] = found[key]


@contextmanager
def same_generators(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Puts back the generators of Python and NumPy, and those that are attributes of modules."""
    generators = [
        (value, value.get_state())
        for module in modules
        for value in vars(module).values()
        if isinstance(value, torch.Generator)
    ]
    python = random.getstate()
    numpy = sys.modules["numpy"].random if "numpy" in sys.modules else None
    legacy = None if numpy is None else numpy.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.set_state(legacy)
        for generator, state in generators:
            generator.set_state(state)


def _simple(attributes: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in attributes.items() if type(value) in SIMPLE}
