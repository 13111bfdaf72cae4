"""`experiments.llama_fsdp`: a real grid of the tiny shape, and what results become."""

import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ddp_by_hand.experiments.llama_fsdp import plots
from ddp_by_hand.experiments.llama_fsdp import run as run_module
from ddp_by_hand.experiments.llama_fsdp.__main__ import main, run_grid
from ddp_by_hand.experiments.llama_fsdp.cell import write_result
from ddp_by_hand.experiments.llama_fsdp.network import build, config_of
from ddp_by_hand.experiments.llama_fsdp.options import Options
from ddp_by_hand.experiments.llama_fsdp.plan import run_of
from ddp_by_hand.experiments.llama_fsdp.results import (
    MODES,
    GridCell,
    GridSettings,
    differs,
    merge,
    mode_of,
    read_grid,
    single_result,
    summarize_run,
)
from ddp_by_hand.lm.launch import Outcome
from ddp_by_hand.lm.runtime import Hardware
from ddp_by_hand.lm.watch import Cause
from ddp_by_hand.measure.options import as_arguments, parse_options, shared_values
from ddp_by_hand.measure.runs import ORDER, Cell, cells_of
from dp_clipping.kernels.launch.tiles import available
from tests.support.drawn import check_texts
from tests.support.forked import run_forked
from tests.support.page import Page

ROOT = Path(__file__).parents[2]
PICTURES = (
    "memory_comparison", "time_comparison", "memory_vs_time_tradeoff", "overhead_analysis",
)  # fmt: skip
SECRET = "hf_this_is_in_no_file"
TINY = ["--model-name", "tiny", "--device", "cpu", "--warmup-iter", "1", "--num-iter", "2"]
CPU = Hardware("gloo", "cpu", 2, "gloo, 2 processes")
GPUS = Hardware("nccl", "cuda", 8, "NCCL, 8 processes")
SETTINGS = GridSettings("tiny", 1, 2, 1, 1e-5, 1.0, 1.0, "flat", False, 0, 60.0)
CONTRACT = {
    "mode", "seq_length", "batch_size", "total_batch_size", "num_gpus", "peak_memory_mb",
    "peak_memory_gb", "avg_time_ms", "config", "status", "schema_version", "environment",
}  # fmt: skip


