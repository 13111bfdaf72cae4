"""The adaptive threshold: it finds its quantile, and costs what is stated.

The privacy of a step is not read off a formula here: the distance between two neighbouring outputs
is measured in units of the noise.
"""

import math

import pytest
import torch
from torch import Tensor

from dp_clipping.noise.adaptive_threshold import DEFAULT_STD, STREAM, AdaptiveThreshold
from tests.support import zoo

KEY = bytes(range(32))
M = 100.0


def adaptive(limit=1.0, **options) -> AdaptiveThreshold:
    return AdaptiveThreshold(limit, **({"expected_batch_size": M} | options))


def norms(*values: float) -> Tensor:
    return torch.tensor([values]).square()


def gradient_noise_multiplier(sigma: float, count_std: float, groups: int = 1) -> float:
    threshold = AdaptiveThreshold([1.0] * groups, expected_batch_size=M, count_std=count_std)
    return threshold.gradient_noise_multiplier(sigma)


@pytest.mark.parametrize("groups", [1, 5])
@pytest.mark.parametrize("sigma", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("count_std", [5.0, 20.0])
def test_gradient_and_counts_cost_what_was_asked_for(sigma, count_std, groups):
    z = gradient_noise_multiplier(sigma, count_std, groups)
    assert z > sigma
    # The distance that one sample moves both by, in units of the noise: C/(zC) and ½/σ_b each.
    distance = math.hypot(1 / z, *[0.5 / count_std] * groups)
    assert distance == pytest.approx(1 / sigma, rel=1e-12)


def test_no_noise_asked_for():
    assert gradient_noise_multiplier(0.0, 5.0) == 0.0
    assert gradient_noise_multiplier(0.0, 0.0) == 0.0


@pytest.mark.parametrize(
    ("sigma", "count_std", "groups", "least"),
    [(1.0, 0.0, 1, 0.5), (1.0, 0.5, 1, 0.5), (1.0, 0.9, 4, 1), (3.0, 2.5, 4, 3)],
)
def test_counts_that_would_cost_everything_are_refused(sigma, count_std, groups, least):
    with pytest.raises(ValueError, match=rf"the whole budget, give more than {least:g} \("):
        gradient_noise_multiplier(sigma, count_std, groups)
    assert gradient_noise_multiplier(sigma, least * 1.001, groups) > sigma


def test_noise_on_the_count_has_its_standard_deviation():
    """Over steps, mean 0 and σ_b."""
    key, count_std, steps = bytes(range(32)), 7.0, 2000
    noise = []
    for step in range(steps):
        threshold = adaptive(count_std=count_std, learning_rate=1.0)
        threshold.update(torch.zeros(1, 0), step=step, noise_key=key)
        noise.append((0.5 - math.log(threshold.clip_norms[0]) - 0.5) * M)
    found = torch.tensor(noise, dtype=torch.float64)
    assert abs(float(found.mean())) < 5 * count_std / steps**0.5
    assert abs(float(found.std()) / count_std - 1) < 5 / (2 * steps) ** 0.5


def test_noise_depends_on_key_and_step_and_group():
    seen = set()
    for key, step in ((KEY, 0), (KEY, 1), (bytes(32), 0)):
        threshold = adaptive([1.0, 1.0])
        threshold.update(torch.zeros(2, 0), step=step, noise_key=key)
        seen.update(threshold.clip_norms)
    assert len(seen) == 6


def test_no_parameter_has_the_noise_of_the_count():
    network = zoo.seeded(zoo.transformer)
    assert not any(name.startswith(".") for name, _ in network.named_parameters())
    assert STREAM.startswith(".")
    with pytest.raises(KeyError, match="contain"):
        torch.nn.Module().register_parameter(STREAM, None)


def test_a_count_is_released_once():
    threshold = adaptive()
    threshold.update(norms(1.0), step=4, noise_key=KEY)
    before = threshold.state_dict()
    resumed = adaptive()
    resumed.load_state_dict(before)
    for one, step in ((threshold, 3), (threshold, 4), (resumed, 4)):
        with pytest.raises(RuntimeError, match=r"released already.* build an AdaptiveThreshold"):
            one.update(norms(2.0), step=step, noise_key=KEY)
    assert threshold.state_dict() == resumed.state_dict() == before
    threshold.update(norms(2.0), step=6, noise_key=KEY)  # steps that failed in between are gone


def test_the_update_of_the_paper():
    """60 of 100 norms are at most 1: C ← exp(-0.2 (0.6 - 0.5))."""
    threshold = adaptive(count_std=0.0)
    squares = torch.tensor([[0.5] * 59 + [1.0] + [2.0] * 38 + [math.inf, math.nan]])
    threshold.update(squares, step=0, noise_key=KEY)
    assert threshold.max_grad_norm == pytest.approx(math.exp(-0.02), rel=1e-12)


@pytest.mark.parametrize("quantile", [0.2, 0.5, 0.9])
@pytest.mark.parametrize("start", [0.01, 100.0])
def test_it_finds_its_quantile(quantile, start):
    torch.manual_seed(0)
    threshold = adaptive(start, quantile=quantile)
    for step in range(400):
        drawn = torch.randn(int(M) + step % 21 - 10).exp()  # draws of unequal sizes
        threshold.update(drawn.square()[None], step=step, noise_key=KEY)
    reached = float(
        torch.distributions.Normal(0, 1).cdf(torch.tensor(threshold.clip_norms[0]).log())
    )
    assert reached == pytest.approx(quantile, abs=0.08)


def test_each_group_has_its_own():
    threshold = adaptive([1.0, 10.0], count_std=0.0)
    threshold.update(torch.full((2, 100), 4.0), step=0, noise_key=KEY)
    assert threshold.max_grad_norm == pytest.approx([math.exp(0.1), 10 * math.exp(-0.1)])
    assert isinstance(threshold.max_grad_norm, list)


def test_limits_are_kept():
    threshold = adaptive(2.0, learning_rate=1e300, lowest=0.25, highest=4.0, count_std=0.0)
    threshold.update(norms(*[0.1] * 100), step=0, noise_key=KEY)
    assert threshold.max_grad_norm == 0.5
    threshold.update(norms(*[100.0] * 100), step=1, noise_key=KEY)
    assert threshold.max_grad_norm == 8.0


def test_without_noise():
    threshold = adaptive()
    threshold.update(norms(*[1.0] * 50, *[2.0] * 50), step=0, noise_key=KEY, noisy=False)
    assert threshold.max_grad_norm == 1.0


def test_a_state_of_other_settings_changes_nothing():
    threshold = adaptive()
    threshold.update(norms(1.0), step=0, noise_key=KEY)
    for other in (
        adaptive(quantile=0.7),
        adaptive(2.0),
        adaptive([1.0, 1.0]),
        adaptive(count_std=9),
    ):
        before = other.state_dict()
        with pytest.raises(ValueError, match="resume with the settings of the saved run"):
            other.load_state_dict(threshold.state_dict())
        assert other.state_dict() == before
    with pytest.raises(ValueError, match="not the state of an adaptive threshold"):
        threshold.load_state_dict({"limits": [1.0]})


def test_the_default_of_the_count_is_the_papers():
    assert adaptive().count_std == M * DEFAULT_STD == 5.0
