"""Plans of private trainings: the law, its fit, the search, and the runs that check it."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ddp_by_hand.experiments.plan_privacy import options
from ddp_by_hand.experiments.plan_privacy.__main__ import hours_of, main
from ddp_by_hand.experiments.plan_privacy.curves import curve_of, interpolate, left_out
from ddp_by_hand.experiments.plan_privacy.law import Observation
from ddp_by_hand.experiments.plan_privacy.noise import NoiseTable, exact_noise, nodes
from ddp_by_hand.experiments.plan_privacy.options import Options, Throughput, throughput_of
from ddp_by_hand.experiments.plan_privacy.parametric import (
    Exponents,
    Optimum,
    ParametricLaw,
    coefficients_for,
    equations,
    fit,
)
from ddp_by_hand.experiments.plan_privacy.plan import Budget, Candidate, Planner
from ddp_by_hand.experiments.plan_privacy.published import DELTA, TABLE_2, optima, published_law
from ddp_by_hand.measure import OK, Results
from ddp_by_hand.measure.options import parse_options
from ddp_by_hand.measure.picture import read_picture
from tests.support.plans import TRUE, quick_noise

ROOT = Path(__file__).parents[2]


def grid(law: ParametricLaw) -> list[Observation]:
    """Losses of the law on a grid within its ranges."""
    points = [
        (m, t, r)
        for m in np.geomspace(*law.parameters, 4).tolist()
        for t in np.geomspace(*law.steps, 4).tolist()
        for r in np.geomspace(*law.ratios, 4).tolist()
    ]
    return [Observation(*point, float(law.loss(*point))) for point in points]


def test_the_law_by_hand():
    """M^-0.3 is 1/10 and T^-0.6 is 1/64; ln σ̄ = -8 is the middle of the sigmoid."""
    found = TRUE.loss(10 ** (1 / 0.3), 64 ** (1 / 0.6), math.exp(-8))
    noise = 0.5**1.2 * 10 ** (0.1 / 0.3)
    assert found == pytest.approx(1 + 20 / 10 + 30 / 64 + 4 * noise)
    quarter = TRUE.loss(10 ** (1 / 0.3), 64 ** (1 / 0.6), math.exp(-8 - 1.6 * math.log(3)))
    assert found - quarter == pytest.approx(4 * noise * (1 - 0.5**1.2))


def test_a_fit_recovers_a_law_between_and_beside_its_points():
    found = fit(grid(TRUE), tokens=64, unit="nats", source="test")
    assert found.deviation < 2e-3
    assert (found.parameters, found.steps) == (TRUE.parameters, pytest.approx(TRUE.steps))
    for point in [(3e4, 120, 3e-3), (7e5, 600, 2e-4), (2e4, 1600, 5e-2)]:
        assert found.loss(*point) == pytest.approx(TRUE.loss(*point), rel=0.01)
    with pytest.raises(ValueError, match="8 unknowns and 7 losses"):
        fit(grid(TRUE)[:7])


def test_the_equations_of_an_optimum_are_the_slopes_of_the_loss():
    """Against differences of `Law.loss` along constant FLOPs, σ̄ growing as it says."""
    seen, h = Observation(1e5, 200, 2e-3, 3.0), 1e-5
    matrix, right = equations(TRUE.exponents, [seen], [Optimum(seen, 0.7, 0.2)])
    assert right.tolist() == [1, 0, 0]
    by_steps = TRUE.loss(1e5, 200 * (1 + h), 2e-3 * (1 + h) ** 0.7) - TRUE.loss(*seen[:3])
    by_size = TRUE.loss(1e5 * (1 + h), 200, 2e-3 * (1 + h) ** 0.2) - TRUE.loss(*seen[:3])
    weighed = matrix @ np.array(TRUE.coefficients)
    expected = [TRUE.loss(*seen[:3]) / 3, 0.3 * by_steps / h / 3, 0.3 * by_size / h / 3]
    assert weighed == pytest.approx(expected, rel=1e-3)
    assert len(equations(TRUE.exponents, [seen], [Optimum(seen, 0.7, None)])[0]) == 2


def test_curves_are_the_runs_and_the_middle_between_them_is_the_geometric_mean():
    assert curve_of([1, 4, 16, 64], [2 + 3 * t**-0.5 for t in (1, 4, 16, 64)]) == pytest.approx(
        (2, 3, 0.5), rel=0.05
    )
    seen = grid(TRUE)
    law = interpolate(seen, tokens=64, unit="nats", source="test")
    for one in seen:
        assert law.loss(*one[:3]) == pytest.approx(one.loss, rel=0.01)
    (low, high), at = sorted({one.parameters for one in seen})[1:3], (200.0, TRUE.ratios[0])
    middle = law.loss(math.sqrt(low * high), *at)
    assert middle == pytest.approx(math.sqrt(law.loss(low, *at) * law.loss(high, *at)))
    several = law.loss(np.array([low, high]), 200.0, TRUE.ratios[0])
    assert several.tolist() == [law.loss(low, *at), law.loss(high, *at)]
    ratios = sorted({one.ratio for one in seen})[:2]
    quarter = math.exp(0.75 * math.log(ratios[0]) + 0.25 * math.log(ratios[1]))
    ends = [math.log(law.loss(low, 200.0, ratio)) for ratio in ratios]
    assert math.log(law.loss(low, 200.0, quarter)) == pytest.approx(0.75 * ends[0] + 0.25 * ends[1])
    assert law.loss(1e9, 100.0, 1.0) == law.loss(1e6, 100.0, 0.1)  # the nearest
    assert law.loss(1e6, 3200.0, 0.1) < law.loss(1e6, 800.0, 0.1)  # but further steps


def test_the_deviation_of_curves_is_of_runs_that_were_left_out():
    """One size of four is wrong by a tenth: its neighbours know nothing of that."""
    seen = grid(TRUE)
    sizes = sorted({one.parameters for one in seen})
    wrong = [one._replace(loss=1.1 * one.loss) if one[0] == sizes[1] else one for one in seen]
    errors = [predicted / loss - 1 for predicted, loss in left_out(wrong)]
    right = [predicted / loss - 1 for predicted, loss in left_out(seen)]
    assert len(errors) == (2 + 2) * 16
    assert np.mean(errors[:16]) == pytest.approx((1 + np.mean(right[:16])) / 1.1 - 1, abs=1e-3)
    made = interpolate(wrong, tokens=64, unit="nats", source="test")
    assert made.deviation == pytest.approx(np.abs(errors).mean())
    for few in (seen[:16], [one for one in seen if one.steps < 100], seen[:-8]):
        with pytest.raises(ValueError, match="are no grid of runs with three losses each"):
            interpolate(few, tokens=64, unit="nats", source="test")


def test_the_published_law_has_the_losses_of_the_paper_and_other_exponents():
    law = published_law()
    assert law.deviation < 0.02
    for one in optima():
        assert law.loss(*one.seen[:3]) == pytest.approx(one.seen.loss, rel=0.05)
    for row in (7, 8, 9, 12):  # a budget each: no other steps at the same FLOPs are much better
        _, _, _, size, steps, batch, sigma, by_rate, by_steps = TABLE_2[row]
        there = law.loss(size, steps, sigma / batch)
        for factor in (0.25, 4):
            ratio = sigma / batch * factor ** (1 - by_rate + by_steps)
            assert law.loss(size, steps * factor, ratio) > 0.96 * there
    # why they are not taken: table 2 has 9,600 steps there, for one budget
    exponents = Exponents(0.47, 0.12, 0.95, -0.07)
    found, errors = coefficients_for(exponents, [one.seen for one in optima()])
    assert np.abs(errors).mean() == pytest.approx(0.029, abs=0.002)
    law = replace(TRUE, exponents=exponents, coefficients=found)
    one = optima()[8]
    there = law.loss(*one.seen[:3])
    fewer = law.loss(one.seen.parameters, one.seen.steps / 9.6, one.seen.ratio / 9.6**one.by_steps)
    assert fewer < 0.9 * there


def test_the_noise_of_table_2_is_recomputed():
    examples, epsilon, _, _, steps, batch, sigma, by_rate, by_steps = TABLE_2[12]

    def log_noise(rate: float, many: float) -> float:
        return math.log(exact_noise(epsilon, DELTA, rate, round(many), "rdp"))

    rate, h = batch / examples, 1.5
    assert log_noise(rate, steps) == pytest.approx(math.log(sigma), abs=1e-3)
    slope = (log_noise(rate * h, steps) - log_noise(rate / h, steps)) / (2 * math.log(h))
    assert slope == pytest.approx(by_rate, abs=2e-3)
    slope = (log_noise(rate, steps * h) - log_noise(rate, steps / h)) / (2 * math.log(h))
    assert slope == pytest.approx(by_steps, abs=2e-3)


def test_the_table_of_noise_against_the_accountant():
    table = NoiseTable(2.0, 1e-6, (1e-3, 0.1), (100, 2000))
    for rate, steps, allowed in [(1e-3, 100, 1e-6), (0.1, 2000, 1e-6), (4e-3, 300, 0.05)]:
        exact = exact_noise(2.0, 1e-6, rate, steps, "rdp")
        assert table(rate, steps) == pytest.approx(exact, rel=allowed)
    assert table([1e-3, 0.1], [100, 2000]).shape == (2,)
    assert nodes(1, 1000) == pytest.approx([1, 10**0.75, 10**1.5, 10**2.25, 1000])
    assert exact_noise(1e4, 1e-6, 1e-3, 100, "prv") == 0.2


@pytest.fixture
def quick(monkeypatch):
    return quick_noise(monkeypatch)


def test_the_search_finds_what_plain_loops_find(quick):
    budget, sizes = Budget(2.0, 1e-7, 1_000_000, 2e13), (1e4, 3e4, 1e5)
    planner = Planner(TRUE, budget, sizes)
    assert quick == [(2.0, 1e-7, (2.0 / 1e6, 1.0), TRUE.steps)]  # least batch: 0.2 / 0.1
    found = planner.best()
    assert found.flops(64) == pytest.approx(2e13)
    least = math.inf
    for size in sizes:
        for steps in range(50, 801, 3):
            batch = 2e13 / (6 * size * 64 * steps)
            sigma = max(0.5, batch / 1e6 * math.sqrt(steps) * 4 / 2.0)
            if batch <= 1e6:
                ratio = max(sigma / batch, TRUE.ratios[0])
                least = min(least, float(TRUE.loss(size, steps, ratio)))
    assert found.loss == pytest.approx(least, rel=1e-4)
    assert found.loss <= min(one.loss for size in sizes for one in planner.along(size))


def test_more_privacy_costs_loss_and_more_examples_or_compute_gain_it(quick):
    def loss(**changes) -> float:
        budget = replace(Budget(2.0, 1e-9, 10_000, 2e11), **changes)
        return Planner(TRUE, budget, (1e4, 1e5)).best().loss

    assert loss(epsilon=0.5) > loss() > loss(epsilon=8.0)
    assert loss(examples=2_000) > loss() > loss(examples=10**6)
    compute = [loss(epsilon=50.0, flops=flops) for flops in (2e10, 2e11, 8e11)]
    assert compute == sorted(compute, reverse=True)
    assert compute[0] > compute[2]


def test_the_curve_never_rises_and_says_how_much_is_enough(quick):
    planner = Planner(TRUE, Budget(50.0, 1e-9, 10_000, 3e13), (1e4, 1e5))
    curve = planner.curve()
    losses = [one.loss for _, one in curve]
    assert losses == sorted(losses, reverse=True)
    assert losses[0] > losses[-1]
    assert all(one.flops(64) <= 1.0001 * flops for flops, one in curve)
    enough = planner.enough(planner.best())
    assert enough < 3e13 / 2
    assert planner.best(enough).loss <= 1.01 * planner.best().loss


def test_a_plan_stays_within_the_law_and_says_where_not(quick):
    planner = Planner(TRUE, Budget(0.01, 1e-9, 100_000, 1e10), (1e4,))
    assert all(50 <= one.steps <= 800.1 and one.ratio <= 0.1 for one in planner.along(1e4))
    with pytest.raises(ValueError, match=r"--compute 1e\+06 FLOPs: no training of"):
        planner.best(1e6)
    assert TRUE.beyond(1e5, 100, 1e-3) == []
    assert [text.split()[0] for text in TRUE.beyond(2e6, 900, 0.2)] == [
        "parameters", "steps", "ratios",
    ]  # fmt: skip
    assert TRUE.at_end(1e5, 100) == []
    assert TRUE.at_end(1e4, 100) == ["1e+04 parameters"]
    assert TRUE.at_end(1e5, 799) == ["799 steps"]
    with pytest.raises(ValueError, match=r"--delta is 1e-05, not below 1 / examples"):
        Planner(TRUE, Budget(1.0, 1e-5, 100_000, 1e12), (1e4,))
    with pytest.raises(ValueError, match=r"--examples is 2, and the law begins at batches of 2"):
        Planner(TRUE, Budget(1.0, 0.1, 2, 1e12), (1e4,))


PLAN = ["--examples", "1e8", "--compute", "1e21"]


def test_the_calls_in_messages_work():
    for call in (options.CALL, options.CALIBRATE, f"{options.CALL} {options.MEASURED}"):
        parse_options(Options, call.split()[3:])


def test_a_plan_is_printed_and_drawn(quick, capsys, tmp_path):
    """By a formula of the noise; the chosen one's is Opacus's."""
    path = tmp_path / "plan.png"
    words = [*PLAN, "--epsilon", "4", "--accountant", "rdp", "--output", str(path)]
    assert main([*words, *options.MEASURED.split(), "--gpus", "2"]) == 0
    said = capsys.readouterr().out
    assert "(4, 1.6e-09)-private training on 100,000,000 examples with 1e+21 FLOPs" in said
    assert "McKenna et al. 2025" in said
    assert "chosen: " in said
    hours = 1e21 / (6 * 67800 * 1.24e9) / 3600 / 2
    assert f"expected: {hours:,.1f} hours on 2 GPUs" in said
    call = next(line for line in said.splitlines() if line.startswith("engine.make_private"))
    sigma, rate = (float(call.split(f"{name}=")[1].split(",")[0])
                   for name in ("noise_multiplier", "sample_rate"))  # fmt: skip
    steps = int(call.split(" steps=")[1].split(",")[0])
    assert sigma == pytest.approx(exact_noise(4.0, 1e8**-1.1, rate, steps, "rdp"), abs=1e-4)
    assert "Predicted best: " in read_picture(path).description


def test_a_dry_run_searches_and_trains_nothing(quick, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([*PLAN, "--dry-run"]) == 0
    assert main(["--calibrate", "runs", "--compute", "1e12", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "9 model sizes" in said
    assert "12 runs of 9,437,184 tokens in all" in said
    assert [*quick, *tmp_path.iterdir()] == []


def test_throughput_of_results(tmp_path):
    found = throughput_of(ROOT / "results/llama-3.2-1b-2xh200")
    rate = 4096 * 4 / 2 / 0.14594517946243286
    assert found.flops_per_second == pytest.approx(6 * 1235820544 * rate)
    assert "flash_bookkeeping_fsdp, 4096 tokens" in found.source
    row = {
        "mode": "no_dp", "seq_length": 8, "total_batch_size": 1, "num_gpus": 1,
        "median_time_ms": 1.0, "config": {"parameters": 10}, "status": OK,
    }  # fmt: skip
    Results(tmp_path).record(row)
    with pytest.raises(ValueError, match="has no finished private row"):
        throughput_of(tmp_path)
    Results(tmp_path).record({**row, "mode": "ghost_fsdp", "config": {"parameters": 9}})
    assert throughput_of(tmp_path).flops_per_second == 6 * 9 * 8000


def test_hours_and_gpu_hours(quick, capsys, tmp_path):
    one = Candidate(10.0, 100, 36, 1.0, 1.0)
    assert hours_of(one, TRUE, Throughput(64.0, ""), 3) == pytest.approx(
        6 * 10 * 100 * 36 / 3 / 3600
    )
    words = ["--examples", "1e8", "--gpu-hours", "1000", *options.MEASURED.split(), "--dry-run"]
    assert main([*words, "--output", str(tmp_path / "a.png")]) == 0
    assert f"with {6 * 67800 * 1.24e9 * 3.6e6:.2g} FLOPs" in capsys.readouterr().out
