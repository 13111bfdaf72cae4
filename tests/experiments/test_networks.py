"""experiments.networks: every network runs in small, and a line says why one does not."""

import json

import pytest
import torch
from opacus.validators.errors import UnsupportedModuleError

from experiments.networks.__main__ import PROGRAM, Options, main, measure
from experiments.networks.bounds import bound_by, bounds_of
from experiments.networks.report import report
from experiments.networks.rows import ROWS
from experiments.networks.training import failure_of, training_of
from experiments.rounds import RoundCell
from measure.options import parse_options, parser_of
from measure.runs import read_cells

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ROWS)
def test_a_network_runs_in_small(name):
    """A private step runs, or is refused by name."""
    options = Options(steps=1)
    for variant in ("ordinary", "flash_bookkeeping"):
        found = measure(RoundCell(ROWS[name], variant, 0), options, CPU)
        if variant == "ordinary" or found["status"] == "ok":
            assert len(found["step_ms"]) == 1
        else:
            assert found["reason"].startswith("refused: ValueError: "), found


@pytest.mark.parametrize("name", ROWS)
def test_a_row_names_its_dtype(name):
    row = ROWS[name]
    task = row.build(True, CPU)
    assert row.batch.endswith(str(row.dtype).removeprefix("torch."))
    assert {p.dtype for p in task.network.parameters()} == {row.dtype}
    again = row.build(True, CPU)
    assert torch.equal(again.targets, task.targets)
    pairs = zip(again.network.parameters(), task.network.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_the_command_and_its_file(tmp_path, capsys):
    output = tmp_path / "networks.json"
    arguments = ["--rows", "table", "lstm", "--rounds", "2", "--steps", "1"]
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


def test_a_refusal_is_no_crash():
    training, batch = training_of("bookkeeping", ROWS["table"], True, CPU)
    with pytest.raises(RuntimeError) as refused:
        training.criterion(batch[1], batch[1])  # before a forward
    assert failure_of(refused.value)["reason"].startswith("refused: RuntimeError: the criterion")
    with pytest.raises(UnsupportedModuleError) as unsupported:
        training_of("opacus_hooks", ROWS["lstm"], True, CPU)
    assert failure_of(unsupported.value)["reason"].startswith("refused: Unsupported")
    with pytest.raises(TypeError) as raised:
        training_of("ordinary", ROWS["lstm"], True, CPU)[0].model(1, 2, 3)
    assert failure_of(raised.value)["reason"].startswith("raised: TypeError")


def test_the_table():
    base = {"row": "vit_b16", "status": "ok", "peak_memory_mb": 100.0}
    cells = [
        {**base, "variant": "ordinary", "round": number, "step_ms": [10.0, 11.0, 10.0],
         "host_ms": 3.0, "kernel_ms": 9.5, "launches": 700}
        for number in range(2)
    ]  # fmt: skip
    cells += [
        {**base, "variant": "flash_bookkeeping", "round": 0, "step_ms": [20.0] * 3,
         "peak_memory_mb": 150.0, "host_ms": 19.0, "kernel_ms": 12.0, "launches": 7300},
        {"row": "vit_b16", "variant": "opacus_ghost", "round": 0, "status": "error",
         "reason": "refused: NotImplementedError: no"},
    ]  # fmt: skip
    lines = report(cells).splitlines()
    ordinary, ours, theirs = (line.split() for line in lines[2:5])
    assert ordinary[1:6] == ["ordinary", "10.0", "10.0", "11.0", "1.000"]
    assert ordinary[-2:] == ["700", "kernels"]
    assert ours[5] == "2.000"
    assert ours[-5:] == ["1.50", "19.0", "12.0", "7,300", "host"]
    assert " ".join(theirs[2:]) == "error: refused: NotImplementedError: no"


def test_what_bounds_a_step():
    cell = {"host_ms": 5.0, "kernel_ms": 5.0}
    assert bound_by(10.0, cell) == "neither"
    assert bound_by(5.0, cell) == "kernels"
    assert bound_by(5.0, cell | {"kernel_ms": 3.0}) == "host"
    assert bound_by(5.0, {}) is None


def test_on_a_cpu_nothing_is_launched():
    training, batch = training_of("ordinary", ROWS["table"], True, CPU)
    assert bounds_of(training, batch, CPU) == {}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
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


def test_options():
    assert parse_options(Options, ["--rows", "table", "table"]).networks == ("table",)
    assert parse_options(Options, ["--networks", "lstm"]).networks == ("lstm",)
    actions = parser_of(Options, prog=PROGRAM)._actions
    assert all("(default: " in action.help for action in actions if action.dest != "help")


@pytest.mark.parametrize(
    "arguments", [["--rows", "alexnet"], ["--variants", "ghostly"], ["--steps", "0"]]
)
def test_wrong_options(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert "networks" in capsys.readouterr().err
