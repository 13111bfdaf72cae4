"""Checks an exercise: `ddp-exercise check NAME my_file.py`.

One line per property. The exit status is 0 if all are right, 1 if one is not, 2 for a wrong
command.
"""

import ast
import sys
from collections.abc import Sequence
from pathlib import Path

from ddp_by_hand.exercises import EXERCISES, command
from ddp_by_hand.exercises.judge import Ranks, Result, judge, load_check
from ddp_by_hand.measure.command_line import ending_quietly
from ddp_by_hand.torch_versions import warn_if_untested


@ending_quietly
def main(arguments: Sequence[str]) -> int:
    try:
        exercise, solution = parse(arguments)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    missing = [name for name in wanted(exercise) if name not in solution.read_text()]
    if missing:
        print(
            f"{solution} does not define {', '.join(missing)}: start from what "
            f"`{command()} start {arguments[0]} FILE` writes",
            file=sys.stderr,
        )
        return 2
    warn_if_untested()  # not every exercise imports `ddp`, which warns
    ranks = Ranks(max(load_check(exercise).WORLD_SIZES))
    results = []
    try:
        for result in judge(exercise, solution, ranks):
            print(show(result), flush=True)
            results.append(result)
    finally:
        ranks.close()
    right = sum(r.verdict == "right" for r in results)
    print(f"{right} of {len(results)} right")
    return int(right < len(results))


def parse(arguments: Sequence[str]) -> tuple[str, Path]:
    """Returns the folder of the exercise, and the learner's file.

    Raises:
        ValueError: one line that says what to type.
    """
    if len(arguments) != 2:
        raise ValueError(
            f"usage: {command()} check NAME my_file.py   (NAME: {', '.join(EXERCISES)})"
        )
    name, path = arguments[0], Path(arguments[1])
    if name not in EXERCISES:
        raise ValueError(f"there is no exercise {name!r}: choose from {', '.join(EXERCISES)}")
    if not path.is_file():
        raise ValueError(f"there is no file {path}: {command()} start {name} {path} writes it")
    return EXERCISES[name], path


def wanted(exercise: str) -> list[str]:
    """Returns the names that the starter defines at its top level and the check uses."""
    folder = Path(__file__).parent / exercise
    starter = ast.parse((folder / "starter.py").read_text())
    names = [node.name for node in starter.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    check = (folder / "check.py").read_text()
    return [name for name in names if f"solution.{name}" in check or f'"{name}"' in check]


def show(result: Result) -> str:
    line = f"{result.verdict:<8}{result.text}"
    return f"{line}: {result.why}" if result.why else line


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
