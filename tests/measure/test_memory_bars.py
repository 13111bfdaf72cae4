"""The memory picture: stacked bars of predicted kinds, and a line where the peak was measured."""

import pytest

from ddp_by_hand.measure import memory_bars
from ddp_by_hand.measure.memory_bars import COLOURS, draw_memory
from ddp_by_hand.measure.picture import read_picture
from tests.support.drawn import check_texts

KINDS = dict(zip(COLOURS, (1024.0, 0.0, 2048.0, 4096.0, 512.0), strict=True))
LATER = dict(zip(COLOURS, (1024.0, 512.0, 2048.0, 0.0, 0.0), strict=True))
ROWS = [
    {"label": "none", "kinds": KINDS, "later": LATER, "measured": 8000.0, "reason": None},
    {
        "label": "file.py:Mine",
        "kinds": KINDS,
        "later": LATER,
        "measured": None,
        "reason": "oom: rank 1: $2^30$",
    },
]


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    figures = []
    save = memory_bars.save_picture

    def keep(figure, *rest):
        figures.append(figure)
        save(figure, *rest)

    monkeypatch.setattr(memory_bars, "save_picture", keep)

    def draw(rows):
        draw_memory(rows, tmp_path / "memory.png", "Title $1", ["4 x device_x", "a note " * 30])
        return figures[-1], read_picture(tmp_path / "memory.png").description

    return draw


def test_bars_are_stacked_and_the_line_is_where_the_peak_was(drawn):
    figure, sentence = drawn(ROWS)
    (axes,) = figure.axes
    parts = [(bar.get_x(), bar.get_width()) for bar in axes.patches]
    assert parts[:5] == [(0, 1), (1, 0), (1, 2), (3, 4), (7, 0.5)]  # GiB
    assert parts[5:10] == [(0, 1), (1, 0.5), (1.5, 2), (3.5, 0), (3.5, 0)], "after backward"
    assert [list(line.get_xdata()) for line in axes.lines] == [[8000 / 1024] * 2]
    assert [text.get_text() for text in axes.texts] == [
        "measured 7.8 GiB, predicted -4.0%", "7.5 GiB, oom: rank 1: $2^30$",
    ]  # fmt: skip
    assert "dark line" in sentence
    figure, sentence = drawn([{**ROWS[0], "measured": None}])
    assert not figure.axes[0].lines
    assert figure.axes[0].texts[0].get_text() == "7.5 GiB"
    assert "dark line" not in sentence


def test_text_stays_inside_the_picture(drawn):
    figure, _ = drawn(ROWS)
    check_texts(figure, [*figure.texts, *figure.axes[0].texts, *figure.legends[0].get_texts()])
    assert figure.texts[1].get_window_extent().y0 >= figure.legends[0].get_window_extent().y1 - 3
