"""In a clone, `experiments.networks` is another name of `ddp_by_hand.experiments.networks`."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = sorted(path.parent.name for path in ROOT.glob("ddp_by_hand/*/__init__.py"))
MODULES = [
    *ROOMS, "lm.model", "experiments.networks", "experiments.price.__main__", "exercises.check",
]  # fmt: skip
PROGRAM = """
import multiprocessing, sys
from measure.statistics import Summary

def kind(_):
    import ddp_by_hand.measure.statistics
    return ddp_by_hand.measure.statistics.Summary

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        (there,) = pool.map(kind, [None])
    print(there is Summary, there.__module__)
"""


@pytest.mark.parametrize("name", MODULES)
def test_a_module_is_loaded_once(name):
    assert import_module(name) is import_module(f"ddp_by_hand.{name}")


def test_what_is_not_there_is_said_by_its_old_name():
    for name in ("lm.no_such_module", "lm.model.no_such_module"):
        with pytest.raises(ModuleNotFoundError, match=f"'{name}'"):
            import_module(name)


@pytest.mark.parametrize(
    "command", [pytest.param("experiments.networks", marks=pytest.mark.slow), "measure.compare"]
)
def test_a_program_starts_by_its_old_name(command):
    run = subprocess.run(
        [sys.executable, "-m", command, "--help"], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("usage: ")
    assert run.stderr == ""


def test_what_crosses_processes_is_of_the_new_name(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    run = subprocess.run(
        [sys.executable, str(path)], env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert run.stdout == "True ddp_by_hand.measure.statistics\n", run.stderr
