"""Interleaved cells and their results: one that fails says why, and the others go on."""

from collections import Counter

import pytest
import torch

from ddp_by_hand.experiments.rounds import (
    RoundOptions,
    Row,
    interleave,
    report,
    row_of,
    run_program,
    run_rounds,
)

CPU = torch.device("cpu")


def test_variants_of_a_row_take_turns_and_a_row_is_written_as_it_is_read():
    cells = interleave([Row(8, 16), "mlp"], ["a", "b"], 3)
    assert [str(cell.row) for cell in cells] == ["8x16"] * 6 + ["mlp"] * 6
    assert [cell.round for cell in cells[:6]] == [0, 0, 1, 1, 2, 2]
    assert set(Counter(cell.variant for cell in cells).values()) == {6}
    assert cells[0].names() == {"row": "8x16", "variant": cells[0].variant, "round": 0}
    assert row_of("8x1024") == Row(8, 1024)
    assert str(row_of("8x1024")) == "8x1024"


def costs(ms: float, peak: float = 7.0) -> dict:
    steps = [ms, ms * 1.01, ms * 0.99]
    return {"step_ms": steps, "without_step_ms": [ms * 0.9] * 3, "peak_memory_mb": peak}


def run(measure, variants, rounds, output=None, row="8x16") -> list[dict]:
    """Runs cells on the CPU as a program does."""
    cells = interleave([row], variants, rounds)
    return run_rounds(cells, measure, lambda cell: {"model": "tiny"}, CPU, output)


@pytest.mark.parametrize(
    ("error", "status"),
    [(torch.OutOfMemoryError("no room\nat all"), "oom"), (KeyError("x"), "error")],
)
def test_a_failed_cell_says_why_and_is_not_tried_again(error, status, capsys):
    def measure(cell):
        if cell.variant == "lost":
            raise error
        return costs(10.0)

    cells = run(measure, ["lost", "found"], 3)
    assert Counter(cell["variant"] for cell in cells) == {"lost": 1, "found": 3}
    (found,) = (cell for cell in cells if cell["variant"] == "lost")
    assert found["status"] == status
    assert found["reason"].startswith(f"raised: {type(error).__name__}")
    assert "\n" not in found["reason"]
    assert f"8x16 lost round 1: {status}: {found['reason']}, " in capsys.readouterr().out


def test_a_program_returns_whether_a_cell_failed_and_prints_the_table_and_notes(capsys):
    options, ms = RoundOptions(rounds=2, steps=1), {"ordinary": 10.0, "flash": 20.0}
    for variants, status in ((list(ms), 0), ([*ms, "lost"], 1)):
        found = run_program(
            options, ["8x16"], variants, lambda cell: costs(ms[cell.variant]), {}, CPU, ["a note"]
        )
        assert found == status
        *_, last = text = capsys.readouterr().out.splitlines()
        assert (line_of("\n".join(text), "flash")[2], last) == ("20.00", "a note")


def cell(row: str, variant: str, ms: float, peak: float, number: int = 0) -> dict:
    names = {"row": row, "variant": variant, "round": number, "status": "ok"}
    return names | costs(ms, peak)


def line_of(text: str, variant: str) -> list[str]:
    return next(line.split() for line in text.splitlines() if line.startswith(f"{variant} "))


def test_ratios_and_failed_cells():
    results = [
        cell("8x1024", variant, ms, peak, number)
        for number in range(3)
        for variant, ms, peak in (("flash", 150.0, 1010), ("ordinary", 100.0, 1000))
    ]
    failed = {"row": "8x1024", "variant": "ghost", "round": 0, "status": "oom", "reason": "full"}
    text = report([*results, failed])
    found = line_of(text, "flash")
    assert found[2] == "150.0"
    assert float(found[5]) == pytest.approx(1.5)
    assert found[-1] == "1.010"
    assert text.index("ordinary") < text.index("flash")
    assert line_of(text, "ghost") == ["ghost", "8x1024", "oom:", "full"]
    assert "T^" not in text


def test_the_legend_explains_only_what_is_there_and_growth_is_reported():
    flash, ordinary = cell("4x512", "flash", 2.0, 1000), cell("4x512", "ordinary", 1.0, 1000)
    assert "ratio" not in report([flash])
    assert "ratio" not in report([ordinary])
    assert "ratio of medians" in report([flash, ordinary])
    assert "slowest rank" in report([flash])
    text = report([cell(f"4x{t}", "ordinary", t / 10, 1000) for t in (1024, 2048, 4096)])
    assert "B = 4, ordinary: step time grows as T^1.00" in text
