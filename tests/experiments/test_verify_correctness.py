"""`experiments.verify_correctness`: right products agree, and wrong ones are found."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from ddp_by_hand.experiments.verify_correctness import __main__ as command
from ddp_by_hand.experiments.verify_correctness import cases as cases_module
from ddp_by_hand.experiments.verify_correctness import findings as findings_module
from ddp_by_hand.experiments.verify_correctness import run as run_module
from ddp_by_hand.experiments.verify_correctness import step as step_module
from ddp_by_hand.experiments.verify_correctness.__main__ import main
from ddp_by_hand.experiments.verify_correctness.cases import (
    DTYPES,
    PRIVATE_MODES,
    Case,
    Ranks,
    plan,
)
from ddp_by_hand.experiments.verify_correctness.findings import Finding
from ddp_by_hand.experiments.verify_correctness.run import Options
from ddp_by_hand.experiments.verify_correctness.step import (
    verify,
)
from ddp_by_hand.lm.rank_pool import Context
from ddp_by_hand.lm.runtime import Hardware
from ddp_by_hand.measure.options import parse_options
from dp_clipping.clipping.norms import Norms
from dp_clipping.distributed.gradient_reduce import ShardedSums
from dp_clipping.distributed.norm_reduce import (
    NORM_REDUCTIONS,
    NormReducer,
    PendingReduce,
    SplitNorms,
)
from dp_clipping.noise import add_noise
from dp_clipping.profiling.profile import SWITCH
from dp_clipping.step import private_step
from dp_clipping.step.sums import plain
from tests.support.meshes import square
from tests.support.wrong_input import status_of

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "ddp_by_hand.experiments.verify_correctness"]
QUICK = ["--networks", "transformer", "--backend", "gloo"]
FLOAT32 = torch.float32


def run(capsys, *arguments: str) -> tuple[int, str]:
    """Exit status and output of a run in this process."""
    status = status_of(main, [*QUICK, *arguments])
    found = capsys.readouterr()
    return status, found.out + found.err


def rows_of(text: str) -> list[str]:
    """Of the tables: mode and clipping."""
    lines = [line for line in text.splitlines() if line.startswith(PRIVATE_MODES)]
    return [line for line in lines if line.split()[1] in ("flat", "per_layer")]


@pytest.mark.parametrize(
    ("networks", "modes"),
    [
        (("transformer", "llama"), ("flash", "flash_bookkeeping")),
        pytest.param(("transformer", "llama"), PRIVATE_MODES, marks=pytest.mark.slow),
    ],
    ids=["some", "every"],
)
def test_modes_on_both_networks(capsys, networks, modes):
    """The others are below."""
    pytest.importorskip("transformers")
    status, text = run(capsys, "--networks", *networks, "--modes", *modes)
    cases = 2 * len(networks) * len(modes)
    assert status == 0
    assert text.startswith("one process on CPU")
    assert len(rows_of(text)) == cases
    assert all("  ok  " in row for row in rows_of(text))
    assert "flash ran as ghost" in text
    assert f"{cases} of {cases} cases agree" in text.splitlines()[-1]


@pytest.mark.slow
def test_16_bit(capsys, monkeypatch):
    arguments = ["--dtype", "bfloat16", "--modes", "ghost", "bookkeeping"]
    status, text = run(capsys, *arguments)
    assert (status, len(rows_of(text))) == (0, 4)
    monkeypatch.setattr(
        plain, "coefficients", scaled(1.001)(plain.coefficients)
    )  # far below what 16 bit does to gradients
    status, text = run(capsys, *arguments)
    assert status == 1
    assert "one sample adds 1.000" in text


def test_verbose_shows_norms(capsys):
    status, text = run(capsys, "--modes", "ghost", "--verbose")
    assert status == 0
    assert "phases" not in text  # which need their switch, as below
    norms = {line.split()[0]: line.split()[-5:] for line in text.splitlines() if "17.81" in line}
    assert [float(x) for x in norms["rank"]] == pytest.approx(
        [float(x) for x in norms["reference"]], rel=1e-5
    )


def test_profiling_shows_the_phases_of_each_mode(capsys, monkeypatch):
    monkeypatch.setenv(SWITCH, "0")  # and back, when the command has switched it on
    arguments = ["--modes", "ghost", "bookkeeping"]
    status, text = run(capsys, *arguments, "--enable-profiling")
    assert status == 0
    _, table = text.split("phases, ms per step")
    head, _, *rows = [line for line in table.splitlines() if line][:6]
    columns = re.split("  +", head.strip())
    found = {tuple(re.split("  +", row)[1:3]): re.split("  +", row) for row in rows}
    assert {"first backward, norms included", "norms of layers", "noise"} <= set(columns)
    assert found.keys() == {(m, c) for m in arguments[1:] for c in ("flat", "per_layer")}
    second = columns.index("second backward")
    assert found["bookkeeping", "flat"][second] == "–"
    for row in found.values():
        assert float(row[columns.index("first backward, norms included")]) > 0
        assert float(row[columns.index("noise")]) > 0
    assert float(found["ghost", "flat"][second]) > 0


def scaled(factor: float) -> Callable:
    return lambda right: lambda *arguments: right(*arguments) * factor


def without_the_first(right: Callable) -> Callable:
    """Of the parameters whose norms come together, the first."""

    def add_rows(self, records, squares, *rest):
        right(self, records, torch.cat((0 * squares[:1], squares[1:])), *rest)

    return add_rows


def divided_by_more(right: Callable) -> Callable:
    return lambda *arguments, divisor, **rest: right(*arguments, divisor=1.01 * divisor, **rest)


WRONG = {  # what is replaced, by what, and what is said
    "too large": (plain, "coefficients", scaled(1 + 1e-4), "one sample adds 1.0000"),
    "too small": (plain, "coefficients", scaled(1 - 1e-3), "one sample adds only 0.99"),
    "not a number": (plain, "coefficients", scaled(float("nan")), "one sample adds inf C"),
    "a parameter is missed": (Norms, "add_rows", without_the_first, "one sample adds 1."),
    "half of a sum": (plain, "weighted_sum", scaled(0.5), "the clipped gradient of"),
    "divided by more": (add_noise, "add_noise_to_all", divided_by_more, "is off by 9.9e-03"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_product_is_found(wrong, capsys, monkeypatch):
    owner, name, broken, said = WRONG[wrong]
    monkeypatch.setattr(owner, name, broken(getattr(owner, name)))
    status, text = run(capsys, "--modes", "per_sample")
    assert status == 1
    assert all("  FAIL  " in row for row in rows_of(text))
    assert said in text
    assert "0 of 2 cases agree" in text.splitlines()[-1]


def test_one_wrong_mode_does_not_hide_behind_the_others(capsys, monkeypatch):
    backward = private_step.PrivateStep.backward

    def fail(self, *arguments):
        if self.policy.two_passes:
            raise RuntimeError("no\nsecond pass")
        return backward(self, *arguments)

    monkeypatch.setattr(private_step.PrivateStep, "backward", fail)
    status, text = run(capsys, "--modes", "ghost", "bookkeeping")
    assert status == 1
    assert [row.split()[0] for row in rows_of(text) if "FAIL: " in row] == ["ghost", "ghost"]
    assert "FAIL transformer, ghost, flat: RuntimeError: no second pass" in text
    assert "2 of 4 cases agree" in text


BREAKS = {  # what is replaced on a rank, by what, where, and what is said
    "a sum lacks the samples of rank 1": (
        ShardedSums, "accumulate",
        lambda right, rank: lambda self, p, total: right(self, p, total * (rank == 0)),
        "data", "the clipped gradient of",
    ),
    "every rank adds the norms of what ranks have in common": (
        SplitNorms, "_shared", lambda right, rank: lambda self, parameters: set(),
        "tensor", "a norm is off by",
    ),
    "norms differ by less than any tolerance": (
        NormReducer, "gather",
        lambda right, rank: lambda *own: PendingReduce(right(*own).wait() * (1 + 1e-6 * rank)),
        "data", "ranks have different norms",
    ),
}  # fmt: skip


def ranks_of(context: Context, how: str) -> Ranks:
    if how == "replicas":
        return Ranks(context.device, context.group)
    names = tuple(how.split(" x "))
    if len(names) == 2:
        mesh = square(*names)
    else:
        mesh = DeviceMesh.from_group(context.group, context.device.type, mesh_dim_names=names)
    return Ranks(context.device, context.group, mesh)


def checked(
    context: Context, how: str, modes: list[str], clippings: list[str],
    broken: str | None = None, most: int | None = None,
) -> list[Finding]:  # fmt: skip
    """What the ranks find in at most so many cases, with a product of `BREAKS` or whole ones."""
    ranks = ranks_of(context, how)
    cases = [c for c in plan(["transformer"], modes, ranks, FLOAT32) if c.clipping in clippings]
    with pytest.MonkeyPatch.context() as patch:
        if broken:
            owner, name, wrong, *_ = BREAKS[broken]
            patch.setattr(owner, name, wrong(getattr(owner, name), context.rank))
        return list(verify(cases[:most], ranks, FLOAT32, listening=True))


def check_exchange(finding: Finding, how: str) -> None:
    """Ranks know different things of the norms before, and the same afterwards."""
    assert len(set(finding.parts)) == len(finding.parts)
    assert len(set(finding.norms)) == 1
    squares = [sum(x * x for x in known if x is not None) for known in zip(*finding.parts)]  # noqa: B905
    assert [x**0.5 for x in squares] == pytest.approx(finding.norms[0], rel=1e-5)
    everywhere = "data" not in how and how != "replicas"
    assert everywhere == (None not in finding.parts[0])


@pytest.mark.parametrize(
    "how", ["replicas", "data", pytest.param("tensor", marks=pytest.mark.slow)]
)
def test_two_ranks(cpu_ranks, how):
    for findings in cpu_ranks.run(2, checked, how, ["bookkeeping"], ["flat"]):
        expected = list(NORM_REDUCTIONS) if how == "tensor" else [None]
        assert [f.case.norm_reduction for f in findings] == expected
        for finding in findings:
            assert not finding.faults
            check_exchange(finding, how)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["replicas", "data", "tensor", "data x tensor"])
def test_four_ranks_and_every_mode(cpu_ranks, how):
    modes = [mode for mode in PRIVATE_MODES if "flash" not in mode]
    for findings in cpu_ranks.run(4, checked, how, modes, ["flat", "per_layer"]):
        assert len(findings) == (18 if "tensor" in how else 6)
        for finding in findings:
            assert not finding.faults
            check_exchange(finding, how)


@pytest.mark.parametrize("broken", BREAKS)
def test_a_wrong_exchange_is_found(cpu_ranks, broken):
    *_, how, said = BREAKS[broken]
    for findings in cpu_ranks.run(2, checked, how, ["per_sample"], ["flat"], broken, 1):
        assert findings
        assert all(said in " ".join(finding.faults) for finding in findings)


@pytest.mark.slow  # `test_two_ranks` checks the same in ranks that are there
def test_it_launches_its_own_ranks(capfd, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert main([*QUICK, "--use-fsdp", "--modes", "bookkeeping", "--verbose"]) == 0
    text = capfd.readouterr().out
    assert text.startswith("gloo, 2 processes on CPU")
    assert len([row for row in rows_of(text) if "2 fsdp2" in row and "  ok  " in row]) == 2
    assert text.count("rank 1 before") == text.count("rank 1 after") == 2
    assert "over a tensor axis, which is not here: each case ran once" in text
    assert "2 of 2 cases agree" in text


def torchrun(ranks: int, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={ranks}", *COMMAND[1:], *QUICK, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
def test_under_torchrun():
    found = torchrun(2, "--use-tp", "--modes", "ghost")
    assert found.returncode == 0
    assert "6 of 6 cases agree" in found.stdout
    assert "2 tp, layerwise" in found.stdout
    found = torchrun(3, "--use-tp")
    assert found.returncode != 0
    lines = found.stderr.splitlines()
    (own,) = [line for line in lines if line.startswith(f"{command.PROGRAM}: ")]
    assert "3 tensor-parallel ranks do not divide" in own


BROKEN = """
import sys
import dp_clipping.step.sums.plain as backend
from ddp_by_hand.experiments.verify_correctness.__main__ import main
from ddp_by_hand.experiments.verify_correctness import run as run_module
import ddp_by_hand.lm.launch

