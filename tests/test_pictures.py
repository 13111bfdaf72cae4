"""The pictures of docs/variants.md are those that `docs.draw_variants` draws."""

from itertools import pairwise
from pathlib import Path

import pytest

from ddp import IMPLEMENTATIONS
from ddp_by_hand.measure.picture import read_picture
from docs.draw_variants import GRADIENTS, LAYERS, VARIANTS, run

FOLDER = Path("docs")


def test_every_hand_built_variant_has_one_and_they_end_in_the_order_of_the_page():
    assert set(VARIANTS) == {name for name in IMPLEMENTATIONS if not name.startswith("torch_")}
    ends = {name: run(variant)[0][-1].end for name, variant in VARIANTS.items()}
    assert ends["none"] < ends["ddp_individual_v2"] < ends["ddp_individual"] < ends["ddp"]
    assert ends["none"] < ends["ddp_copy_engine"] < ends["ddp_bucketed"]


@pytest.mark.parametrize("name", VARIANTS)
def test_a_picture_is_the_one_that_is_drawn(name):
    says = f"{name}: {VARIANTS[name].title}"
    assert read_picture(FOLDER / f"variant_{name}.png").description == says
    assert f"](variant_{name}.png)" in (FOLDER / "variants.md").read_text()


@pytest.mark.parametrize("name", VARIANTS)
def test_a_step_computes_and_sends_everything(name):
    computed, sent = run(VARIANTS[name])
    for kind in ("forward", "backward"):
        layers = [box.text for box in computed if box.kind == kind and box.text]
        assert sorted(layers) == [str(n) for n in range(1, LAYERS + 1)]
    assert len(sent) == sum(len(work.sends) for work in VARIANTS[name].works)
    if name == "fsdp":  # its messages carry layers
        texts = sorted(box.text for box in sent)
        assert texts == ["g1", "g1", "g2", "g2", "g3", "g3", "g4", "r1", "r2", "r3", "r4"]
    else:
        passes = {"none": 0, "zero1": 2, "zero2": 2}.get(name, 1)
        assert sum(int(box.text.strip("gr")) for box in sent) == passes * GRADIENTS
    for one, other in pairwise(sent):  # one message at a time
        assert one.end <= other.start + 1e-9
