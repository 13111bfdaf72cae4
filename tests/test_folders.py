"""Folders are short."""

from pathlib import Path

import pytest

from tests.conftest import LONGEST

ROOT = Path(__file__).parents[1]
MOST_MODULES = 12  # of a folder
PACKAGES = ("ddp", "dp_clipping")
FOLDERS = [p.parent for name in PACKAGES for p in sorted((ROOT / name).rglob("__init__.py"))]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_a_folder_is_read_at_a_glance(folder):
    modules = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    assert len(modules) <= MOST_MODULES, sorted(modules)


def test_the_longest_files_are_there():
    assert all((ROOT / file).is_file() for file in LONGEST)
