"""Begins and checks exercises: `ddp-exercise`, or `python -m ddp_by_hand.exercises`.

The exit status is 0 if all is well, 1 if a property is wrong, 2 for a wrong command.
"""

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from ddp_by_hand.exercises import EXERCISES, command, starter_of
from ddp_by_hand.measure.command_line import ending_quietly


@ending_quietly
def main(arguments: Sequence[str] | None = None) -> int:
    task, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if task == "check":
        from ddp_by_hand.exercises.check import main as check  # imports torch, which takes seconds

        return check(rest)
    if task == "start" and len(rest) in (1, 2):
        return start(*rest)
    is_asked = task in ("-h", "--help")
    print(usage(), file=sys.stdout if is_asked else sys.stderr)
    return 0 if is_asked else 2


def usage() -> str:
    return (
        f"usage: {command()} start NAME [FILE]   writes the file to complete (my_NAME.py)\n"
        f"       {command()} check NAME FILE     says what is right and wrong in it\n"
        f"NAME, in order: {', '.join(EXERCISES)}"
    )


def start(name: str, file: str = "") -> int:
    """Copies a starter to a file that is not there yet."""
    path = Path(file or f"my_{name}.py")
    if name not in EXERCISES:
        error = f"there is no exercise {name!r}: choose from {', '.join(EXERCISES)}"
    elif path.exists():
        error = f"{path} is there already: name another file, {command()} start {name} FILE"
    elif not path.absolute().parent.is_dir():
        error = f"there is no folder {path.parent}: make it, or name another file"
    else:
        try:
            shutil.copyfile(starter_of(name), path)
        except OSError as failure:  # no permission, or a full disk
            error = f"{path} cannot be written: {failure.strerror}"
        else:
            print(f"{path} says what to write; then: {command()} check {name} {path}")
            return 0
    print(error, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
