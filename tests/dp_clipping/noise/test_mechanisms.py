"""Noise mechanisms that users register: what is refused, where their noise comes from, their ε."""

import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dp_clipping import PrivacyEngine, register_noise_mechanism
from dp_clipping.distributed.placement import spans_of
from dp_clipping.noise import mechanisms
from dp_clipping.noise.gaussian import NoiseStream
from tests.support import saved_runs
from tests.support.one_noise import add_noise

STREAM = NoiseStream.derive(bytes(32), step=3, parameter="weight", share=0)


def logistic(u):
    """Heavier tails than a normal's."""
    return (u.log() - (-u).log1p()) * (math.sqrt(3) / math.pi)


def normal(u):
    return math.sqrt(2) * torch.erfinv(2 * u - 1)


def epsilon(history, delta):
    """No account of anything, of a size that no check refuses."""
    return sum(n * (3 / s + 12 * math.log10(1 / delta) / 5 / s) for s, _, n in history)


@pytest.fixture(autouse=True)
def names(monkeypatch):
    """Takes back what a test registers."""
    monkeypatch.setattr(mechanisms, "_REGISTERED", {})


def register(name: str = "logistic", quantile=logistic, of=epsilon) -> None:
    register_noise_mechanism(name, quantile, epsilon=of)


def refusal(message: str, *arguments, **options) -> None:
    with pytest.raises(ValueError, match=message):
        register_noise_mechanism(*arguments, **options)
    assert mechanisms.known_mechanisms() == ("gaussian",)


def test_one_without_an_account_is_refused():
    message = r"'mine' has no account, .* give epsilon=, as register_noise_mechanism\("
    refusal(message, "mine", logistic)
    refusal(message, "mine", logistic, epsilon=3.0)


@pytest.mark.parametrize(
    ("name", "quantile"), [("", logistic), (3, logistic), ("mine", 2.0), ("mine", None)]
)
def test_a_name_and_a_function_are_needed(name, quantile):
    refusal("give a name and a function of uniform numbers", name, quantile, epsilon=epsilon)


@pytest.mark.parametrize(
    ("quantile", "message"),
    [
        (lambda u: 2 * logistic(u), r"standard deviation 2: return \(z - .* / 2"),
        (lambda u: logistic(u) + 0.1, "has mean 0.1"),
        (lambda u: -logistic(u), "decreases at"),
        (lambda u: logistic(u)[:-1], "a number for each"),
        (lambda u: logistic(u).round().long(), "a number for each"),
        (lambda u: logistic(u).clamp(max=1 / (len(u) > 1)), "alone|division"),
        (lambda u: logistic(u) - logistic(u).mean() + torch.rand(1), "alone, or is random"),
        (lambda u: normal(u.float()), "is not finite at"),
    ],
)
def test_a_wrong_quantile_is_refused(quantile, message):
    with pytest.raises((ValueError, ZeroDivisionError), match=message):
        register(quantile=quantile)
    assert mechanisms.known_mechanisms() == ("gaussian",)


@pytest.mark.parametrize(
    ("of", "message"),
    [
        (lambda history, delta: 0.0, "does not rise with more steps: 0, then 0"),
        (lambda history, delta: epsilon(history, delta) / 20, "shows that it is at least"),
        (
            lambda history, delta: epsilon(history, delta) / (1 if history[0][0] > 0.5 else 20),
            "shows that it is at least",
        ),
        (lambda history, delta: epsilon(history[:1], delta), "with further steps of other noise"),
        (lambda history, delta: 9 / history[0][2], "with more steps"),
        (lambda history, delta: 90 * sum(s * n for s, _, n in history), "with less noise"),
        (lambda history, delta: epsilon(history, delta) / history[0][1], "higher sample rate"),
        (lambda history, delta: epsilon(history, delta) * delta, "a smaller delta"),
        (lambda history, delta: -1.0, "returns -1.0"),
        (lambda history, delta: None, "returns None"),
        (lambda history, delta: math.nan, "returns nan"),
    ],
)
def test_a_wrong_account_is_refused(of, message):
    refusal(message, "mine", logistic, epsilon=of)


def test_names_are_taken_once():
    with pytest.raises(ValueError, match="'gaussian' is taken"):
        register("gaussian")
    for name in ("gaussian, cyclic", "a, b"):  # as accounts call other mechanisms
        with pytest.raises(ValueError, match="give another name"):
            register(name)
    register()
    register()
    register(quantile=lambda u: logistic(u))  # the cell of a notebook runs again
    with pytest.raises(ValueError, match="'logistic' is taken by one that computes something else"):
        register(quantile=normal)


def test_an_account_may_state_no_bound():
    register(of=lambda history, delta: float("inf"))
    assert mechanisms.known_mechanisms() == ("gaussian", "logistic")


