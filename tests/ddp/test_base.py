"""The common base stays short enough to be read with the second step of the course."""

import ast
from pathlib import Path

import pytest

import ddp
from tests.support.differences import REDUCED, REFUSED

FOLDER = Path(ddp.__file__).parent
BASE = ["ddp.base", "ddp.schedule", "ddp.buckets"]
FLAT = [*BASE, "ddp.bucketed"]
SLICED = ["ddp.base", "ddp.schedule", "ddp.sharded.base", "ddp.sharded.layout"]
STEPPED = [*SLICED, "ddp.buckets", "ddp.sharded.slices"]
READ = {  # what a learner reads to understand a variant, and the lines that it may have
    "ddp.individual": (BASE, 350),
    "ddp.individual_v2": (BASE, 350),
    "ddp.bucketed": (BASE, 350),
    "ddp.copy_engine.variant": ([*FLAT, "ddp.copy_engine.exchange"], 476),
    "ddp.sharded.zero1": (STEPPED, 495),
    "ddp.sharded.zero2": ([*STEPPED, "ddp.sharded.zero1"], 526),
    "ddp.sharded.fsdp": ([*SLICED, "ddp.sharded.units"], 485),
    "ddp.diloco": (BASE, 461),
}
CLOSURE = 1825  # lines of all modules of the course that the first four variants import
ALL = 5295


def imports_of(path: Path) -> set[str]:
    """Modules of the course that a file imports."""
    nodes = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ImportFrom)]
    found = {n.module for n in nodes} | {f"{n.module}.{x.name}" for n in nodes for x in n.names}
    return {name for name in found if name.startswith("ddp.") and path_of(name).is_file()}


def path_of(module: str) -> Path:
    path = FOLDER.parent / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def lines_of(module: str) -> int:
    return len(path_of(module).read_text().splitlines())


def closure_of(module: str) -> set[str]:
    """The modules of the course that a module imports, transitively, itself among them."""
    found, stack = set(), [module]
    while stack:
        name = stack.pop()
        if name not in found:
            found.add(name)
            stack += imports_of(path_of(name))
    return found


@pytest.mark.parametrize("module", READ)
def test_a_variant_is_read_in_one_sitting(module: str):
    beside, lines = READ[module]
    assert sum(map(lines_of, [module, *beside])) <= lines


@pytest.mark.parametrize("name", ["synchronous", "individual", "individual_v2", "bucketed"])
def test_a_variant_needs_little_beside_it(name: str):
    assert sum(map(lines_of, closure_of(f"ddp.{name}"))) <= CLOSURE


def test_the_course_stays_short():
    assert sum(len(path.read_text().splitlines()) for path in FOLDER.rglob("*.py")) <= ALL


def test_what_is_skipped_is_said():
    for name in ("internals", "torch_compat", "buckets"):
        assert name in (ddp.__doc__ or "").partition("Skip at the first reading")[2]


def test_every_module_is_listed():
    for package in (FOLDER, FOLDER / "internals", FOLDER / "sharded" / "internals"):
        text = ast.get_docstring(ast.parse((package / "__init__.py").read_text()))
        for path in package.glob("*.py"):
            assert path.stem == "__init__" or path.name in text, path


def test_no_hook_is_on_all_modules_or_optimizers_of_the_process():
    code = "".join(path.read_text() for path in FOLDER.rglob("*.py"))
    assert "register_module_" not in code
    assert "import register_optimizer_step" not in code


def test_what_a_variant_refuses_is_a_behaviour_of_the_tests():
    code = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    for name, rows in REFUSED.items():
        assert name in ddp.IMPLEMENTATIONS
        assert all(f"\ndef {behaviour}(" in code for behaviour in rows)
    assert all(f"\ndef {behaviour}(" in code for behaviour in REDUCED)
