"""One kernel launch for many linear layers: a table holds the operands of each layer in a row.

A network has hundreds of layers. For a small layer, a launch of its own takes the host longer than
the GPU, and leaves processors idle at its end. So one launch serves several rows of the table. Each
program finds its row from the numbers of the rows' first programs, and reads the row's operands.

A product that takes the GPU longer than a launch takes the host has a launch of its own. The host
then makes the tensor descriptors, which are faster than those that a program makes (by a sixth of a
product's time on an H200).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dp_clipping.kernels.launch.tiles import (
    ALIGNMENT,
    Tile,
    default_tile,
    is_aligned,
    kept_table_on,
    readable,
    tl,
    triton,
)

if triton is not None:
    from triton.tools.tensor_descriptor import TensorDescriptor

MOST_ROWS = 128
SMALL = 1e10  # operations, below which a product is in a launch of any tile
# Of a row: left, right, result; rows and columns; strides of left and right; group; T; the number
# of products, and where their places are in the table.
WORDS = 13
ONE = (0,)  # places of a product of its own

Pair = tuple[Tensor, Tensor] | tuple[Tensor, Tensor, tuple[int, ...]]
"""Left [B, T, d] and right [B, T, p] of a product; or of several ones with the same left, whose
rights start so many elements behind the given one, which is read as it lies: its last stride is 1,
and if it is aligned, so are they. Their results are side by side [.., n, d, p]."""


@dataclass(frozen=True)
class Operands:
    """The operands of one launch, of one B and dtype.

    Attributes:
        pairs: left [B, T, d] and right [B, T, p], as the kernels can read them.
        places: of the products of each pair.
        shapes: (products, d, p) of each.
        results: shape of the results of a sample, (d, p) or (products, d, p).
        tokens: T of each.
        addresses: of left and right of each in turn.
        strides: of sample and token of left, then of right, of each in turn.
        described: the bulk copy engine takes all of them.
    """

    pairs: list[tuple[Tensor, Tensor]]
    places: list[tuple[int, ...]]
    shapes: list[tuple[int, int, int]]
    results: list[tuple[int, ...]]
    tokens: list[int]
    addresses: list[int]
    strides: list[int]
    described: bool


@dataclass(frozen=True)
class Table:
    """Rows of one grouped launch, on the device.

    Attributes:
        words: [rows · WORDS] int64, and places.
        starts: [rows + 1] int64, the number of each row's first program, then `programs`.
        programs: the number of programs of the launch.
    """

    words: Tensor
    starts: Tensor
    programs: int


def operands_of(pairs: Sequence[Pair]) -> Operands:
    """Returns the operands of a launch, any of which may have any strides.

    Reads size, address and strides of each operand once, because a step has hundreds of them.
    """
    size = pairs[0][0].element_size()
    ready, places, shapes, tokens = [], [], [], []
    results: list[tuple[int, ...]] = []
    addresses: list[int] = []
    strides: list[int] = []  # of samples and tokens
    described = True
    for pair in pairs:
        left, right = pair[0], pair[1]
        (left_b, left_t, left_x), (right_b, right_t, right_x) = left.stride(), right.stride()
        if not left_x == right_x == 1:
            left, right = readable(left), readable(right)
            (left_b, left_t, left_x), (right_b, right_t, right_x) = left.stride(), right.stride()
        is_full = 0 not in left.shape and 0 not in right.shape
        described = described and is_full and left_x == right_x == 1
        ready.append((left, right))
        _, length, width = left.shape
        shape = width, right.shape[2]
        own = ONE if len(pair) == 2 else pair[2]
        places.append(own)
        shapes.append((len(own), *shape))
        results.append(shape if own is ONE else shapes[-1])
        tokens.append(length)
        addresses += left.data_ptr(), right.data_ptr()
        strides += left_b, left_t, right_b, right_t
    described = described and is_aligned(addresses, strides, size)
    return Operands(ready, places, shapes, results, tokens, addresses, strides, described)


def table(
    operands: Operands, results: Sequence[Tensor | None], counts: Sequence[int],
    groups: Sequence[int],
) -> Table:  # fmt: skip
    """Returns the table of a launch's operands and their results."""
    at, strides = operands.addresses, operands.strides
    words: list[int] = []
    places: list[int] = [*ONE]
    first = len(results) * WORDS
    for n, (result, (count, *shape), own, group, tokens) in enumerate(
        zip(results, operands.shapes, operands.places, groups, operands.tokens, strict=True)
    ):
        words += at[2 * n : 2 * n + 2]
        words += (0 if result is None else result.data_ptr(), *shape)
        words += (*strides[4 * n : 4 * n + 4], group, tokens)
        words += count, first if own is ONE else first + len(places)
        if own is not ONE:
            places += own
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    if operands.described:
        triton.set_allocator(allocate)
    numbers = kept_table_on(operands.pairs[0][0].device, (*starts, *words, *places))
    return Table(numbers[len(starts) :], numbers[: len(starts)], starts[-1])


