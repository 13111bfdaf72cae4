"""Opens trees of arguments and outputs as far as tensors are in them.

PyTorch opens tuples, lists, dicts and what is registered with it. Other mappings, as Hugging Face's
`BatchEncoding` is one, and dataclasses are opened here.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dp_clipping.torch_compat import PLAIN_LEAVES, tree_flatten, tree_unflatten
from dp_clipping.trials.holders import held_by, holding

HOLDS_ITSELF = (
    "{what} of a batch holds itself, perhaps as the parent of what it holds, so its samples cannot "
    "be taken apart: give the model and the criterion the tensors themselves, as model(node.x)"
)


def opened(tree: Any, within: tuple = ()) -> tuple[list[Any], Any]:
    """Returns the leaves of a tree and its structure.

    Two structures are equal if their trees have the same containers and keys.

    Args:
        within: the mappings and dataclasses that hold the tree.

    Raises:
        ValueError: naming the type of one that holds itself.
    """
    leaves, structure = tree_flatten(tree)
    if PLAIN_LEAVES.issuperset(map(type, leaves)):
        return leaves, structure
    found: list[Any] = []
    holders: list[_Holder | None] = []
    for x in leaves:
        held = {} if isinstance(x, Tensor) else held_by(x)
        if held:
            if any([x is outer for outer in within]):
                raise ValueError(HOLDS_ITSELF.format(what=f"a {type(x).__name__}"))
            inner, parts = opened(list(held.values()), (*within, x))
            holders.append(_Holder(x, tuple(held), parts))
            found += inner
        else:
            holders.append(None)
            found.append(x)
    return found, _Opened(structure, tuple(holders)) if any(holders) else structure


def closed(leaves: Iterable[Any], structure: Any) -> Any:
    """Returns the tree of this structure, as `opened` has returned it, with other leaves."""
    if not isinstance(structure, _Opened):
        return tree_unflatten(leaves, structure)
    left = iter(leaves)
    return tree_unflatten(
        [next(left) if one is None else one.with_parts(left) for one in structure.holders],
        structure.outer,
    )


class _Holder:
    """A mapping or a dataclass without what it holds.

    Args:
        keys: of what it holds.
        parts: the structure of that, as a list.
    """

    def __init__(self, one: Any, keys: tuple, parts: Any):
        self._is, self._keys, self._parts = (type(one), keys, parts), keys, parts
        self._empty = holding(one, dict.fromkeys(keys))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Holder) and self._is == other._is

    def __hash__(self) -> int:
        return hash(self._is)

    def with_parts(self, leaves: Iterator[Any]) -> Any:
        """Returns one that holds the next of some leaves."""
        held = zip(self._keys, closed(leaves, self._parts), strict=True)
        return holding(self._empty, dict(held))


@dataclass(frozen=True)
class _Opened:
    """A structure of PyTorch's, some leaves of which are opened.

    Attributes:
        outer: that of PyTorch.
        holders: what its leaves are; None for one that is not opened.
    """

    outer: Any
    holders: tuple[_Holder | None, ...]
