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
from tests.support import torch_versions as torch_versions_script
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


def test_the_script_prints_a_table_of_what_failed(tmp_path, capsys):
    """With an environment that is there, `--keep`."""
    (tmp_path / "test_it.py").write_text(
        "import pytest\ndef test_a(): pass\ndef test_b(): pass\n"
        "@pytest.mark.parametrize('x', ['y z'])\ndef test_c(x): assert 1 == 2 - 2, ' - '\n"
        "@pytest.fixture\ndef broken(): raise ValueError\ndef test_d(broken): pass\n"
    )
    (tmp_path / "2.99.0" / "bin").mkdir(parents=True)
    (tmp_path / "2.99.0" / "ready").touch()
    (tmp_path / "2.99.0" / "bin" / "python").symlink_to(sys.executable)
    options = ["--keep", str(tmp_path), "--", "--rootdir", str(tmp_path), str(tmp_path)]
    assert torch_versions_script.main(["2.99.0", *options]) == 1
    table = capsys.readouterr().out.split("\n\n")[-1].splitlines()
    assert table[0].split() == ["torch", "passed", "failed", "skipped"]
    assert table[1].split() == ["2.99.0", "2", "2", "0"]
    assert [line.strip().rpartition("/")[2] for line in table[2:]] == [
        "test_it.py::test_c[y z]", "test_it.py::test_d",
    ]  # fmt: skip
    found = torch_versions_script.outcome(["Segmentation fault\n"], -11)  # it did not count
    assert "status -11" in found.row("2.99.0")


def test_pins_that_hold_with_another_torch():
    for version, numpy in (("2.11.0", "numpy<2.4"), ("2.15.0", "numpy==")):
        pins = torch_versions_script.pins_of(version)
        assert not [x for x in pins if x.startswith(("torch", "triton"))]
        assert [x.startswith(numpy) for x in pins if x.startswith("numpy")] == [True]
