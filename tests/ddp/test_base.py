"""The common base stays short enough to be read with the second step of the course."""

import ast
from pathlib import Path

import ddp
from tests.support.differences import REFUSED

FOLDER = Path(ddp.__file__).parent
LINES = 250
# Beside ddp.internals: uneven data; a later step; PyTorch's names.
SKIPPED = {"ddp.join", "ddp.buckets", "ddp.torch_compat"}


def imports_of(path: Path) -> set[str]:
    """Modules of the course that a file imports."""
    nodes = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ImportFrom)]
    return {n.module for n in nodes if n.module and n.module.startswith("ddp.")}


def path_of(module: str) -> Path:
    return FOLDER.parent / (module.replace(".", "/") + ".py")


def read_for(module: str) -> set[str]:
    """What a reader opens to understand `module`: its imports, transitively, but the skipped."""
    found, stack = set(), [module]
    while stack:
        name = stack.pop()
        if name not in found and name not in SKIPPED and not name.startswith("ddp.internals"):
            found.add(name)
            stack += imports_of(path_of(name))
    return found


def test_the_second_step_is_read_in_one_sitting():
    files = read_for("ddp.individual")
    assert files == {"ddp.individual", "ddp.base", "ddp.schedule"}
    assert sum(len(path_of(name).read_text().splitlines()) for name in files) <= LINES


def test_what_is_skipped_is_said():
    for name in [*SKIPPED, "ddp.internals"]:
        skippable = (ddp.__doc__ or "").partition("Skip at the first reading")[2]
        assert name.partition(".")[2] in skippable


def test_every_module_is_listed():
    for package in (FOLDER, FOLDER / "internals"):
        text = ast.get_docstring(ast.parse((package / "__init__.py").read_text()))
        for path in package.glob("*.py"):
            assert path.stem == "__init__" or path.name in text, path


def test_every_module_has_its_tests():
    """In a file of its name: variants' rooms have their own folder, `internals` is tested here."""
    for path in FOLDER.rglob("*.py"):
        if path.stem != "__init__":
            folder = path.parent.relative_to(FOLDER)
            mirrored = Path(__file__).parent / ("" if folder.name == "internals" else folder)
            assert (mirrored / f"test_{path.stem}.py").exists(), path


def test_internals_do_not_know_the_variants():
    known = {"ddp.buckets", "ddp.schedule", "ddp.torch_compat"}
    for path in (FOLDER / "internals").glob("*.py"):
        others = {name for name in imports_of(path) if not name.startswith("ddp.internals")}
        assert others <= known, path


def test_what_a_variant_refuses_is_a_behaviour_of_the_tests():
    code = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    for name, rows in REFUSED.items():
        assert name in ddp.IMPLEMENTATIONS
        assert all(f"\ndef {behaviour}(" in code for behaviour in rows)
