"""How this program was started: under which name, and as one of several ranks or alone.

It needs no import that takes long, as `lm.runtime` does.
"""

import os
import sys
from pathlib import Path

LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR")
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


def launched() -> bool:
    """Returns whether torchrun, or another launcher, started this process as one of several."""
    return all(variable in os.environ for variable in LAUNCH_VARIABLES)


def is_first_of_host() -> bool:
    """Returns whether this process prints for its host; True without a launcher."""
    return not launched() or int(os.environ.get("LOCAL_RANK", os.environ["RANK"])) == 0
