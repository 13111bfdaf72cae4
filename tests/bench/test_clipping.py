"""`--clipping`: every implementation in every mode, in the same table, traces and pictures."""

import re
from itertools import pairwise

import pytest

from ddp import IMPLEMENTATIONS
from ddp_by_hand.bench import main as command
from ddp_by_hand.bench.gate import tolerance
from ddp_by_hand.bench.options import CLIPPING_NAMES, FUSED_MODES, PRIVATE_MODES
from ddp_by_hand.bench.report import report
from ddp_by_hand.bench.settings import Privacy, Subject, settings_from
from ddp_by_hand.bench.worker import GATE, TIMING, plan
from ddp_by_hand.measure import Results
from tests.bench.test_profile import ranges
from tests.support.benchmark_command import PLUGINS, benchmark, forked_benchmark, parse

NAMES = ["none", "ddp", "torch_ddp"]
BOTH = ["--clipping", "none", "bookkeeping"]
PARTS = ["norm_pass", "clip_coefficients", "weighted_sum"]


def settings_for(*arguments, folder="folder"):
    return settings_from(parse([str(a) for a in arguments]), "cpu", folder)


def config_of(cell, settings):
    return cell.row(settings, 2, "cpu")["config"]


def test_names_and_defaults():
    assert CLIPPING_NAMES[:2] == ("per_sample", "ghost")
    assert {name.partition(":")[0] for name in CLIPPING_NAMES if ":" in name} == {*FUSED_MODES}
    assert settings_for().privacy == Privacy(1.0, 1.0, "flat", "abadi")
    assert settings_for().clippings == settings_for("--clipping", "no_dp").clippings == ("none",)
    assert settings_for("--clipping", "flash:auto").clippings == ("flash",)
    subject = Subject("my.py:Mine", "ghost")
    assert (subject.label, subject.file_stem) == ("Mine:ghost", "Mine_ghost")
    assert Subject("ddp").label == Subject("ddp").file_stem == "ddp"
    subject = Subject("ddp", "flash:width")
    assert (subject.label, subject.file_stem) == ("ddp:flash:width", "ddp_flash_width")


def test_every_implementation_meets_every_mode_in_every_round():
    settings = settings_for("--implementations", *NAMES, "--rounds", 2, *BOTH)
    subjects = [Subject(name, mode) for name in NAMES for mode in ("none", "bookkeeping")]
    assert settings.subjects == subjects
    cells = plan(settings)
    gates = [cell.subject for cell in cells if cell.kind == GATE]
    assert (len(gates), set(gates)) == (6, set(subjects))
    assert [gate.is_private for gate in gates] == [False] * 3 + [True] * 3  # a reference at a time
    for number in range(2):
        timed = [c.subject for c in cells if c.kind == TIMING and c.round == number]
        assert (len(timed), set(timed)) == (6, set(subjects))


def test_ordinary_cells_have_the_keys_of_runs_without_privacy(monkeypatch):
    ordinary = settings_for("--implementations", *NAMES)
    mixed = settings_for("--implementations", *NAMES, *BOTH, "--max-grad-norm", 3)
    assert "clipping" not in config_of(plan(ordinary)[0], ordinary)
    keys = {cell.row(ordinary, 2, "cpu")["key"] for cell in plan(ordinary)}
    others = {c.row(mixed, 2, "cpu")["key"] for c in plan(mixed) if not c.subject.is_private}
    assert keys == others
    monkeypatch.setattr("torch.__version__", "2.13.0")
    settings = settings_for("--implementations", "ddp", "--data", "synthetic")
    cell = plan(settings)[0]
    assert cell.row(settings, 2, "cpu")["key"] == "dd62c3df9276af7d"


PRIVACY = [
    [], ["--noise-multiplier", "0"], ["--max-grad-norm", "0.5"], ["--clipping-style", "per_layer"],
    ["--clipping-function", "automatic"],
]  # fmt: skip
FUSED = [[], ["--tile-size", 32], ["--memory-budget-mb", 0], ["--memory-budget-mb", 1.5]]


