"""`experiments.price_noise` on a tiny network: kinds of noise take turns, and all is timed."""

import json
from statistics import median

import pytest
import torch

from ddp_by_hand.experiments import price_noise
from ddp_by_hand.experiments.price_noise import ALONE, Options, Steps, main, measure
from ddp_by_hand.experiments.rounds import RoundCell, Row

CPU = torch.device("cpu")
NOISE = ["default", "secure", "bands_3"]
ARGUMENTS = [
    "--model", "tiny", "--layers", "1", "--part", "2", "--rounds", "1", "--steps", "1",
    "--rows", "2x8", "4x8", "--noise", *NOISE,
]  # fmt: skip


@pytest.fixture
def without_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_each_noise_has_a_line_for_each_row(without_gpu, tmp_path, capsys):
    output = tmp_path / "noise.json"
    assert main([*ARGUMENTS, "--output", str(output)]) == 0
    _, table = capsys.readouterr().out.split("---", 1)
    lines = table.splitlines()
    cells = json.loads(output.read_text())["cells"]
    assert {(c["row"], c["variant"]) for c in cells} == {
        (row, noise) for row in (ALONE, "2x8", "4x8") for noise in NOISE
    }
    for cell in cells:
        own = next(x.split() for x in lines if x.split()[:2] == [cell["variant"], cell["row"]])
        base = next(
            c for c in cells if (c["row"], c["variant"]) == (cell["row"], price_noise.DEFAULT)
        )
        own_ms, base_ms = median(cell["step_ms"]), median(base["step_ms"])
        assert float(own[2]) == pytest.approx(own_ms, rel=1e-3, abs=0.01)
        if cell is not base:
            assert float(own[5]) == pytest.approx(own_ms / base_ms, abs=0.002)


def test_steps_have_the_noise_of_their_cell_and_all_its_bands(monkeypatch):
    options = Options(model="tiny", layers=1, part=2, rows=(Row(4, 8),), steps=2)
    steps = Steps(options, CPU)
    seen, make = [], steps.source

    def recorded(noise):
        source = make(noise)
        add = source.add

        def record(totals, names, *, step, **more):
            seen.append((noise, step, sorted(names) == sorted(steps.names)))
            return add(totals, names, step=step, **more)

        monkeypatch.setattr(source, "add", record)
        return source

    monkeypatch.setattr(steps, "source", recorded)
    measure(RoundCell(Row(4, 8), "bands_5", 0), steps, options, CPU)
    taken = steps.training.optimizer.steps
    assert seen == [("bands_5", step, True) for step in range(7)]  # five, and two that are timed
    assert taken == 7  # of two parts each
    measure(RoundCell(ALONE, "secure", 1), steps, options, CPU)
    assert [name for name, *_ in seen[7:]] == ["secure"] * (1 + 2 * price_noise.TIMES_ALONE)
    assert all(step >= 1000 and whole for _, step, whole in seen[7:])
    assert steps.training.optimizer.steps == taken
