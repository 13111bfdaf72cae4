"""`experiments.networks`: every network runs in small, and a line says why one does not."""

import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from ddp_by_hand.experiments.networks import picture
from ddp_by_hand.experiments.networks.__main__ import Options, main, run_all
from ddp_by_hand.experiments.networks.bounds import bounds_of, describe_bounds
from ddp_by_hand.experiments.networks.graphs import GraphedTraining, in_pinned_memory
from ddp_by_hand.experiments.networks.rows import ROWS
from ddp_by_hand.experiments.networks.training import training_of
from ddp_by_hand.experiments.rounds import report
from ddp_by_hand.measure.picture import read_picture
from ddp_by_hand.measure.runs import read_cells
from dp_clipping.cuda_graph import EAGER
from tests.dp_clipping.test_cuda_graph import Graph, captured_by_nobody

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (n % 2)) for n, name in enumerate(ROWS)]
)
def test_a_network_runs_in_small(name):
    """A private step runs, or is refused by name."""
    variants = ("ordinary", "flash_bookkeeping")
    for found in run_all(Options(networks=(name,), variants=variants, rounds=1, steps=1), CPU):
        if found["variant"] == "ordinary" or found["status"] == "ok":
            assert len(found["step_ms"]) == 1
        else:
            assert found["reason"].startswith("refused: ValueError: "), found


def test_the_command_and_its_file(tmp_path, capsys):
    output = tmp_path / "networks.json"
    arguments = ["--networks", "table", "lstm", "--rounds", "2", "--steps", "1"]
    arguments += ["--variants", "ordinary", "bookkeeping", "opacus_hooks", "opacus_ghost"]
    assert main([*arguments, "--output", str(output)]) == 0
    text = capsys.readouterr().out
    assert "refused: UnsupportedModuleError" in text
    assert "raised: " in text
    cells = json.loads(output.read_text())["cells"]
    failed = [c for c in cells if c["status"] != "ok"]
    keys = {(c["row"], c["variant"]) for c in failed}
    assert len(keys) == len(failed)  # once each
    assert {c["config"]["batch"] for c in cells} == {"small"}
    names = {(c.names["row"], c.names["variant"]): c.status for c in read_cells(output)}
    assert names["table", "bookkeeping"] == "ok"
    assert names["table", "opacus_hooks"] == "error"


def test_the_picture_and_its_table(tmp_path, capsys):
    """Ratios are to the ordinary step of the same run; what has none is a dash, and no bar."""
    name, other = "vit_b16", "lstm"

    def run(path, rounds=1, **medians):
        cells = [
            {"row": row, "variant": variant, "round": n, "config": {"batch": "2 x 3"},
             "status": "ok" if ms and n < 3 else "error",
             **({"step_ms": [9.0, ms + n * (ms > 2), 1.0]} if ms and n < 3 else {}),
             "peak_memory_mb": 10 * ms, **({} if n else {"kernel_ms": ms})}
            for n in range(rounds) for row in (name, other) for variant, ms in medians.items()
        ]  # fmt: skip
        path = path.with_suffix(".json")
        path.write_text(json.dumps({"schema_version": 1, "cells": cells}))
        return str(path)

    eager = run(tmp_path / "e", 4, ordinary=2.0, flash_bookkeeping=3.0, opacus_hooks=8.0)
    graphs = run(tmp_path / "g", ordinary=0, flash_bookkeeping=3.0)
    target = tmp_path / "networks.png"
    files = ["--eager", eager, "--graphs", graphs, "--picture", str(target)]
    assert picture.main(files) == 0
    medians = "2.0 / 4.0, 2.00 [1.50, 2.50]"
    line = f"| `vit_b16`, 2 × 3 | – | {medians} | 1.50 | 4.50 | – | 1.50 / 4.00 / – |"
    assert line in capsys.readouterr().out.split("\n")
    assert "0 of 2 networks" in read_picture(target).description
    (tmp_path / "g.json").write_text("{}")
    assert picture.main(files) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "no results of experiments.networks" in error


def test_what_bounds_a_step_and_on_a_cpu_nothing_is_launched():
    def described(step_ms: float, **measured: float) -> list[str]:
        """The end of the line of the report."""
        row = {"row": "table", "variant": "ordinary", "round": 0, "status": "ok",
               "step_ms": [step_ms], "peak_memory_mb": 100.0, **measured}  # fmt: skip
        return report([row], describe_bounds).splitlines()[2].split()[9:]

    assert described(10.0, host_ms=5.0, kernel_ms=5.0, launches=9)[-1] == "neither"
    assert described(5.0, host_ms=5.0, kernel_ms=5.0, launches=9)[-1] == "kernels"
    line = described(20.0, host_ms=19.0, kernel_ms=12.0, launches=7300)
    assert line == ["19.0", "12.0", "7,300", "host"]
    assert described(5.0) == []
    training, batch = training_of("ordinary", ROWS["table"], True, CPU)
    assert bounds_of(training, batch, CPU) == {}


