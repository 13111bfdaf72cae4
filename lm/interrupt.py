"""Handles Ctrl-C where a program does not yet do so, such as during the import of torch."""

import os
import sys
from types import TracebackType

INTERRUPTED = 130  # what shells report for Ctrl-C, 128 + SIGINT


def end_quietly_when_interrupted() -> None:
    """Makes an unhandled Ctrl-C print `interrupted`, without a traceback, and exit with status 130.

    Programs call it in the `__init__.py` of their package, which is imported before anything slow.
    Of several ranks on one host the first one prints.
    """
    previous = sys.excepthook

    def hook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        if not issubclass(kind, KeyboardInterrupt):
            previous(kind, error, traceback)
            return
        if int(os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0"))) == 0:
            print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)

    sys.excepthook = hook
