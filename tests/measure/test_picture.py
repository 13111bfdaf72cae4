"""A picture's sentence travels in its file."""

import pytest
from matplotlib.figure import Figure

from ddp_by_hand.measure.picture import apart, read_picture, save_picture


@pytest.mark.parametrize("sentence", ["Left is faster.", "ε × 2 – «links» ist schneller", ""])
def test_a_sentence_comes_back(tmp_path, sentence):
    save_picture(Figure(figsize=(2, 1), dpi=50), tmp_path / "a.png", sentence)
    picture = read_picture(tmp_path / "a.png")
    assert (picture.width, picture.height, picture.description) == (100, 50, sentence)
    assert picture.data == (tmp_path / "a.png").read_bytes()


def test_folders_are_made_and_what_is_no_whole_png_is_refused(tmp_path):
    save_picture(Figure(figsize=(2, 1)), tmp_path / "new" / "er" / "a.png", "x")
    assert read_picture(tmp_path / "new" / "er" / "a.png").description == "x"
    save_picture(Figure(figsize=(2, 1)), tmp_path / "a.png", "x")
    whole = (tmp_path / "a.png").read_bytes()
    for content in (b"", b"<svg/>", whole[: len(whole) // 2]):
        (tmp_path / "b.png").write_bytes(content)
        with pytest.raises(ValueError, match=r"b\.png: not a whole PNG"):
            read_picture(tmp_path / "b.png")


def test_labels_are_a_line_apart_and_near_their_points():
    found = apart([0.1, 0.11, 0.12, 0.9], 0.05)
    assert found == pytest.approx([0.06, 0.11, 0.16, 0.9])
    assert apart([], 0.05) == []
    assert apart([1.0, 1.0, 1.0], 0.1, 0.0, 1.0) == pytest.approx([0.8, 0.9, 1.0])
    assert apart([0.0, 0.02, 0.12], 0.1, 0.0, 1.0) == pytest.approx([0.0, 0.1, 0.2])
