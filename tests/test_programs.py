"""Programs: one line shows what works in place of wrong input, and options say their defaults."""

import argparse
import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest
import torch

from ddp_by_hand.measure.options import parser_of
from tests.support.benchmark_command import PLUGINS, ROOT
from tests.support.plans import quick_noise
from tests.support.wrong_input import is_one_line

FILES = {  # in the folder in which each row runs
    "binary.txt": b"a\0b" * 1000, "empty.txt": b"", "short.txt": b"abc",
    "broken.py": b"import nothing_of_that_name", "key.py": b"\nx = {}\ny = x['no']\n",
    "syntax.py": b"a = 1\ndef f(:\n", "exit.py": b"import sys\nsys.exit(0)\n",
    "plugin.py": b"import torch\nclass Right(torch.nn.Module):\n  def forward(self): pass\n",
    "old/results.jsonl": b'{"schema_version": 0}\n', "noise/results.jsonl": b"not json\n",
    "folder/results.jsonl/x": b"",
    "letters.txt": b"".join(b"def f%d(x):\n    return %d\n" % (n, n) for n in range(300)),
    "notes.csv": b"id,note\n" + b"".join(b"%d,note %d\n" % (n, n) for n in range(36)),
    "numbers.jsonl": b'{"note": "a"}\n{"note": 3}\n', "words.json": b'["a", "b"]',
    "notes.txt": b"note\n", "empty.csv": b"", "wrong.toml": b"epsilom = 8\n",
}  # fmt: skip
GIVEN = {  # words before those of a row
    "bench.main": "--device cpu",
    "examples.audit": "--seed 0 --canaries 400",
    "examples.federated": "--checkpoint none.pt --clients 60 --expected 4",
    "examples.finetune": "--device cpu --epochs 2 --batch-size 8 --max-physical-batch-size 4 "
    "--length 12 --data notes.csv --column note --output-dir run",
    "examples.private_diffusion": "--device cpu --images 24 --batch-size 12 --epochs 1 --size 8 "
    "--width 8 --views 2 --max-physical-batch-size 8",
    "examples.private_images": "--device cpu --images 64 --batch-size 32 --epochs 1 --size 8 "
    "--epsilons 8 --output-dir run",
    "examples.private_text": "--device cpu --context-length 16 --d-model 8 --num-layers 1 "
    "--num-heads 2 --d-ff 16 --batch-size 40 --data letters.txt --output-dir run",
    "experiments.verify_correctness": "--networks transformer --backend gloo",
}
NEEDS = {"examples.finetune": "accelerate", "experiments.price": "transformers"}
ONE = "--mode no_dp --seq-length 8 --model-name tiny"
PLAN = "--examples 1e8 --compute 1e21"
GRAPHS = "--cuda-graph --networks table"
COUNTS = (
    "d-model num-layers num-heads d-ff vocab-size context-length batch-size num-epochs "
    "steps-per-epoch rounds num-processes every bucket-size-mb timeout"
)
ROWS = {  # program -> words -> a part of what is said, or a pattern
    "bench.main": {
        **{f"--{name} 0": rf"--{name} 0(\.0)?: give a positive" for name in COUNTS.split()},
        "--profile-implementation ddp": r"--profile-implementation: give --profile too",
        "--implementations nope": "choose from none, ddp, .*path/to/file.py:ClassName",
        "--implementations plugin.py": "plugin.py: name its class too, as plugin.py:ClassName",
        "--implementations plugin.py:Right": "--implementations.*finish_gradient_synchronization",
        "--implementations broken.py:X": "--implementations.*nothing_of_that_name",
        "--implementations key.py:X": r"KeyError\('no'\), at .*:3: y = x\['no'\]",
        "--implementations syntax.py:X": r"SyntaxError.*, at .*:2: def f\(:",
        "--implementations exit.py:X": r"SystemExit\(0\), at .*:2: sys.exit\(0\)",
        "--implementations empty.txt:X": "--implementations.*not a Python file",
        "--implementations ddp none ddp": "--implementations: ddp appears twice",
        "--implementations ddp+bucket_views": r"ddp has no option bucket_views",
        "--implementations ddp_bucketed+reduce": r"has no option reduce that can be turned",
        "--implementations fsdp2+option": r"fsdp2\+option' is unknown, choose",
        "--implementations": "--implementations: expected at least one",
        "--profile --profile-implementation nope": "--profile-implementation: .*choose from",
        "--clipping nope": "--clipping nope: unknown, choose from none, per_sample, .*bookkeeping",
        "--clipping": "--clipping: expected at least one",
        "--clipping none ghost no_dp": "--clipping: none appears twice, give",
        "--clipping ghost --noise-multiplier -1": "--noise-multiplier -1.0: give a finite number",
        "--clipping ghost --noise-multiplier nan": "--noise-multiplier nan: give a finite",
        "--clipping ghost --max-grad-norm 0": "--max-grad-norm 0.0: give a finite number above 0",
        "--clipping ghost --max-grad-norm inf": "--max-grad-norm inf: give a finite number above 0",
        "--clipping ghost --clipping-style layer": "--clipping-style: invalid choice.*per_layer",
        "--clipping ghost --clipping-function x": "--clipping-function: invalid choice.*automatic",
        "--clipping ghost:width": "--clipping ghost:width: unknown, choose from .*flash:input_len",
        "--clipping flash:gram": "--clipping flash:gram: unknown, choose from .*flash:width, ",
        "--clipping flash flash:auto": "--clipping: flash appears twice",
        "--clipping flash --tile-size 24": "--tile-size: invalid choice: 24 .*16, 32, 64, 128, 256",
        "--clipping ghost --tile-size 32": "--tile-size: only fused kernels .*--clipping flash or ",
        "--tile-size 32": "--tile-size: only fused kernels",
        "--clipping flash --memory-budget-mb -1": "--memory-budget-mb -1.0: give a finite number",
        "--clipping ghost --memory-budget-mb 9": "--memory-budget-mb: only fused kernels",
        "--clipping none bookkeeping --show-plan": "--show-plan: only fused kernels",
        "--enable-profiling --clipping ghost": "--enable-profiling: give --profile and a private",
        "--enable-profiling --profile": "--enable-profiling: give --profile and a private",
        "--profile --clipping flash --show-plan": "--show-plan: leave it out, .*summaries",
        "--noise-multiplier 1": "--noise-multiplier: only --clipping MODE.*give one of per_sample",
        "--clipping none --clipping-style flat": "--clipping-style: only --clipping MODE",
        f"--clipping none ghost --implementations {ROOT}/{PLUGINS}:Minimal": "--clipping ghost: "
        ".*:Minimal lacks method before_gradient, .*option reduce.*make it a subclass",
        "--batch-size 2.5": "--batch-size: invalid int value",
        "--implementations ddp --every 2": "--every: only diloco has rounds",
        "--every 5": "--every 5: give a number that divides the 12 steps and is at most 6",
        "--every 12": "--every 12: give a number that divides the 12 steps and is at most 6",
        "--clipping ghost --implementations diloco": "--clipping ghost: diloco steps .*leave d",
        "--bucket-size-mb nan": "--bucket-size-mb nan: give a positive",
        "--timeout inf": "--timeout inf: give a positive",
        "--d-model 30": "--num-heads .* does not divide --d-model 30: choose",
        "--d-model 12 --num-heads 4": "--d-model 12 over --num-heads 4.*choose",
        "--warmup-epochs -1": "--warmup-epochs -1: give 0 or more",
        "--warmup-epochs 3": "--warmup-epochs 3 exceeds --num-epochs 2.*give",
        "--warmup-epochs 2": "--warmup-epochs 2 leaves no epoch to time.*give",
        "--seed -1": "--seed -1: give 0 to 2",
        f"--seed {1 << 64}": f"--seed {1 << 64}: give 0 to 2",
        "--vocab-size 255": "--vocab-size is 255.*256 or more",
        "--data ''": "--data '' does not exist: give",
        "--data short.txt": r"--data .*short.txt' holds 3 bytes.*--context-length \+ 1 = 129: give",
        "--dtype float16": "--dtype: invalid choice.*mixed",
        "--preset huge": "--preset: invalid choice.*laptop",
        "--nope": "--nope",
        "--output-dir short.txt": "--output-dir short.txt: short.txt is a file, name a folder",
        "--output-dir short.txt/x": "--output-dir short.txt/x: .*is a file, name a folder",
        "--output-dir /proc/x": "--output-dir /proc/x: cannot be written to.*name another",
        "--output-dir old": "--output-dir: .*schema version 0.*name another",
        "--output-dir noise": "--output-dir: .*results.jsonl, line 1: not a JSON line",
        "--output-dir folder": "--output-dir: .*results.jsonl",
        "--profile --profile-output-dir short.txt": "--profile-output-dir short.txt: .*name a f",
        "--profile --profile-output-dir /proc/x": "--profile-output-dir /proc/x: cannot be written",
        "--implementations fsdp3": "'fsdp3' is unknown, choose from none, .*fsdp2, .*fsdp2_tp, or",
        "--implementations fsdp2_tp": "fsdp2_tp on 2 ranks: .*start 4 ranks or another multiple",
        "--implementations fsdp2_tp --num-processes 5": "fsdp2_tp on 5 ranks: .*multiple of 2",
        "--implementations tp --num-processes 3": "tp on 3 ranks: --num-heads is .*, which 3 tens",
        "--implementations tp --d-ff 33": "tp on 2 ranks: --d-ff is 33, which 2 tensor-parallel r",
        "--implementations ddp fsdp2 --clipping flash --memory-budget-mb 1": "--memory-budget-mb: "
        "the ranks of fsdp2 must .*leave it out or",
        "--implementations fsdp2 --clipping ghost --norm-reduction sync": "--norm-reduction: only "
        "ranks that share samples .*--implementations tp or fsdp2_tp",
        "--implementations tp --norm-reduction sync": "--norm-reduction: only --clipping MODE",
        "--clipping ghost --norm-reduction none": "--norm-reduction: invalid choice: 'none'",
    },
    "examples.audit": {
        "--canaries 0": "audit: canaries is 0: give 16 or more",
        "--noise-multiplier -1": "audit: noise_multiplier is -1.0",
        "--confidence 1": "audit: confidence is 1.0", "--canary 100": "did you mean --canaries?",
    },
    "examples.federated": {
        "--resume": "none.pt", "--rounds 0": "--rounds 0: give",
        "--checkpoint .": "is a folder, name a file",
        "--checkpoint notes.txt/round.pt": "is a file, name a folder",
    },
    "examples.finetune": {
        "--batch-size 50": "no multiple of --max-physical-batch-size 4: give --batch-size",
        "--epsilon 0": "--epsilon is 0.0: give a finite number above 0",
        "--delta 0.5": "--delta is 0.5: give less than 1 / 32 rows",
        "--batch-size 64": "--batch-size is 64: there are 32 rows, give less",
        "--column text": "notes.csv has id, note: give one of them, as --column note",
        "--data numbers.jsonl": "row 2 of numbers.jsonl has 3 there, and a text is wanted",
        "--data words.json": 'row 1 has no columns: write rows as {"text": ".."}',
        "--data empty.csv": "--data empty.csv has 0 rows: give 20 or more",
        "--epsilom 2": "unrecognized arguments: --epsilom 2 (did you mean --epsilon?)",
        "--data notes.txt": "--data notes.txt: give a file that ends in .csv or .jsonl",
        "--data none.csv": "--data none.csv: No such file or directory: give a .csv",
        "--model gpt3": "--model gpt3 is no folder with a config.json: give gpt2, llama",
        "--length 999": "--length is 999: the model has 256 positions: give less",
        "--length 1": "--length is 1: give 2 or more",
        "--output-dir notes.csv": "notes.csv is a file, name a folder",
        "--resume": "holds no run: leave --resume out",
        "--config none.toml": "--config none.toml: No such file or directory",
        "--config wrong.toml": "epsilom is no option: give one of batch_size,",
        "--config": "--config: give a file, --config run.toml",
    },
    "examples.opacus_tutorials": {
        "images --engine other": "--engine: invalid choice: 'other'",
        "text --epochs 0": "--epochs is 0: give a number above 0",
        "distributed --epsilon nan": "--epsilon is nan: give a number above 0",
        "accounting --epsilon 1": "unrecognized arguments: --epsilon 1",
        "picture": "invalid choice: 'picture'",
        "text --samples 1000000": "texts: give at most so many",
    },
    "examples.private_diffusion": {
        "--seed -1": "--seed -1: give 0 to", "--size 10": "--size is 10",
        "--views 3": "multiple of 3",
    },
    "examples.private_images": {
        "--batch-size 65": "--batch-size", "--depth 12": "--depth is 12",
        "--delta 2": "target_delta is 2.0", "--output-dir short.txt": "is a file, name a folder",
    },
    "examples.private_text": {
        "--epsilon 0": "--epsilon is 0.0: give a finite number above 0",
        "--epsilon nan": "--epsilon is nan", "--delta 1": "--delta is 1.0: give a number between",
        "--delta 0.01": "--delta is 0.01, not below 1/sequences",
        "--batch-size 0": "--batch-size is 0: give 1 or more",
        "--batch-size 100000": "--batch-size is 100000, and there are",
        "--num-heads 3": "num_heads is 3, which does not divide d_model 8",
        "--context-length 5000": "give more text or a shorter context",
        "--data /nowhere": "--data '/nowhere' does not exist",
        "--data synthetic": "--data synthetic is no text",
        "--mode no_dp": "argument --mode: invalid choice: 'no_dp'",
        "--max-grad-norm -1": "--max-grad-norm is -1.0", "--seed -1": "--seed -1: give 0 to",
    },
    "examples.sampling_noise": {
        "--samples 0": "sampling_noise: --samples 0: give a positive number",
        "--delta 2": "sampling_noise: --delta 2.0: give a number between 0 and 1",
        "--epsilons 900": "sampling_noise: target_epsilon is 900",
    },
    "experiments.correlated_noise": {
        "--bands 0": "--bands 0",
        "--batches 9 --pictures 8": "--batches 9: give at most 8, --pictures",
        "--delta 1 --pictures 8 --batches 2 --filters 1": r"target_delta is 1\.0",
    },
    "experiments.examples_per_step": {
        "--most 3": "--rows 512: give a multiple of --most 3",
        "--drawn 4 5": "--rows 512: give a multiple of --drawn 5",
        "--most 1": "--most 1: each unit would be one picture: give 2 or more",
        "--delta 1 --most 2 --rows 8 --drawn 1 --pictures 64 --filters 1": r"target_delta is 1\.0",
    },
    "experiments.kernels": {
        "--output .": r"--output \.: is a folder",
        "--crossing /proc/x/y.png": "--crossing /proc/x/y.png, in /proc/x: cannot be written to",
    },
    "experiments.matrix": {
        "--output .": r"--output \.: is a folder",
        "--families keras": "keras", "--names gpt2 --output x.md": "leave out --names",
    },
    "experiments.records": {
        "--rows scatter": "records: no row is called scatter: give ", "--seeds 0": "--seeds 0",
    },
    "experiments.simulate": {
        ". --gpus 1000000000": "--gpus 1000000000: give a number of 1 to 1,000,000 GPUs",
        "old": "old has no traces: name one that benchmark_ddp.py --profile",
        "nowhere": "nowhere is no folder: name one",
    },
    "experiments.verify_correctness": {
        "--use-tp --num-processes 3": "which 3 tensor-parallel ranks do not divide",
        "--use-fsdp --use-tp --num-processes 2": "start 4 ranks",
        "--use-fsdp --use-tp --num-processes 5": "another multiple of 2",
        "--modes no_dp": "flash_bookkeeping", "--dtype float16": "bfloat16",
        "--backend mpi": "'gloo', 'nccl'", "--backend nccl": "^(?!.*--device).*--backend nccl",
        "--num-processes 0": "--num-processes 0: give a positive number",
        "--timeout inf": "--timeout inf", "--enable-nothing": "--enable-nothing",
    },
    "experiments.local_steps": {
        "--every 0": "give a positive", "--steps 0": "give a positive",
        "--steps 10 --every 4": "--steps 10: 4 local steps do not divide it",
        "--outer-momentum 1": "--outer-momentum 1.0: give 0 or more, and less than 1",
        "--d-model 16": "--d-model 16: give a multiple of 32",
        "--context-length 100000000": "--context-length + 1 = 100000001: give more text or a sho",
        "--output /proc/x.png": "--output /proc/x.png, in /proc: cannot be written to",
    },
    "experiments.price": {
        "": "--model tiny rehearses on a CPU", "--rows 2by3": "--rows", "--rounds 0": "--rounds",
        "--output /proc/no/such/price.json": "--output", "--variants ghostly": "--variants",
        "--noise secure": "--noise has no default", "--noise bands_0": "such as bands_8",
        "--noise gaussian": "such as bands_8", "--noise default --model tiny --compile": "leave "
        "--noise out", "--noise default --variants ghost": "--variants: --noise has them",
        "--noise default --rows 12x8": "--rows 12x8 has no whole number of parts of 8",
        "--pairs --sharded": "--pairs and --sharded: give one of them",
        "--pairs --variants opacus_ghost": "--variants opacus_ghost: leave --pairs out",
        "--rank 8": "--rank: give --pairs too", "--part 4 --pairs": "--part: give --noise too",
        "--sharded --num-processes 0": "--num-processes", "--timeout 9": "give --sharded too",
    },
    "experiments.networks": {
        "--rows alexnet": "networks", "--variants ghostly": "networks", "--steps 0": "networks",
        f"{GRAPHS} --compile": "give one of the two",
        GRAPHS: r"needs a GPU.*python -m ddp_by_hand\.experiments\.networks --small",
    },
    "experiments.profile_bottlenecks": {
        "--output-dir /proc/x --cpu": "--output-dir /proc/x: cannot be written to",
        "--seq-lengths 0": "--seq-lengths 0: give a positive number",
        "--seq-lengths 16 32 16": "--seq-lengths 16: given twice", "--num-iter 1.5": "--num-iter",
        "--memory-limit-gb -1": "--memory-limit-gb -1.0",
        "--norm-algorithm width": "give --use-flash too",
    },
    "experiments.llama_fsdp": {
        f"--seed {1 << 64}": "give 0 to 2",
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
        "--output-dir short.txt --model-name tiny": "is a file",
        "--output-dir /proc/x --model-name tiny": "--output-dir /proc/x: cannot be",
        f"{ONE} --output /proc/x/y.json": "--output /proc/x/y.json, in /proc/x: cannot be",
        f"{ONE} --output .": r"--output \.: is a folder",
    },
    "experiments.plan_privacy": {
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
}  # fmt: skip
CASES = [(program, *row) for program, rows in ROWS.items() for row in rows.items()]


def main_of(program: str):
    folder = ROOT / "ddp_by_hand" / program.replace(".", "/")
    return import_module(f"ddp_by_hand.{program}{'.__main__' * folder.is_dir()}").main


def files_in(folder: Path) -> list[Path]:
    """Returns all files and folders, but for the byte code that Python keeps of a plug-in."""
    return sorted(path for path in folder.rglob("*") if "__pycache__" not in path.parts)


@pytest.mark.parametrize(("program", "words", "says"), CASES)
def test_wrong_input_is_one_line(program, words, says, capfd, monkeypatch, tmp_path):
    """Nothing is started and nothing is written."""
    if program in NEEDS:
        pytest.importorskip(NEEDS[program])
    main = main_of(program)
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_bytes(content)
    before = files_in(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("ddp_by_hand.bench.main.run_ranks", lambda *_: pytest.fail("started"))
    monkeypatch.setattr("ddp_by_hand.examples.private_images.HELD_OUT", 32)
    quick_noise(monkeypatch)
    line = [*GIVEN.get(program, "").split(), *shlex.split(words)]
    pattern = re.compile(f"{re.escape(says)}|{says}" if says[:1] != "^" else says)
    out = is_one_line(main, line, pattern, capfd)
    assert out == "" or program != "bench.main"
    is_same = files_in(tmp_path) == before
    assert is_same or program == "examples.private_images"  # which makes its folder first


@pytest.mark.parametrize("module", [
    "bench.options", "experiments.correlated_noise", "experiments.examples_per_step",
    "experiments.llama_fsdp.options", "experiments.networks.__main__",
    "experiments.plan_privacy.options", "experiments.profile_bottlenecks.options",
    "experiments.records.__main__", "experiments.verify_correctness.run",
])  # fmt: skip
def test_every_option_says_its_default_and_shows_its_value(module):
    options = [
        action
        for action in parser_of(import_module(f"ddp_by_hand.{module}").Options)._actions
        if action.help != argparse.SUPPRESS and action.dest != "help"
    ]
    assert len(options) >= 8
    for option in options:
        assert "(default: " in option.help, option.option_strings
        if module == "bench.options":
            assert option.nargs == 0 or option.choices or option.metavar, option.option_strings
