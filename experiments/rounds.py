"""Variants beside each other on several batches, in interleaved rounds."""

import re
from argparse import ArgumentTypeError
from typing import NamedTuple


class Row(NamedTuple):
    """A batch: samples (of a rank) and tokens a sample."""

    samples: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.samples}x{self.tokens}"


def row_of(text: str) -> Row:
    """From `8x1024`."""
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", text):
        raise ArgumentTypeError(f"{text!r} is not of the form 8x1024")
    return Row(*map(int, text.split("x")))
