"""Bad input: one line that names the option, exit status 2, and nothing has started."""

import argparse
import errno
import os
import re
import tempfile
from pathlib import Path

import pytest

from ddp import IMPLEMENTATIONS
from ddp_by_hand.bench import main as command
from ddp_by_hand.bench.names import plain
from ddp_by_hand.bench.options import EXAMPLES, Options
from ddp_by_hand.bench.settings import settings_from, source_digest
from ddp_by_hand.bench.worker import plan
from ddp_by_hand.measure import SCHEMA_VERSION
from ddp_by_hand.measure.options import parser_of
from tests.support.benchmark_command import PLUGINS, ROOT, forked_benchmark, parse

CPU = ["--device", "cpu"]
FILES = {  # in the folder in which each case runs
    "empty.txt": b"",
    "short.txt": b"abc",
    "binary.txt": b"a\0b" * 1000,
    "broken.py": b"import nothing_of_that_name",
    "plugin.py": b"import torch\nclass Right(torch.nn.Module):\n  def forward(self): pass\n"
    b"class Number: pass\n",
    "old/results.jsonl": b'{"schema_version": 0}\n',
    "noise/results.jsonl": b"not json\n",
    "folder/results.jsonl/x": b"",
}
CASES = {
    "--profile-implementation ddp": r"--profile-implementation: give --profile too",
    "--implementations nope": "choose from none, ddp, .*path/to/file.py:ClassName",
    "--implementations plugin.py": "plugin.py: name its class too, as plugin.py:ClassName",
    "--implementations gone.py:X": "--implementations.*no file gone.py",
    "--implementations plugin.py:Gone": "--implementations.*no nn.Module of that name",
    "--implementations plugin.py:Number": "--implementations.*no nn.Module of that name",
    "--implementations plugin.py:Right": "--implementations.*finish_gradient_synchronization",
    "--implementations broken.py:X": "--implementations.*nothing_of_that_name",
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
    "--clipping ghost --noise-multiplier -1": "--noise-multiplier -1.0: give a finite number of 0",
    "--clipping ghost --noise-multiplier nan": "--noise-multiplier nan: give a finite",
    "--clipping ghost --noise-multiplier inf": "--noise-multiplier inf: give a finite",
    "--clipping ghost --max-grad-norm 0": "--max-grad-norm 0.0: give a finite number above 0",
    "--clipping ghost --max-grad-norm -2": "--max-grad-norm -2.0: give a finite number above 0",
    "--clipping ghost --max-grad-norm inf": "--max-grad-norm inf: give a finite number above 0",
    "--clipping ghost --clipping-style layer": "--clipping-style: invalid choice.*per_layer",
    "--clipping ghost --clipping-function x": "--clipping-function: invalid choice.*automatic",
    "--clipping ghost:width": "--clipping ghost:width: unknown, choose from .*flash:input_length, ",
    "--clipping flash:gram": "--clipping flash:gram: unknown, choose from .*flash:width, ",
    "--clipping flash flash:auto": "--clipping: flash appears twice",
    "--clipping flash --tile-size 24": "--tile-size: invalid choice: 24 .*16, 32, 64, 128, 256",
    "--clipping ghost --tile-size 32": "--tile-size: only fused kernels .*--clipping flash or ",
    "--tile-size 32": "--tile-size: only fused kernels",
    "--clipping flash --memory-budget-mb -1": "--memory-budget-mb -1.0: give a finite number of 0",
    "--clipping flash --memory-budget-mb nan": "--memory-budget-mb nan: give a finite",
    "--clipping flash --memory-budget-mb inf": "--memory-budget-mb inf: give a finite",
    "--clipping ghost --memory-budget-mb 9": "--memory-budget-mb: only fused kernels",
    "--clipping none bookkeeping --show-plan": "--show-plan: only fused kernels",
    "--enable-profiling --clipping ghost": "--enable-profiling: give --profile and a private",
    "--enable-profiling --profile": "--enable-profiling: give --profile and a private",
    "--profile --clipping flash --show-plan": "--show-plan: leave it out, .*summaries",
    "--noise-multiplier 1": "--noise-multiplier: only --clipping MODE.*give one of per_sample",
    "--clipping none --clipping-style flat": "--clipping-style: only --clipping MODE",
    f"--clipping none ghost --implementations {ROOT}/{PLUGINS}:Minimal": "--clipping ghost: "
    ".*:Minimal lacks method before_gradient, .*option reduce.*make it a subclass",
    "--d-model 0": "--d-model 0: give a positive",
    "--num-layers -1": "--num-layers -1: give a positive",
    "--num-heads 0": "--num-heads 0: give a positive",
    "--d-ff 0": "--d-ff 0: give a positive",
    "--vocab-size 0": "--vocab-size 0: give a positive",
    "--context-length 0": "--context-length 0: give a positive",
    "--batch-size 0": "--batch-size 0: give a positive",
    "--batch-size 2.5": "--batch-size: invalid int value",
    "--num-epochs 0": "--num-epochs 0: give a positive",
    "--steps-per-epoch 0": "--steps-per-epoch 0: give a positive",
    "--rounds 0": "--rounds 0: give a positive",
    "--num-processes 0": "--num-processes 0: give a positive",
    "--every 0": "--every 0: give a positive",
    "--implementations ddp --every 2": "--every: only diloco has rounds",
    "--every 5": "--every 5: give a number that divides the 12 steps and is at most 6",
    "--every 12": "--every 12: give a number that divides the 12 steps and is at most 6",
    "--clipping ghost --implementations diloco": "--clipping ghost: diloco steps .*leave d",
    "--bucket-size-mb 0": "--bucket-size-mb 0.0: give a positive",
    "--bucket-size-mb nan": "--bucket-size-mb nan: give a positive",
    "--timeout inf": "--timeout inf: give a positive",
    "--d-model 30": "--num-heads .* does not divide --d-model 30: choose",
    "--d-model 12 --num-heads 4": "--d-model 12 over --num-heads 4.*choose",
    "--warmup-epochs -1": "--warmup-epochs -1: give 0 or more",
    "--warmup-epochs 3": "--warmup-epochs 3 exceeds --num-epochs 2.*give",
    "--warmup-epochs 2": "--warmup-epochs 2 leaves no epoch to time.*give",
    "--seed -1": "--seed -1: give 0 or more",
    "--vocab-size 255": "--vocab-size is 255.*256 or more",
    "--data gone.txt": "--data .*gone.txt' does not exist: give",
    "--data ''": "--data '' does not exist: give",
    "--data empty.txt": "--data .*empty.txt' is empty: give",
    "--data binary.txt": "--data .*binary.txt' is binary.*give",
    "--data short.txt": r"--data .*short.txt' holds 3 bytes.*--context-length \+ 1 = 129: give",
    "--dtype float16": "--dtype: invalid choice.*mixed",
    "--preset huge": "--preset: invalid choice.*laptop",
    "--nope": "--nope",
    "--output-dir short.txt": "--output-dir short.txt: short.txt is a file, name a folder",
    "--output-dir short.txt/x": "--output-dir short.txt/x: .*short.txt is a file, name a folder",
    "--output-dir /proc/x": "--output-dir /proc/x: cannot be written to.*name another",
    "--output-dir old": "--output-dir: .*schema version 0.*name another",
    "--output-dir noise": "--output-dir: .*results.jsonl, line 1: not a JSON line",
    "--output-dir folder": "--output-dir: .*results.jsonl",
    "--profile --profile-output-dir short.txt": "--profile-output-dir short.txt: .*name a folder",
    "--profile --profile-output-dir /proc/x": "--profile-output-dir /proc/x: cannot be written",
}


