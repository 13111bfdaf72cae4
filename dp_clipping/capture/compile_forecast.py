"""Finds the shapes inside a compiled region before a private step on fused kernels enters it.

Inside the region a layer can neither make slots, which have shapes, nor use a plan. So the input
shapes of linear layers are found beforehand, in plain forwards of a few samples, once for each set
of the network's input shapes. Plan and slots are made from them. `layers.linear` explains the
compiled code.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from dp_clipping.capture.network import Arguments, CapturedNetwork, LayerCall
from dp_clipping.clipping.accumulation import stored_dtype
from dp_clipping.clipping.norms import Norms
from dp_clipping.layers.batch_layout import FEW, MORE
from dp_clipping.layers.handle import FACTOR_SLOTS, GRADIENT_SLOTS, LayerState, Site
from dp_clipping.layers.projection import Linear
from dp_clipping.layers.recorder import DENSE, LINEAR, Trainable
from dp_clipping.planning.cost_model import INSTANTIATE, LinearShape
from dp_clipping.torch_compat import tree_flatten

Observe = Callable[[tuple, dict, int], dict[str, list[LayerCall]]]


@dataclass(frozen=True)
class CompiledShapes:
    """Holds the shapes in a forward whose inputs have certain shapes.

    Attributes:
        uses: parameter -> the use of a linear layer by one sample, in the order of the forward;
            without weights that are used more than once.
        dtypes: the dtypes of those layers' products.
        held: bytes that an ordinary forward keeps for its backward, a sample.
    """

    uses: dict[Trainable, LinearShape]
    dtypes: dict[Trainable, torch.dtype]
    held: int

    @staticmethod
    def planned(batch_size: int) -> int:
        """Returns the batch size that plans are made for: the next power of two.

        Poisson batches vary in size. With a plan of its own each of them would ask for other
        slots, which is another function to compile.
        """
        return 1 << max(0, batch_size - 1).bit_length()

    def of_units(self, examples: int) -> "CompiledShapes":
        """Returns the shapes of samples that consist of `examples` examples each."""
        uses = {p: use._replace(tokens=use.tokens * examples) for p, use in self.uses.items()}
        return replace(self, uses=uses, held=self.held * examples)

    def of_batch(self, batch_size: int) -> dict[Trainable, LinearShape]:
        planned = self.planned(batch_size)
        return {p: LinearShape(use.name, planned, *use[2:]) for p, use in self.uses.items()}

    def slots(self, private_step: Any, handle: LayerState, algorithm: str) -> dict[str, Tensor]:
        """Returns the slots of a layer's weight."""
        parameter, batch_size = handle.records["weight"], private_step.batch_size
        use, dtype = self.uses[parameter], self.dtypes[parameter]
        transposed = handle.kind == "conv1d"
        if algorithm == INSTANTIATE:
            names = GRADIENT_SLOTS
            kinds = (((batch_size, *parameter.shape), stored_dtype(dtype)), ((batch_size,), NORM))
        else:
            names = FACTOR_SLOTS
            rows = (batch_size, use.tokens)
            kinds = (((*rows, use.outputs), dtype), ((*rows, use.inputs), dtype))
        rest = (parameter, algorithm == INSTANTIATE, transposed, (*kinds, ((1,), NORM)))
        tensors = LinearTap.apply(parameter.trigger, private_step, *rest)
        return dict(zip(names, tensors, strict=True))


NORM = torch.float32


class LinearTap(torch.autograd.Function):
    """Empty slots [..] without memory between the trigger and the only use of a weight."""

    @staticmethod
    def forward(ctx, trigger, private_step, parameter, is_gradient, transposed, kinds):
        ctx.rest = (private_step, parameter, is_gradient, transposed)
        return tuple(private_step.capture.zero(dtype).expand(shape) for shape, dtype in kinds)

    @staticmethod
    def backward(ctx, first, second, count):
        private_step, parameter, is_gradient, transposed = ctx.rest
        private_step.counted(parameter, count)
        if is_gradient:
            private_step.take(DENSE, (parameter,), (first, second), (first,))
        else:
            site = Site(Linear, parameter, transposed=transposed)
            private_step.take(LINEAR, (parameter,), (first, second, site), (first, second))
        return None, None, None, None, None, None


def refuse_repeated(
    norms: Norms, counts: dict[Trainable, Tensor], parameters: list[Trainable]
) -> None:
    """Makes a norm infinite if a weight was used more than once, which leaves all samples out.

    Its norm would miss the cross terms; looking at a count would make the host wait.
    """
    counted = [p for p in parameters if p in counts] if counts else []
    if counted:
        norms.leave_out_unless((torch.stack([counts[p] for p in counted]) == 1).all())


class Forecaster:
    """Observes a plain forward once for each set of input shapes, and stores the shapes in it.

    Args:
        observe: arguments of so many samples -> the calls of each layer (`Search.observe`).
    """

    def __init__(self, capture: CapturedNetwork, observe: Observe):
        self._capture, self._observe_calls = capture, observe
        self._known: dict[tuple, CompiledShapes] = {}

    def forget(self) -> None:
        self._known.clear()

    def of(self, one: Arguments, rows: Callable[[int], Arguments]) -> CompiledShapes:
        """Returns the shapes for the arguments of one sample; `rows` makes those of several."""
        key = self._key(one)
        if key not in self._known:
            calls, few = self._observe(rows(FEW), FEW)
            _, more = self._observe(rows(MORE), MORE)
            held = max(0, more - few) // (MORE - FEW)
            found = list(self._once_used(calls))
            uses = {parameter: use for parameter, use, _ in found}
            dtypes = {parameter: dtype for parameter, _, dtype in found}
            self._known[key] = CompiledShapes(uses, dtypes, held)
        return self._known[key]

    def _key(self, one: Arguments) -> tuple:
        device = self._capture.trigger.device.type
        autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
        leaves, structure = tree_flatten(one)
        return (structure, autocast, *map(_kind, leaves))

    def _observe(self, batch: Arguments, size: int) -> tuple[dict[str, list[LayerCall]], int]:
        """Calls of the layers in a plain forward, and the bytes it keeps for a backward."""
        held: dict[int, int] = {}

        def pack(x: Tensor) -> Tensor:
            storage = x.untyped_storage()
            held[storage.data_ptr()] = storage.nbytes()
            return x.detach()  # a node that saves its own output would hold itself by `x`

        with torch.enable_grad(), saved_tensors_hooks(pack, lambda x: x):
            calls = self._observe_calls(*batch, size)
        return calls, sum(held.values())

    def _once_used(
        self, calls: dict[str, list[LayerCall]]
    ) -> Iterator[tuple[Trainable, LinearShape, torch.dtype]]:
        handles = {handle.name: handle for handle in self._capture.handles}
        for name, handle in handles.items():
            of_layer = calls[name]
            is_linear = handle.kind in ("linear", "conv1d") and "weight" in handle.trainable
            if not is_linear or len(of_layer) != 1:
                continue
            parameter = handle.records["weight"]
            if parameter.joint is not None:
                continue
            x, dtype = of_layer[0].inputs[0], of_layer[0].product_dtype
            inputs, shape = x.shape[-1], parameter.shape
            use = LinearShape(
                parameter.name, 1, x.shape[:-1].numel() // FEW, inputs,
                shape.numel() // max(1, inputs), dtype.itemsize, stored_dtype(dtype).itemsize,
            )  # fmt: skip
            yield parameter, use, dtype


def _kind(leaf: Any) -> Any:
    """Returns the parts of an argument that may determine shapes inside the network."""
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype
    return type(leaf), leaf if isinstance(leaf, int | float | str) else None
