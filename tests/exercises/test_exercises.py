"""Every solution passes; every starter and every usual mistake fails, and is told why."""

import os
import subprocess
import sys
from itertools import groupby
from pathlib import Path

import pytest

from ddp import implementation
from exercises import EXERCISES
from exercises.attempt import Verdict
from exercises.check import main
from exercises.judge import Ranks, Result, explain, explain_stall, judge, load_check

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CLASSES = {
    "average": "AverageDDP",
    "hooks": "OverlapDDP",
    "order": "OrderedDDP",
    "no_sync": "AccumulatingDDP",
    "unused": "UnusedDDP",
    "flat": "FlatDDP",
}

# file of wrong/ -> the first property that it lacks, and part of what is said
MISTAKES = {
    "average_no_buffers": ("Every rank begins with rank 0's buffers", "broadcast module.buffers()"),
    "average_sum": ("After finish every gradient is the mean", "the sum over the ranks, divide"),
    "average_parameters": ("After finish every gradient is the mean", "nothing was averaged"),
    "average_frozen": ("After finish every gradient is the mean", "raised TypeError"),
    "average_one_rank": ("Every rank begins with rank 0's param", "not matched on rank 0: call 1"),
    "hooks_parameter": ("After finish every gradient", "itself was reduced, and not its .grad"),
    "hooks_leaked_handles": ("In each of three steps finish waits", "[8, 16, 24]"),
    "hooks_blocking": ("Nothing waits while backward goes on", "without async_op=True"),
    "hooks_all_at_the_end": ("The first all-reduce starts before", "none was started before"),
    "hooks_before_accumulation": ("After finish every gradient", "after it was accumulated"),
    "measure_lengths": ("An instant that two intervals", "computation is 15 and should be 10"),
    "measure_pairs": ("An instant that two intervals", "overlapped is 14 and should be 6"),
    "measure_idle": ("Communication beside computation", "idle is 4 and should be 8"),
    "measure_window": ("What lies outside the window", "computation is 18 and should be 6"),
    "plan_forward_order": ("Gradients stand in their order of arrival", "bucket [0, 1, 2]"),
    "plan_mixed_dtypes": ("A bucket holds one dtype", "bucket [7, 6, 5] holds two dtypes"),
    "plan_no_tail": ("The bucket that is complete last", "[2, 1, 0] has 120 bytes"),
    "plan_overfull": ("A bucket of several gradients", "bucket [6, 4, 2] has 120 bytes"),
    "plan_one_each": ("Buckets are filled", "10 buckets of float32"),
    "order_of_readiness": ("When each rank takes them in its own order", "no error was raised"),
    "order_own_observation": ("When each rank takes them in its own order", "mixes different"),
    "order_all_at_the_end": ("The first all-reduce starts before", "none was started during"),
    "order_not_reset": ("Two more steps", "raised TypeError"),
    "no_sync_without_finally": ("After an exception inside no_sync", "restore it in a `finally`"),
    "no_sync_not_nested": ("The end of an inner block", "restore what was there before it"),
    "no_sync_ignored": ("Inside no_sync no collective starts", "16 calls of all_reduce"),
    "no_sync_divides_all": ("Finish after backwards inside no_sync", "what was reduced may be"),
    "unused_zeros_for_all": ("What no rank used keeps .grad None", "AdamW would decay it"),
    "unused_divided_by_users": ("What only rank 0 used", "divide by all"),
    "unused_skipped": ("What only rank 0 used", "a collective was not matched on rank 1"),
    "ring_all_send_first": ("Twelve numbers", "a send was not matched on rank 1"),
    "ring_drops_remainder": ("So do numbers that the ranks do not divide", "is number 12"),
    "ring_ready_made": ("No ready-made collective", "all_reduce was called"),
    "ring_whole_tensor": ("Each rank sends 2 (W - 1) / W", "with 3 ranks, rank 0 sent 9600"),
    "flat_copied_back": ("After finish every .grad is a view", "lies outside of the flat tensors"),
    "flat_bound_once": ("Right after zero_grad(), which", "must be brought into the flat tensor"),
    "flat_as_complete": ("When each rank's gradients", "a collective was not matched on rank 1"),
    "flat_forward_order": ("The first bucket starts before", "no bucket was started"),
    "flat_no_tail": ("The bucket that starts last", "nothing to hide behind"),
}
FAST_PER_EXERCISE = 2


@pytest.fixture(scope="module")
def ranks():
    pool = Ranks(3)
    yield pool
    pool.close()


def exercise_of(mistake: str) -> str:
    return next(name for name in EXERCISES if mistake.startswith(name + "_"))


def mistakes() -> list:
    """The first two of each exercise in every run, the others as slow ones."""
    cases = []
    for _, group in groupby(MISTAKES, exercise_of):
        for place, name in enumerate(group):
            marks = [pytest.mark.slow] if place >= FAST_PER_EXERCISE else []
            cases.append(pytest.param(name, marks=marks))
    return cases


def first_wrong(results) -> Result:
    return next(result for result in results if result.verdict == "wrong")


@pytest.mark.parametrize("name", EXERCISES)
def test_solution_is_right(ranks, name):
    solution = HERE / "solutions" / f"{name}.py"
    results = list(judge(EXERCISES[name], solution, ranks, patience_s=60))
    assert [r for r in results if r.verdict != "right"] == []


@pytest.mark.parametrize("name", EXERCISES)
def test_starter_is_told_what_to_fill_in(ranks, name):
    starter = ROOT / "exercises" / EXERCISES[name] / "starter.py"
    result = next(judge(EXERCISES[name], starter, ranks))
    assert result.verdict == "wrong"
    assert "fill in: " in result.why
    assert "(starter.py, line " in result.why


