"""`experiments.price_dpo` on a tiny network: TRL's own step and private ones are timed alike."""

import json

import pytest
import torch

pytest.importorskip("trl")

from ddp_by_hand.experiments.price_dpo import Options, main, measure
from ddp_by_hand.experiments.rounds import RoundCell, Row

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_a_step_takes_all_pairs(monkeypatch):
    """In a private one, too: each has the same work."""
    from dp_clipping.integrations import trl

    sizes, call = [], trl._OfPairs.forward

    def forward(self, input_ids, *given):
        sizes.append(tuple(input_ids.shape))
        return call(self, input_ids, *given)

    monkeypatch.setattr(trl._OfPairs, "forward", forward)
    options = Options(model="tiny", steps=2, rank=2)
    cell = measure(RoundCell(Row(3, 12), "bookkeeping", 0), options, CPU)
    assert len(cell["step_ms"]) == 2
    assert all(0 < a < b for a, b in zip(cell["without_step_ms"], cell["step_ms"], strict=True))
    assert sizes.count((3, 2, 12)) >= 6


@pytest.mark.slow
def test_a_rehearsal(tmp_path, capsys):
    output = tmp_path / "price.json"
    arguments = ["--model", "tiny", "--rows", "2x8", "--rounds", "1", "--steps", "1"]
    variants = ["ordinary", "bookkeeping"]
    assert main([*arguments, "--variants", *variants, "--output", str(output)]) == 0
    cells = json.loads(output.read_text())["cells"]
    assert {c["variant"] for c in cells} == set(variants)
    table = capsys.readouterr().out.split("---", 1)[1]
    for cell in cells:
        own = next(x.split() for x in table.splitlines() if x.startswith(f"{cell['variant']} "))
        assert float(own[2]) == pytest.approx(cell["step_ms"][0], rel=1e-2)
