"""Computes the least time that each part of a step needs: operations and bytes over ceilings.

    floor = max(operations / rate of products, bytes / rate of memory)

Ceilings are rates that this machine reaches: of a large matrix product in each precision, and of a
large copy. A part's floor is that of the algorithm that the private step runs; another one may have
a lower floor. The ordinary step has a floor for the same part, its weight gradients for example,
and what privacy has to cost is the difference.

Shapes are those that layers see in one forward: B samples, T tokens or positions of a sample,
weights [d, p], s bytes of an element. u = 2·B·T·p·d are the operations of a weight gradient. Values
of a network's own are read and written in its dtype, sums and small per-sample gradients in
float32.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import ceil, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.utils.rnn import PackedSequence

from dp_clipping.clipping.accumulation import stored_dtype
from dp_clipping.kernels.convolution import gram
from dp_clipping.kernels.convolution.geometry import Geometry, is_narrow
from dp_clipping.kernels.convolution.layout import layout_of
from dp_clipping.kernels.launch.tuning import interleaved
from dp_clipping.planning.cost_model import ACCUMULATE, GRAM, INSTANTIATE
from dp_clipping.step.sums.layer_plans import LEAST_ROUNDED
from dp_clipping.torch_compat import tree_leaves

HALF, TF32, SINGLE = "bfloat16", "tf32", "float32"
SIDE = 8192  # of the matrices whose product is timed
COPIED = 1 << 30  # bytes
ROUNDS = 5
WIDE, PACKED = 4, 2  # bytes of an element in float32, and of packed operands
(NORMS, SUMS, LAYOUTS, KEPT, NORM_LAYERS, EMBEDDINGS, VECTORS, COEFFICIENTS, NOISE) = PARTS = (
    "products: norms", "products: sums", "products: layouts", "sums of kept gradients",
    "norm layers", "embeddings", "biases and small norms", "coefficients", "noise",
)  # products are those of linear layers and convolutions, which share kernels # fmt: skip


class Ceilings(NamedTuple):
    """Rates of a machine.

    Attributes:
        products: precision -> operations per second.
        copy: bytes per second, read and written.
    """

    products: Mapping[str, float]
    copy: float

    def ms(self, moved: float, operations: float = 0.0, precision: str = HALF) -> float:
        """Returns the floor in milliseconds."""
        return 1e3 * max(operations / self.products[precision], moved / self.copy)

    def __str__(self) -> str:
        rates = [f"{name} {rate / 1e12:.0f} TFLOP/s" for name, rate in self.products.items()]
        return ", ".join([*rates, f"copy {self.copy / 1e12:.2f} TB/s"])


def measure_ceilings(device: torch.device, side: int = SIDE, copied: int = COPIED) -> Ceilings:
    """Measures with PyTorch's own products and copy; the fastest of some rounds counts."""
    halves = torch.randn(2, side, side, device=device, dtype=torch.bfloat16)
    singles = torch.randn(2, side, side, device=device)
    source = torch.ones(copied, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    matmul = torch.backends.cuda.matmul

    def in_precision(precision: str) -> Tensor:
        before, matmul.fp32_precision = matmul.fp32_precision, precision
        try:
            return singles[0] @ singles[1]
        finally:
            matmul.fp32_precision = before

    calls = {
        HALF: lambda number: halves[0] @ halves[1], TF32: lambda number: in_precision("tf32"),
        SINGLE: lambda number: in_precision("ieee"), "copy": lambda number: target.copy_(source),
    }  # fmt: skip
    seconds = {name: min(ms) / 1e3 for name, ms in interleaved(calls, device, ROUNDS).items()}
    copy = 2 * copied / seconds.pop("copy")
    return Ceilings({name: 2 * side**3 / each for name, each in seconds.items()}, copy)


class Call(NamedTuple):
    """One call of a layer with trainable parameters of its own.

    Attributes:
        name, layer: of the module.
        samples: B.
        given, found: shapes of its first input and its first output; packed sequences have their
            tokens first.
        itemsize: s.
    """

    name: str
    layer: nn.Module
    samples: int
    given: torch.Size
    found: torch.Size
    itemsize: int


class Floor(NamedTuple):
    """Floors of a part in milliseconds: without privacy, and with it."""

    ordinary: float
    private: float


def calls_of(network: nn.Module, inputs: Any, samples: int) -> list[Call]:
    """Returns the calls of one forward, without gradients, of layers whose floors are known."""
    calls: list[Call] = []

    def note(name: str, layer: nn.Module, given: tuple, named: dict, found: Any) -> None:
        x, y = _first((given, named)), _first(found)
        itemsize = next(_own(layer))[1].itemsize
        calls.append(Call(name, layer, samples, x.shape, y.shape, itemsize))

    hooks = [
        layer.register_forward_hook(partial(note, name), with_kwargs=True)
        for name, layer in network.named_modules()
        if _formula_of(layer) is not None and any(_own(layer))
    ]
    try:
        with torch.no_grad():
            network(**inputs) if isinstance(inputs, dict) else network(*inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _first(values: Any) -> Tensor:
    """Returns the first tensor, of packed sequences all their tokens."""
    leaves = (x.data if isinstance(x, PackedSequence) else x for x in tree_leaves(values))
    return next(x for x in leaves if isinstance(x, Tensor))


def _own(layer: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields a layer's trainable parameters; of attention also those of its last projection."""
    inner = isinstance(layer, nn.MultiheadAttention)
    return (pair for pair in layer.named_parameters(recurse=inner) if pair[1].requires_grad)


def floors_of(
    network: nn.Module, inputs: Any, samples: int, algorithms: Mapping[str, str],
    ceilings: Ceilings,
) -> tuple[dict[str, Floor], list[str]]:  # fmt: skip
    """Returns the floor of each part, and the parameters that none of them counts.

    Args:
        algorithms: weight of a linear layer -> the plan's algorithm; `input_length` is assumed
            of others.
    """
    found: dict[str, list[Floor]] = defaultdict(list)
    counted = set()
    for call in calls_of(network, inputs, samples):
        counted.update(parameter for _, parameter in _own(call.layer))
        for part, ordinary, private in _formula_of(call.layer)(call, algorithms, ceilings):
            found[part].append(Floor(ordinary, private))
    trained = {name: p for name, p in network.named_parameters() if p.requires_grad}
    for part, private in _whole_network(list(trained.values()), samples, ceilings):
        found[part].append(Floor(0.0, private))
    floors = {part: Floor(*map(sum, zip(*each, strict=True))) for part, each in found.items()}
    return floors, [name for name, p in trained.items() if p not in counted]


def _formula_of(layer: nn.Module) -> Any:
    kind = type(layer).__name__
    if isinstance(layer, _ConvNd):
        return _convolution
    if isinstance(layer, (nn.Linear, nn.RNNBase, nn.MultiheadAttention)) or kind == "Conv1D":
        return _linear
    if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)):
        return _embedding
    return _norm_layer if "Norm" in kind else None


Rows = Iterator[tuple[str, float, float]]  # part, floors without privacy and with it


def _linear(call: Call, algorithms: Mapping[str, str], ceilings: Ceilings) -> Rows:
    """Linear layers, and the weights of recurrent layers and attention, in float32 or 16 bit.

    The ordinary step computes u and reads both factors, F = B·T·(p + d)·s bytes. The private one

    | algorithm | norms: operations, bytes | sums: operations, bytes |
    | --- | --- | --- |
    | `gradient` | u, F + B·d·p·s | none, B·d·p·s + 4·d·p (kept gradients) |
    | `width` | B·T·(T + 1)·(p + d), F | u, F + 4·d·p |
    | `input_length` | u, F; none, F if T = 1 | u, F + 4·d·p |

    `width` is half of two Gram matrices. An ordinary recurrent layer multiplies in TF32; large ones
    of its weights are packed in the private step, like a convolution of one tap.
    """
    B, s = call.samples, call.itemsize
    tokens = prod(call.given[:-1]) / B
    precision = SINGLE if s == WIDE else HALF
    is_recurrent = isinstance(call.layer, nn.RNNBase)
    ordinary = TF32 if is_recurrent and s == WIDE else precision
    for name, weight in _own(call.layer):
        if weight.dim() != 2:
            yield from _small(weight.numel(), tokens * B * weight.numel() * s, call, ceilings)
            continue
        values, features = weight.numel(), sum(weight.shape)
        u, factors = 2 * B * tokens * values, B * tokens * features * s
        algorithm = algorithms.get(f"{call.name}.{name}".lstrip("."), ACCUMULATE)
        alone = ceilings.ms(factors + values * s, u, ordinary)
        if ordinary == TF32 and tokens > 1 and tokens * values >= LEAST_ROUNDED:
            packed = factors / s * PACKED
            yield LAYOUTS, 0.0, ceilings.ms(2 * factors + packed)
            x, y = (B, weight.shape[1], tokens), (B, weight.shape[0], tokens)
            yield from _packed(x, y, 1, 1, values, packed, WIDE, alone, ceilings)
            continue
        kept = B * values * s
        if algorithm == INSTANTIATE:
            yield NORMS, 0.0, ceilings.ms(factors + kept, u, precision)
            yield SUMS, alone, 0.0
            yield KEPT, 0.0, ceilings.ms(kept + values * WIDE)
            continue
        work = B * tokens * (tokens + 1) * features if algorithm == GRAM else u
        norms = ceilings.ms(factors, 0.0 if tokens == 1 else work, precision)
        yield NORMS, 0.0, norms
        yield SUMS, alone, ceilings.ms(factors + values * WIDE, u, precision)


def _convolution(call: Call, _: Mapping[str, str], ceilings: Ceilings) -> Rows:
    """Convolutions: u = 2·B·L·taps·(C / groups)·O over L positions, x and y of X and Y values.

    Both steps lay x and y out with the channels last, (X + Y)·s read and as much written; of
    float32 the private step first reads it once more, for scales, and writes 16 bit. A depthwise
    convolution is laid out in the private step only.

    The private step's products are in 16 bit, the ordinary one's in TF32 if its layer is float32.
    Norms take u and read both operands. Where G is no larger than those, it is written, and read
    for the sum. Elsewhere the sum takes u again, and norms of few positions come from two Gram
    matrices, 2·B·L²·(taps·C + O). Of a depthwise convolution G is float32, and computed without
    matrix units.
    """
    layer: Any = call.layer
    B, s = call.samples, call.itemsize
    x, y = call.given, call.found
    if isinstance(layer, _ConvTransposeNd):
        x, y = y, x
    X, Y, weight = prod(x), prod(y), layer.weight
    L, taps = prod(y[2:]), prod(layer.kernel_size)
    if layer.bias is not None and layer.bias.requires_grad:
        yield from _small(layer.bias.numel(), prod(call.found) * s, call, ceilings)
    if not weight.requires_grad:
        return
    narrow = is_narrow(weight.shape, layer.groups)
    u = 2 * B * L * weight.numel()
    packed = s if narrow else PACKED
    scales = (X + Y) * s if packed < s else 0
    laid_out = ceilings.ms((X + Y) * 2 * s)
    repacked = ceilings.ms((X + Y) * (s + packed) + scales)
    yield LAYOUTS, 0.0 if narrow else laid_out, repacked
    values, operands = weight.numel(), (X + Y) * packed
    precision = TF32 if s == WIDE else HALF
    alone = ceilings.ms((X + Y) * s + values * s, u, SINGLE if narrow else precision)
    size = WIDE if narrow or s == WIDE else stored_dtype(weight.dtype).itemsize
    if narrow:
        kept = B * values * size
        yield NORMS, 0.0, ceilings.ms(operands + kept, u, SINGLE)
        yield SUMS, alone, 0.0
        yield KEPT, 0.0, ceilings.ms(kept + values * WIDE)
        yield VECTORS, 0.0, ceilings.ms(kept)
        return
    channels = (B, x[1], L), (B, y[1], L)
    yield from _packed(*channels, taps, layer.groups, values, operands, size, alone, ceilings)


def _packed(
    x: Sequence[float], y: Sequence[float], taps: int, groups: int, values: int, operands: float,
    size: int, alone: float, ceilings: Ceilings,
) -> Rows:  # fmt: skip
    """Norms and sums of a weight of so many values whose operands are packed in 16 bit.

    Args:
        x, y: samples, channels and positions of inputs and outputs.
        operands: bytes of both, packed.
        size: bytes of a value of G.
        alone: milliseconds of the sum without privacy.
    """
    B, _, positions = y
    L, u, kept = ceil(positions), 2 * B * positions * values, B * values * size
    if kept <= operands:
        yield NORMS, 0.0, ceilings.ms(operands + kept, u)
        yield SUMS, alone, 0.0
        yield KEPT, 0.0, ceilings.ms(kept + values * WIDE)
        return
    geometry = Geometry((taps, 1, 1), (1, 1, 1), (0, 0, 0), (1, 1, 1), groups)
    sizes = torch.Size((B, x[1], L + taps - 1, 1, 1)), torch.Size((B, y[1], L, 1, 1))
    if gram.pays(layout_of(*sizes, PACKED, 1, geometry), PACKED):
        norms = 2 * B * L**2 * (taps * x[1] + y[1])
    else:
        norms = u
    yield NORMS, 0.0, ceilings.ms(operands, norms)
    yield SUMS, alone, ceilings.ms(operands + values * WIDE, u)


def _norm_layer(call: Call, _: Mapping[str, str], ceilings: Ceilings) -> Rows:
    """LayerNorm, GroupNorm and the like: inputs and output gradients are read once in both steps.

    The private one writes float32 gradients of each sample, and reads them for norms and sums.
    """
    own = [weight for _, weight in _own(call.layer)]
    values, moved = sum(w.numel() for w in own), 2 * prod(call.given) * call.itemsize
    rows = list(_small(values, moved, call, ceilings))
    yield (NORM_LAYERS, *rows[0][1:])
    yield from rows[1:]


def _embedding(call: Call, _: Mapping[str, str], ceilings: Ceilings) -> Rows:
    """Embeddings [V, d]: output gradients are read, and V·d values are written in both steps.

    The private one writes the sums of a sample's equal tokens in float32, and reads them again: at
    most one of d values for each token.
    """
    (_, weight), *_ = _own(call.layer)
    read, values = prod(call.found) * call.itemsize, weight.numel()
    runs = prod(call.given) * weight.shape[1] * WIDE
    private = ceilings.ms(read + 2 * runs + values * WIDE)
    yield EMBEDDINGS, ceilings.ms(read + values * call.itemsize), private


def _small(values: int, moved: float, call: Call, ceilings: Ceilings) -> Rows:
    """Biases, and other gradients of few values: `moved` bytes are read in both steps.

    The private one writes B of each value in float32, and reads them for the norm and the sum.
    """
    kept = call.samples * values * WIDE
    yield VECTORS, ceilings.ms(moved + values * call.itemsize), ceilings.ms(moved + kept)
    yield VECTORS, 0.0, ceilings.ms(kept)
    yield KEPT, 0.0, ceilings.ms(kept + values * WIDE)


def _whole_network(
    trained: list[nn.Parameter], samples: int, ceilings: Ceilings
) -> Iterator[tuple[str, float]]:
    """Noise reads float32 sums and writes gradients; coefficients are made of B norms each."""
    yield NOISE, ceilings.ms(sum(p.numel() * (WIDE + p.itemsize) for p in trained))
    yield COEFFICIENTS, ceilings.ms(samples * len(trained) * WIDE)