@pytest.fixture
def no_workers(monkeypatch, tmp_path):
    """The files of the cases lie in the current folder, and any start is a failure."""
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_bytes(content)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "run_ranks", lambda *_: pytest.fail("workers were started"))


@pytest.mark.parametrize("line", CASES)
def test_bad_input_is_one_line_and_status_2(no_workers, capfd, line):
    with pytest.raises(SystemExit) as stopped:
        raise SystemExit(command.main([*CPU, *line.replace("''", "").split(" ")]))
    out, err = capfd.readouterr()
    assert stopped.value.code == 2
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("ddp_by_hand.bench: ")
    assert re.search(CASES[line], err), err


def test_cuda_without_a_gpu(no_workers, capfd, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert command.main(["--device", "cuda"]) == 2
    assert "--device cuda: " in (err := capfd.readouterr().err)
    assert err.count("\n") == 1


def test_a_folder_without_permission(no_workers, capfd, monkeypatch):
    def refused(**options):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(tempfile, "TemporaryDirectory", refused)  # the superuser may write anywhere
    assert command.main([*CPU, "--output-dir", "new", "--dry-run"]) == 2
    assert "--output-dir new: cannot be written to (Permission denied)" in capfd.readouterr().err
    assert not Path("new").exists()


def test_the_script_itself_exits_with_2():
    run = forked_benchmark("--implementations", "nope")
    assert run.returncode == 2
    assert run.stdout == ""
    assert run.stderr.count("\n") == 1


@pytest.mark.parametrize("mode", [[], ["--profile"]])
def test_a_dry_run_starts_and_writes_nothing(no_workers, capfd, tmp_path, mode):
    before = sorted(tmp_path.rglob("*"))
    assert command.main([*CPU, *mode, "--dry-run"]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    assert out.startswith("gloo, 2 processes on CPU (as asked)\nmodel: 1,115,264 parameters")
    cells = len(IMPLEMENTATIONS) * (1 + 5)  # a gate and five rounds each
    assert (f"{cells} cells" in out) != bool(mode)
    assert sorted(tmp_path.rglob("*")) == before


def test_help_tells_default_and_effect_of_every_option(capsys):
    with pytest.raises(SystemExit) as stopped:
        command.main(["--help"])
    text = capsys.readouterr().out
    assert stopped.value.code == 0
    assert EXAMPLES in text
    for group in ("what to compare", "privacy", "model", "run", "output", "profile mode"):
        assert f"\n{group}" in text
    actions = parser_of(Options)._actions
    options = [action for action in actions if not isinstance(action, argparse._HelpAction)]
    assert len(options) >= 30
    for action in options:
        assert "(default: " in action.help, action.option_strings
        assert action.nargs == 0 or action.choices or action.metavar, action.option_strings


def test_settings_and_data_follow_options(tmp_path, monkeypatch):
    settings = settings_from(parse(["--preset", "small", "--d-ff", "64"]), "cpu", "folder")
    assert (settings.model.d_model, settings.model.d_ff) == (768, 64)
    assert (settings.steps_per_epoch, settings.output_dir) == (6, "folder")
    one = ["--profile", "--profile-implementation", "ddp"]
    settings = settings_from(parse(one), "cuda", "folder")
    assert (settings.implementations, settings.steps_per_epoch) == (("ddp",), 3)
    assert settings.model.num_layers == 12  # `small` on GPUs
    (tmp_path / "text.txt").write_text("word " * 100)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for path in ("~/text.txt", "text.txt"):
        assert settings_from(parse(["--data", path]), "cpu", "").data == str(tmp_path / "text.txt")


def test_an_edited_plugin_is_another_implementation(tmp_path):
    (tmp_path / "mine.py").write_text("a = 1")
    first = source_digest(f"{tmp_path}/mine.py:Mine")
    (tmp_path / "mine.py").write_text("a = 2")
    source_digest.cache_clear()
    assert first != source_digest(f"{tmp_path}/mine.py:Mine")
    assert source_digest("ddp") is None


def test_a_folder_of_this_schema_is_resumed(no_workers, tmp_path):
    row = f'{{"schema_version": {SCHEMA_VERSION}, "key": "k", "status": "ok"}}\n'
    (tmp_path / "old/results.jsonl").write_text(row)
    assert command.main([*CPU, "--output-dir", "old", "--dry-run"]) == 0


CLASS = """
class {}(__import__("torch").nn.Module):
    def finish_gradient_synchronization(self): ...
"""


def test_plugins_of_one_name_have_titles_files_and_keys_of_their_own(tmp_path, monkeypatch):
    for file in ("a/mine.py", "b/mine.py", "a/other.py"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(CLASS.format("Mine") + CLASS.format("ddp"))
    monkeypatch.chdir(tmp_path)
    given = {
        "none": "none",
        "a/mine.py:Mine": "a/mine.Mine",
        "b/mine.py:Mine": "b/mine.Mine",
        "a/other.py:Mine": "other.Mine",
        "./b/mine.py:Mine": "b/mine.Mine#2",
        "b/mine.py:ddp": "mine.ddp",  # a built-in one has that name
    }
    names = [*given, "a/mine.py:Mine", "a/mine.py:Mine"]
    settings = settings_from(parse(["--implementations", *names]), "cpu", tmp_path)
    titles = [subject.label for subject in settings.subjects]
    assert titles == [*given.values(), "a/mine.Mine#2", "a/mine.Mine#3"]
    assert len({subject.file_stem for subject in settings.subjects}) == len(names)
    cells = plan(settings)
    assert len({cell.row(settings, 2, "cpu")["key"] for cell in cells}) == len(cells)
    assert {cell.label.partition(" ")[0] for cell in cells} == set(titles)
    assert {plain(name) for name in settings.implementations} == set(given)


def test_a_plugin_alone_is_called_by_its_class(tmp_path):
    (tmp_path / "mine.py").write_text(CLASS.format("Mine"))
    settings = settings_from(
        parse(["--implementations", "ddp", f"{tmp_path}/mine.py:Mine", "--clipping", "none"]),
        "cpu", tmp_path,
    )  # fmt: skip
    assert [subject.file_stem for subject in settings.subjects] == ["ddp", "Mine"]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import torch\nx = {}\ny = x['no']\n", r"KeyError\('no'\), at .*:3: y = x\['no'\]"),
        ("a = 1\ndef f(:\n", "SyntaxError.*, at .*:2: def f\\(:"),
        ("import sys\nsys.exit(0)\n", "SystemExit\\(0\\), at .*:2: sys.exit\\(0\\)"),
    ],
)
def test_a_plugin_that_cannot_be_imported_is_refused_with_its_line(
    no_workers, tmp_path, capfd, source, said
):
    (tmp_path / "mine.py").write_text(source)
    assert command.main([*CPU, "--implementations", f"{tmp_path}/mine.py:Mine"]) == 2
    error = capfd.readouterr().err
    assert re.search(said, error), error
    assert error.count("\n") == 1
