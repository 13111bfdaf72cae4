"""The mechanism that ε is computed for, measured on real steps: noise once, a constant divisor.

How far one unit moves a sum is in `neighbours/`.

A test of noise must reject a wrong scale, so `assert_noise` is itself tried on steps with two
thirds and three halves of the noise. Keys come from the operating system in most of these tests:
no seed can make one pass by chance, and a right mechanism fails one in a million times.
"""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scipy.stats import chi2
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dp_clipping import MODES
from tests.support import engine, zoo

PRIVATE_MODES = [mode for mode in MODES if mode != "no_dp"]
SAMPLES, INPUTS, HIDDEN, OUTPUTS = 24, 40, 60, 20
SIGMA, C = 1.3, 0.7
ONE_IN_A_MILLION = 1e-6
WRONG_SCALES = (2 / 3, 3 / 2)


Applied = dict[str, Tensor]
"""Name -> what a step applied, in float64."""


def samples(count: int = SAMPLES) -> tuple[Tensor, Tensor]:
    return zoo.numbers(count, INPUTS, out=(OUTPUTS,))


def make_run(
    data: tuple[Tensor, Tensor] | None = None, batch_size: int = SAMPLES, *middle: nn.Module,
    **options: Any,
) -> SimpleNamespace:  # fmt: skip
    """A private run of 3680 parameters that no step changes; q = batch_size / samples.

    Noise and draws come from the operating system.
    """
    torch.manual_seed(0)
    middle = middle or (nn.Tanh(),)
    network = nn.Sequential(nn.Linear(INPUTS, HIDDEN), *middle, nn.Linear(HIDDEN, OUTPUTS))
    defaults = {
        "criterion": zoo.Criterion(zoo.squared_error), "noise_multiplier": SIGMA,
        "max_grad_norm": C,
    }  # fmt: skip
    return engine.build(
        module=network, dataset=TensorDataset(*(data or samples())), batch_size=batch_size, lr=0.0,
        **defaults | options,
    )  # fmt: skip


def step(run: SimpleNamespace, batch: list[Tensor]) -> Applied:
    """One draw in one batch."""
    engine.backward(run, batch)
    run.optimizer.step()
    applied = {n: p.grad.double() for n, p in run.network.named_parameters()}
    run.optimizer.zero_grad()
    return applied


def steps(run: SimpleNamespace, count: int) -> list[Applied]:
    """The first steps, of as many epochs as are needed."""
    applied: list[Applied] = []
    while len(applied) < count:
        applied += [step(run, batch) for batch in run.loader]
    return applied[:count]


def difference(one: Applied, other: Applied) -> Applied:
    return {name: one[name] - other[name] for name in one}


def flat(tensors: Applied) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors.values()])


def noise_of(noisy: Applied, **options: Any) -> Applied:
    """What a first step applied without what it applies without noise."""
    return difference(noisy, *steps(make_run(noise_multiplier=0.0, **options), 1))


def assert_noise(noise: Tensor, std: float) -> None:
    """Mean 0 and this standard deviation, over all entries and over each tenth of them."""
    for part in (noise, *noise.tensor_split(10)):
        n = part.numel()
        squares = float(part.square().sum()) / std**2
        tail = min(chi2.cdf(squares, n), chi2.sf(squares, n))
        measured = (squares / n) ** 0.5
        assert tail > ONE_IN_A_MILLION / 2, f"noise has {measured:.3f} of its standard deviation"
        assert abs(float(part.mean())) < 6 * std / n**0.5


def correlation(one: Tensor, other: Tensor) -> float:
    n = min(len(one), len(other))
    return float(torch.corrcoef(torch.stack([one[:n], other[:n]]))[0, 1])


def assert_independent(one: Tensor, other: Tensor) -> None:
    n = min(len(one), len(other))
    assert abs(correlation(one, other)) < 6 / n**0.5


SUM = {"criterion": zoo.Criterion(zoo.squared_error, "sum"), "loss_reduction": "sum"}


