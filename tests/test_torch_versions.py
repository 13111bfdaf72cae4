"""On a PyTorch that nothing is tested with, programs run behind one warning."""

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from ddp_by_hand import torch_versions
from tests.support.benchmark_command import SCRIPT, TINY

ROOT = Path(__file__).parents[1]
SOLUTIONS = "tests/exercises/solutions.py"
WARNING = "torch 2.99.0 is not among the versions that this is tested with, 2.11 to "
FIRST_PRIVATE = re.compile(r"## Train privately\n.*?```python\n(.*?)```", re.DOTALL)
ANOTHER = "import torch\ntorch.__version__ = torch.torch_version.TorchVersion('2.99.0')\n"


def run_with_another_torch(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    """Runs Python where each process, those it starts included, finds a torch of the future."""
    (folder / "sitecustomize.py").write_text(ANOTHER)
    env = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=env, capture_output=True, text=True, timeout=240
    )


@pytest.mark.slow  # who is warned, and in which processes, is below
@pytest.mark.parametrize(
    ("arguments", "last"),
    [
        (["-c", FIRST_PRIVATE.search((ROOT / "README.md").read_text())[1]], r"\d\.\d+"),
        (["-m", "ddp_by_hand.exercises.check", "average", SOLUTIONS], r"(\d) of \1 right"),
        ([SCRIPT, *TINY, "--implementations", "ddp_bucketed", "--output-dir", "OUT"], ".*OUT.*"),
    ],
    ids=["private", "exercise", "benchmark"],
)
def test_programs_run_behind_one_warning(arguments, last, tmp_path):
    arguments = [str(tmp_path) if x == "OUT" else x for x in arguments]
    done = run_with_another_torch(tmp_path, *arguments)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(last.replace("OUT", str(tmp_path)), done.stdout.splitlines()[-1])
    assert done.stderr.count(WARNING) == 1, done.stderr
    assert "is not among the versions" not in done.stdout


@pytest.mark.parametrize(
    ("version", "environment", "warned"),
    [
        ("2.11.0+cu130", {}, 0),
        (f"{torch_versions.TESTED[-1]}.9", {}, 0),
        ("2.10.1", {}, 1),
        ("2.99.0a0+git1", {}, 1),
        ("2.99.0", {"RANK": "0"}, 1),
        ("2.99.0", {"RANK": "1"}, 0),
    ],
)
def test_who_is_warned(monkeypatch, version, environment, warned):
    monkeypatch.setattr(torch, "__version__", version)
    for name in ("RANK", torch_versions.WARNED):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for times in (warned, 0):  # a second time: as in a process that this one starts
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            torch_versions.warn_if_untested()
        assert len(found) == times
    monkeypatch.delenv(torch_versions.WARNED, raising=False)


@pytest.mark.parametrize("document", ["README.md", "SECURITY.md"])
def test_documents_name_the_tested_versions(document):
    assert f"torch {torch_versions.RANGE}" in (ROOT / document).read_text()
