"""The picture of efficiencies: each variant is named, and no name is cut off."""

import pytest

from ddp_by_hand.lm.exchange import VARIANTS
from ddp_by_hand.measure import curves
from ddp_by_hand.measure.curves import draw_efficiency
from tests.support.drawn import check_texts


@pytest.mark.parametrize("loss", [0.0, 0.01, 1.0])
def test_names_of_variants_lie_in_the_picture(tmp_path, monkeypatch, loss):
    drawn = []
    monkeypatch.setattr(curves, "save_picture", lambda figure, *_: drawn.append(figure))
    # pairs of variants share a curve
    draw_efficiency(
        lambda name, gpus: 1.0 + loss * (VARIANTS.index(name) // 2) * (gpus - 1) / 1000,
        VARIANTS, "from two", 8, tmp_path / "a.png",
    )  # fmt: skip
    (figure,) = drawn
    labels = [text for text in figure.axes[0].texts if "% " in text.get_text()]
    named = [x for n in VARIANTS[1:] for x in labels if f"% {n}: " in x.get_text()]
    assert len(named) == len(VARIANTS[1:])
    check_texts(figure, named)