@pytest.mark.parametrize("sigma", [0.5, 1.0, 4.0])
def test_the_lower_bound_is_that_of_a_gaussian(sigma):
    """Whose exact ε solves δ = Φ(1/2σ − εσ) − e^ε Φ(−1/2σ − εσ), Balle and Wang 2018."""
    phi = torch.distributions.Normal(0.0, 1.0)

    def delta_of(eps: float) -> float:
        a, b = (torch.tensor(s / (2 * sigma) - eps * sigma, dtype=torch.float64) for s in (1, -1))
        return float(phi.cdf(a) - math.exp(eps) * phi.cdf(b))

    low, high = 0.0, 60.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if delta_of(middle) > 1e-5 else (low, middle)
    found = mechanisms.lower_bound(normal, sigma, 1e-5)
    assert 0.85 * low < found <= low


def test_ranks_and_checkpoints_tell_mechanisms_of_one_name_apart(monkeypatch):
    seen = set()
    for quantile, of in (
        (logistic, epsilon),
        (normal, epsilon),
        (logistic, lambda *a: 2 * epsilon(*a)),
    ):
        monkeypatch.setattr(mechanisms, "_REGISTERED", {})
        register("mine", quantile, of)
        seen.add(mechanisms.described("mine"))
    assert len(seen) == 3
    assert mechanisms.described("gaussian") == "gaussian"


def noise(numel: int, offset: int = 0, **options) -> torch.Tensor:
    values = mechanisms.mechanism_of("logistic").values
    return add_noise(torch.zeros(numel), STREAM, std=1.0, offset=offset, values=values, **options)


def test_its_distribution():
    """Kolmogorov and Smirnov's distance, and neighbours that have nothing in common."""
    register()
    z = noise(200_000).double()
    u = torch.sigmoid(z * math.pi / math.sqrt(3)).sort().values
    distance = (u - (torch.arange(len(u)) + 0.5) / len(u)).abs().max()
    assert distance < 1.95 / len(u) ** 0.5  # one time in a thousand; the stream is always this one
    assert abs(torch.corrcoef(torch.stack((z[1:], z[:-1])))[0, 1]) < 0.01


def test_every_number_has_an_address():
    register()
    whole = noise(1001)
    for offset in (0, 1, 2, 3, 500):
        assert torch.equal(noise(300, offset), whole[offset : offset + 300])
    table = noise(48).view(6, 8)
    place = spans_of(((2, 3), (3, 5)), (6, 8))
    values = mechanisms.mechanism_of("logistic").values
    part = add_noise(torch.zeros(3, 5), STREAM, std=1.0, place=place, values=values)
    assert torch.equal(part, table[2:5, 3:8])


def build(**changes):
    return saved_runs.build(**({"noise_mechanism": "logistic"} | changes))


def test_epsilon_is_its_own_and_the_statement_says_so():
    register()
    run = build()
    assert run.engine.get_epsilon(1e-3) == 0
    saved_runs.train(run, 3)
    ((sigma, rate, steps),) = run.engine.accountant.history
    assert (sigma, steps) == (0.8, 3)
    assert run.engine.get_epsilon(1e-3) == epsilon([(sigma, rate, 3)], 1e-3)
    statement = run.engine.privacy_statement(1e-3)
    assert statement.accountant == "that of noise mechanism 'logistic'"
    assert statement.epsilon == run.engine.get_epsilon(1e-3)
    assert math.isinf(saved_epsilon(build(noise_multiplier=0.0)))


def saved_epsilon(run) -> float:
    saved_runs.train(run, 1)
    return run.engine.get_epsilon(1e-3)


def test_a_step_has_its_noise():
    """Of a loss of zero the gradient is noise, whose distribution tells it from a normal's."""
    register()
    network = nn.Linear(200, 200, bias=False)
    engine = PrivacyEngine(accountant="rdp")
    data = TensorDataset(torch.zeros(8, 200), torch.zeros(8, dtype=torch.long))
    model, optimizer, criterion, _ = engine.make_private(
        module=network, optimizer=torch.optim.SGD(network.parameters(), lr=1.0),
        data_loader=DataLoader(data, batch_size=4), noise_multiplier=2.0, max_grad_norm=0.5,
        expected_batch_size=1, noise_mechanism="logistic",
    )  # fmt: skip
    before = network.weight.detach().clone()
    x, y = data[:4]
    criterion(model(x), y).backward()
    optimizer.step()
    z = (network.weight.detach() - before).double()  # σC is 1
    assert 0.97 < z.std() < 1.03
    assert 3.9 < (z**4).mean() / z.var() ** 2 < 4.6  # 4.2 of a logistic distribution, 3 of a normal


def test_a_run_is_resumed_bit_for_bit(tmp_path):
    register()
    saved_runs.check_resume(tmp_path / "file", build)
    with pytest.raises(
        ValueError, match=r"noise_mechanism is logistic .* and gaussian in this run"
    ):
        saved_runs.load(build(noise_mechanism="gaussian"), tmp_path / "file")
