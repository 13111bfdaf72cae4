"""Prepares a program before it imports torch: Ctrl-C, and what is said where torch is missing."""

import sys
from importlib.util import find_spec
from types import TracebackType

from ddp_by_hand.lm.programs import is_first_of_host

INTERRUPTED = 130  # what shells report for Ctrl-C, 128 + SIGINT


def begin_program() -> None:
    """Makes an unhandled Ctrl-C print `interrupted`, without a traceback, and exit with status 130.

    Programs call it in the `__init__.py` of their package, which is imported before anything slow.
    Of several ranks on one host the first one prints. Where PyTorch is not installed, it says what
    to do and exits with status 2.
    """
    previous = sys.excepthook

    def hook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        if not issubclass(kind, KeyboardInterrupt):
            previous(kind, error, traceback)
            return
        if is_first_of_host():
            print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)

    sys.excepthook = hook
    if find_spec("torch") is None:
        print(
            f"PyTorch is not installed for {sys.executable}: run `source .venv/bin/activate` first "
            "(`make benchmark` sets up .venv)",
            file=sys.stderr,
        )
        sys.exit(2)
