"""Finds the shapes inside a compiled region before a private step on fused kernels enters it.

Inside the region a layer can neither make slots, which have shapes, nor use a plan. So the input
shapes of linear layers and embeddings are found beforehand, in plain forwards of a few samples,
once for each set of the network's input shapes. Plan and slots are made from them. `layers.linear`
explains the compiled code.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from dp_clipping.capture.network import Arguments, CapturedNetwork, LayerCall
from dp_clipping.clipping.accumulation import stored_dtype
from dp_clipping.clipping.norms import Norms
from dp_clipping.layers.batch_layout import FEW, MORE
from dp_clipping.layers.handle import LayerState, Site
from dp_clipping.layers.projection import Linear
from dp_clipping.layers.recorder import (
    FACTOR_SLOTS,
    GRADIENT_SLOTS,
    LOOK_UP_SLOTS,
    Count,
    Trainable,
)
from dp_clipping.planning.cost_model import INSTANTIATE, LinearShape
from dp_clipping.torch_compat import tree_flatten

Observe = Callable[[tuple, dict, int], dict[str, list[LayerCall]]]


Kind = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a slot."""
NORM = torch.float32
IDS = torch.float64  # holds every id exactly; what arrives at a slot has to be a gradient


@dataclass(frozen=True)
class WeightSlots:
    """Describes the slots of a weight of which more arrives than its G.

    Attributes:
        names: of the two slots, and of the one that counts uses.
        kinds: of the two.
        how: what arrives at them. None: G and its squared norms; the site of a product: its
            factors; rows of a table: output gradients and ids that are looked up in it.
    """

    names: tuple[str, str, str]
    kinds: tuple[Kind, Kind]
    how: Site | int | None


@dataclass(frozen=True, eq=False)
class CompiledShapes:
    """Holds the shapes in a forward whose inputs have certain shapes.

    Attributes:
        uses: parameter -> the use of a linear layer by one sample, in the order of the forward;
            without weights that are used more than once.
        dtypes: the dtypes of those layers' products.
        held: bytes that an ordinary forward keeps for its backward, a sample.
        look_ups: parameter -> ids that one sample looks up in an embedding, used once too.
    """

    uses: dict[Trainable, LinearShape]
    dtypes: dict[Trainable, torch.dtype]
    held: int
    look_ups: dict[Trainable, int] = field(default_factory=dict)
    _of_units: dict[int, "CompiledShapes"] = field(default_factory=dict, init=False)
    _of_batch: dict[int, dict[Trainable, LinearShape]] = field(default_factory=dict, init=False)

    @staticmethod
    def planned(batch_size: int) -> int:
        """Returns the batch size that plans are made for: the next power of two.

        Poisson batches vary in size. With a plan of its own each of them would ask for other
        slots, which is another function to compile.
        """
        return 1 << max(0, batch_size - 1).bit_length()

    def of_units(self, examples: int) -> "CompiledShapes":
        """Returns the shapes of samples that consist of `examples` examples each."""
        if examples == 1:
            return self
        if examples not in self._of_units:
            uses = {p: use._replace(tokens=use.tokens * examples) for p, use in self.uses.items()}
            ids = {p: count * examples for p, count in self.look_ups.items()}
            held = self.held * examples
            self._of_units[examples] = CompiledShapes(uses, self.dtypes, held, ids)
        return self._of_units[examples]

    def of_batch(self, batch_size: int) -> dict[Trainable, LinearShape]:
        planned = self.planned(batch_size)
        if planned not in self._of_batch:
            self._of_batch[planned] = {
                p: LinearShape(use.name, planned, *use[2:]) for p, use in self.uses.items()
            }
        return self._of_batch[planned]

    def slots(
        self, batch: int, handle: LayerState, algorithm_of: Callable[[str], str]
    ) -> WeightSlots | None:
        """Returns the slots of a layer's weight; None: it has no more than one for its G.

        Args:
            batch: samples of the batch.
            algorithm_of: name of a linear layer's weight -> what is planned for it.
        """
        weight = handle.records.get("weight")
        if weight in self.look_ups:
            ids = (batch, self.look_ups[weight])
            vocabulary, width = weight.shape
            kinds: Any = ((*ids, width), weight.parameter.dtype), (ids, IDS)
            return WeightSlots(LOOK_UP_SLOTS, kinds, vocabulary)
        if weight not in self.uses:
            return None
        use, dtype = self.uses[weight], self.dtypes[weight]
        if algorithm_of(weight.name) == INSTANTIATE:
            kinds = ((batch, *weight.shape), stored_dtype(dtype)), ((batch,), NORM)
            return WeightSlots(GRADIENT_SLOTS, kinds, None)
        rows = (batch, use.tokens)
        kinds = ((*rows, use.outputs), dtype), ((*rows, use.inputs), dtype)
        site = Site(Linear, weight, transposed=handle.kind == "conv1d")
        return WeightSlots(FACTOR_SLOTS, kinds, site)


def refuse_repeated(norms: Norms, counts: list[Count], parameters: list[Trainable]) -> None:
    """Makes a norm infinite if a weight was used more than once, which leaves all samples out.

    Its norm would miss the cross terms; looking at a count would make the host wait.
    """
    mine = [one for one in counts if not one[0].isdisjoint(parameters)]
    if mine:
        used = torch.stack([count for _, count, _ in mine]).sum()
        norms.leave_out_unless(used == sum([weights for _, _, weights in mine]))


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
            self._known[key] = self._once_used(calls, held)
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

    def _once_used(self, calls: dict[str, list[LayerCall]], held: int) -> CompiledShapes:
        found = CompiledShapes({}, {}, held)
        for handle in self._capture.handles:
            weight, of_layer = handle.records.get("weight"), calls[handle.name]
            if weight is None or weight.joint is not None or len(of_layer) != 1:
                continue
            x = of_layer[0].inputs[0]
            is_shared = any(one.kind == "shared" for one in handle.layouts.get((x.ndim,), ()))
            rows = 1 if is_shared else FEW
            if handle.kind == "embedding":
                found.look_ups[weight] = x.numel() // rows
            elif handle.kind in ("linear", "conv1d"):
                dtype, inputs = of_layer[0].product_dtype, x.shape[-1]
                found.dtypes[weight] = dtype
                found.uses[weight] = LinearShape(
                    weight.name, 1, x.shape[:-1].numel() // rows, inputs,
                    weight.shape.numel() // max(1, inputs), dtype.itemsize,
                    stored_dtype(dtype).itemsize,
                )  # fmt: skip
        return found


def _kind(leaf: Any) -> Any:
    """Returns the parts of an argument that may determine shapes inside the network."""
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype
    return type(leaf), leaf if isinstance(leaf, int | float | str) else None
