"""Small private runs of a law of one's own, and the training that it predicts."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ddp_by_hand.examples.private_text import Text
from ddp_by_hand.experiments.plan_privacy import calibrate, runs
from ddp_by_hand.experiments.plan_privacy.plan import Budget
from ddp_by_hand.experiments.plan_privacy.published import published_law
from ddp_by_hand.measure import Results
from dp_clipping import PrivacyEngine
from tests.support.plans import TRUE, quick_noise

ROOT = Path(__file__).parents[2]
STORED = ROOT / "results/plan-privacy-stdlib"


@pytest.fixture
def text():
    """Sequences that repeat a few bytes: easily learned."""
    draw = torch.Generator().manual_seed(0)
    rows = torch.randint(97, 101, (400, 1), generator=draw).expand(400, runs.CONTEXT + 1)
    return Text(rows[:360].to(torch.uint8), rows[360:].to(torch.uint8), "digest")


def test_a_run_is_private_as_it_says_and_learns(text, monkeypatch):
    seen = {}
    real = PrivacyEngine.make_private

    def recording(engine, **arguments):
        seen.update(arguments)
        return real(engine, **arguments)

    monkeypatch.setattr(PrivacyEngine, "make_private", recording)
    run = runs.SmallRun(width=8, steps=30, batch=36, ratio=0.02)
    found = runs.train(run, text, (10, 30), 1e-3)
    assert seen["noise_multiplier"] == pytest.approx(0.72)
    assert seen["max_grad_norm"] == 1.0
    assert (seen["sample_rate"], seen["expected_batch_size"], seen["steps"]) == (0.1, 36, 30)
    assert list(found["losses"]) == [10, 30]
    assert math.log(256) > found["losses"][10] > found["losses"][30] > 1.0
    assert found["parameters"] == runs.parameters_of(8)
    assert found["tokens"] == 30 * 36 * 64
    account = PrivacyEngine(accountant="pld").accountant
    account.history = [(0.72, 0.1, 30)]
    assert found["epsilon"] == pytest.approx(account.get_epsilon(1e-3), rel=1e-3)
    with pytest.raises(ValueError, match="batch is 361, and there are 360"):
        runs.train(replace(run, batch=361), text, (), None)


@pytest.fixture
def counted(monkeypatch):
    """Replaces training by the law `TRUE`, and counts the runs."""
    done = []

    def pretend(run, text, marks, delta):
        done.append(run)
        size = runs.parameters_of(run.width)
        losses = {step: float(TRUE.loss(size, step, run.ratio)) for step in marks}
        return {
            "parameters": size, "tokens": run.steps * run.batch * 64, "losses": losses,
            "seconds": 2.0, "epsilon": delta and 1.9,
        }  # fmt: skip

    monkeypatch.setattr(calibrate, "train", pretend)
    return done


@pytest.mark.slow
def test_calibration_is_resumed_and_checked(text, counted, monkeypatch, tmp_path):
    quick_noise(monkeypatch)
    folder, lines = tmp_path / "runs", []
    wanted = calibrate.fitting_runs()
    assert len({(run.width, run.ratio) for run in wanted}) == 12
    assert {run.noise_multiplier for run in wanted} == {64 * 2.0**-k for k in (8, 9, 10, 11)}
    calibrate.train_runs(folder, text, wanted[:4], lines.append)
    calibrate.train_runs(folder, text, wanted, lines.append)
    assert len(counted) == len(lines) == 12
    law = calibrate.law_of(folder)
    assert law.deviation < 0.02
    assert (law.tokens, len(law.sizes), len(law.noises)) == (64, 3, 4)
    calibrate.train_runs(folder, text, wanted, lines.append)
    assert len(counted) == 12

    budget = Budget(2.0, 1e-6, 100_000, 6e11)
    _, width, chosen = calibrate.plan_check(law, budget, "rdp")
    assert runs.parameters_of(width) == chosen.parameters
    assert width in calibrate.PLANNED
    assert min(calibrate.MARKS) <= chosen.steps <= 1.5 * max(calibrate.MARKS)
    speed = calibrate.speed_of(folder)
    row = calibrate.checked(folder, text, width, chosen, budget, "law")
    assert (counted[-1].steps, counted[-1].batch) == (chosen.steps, chosen.batch)
    assert counted[-1].noise_multiplier == pytest.approx(chosen.sigma)
    assert row["predicted_loss"] == chosen.loss == pytest.approx(row["measured_loss"], rel=0.02)
    flops = sum(6 * r["parameters"] * r["tokens"] for r in calibrate.fitting_rows(folder))
    assert speed == flops / (12 * 2.0)
    assert row["predicted_seconds"] == pytest.approx(chosen.flops(64) / speed)
    done = len(counted)
    assert calibrate.checked(folder, text, width, chosen, budget, "law") == row
    assert len(counted) == done
    shown = {**row, "predicted_loss": 2.2, "measured_loss": 2.0, "predicted_seconds": 9.0}
    assert calibrate.side_by_side(shown).startswith(
        "predicted 2.200 nats per byte, measured 2.000: +10.0%\npredicted 9 s, measured 2 s; "
        "epsilon 1.900 at delta 1e-06"
    )

    calibrate.train_runs(folder, replace(text, digest="other"), wanted[:4], lines.append)
    assert len(counted) == done + 4
    with pytest.raises(ValueError, match="has no finished runs of one text"):
        calibrate.law_of(folder)


def test_the_check_of_the_documents_is_the_stored_one():
    """Its size, steps and noise are those of no run that its law was fitted to."""
    document = (ROOT / "docs/planning.md").read_text()
    rows = Results(STORED).rows()
    fitted = [row["config"] for row in rows if row["kind"] == calibrate.FIT]
    checks = [row for row in rows if row["kind"] == calibrate.CHECK]
    assert len(fitted) == 12
    assert len(checks) == 2
    for row in checks:
        config = row["config"]
        assert config["width"] not in {one["width"] for one in fitted}
        assert row["epsilon"] <= config["epsilon"] == 2.0
        predicted, measured = row["predicted_loss"], row["measured_loss"]
        error = f"{predicted / measured - 1:+.1%}".replace("-", "−").replace("%", " %")
        assert f"| {predicted:.3f} | {measured:.3f} | {error} |" in document
    formula = published_law()
    numbers = [f"{x:.3g}" for x in (*formula.coefficients, *formula.exponents)]
    e, a, b, c, alpha, beta, gamma, alpha2 = (text.replace("-", "−") for text in numbers)
    shown = f"E {e}, A {a}, α {alpha}, B {b}, β {beta}, C {c}, γ {gamma}, α₂ {alpha2}"
    assert shown in document
    law = calibrate.law_of(STORED)
    assert f"{law.deviation:.1%}".replace("%", " %") in document
