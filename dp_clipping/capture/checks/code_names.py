"""Finds the module-level variables that a function's code names, and which module it is of."""

import dis
import sys
import sysconfig
from functools import cache, lru_cache
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

OTHERS = {"torch", "dp_clipping", "ddp", "opacus", "builtins", "collections", "logging", "enum"}
"""Packages whose objects are not looked into."""
LIBRARIES = ("site-packages", "dist-packages")
STANDARD = sysconfig.get_path("stdlib")


class Named(NamedTuple):
    """Names that a function's code uses, with those of functions inside it.

    Attributes:
        read: global variables that it reads.
        written: those that it binds or deletes.
        attributes: attribute names; among them are variables of imported modules.
    """

    read: frozenset[str]
    written: frozenset[str]
    attributes: frozenset[str]


@lru_cache(maxsize=4096)
def names_in(code: CodeType) -> Named:
    """Returns the names that a function's code uses."""
    read: set[str] = set()
    written: set[str] = set()
    attributes: set[str] = set()
    for one in dis.get_instructions(code):
        if one.opname == "LOAD_GLOBAL":
            read.add(one.argval)
        elif one.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            written.add(one.argval)
        elif one.opname.endswith(("_ATTR", "_METHOD")):
            attributes.add(one.argval)
    for part in code.co_consts:
        if isinstance(part, CodeType):
            inner = names_in(part)
            read |= inner.read
            written |= inner.written
            attributes |= inner.attributes
    return Named(frozenset(read), frozenset(written), frozenset(attributes))


def is_data(value: Any) -> bool:
    """Returns whether the value is neither a function nor a class nor a module."""
    return not isinstance(
        value, FunctionType | BuiltinFunctionType | MethodType | ModuleType | type
    )


def function_of(value: Any) -> FunctionType | None:
    """Returns the function of a method as its class holds it; None: it is something else."""
    value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    return value if isinstance(value, FunctionType) else None


def is_users_function(function: FunctionType) -> bool:
    """Returns whether its code is no library's."""
    return not _is_other(function.__module__) and not _is_library(function.__code__.co_filename)


@cache
def is_users_module(name: str) -> bool:
    """Returns whether a module, by its name, is neither PyTorch's nor an installed library's."""
    if name == "__main__":
        return True
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is None and name.partition(".")[0] in sys.stdlib_module_names:
        return False
    return not _is_other(name) and not _is_library(file or "")


def _is_other(module: str | None) -> bool:
    return (module or "").partition(".")[0] in OTHERS


@cache
def _is_library(file: str) -> bool:
    return file.startswith(STANDARD) or any(f"/{name}/" in file for name in LIBRARIES)
