"""Ctrl-C while a command is still importing: one line, and the status that shells know."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Waits at the first import of torch, as a slow disk does.
SLOW = """
import runpy, sys, time
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print("importing", flush=True)
            time.sleep(600)
sys.meta_path.insert(0, Slow())
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


WITHOUT_TORCH = """
import importlib.util, runpy, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "torch" else find(name, *rest)
sys.modules["torch"] = None
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
PROGRAMS = [
    "benchmark_ddp", "ddp_by_hand.exercises.check", "ddp_by_hand.experiments.llama_fsdp",
    *(pytest.param(name, marks=pytest.mark.slow) for name in (
        "ddp_by_hand.examples.opacus_tutorials", "ddp_by_hand.examples.private_text",
        *(".".join(path.relative_to(ROOT).parts[:-1])
          for path in sorted(ROOT.glob("ddp_by_hand/experiments/*/__main__.py"))
          if path.parent.name != "llama_fsdp"),
    )),
]  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_import_that_is_interrupted(name):
    command = [sys.executable, "-c", SLOW, name]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=dict(os.environ), **pipes) as process:
        assert process.stdout.readline() == "importing\n"
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=120)
    assert (process.returncode, error) == (130, "interrupted\n")


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_python_without_torch_is_told_what_to_do(program):
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, program], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 2
    assert run.stderr.startswith("PyTorch is not installed for ")
    assert "source .venv/bin/activate" in run.stderr
    assert run.stderr.count("\n") == 1
