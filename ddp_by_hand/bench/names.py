"""Names of implementations in the table, in files and in the results.

A plug-in, `path/to/file.py:ClassName`, has the name of its class where that is unique; else of file
and class, then with as many folders as make it unique. A plug-in that is given twice gets a number
from the second time on. `NAME+OPTION` is an implementation with an option on.
"""

import functools
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from ddp import IMPLEMENTATIONS
from ddp_by_hand.bench.sharded import SHARDED

_NUMBER, _OPTION = "#", "+"
_RESERVED = frozenset({*IMPLEMENTATIONS, *SHARDED})


def is_plugin(name: str) -> bool:
    return ":" in name


def plain(name: str) -> str:
    """Returns the implementation's name for `ddp.wrap`: without a number and options."""
    path, separator, class_name = name.rpartition(":")
    return path + separator + class_name.partition(_NUMBER)[0].partition(_OPTION)[0]


def options_in(name: str) -> list[str]:
    """Returns the options of `ddp.wrap` that a name turns on: `ddp+find_unused_parameters`."""
    return class_of(name).partition(_NUMBER)[0].split(_OPTION)[1:]


def plugin_file(name: str) -> Path | None:
    """Returns the absolute path of a plug-in's file; None for a built-in implementation."""
    return Path(plain(name).rpartition(":")[0]).absolute() if is_plugin(name) else None


def class_of(name: str) -> str:
    """Returns the name itself, or that of a plug-in's class, with its number."""
    return name.rpartition(":")[2]


def numbered(names: Sequence[str]) -> list[str]:
    """Returns `names` with `#2` behind a plug-in that is given for the second time, and so on."""
    seen: Counter = Counter()
    found = []
    for name in names:
        seen[_identity(name)] += 1
        number = seen[_identity(name)]
        found.append(f"{name}{_NUMBER}{number}" if is_plugin(name) and number > 1 else name)
    return found


@functools.cache
def titles(names: tuple[str, ...]) -> dict[str, str]:
    """Returns each implementation's name in table, pictures and files of traces.

    Titles differ, also as names of files (`file_stem`), whatever the case of their letters.
    """
    spellings = {_identity(name): _spellings(name) for name in names if is_plugin(name)}
    found = {}
    for name in names:
        found[name] = name
        if is_plugin(name):
            own = spellings[_identity(name)]
            others = {_bare(title) for title in _RESERVED}
            others |= {_bare(t) for more in spellings.values() if more is not own for t in more}
            title = next((title for title in own if _bare(title) not in others), own[-1])
            found[name] = title + name[len(plain(name)) :]
    return found


def file_stem(title: str) -> str:
    return re.sub(r"[^\w.-]", "_", title)


def _identity(name: str) -> tuple[Path | None, str]:
    """Returns a key that is equal for all ways of naming one class of one file."""
    file = plugin_file(name)
    return file and file.resolve(), class_of(plain(name))


def _spellings(name: str) -> list[str]:
    """Lists names of a class, shortest first: `Mine`, `file.Mine`, `folder/file.Mine` ..."""
    file, class_name = _identity(name)
    folders = file.parts[1:-1]
    long = [
        f"{'/'.join((*folders[len(folders) - depth :], file.stem))}.{class_name}"
        for depth in range(len(folders) + 1)
    ]
    return [class_name, *long]


def _bare(title: str) -> str:
    return file_stem(title).casefold()
