"""The front door: what is refused, and what warns; names are in tests/test_from_opacus.py."""

import contextlib
import math

import pytest
import torch
from opacus.schedulers import ExponentialGradClip, ExponentialNoise
from torch import nn
from torch.utils.data import DataLoader, default_collate

from dp_clipping import PrivacyEngine
from dp_clipping.trials.schedule import LEVELS, Schedule
from tests.support import engine
from tests.support.engine import BATCH, CLASSES, arguments, backward, build, data, fixed, step

pytestmark = [
    pytest.mark.filterwarnings("error::UserWarning"),
    pytest.mark.filterwarnings("ignore:noise and sampling come from a fixed seed"),
    pytest.mark.filterwarnings("ignore:the batch of this step did not come from"),
    pytest.mark.filterwarnings("ignore:GDP accounting is experimental"),
    pytest.mark.filterwarnings("ignore:Secure RNG turned off"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
    pytest.mark.filterwarnings("ignore:Optimal order is the"),
]


class TestModules:
    def test_compatible_modules(self):
        bad = nn.Sequential(nn.Conv2d(4, 8, 1), nn.BatchNorm2d(8))
        assert not PrivacyEngine.is_compatible(module=bad)
        with pytest.raises(ValueError, match=r"1 \(BatchNorm2d\).*GroupNorm"):
            PrivacyEngine.validate(module=bad, optimizer=None, data_loader=None)
        good = PrivacyEngine.get_compatible_module(bad)
        assert PrivacyEngine.is_compatible(module=good, optimizer=None, data_loader=None)
        assert isinstance(bad[1], nn.BatchNorm2d), "a copy"


class TestWarnings:
    def test_not_poisson(self):
        with pytest.warns(
            UserWarning, match="the ε that the accountant states does not hold"
        ) as found:
            run = build(poisson_sampling=False)
        assert found[0].filename == engine.__file__, "the user's line"
        assert type(run.loader) is DataLoader

    @pytest.mark.filterwarnings("default:noise and sampling come from a fixed seed")
    def test_fixed_seed_also_after_another_make_private(self):
        run = build(noise_generator=fixed())
        step(run)
        with pytest.warns(UserWarning, match="fixed seed: anyone who knows it can subtract"):
            run.engine.get_epsilon(1e-5)
        loader = DataLoader(run.loader.dataset, batch_size=BATCH)
        build(engine=run.engine, data_loader=loader)
        with pytest.warns(UserWarning, match="fixed seed"):
            run.engine.get_epsilon(1e-5)

    def test_two_datasets(self):
        run = build()
        with pytest.warns(UserWarning, match="another dataset"):
            build(engine=run.engine)

    def test_a_budget_already_spent(self, monkeypatch):
        monkeypatch.setattr("opacus.accountants.utils.get_noise_multiplier", lambda **_: 1.0)
        run = build()
        step(run)
        rest = arguments(data_loader=DataLoader(run.loader.dataset, batch_size=BATCH))
        del rest["noise_multiplier"]
        with pytest.warns(UserWarning, match="counted steps already"):
            run.engine.make_private_with_epsilon(
                target_epsilon=8, target_delta=1e-3, epochs=1, **rest
            )


class TestNoise:
    def test_a_failed_step_never_draws_the_same_noise_again(self):
        run = build(noise_generator=fixed())
        step_of = run.optimizer.original_optimizer.step

        def fail():
            raise MemoryError

        seen = []
        for stepping in (fail, step_of):
            run.optimizer.original_optimizer.step = stepping
            backward(run, data()[:0])
            with contextlib.suppress(MemoryError):
                run.optimizer.step()
            seen.append(run.model.network[0].weight.grad)
            run.optimizer.zero_grad()
        assert (seen[0] != seen[1]).all()
        assert run.engine.accountant.history == [(1.0, 1 / 4, 2)]


class TestSchedulers:
    def test_noise_and_threshold(self):
        """Noise alone, on empty batches: its scale is σC of the moment, and so is the account."""
        net = nn.Linear(3000, CLASSES)
        run = build(
            module=net, data_loader=DataLoader(data(width=3000), batch_size=BATCH),
            expected_batch_size=1, noise_generator=fixed(),
        )  # fmt: skip
        ours = [
            ExponentialNoise(run.optimizer, gamma=0.5),
            ExponentialGradClip(run.optimizer, gamma=3.0),
        ]
        scales = []
        for _ in range(3):
            backward(run, data(width=3000)[:0])
            run.optimizer.step()
            scales.append(net.weight.grad.std().item())
            run.optimizer.zero_grad()
            for one in ours:
                one.step()
        assert scales == pytest.approx([0.5, 0.75, 1.125], rel=0.03)
        q = 1 / 4
        assert run.engine.accountant.history == [(1.0, q, 1), (0.5, q, 1), (0.25, q, 1)]

    def test_the_threshold_of_a_step_is_the_one_it_began_with(self):
        run = build(noise_multiplier=0.0, expected_batch_size=1)
        backward(run, data()[:1])
        run.optimizer.max_grad_norm = 1e-3
        run.optimizer.step()
        norm = torch.cat([p.grad.flatten() for p in run.model.parameters()]).norm()
        assert norm == pytest.approx(0.5, rel=1e-3)


class TestRelease:
    def test_what_is_not_covered_is_off(self):
        run = build(hide_unprotected=True)
        x, y = data()[:5]
        loss = run.criterion(run.model(x), y)
        (loss * 2).backward()
        for look in (
            loss.item, loss.detach, loss.__float__, loss.__repr__,
            lambda: loss.loss_per_sample,
            lambda: run.model.per_sample_gradient_norms,
            lambda: run.model.nonfinite_samples,
            run.model.global_norms,
            run.model.norm_statistics,
            lambda: run.engine.check(run.model, data()[:5]),
        ):  # fmt: skip
            with pytest.raises(RuntimeError, match=r"not covered by ε.*hide_unprotected=False"):
                look()
        run.optimizer.step()
        run.optimizer.zero_grad()
        assert math.isfinite(run.engine.get_epsilon(1e-5))


@pytest.mark.parametrize("name", ["secure_mode", "hide_unprotected"])
def test_what_an_engine_was_created_with_stays(name):
    with pytest.raises(AttributeError):
        setattr(PrivacyEngine(), name, True)
    assert getattr(PrivacyEngine(**{name: True}), name) is True


class Mixes(nn.Module):
    """Subtracts the batch's mean, if it is told to."""

    def __init__(self, mixes: bool = False) -> None:
        super().__init__()
        self.layer, self.mixes = nn.Linear(4, CLASSES), mixes

    def forward(self, x):
        y = self.layer(x)
        return y - y.mean(0) if self.mixes else y


def of_pairs(samples):
    """Makes rows of which each has a part of another sample."""
    x, y = default_collate(samples)
    return x + x.roll(1, 0), y


class TestChecks:
    @pytest.mark.parametrize("checks", LEVELS)
    def test_which_batches_are_checked(self, checks):
        """One batch between the powers of two mixes its samples."""
        number = next(n for n in range(2, 10**4) if is_sampled(n))
        run = build(engine=PrivacyEngine(checks=checks), module=Mixes())
        step(run)
        run.model.skip_checks(number - 1)
        run.network.mixes = True
        if checks == "sampled":
            with pytest.raises(ValueError, match="depends on the other samples of the batch"):
                step(run)
        else:
            step(run)

    @pytest.mark.parametrize("checks", LEVELS)
    def test_a_function_that_mixes_always(self, checks):
        run = build(engine=PrivacyEngine(checks=checks), module=Mixes())
        step(run)  # where the samples are is found in any case
        run.network.mixes = True
        if checks == "off":
            step(run)
        with pytest.raises(ValueError, match="depends on the other samples of the batch"):
            run.engine.check(run.model, data()[:5]) if checks == "off" else step(run)

    @pytest.mark.parametrize("checks", LEVELS)
    def test_a_collate_function(self, checks):
        loader = DataLoader(data(), BATCH, collate_fn=of_pairs)
        run = build(engine=PrivacyEngine(checks=checks), data_loader=loader)
        if checks == "off":
            next(iter(run.loader))
        else:
            with pytest.raises(ValueError, match="collate_fn"):
                next(iter(run.loader))

    @pytest.mark.parametrize("checks", LEVELS)
    def test_batches_that_are_skipped(self, checks):
        """Skips sampled ones too; the first is looked at, and those after them as before."""
        run = build(engine=PrivacyEngine(checks=checks))
        looks_at = run.model.passes.reader.looks_at
        run.model.skip_checks(1000)
        assert looks_at(BATCH)
        step(run)
        found = []
        for number in range(1001, 1301):
            found += [number] if looks_at(BATCH) else []
            run.model.skip_checks(1)
        sampled = [number for number in range(1001, 1301) if is_sampled(number)]
        wanted = {"first": [1023], "sampled": sorted([1023, *sampled]), "off": []}
        assert found == wanted[checks]

    def test_off_looks_at_the_first_batch_alone(self):
        """Also where samples are alike, which shows less of their places."""
        run = build(engine=PrivacyEngine(checks="off"))
        looks_at = run.model.passes.reader.looks_at
        assert looks_at(BATCH)
        step(run, (torch.ones(5, 4), torch.zeros(5, dtype=torch.long)))
        assert not looks_at(100 * BATCH)


def is_sampled(count: int) -> bool:
    first, sampled = Schedule("first"), Schedule("sampled")
    for schedule in (first, sampled):
        schedule.skip(count)
    return sampled.is_due() and not first.is_due()
