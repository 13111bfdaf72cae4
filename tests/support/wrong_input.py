"""Wrong input of a program: one line that says what to do, and status 2."""

import re
from collections.abc import Callable, Sequence

import pytest


def status_of(main: Callable[[Sequence[str]], int], arguments: Sequence[str]) -> int:
    """Returns the exit status of a program that is called here."""
    try:
        return main(arguments)
    except SystemExit as stopped:
        return stopped.code


def is_one_line(
    main: Callable[[Sequence[str]], int],
    arguments: Sequence[str],
    says: str | re.Pattern,
    captured: pytest.CaptureFixture[str],
) -> str:
    """Checks that the program prints one line on stderr, with `says`; returns what is on stdout."""
    status, (out, error) = status_of(main, arguments), captured.readouterr()
    assert (status, error.count("\n")) == (2, 1), error
    assert says.search(error) if isinstance(says, re.Pattern) else says in error, error
    return out