def files_below(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    """A grid of one cell on two processes: its arguments, its folder, its status."""
    folder = tmp_path_factory.mktemp("grid")
    arguments = [*TINY, "--modes", "flash_bookkeeping_fsdp", "--seq-lengths", "16"]
    arguments += ["--enable-profiling", "--output-dir", str(folder)]
    command = [sys.executable, "-m", "ddp_by_hand.experiments.llama_fsdp", *arguments]
    environment = {"PYTHONPATH": str(ROOT), **os.environ, "HF_TOKEN": SECRET}
    return arguments, folder, run_forked(command, ROOT, environment, 300)


@pytest.mark.slow
def test_grid_writes_results_pictures_and_summary(grid):
    _, folder, run = grid
    assert run.returncode == 0, run.stderr
    mode = "flash_bookkeeping_fsdp"
    result = json.loads((folder / f"{mode}_seq16_result.json").read_text())
    assert result.keys() >= CONTRACT
    assert result["config"].keys() >= {
        "model_name", "vocab_size", "learning_rate", "sigma", "max_grad_norm",
    }  # fmt: skip
    assert (result["mode"], result["status"]) == (mode, "ok")
    assert (result["total_batch_size"], result["num_gpus"]) == (2, 0)
    (one,) = result["rounds"]
    assert len(one["step_ms"]) == 2
    assert all(0 < a < b for a, b in zip(one["forward_backward_ms"], one["step_ms"]))  # noqa: B905
    profile = result["profile"]
    assert profile["steps"] == 2  # without the warm-up
    assert {"norm_pass", "hand_over", "reduce_scatter", "noise"} <= profile["ranges"].keys()
    assert profile["norms"][0]["after"]["shape"] == [1, 1]
    assert result["avg_time_ms"] == pytest.approx(sum(one["step_ms"]) / 2)
    assert result["peak_memory_gb"] == pytest.approx(result["peak_memory_mb"] / 1024)
    frozen = result["config"]["parameters"] - result["config"]["trained_parameters"]
    assert frozen == 512 * 64
    for name in PICTURES:
        assert (folder / "visualizations" / f"{name}.png").read_bytes()[1:4] == b"PNG"
    assert "flash_bookkeeping_fsdp" in (folder / "summary.txt").read_text()
    assert not (folder / ".cell.json").exists()


@pytest.mark.slow
def test_the_report_has_the_numbers_of_the_results_and_the_token_is_nowhere(grid):
    arguments, folder, _ = grid
    page = Page((folder / "report.html").read_text())
    result = json.loads((folder / "flash_bookkeeping_fsdp_seq16_result.json").read_text())
    row = page.rows("Step time")["flash_bookkeeping_fsdp"]
    assert float(row["median ms"]) == pytest.approx(result["median_time_ms"], rel=1e-3)
    assert len(page.pictures) == len(PICTURES)
    words = as_arguments(parse_options(Options, arguments))
    command = shlex.join(["python", "-m", "ddp_by_hand.experiments.llama_fsdp", *words])
    assert command in page.text
    assert page.text.count("ddp_by_hand.experiments.llama_fsdp") == 1
    _, folder, _ = grid
    for path in files_below(folder):
        assert SECRET.encode() not in path.read_bytes(), path


@pytest.mark.slow
def test_a_rerun_measures_nothing_again(grid, capsys, monkeypatch):
    arguments, folder, _ = grid
    before = (folder / "results.jsonl").read_bytes()
    monkeypatch.setattr(run_module, "run_ranks", None)
    assert main(arguments) == 0
    assert "1 of 1 cell is finished" in capsys.readouterr().out
    assert (folder / "results.jsonl").read_bytes() == before


@pytest.mark.slow
def test_other_settings_need_another_folder(grid, capsys):
    arguments, _, _ = grid
    assert main([*arguments, "--sigma", "2"]) == 2
    error = capsys.readouterr().err
    assert "sigma 1.0, not 2.0" in error
    assert error.count("\n") == 1


def loaded(context, path: str) -> None:
    """Shards hold the file's weights, tables are there, the embedding is frozen."""
    from transformers import AutoModelForSequenceClassification

    config = config_of(path)
    network = build(path, config, context.device, 0, False, context.group)
    expected = AutoModelForSequenceClassification.from_pretrained(path, num_labels=3)
    assert not network.get_input_embeddings().weight.requires_grad
    for name, parameter in network.named_parameters():
        if name != "score.weight":
            whole = parameter.full_tensor()
            torch.testing.assert_close(whole, expected.get_parameter(name), rtol=0, atol=0)
    tokens = torch.arange(1, 13).view(2, 6)
    expected.config.pad_token_id = config.pad_token_id
    with torch.no_grad():
        expected.score.weight.copy_(network.score.weight.full_tensor())
        torch.testing.assert_close(network(tokens).logits, expected(tokens).logits)


def save_llama(folder: Path) -> Path:
    """A folder as Hugging Face's: a language model, whose head is not the classifier's."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_weights_from_files(cpu_ranks, tmp_path):
    cpu_ranks.run(2, loaded, str(save_llama(tmp_path)))


@pytest.mark.slow
def test_a_cell_that_fails_is_a_row(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    model = save_llama(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "intermediate_size": 56}))
    arguments = [*TINY, "--model-name", str(model), "--modes", "no_dp", "--seq-lengths", "8"]
    folder = tmp_path / "results"
    assert main([*arguments, "--output-dir", str(folder)]) == 1
    result = json.loads((folder / "no_dp_seq8_result.json").read_text())
    assert result["status"] == "error"
    assert "in the file and" in result["reason"]
    assert result["avg_time_ms"] is None
    assert "in the file and" in (folder / "summary.txt").read_text()


@pytest.mark.slow
def test_under_torchrun_every_mode_in_two_rounds(tmp_path):
    arguments = [*TINY, "--seq-lengths", "8", "--rounds", "2", "--clipping", "per_layer"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node=2", "-m", "ddp_by_hand.experiments.llama_fsdp", *arguments]
    subprocess.run(
        [*command, "--train-embedding", "--output-dir", str(tmp_path)], cwd=ROOT, check=True,
        timeout=1200,
    )  # fmt: skip
    results = read_grid(tmp_path)
    assert [mode_of(cell) for cell in results] == list(MODES)
    assert all(len(cell.good_rounds) == 2 for cell in results)


def options_of(folder: Path, *arguments: str):
    return parse_options(Options, [*TINY, "--output-dir", str(folder), *arguments])


def starter(fail: dict[str, Outcome], started: list[str]):
    """Takes the place of processes: a cell writes its result, or ends as `fail` says."""

    def start(command: list[str]) -> Outcome:
        options = parse_options(Options, command[3:])
        started.append(f"{options.mode} {options.seq_length} {options.round}")
        if options.mode in fail:
            return fail[options.mode]
        cell = GridCell(options.mode, options.seq_length, options.round)
        ms = 100.0 + 50 * list(MODES).index(options.mode)
        settings = shared_values(options, GridSettings)
        result = single_result(
            cell, settings, CPU, 2, status="ok", step_ms=[ms, 1.02 * ms],
            forward_backward_ms=[0.9 * ms] * 2, peak_bytes=(2 + ms / 1000) * 2**30,
            sizes={"vocab_size": 512}, environment={"torch": "2", "date": "2026-11-21", "gpus": []},
        )  # fmt: skip
        write_result(options.output, result)
        return Outcome(0)

    return start


def test_failed_cells_are_rows_and_others_go_on(tmp_path, capsys):
    killed = Outcome(70, Cause(1, "oom", "OutOfMemoryError: CUDA out of memory"))
    started: list[str] = []
    arguments = ["--modes", "no_dp", "ghost_fsdp", "flash_fsdp", "--seq-lengths", "8", "16"]
    options = options_of(tmp_path, *arguments, "--rounds", "2")
    fail = {"ghost_fsdp": killed, "flash_fsdp": Outcome(3)}
    assert run_grid(run_of(options, CPU), starter(fail, started)) == 1
    assert len(started) == 2 * (2 + 1 + 1)  # what has failed is not tried in the second round
    lost = json.loads((tmp_path / "ghost_fsdp_seq16_result.json").read_text())
    assert (lost["status"], lost["peak_memory_gb"]) == ("oom", None)
    assert "rank 1 failed first" in lost["reason"]
    text = capsys.readouterr().out
    assert "left" in text
    assert "exit status 3" in text
    assert "oom: rank 1 failed first: OutOfMemoryError" in (tmp_path / "summary.txt").read_text()

    started.clear()  # a rerun tries them again, and only them
    assert run_grid(run_of(options, CPU), starter({}, started)) == 0
    assert len(started) == 2 * (2 + 2)
    assert not any("no_dp" in one for one in started)
    result = json.loads((tmp_path / "ghost_fsdp_seq16_result.json").read_text())
    assert [r["status"] for r in result["rounds"]] == ["ok", "ok"]


def test_a_token_in_an_error_is_hidden(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", SECRET)
    outcome = Outcome(70, Cause(0, "error", f"HTTPError: Bearer {SECRET} was refused"))
    options = options_of(tmp_path)
    path = tmp_path / "one.json"
    run_of(options, CPU).measure(GridCell("no_dp", 8), lambda _: outcome, path)
    assert SECRET not in path.read_text()
    assert "Bearer *** was refused" in path.read_text()
    words = as_arguments(options.for_cell(GridCell("no_dp", 8), path))
    assert not any(SECRET in word for word in words)


def results_like(ratios: dict[str, float | str], lengths=(1024, 2048), rounds=2) -> list[dict]:
    """Mode -> its ratio to no_dp, or how it failed at the last length."""
    found = []
    for length in lengths:
        for mode, times in ratios.items():
            lost = isinstance(times, str) and length == lengths[-1]
            ms = length / 10 * (1.5 if isinstance(times, str) else times)
            one = [
                single_result(
                    GridCell(mode, length, number), SETTINGS, GPUS, 8, status=times,
                    reason="no more", environment={},
                ) if lost else single_result(
                    GridCell(mode, length, number), SETTINGS, GPUS, 8, status="ok",
                    step_ms=[ms, ms * 1.01, ms * 0.99], forward_backward_ms=[0.9 * ms] * 3,
                    peak_bytes=2**30 * (10 + ms / 100), sizes={"vocab_size": 512}, environment={
                        "torch": "2.13", "date": "2026-11-21", "gpus": [{"name": "NVIDIA H200"}],
                    },
                )
                for number in range(rounds)
            ]  # fmt: skip
            found.append(merge(one))
    return found


def cells_like(*ratios, **sizes) -> list[Cell]:
    return cells_of(results_like(*ratios, **sizes))


ALL = {
    "no_dp": 1.0, "ghost_fsdp": "oom", "flash_fsdp": 1.6, "bookkeeping_fsdp": 1.07,
    "flash_bookkeeping_fsdp": 1.06,
}  # fmt: skip


def test_summary_has_ratios_of_each_length_and_failures():
    text = summarize_run(cells_like(ALL))
    line = next(line for line in text.splitlines() if line.startswith("1024    flash_fsdp"))
    assert line.split()[2] == "163.8"
    assert float(line.split()[5]) == pytest.approx(1.6)
    assert "  2 of 2  " in line
    assert "oom: no more" in text
    assert "8 x NVIDIA H200" in text


@pytest.mark.slow
def test_a_flash_mode_without_kernels_says_what_it_ran_as(grid, tmp_path):
    if torch.cuda.is_available() or available(torch.device("cpu"), torch.float32):
        pytest.skip("kernels run here")
    _, folder, _ = grid
    result = json.loads((folder / "flash_bookkeeping_fsdp_seq16_result.json").read_text())
    assert result["ran_as"] == "bookkeeping_fsdp"
    said = "flash_bookkeeping_fsdp ran as bookkeeping_fsdp"
    assert said in (folder / "summary.txt").read_text()
    page = Page((folder / "report.html").read_text())
    assert said in page.text
    assert page.rows("Step time")["flash_bookkeeping_fsdp"]["ran as"] == "bookkeeping_fsdp"
    plain = results_like({"no_dp": 1.0, "ghost_fsdp": 2.0})
    assert [r["ran_as"] for r in plain] == [r["mode"] for r in plain]
    assert "ran as" not in summarize_run(cells_of(plain))


@pytest.mark.slow
def test_one_cell_that_says_once_what_its_flash_mode_runs_as(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(ROOT)
    path = tmp_path / "one.json"
    one = ["--mode", "flash_fsdp", "--seq-length", "8", "--output", str(path)]
    assert main([*TINY, *one]) == 0
    assert json.loads(path.read_text())["status"] == "ok"
    assert files_below(tmp_path) == [path]
    found = capfd.readouterr()
    assert "ms per step" in found.out
    if torch.cuda.is_available() or available(torch.device("cpu"), torch.float32):
        return  # kernels run here
    said = [line for line in (found.out + found.err).splitlines() if " runs as " in line]
    kernels = "in plain PyTorch: fused kernels need a CUDA device and Triton"
    assert said == [f"flash_fsdp runs as ghost_fsdp, {kernels}"]


def test_reports_have_the_order_of_the_pictures_and_growth_needs_three_lengths():
    assert tuple(mode for mode in MODES if mode != "no_dp") == ORDER
    assert "grows" not in summarize_run(cells_like({"no_dp": 1.0}))
    text = summarize_run(cells_like({"no_dp": 1.0}, lengths=(512, 1024, 2048)))
    assert "B = 1, no_dp: step time grows as T^1.00" in text


@pytest.mark.parametrize(
    "ratios", [ALL, {"no_dp": "oom", "flash_fsdp": 1.5}, {"ghost_fsdp": "error"}]
)
def test_nothing_in_a_picture_overlaps(ratios):
    results = cells_like(ratios)
    for name in ("draw_memory", "draw_time", "draw_tradeoff", "draw_overhead"):
        figure = getattr(plots, name)(results)
        texts = (
            text for axes in figure.axes
            for text in [*axes.texts, *axes.get_yticklabels(), axes.xaxis.label]
        )  # fmt: skip
        check_texts(figure, texts, apart=True)


def test_redraw_needs_only_the_results(tmp_path, capsys):
    for result in results_like(ALL):
        name = GridCell(result["mode"], result["seq_length"]).file
        write_result(tmp_path / name, result)
    assert main(["--redraw", str(tmp_path)]) == 0
    names = {path.name for path in files_below(tmp_path) if path.suffix != ".json"}
    assert names == {"summary.txt", "report.html", *(f"{name}.png" for name in PICTURES)}
    page = Page((tmp_path / "report.html").read_text())
    assert page.rows("Step time")["flash_fsdp"]["median ms"] == "163.8"
    assert len(page.pictures) == len(set(page.captions)) == len(PICTURES)
    assert "does not say" not in page.text
    assert "2,048 tokens per sample" in page.text
    assert ["ghost_fsdp", "2048", "1", "oom", "no more"] in page.tables["Not measured"][0]


def test_dry_run_writes_nothing(tmp_path, capsys):
    folder = tmp_path / "none"
    arguments = [*TINY, "--output-dir", str(folder), "--seq-lengths", "8", "--dry-run"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "119,296 parameters, 86,528 of them trained" in text
    assert "5 cells, each in 2 processes" in text
    assert not folder.exists()


@pytest.mark.slow
def test_dry_run_lists_what_is_left(grid, capsys):
    arguments, folder, _ = grid
    before = {path: path.read_bytes() for path in files_below(folder)}
    assert main([*arguments, "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert f"1 of 1 cell is finished in {folder}\nnothing is left\n" in text
    assert main([*arguments, "--seq-lengths", "16", "24", "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert f"1 of 2 cells are finished in {folder}\n1 cell left, in 2 processes" in text
    assert [line for line in text.splitlines() if line.startswith("  ")] == [
        f"  {GridCell('flash_bookkeeping_fsdp', 24).label}"
    ]
    assert {path: path.read_bytes() for path in files_below(folder)} == before


def test_profiled_results_are_not_mixed_with_others():
    profiled = replace(SETTINGS, enable_profiling=True)
    place = 2, "cpu", "2.13"
    cell = GridCell("flash_fsdp", 16)
    assert cell.key(SETTINGS, *place) != cell.key(profiled, *place)
    plain = single_result(cell, SETTINGS, CPU, 2, status="error")
    assert "enable_profiling" not in plain["config"]  # as in results from before it existed
    assert not differs(SETTINGS, 2, plain)
    assert "enable_profiling" in differs(profiled, 2, plain)
    other = single_result(cell, profiled, CPU, 2, status="error")
    assert "enable_profiling" in differs(SETTINGS, 2, other)
