"""What docs/cluster.md shows: its program resumes, scripts parse, and messages are as it says."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from torch import nn

from ddp import wrap
from tests.support.engine import build
from tests.test_documents import check as check_command

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/cluster.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]


@pytest.fixture
def program(tmp_path) -> Path:
    (block,) = re.findall(r"^```python\n(import argparse.*?)^```", PAGE, re.M | re.S)
    path = tmp_path / "your_training.py"
    path.write_text(block)
    return path


@contextmanager
def started(program: Path, *arguments: str) -> Iterator[subprocess.Popen]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [*LAUNCH, str(program), "--checkpoint", "run.pt", *arguments]
    with subprocess.Popen(
        command, cwd=program.parent, env=environment, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            process.terminate()  # torchrun, which ends its ranks


def finished(program: Path, *arguments: str) -> str:
    with started(program, *arguments) as process:
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert shown("each rank trains a network of its own") not in err
    return out


def weights(folder: Path) -> list[torch.Tensor]:
    saved = torch.load(folder / "run.pt", weights_only=True)
    return [value for value in saved["module_state_dict"].values()]


@pytest.mark.slow
def test_sigterm_saves_and_a_resume_goes_on_bit_for_bit(program):
    source = program.read_text()
    program.write_text(source.replace("        optimizer.zero_grad()\n", SLOWLY))
    with started(program) as process:
        deadline = time.monotonic() + 120
        while not (program.parent / "began").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    assert process.returncode != 0, "torchrun ends as what it was told to"
    step = int(re.fullmatch(r"step (\d+) of 192: epsilon [\d.]+\n", out)[1])
    assert (20 <= step < 192, step % 10, err.count("Error: ")) == (True, 0, 0), err
    assert (program.parent / "run.pt.stopped").exists()

    program.write_text(source)
    ends = []
    for name in ("one", "other"):
        shutil.copytree(program.parent, folder := program.parent.with_name(name))
        folder.joinpath("run.pt.stopped").unlink()
        ends.append((finished(folder / program.name), weights(folder)))
        assert not folder.joinpath("run.pt.stopped").exists()
        assert folder.joinpath("run.pt.key").stat().st_mode & 0o777 == 0o600
    assert ends[0][0] == ends[1][0]
    assert re.fullmatch(r"step 192 of 192: epsilon 7\.9\d\d\n", ends[0][0])
    assert all(torch.equal(x, y) for x, y in zip(ends[0][1], ends[1][1], strict=True))
    assert not all(
        torch.equal(x, y) for x, y in zip(ends[0][1], weights(program.parent), strict=True)
    )


SLOWLY = """        optimizer.zero_grad()
        if optimizer.steps == 20:
            Path("began").touch()
        __import__("time").sleep(0.05)
"""


def blocks(language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```", PAGE, re.M | re.S)
    return [text for name, text in found if name == language]


def parses(script: str) -> bool:
    return subprocess.run(["bash", "-n", "-c", script], capture_output=True).returncode == 0


@pytest.mark.parametrize("script", [*blocks("bash"), *blocks("")])
def test_scripts_parse(script):
    assert parses(script), script
    assert not parses(script + "\nif"), "or nothing would be found"


def test_slurm_starts_one_torchrun_on_each_host():
    (script,) = blocks("bash")
    options = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", script, re.M))
    assert len(options) == script.count("#SBATCH")
    assert options["ntasks-per-node"] == "1"
    gpus = options["gpus-per-node"]
    (command,) = re.findall(r"srun.*?(torchrun .*?)\nif", script, re.S)
    check_command(command.replace("\\\n", " "))
    assert f"--nproc_per_node={gpus} " in command
    name, _, before = options["signal"].partition("@")
    assert (name, int(before) > 60) == ("TERM", True)
    assert "signal.SIGTERM" in PAGE
    assert script.count("run.pt.stopped") == 2
    assert 'f"{options.checkpoint}.stopped"' in PAGE


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.M)
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    return [tuple(line.split(None, 1)) for line in lines]


def ignored() -> list[str]:
    return (ROOT / ".dockerignore").read_text().split()


def test_the_image_copies_what_is_there_and_no_key():
    assert {kind for kind, _ in instructions()} == {"FROM", "RUN", "WORKDIR", "COPY", "CMD"}
    copied = [shlex.split(rest)[:-1] for kind, rest in instructions() if kind == "COPY"]
    for name in (name for names in copied for name in names):
        assert (ROOT / name).exists(), name
        assert name not in ignored()
    before_pip = copied[: next(i for i, names in enumerate(copied) if names == ["."])]
    given = {name for names in before_pip for name in names}
    needed = {PROJECT["readme"], *PROJECT["license-files"], "pyproject.toml", "constraints.txt"}
    assert given == needed | {"ddp", "ddp_by_hand", "dp_clipping"}
    assert {"*.key", ".venv"} <= set(ignored())


def test_the_image_has_the_versions_of_the_project():
    base = next(rest for kind, rest in instructions() if kind == "FROM")
    version = re.fullmatch(r"python:(3\.\d+)-slim", base)[1]
    assert f"{version}.0" in SpecifierSet(PROJECT["requires-python"])
    low, high = re.search(r"on Python (3\.\d+) to (3\.\d+)", constraints_text()).groups()
    assert tuple(map(int, low.split("."))) <= tuple(map(int, version.split(".")))
    assert tuple(map(int, version.split("."))) <= tuple(map(int, high.split(".")))
    pinned = dict(re.findall(r"^([\w-]+)==([\w.]+)", constraints_text(), re.M))
    extras = chain.from_iterable(PROJECT["optional-dependencies"].values())
    for requirement in map(Requirement, [*PROJECT["dependencies"], *extras]):
        name = requirement.name
        if name == PROJECT["name"]:  # with other extras
            continue
        assert pinned[re.sub(r"\[.*", "", name)] in requirement.specifier, name


def constraints_text() -> str:
    return (ROOT / "constraints.txt").read_text()


def test_the_image_installs_and_runs_what_there_is():
    runs = [rest for kind, rest in instructions() if kind == "RUN"]
    assert all(map(parses, runs))
    (pip,) = [shlex.split(run) for run in runs if run.startswith("pip")]
    assert pip[pip.index("-c") + 1] == "constraints.txt"
    extras = set(re.fullmatch(r"\.\[([\w,]+)\]", pip[-1])[1].split(","))
    assert extras == {"test", "docs"}
    (command,) = [rest for kind, rest in instructions() if kind == "CMD"]
    program, *arguments = eval(command)
    assert program == "make"
    made = subprocess.run(
        [program, "-n", *arguments, "PYTHON=python3"], cwd=ROOT, capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr
    assert "-m pytest" in made.stdout
    assert "venv" not in made.stdout


def shown(start: str) -> str:
    """The message in the page's last table that begins so."""
    rows = PAGE[PAGE.index("## What fails") :].splitlines()
    (found,) = [m for row in rows for m in re.findall(r"`([^`]+)`", row) if m.startswith(start)]
    return found


