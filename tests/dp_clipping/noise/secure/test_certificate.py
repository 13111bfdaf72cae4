"""What the account of secure noise includes, against examples in which it is spent."""

import math
from dataclasses import replace
from functools import partial
from statistics import NormalDist

import mpmath
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from dp_clipping import PrivacyEngine
from dp_clipping.accounting import pld
from dp_clipping.accounting.target_epsilon import noise_multiplier_for
from dp_clipping.noise.secure import certificate
from dp_clipping.noise.secure.certificate import (
    EXACTNESS,
    KAPPA,
    Certificate,
    certificate_of,
    most_units_of,
)
from dp_clipping.noise.secure.source import grid_of
from tests.support import saved_runs

LARGE = Certificate(10**9, 10**9 // 2, 300, 300)


def gaussian(history, delta: float) -> float:
    """Returns ε of one step without sampling, by bisection (Balle and Wang 2018)."""
    ((sigma, _, _),) = history
    phi, low, high = NormalDist().cdf, 0.0, 500.0
    for _ in range(200):
        e = (low + high) / 2
        a, b = 1 / (2 * sigma) - e * sigma, -1 / (2 * sigma) - e * sigma
        above = phi(a) - math.exp(e) * phi(b) > delta if e < 300 else False
        low, high = (e, high) if above else (low, e)
    return high


def _in_order(x: torch.Tensor) -> torch.Tensor:
    """Returns the float32 sum of numbers, one after the other."""
    total = torch.zeros((), dtype=torch.float32)
    for one in x:
        total = total + one
    return total


def test_float32_sums_are_off_by_no_more_than_stated_and_not_by_much_less():
    """Each of n numbers is at most 1, and the later ones are rounded at each addition."""
    n = 1000
    bound = Certificate(1, 1, n, n).summation
    ones = torch.ones(n // 2)
    small = torch.full((n // 2,), 0.5 + 2.0**-15)  # at 512 a unit of float32 is 2⁻¹⁴
    with_it = torch.cat((ones, torch.tensor([1.0]), small))
    without = torch.cat((ones, small))
    apart = float(_in_order(with_it) - _in_order(without))
    exact = float(with_it.double().sum() - without.double().sum())
    assert exact == 1.0
    assert abs(float(_in_order(with_it)) - float(with_it.double().sum())) > 1e-4
    assert abs(apart) <= 1 + bound
    error = abs(float(_in_order(with_it)) - with_it.double().sum().item())
    assert error <= bound / 2
    assert error > bound / 200, "the bound is of the size of what happens"


@pytest.mark.parametrize(("samples", "rate"), [(100, 0.5), (5000, 0.01), (100_000, 0.003)])
def test_a_batch_has_more_units_with_a_probability_below_2_to_the_minus_120(samples, rate):
    most = most_units_of(samples * rate)
    with mpmath.workprec(300):
        q = mpmath.mpf(rate)
        above = sum(
            mpmath.binomial(samples, n) * q**n * (1 - q) ** (samples - n)
            for n in range(most + 1, min(samples, most + 400) + 1)
        )
        assert above < mpmath.mpf(2) ** -120
    assert samples * rate + 10 * (samples * rate) ** 0.5 < most < 20 * (samples * rate + 10)


def test_parts_and_ranks_make_fewer_additions():
    certificate = certificate_of([10], 1000.0, 0.01, 100_000)
    n = certificate.most_units
    assert (certificate.additions, certificate.summation) == (0, 0)
    assert certificate.additions_of(None, 8) == n
    assert certificate.additions_of(32, 8) == 32 + -(-n // 32) + 8
    assert certificate.additions_of(1, 1) == certificate.additions_of(10**6, 1) == n
    assert certificate.additions_of(32, 8, backwards=n // 2) == 32 + n // 2 + 8
    assert certificate.additions_of(32, 8, backwards=2 * n) == n
    one, other = certificate.with_step(90), certificate.with_step(50)
    assert one.additions == one.with_step(50).additions == one.joined(other).additions == 90


def step_of(run, microbatch: int | None = None):
    """Makes one step, or raises; returns what its statement says of secure noise."""
    for x, y in saved_runs.batches(run, microbatch):
        run.criterion(run.model(x), y).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        if run.optimizer.steps:
            break
    return run.engine.privacy_statement(1e-5).secure


def secure(**changes):
    return saved_runs.build(
        engine=PrivacyEngine(accountant="rdp", secure_mode=True), **changes
    )  # fmt: skip


def large(**changes):
    """Returns a run whose batches have 4500 of 9000 samples, in expectation."""
    return secure(count=9000, sample_rate=0.5, steps=2, **changes)


def test_sums_that_rounding_may_move_too_far_are_refused():
    run = large()
    with pytest.raises(ValueError, match=r"no account for this batch: .* BatchMemoryManager\("):
        step_of(run)
    assert run.optimizer.steps == run.engine.get_epsilon(1e-6) == 0
    secure = step_of(large(), 100)
    most = secure["most units in a batch"]
    assert 5000 < most < 6000
    assert secure["most additions"] == 100 + -(-most // 100) + 1
    assert secure["summation bound / C"] < 0.2
    plain = saved_runs.build(count=9000, sample_rate=0.5, steps=2)
    saved_runs.train(plain, 1)
    network = nn.Linear(3, 2)
    with pytest.raises(
        ValueError, match=r"has no account with \d+ units: give engine.make_private\("
    ):
        PrivacyEngine(secure_mode=True).make_private_with_epsilon(
            module=network, optimizer=torch.optim.SGD(network.parameters()), target_epsilon=3.0,
            data_loader=DataLoader(saved_runs.data(9000), batch_size=4500), target_delta=1e-6,
            epochs=1, max_grad_norm=1.0,
        )  # fmt: skip


@pytest.mark.parametrize(
    "units", [{"examples_per_unit": 2}, {"examples_per_unit": 3, "examples_per_step": 2}]
)
def test_units_and_parts_that_were_joined_again_are_counted_as_they_are_added(units):
    run = secure(count=3000, sample_rate=0.2, steps=3, **units)
    most = run.engine._account.certificate.most_units
    assert step_of(run, 20)["most additions"] == 10 + -(-most // 10) + 1
    x, y = next(iter(run.loader))
    usage = run.optimizer.step_state.usage
    usage.ticket = replace(usage.ticket, largest=20)  # of a batch that has more in a backward
    run.criterion(run.model(x), y).backward()
    run.optimizer.step()
    assert run.engine.privacy_statement(1e-5).secure["most additions"] == most


def test_more_backwards_than_parts_are_more_additions():
    run = secure(count=800, sample_rate=0.2, steps=3)
    engine = run.engine
    run.model.skip_checks()
    most, backwards = engine._account.certificate.most_units, 0
    for x, y in saved_runs.batches(run, 40):
        for i in range(len(x)):
            run.criterion(run.model(x[i : i + 1]), y[i : i + 1]).backward()
            backwards += 1
        run.optimizer.step()
        run.optimizer.zero_grad()
        if run.optimizer.steps:
            break
    assert backwards > -(-most // 40)
    assert engine.privacy_statement(1e-5).secure["most additions"] == 40 + backwards + 1


def test_a_resumed_run_includes_the_steps_before(tmp_path):
    run = secure()
    saved_runs.train(run, 1)
    saved_runs.save(run, tmp_path / "file")
    again = secure()
    saved_runs.load(again, tmp_path / "file")
    assert again.engine._account.certificate == run.engine._runs[0].certificate
    most = most_units_of(1.05 * 4 + 2)
    assert again.engine._account.certificate.additions == most
    again.engine._account.certificate = certificate_of([10**6], 200.0, 1.0, 200)
    saved_runs.load(again, tmp_path / "file")
    assert again.engine._account.certificate == Certificate(
        10**6, 10**6 // 2, most_units_of(212.0), most
    )  # fmt: skip


def test_a_checkpoint_of_one_run_includes_what_all_cost(tmp_path):
    """Its account has the steps of all."""
    dataset = saved_runs.data(4000)
    engine = PrivacyEngine(accountant="rdp", secure_mode=True)
    small = saved_runs.build(engine=engine, dataset=dataset, sample_rate=0.001, steps=5)
    large = saved_runs.build(engine=engine, dataset=dataset, hidden=50, sample_rate=0.1, steps=5)
    for run in (small, large):
        saved_runs.train(run, 2)
    saved_runs.save(small, tmp_path / "file")
    again = secure(dataset=dataset, sample_rate=0.001, steps=5)
    saved_runs.load(again, tmp_path / "file")
    assert again.engine.get_epsilon(1e-5) == engine.get_epsilon(1e-5)
    assert again.engine._account.certificate == engine._account.certificate
    assert engine._account.certificate.dimension == large.engine._runs[1].certificate.dimension


def test_epsilon_at_the_end_includes_it():
    run = secure()
    assert run.engine.epsilon_at_end(run.optimizer, 0, 1e-5) == 0.0
    forecast = run.engine.epsilon_at_end(run.optimizer, 3, 1e-5)
    saved_runs.train(run, 2)
    assert run.engine.epsilon_at_end(run.optimizer, 0, 1e-5) == run.engine.get_epsilon(1e-5)
    assert run.engine.epsilon_at_end(run.optimizer, 1, 1e-5) == forecast
    saved_runs.train(run, 1)
    assert run.engine.get_epsilon(1e-5) == forecast


def test_rounding_moves_neighbours_apart_by_the_bound_and_no_more():
    d, std = 10_000, 1.3
    grid = grid_of(std, d)
    below = torch.full((d,), 0.5 * grid * (1 - 1e-6), dtype=torch.float64)
    above = torch.full((d,), 0.5 * grid * (1 + 1e-6), dtype=torch.float64)
    apart = ((above / grid).round() - (below / grid).round()).norm() * grid
    assert (above - below).norm() < 1e-5 * grid * d**0.5
    assert apart == pytest.approx(grid * d**0.5, rel=1e-9)
    assert 0.5 * LARGE.grid * std <= apart <= LARGE.grid * std


def test_the_effective_multiplier_has_both():
    for sigma in (0.3, 1.0, 20.0):
        moved = (1 + EXACTNESS) * (1 + LARGE.summation) / sigma + 2**-10
        assert 1 / LARGE.effective(sigma) == pytest.approx(moved, rel=1e-12)
        assert LARGE.nominal(LARGE.effective(sigma)) == pytest.approx(sigma, rel=1e-9)
        assert LARGE.effective(sigma) < sigma
    assert LARGE.effective(0) == 0
    assert math.isinf(LARGE.nominal(2000.0))


@pytest.mark.parametrize("kappa", [1e-5, 1e-4])
def test_the_log_ratio_of_squares_with_moved_sides(kappa):
    """The bound 2.04(κ(|k| + |l| + 1) + c), for a κ whose effect can be computed."""
    s, c = 1024.0, 1e-6
    phi = NormalDist().cdf

    def mass(k: int, moved: float) -> float:
        a, b = (abs(k) - 0.5 - moved) / s, (abs(k) + 0.5 + moved) / s
        return phi(-a) - phi(-b)

    for k in (0, 1, -7, 1000, 4000, -9000):
        for j in (0, 3, 2500, 9000):
            e = kappa * (abs(k) + abs(j) + 1) + c
            if e > 0.05:
                continue  # the formula is of the first order
            for of_k, of_l in ((e, 0.0), (0.0, e), (e / 2, e / 2), (-e, 0.0), (-e / 2, -e / 2)):
                ratio = mass(k, of_k) * mass(j, of_l) / (mass(k, 0) * mass(j, 0))
                assert abs(math.log(ratio)) <= 2.04 * e * (1.06 if min(of_k, of_l) < 0 else 1)
                assert abs(math.log(ratio)) >= 1.8 * e


def test_the_distance_grows_with_parameters_and_steps_and_is_small():
    assert Certificate(10**6, 5 * 10**5, 300, 0).distance(10**4).epsilon < 4e-6
    assert 1e-4 < LARGE.distance(10**4).epsilon < 3e-3
    assert LARGE.distance(10**4).delta < 1e-12
    assert LARGE.distance(0).epsilon == 0
    found = [
        Certificate(d, d // 2, 300, 0).distance(n) for d in (10, 10**5, 10**9) for n in (1, 900)
    ]
    for name in ("epsilon", "delta"):
        values = [getattr(distance, name) for distance in found]
        assert values == sorted(values)
    # Concentrated by Nv/2, v at least the mean of (2κ(|x| + |y|)s)²: ε_s is not stated too small.
    s, n = 2**11 * 10**4.5, 10**13 / 2
    rho = n * (2 * KAPPA * s) ** 2 * 3.27 / 2
    assert LARGE.distance(10**4).epsilon >= rho + 2 * (rho * 120 * math.log(2)) ** 0.5


def test_epsilon_has_everything():
    history, delta, distance = [(1.0, 1.0, 1)], 1e-6, LARGE.distance(1)
    effective = [(LARGE.effective(1.0), 1.0, 1)]
    of_mechanism = gaussian(effective, 0.99 * delta * math.exp(-distance.epsilon))
    found = LARGE.epsilon(history, delta, gaussian)
    assert found == pytest.approx(of_mechanism + 2 * distance.epsilon, rel=1e-9)
    assert distance.epsilon > 1e-6 > 1e-8 * found
    assert found > gaussian(effective, delta) > gaussian(history, delta)


def test_epsilon_is_infinite_where_delta_is_below_that_of_the_sampler():
    history = [(1.0, 1.0, 1)]
    assert math.isinf(LARGE.epsilon(history, LARGE.distance(1).delta, gaussian))
    assert math.isinf(LARGE.epsilon([(0.001, 1.0, 1)], 1e-6, lambda *_: 900.0))
    assert math.isfinite(LARGE.epsilon(history, 1e-9, gaussian))


@pytest.mark.parametrize("share", certificate.SHARES)
def test_the_mechanism_has_the_largest_share_of_delta_that_leaves_the_sampler_its_own(share):
    distance = LARGE.distance(1)
    delta = 2.1 * distance.delta / (1 - share)
    found = LARGE.epsilon([(1.0, 1.0, 1)], delta, lambda _, part: 1e6 * part)
    assert found - 2 * distance.epsilon == pytest.approx(1e6 * share * delta, rel=1e-3)


@pytest.mark.parametrize(("j", "scale"), [(64, 1.0), (96, 1.0), (96, 2.0**40)])
def test_the_logarithm_of_a_ratio_is_bounded_as_in_the_proof(j, scale):
    two = mpmath.mpf(2)
    r = mpmath.sqrt(-2 * mpmath.log(two**-j))  # of u = 2⁻ʲ
    moved = mpmath.sqrt(2) * r * scale * (KAPPA + two**j * two**-129 / r**2)
    offset = 2 * KAPPA + two**-52 + scale * two**-78
    expected = pytest.approx(float(2.04 * (moved + offset)), rel=1e-9, abs=0)
    assert certificate._largest_logarithm(j, scale) == expected


def test_epsilon_of_a_sampler_has_what_is_between_its_tails():
    """Adds 3·pairs·2⁻ᴸ/α² to ρ, which is multiplied by the order α."""
    without, with_pairs = (certificate._epsilon_of(0.0625, n, 64, 1.0) for n in (0, 2**60))
    order = 1 + min((certificate.LOG_SMALL / 0.0625) ** 0.5, 0.09 / certificate._largest_logarithm(
        certificate.LOWEST_TAIL, 1.0))  # fmt: skip
    assert with_pairs - without == pytest.approx(3 * 2.0**-4 / order, rel=1e-9)


def test_sums_of_too_many_additions_have_no_bound():
    assert Certificate(1, 1, 1, int(0.5 / certificate.UNIT)).summation == math.inf


def test_neighbours_have_one_certificate_under_public_rates():
    assert certificate_of([9], 4.0, 1 / 6, 24) == certificate_of([9], 4.0, 1 / 6, 25)
    larger = certificate_of([9], 4.0, 1.0, 25)  # than was declared
    assert larger.most_units == most_units_of(26.0) > certificate_of([9], 4.0, 1 / 6, 25).most_units
    public = {"sample_rate": 1 / 6, "steps": 7}
    engines = [PrivacyEngine(accountant="rdp", secure_mode=True) for _ in range(2)]
    runs = [
        saved_runs.build(engine=engine, count=count, **public)
        for engine, count in zip(engines, (24, 25), strict=True)
    ]
    for run in runs:
        saved_runs.train(run, 7)
    one, other = (run.engine.privacy_statement(1e-3) for run in runs)
    assert one == other
    assert math.isfinite(one.epsilon)


@pytest.mark.parametrize("accountant", ["pld", "prv", "rdp"])
@pytest.mark.filterwarnings("ignore:Optimal order")
def test_epsilon_of_an_engine_is_above_that_of_the_same_steps(accountant):
    run = saved_runs.build(engine=PrivacyEngine(accountant=accountant, secure_mode=True))
    assert run.engine.get_epsilon(1e-3) == 0
    saved_runs.train(run, 3)
    plain = type(run.engine.accountant)()
    plain.history = run.engine.accountant.history
    plain = plain.get_epsilon(delta=1e-3)
    found = run.engine.get_epsilon(1e-3)
    assert 1.0003 * plain < found < 1.02 * plain
    assert run.engine.accountant.history[0][0] == 0.8  # as it was
    assert run.engine.get_epsilon(1e-3) == found


def test_the_statement_names_what_is_included():
    run = secure()
    saved_runs.train(run, 2)
    statement = run.engine.privacy_statement(1e-3)
    certificate = run.engine._account.certificate
    parameters = sum(p.numel() for p in run.model.network.parameters())
    assert statement.as_dict()["secure"] == {
        "effective multiplier": certificate.effective(0.8), "parameters": parameters,
        "grid": [grid_of(0.8 * 0.7, parameters)], "grid bound / noise": 2**-10,
        "summation bound / C": certificate.summation, "most units in a batch": most_units_of(6.2),
        "most additions": most_units_of(6.2),
        "sampler epsilon": 2 * certificate.distance(2).epsilon,
        "sampler delta": certificate.distance(2).delta,
    }  # fmt: skip
    text = str(statement)
    for name in statement.secure:
        assert f"\n    {name}:" in text
    assert "integers of ChaCha20" in text
    assert "secure" not in saved_runs.build().engine.privacy_statement(1e-3).as_dict()


@pytest.mark.parametrize("accountant", [pytest.param("prv", marks=pytest.mark.slow), "rdp"])
@pytest.mark.filterwarnings("ignore:Optimal order")
def test_a_target_is_met_with_everything_included(accountant):
    network = saved_runs.Network()
    engine = PrivacyEngine(accountant=accountant, secure_mode=True)
    model, optimizer, criterion, loader = engine.make_private_with_epsilon(
        module=network, optimizer=torch.optim.SGD(network.parameters(), lr=0.1),
        data_loader=DataLoader(saved_runs.data(), batch_size=4), max_grad_norm=1.0,
        target_epsilon=3.0, target_delta=1e-3, epochs=1,
    )  # fmt: skip
    for x, y in loader:
        criterion(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert 2.97 < engine.get_epsilon(1e-3) <= 3.0
    plain = noise_multiplier_for(
        target_epsilon=3.0, target_delta=1e-3, sample_rate=1 / 6, steps=6, accountant=accountant
    )
    assert optimizer.noise_multiplier > plain


@pytest.mark.parametrize("target", [1e-4, 0.5])
def test_what_is_left_of_a_target_is_the_gaussians(target):
    certificate, asked = Certificate(1000, 500, 300, 0), []

    def find(**targets):
        asked.append(targets)
        return 2.0

    found = certificate.noise_multiplier(
        target_epsilon=target, target_delta=1e-6, steps=10, find=find
    )
    assert certificate.as_a_whole().effective(found) == pytest.approx(2.0, rel=1e-12)
    assert 0.9 * target < asked[0]["target_epsilon"] < target


def test_a_target_that_the_grid_exceeds_is_refused():
    with pytest.raises(ValueError, match=r"target_epsilon is 0\.001: secure_mode=True cannot"):
        LARGE.noise_multiplier(
            target_epsilon=0.001, target_delta=1e-6, steps=10**4, find=lambda **_: 2000.0
        )


@pytest.mark.parametrize(("delta", "largest"), [(1e-5, 30.0), (1e-20, 5.0)])
def test_a_target_is_one_that_the_account_shows(delta, largest):
    certificate = Certificate(66, 35, 89, 89)
    find = partial(noise_multiplier_for, sample_rate=1.0, steps=1, accountant="pld")
    wanted = partial(certificate.noise_multiplier, target_delta=delta, steps=1, find=find)
    sigma = wanted(target_epsilon=largest)
    assert certificate.epsilon([(sigma, 1.0, 1)], delta, account=pld.epsilon) <= largest
    with pytest.raises(ValueError, match="cannot show so large an epsilon at target_delta"):
        wanted(target_epsilon=10 * largest)