@pytest.mark.gpu
def test_bounds_on_a_gpu():
    device = torch.device("cuda")
    training, batch = training_of("flash_bookkeeping", ROWS["table"], True, device)
    for _ in range(2):
        training.backward(batch)
        training.step()
    found = bounds_of(training, batch, device)
    assert found["host_ms"] > 0
    assert found["kernel_ms"] > 0
    assert found["launches"] > 50


GRAPHED = ("ordinary", "flash_bookkeeping")


def graphed(network: str, *variants: str) -> list[dict]:
    """Measures graphs of a small network on a GPU."""
    options = Options(networks=(network,), variants=variants, rounds=1, steps=2, small=True,
                      cuda_graph=True)  # fmt: skip
    return run_all(options, torch.device("cuda"))


@pytest.fixture
def no_device(monkeypatch):
    """What these steps ask of a GPU, on a CPU."""
    import transformers.models.bert.modeling_bert  # noqa: F401 - it needs what is replaced

    stream = SimpleNamespace(wait_stream=lambda other: None)
    fakes = {
        "graph": captured_by_nobody, "CUDAGraph": Graph, "Stream": lambda: stream,
        "current_stream": lambda: stream, "stream": lambda _: nullcontext(),
        "get_sync_debug_mode": lambda: 0, "set_sync_debug_mode": lambda mode: None,
        "reset_peak_memory_stats": lambda: None, "max_memory_allocated": lambda: 3 << 20,
    }  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(Graph, "replays", 0)


@pytest.mark.parametrize("variant", ["ordinary", "flash_bookkeeping"])
def test_a_graphed_step_is_eager_then_captured_then_replayed(no_device, variant):
    training, batch = training_of(variant, ROWS["table"], True, CPU, cuda_graph=True)
    steps = []
    training.optimizer.step = lambda own=training.optimizer.step: steps.append(own())
    if variant != "ordinary":
        training.optimizer._cuda_graph = True
        training.model.step_context.plans.last = SimpleNamespace(is_one_pass=True)
    graphed = GraphedTraining(training, len(batch[1]), CPU)
    for number in range(1, EAGER + 6):
        if number <= EAGER + 1:
            with pytest.raises(RuntimeError, match="not captured in the warm-up"):
                graphed.check()
        graphed.backward(batch)
        graphed.step()
        assert len(steps) == min(number, EAGER + 1)
        assert Graph.replays == max(0, number - EAGER)
    graphed.check()
    assert graphed.capture_peak_mb == 3
    if variant != "ordinary":
        assert training.optimizer.steps == EAGER + 5


def test_a_replay_has_the_inputs_of_its_step(no_device):
    training, (inputs, targets) = training_of("ordinary", ROWS["bert_base"], True, CPU)
    graphed = GraphedTraining(training, len(targets), CPU)
    for number in range(EAGER + 2):
        given = {"input_ids": torch.full_like(inputs["input_ids"], number)}, targets
        graphed.backward(given)
        seen, _ = graphed._step._inputs
        assert torch.equal(seen["input_ids"], given[0]["input_ids"])
        assert seen["input_ids"] is not given[0]["input_ids"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["table", "bert_base", "wide_resnet_16_4"])
def test_graphs_on_a_gpu(name):
    for found in graphed(name, *GRAPHED):
        assert found["status"] == "ok", found
        assert found["peak_memory_mb"] > 0
    (found,) = graphed(name, "opacus_hooks")
    assert found["reason"].startswith("raised: ValueError: Opacus has no step")


@pytest.mark.gpu
def test_a_step_that_waits_is_a_cell_and_the_next_is_measured():
    for variant in GRAPHED:
        (found,) = graphed("lstm_packed", variant)
        assert "lengths.cpu()" in found["reason"]
        assert graphed("table", variant)[0]["status"] == "ok"


@pytest.mark.gpu
def test_pinned_inputs():
    _, batch = training_of("ordinary", ROWS["table"], True, torch.device("cuda"))
    (numbers, bags), targets = in_pinned_memory(batch)
    assert all(x.is_pinned() for x in (numbers, bags, targets))