def network(width: int = 8) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2))


def private(module: nn.Module, noise_multiplier: float = 1.0) -> tuple:
    run = build(module=module, noise_multiplier=noise_multiplier)
    return run.engine, run.model, run.optimizer, run.criterion, run.loader


def mistakes(rank: int, folder: Path) -> dict[str, object]:
    """Each mistake of the table, by the beginning of its message."""

    def wrapped():
        return wrap("ddp_bucketed", network())

    def resumed_without_its_key():
        engine, model, optimizer, _, loader = private(wrapped())
        parts = {"module": model, "optimizer": optimizer, "data_loader": loader}
        engine.save_checkpoint(path=folder / "run.pt", **parts)
        if rank == 0:
            (folder / "run.pt.key").unlink()
        torch.distributed.barrier()
        engine.load_checkpoint(path=folder / "run.pt", **parts)

    ddp = nn.parallel.DistributedDataParallel
    return {
        "each rank trains a network": lambda: private(network()),
        "would not exchange clipped": lambda: private(ddp(network())),
        "DistributedDataParallel would": lambda: ddp(private(wrapped())[1])(torch.randn(8, 4)),
        "the ranks hold different": lambda: wrap("ddp_bucketed", network(9 if rank == 1 else 8)),
        "ranks differ in": lambda: private(wrapped(), 2.0 if rank == 1 else 1.0),
        "run.pt.key is missing": resumed_without_its_key,
    }


def of_a_rank(context, folder: Path) -> dict[str, str]:
    torch.set_num_threads(1)
    found = {}
    for start, mistake in mistakes(torch.distributed.get_rank(), folder).items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                mistake()
                found[start] = " ".join(str(w.message) for w in caught)
            except (ValueError, RuntimeError) as error:
                found[start] = str(error)
    return found


def test_messages_are_those_of_the_page(cpu_ranks, tmp_path):
    for found in cpu_ranks.run(4, of_a_rank, tmp_path):
        for start, message in found.items():
            before, _, after = shown(start).partition(" on rank 1")  # here are four ranks
            assert before in message
            assert after in message


def test_a_network_that_is_wrapped_too_early():
    with pytest.raises(RuntimeError, match=re.escape(shown("no process group"))):
        wrap("ddp_bucketed", network())


@pytest.mark.slow
def test_a_checkpoint_of_one_rank_alone(program):
    """The others have gone on; the process group's timeout ends the wait."""
    source = program.read_text().replace('else "gloo")', 'else "gloo", timeout=LIMIT)')
    source = source.replace(
        "dist.init", "LIMIT = __import__('datetime').timedelta(seconds=5)\ndist.init", 1
    )
    alone = (
        "if dist.get_rank() == 0:\n    engine.save_checkpoint(path=options.checkpoint, **parts)\n"
    )
    alone += "else:\n    __import__('time').sleep(20)\n"
    saves = "engine.save_checkpoint(path=options.checkpoint, **parts)  # on every"
    program.write_text(source.replace(saves, alone + "#"))
    with started(program, "--epochs", "1") as process:
        _, err = process.communicate(timeout=120)
    assert process.returncode != 0
    assert shown("call it on every rank") in " ".join(err.split())
