"""Which files of a package use interfaces of PyTorch that have no public name."""

import ast
from collections.abc import Iterator
from pathlib import Path

from torch import nn

ROOT = Path(__file__).parents[2]
PACKAGES = ("ddp", "dp_clipping")
COMPATIBILITY = "torch_compat.py"
OF_MODULES = set(vars(nn.Module()))
PYTHON = {"_fields", "_make", "_replace"}  # of named tuples


def private_uses(package: str) -> list[str]:
    """`file:line: name` of each attribute or import with an underscore that is not our own.

    `_x` is our own if a class or function of that name, or an assignment `anything._x = ..`,
    stands in the package, and read through `self`. `torch_compat.py` is left out.
    """
    trees = {path: ast.parse(path.read_text()) for path in (ROOT / package).rglob("*.py")}
    nodes = [(path, node) for path, tree in trees.items() for node in ast.walk(tree)]
    own = PYTHON.union(*(_defined(node) for _, node in nodes))
    return [
        f"{path.relative_to(ROOT)}:{node.lineno}: {name}"
        for path, node in nodes
        if path.name != COMPATIBILITY
        for name in _used(node)
        if _is_private(name) and (name not in own or name in _of_others(node))
    ]


def _of_others(node: ast.AST) -> set[str]:
    """Names that are PyTorch's own unless `self` has them."""
    is_self = isinstance(node, ast.Attribute) and getattr(node.value, "id", None) == "self"
    return set() if is_self else OF_MODULES


def imported_by(file: str) -> list[str]:
    tree = ast.parse((ROOT / file).read_text())
    return [name for node in ast.walk(tree) for name in _imported(node)]


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def _defined(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        yield node.attr
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id


def _used(node: ast.AST) -> Iterator[str]:
    """Names of attributes, also as `getattr` and `hasattr` take them, and parts of imports."""
    if isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.Call) and getattr(node.func, "id", None) in ("getattr", "hasattr"):
        yield from (a.value for a in node.args[1:2] if isinstance(a, ast.Constant))
    for name in _imported(node):
        if name.partition(".")[0] not in PACKAGES:
            yield from name.split(".")


def _imported(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
