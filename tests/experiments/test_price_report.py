"""The tables of experiments.price, from samples that are known."""

import pytest

from experiments.price_report import fit_growth, report


def cell(row: str, variant: str, ms: float, peak: float, number: int = 0) -> dict:
    return {
        "row": row, "variant": variant, "round": number, "step_ms": [ms, ms * 1.01, ms * 0.99],
        "without_step_ms": [ms * 0.9] * 3, "peak_mib": peak,
    }  # fmt: skip


def test_ratios_and_failed_cells():
    results = [
        cell("8x1024", variant, ms, peak, number)
        for number in range(3)
        for variant, ms, peak in (("ordinary", 100.0, 1000), ("flash", 150.0, 1010))
    ]
    results.append({"row": "8x1024", "variant": "ghost", "round": 0, "status": "oom: too much"})
    text = report(results)
    line = next(line for line in text.splitlines() if " flash " in line)
    assert line.split()[2] == "150.0"
    assert float(line.split()[3]) == pytest.approx(1.5)
    assert line.split()[-1] == "1.010"
    assert "ghost" not in text
    assert "T^" not in text


def test_growth_with_the_length_of_samples():
    lines = [
        {"row": f"4x{t}", "variant": "flash", "step ms": 2e-3 * t**1.25} for t in (512, 1024, 4096)
    ]
    lines += [{"row": "8x512", "variant": "flash", "step ms": 9.0}]
    ((key, (exponent, worst)),) = fit_growth(lines).items()
    assert key == (4, "flash")
    assert exponent == pytest.approx(1.25)
    assert worst == pytest.approx(1.0)
    lines[1]["step ms"] *= 1.1
    exponent, worst = fit_growth(lines)[4, "flash"]
    assert 1.2 < exponent < 1.3
    assert 1.03 < worst < 1.1


def test_growth_is_in_the_report():
    text = report([cell(f"4x{t}", "ordinary", t / 10, 1000) for t in (1024, 2048, 4096)])
    assert "B = 4, ordinary: step time grows as T^1.00" in text
