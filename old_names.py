"""Old names, in a clone: `experiments.price` is `ddp_by_hand.experiments.price`, loaded once.

The files beside this one that have a room's name call `keep`. They are not installed.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import find_spec, spec_from_file_location
from types import ModuleType

_ROOMS: set[str] = set()


def keep(room: str) -> None:
    """Makes the module that is being imported, and those below it, other names of the new ones."""
    if not _ROOMS:
        sys.meta_path.insert(0, _Finder())
    _ROOMS.add(room)
    sys.modules[room] = import_module(f"ddp_by_hand.{room}")


class _Finder:
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        room, _, below = name.partition(".")
        found = find_spec(f"ddp_by_hand.{name}") if below and room in _ROOMS else None
        if found is None:
            return None
        return spec_from_file_location(
            name,
            found.origin,
            loader=_Loader(name, found.origin),
            submodule_search_locations=found.submodule_search_locations,
        )


class _Loader(SourceFileLoader):
    """Reads the source for `python -m`; an import is answered with the module of the new name."""

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = import_module(f"ddp_by_hand.{module.__name__}")
