"""Bags: samples whose ids are concatenated, as `nn.EmbeddingBag(ids, offsets)` takes them.

No dimension of ids [N] counts samples: sample b has ids[offsets[b] : offsets[b + 1]]. Which of a
network's arguments are such, a plain forward shows by the arguments of the layers. The result is
stored, and used for all later arguments of the same structure.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dp_clipping.layers.batch_layout import rows_of_bags

ROWS = "give it ids [batch, tokens], padded with padding_idx, which no bag counts"
UNMATCHED = (
    "{name} (EmbeddingBag) is called with offsets, and its {what} are no argument of the model as "
    "it was given, so whose ids they are cannot be told: hand both through, as in def "
    "forward(self, ids, offsets): return self.bag(ids, offsets), and let collate_fn return (ids, "
    f"offsets, label); or {ROWS}"
)
NOT_ADDED = (
    "{name} ({kind}, mode {mode!r}) is called with offsets, for which sums and means of "
    f"nn.EmbeddingBag itself have per-sample gradients: use mode='sum' or 'mean', or {ROWS}"
)


NAMES = "input", "offsets", "per_sample_weights"  # of arguments of nn.EmbeddingBag


@dataclass(frozen=True)
class Bags:
    """Positions, among the flattened arguments (leaves), of tensors that hold bags.

    There is one bag per sample.

    Attributes:
        ids: the position of the ids [N].
        offsets: the position of the offsets [B] or [B + 1].
        weights: the position of the weights [N], one per id; None if there are none.
        has_last: whether the offsets end with the number of ids.
    """

    ids: int
    offsets: int
    weights: int | None = None
    has_last: bool = False

    @property
    def leaves(self) -> set[int]:
        return {self.offsets, *self.of_ids}

    @property
    def of_ids(self) -> list[int]:
        """Returns the positions of the leaves with a row for each id."""
        return [self.ids] if self.weights is None else [self.ids, self.weights]

    def at(self, places: Mapping[int, int]) -> Bags:
        """Returns the same bags with other positions: old position -> new one."""
        weights = None if self.weights is None else places[self.weights]
        return Bags(places[self.ids], places[self.offsets], weights, self.has_last)

    def size(self, leaves: Sequence[Any]) -> int:
        """Returns the number of bags."""
        return max(0, len(leaves[self.offsets]) - self.has_last)

    def opened(self, leaves: Sequence[Any]) -> dict[int, Tensor]:
        """Returns position -> leaf with a row for each bag: its length, or its ids and zeros."""
        given = [leaves[n] for n in self.of_ids]
        lengths, rows = rows_of_bags(given, leaves[self.offsets], self.has_last)
        return {self.offsets: lengths, **dict(zip(self.of_ids, rows, strict=True))}

    def closed(self, leaves: Any) -> dict[int, Tensor]:
        """Returns position -> leaf of bags with these rows, which are at the same positions."""
        lengths = leaves[self.offsets]
        ends = lengths.cumsum(0).to(lengths.dtype)
        offsets = torch.cat((ends.new_zeros(1), ends))[: len(lengths) + self.has_last]
        found = {self.offsets: offsets}
        for n in self.of_ids:
            rows, own = leaves[n], lengths.to(leaves[n].device)
            found[n] = rows[torch.arange(rows.shape[1], device=rows.device) < own[:, None]]
        return found


def place_of(x: Tensor, leaves: list[Any]) -> int | None:
    """Returns the position of the leaf that x is, or is a view or copy of; None if not unique."""
    same = [n for n, y in enumerate(leaves) if y is x]
    if not same:
        alike = [(n, y) for n, y in enumerate(leaves) if isinstance(y, Tensor)]
        alike = [(n, y) for n, y in alike if y.shape == x.shape and y.device == x.device]
        same = [n for n, y in alike if y.data_ptr() == x.data_ptr() and len(x)]
        same = same or [n for n, y in alike if torch.equal(y.to(x.dtype), x)]
    return same[0] if len(same) == 1 else None


class KnownBags:
    """The known bags of a network, by the structure of its arguments.

    Args:
        flatten: a tree of arguments -> its leaves and its structure, as a `Batch` has them.

    Attributes:
        modules: its `nn.EmbeddingBag` layers, by name; without one there are no bags.
    """

    def __init__(self, network: nn.Module, flatten: Callable[[Any], tuple[list[Any], Any]]):
        self._flatten = flatten
        modules = network.named_modules()
        self.modules = [(name, m) for name, m in modules if isinstance(m, nn.EmbeddingBag)]
        self._known: dict[Hashable, tuple[Bags, ...]] = {}

    def forget(self) -> None:
        self._known.clear()

    def _key(self, args: tuple, kwargs: dict) -> Hashable:
        leaves, structure = self._flatten((args, kwargs))
        return structure, *(x.dim() if isinstance(x, Tensor) else None for x in leaves)

    def of(self, args: tuple, kwargs: dict) -> tuple[Bags, ...] | None:
        """Returns the bags in these arguments; None if no such arguments have been seen."""
        return self._known.get(self._key(args, kwargs))

    def learn(
        self, args: tuple, kwargs: dict, run: Callable[..., Any], is_empty: bool = False
    ) -> None:
        """Finds, in a plain forward, which arguments the layers receive.

        Args:
            run: runs it, with these arguments.
            is_empty: one row stands for no sample, and ids that stand for none are put in as well.

        Raises:
            ValueError: the arguments do not determine a layer's bags, or they have no arithmetic.
        """
        leaves = self._flatten((args, kwargs))[0]
        found: list[Bags] = []
        with ExitStack() as stack:
            for name, module in self.modules:
                note = partial(_note, name or "the network", leaves, found, is_empty)
                hook = module.register_forward_pre_hook(note, with_kwargs=True)
                stack.callback(hook.remove)
            run(*args, **kwargs)
        bags = tuple(dict.fromkeys(found))
        offsets = {one.offsets for one in bags}
        for leaf in {n for one in bags for n in one.of_ids}:
            owners = {(one.offsets, one.has_last) for one in bags if leaf in one.of_ids}
            if len(owners) > 1 or leaf in offsets:
                raise ValueError(
                    "an argument of the model is taken for ids of nn.EmbeddingBag with offsets in "
                    "two ways, so whose they are cannot be told: give each layer ids and offsets "
                    "of its own"
                )
        self._known[self._key(args, kwargs)] = bags


def refuse_offsets(module: nn.EmbeddingBag, args: tuple, kwargs: dict) -> None:
    """Raises ValueError for bags with offsets, in a sharded network; a hook before a forward."""
    ids = args[0] if args else kwargs.get("input")
    if isinstance(ids, Tensor) and ids.dim() == 1:
        raise ValueError(
            "EmbeddingBag is called with offsets in a sharded network, where samples need a row "
            "each: give it ids [batch, tokens], padded with padding_idx, which no bag counts"
        )


def _note(
    name: str,
    leaves: list[Any],
    found: list[Bags],
    is_empty: bool,
    module: nn.EmbeddingBag,
    args: tuple,
    kwargs: dict,
) -> tuple[tuple, dict] | None:
    """Records the bags that a layer is called with; a hook before its forward."""
    given = dict(zip(NAMES, args, strict=False)) | kwargs
    ids, offsets, weights = tensors = [given.get(one) for one in NAMES]
    if not isinstance(ids, Tensor) or not isinstance(offsets, Tensor) or ids.dim() != 1:
        return None
    handle = vars(module).get("_private")
    if handle is not None and handle.kind != "embedding_bag":
        kind = type(module).__name__
        raise ValueError(NOT_ADDED.format(name=name, kind=kind, mode=module.mode))
    has_last = bool(module.include_last_offset)
    places: list[Any] = [None if x is None else place_of(x, leaves) for x in tensors]
    for what, x, place in zip(("ids", *NAMES[1:]), tensors, places, strict=True):
        if x is not None and place is None:
            raise ValueError(UNMATCHED.format(name=name, what=what))
    found.append(Bags(places[0], places[1], places[2], has_last))
    if not is_empty:
        return None
    size = max(1, len(offsets) - has_last)
    starts = offsets.new_zeros(size + has_last)
    starts[size:] = 1
    weights = None if weights is None else weights.new_zeros(1)
    return (ids.new_zeros(1), starts, weights), {}
