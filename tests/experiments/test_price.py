"""`experiments.price*` on a tiny network: variants take turns, and the table has what they took."""

import json
from importlib import import_module
from statistics import median

import pytest
import torch

from ddp_by_hand.experiments import price_noise, price_sharded
from ddp_by_hand.experiments.rounds import RoundCell, Row, report
from ddp_by_hand.lm.rank_pool import Context
from ddp_by_hand.measure.options import parse_options
from tests.support.alone import Watching, worker_of

CPU = torch.device("cpu")
NOISE = ["default", "secure", "bands_3"]
SMALL = "--model tiny --rounds 1 --steps 1"
PRICED = ["ordinary", "flash_bookkeeping", "bookkeeping_per_layer", "opacus_ghost"]
REHEARSALS = {  # program -> options, rows and variants
    "price.__main__": ("--layers 1", ["2x8", "4x8"], PRICED),
    "price_noise": ("--layers 1 --part 2", ["2x8", "4x8"], NOISE),
    "price_dpo": ("--rank 2", ["2x8"], ["ordinary", "bookkeeping"]),
}
SHARDED = ["ordinary", "flash_bookkeeping_per_layer", "flash_bookkeeping_fused_step"]
SHARDED_OPTIONS = [
    "--model-name", "tiny", "--rows", "2x16", "--variants", *SHARDED,
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
    "program",
    ["price.__main__", "price_noise", pytest.param("price_dpo", marks=pytest.mark.slow)],
)
def test_a_rehearsal(program, tmp_path, capsys):
    if program == "price_dpo":
        pytest.importorskip("trl")
    options, rows, variants = REHEARSALS[program]
    output = tmp_path / "price.json"
    names = "--noise" if program == "price_noise" else "--variants"
    words = [*SMALL.split(), *options.split(), "--rows", *rows, names, *variants]
    main = import_module(f"ddp_by_hand.experiments.{program}").main
    assert main([*words, "--output", str(output)]) == 0
    cells = json.loads(output.read_text())["cells"]
    alone = [price_noise.ALONE] if program == "price_noise" else []
    check(cells, capsys.readouterr().out, [*alone, *rows], variants)


def test_a_step_of_pairs_takes_all_of_them(monkeypatch):
    """In a private one, too: each has the same work."""
    pytest.importorskip("trl")
    from ddp_by_hand.experiments.price_dpo import Options, measure
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


def test_steps_have_the_noise_of_their_cell_and_all_its_bands(monkeypatch):
    options = price_noise.Options(model="tiny", layers=1, part=2, rows=(Row(4, 8),), steps=2)
    steps = price_noise.Steps(options, CPU)
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
    price_noise.measure(RoundCell(Row(4, 8), "bands_5", 0), steps, options, CPU)
    taken = steps.training.optimizer.steps
    assert seen == [("bands_5", step, True) for step in range(7)]  # five, and two that are timed
    assert taken == 7  # of two parts each
    price_noise.measure(RoundCell(price_noise.ALONE, "secure", 1), steps, options, CPU)
    assert [name for name, *_ in seen[7:]] == ["secure"] * (1 + 2 * price_noise.TIMES_ALONE)
    assert all(step >= 1000 and whole for _, step, whole in seen[7:])
    assert steps.training.optimizer.steps == taken


def cells_of(context: Context) -> list[dict]:
    options = parse_options(price_sharded.Options, SHARDED_OPTIONS)
    return price_sharded.run_all(options, worker_of(context), Watching())


@pytest.mark.slow
def test_sharded_variants_are_measured_in_one_set_of_processes(cpu_ranks):
    everywhere = cpu_ranks.run(4, cells_of)
    check(everywhere[0], report(everywhere[0]), ["2x16"], SHARDED)
    assert {cell["config"]["ranks"] for cell in everywhere[0]} == {4}
    assert all(cells == everywhere[0] for cells in everywhere)  # of the slowest rank