@pytest.mark.parametrize("mistake", mistakes())
def test_mistake_is_told(ranks, mistake):
    path = HERE / "wrong" / f"{mistake}.py"
    result = first_wrong(judge(EXERCISES[exercise_of(mistake)], path, ranks, patience_s=2))
    prefix, why = MISTAKES[mistake]
    assert result.text.startswith(prefix)
    assert why in result.why


def test_every_mistake_is_in_the_table_twice_an_exercise():
    assert {p.stem for p in (HERE / "wrong").glob("*.py")} == set(MISTAKES)
    for name in EXERCISES:
        assert sum(exercise_of(mistake) == name for mistake in MISTAKES) >= 2


def test_after_a_stall_the_rest_is_skipped_and_the_pool_still_works(ranks):
    results = list(judge("ex7_unused", HERE / "wrong/unused_skipped.py", ranks, patience_s=1))
    assert [r.verdict for r in results] == ["right", "wrong", "skipped", "skipped", "skipped"]
    assert "a collective was not matched on rank 1: call 13 of rank 0" in results[1].why
    assert "; rank 0 waits (unused_skipped.py, line 14)" in results[1].why
    assert next(judge("ex4_plan", HERE / "solutions/plan.py", ranks)).verdict == "right"


@pytest.mark.slow
@pytest.mark.parametrize("body", ["while True: pass", "import os; os._exit(3)"])
def test_endless_loop_and_death(ranks, tmp_path, body):
    path = tmp_path / "mine.py"
    path.write_text(f"def plan_buckets(*a, **k):\n    {body}\n")
    result = next(judge("ex4_plan", path, ranks, patience_s=1))
    assert "rank 0 gave no answer" in result.why
    assert next(judge("ex4_plan", HERE / "solutions/plan.py", ranks)).verdict == "right"


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


def call(what: str, numel: int = 4, peer: int | None = None) -> dict:
    return {"what": what, "numel": numel, "peer": peer}


@pytest.mark.parametrize(
    ("stuck", "calls", "text"),
    [
        (
            [0],
            [[call("all_reduce")], []],
            "a collective was not matched on rank 1: call 1 of rank 0 is all_reduce of 4 numbers, "
            "and rank 1 issued none",
        ),
        (
            [0, 1],
            [[call("barrier"), call("all_reduce")], [call("barrier"), call("broadcast", 6)]],
            "a collective was not matched on rank 1: call 2 of rank 0 is all_reduce of 4 numbers, "
            "and rank 1 issued broadcast of 6 numbers",
        ),
        (
            [1],
            [[], [call("recv", 4, 0)]],
            "a recv was not matched on rank 0: rank 1 waits in recv from rank 0 of 4 numbers while "
            "rank 0 has gone on",
        ),
    ],
)
def test_explanation_of_a_stall(stuck, calls, text):
    assert explain_stall(stuck, calls) == text
    verdicts = [None if r in stuck else Verdict("right") for r in range(2)]
    assert explain(verdicts, calls) == (text, True)


def test_an_exception_is_told_before_the_stall_that_it_causes():
    verdicts = [Verdict("stalled"), Verdict("raised", "KeyError: 'x' (mine.py, line 3)")]
    expected = "rank 1 raised KeyError: 'x' (mine.py, line 3)"
    assert explain(verdicts, [[call("all_reduce")], []]) == (expected, True)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "usage: python -m exercises.check NAME my_file.py"),
        (["nothing", "x.py"], "there is no exercise 'nothing': choose from average, hooks"),
        (["plan", "x.py"], "there is no file x.py: copy exercises/ex4_plan/starter.py there"),
    ],
)
def test_wrong_command(capsys, arguments, text):
    assert main(arguments) == 2
    assert text in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("which", ["solutions/plan.py", "wrong/plan_no_tail.py"])
def test_command(which):
    """Its fast siblings call what it calls."""
    command = [sys.executable, "-m", "exercises.check", "plan", str(HERE / which)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    right = which.startswith("solutions")
    assert done.returncode == (0 if right else 1), done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(load_check("ex4_plan").PROPERTIES) + 1
    assert lines[-1] == ("7 of 7 right" if right else "6 of 7 right")
    assert done.stderr == ""


def test_texts_name_the_commands():
    readme = (ROOT / "exercises/README.md").read_text()
    for name, folder in EXERCISES.items():
        starter = (ROOT / "exercises" / folder / "starter.py").read_text()
        assert f"python -m exercises.check {name} my_{name}.py" in starter
        assert f"`{folder}/" in readme
        if name in CLASSES:
            assert f"my_{name}.py:{CLASSES[name]}" in starter


@pytest.mark.parametrize("name", CLASSES)
def test_class_fits_the_benchmark(name):
    implementation(f"{HERE / 'solutions' / name}.py:{CLASSES[name]}")


@pytest.mark.slow
def test_classes_run_in_the_benchmark(tmp_path):
    """Each passes the benchmark's own gate and is timed; its fast sibling loads it."""
    names = [f"{HERE / 'solutions' / name}.py:{CLASSES[name]}" for name in CLASSES]
    options = (
        "--d-model 16 --num-layers 1 --num-heads 2 --d-ff 32 --context-length 16 --batch-size 2 "
        f"--rounds 1 --steps-per-epoch 2 --device cpu --data synthetic --output-dir {tmp_path}"
    )
    done = subprocess.run(
        [sys.executable, "benchmark_ddp.py", *options.split(), "--implementations", *names],
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_file_of_another_exercise_is_refused_before_ranks_start(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("exercises.check.Ranks", None)
    path = tmp_path / "my_average.py"
    path.write_text("class AverageDDP:\n    pass\n")
    assert main(["hooks", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "does not define OverlapDDP: start from exercises/ex2_hooks/starter.py" in error