right = backend.coefficients
backend.coefficients = lambda *a: right(*a) * 1.01
run_ranks = ddp_by_hand.lm.launch.run_ranks
run_module.run_ranks = lambda command, n: run_ranks([sys.executable, __file__, *command[3:]], n)
sys.exit(main())
"""


@pytest.mark.slow
def test_a_wrong_case_on_ranks_is_the_exit_status(tmp_path):
    program = tmp_path / "broken.py"
    program.write_text(BROKEN)
    arguments = [*QUICK, "--use-fsdp", "--modes", "ghost"]
    found = subprocess.run(
        [sys.executable, str(program), *arguments], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=600,
    )  # fmt: skip
    assert found.returncode == 1
    assert "0 of 2 cases agree" in found.stdout
    assert "Traceback" not in found.stderr


def test_ctrl_c_shows_what_is_finished(capsys, monkeypatch):
    right, begun = step_module.check, []

    def check(case, *arguments):
        begun.append(case)
        if len(begun) == 3:
            raise KeyboardInterrupt
        return right(case, *arguments)

    monkeypatch.setattr(step_module, "check", check)
    status, text = run(capsys, "--modes", "ghost", "bookkeeping")
    assert status == 130
    assert [row.split()[:2] for row in rows_of(text)] == [["ghost", "flat"], ["ghost", "per_layer"]]
    assert "2 of 4 cases were checked until then" in text
    assert text.splitlines()[-1] == "interrupted"


@pytest.mark.parametrize(
    ("silence", "lines"),
    [(0.0, [f"{n} of 2 cases were checked; now transformer, per_sample, {c}"
            for n, c in enumerate(("flat", "per_layer"))]), (3600.0, [])],
    ids=["long", "short"],
)  # fmt: skip
def test_a_long_run_without_a_terminal_says_how_far_it_is(silence, lines, capsys, monkeypatch):
    monkeypatch.setattr(run_module, "SILENCE", silence)
    _, text = run(capsys, "--modes", "per_sample")
    assert [line for line in text.splitlines() if "; now " in line] == lines


@pytest.mark.slow
def test_one_rank_on_the_cpu_is_told_how_to_start_two(capfd, monkeypatch):
    monkeypatch.chdir(ROOT)
    arguments = ["--use-fsdp", "--num-processes", "1", "--modes", "bookkeeping"]
    assert main([*QUICK, *arguments]) == 0
    text = capfd.readouterr().out
    assert "one rank shares nothing: --num-processes 2 checks two on the CPU" in text
    assert "--backend" not in text


@pytest.mark.slow
def test_fused_kernels_in_the_interpreter():
    found = subprocess.run(
        [*COMMAND, *QUICK, "--modes", "flash_bookkeeping"], cwd=ROOT, capture_output=True,
        text=True, env={**os.environ, "TRITON_INTERPRET": "1"}, timeout=600,
    )  # fmt: skip
    assert found.returncode == 0, found.stdout + found.stderr
    for algorithm in ("", ":input_length", ":width"):
        rows = [r for r in rows_of(found.stdout) if r.startswith(f"flash_bookkeeping{algorithm} ")]
        assert len(rows) == 2
    assert "ran as" not in found.stdout


@pytest.mark.parametrize(
    ("arguments", "gpus", "ranks"),
    [
        ([], 0, 1), ([], 8, 1), (["--num-processes", "3"], 8, 3), (["--use-tp"], 8, 8),
        (["--use-fsdp"], 0, 2), (["--use-fsdp"], 3, 3), (["--use-fsdp", "--use-tp"], 0, 4),
        (["--use-fsdp", "--use-tp"], 3, None), (["--use-fsdp", "--use-tp"], 5, 4),
    ],
)  # fmt: skip
def test_ranks_that_it_launches(arguments, gpus, ranks, monkeypatch):
    def find(device: str, count: int | None) -> Hardware:
        kind = ("nccl", "cuda", count or gpus) if gpus else ("gloo", "cpu", count or 2)
        return Hardware(*kind, "here")

    monkeypatch.setattr(run_module, "find_hardware", find)
    options = parse_options(Options, arguments)
    if ranks is None:
        with pytest.raises(ValueError, match="need 4 GPUs, and this machine has 3"):
            run_module.prepare(options)
    else:
        assert run_module.prepare(options)[1].num_processes == ranks


def test_without_transformers(capsys, monkeypatch):
    monkeypatch.setattr("ddp_by_hand.measure.extras.find_spec", lambda name: None)
    status, text = run(capsys, "--networks", "transformer", "llama", "--modes", "per_sample")
    assert status == 0
    assert "transformers is not installed" in text
    assert len(rows_of(text)) == 2
    status, text = run(capsys, "--networks", "llama")
    assert (status, text.count("\n")) == (2, 1)


def test_where_kernels_run_every_norm_algorithm_is_a_case(monkeypatch):
    monkeypatch.setattr(cases_module, "available", lambda *place: True)
    ranks = Ranks(torch.device("cpu"))
    cases = plan(["transformer"], PRIVATE_MODES, ranks, FLOAT32)
    assert len(cases) == 2 * (3 + 2 * 3)
    assert {c.norm_algorithm for c in cases if c.mode == "ghost"} == {None}
    found = {c.how for c in cases if c.mode == "flash"}
    assert found == {"flash", "flash:input_length", "flash:width"}


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_a_case_without_figures_is_not_right(dtype):
    case = Case("transformer", "ghost", "flat")
    assert Finding(case, findings_module.tolerance(case, cases_module.SMALL, dtype)).faults
