"""The report of a results folder: read by a parser, its numbers against those of the results."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from ddp_by_hand.measure import Results
from ddp_by_hand.measure.picture import save_picture
from ddp_by_hand.measure.report import main, render, say_report, write_report
from tests.support.page import Page
from tests.support.rows import record_benchmark, steps, write_llama

MARKUP = "<script>alert(1)</script>&amp;\"'><img src=x onerror=y>"
SECRET = "hf_AbCdEfGhIjKlMnOpQrStUvWxYz01234567"


def draw(path: Path, sentence: str = "Left is faster.") -> None:
    path.parent.mkdir(exist_ok=True)
    save_picture(Figure(figsize=(2, 1), dpi=50), path, sentence)


@pytest.fixture
def recorded(tmp_path):
    medians = {
        "none": 10.0, "ddp": 14.0, "ddp_bucketed": 12.0, "ddp_copy_engine": "unavailable",
        "torch_ddp": 13.0,
    }  # fmt: skip
    draw(record_benchmark(tmp_path / "run", medians) / "comparison.png")
    return tmp_path / "run"


@pytest.fixture
def llama(tmp_path):
    medians = {
        ("no_dp", 32): 10.0, ("flash_fsdp", 32): 16.0, ("ghost_fsdp", 32): 20.0,
        ("no_dp", 64): 20.0, ("flash_fsdp", 64): 30.0, ("ghost_fsdp", 64): "oom",
    }  # fmt: skip
    folder = write_llama(tmp_path / "llama", medians)
    draw(folder / "visualizations" / "time_comparison.png", "Shorter is faster.")
    draw(folder / "visualizations" / "overhead_analysis.png", "Lower is better.")
    (folder / "summary.txt").write_text("no_dp  10.0\n")
    return folder


def all_steps(median: float) -> list[float]:
    return [ms for number in range(5) for ms in steps(median, number)]


def number(cell: str) -> float:
    return float(cell.replace(",", ""))


def interval(cell: str) -> tuple[float, float, float]:
    return tuple(map(float, re.fullmatch(r"([\d.]+) \[([\d.]+), ([\d.]+)\]", cell).groups()))


def check_spread(row: dict, samples: list[float]) -> None:
    p10, median, p90 = np.quantile(samples, [0.1, 0.5, 0.9])
    for key, value in (("median ms", median), ("p10 ms", p10), ("p90 ms", p90)):
        assert row[key] == (f"{value:.1f}" if value >= 100 else f"{value:.2f}")


def test_numbers_of_the_benchmark_are_those_of_its_rows(recorded):
    page = Page(render(recorded))
    times = page.rows("Step time")
    assert list(times) == ["none", "ddp", "ddp_bucketed", "ddp_copy_engine", "torch_ddp"]
    for name, median in {
        "none": 10.0,
        "ddp": 14.0,
        "ddp_bucketed": 12.0,
        "torch_ddp": 13.0,
    }.items():
        row, samples = times[name], all_steps(median)
        check_spread(row, samples)
        assert number(row["tokens/s"]) == round(8 * 128 / np.median(samples) * 1e3)
        assert (row["steps"], row["rounds"]) == ("30", "5 of 5")
        if name != "none":
            value, low, high = interval(row["× none [95 %]"])
            assert value == pytest.approx(median / 10, abs=6e-4)
            assert low <= value <= high
            over = np.median(samples) - np.median(all_steps(10.0))
            assert row["over none, ms"] == f"{over:.2f}"
    assert interval(times["ddp"]["× torch_ddp [95 %]"])[0] == pytest.approx(14 / 13, abs=6e-4)
    assert times["none"]["× none [95 %]"] == "–"
    assert "clipping" not in times["none"]
    memory = page.rows("Memory and exchange")["ddp"]
    assert (memory["peak MiB"], memory["× none"], memory["MiB sent per step"]) == (
        "100",
        "1.000",
        "3.0",
    )
    assert (memory["collectives per step"], memory["gradient error"]) == ("3", "1.0e-07")
    assert "Parts of a step" not in page.tables


def test_numbers_of_the_grid_are_those_of_its_files(llama):
    page = Page(render(llama))
    for place, length in enumerate((32, 64)):
        base = length / 3.2
        times = page.rows("Step time", place)
        check_spread(times["no_dp"], all_steps(10.0 if length == 32 else 20.0))
        ratio = 1.6 if length == 32 else 1.5
        assert interval(times["flash_fsdp"]["× no_dp [95 %]"])[0] == pytest.approx(ratio, abs=6e-4)
        (parts,) = page.tables["Parts of a step"]  # one table for all lengths
        named = [dict(zip(parts[0], line, strict=True)) for line in parts[1:]]
        (part,) = [p for p in named if (p["mode"], p["tokens"]) == ("flash_fsdp", str(length))]
        check_spread(part, [0.9 * ms for ms in all_steps(base * ratio)])
        assert part["part"] == "forward backward"
        memory = page.rows("Memory", place)
        assert (memory["flash_fsdp"]["peak MiB"], memory["flash_fsdp"]["× no_dp"]) == (
            "2,048",
            "1.000",
        )
    assert "Collectives" not in page.text  # which nobody counted
    assert "ghost_fsdp" in page.rows("Memory", 0)
    assert "ghost_fsdp" not in page.rows("Memory", 1)


def test_a_round_that_failed_is_listed_beside_the_others(recorded):
    lines = (recorded / "results.jsonl").read_text().splitlines()
    row = next(r for r in map(json.loads, lines) if r["round"] == 2)
    del row["step_ms"]
    Results(recorded).record({**row, "status": "timeout", "reason": "rank 1 hung"})
    page = Page(render(recorded))
    assert page.rows("Step time")["none"]["rounds"] == "4 of 5"
    assert page.tables["Not measured"][0][1] == ["none", "3", "timeout", "rank 1 hung"]


def test_pictures_are_embedded_with_their_sentences(llama, recorded):
    page = Page(render(llama))
    assert [image.size for image in page.pictures] == [(100, 50)] * 2
    assert page.captions == [
        "overhead analysis. Lower is better.",
        "time comparison. Shorter is faster.",
    ]
    assert all(reference.startswith("data:image/png;base64,") for reference in page.references)
    (recorded / "comparison.png").unlink()
    assert "Pictures" not in Page(render(recorded)).text


def test_several_machines_few_rounds_and_ratios_are_said(recorded, tmp_path):
    assert "measured alike" not in Page(render(recorded)).text
    record_benchmark(recorded, {"more": 9.0}, rounds=2, environment={"torch": "2.11.0"})
    text = Page(render(recorded)).text
    assert "Not all was measured alike: torch 2.13.0; 2.11.0." in text
    assert "Intervals rest on 2 rounds" in text
    assert "×: ratio of medians" in Page(render(recorded)).text
    alone = record_benchmark(tmp_path / "x", {"mine": 10.0})
    assert "×: ratio" not in Page(render(alone)).text


def test_what_matters_is_said_first(recorded):
    text = Page(render(recorded)).text
    fastest = (
        r"compared with {} \({} ms\): ddp_bucketed, {} × its time, 95 % interval \[[01]\.\d{{3}}"
    )
    for name, median, ratio in (("none", 10.0, "1.200"), ("torch_ddp", 13.0, "0.923")):
        shown = f"{np.median(all_steps(median)):.2f}"
        assert re.search(fastest.format(name, shown, ratio), text)
    assert "no difference is shown" not in text
    assert "Intervals rest on" not in text
    assert "WRONG" not in text


def test_a_verdict_comes_first(recorded):
    verdict = {"headline": "Bound by noise.", "ranked": ["noise (6%)", "host (5%)"]}
    (recorded / "verdict.json").write_text(json.dumps(verdict))
    text = Page(render(recorded)).text
    order = [text.index(x) for x in ("At a glance\n", *verdict["ranked"], "5 cells: ")]
    assert order == sorted(order)
    assert text.index("Bound by noise.") < order[1]
    (recorded / "verdict.json").write_text("[]")
    with pytest.raises(ValueError, match=r"verdict\.json: not a verdict; remove it"):
        render(recorded)
    (recorded / "verdict.json").write_text("{}")
    assert "At a glance" in render(recorded)


def test_a_wrong_gradient_is_said(tmp_path):
    record_benchmark(tmp_path, {"none": 10.0, "mine": 9.0}, error={"mine": 0.5})
    page = Page(render(tmp_path))
    assert "The gradient of mine is WRONG (error 5.0e-01)" in page.text
    assert "Fastest" not in page.text  # it would be the fastest
    assert page.rows("Memory and exchange")["mine"]["gradient error"] == "5.0e-01 WRONG"


def test_a_price_of_clipping_beside_the_same_implementation(tmp_path):
    medians = {"none": 10.0, ("none", "ghost"): 25.0, "ddp": 12.0, ("ddp", "ghost"): 24.0}
    page = Page(render(record_benchmark(tmp_path, medians)))
    head, *rows = page.tables["Step time"][0]
    assert [row[:2] for row in rows] == [
        ["none", "none"], ["none", "ghost"], ["ddp", "none"], ["ddp", "ghost"],
    ]  # fmt: skip
    prices = [row[head.index("× clipping none [95 %]")] for row in rows]
    assert prices[0] == prices[2] == "–"
    assert interval(prices[3])[0] == pytest.approx(2, abs=6e-4)


def test_text_of_results_is_never_markup(tmp_path, recorded):
    """As a name, a setting, a reason, a version, a command, a picture's sentence, a file's name."""
    folder = tmp_path / "<b>folder</b>"
    record_benchmark(
        folder, {f"none{MARKUP}": 10.0, "lost": "error"}, config={"data": MARKUP},
        environment={"cpu": MARKUP, "command": ["x", MARKUP], f"k{MARKUP}": "v"},
    )  # fmt: skip
    row = json.loads((folder / "results.jsonl").read_text().splitlines()[-1])
    Results(folder).record({**row, "reason": f"\x1b[31m{MARKUP}\x00\n{MARKUP}"})
    Results(folder).record({**row, "key": "plan", "round": 9, "plan": f"</pre>{MARKUP}"})
    draw(folder / "a.png", MARKUP)
    draw(folder / "<i>.png", "")
    (folder / "summary.txt").write_text(f"</pre></details>{MARKUP}")
    text = render(folder)
    page, plain = Page(text), Page(render(recorded))
    assert set(page.tags) - set(plain.tags) <= {"details", "summary"}
    assert page.text.count(MARKUP) >= 8
    assert "\x1b" not in text
    assert "\x00" not in text


def test_surrogates_and_other_scripts_survive(tmp_path):
    record_benchmark(tmp_path, {"größe 測": 10.0, "broken \ud800": 11.0})
    text = write_report(tmp_path).read_bytes().decode()
    assert "größe 測" in Page(text).rows("Step time")


@pytest.mark.parametrize("in_environment", [True, False])
def test_a_token_is_never_in_it(tmp_path, monkeypatch, in_environment):
    """Whether the environment still has it, so that it can be looked for, or not."""
    monkeypatch.delenv("HF_TOKEN", raising=False)
    secret = "s3cret/of another+kind" if in_environment else SECRET
    if in_environment:
        monkeypatch.setenv("HF_TOKEN", secret)
    record_benchmark(
        tmp_path, {secret: 10.0}, config={"data": secret},
        environment={"cpu": f"a{secret}" if in_environment else secret, "command": ["x", secret]},
    )  # fmt: skip
    draw(tmp_path / "a.png", f"read {secret}")
    (tmp_path / "summary.txt").write_text(f"token={secret}")
    text = render(tmp_path)
    assert secret not in text.replace("\xa0", " ")
    assert "token=***" in text


def test_it_needs_nothing_from_elsewhere(recorded):
    text = render(recorded)
    page = Page(text)
    assert not {"script", "link", "iframe", "object", "embed", "form"} & set(page.tags)
    assert not re.search(r"https?:", re.sub(r"base64,[^\"]*", "", text))
    assert 'name="viewport"' in text
    assert "default-src 'none'" in text
    for medium in ("prefers-color-scheme: dark", "@media print", "max-width: 40rem"):
        assert medium in text


def test_the_command_writes_it_in_one_line(recorded, capsys, tmp_path):
    assert main([str(recorded)]) == 0
    assert capsys.readouterr().out == f"{recorded / 'report.html'}\n"
    assert (recorded / "report.html").read_text() == render(recorded)
    assert main([str(recorded), "--output", str(tmp_path / "r.html")]) == 0
    assert (tmp_path / "r.html").read_text() == render(recorded)
    path = tmp_path / "no" / "r.html"
    assert main([str(recorded), "--output", str(path)]) == 2
    assert capsys.readouterr().err == (
        f"ddp_by_hand.measure.report: {path}: cannot be written (No such file or directory), name "
        "another file with --output\n"
    )


@pytest.mark.parametrize(
    ("folder", "said"),
    [("gone", "no such folder"), (".", "no results there"), ("run/results.jsonl", "is a file"),
     ("broken", "not a whole PNG")],
)  # fmt: skip
def test_what_cannot_be_reported_is_one_line(recorded, tmp_path, capsys, folder, said):
    record_benchmark(tmp_path / "broken", {"none": 1.0})
    (tmp_path / "broken" / "x.png").write_text("no picture")
    assert main([str(tmp_path / folder)]) == 2
    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 1)
    assert said in error
    assert not (tmp_path / folder / "report.html").exists()


def test_at_the_end_of_a_run_a_report_that_cannot_be_is_said(recorded):
    assert say_report(recorded) == f"report: {recorded / 'report.html'}"
    (recorded / "comparison.png").write_text("no picture")
    assert re.fullmatch(r"no report: .*comparison\.png: not a whole PNG.*", say_report(recorded))
