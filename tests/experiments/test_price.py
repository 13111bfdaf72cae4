"""`experiments.price` on a tiny network: variants take turns, and the table has what they took."""

import json
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from statistics import median

import pytest
import torch

from ddp_by_hand.experiments.price.__main__ import filled, main, priced
from ddp_by_hand.experiments.price.noise import ALONE, TIMES_ALONE, NoisySteps
from ddp_by_hand.experiments.price.options import Options
from ddp_by_hand.experiments.rounds import RoundCell, Row
from ddp_by_hand.lm.rank_pool import Context
from ddp_by_hand.measure.options import parse_options
from tests.support.alone import Watching, worker_of

CPU = torch.device("cpu")
NOISE = ["default", "secure", "bands_3"]
SMALL = "--model tiny --rounds 1 --steps 1"
PRICED = ["ordinary", "flash_bookkeeping", "bookkeeping_per_layer", "opacus_ghost"]
REHEARSALS = {  # options -> rows, further ones and variants
    "--layers 1": (["2x8", "4x8"], [], PRICED),
    "--layers 1 --part 2 --noise": (["2x8", "4x8"], [ALONE], NOISE),
    "--pairs --rank 2": (["2x8"], [], ["ordinary", "bookkeeping"]),
}
SHARDED = ["ordinary", "flash_bookkeeping_per_layer", "flash_bookkeeping_fused_step"]
SHARDED_OPTIONS = [
    "--sharded", "--model-name", "tiny", "--rows", "2x16", "--variants", *SHARDED,
    "--rounds", "1", "--steps", "2", "--warm-up", "1",
]  # fmt: skip


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def check(cells: list[dict], text: str, rows: list[str], variants: list[str]) -> None:
    """Each variant on each row has a line of the table, with the median of its steps."""
    assert {(c["row"], c["variant"]) for c in cells} == {(r, v) for r in rows for v in variants}
    lines = [line.split() for line in text.split("---", 1)[1].splitlines()]
    medians = {(c["row"], c["variant"]): median(c["step_ms"]) for c in cells}
    for cell in cells:
        (own,) = (x for x in lines if x[:2] == [cell["variant"], cell["row"]])
        took, base = (medians[cell["row"], v] for v in (cell["variant"], variants[0]))
        assert float(own[2]) == pytest.approx(took, rel=1e-3, abs=0.01)
        if took != base:
            assert float(own[5]) == pytest.approx(took / base, abs=0.002)
        parts = cell.get("without_step_ms", [0.1] * len(cell["step_ms"]))
        assert all(0 < part < whole for part, whole in zip(parts, cell["step_ms"], strict=True))


@pytest.mark.parametrize(
    "options",
    [pytest.param(o, marks=pytest.mark.slow if "--pairs" in o else ()) for o in REHEARSALS],
)
def test_a_rehearsal(options, tmp_path, capsys):
    if "--pairs" in options:
        pytest.importorskip("trl")
    rows, others, variants = REHEARSALS[options]
    output = tmp_path / "price.json"
    names = [] if options.endswith("--noise") else ["--variants"]
    words = [*SMALL.split(), "--rows", *rows, *options.split(), *names, *variants]
    assert main([*words, "--output", str(output)]) == 0
    cells = json.loads(output.read_text())["cells"]
    check(cells, capsys.readouterr().out, [*others, *rows], variants)


def test_a_step_of_pairs_takes_all_of_them(monkeypatch):
    """In a private one, too: each has the same work."""
    pytest.importorskip("trl")
    from ddp_by_hand.experiments.price.pairs import measure
    from dp_clipping.integrations import trl

    sizes, call = [], trl._OfPairs.forward

    def forward(self, input_ids, *given):
        sizes.append(tuple(input_ids.shape))
        return call(self, input_ids, *given)

    monkeypatch.setattr(trl._OfPairs, "forward", forward)
    options = filled(Options(model="tiny", pairs=True, steps=2, rank=2))
    cell = measure(RoundCell(Row(3, 12), "bookkeeping", 0), options, CPU)
    assert len(cell["step_ms"]) == 2
    assert all(0 < a < b for a, b in zip(cell["without_step_ms"], cell["step_ms"], strict=True))
    assert sizes.count((3, 2, 12)) >= 6


def test_steps_have_the_noise_of_their_cell_and_all_its_bands(monkeypatch):
    steps = NoisySteps(Options(model="tiny", layers=1, part=2, noise=NOISE, steps=2), CPU)
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
    steps.measure(RoundCell(Row(4, 8), "bands_5", 0))
    taken = steps.training.optimizer.steps
    assert seen == [("bands_5", step, True) for step in range(7)]  # five, and two that are timed
    assert taken == 7  # of two parts each
    steps.measure(RoundCell(ALONE, "secure", 1))
    assert [name for name, *_ in seen[7:]] == ["secure"] * (1 + 2 * TIMES_ALONE)
    assert all(step >= 1000 and whole for _, step, whole in seen[7:])
    assert steps.training.optimizer.steps == taken


def shown(context: Context, folder: str) -> tuple[list[dict], str]:
    """Returns the cells in the file, and what this rank prints."""
    output = Path(folder) / f"rank_{context.rank}.json"
    options = filled(parse_options(Options, [*SHARDED_OPTIONS, "--output", str(output)]))
    with redirect_stdout(StringIO()) as text:
        assert priced(options, context.device, worker_of(context), Watching()) == 0
    return json.loads(output.read_text())["cells"] if output.exists() else [], text.getvalue()


@pytest.mark.slow
def test_sharded_variants_are_measured_in_one_set_of_processes(cpu_ranks, tmp_path):
    (cells, text), *others = cpu_ranks.run(4, shown, str(tmp_path))
    check(cells, text, ["2x16"], SHARDED)
    assert {cell["config"]["ranks"] for cell in cells} == {4}
    assert others == [([], "")] * 3  # the first rank writes and prints
