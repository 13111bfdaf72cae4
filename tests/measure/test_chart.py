"""The comparison picture: every row is on it, failures say why, and the file is written whole."""

import numpy as np
import pytest
from matplotlib.figure import Figure

from ddp_by_hand.measure import chart
from ddp_by_hand.measure.chart import draw_comparison
from ddp_by_hand.measure.picture import label_of, read_picture


def _row(label, median, exposed=None, memory=None, samples=None):
    return {
        "label": label, "status": "ok", "reason": None, "exposed_ms": exposed,
        "samples_ms": samples or list(np.linspace(0.95, 1.05, 11) * median),
        "peak_memory_mb": memory,
        "ratio_to_baseline": (median / 40, median / 41, median / 39),
        "ratio_to_reference": (median / 50, median / 51, median / 49),
    }  # fmt: skip


ROWS = [
    _row("floor", 40.0, 0.0, 900),
    _row("path/to/a/rather/long/file.py:MyVariant", 55.0, 15.0, 9216),
    {"label": "gone", "status": "oom", "reason": "tried to allocate $2^30$ bytes"},
    _row("peer", 50.0, 10.0, None, samples=[50.0] * 40 + [400.0]),
    {"label": "absent", "status": "unavailable", "reason": "needs two GPUs"},
    _row("lucky", 39.0, -1.0, 900),
]


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """Draw rows, check that a PNG came out, and return the figure for inspection."""
    figures = []
    save = chart.save_picture
    monkeypatch.setattr(
        chart, "save_picture", lambda figure, *rest: (figures.append(figure), save(figure, *rest))
    )

    def draw(rows, baseline="floor", reference="peer"):
        path = tmp_path / "comparison.png"
        draw_comparison(rows, path, "Title $1", "4 × device_x", baseline, reference)
        assert path.read_bytes().startswith(b"\x89PNG")
        assert list(tmp_path.iterdir()) == [path]
        return figures[-1]

    return draw


def _texts(figure: Figure) -> list[str]:
    texts = [text.get_text() for axes in figure.axes for text in axes.texts]
    return texts + [text.get_text() for text in figure.texts]


def test_every_row_is_labelled_in_order_from_the_top(drawn):
    times = drawn(ROWS).axes[0]
    labels = [tick.get_text() for tick in times.get_yticklabels()]
    assert labels[0] == "floor"
    assert labels[1].endswith("file.py:\nMyVariant")
    assert max(len(line) for label in labels for line in label.split("\n")) <= 23
    mode = label_of("ddp_individual_v2:flash_bookkeeping:input_length")
    assert mode == "ddp_individual_v2:\nflash_bookkeeping:\ninput_length"
    assert label_of("ddp:flash:width") == "ddp:flash:width"
    option = label_of("ddp_copy_engine+find_unused_parameters")
    assert option == "ddp_copy_engine\n+find_unused_parameters"
    bottom, top = times.get_ylim()
    assert bottom > len(ROWS) - 1 > 0 > top


def test_numbers_and_failures_are_written_and_a_slow_step_does_not_squeeze_the_bars(drawn):
    texts = _texts(drawn(ROWS))
    assert {"40.0 ms", "55.0 ms", "1.38× floor", "1.10× peer [1.08, 1.12]"} <= set(texts)
    assert {"oom: tried to allocate $2^30$ bytes", "unavailable: needs two GPUs"} <= set(texts)
    assert {"Title $1", "4 × device_x"} <= set(texts)
    assert {" 900 MiB", " 9.00 GiB"} <= set(texts)
    assert not any("peer" in text and "1.00×" in text for text in texts)  # not against itself
    figure = drawn(ROWS)
    assert figure.axes[0].get_xlim()[1] < 100
    assert "1.25× floor  ▸ 1" in _texts(figure)
    assert "slower steps off the scale" in figure.axes[0].get_xlabel()


def test_bar_has_a_floor_and_an_exposed_part(drawn):
    bars = drawn(ROWS).axes[0].patches
    parts = [(bar.get_x(), bar.get_width()) for bar in bars]
    assert parts[:4] == [(0, 40), (40, 0), (0, 40), (40, 15)]
    assert parts[-2:] == [(0, 39), (39, 0)]  # faster than the floor: nothing exposed


def test_all_failed_none_known_nothing_at_all_and_no_memory(drawn):
    assert drawn([ROWS[2]]).axes[0].get_xticks().size == 0
    drawn([])
    drawn([_row("a", 1.0, memory=0)], baseline=None, reference=None)
    assert len(drawn(ROWS).axes) == 2
    assert len(drawn([_row("a", 1.0)]).axes) == 1


def test_text_stays_inside_its_panel(drawn):
    rows = [*ROWS, _row("file.py:AReferenceWithALongName", 54.0, 14.0, 9216)]
    figure = drawn(rows, reference=rows[-1]["label"])
    width, height = figure.canvas.get_width_height()
    ends = [figure.axes[1].get_window_extent().x0, width]
    for axes, end in zip(figure.axes, ends, strict=True):
        for text in [*axes.texts, *axes.get_yticklabels()]:
            box = text.get_window_extent()
            assert 0 <= box.x0 <= box.x1 <= end, text.get_text()
            assert 0 <= box.y0 <= box.y1 <= height, text.get_text()
        assert axes.xaxis.label.get_window_extent().x1 <= width


def test_the_picture_says_what_to_read_off(tmp_path):
    def sentence(rows, baseline=None, reference=None):
        draw_comparison(rows, tmp_path / "x.png", "Title", "", baseline, reference)
        return read_picture(tmp_path / "x.png").description

    whole = sentence(ROWS, "floor", "peer")
    assert "communication adds" in whole
    assert "dashed line (floor)" in whole
    assert "holds 1" in whole
    plain = sentence([_row("floor", 40.0, None, None)])
    assert plain.endswith("were disturbed.")