@pytest.mark.parametrize(
    ("modes", "options", "alike"),
    [
        (["ghost", "flash"], PRIVACY, []),
        (["flash", "flash:width", "flash:input_length", "flash_bookkeeping:width"], FUSED, []),
        (["ghost", "flash"], FUSED, ["ghost"]),
        (["flash"], [[], ["--show-plan"]], ["flash"]),
    ],
    ids=["privacy", "fused", "of fused modes alone", "the plan"],
)
def test_cells_differ_by_mode_and_by_what_changes_a_measurement(modes, options, alike):
    """Compares the keys of cells; those of modes in `alike` are the same with each option."""
    keys = {mode: set() for mode in modes}
    for more in options:
        settings = settings_for("--implementations", "ddp", "--clipping", *modes, *more)
        for cell in plan(settings):
            row, mode = cell.row(settings, 2, "cpu"), cell.subject.clipping
            assert row["clipping"] == mode
            assert row["config"]["clipping"]["mode"] == mode.partition(":")[0]
            keys[mode].add(row["key"])
    cells = len(plan(settings)) // len(modes)
    assert {mode: len(found) // cells for mode, found in keys.items()} == {
        mode: 1 if mode in alike else len(options) for mode in modes
    }
    assert len(set.union(*keys.values())) == sum(map(len, keys.values()))


def test_only_gram_matrices_have_an_allowance():
    settings = settings_for("--context-length", 128)
    assert tolerance(Subject("ddp", "flash"), settings) == 1e-4
    assert tolerance(Subject("ddp", "flash:input_length"), settings) == 1e-4
    assert 2e-3 < tolerance(Subject("ddp", "flash:width"), settings) < 2.1e-3


@pytest.mark.parametrize("mode", [[], ["--profile"]])
def test_a_dry_run_tells_modes_and_settings(capsys, tmp_path, mode):
    line = [*BOTH, "--noise-multiplier", "0.5", "--clipping-style", "per_layer", "--dry-run"]
    assert command.main(["--device", "cpu", "--output-dir", str(tmp_path), *mode, *line]) == 0
    out = capsys.readouterr().out
    assert "clipping: none, bookkeeping; noise multiplier 0.5, gradient norm 1 (per_layer, " in out
    assert "no ε is stated" in out
    public = ["torch_fsdp", "diloco"]  # private training is not for them
    cells = (len(IMPLEMENTATIONS) - len(public)) * len(BOTH[1:]) * (1 + 5)
    assert (f"{cells} cells" in out) != bool(mode)


STEPS = {  # in table order
    Subject("none"): 100.0,
    Subject("none", "bookkeeping"): 200.0,
    Subject("ddp"): 150.0,
    Subject("ddp", "bookkeeping"): 240.0,
    Subject("torch_ddp"): 120.0,
    Subject("torch_ddp", "bookkeeping"): 300.0,
}


@pytest.fixture
def pictures(monkeypatch):
    drawn = []
    monkeypatch.setattr(
        "ddp_by_hand.bench.report.draw_comparison", lambda *a, **k: drawn.append((*a, k))
    )
    return drawn


def record(settings):
    for cell in plan(settings):
        gate = {"gradient_error": 1e-7 if cell.subject == Subject("ddp", "bookkeeping") else 0.0}
        timed = {"step_ms": [STEPS[cell.subject]] * 6, "bytes": 1 << 20, "collectives": 2}
        row = {**cell.row(settings, 2, "cpu"), "status": "ok", "invocation": "x"}
        Results(settings.output_dir).record({**row, **(gate if cell.kind == GATE else timed)})


def lines_of(text: str) -> dict[tuple[str, str], str]:
    body = re.search(r"^-+  .*\n((?:.+\n)+)\n", text, re.MULTILINE)[1]
    return {tuple(line.split()[:2]): line for line in body.splitlines()}


