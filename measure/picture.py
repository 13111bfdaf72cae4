"""Draws pictures whose title is the sentence to read off them.

It travels in the PNG itself, in the text entry `Description`: whoever shows the picture, a report
or a viewer of images, needs no other source.
"""

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure.files import write_atomically

_ENTRY = "Description"


@dataclass(frozen=True)
class Picture:
    """A PNG file: its bytes, its size in pixels, and its sentence (empty if it has none)."""

    data: bytes
    width: int
    height: int
    description: str


def save_picture(figure: Any, path: str | Path, description: str) -> None:
    """Writes a matplotlib figure as a PNG with its sentence, atomically; makes missing folders."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={_ENTRY: description})
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, buffer.getvalue())


def read_picture(path: str | Path) -> Picture:
    """Reads a PNG file; raises ValueError if it is not a whole one."""
    from PIL import Image

    data = Path(path).read_bytes()
    try:
        with Image.open(io.BytesIO(data), formats=["PNG"]) as image:
            image.load()
            text = str(image.info.get(_ENTRY, ""))
            return Picture(data, image.width, image.height, text)
    except (OSError, SyntaxError, ValueError) as error:
        raise ValueError(f"{path}: not a whole PNG ({error})") from None
