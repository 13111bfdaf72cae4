"""Every solution passes; every starter and every usual mistake fails, and is told why."""

import importlib
import inspect
import os
import subprocess
import sys
from itertools import groupby
from pathlib import Path

import pytest

from ddp import implementation
from ddp_by_hand.exercises import EXERCISES, starter_of
from ddp_by_hand.exercises.__main__ import main as command
from ddp_by_hand.exercises.check import main
from ddp_by_hand.exercises.judge import (
    PATIENCE_S,
    Ranks,
    Result,
    judge,
    patience,
)
from tests.exercises.mistakes import MISTAKES

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CLASSES = {
    "average": "AverageDDP",
    "hooks": "OverlapDDP",
    "order": "OrderedDDP",
    "no_sync": "AccumulatingDDP",
    "unused": "UnusedDDP",
    "flat": "FlatDDP",
    "zero1": "StateShardedDDP",
    "zero2": "GradientShardedDDP",
    "fsdp": "FullyShardedDDP",
    "diloco": "LocalStepsDDP",
}

PARTS = {name: (kind,) for name, kind in CLASSES.items()} | {
    "measure": ("measure", "covered"), "plan": ("plan_buckets",),
    "predict": ("all_reduce_seconds", "step_seconds", "last_that_pays"),
    "ring": ("ring_all_reduce", "pass_on"), "fsdp": ("MyUnit", "FullyShardedDDP"),
}  # fmt: skip
SOLUTIONS = HERE / "solutions.py"
SHARDED_SOLUTIONS = HERE / "sharded_solutions.py"  # of exercises 10 to 12
FAST_PER_EXERCISE = 1


@pytest.fixture(scope="module")
def ranks():
    pool = Ranks(3)
    yield pool
    pool.close()


def solution_of(name: str) -> Path:
    return SHARDED_SOLUTIONS if name in ("zero1", "zero2", "fsdp") else SOLUTIONS


def write_mistake(name: str, folder: Path) -> Path:
    """A learner's file that makes this mistake."""
    exercise, _, _, *changes = MISTAKES[name]
    module = importlib.import_module(f"tests.exercises.{solution_of(exercise).stem}")
    text = "\n\n".join(inspect.getsource(getattr(module, part)) for part in PARTS[exercise])
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        text = replace_once(text, old, new)
    path = folder / f"{name}.py"
    path.write_text(f"from {module.__name__} import *\n\n\n{text}")
    return path


def replace_once(text: str, old: str, new: str) -> str:
    """The text with other lines, which are indented as those that they replace."""
    first = next(line for line in text.splitlines() if old.splitlines()[0] in line)
    old, new = (
        lines.replace("\n", "\n" + first[: len(first) - len(first.lstrip())])
        for lines in (old, new)
    )
    assert text.count(old) == 1, old
    return text.replace(old, new)


def mistakes() -> list:
    """The first of each exercise in every run, the others as slow ones."""
    cases = []
    groups = [list(group) for _, group in groupby(MISTAKES, lambda name: MISTAKES[name][0])]
    assert len(groups) == len(EXERCISES) and min(map(len, groups)) >= 2  # noqa: PT018
    for group in groups:
        for place, name in enumerate(group):
            marks = [pytest.mark.slow] if place >= FAST_PER_EXERCISE else []
            cases.append(pytest.param(name, marks=marks))
    return cases


def first_wrong(results) -> Result:
    return next(result for result in results if result.verdict == "wrong")


OTHERS = [
    pytest.param(name, HERE / "other_solutions.py", id=f"another {name}", marks=pytest.mark.slow)
    for name in ("zero1", "zero2", "fsdp")
] + [pytest.param("average", HERE / "other_solutions.py", id="the whole of ddp")]


@pytest.mark.parametrize(
    ("name", "path"),
    [*(pytest.param(name, solution_of(name), id=name) for name in EXERCISES), *OTHERS],
)
def test_solution_is_right(ranks, name, path):
    results = list(judge(EXERCISES[name], path, ranks, patience_s=60))
    assert [r for r in results if r.verdict != "right"] == []


def test_a_hint_about_later_steps_is_not_given_for_a_wrong_first_one(ranks, tmp_path):
    path = tmp_path / "sums.py"
    path.write_text(
        "from tests.exercises.solutions import OverlapDDP as Right\n\n\n"
        "class OverlapDDP(Right):\n"
        "    def finish_gradient_synchronization(self):\n"
        "        for handle, _ in self.handles:\n"
        "            handle.wait()\n"
        "        self.handles.clear()\n"
    )
    *_, last = judge(EXERCISES["hooks"], path, ranks, patience_s=60)
    assert last.why.endswith("wrong in the first step already: see the first property")


@pytest.mark.parametrize("name", EXERCISES)
def test_starter_is_told_what_to_fill_in(ranks, name):
    starter = ROOT / "ddp_by_hand/exercises" / EXERCISES[name] / "starter.py"
    assert "\\\\" not in starter.read_text()  # its commands can be pasted
    result = next(judge(EXERCISES[name], starter, ranks))
    assert result.verdict == "wrong"
    assert "fill in: " in result.why
    assert "(starter.py, line " in result.why


@pytest.mark.parametrize("name", mistakes())
def test_mistake_is_told(ranks, tmp_path, name):
    exercise, text, why, *_ = MISTAKES[name]
    path = write_mistake(name, tmp_path)
    result = first_wrong(judge(EXERCISES[exercise], path, ranks, patience_s=2))
    assert result.text.startswith(text)
    assert why in result.why