def launches(
    pairs: Sequence[Pair], large: float, tiles: Mapping[int, tuple[Tile, ...]],
    longest_first: bool = False,
) -> list[tuple[Sequence[int], bool]]:  # fmt: skip
    """Returns the pairs of each launch, of one B and dtype, and whether it is one large product.

    Products of another default tile have launches of their own, unless they are small. So have
    those with rows that the bulk copy engine does not take: no product of their launch is read by
    it.

    Args:
        large: operations from which on a product has a launch of its own, unless it has places.
        tiles: the kernel's tiles by the bytes of an element; none: all have the same.
        longest_first: those with most tokens come first, for programs that read all samples.
    """
    found: list[tuple[Sequence[int], bool]] = []
    small: dict[tuple, list[tuple[int, int]]] = {}
    joined: dict[tuple, tuple] = {}  # by products of any tile
    for number, pair in enumerate(pairs):
        left = pair[0]
        batch_size, tokens, width = left.shape
        columns = pair[1].shape[2]
        operations = 2.0 * batch_size * tokens * width * columns
        count = 1
        if len(pair) == 3:
            count = len(pair[2])
        elif operations >= large:
            found.append(([number], True))
            continue
        tile, size = None, left.element_size()
        is_taken = width * size % ALIGNMENT == columns * size % ALIGNMENT == 0
        alike = batch_size, left.dtype, is_taken
        if tiles and count * operations >= SMALL:
            tile = default_tile(((1, width, columns),), tiles[size])
            joined.setdefault(alike, (*alike, tile))
        key = (*alike, tile)
        if key not in small:
            small[key] = []
        small[key].append((-tokens, number))
    for key in tuple(small):
        if key[-1] is None and key[:-1] in joined:
            small[joined[key[:-1]]] += small.pop(key)
    for several in small.values():
        if longest_first:
            several.sort()
        _, numbers = zip(*several, strict=True)
        for first in range(0, len(numbers), MOST_ROWS):
            found.append((numbers[first : first + MOST_ROWS], False))
    return found


def describe(x: Tensor, block: tuple[int, int]) -> TensorDescriptor:
    """Returns a descriptor of x [B, T, n] for the bulk copy engine, made on the host."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, *block])


def allocate(size: int, alignment: int, stream: int | None) -> Tensor:
    """Returns memory in which programs write their tensor descriptors."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


if triton is not None:

    @triton.jit
    def _open(
        p_word, offset, s_b, s_t, B, T, X, DTYPE: tl.constexpr, DESCRIBED: tl.constexpr,
        BLOCK_T: tl.constexpr, BLOCK_X: tl.constexpr,
    ):  # fmt: skip
        """Returns a pointer or descriptor from which `_load_tile` reads [B, T, X]."""
        p_x = tl.load(p_word).to(tl.pointer_type(DTYPE)) + offset
        if DESCRIBED:
            x = tl.make_tensor_descriptor(
                p_x, shape=[B, T, X], strides=[s_b, s_t, 1], block_shape=[1, BLOCK_T, BLOCK_X]
            )
        else:
            x = p_x
        return x
