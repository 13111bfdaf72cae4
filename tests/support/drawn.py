"""Checks that a picture can be read: no text leaves it, and none lies over another."""

from collections.abc import Iterable
from itertools import combinations

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text


def check_texts(figure: Figure, texts: Iterable[Text], apart: bool = False) -> None:
    """Checks the texts that are shown; `apart`: against each other too."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    width, height = canvas.get_width_height()
    boxes = []
    for text in texts:
        box = Text.get_window_extent(text, canvas.get_renderer())  # without its line
        if text.get_text().strip() and text.get_visible():
            assert 0 <= box.x0 <= box.x1 <= width, text
            assert -1 <= box.y0 <= box.y1 <= height + 1, text
            boxes.append((text.get_text(), box.shrunk(0.98, 0.8)))
    for (one, a), (other, b) in combinations(boxes if apart else [], 2):
        assert not a.overlaps(b), (one, other)