def test_after_a_stall_the_rest_is_skipped_and_the_pool_still_works(ranks, tmp_path):
    path = write_mistake("UnusedSkipped", tmp_path)
    results = list(judge("ex7_unused", path, ranks, patience_s=1))
    assert [r.verdict for r in results] == ["right", "wrong", "skipped", "skipped", "skipped"]
    assert "a collective was not matched on rank 1: call 13 of rank 0" in results[1].why
    lines = path.read_text().splitlines()
    line = 1 + next(i for i, text in enumerate(lines) if "dist.all_reduce(" in text)
    assert f"; rank 0 waits (UnusedSkipped.py, line {line})" in results[1].why
    assert next(judge("ex4_plan", SOLUTIONS, ranks)).verdict == "right"


def test_a_busy_machine_has_more_patience(monkeypatch):
    cores = os.cpu_count()
    monkeypatch.setattr(os, "getloadavg", lambda: (0.5 * cores, 0, 0))
    assert patience() == PATIENCE_S
    monkeypatch.setattr(os, "getloadavg", lambda: (4 * cores, 0, 0))
    assert patience() == 4 * PATIENCE_S


@pytest.mark.slow
@pytest.mark.parametrize("body", ["while True: pass", "import os; os._exit(3)"])
def test_endless_loop_and_death(ranks, tmp_path, body):
    path = tmp_path / "mine.py"
    path.write_text(f"def plan_buckets(*a, **k):\n    {body}\n")
    result = next(judge("ex4_plan", path, ranks, patience_s=1))
    assert "rank 0 gave no answer" in result.why
    assert next(judge("ex4_plan", SOLUTIONS, ranks)).verdict == "right"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("def plan_buckets(:", "raised SyntaxError: invalid syntax (mine.py, line 1)"),
        ("x = 1", "raised AttributeError"),
        ("import sys\nsys.exit()", "raised SystemExit"),
        ("def plan_buckets(*a, **k):\n    return None", "should be a list of lists"),
    ],
)
def test_broken_file_is_told(ranks, tmp_path, text, why):
    path = tmp_path / "mine.py"
    path.write_text(text)
    assert why in next(judge("ex4_plan", path, ranks)).why


def test_an_exercise_begins_with_a_copy_of_its_starter(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name, file in (("average", "my_average.py"), ("ring", "own.py")):
        assert command(["start", name, *([file] if file == "own.py" else [])]) == 0
        assert Path(file).read_text() == starter_of(name).read_text()
        assert f"python -m ddp_by_hand.exercises check {name} {file}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["start", "ring", "there.py"], "there.py is there already: name another file"),
        (["start", "rings"], "there is no exercise 'rings': choose from average, hooks"),
        (["start", "ring", "none/my_ring.py"], "there is no folder none: make it, or name another"),
        (["start", "ring", "/proc/my_ring.py"], "/proc/my_ring.py cannot be written: "),
        (["start"], "usage: python -m ddp_by_hand.exercises start NAME [FILE]"),
        (["begin", "ring"], "usage: python -m ddp_by_hand.exercises start NAME [FILE]"),
        *(
            (["check", *arguments], "usage: python -m ddp_by_hand.exercises check NAME my_file.py")
            for arguments in ([], ["ring"])
        ),
        (["check", "nothing", "x"], "there is no exercise 'nothing': choose from average, hooks"),
        (["check", "plan", "x"], "no file x: python -m ddp_by_hand.exercises start plan x writes"),
    ],
)
def test_a_wrong_command(capsys, monkeypatch, tmp_path, arguments, text):
    monkeypatch.chdir(tmp_path)
    Path("there.py").write_text("mine")
    assert command(arguments) == 2
    assert text in capsys.readouterr().err
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


def test_texts_name_the_commands():
    readme = (ROOT / "ddp_by_hand/exercises/README.md").read_text()
    for name, folder in EXERCISES.items():
        starter = (ROOT / "ddp_by_hand/exercises" / folder / "starter.py").read_text()
        assert f"ddp-exercise check {name} my_{name}.py" in starter
        assert f"`{folder}/" in readme
        if name in CLASSES and name != "diloco":  # whose gradients are those of one rank
            assert f"my_{name}.py:{CLASSES[name]}" in starter


@pytest.mark.parametrize("name", CLASSES)
def test_class_fits_the_benchmark(name):
    implementation(f"{solution_of(name)}:{CLASSES[name]}")


@pytest.mark.slow
def test_classes_run_in_the_benchmark(tmp_path):
    """Each passes the benchmark's own gate and is timed; its fast sibling loads it."""
    names = [f"{solution_of(name)}:{CLASSES[name]}" for name in CLASSES]
    options = (
        "--d-model 16 --num-layers 1 --num-heads 2 --d-ff 32 --context-length 16 --batch-size 2 "
        f"--rounds 1 --steps-per-epoch 2 --device cpu --data synthetic --output-dir {tmp_path}"
    )
    done = subprocess.run(
        [sys.executable, "benchmark_ddp.py", *options.split(), "--implementations", *names],
        cwd=ROOT, env=os.environ | {"COLUMNS": "200"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_file_of_another_exercise_is_refused_before_ranks_start(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("ddp_by_hand.exercises.check.Ranks", None)
    path = tmp_path / "my_average.py"
    path.write_text("class AverageDDP:\n    pass\n")
    assert main(["hooks", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "does not define OverlapDDP: start from what `python -m ddp_by_hand.exercises" in error
