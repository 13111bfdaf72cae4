"""The site's reference, docs/api/, has every public name, and each name in it is there."""

import re
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType
from typing import Any

import pytest

import ddp
import dp_clipping
from dp_clipping import PrivacyEngine

ROOT = Path(__file__).parents[1]
ENTRY = re.compile(r"^::: (\S+)\n(?:    options:\n((?:      .+\n)+))?", re.MULTILINE)
DEPRECATED = {"release"}


def entries() -> dict[str, list[str]]:
    """Returns path -> members of all that the pages show."""
    return {
        path: re.findall(r"\w+", (re.search(r"members: \[(.*)\]", options or "") or ["", ""])[1])
        for page in sorted((ROOT / "docs/api").glob("*.md"))
        for path, options in ENTRY.findall(page.read_text() + "\n")
    }


ENTRIES = entries()


def thing(path: str) -> Any:
    """Returns what a dotted path names."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError:
        return resolve_name(path)


def names_of(module: ModuleType) -> list[str]:
    return [f"{module.__name__}.{name}" for name in module.__all__]


@pytest.mark.parametrize("path", ENTRIES)
def test_what_the_reference_names_is_there(path):
    owner = thing(path)
    missing = [member for member in ENTRIES[path] if not hasattr(owner, member)]
    assert not missing


def integrations() -> list[ModuleType]:
    folder = ROOT / "dp_clipping/integrations"
    with_names = [p.stem for p in folder.glob("*.py") if "\n__all__ = " in p.read_text()]
    return [pytest.importorskip(f"dp_clipping.integrations.{name}") for name in with_names]


def test_every_public_name_and_method_is_in_the_reference():
    found = [thing(path) for path in ENTRIES]
    modules = [ddp, dp_clipping, *integrations()]
    assert len(modules) == 4
    missing = [
        name for module in modules for name in names_of(module) if not any(
            thing(name) is one for one in found
        )
    ]  # fmt: skip
    assert not missing
    (shown,) = [ENTRIES[path] for path in ENTRIES if thing(path) is PrivacyEngine]
    assert {name for name in dir(PrivacyEngine) if not name.startswith("_")} - DEPRECATED == set(
        shown
    )
