"""The tables of experiments.price, from samples that are known."""

import pytest

from experiments.price.report import growths_of, legend, report


def cell(row: str, variant: str, ms: float, peak: float, number: int = 0) -> dict:
    return {
        "row": row, "variant": variant, "round": number, "step_ms": [ms, ms * 1.01, ms * 0.99],
        "without_step_ms": [ms * 0.9] * 3, "peak_memory_mb": peak,
    }  # fmt: skip


def test_ratios_and_failed_cells():
    results = [
        cell("8x1024", variant, ms, peak, number)
        for number in range(3)
        for variant, ms, peak in (("flash", 150.0, 1010), ("ordinary", 100.0, 1000))
    ]
    results.append({"row": "8x1024", "variant": "ghost", "round": 0, "status": "oom: too much"})
    text = report(results)
    line = next(line for line in text.splitlines() if " flash " in line)
    assert line.split()[2] == "150.0"
    assert float(line.split()[3]) == pytest.approx(1.5)
    assert line.split()[-1] == "1.010"
    assert text.index("ordinary") < text.index("flash")
    assert "ghost" not in text
    assert "T^" not in text


def test_growth_with_the_length_of_samples():
    lines = [
        {"row": f"4x{t}", "variant": "flash", "step ms": 2e-3 * t**1.25} for t in (512, 1024, 4096)
    ]
    lines += [{"row": "8x512", "variant": "flash", "step ms": 9.0}]
    ((key, growth),) = growths_of(lines).items()
    assert key == (4, "flash")
    assert growth.exponent == pytest.approx(1.25)
    assert growth.high - growth.low == pytest.approx(0, abs=1e-6)
    lines[1]["step ms"] *= 1.1
    growth = growths_of(lines)[4, "flash"]
    assert growth.low < 1.25 < growth.high
    assert 1.2 < growth.exponent < 1.3


def test_growth_is_in_the_report():
    text = report([cell(f"4x{t}", "ordinary", t / 10, 1000) for t in (1024, 2048, 4096)])
    assert "B = 4, ordinary: step time grows as T^1.00" in text


def test_the_legend_explains_only_what_is_there():
    flash, ordinary = cell("4x512", "flash", 2.0, 1000), cell("4x512", "ordinary", 1.0, 1000)
    assert "ratio" not in legend([flash])
    assert "ratio" not in legend([ordinary])
    assert "ratio [low, high]" in legend([flash, ordinary])
    assert "slowest rank" in legend([flash])
