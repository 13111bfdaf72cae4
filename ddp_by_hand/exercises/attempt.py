"""Tries one property of a solution on one rank; this module runs inside the ranks.

A check is a list of functions, the properties, that take a `Rank` and raise `Wrong` if the solution
does not have the property. Their docstrings are what the learner reads.
"""

import importlib
import importlib.util
import re
import sys
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist

from ddp_by_hand.exercises.record import Record
from ddp_by_hand.lm.rank_pool import Context

# What gloo says when a rank is missing, is gone, or sends another size.
UNMATCHED = re.compile(r"[Tt]imed out|[Tt]imeout|[Cc]onnection (closed|reset)|gloo/transport")


class Wrong(Exception):
    """Raised if the solution lacks the property; the message says why and where to look."""


@dataclass(frozen=True)
class Rank:
    """The rank on which a property runs; the default process group exists."""

    rank: int
    world_size: int
    solution: ModuleType
    record: Record


@dataclass(frozen=True)
class Try:
    """A property to check on a file, and the address where the ranks connect."""

    check: str
    number: int
    solution: Path
    folder: Path
    patience_s: float

    def log(self, rank: int) -> Path:
        return self.folder / f"rank_{rank}.jsonl"


@dataclass(frozen=True)
class Verdict:
    """Outcome of an attempt: `kind` is right, wrong, blank, raised or stalled; `text` says why."""

    kind: str
    text: str = ""


def attempt(context: Context, task: Try) -> Verdict:
    """Tries a property with a new process group and a new module, and returns the verdict."""
    if dist.is_initialized():
        dist.destroy_process_group()
    record = Record(task.log(context.rank))
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(task.folder / "store"), context.world_size),
            rank=context.rank,
            world_size=context.world_size,
            timeout=timedelta(seconds=task.patience_s),
        )
        with record.patched(), torch.enable_grad():
            solution = load(task.solution)
            check = importlib.import_module(task.check)
            check.PROPERTIES[task.number](Rank(context.rank, context.world_size, solution, record))
    except Wrong as wrong:
        return Verdict("wrong", str(wrong))
    except NotImplementedError as blank:
        return Verdict("blank", f"{blank or 'a blank'}{place(blank, task.solution)}")
    except (Exception, SystemExit) as error:
        return judge_error(error, task.solution)
    return Verdict("right")


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("solution", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["solution"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def judge_error(error: BaseException, solution: Path) -> Verdict:
    where = place(error, solution)
    if UNMATCHED.search(str(error)):
        return Verdict("stalled", where)
    first_line = (str(error).splitlines() or [""])[0]
    return Verdict("raised", f"{type(error).__name__}: {first_line}{where}")


def place(error: BaseException, solution: Path) -> str:
    """Returns ` (my_file.py, line 12)`, the innermost line of the learner's own file."""
    if isinstance(error, SyntaxError) and error.filename == str(solution):
        return f" ({solution.name}, line {error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(solution)]
    return f" ({solution.name}, line {lines[-1]})" if lines else ""