def test_a_private_row_is_compared_with_its_own_mode_and_has_an_overhead(tmp_path, pictures):
    settings = settings_for("--implementations", *NAMES, *BOTH, folder=tmp_path)
    record(settings)
    text, status = report(settings, 2, "cpu")
    assert status == 0
    assert list(lines_of(text)) == [(one.name, one.clipping) for one in STEPS]
    assert lines_of(text)["ddp", "bookkeeping"].split() == [
        *("ddp", "bookkeeping", "1.0e-07", "240.0", "[240.0,", "240.0]", "8,533", "40.00"),
        *("1.600", "[1.600,", "1.600]", "1.200", "0.800", "[0.800,", "0.800]", "2", "1.0", "–"),
    ]
    assert lines_of(text)["ddp", "none"].split()[7:13] == [
        *("50.00", "–", "1.500", "1.250", "[1.250,", "1.250]")
    ]
    ((rows, _, options),) = pictures
    assert [row["label"] for row in rows][:4] == ["none", "none:bookkeeping", "ddp",
                                                  "ddp:bookkeeping"]  # fmt: skip
    assert rows[3]["ratio_to_reference"] == pytest.approx((1.6, 1.6, 1.6))
    assert rows[3]["ratio_to_baseline"] == pytest.approx((1.2, 1.2, 1.2))
    assert rows[2]["ratio_to_reference"] is None
    assert options["reference"] == "not private"
    assert "noise multiplier 1" in options["subtitle"]


def test_without_ordinary_rows_there_is_no_overhead(tmp_path, pictures):
    line = ["--implementations", *NAMES, "--clipping", "bookkeeping"]
    settings = settings_for(*line, folder=tmp_path)
    record(settings)
    text, _ = report(settings, 2, "cpu")
    assert "overhead" not in text
    assert pictures[0][2]["reference"] == "torch_ddp"
    assert pictures[0][0][1]["ratio_to_reference"] == pytest.approx((0.8, 0.8, 0.8))


def test_a_plan_is_printed_once_however_many_have_it(tmp_path, pictures):
    line = ["--implementations", "none", "ddp", "--show-plan", "--tile-size", 64, "--clipping"]
    settings = settings_for(*line, "flash", "flash:width", folder=tmp_path)
    for cell in plan(settings):
        text = "layer\n-----\n" + ("width" if "width" in cell.subject.clipping else "gradient")
        timed = {"step_ms": [1.0] * 6, **({"plan": text} if cell.round == 0 else {})}
        measured = {"gradient_error": 1e-3} if cell.kind == GATE else timed
        row = {**cell.row(settings, 2, "cpu"), "status": "ok", "invocation": "x", **measured}
        Results(settings.output_dir).record(row)
    text, status = report(settings, 2, "cpu")
    assert "\n\nplan of none:flash, ddp:flash\nlayer\n-----\ngradient\n\n" in text
    assert "\n\nplan of none:flash:width, ddp:flash:width\nlayer\n-----\nwidth\n\n" in text
    assert "(flat, abadi), tiles of 64\n" in text
    assert "wrong above 0.0021" in text
    assert status == 1
    wrong = [pair for pair, line in lines_of(text).items() if "WRONG" in line]
    assert wrong == [("none", "flash"), ("ddp", "flash")]


