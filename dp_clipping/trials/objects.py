"""What objects hold at one moment, to see what a call leaves in them and to put it back."""

from collections.abc import Iterator
from itertools import chain
from operator import is_, methodcaller
from typing import Any

import torch
from torch import Tensor

from dp_clipping.torch_compat import PLAIN_LEAVES, tree_leaves, version_of
from dp_clipping.trials.places import Place, Places

COPY = methodcaller("copy")


class Snapshot:
    """What places hold at one moment. Each step makes some, and compares them.

    Attributes:
        values: what the dicts held; see `Places.values`.
        sizes: how many keys each of them had.
    """

    def __init__(self, places: Places):
        self.places = places
        self.renew()

    def renew(self) -> None:
        """Takes the present for its moment."""
        places = self.places
        self.sizes, self.values = list(map(len, places.containers)), places.values()
        self._others = list(map(COPY, places.collections))

    def pairs(self) -> list[tuple[Place, Any]]:
        """Returns each place, and a copy of what it held."""
        held = [*self.places.copies(self.values), *self._others]
        return list(zip([*self.places.dicts, *self.places.others], held, strict=True))

    def is_same(self) -> bool:
        """Returns whether the places hold the same objects now."""
        places = self.places
        sizes = list(map(len, chain(places.containers, places.collections)))
        held = chain(places.values(), *places.collections)
        return sizes == [*self.sizes, *map(len, self._others)] and all(
            map(is_, held, chain(self.values, *self._others))
        )

    def differing(self) -> list[tuple[Place, Any]]:
        """Returns those that hold other objects now."""
        if self.is_same():
            return []
        return [(place, copy) for place, copy in self.pairs() if not place.is_as(copy)]


class Objects(Snapshot):
    """A snapshot of what is held by the objects that are reachable from some roots.

    Parameters of modules are left out.

    Args:
        with_values: tensors keep their values, too.

    Attributes:
        tensors: those that are held.
    """

    def __init__(self, *roots: Any, with_values: bool = False):
        super().__init__(Places(roots, with_parameters=False))
        self.tensors = [named.tensor for named in self.places.tensors]
        kept = [x for x in self.tensors if with_values and not x.is_inference()]
        self._values = [(x, version_of(x), x.detach().clone()) for x in kept]

    def put_back(self) -> None:
        """Gives the objects what they held."""
        for place, copy in self.differing():
            place.put_back(copy)
        with torch.no_grad():
            for x, version, value in self._values:
                if version_of(x) != version:
                    x.copy_(value)

    def show(self, tensors: dict[int, Tensor]) -> None:
        """Puts other tensors in the place of those with these ids."""
        for place, copy in Snapshot(self.places).pairs():
            if isinstance(copy, dict):
                shown: Any = {key: exchanged(value, tensors) for key, value in copy.items()}
            else:
                shown = [exchanged(value, tensors) for value in copy]
            if not place.is_as(shown):
                place.put_back(shown)

    def left_since(self, before: "Objects") -> list[Tensor]:
        """Returns the tensors that were not in these objects before."""
        known = set(map(id, before.tensors))
        return [x for x in self.tensors if id(x) not in known]


def exchanged(value: Any, tensors: dict[int, Tensor]) -> Any:
    """Returns a value with others in the place of tensors with these ids, in tuples too."""
    if isinstance(value, Tensor):
        return tensors.get(id(value), value)
    if not isinstance(value, tuple) or isinstance(value, torch.Size):
        return value
    parts = [exchanged(part, tensors) for part in value]
    if all(new is old for new, old in zip(parts, value, strict=True)):
        return value
    return value._make(parts) if hasattr(value, "_make") else type(value)(parts)


def hold_objects(args: tuple, kwargs: dict) -> bool:
    """Returns whether arguments of a call are more than tensors, numbers and strings."""
    return not {*map(type, args), *map(type, kwargs.values())} <= PLAIN_LEAVES


def refuse_iterators(name: str, *trees: Any) -> None:
    """Refuses arguments that can be read once only.

    Raises:
        ValueError: naming the module.
    """
    for leaf in tree_leaves(trees):
        if isinstance(leaf, Iterator):
            raise ValueError(
                f"{name or 'the network'} is given an iterator ({type(leaf).__name__}), which can "
                "be read once, and its forward is run several times to see where the samples are: "
                "give it a list, as list(iterator)"
            )
