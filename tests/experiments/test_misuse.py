"""What programs refuse: one line that shows what works, and status 2."""

import re
from importlib import import_module
from pathlib import Path

import pytest
import torch

from tests.support.plans import quick_noise
from tests.support.wrong_input import is_one_line

PROGRAMS = {
    "correlated_noise": "correlated_noise", "examples_per_step": "examples_per_step",
    "local_steps": "local_steps", "price_dpo": "price_dpo", "price_noise": "price_noise",
    "price_sharded": "price_sharded", "networks": "networks.__main__",
    "plan_privacy": "plan_privacy.__main__", "llama_fsdp": "llama_fsdp.__main__",
    "profile_bottlenecks": "profile_bottlenecks.__main__",
}  # fmt: skip
ONE = "--mode no_dp --seq-length 8 --model-name tiny"
PLAN = "--examples 1e8 --compute 1e21"
GRAPHS = "--cuda-graph --networks table"
ROOT = Path(__file__).parents[2]
ROWS = {  # words -> a pattern of what is said
    "correlated_noise": {
        "--batches 9 --pictures 8": "--batches 9: give at most 8, --pictures",
        "--delta 1 --pictures 8 --batches 2 --filters 1": r"target_delta is 1\.0",
    },
    "examples_per_step": {
        "--most 3": "--rows 512: give a multiple of --most 3",
        "--drawn 4 5": "--rows 512: give a multiple of --drawn 5",
        "--most 1": "--most 1: each unit would be one picture: give 2 or more",
        "--delta 1 --most 2 --rows 8 --drawn 1 --pictures 64 --filters 1": r"target_delta is 1\.0",
    },
    "local_steps": {"--every 0": "give a positive", "--steps 0": "give a positive"},
    "price_noise": {
        "--noise secure": "--noise has no default", "--noise bands_0": "such as bands_8",
        "--noise gaussian": "such as bands_8", "--rounds 0": "--rounds",
        "--rows 12x8 --part 8": "--rows 12x8 has no whole number of parts of 8",
        "--output /proc/no/such/noise.json": "--output", "--model llama-3.2-1b": "--model tiny",
    },
    "price_sharded": {
        "--rows 2by3": "--rows", "--rounds 0": "--rounds", "--variants ghostly": "--variants",
        "--num-processes 0": "--num-processes", "--output /dev/null/x.json": "--output",
    },
    "networks": {
        "--rows alexnet": "networks", "--variants ghostly": "networks", "--steps 0": "networks",
        f"{GRAPHS} --compile": "give one of the two",
        GRAPHS: r"needs a GPU.*python -m ddp_by_hand\.experiments\.networks --small",
    },
    "profile_bottlenecks": {
        "--output-dir /proc/x --cpu": "--output-dir /proc/x: cannot be written to",
        "--seq-lengths 0": "--seq-lengths 0: give a positive number",
        "--seq-lengths 16 32 16": "--seq-lengths 16: given twice", "--num-iter 1.5": "--num-iter",
        "--memory-limit-gb -1": "--memory-limit-gb -1.0",
        "--norm-algorithm width": "give --use-flash too",
    },
    "llama_fsdp": {
        "--redraw . --dry-run": "--redraw writes", "--redraw no/such/folder": "no such folder",
        f"--redraw {ROOT / 'results/records-1xh200'}": "not results of this program",
        f"{ONE} --seq-lengths 32": "leave --seq-lengths out",
        f"{ONE} --rounds 2": "leave --rounds out", f"{ONE} --modes no_dp": "leave --modes out",
        "--modes ghost": "flash_bookkeeping_fsdp", "--mode no_dp": "needs both",
        "--output x.json": "--mode and --seq-length",
        "--batch-size 0": "--batch-size 0: give a positive number",
        "--seq-lengths 16 -4": "--seq-lengths -4", "--sigma -1": "--sigma -1.0: give 0 or more",
        "--sigma nan": "--sigma nan", "--max-grad-norm 0": r"--max-grad-norm 0\.0",
        "--model-name no/such/model": r"llama-3\.2-1b",
        "--output-dir file --model-name tiny": "is a file",
        "--output-dir /proc/x --model-name tiny": "--output-dir /proc/x: cannot be",
        f"{ONE} --output /proc/x/y.json": "--output /proc/x/y.json, in /proc/x: cannot be",
        f"{ONE} --output .": r"--output \.: is a folder",
    },
    "plan_privacy": {
        "--examples 1e8": "give one of --compute and --gpu-hours: python -m",
        f"{PLAN} --gpu-hours 3": "give one of --compute and --gpu-hours",
        "--compute 1e21": "--examples is missing",
        f"{PLAN} --examples 1.5": r"invalid whole value: '1\.5'",
        f"{PLAN} --examples nan": "invalid whole value: 'nan'",
        f"{PLAN} --epsilon 0": r"--epsilon 0\.0: give a positive number",
        f"{PLAN} --delta 1": r"--delta is 1\.0: give a number between 0 and 1",
        f"{PLAN} --delta 1e-7": "not below 1 / examples",
        f"{PLAN} --tokens-per-second 3": "--measured-parameters belong together",
        f"{PLAN} --gpus 4": "--gpus 4 needs a throughput",
        "--examples 1e8 --gpu-hours 9": "--gpu-hours needs a measured throughput",
        f"{PLAN} --data stdlib": "--data is the text of --calibrate: python -m",
        f"--calibrate x {PLAN}": "--examples does not go with --calibrate",
        "--calibrate x --compute 1e9 --law y": "--law does not go with",
        f"{PLAN} --law nowhere": "nowhere: has no finished runs of one text",
        f"{PLAN} --throughput-from nowhere": "has no finished private row",
        f"{PLAN} --output .": r"--output \.: is a folder, name a file",
    },
    "price_dpo": {"": "--model tiny rehearses on a CPU"},
}  # fmt: skip
CASES = [(program, *row) for program, rows in ROWS.items() for row in rows.items()]


@pytest.mark.parametrize(("program", "words", "says"), CASES)
def test_what_is_refused(program, words, says, capsys, monkeypatch, tmp_path):
    if program == "price_dpo":
        pytest.importorskip("trl")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    quick_noise(monkeypatch)
    main = import_module(f"ddp_by_hand.experiments.{PROGRAMS[program]}").main
    is_one_line(main, words.split(), re.compile(says), capsys)