def test_without_kernels_no_plan_is_said(tmp_path, pictures):
    line = ["--implementations", "none", "--clipping", "flash", "--show-plan"]
    assert "\nno plan: " in report(settings_for(*line, folder=tmp_path), 2, "cpu")[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("clipping")


@pytest.fixture(scope="module")
def run(folder):
    """Right ones, and one that averages where it is asked for sums."""
    names = ["none", "ddp_bucketed", f"{PLUGINS}:Averaging"]
    line = ["--implementations", *names, "--steps-per-epoch", 1, "--rounds", 1, *BOTH]
    return forked_benchmark(*line, "--output-dir", folder / "run")


@pytest.mark.slow
def test_a_variant_that_averages_is_wrong_and_the_reader_is_warned_of_fixed_batches(run):
    assert run.returncode == 1, run.stderr
    table = lines_of(run.stdout)
    assert [pair for pair, line in table.items() if "WRONG" in line] == [
        ("Averaging", "bookkeeping")
    ]
    assert "5.0e-01 WRONG" in table["Averaging", "bookkeeping"]  # half of the sum of two ranks
    assert "poisson_sampling" not in run.stderr
    assert "neither wrapped nor sharded" not in run.stderr  # the gate's reference is not
    assert "no ε is stated" in run.stdout


@pytest.fixture(scope="module")
def profiled(folder):
    """In bfloat16, where private gradients travel in float32."""
    line = ["--profile", "--implementations", "ddp_bucketed", *BOTH, "--dtype", "bfloat16"]
    options = ["--enable-profiling", "--profile-output-dir", folder / "profile"]
    run = forked_benchmark(*line, *options)
    assert run.returncode == 0, run.stderr
    return folder / "profile"


@pytest.mark.slow
def test_each_mode_has_files_of_its_own_with_the_phases_of_a_private_step(profiled):
    expected = {"all_timeline.png"}
    for stem in ("ddp_bucketed", "ddp_bucketed_bookkeeping"):
        expected |= {f"{stem}_rank_{rank}_trace.json" for rank in range(2)}
        expected |= {f"{stem}_summary.txt", f"{stem}_timeline.png"}
    expected |= {"ddp_bucketed_bookkeeping_phases.txt"}
    assert {path.name for path in profiled.iterdir()} == expected
    text = (profiled / "ddp_bucketed_bookkeeping_phases.txt").read_text()
    for phase in ("first backward", "norms of layers", "hand-over", "gradient sync", "noise"):
        assert phase in text
    assert "second backward" not in text
    assert "squared norms, which no all-reduce adds up" in text
    assert "Synchronisation is never switched off" in text
    text = (profiled / "ddp_bucketed_bookkeeping_summary.txt").read_text()
    for word in (
        "clipping.noise_multiplier",
        "clipping.max_grad_norm",
        "no ε is stated",
        "\nnoise  ",
    ):
        assert word in text, word
    for part in PARTS:
        assert f"\n  {part} " in text
    ordinary = (profiled / "ddp_bucketed_summary.txt").read_text()
    assert not any(part in ordinary for part in (*PARTS, "noise"))


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_private_trace_has_its_phases_in_order(profiled, rank):
    found = ranges(profiled, "ddp_bucketed_bookkeeping", rank)
    outer = ["forward_pass", "backward_pass", "gradient_sync", "noise", "optimizer_step"]
    for name in (*outer, *PARTS):
        assert len(found[name]) == 4, name  # two epochs of two steps
    for step in range(4):
        for order in (outer, PARTS):
            for earlier, later in pairwise(order):
                assert found[earlier][step][1] <= found[later][step][0]
        start, end = found["backward_pass"][step]
        assert all(start <= found[p][step][0] <= found[p][step][1] <= end for p in PARTS)
    for clip, (_, noisy) in zip(found["gradient_clipping_warmup"], found["noise"], strict=False):
        assert clip[0] >= noisy  # of noise and sum, never of the sum alone
    assert not set(PARTS) & set(ranges(profiled, "ddp_bucketed", rank))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["mixed", "bfloat16", "float32"])
def test_every_mode_in_every_arithmetic(tmp_path, dtype):
    modes = ["--clipping", "none", *PRIVATE_MODES]
    line = ["--implementations", "none", "ddp_individual_v2", "torch_ddp_tuned", *modes]
    style = ["--clipping-style", "per_layer", "--clipping-function", "automatic"]
    run = benchmark(*line, *style, "--dtype", dtype, "--rounds", 1, "--output-dir", tmp_path)
    assert run.returncode == 0, run.stderr
    assert len(lines_of(run.stdout)) == 3 * 6


@pytest.mark.slow
def test_compiled_blocks_are_clipped(tmp_path):
    """`ghost` after `bookkeeping`: what was compiled for one backward may not serve two."""
    run = benchmark("--compile", "--implementations", "none", "ddp_bucketed", *BOTH, "ghost",
                    "--rounds", 1, "--timeout", "200", "--output-dir", tmp_path)  # fmt: skip
    assert run.returncode == 0, run.stderr
