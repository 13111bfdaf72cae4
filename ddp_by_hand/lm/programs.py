"""The names under which programs are started: their modules, and scripts that stand for them."""

import sys
from pathlib import Path

SCRIPTS = ("benchmark_ddp.py", "ddp-benchmark", "ddp-exercise", "dp-verify")


def program_name(module: str) -> str:
    """Returns the name of the script that was started, or else that of the program's module."""
    name = Path(sys.argv[0]).name
    return name if name in SCRIPTS else module


def program_words(module: str) -> list[str]:
    """Returns what is typed to start this program, without arguments."""
    name = program_name(module)
    if name == module:
        return ["python", "-m", module]
    return ["python", sys.argv[0]] if name.endswith(".py") else [name]