class TestNoise:
    @pytest.mark.parametrize("mode", PRIVATE_MODES)
    def test_is_sigma_c_over_the_expected_batch(self, mode):
        (noisy,) = steps(make_run(grad_sample_mode=mode), 1)
        assert_noise(flat(noise_of(noisy, grad_sample_mode=mode)), SIGMA * C / SAMPLES)

    @pytest.mark.parametrize("scale", WRONG_SCALES)
    def test_another_scale_is_noticed(self, scale):
        run = make_run()
        run.optimizer.noise_multiplier *= scale
        (noisy,) = steps(run, 1)
        with pytest.raises(AssertionError, match="noise has"):
            assert_noise(flat(noise_of(noisy)), SIGMA * C / SAMPLES)

    @pytest.mark.parametrize(
        ("limit", "std"), [(C, C), ([0.3, 0.4], 0.5)], ids=["one threshold", "a threshold a module"]
    )
    def test_per_layer_is_calibrated_to_all_thresholds_together(self, limit, std):
        options = {"clipping": "per_layer", "max_grad_norm": limit}
        (noisy,) = steps(make_run(**options), 1)
        assert_noise(flat(noise_of(noisy, **options)), SIGMA * std / SAMPLES)

    def test_of_a_sum_is_not_divided(self):
        (noisy,) = steps(make_run(**SUM), 1)
        assert_noise(flat(noise_of(noisy, **SUM)), SIGMA * C)

    @pytest.mark.parametrize("physical", [1, 5, 24])
    def test_is_added_once_to_all_microbatches_of_a_draw(self, physical):
        run = make_run()
        with engine.in_parts(run, physical) as microbatches:
            pieces = [step(run, batch) for batch in microbatches]
        assert run.optimizer.steps == 1
        assert len(pieces) == -(-SAMPLES // physical)
        assert_noise(flat(noise_of(pieces[-1])), SIGMA * C / SAMPLES)

    def test_differs_between_steps_parameters_and_runs(self):
        torch.manual_seed(0)
        first, second = steps(make_run(), 2)
        torch.manual_seed(0)
        (other,) = steps(make_run(), 1)
        noises = [noise_of(applied) for applied in (first, second, other)]
        assert_independent(flat(noises[0]), flat(noises[1]))
        assert_independent(flat(noises[0]), flat(noises[2]))
        for one, another in pairwise(noises[0].values()):
            assert_independent(one.flatten(), another.flatten())

    def test_an_empty_draw_has_noise_and_is_counted(self):
        run = make_run(samples(50), batch_size=1)
        for _ in range(20):
            for batch in run.loader:
                applied = step(run, batch)
                if len(batch[0]) == 0:
                    assert_noise(flat(applied), SIGMA * C / 1)
                    counted = sum(steps for _, _, steps in run.engine.accountant.history)
                    assert counted == run.optimizer.steps
                    return
        pytest.fail("a thousand draws at q = 1/50 and none was empty")


def test_known_random_numbers_void_it():
    """Removes a sample, so that others have other masks: see `docs/sharp_edges.md`."""
    inputs, targets = samples(40)

    def clipped_sum(first: int) -> Tensor:
        run = make_run(
            (inputs[first:], targets[first:]), 40, nn.Dropout(), noise_multiplier=0.0,
            expected_batch_size=1, sample_rate=1.0,
        )  # fmt: skip
        (batch,) = run.loader
        torch.manual_seed(7)
        return flat(step(run, batch))

    assert torch.equal(clipped_sum(0), clipped_sum(0))
    assert 3 * C < float((clipped_sum(0) - clipped_sum(1)).norm()) < 40 * C


class TestDraws:
    def test_the_divisor_is_the_expected_batch_whatever_is_drawn(self):
        """Each draw's applied gradient, times the constant, is its own clipped sum."""
        run = make_run(batch_size=6, noise_multiplier=0.0)
        sizes = set()
        for _ in range(5):
            for inputs, targets in run.loader:
                applied = flat(step(run, [inputs, targets])) * 6
                sizes.add(len(inputs))
                if len(inputs) == 0:
                    assert float(applied.norm()) == 0
                    continue
                whole = make_run((inputs, targets), len(inputs), noise_multiplier=0.0)
                expected = flat(*steps(whole, 1)) * len(inputs)
                torch.testing.assert_close(applied, expected, rtol=1e-4, atol=1e-6)
        assert len(sizes) > 2

    def test_draws_differ_between_epochs_and_between_runs_of_one_torch_seed(self):
        def drawn():
            torch.manual_seed(0)
            run = make_run(samples(200), batch_size=20, noise_multiplier=0.0)
            run.model.eval()
            return [[x[:, 0].tolist() for x, _ in run.loader] for _ in range(2)]

        one, other = drawn(), drawn()
        assert one[0] != one[1]
        assert one != other
