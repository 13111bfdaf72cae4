"""Each module has tests of its name, at the same place below tests/. Folders are short."""

import ast
from pathlib import Path

import pytest

from tests.conftest import LONGEST

ROOT = Path(__file__).parents[1]
WITHOUT = {  # protocols: nothing runs
    "dp_clipping/layers/recorder.py", "dp_clipping/step/steppable.py",
}  # fmt: skip
MOST_MODULES = 12  # of a folder
PACKAGES = ("ddp", "dp_clipping")
FOLDERS = [p.parent for name in PACKAGES for p in sorted((ROOT / name).rglob("__init__.py"))]
MODULES = sorted(
    str(path.relative_to(ROOT))
    for package in PACKAGES
    for path in (ROOT / package).rglob("*.py")
    if path.stem != "__init__"
)


def test_few_have_none():
    assert len(WITHOUT) <= 5
    assert set(MODULES) >= WITHOUT


@pytest.mark.parametrize("module", [m for m in MODULES if m not in WITHOUT])
def test_a_module_has_tests_of_its_name(module):
    place = module.replace("internals/", "")  # which a first reading skips, and no test does
    path = ROOT / "tests" / Path(place).with_name(f"test_{Path(place).name}")
    assert path.exists(), f"{module} has no {path.relative_to(ROOT)}"
    names = [n.name for n in ast.walk(ast.parse(path.read_text())) if hasattr(n, "name")]
    assert any(name.startswith("test_") for name in names)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_a_folder_is_read_at_a_glance(folder):
    modules = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    assert len(modules) <= MOST_MODULES, sorted(modules)


def test_the_longest_files_are_there():
    assert all((ROOT / file).is_file() for file in LONGEST)
