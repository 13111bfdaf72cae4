"""`examples_per_unit`: a unit of k examples is sampled, clipped and counted as one."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dp_clipping import PrivacyEngine
from dp_clipping.accounting.target_epsilon import noise_multiplier_for
from dp_clipping.arguments.sampled import Sampled
from tests.dp_clipping.conftest import assert_close, gradients_of
from tests.support import engine as runs
from tests.support.engine import fixed, in_parts
from tests.support.saved_runs import load, save

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
]

SAMPLES, MOST, CLASSES, C = 22, 4, 3, 0.7
IDS = [max(n for n in range(7) if i >= n * (n - 1) // 2) for i in range(SAMPLES - 1)] + ["last"]
IDS = IDS[::2] + IDS[1::2]  # 7 units of 1 to 6 examples, not side by side


def data(count=SAMPLES):
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(count, 5, generator=draw, dtype=torch.float64)
    return TensorDataset(x, torch.randint(CLASSES, (count,), generator=draw))


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, CLASSES)).double()


def given(loss_reduction="sum", **options):
    """What is given to `runs.arguments`, and to `runs.build`."""
    return {
        "module": network(), "dataset": data(), "batch_size": 2 * MOST, "lr": 0.0,
        "criterion": nn.CrossEntropyLoss(reduction=loss_reduction), "noise_multiplier": 0.0,
        "loss_reduction": loss_reduction, "max_grad_norm": C, "examples_per_unit": MOST, **options,
    }  # fmt: skip


def build(engine=None, **options):
    return runs.build(engine=engine, **given(**options))


def members_of(x, size):
    """Returns the examples of each unit in a batch."""
    rows = [int((data().tensors[0] == row).all(1).nonzero()) for row in x]
    return [sorted(set(rows[i : i + size])) for i in range(0, len(rows), size)]


def steps(run, loader=None):
    """Takes the steps of an epoch; yields batch, loss, whether the step is whole."""
    for batch in run.loader if loader is None else loader:
        x, y = batch
        loss = run.criterion(run.model(x), y)
        loss.backward()
        yield x, y, loss
        run.optimizer.step()
        run.optimizer.zero_grad()


class TestSteps:
    @pytest.mark.parametrize("size", [MOST, 2 * MOST])
    @pytest.mark.parametrize("pad", [False, True])
    def test_physical_batches_hold_whole_units(self, size, pad):
        run, alone = (build(sample_rate=0.6, noise_generator=fixed()) for _ in range(2))
        whole = [gradients_of(alone.model) for _ in steps(alone)]
        with in_parts(run, size, pad_batches=pad) as pieces:
            found, parts = [], 0
            for x, _, loss in steps(run, pieces):
                assert pieces.real % MOST == 0
                assert len(x) == size if pad else len(x) <= size
                assert len(run.model.step_state.norms[-1].norms) == pieces.real // MOST
                assert len(loss.loss_per_sample) == sum(map(len, members_of(x[: pieces.real], 4)))
                parts += 1
                if not run.model.step_state.accumulating:
                    found.append(gradients_of(run.model))
        assert len(found) == len(whole)
        assert parts > len(whole) or size > MOST
        for got, expected in zip(found, whole, strict=True):
            assert_close(got, expected, 1e-9)

    def test_check_compares_units(self):
        run = build()
        x, y = data(12).tensors
        found = run.engine.check(run.model, (x.float().double(), y))
        assert found.ok, found
        assert found.norms.shape == (3,)

    def test_a_non_private_step_leaves_fill_out(self):
        run = build(grad_sample_mode="no_dp", sample_rate=1.0, steps=1)
        plain = network()
        F.cross_entropy(plain(data().tensors[0]), data().tensors[1], reduction="sum").backward()
        for _ in steps(run):
            for p, q in zip(run.model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad)


def clipped_sum(rows, size):
    """Returns the sum over units of min(1, C / norm) times the sum of their rows' gradients."""
    total = [torch.zeros_like(p) for p in network().parameters()]
    for own in members_of(rows, size):
        plain = network()
        x, y = (t[own] for t in data().tensors)
        F.cross_entropy(plain(x), y, reduction="sum").backward()
        norm = torch.cat([p.grad.flatten() for p in plain.parameters()]).norm()
        for value, p in zip(total, plain.parameters(), strict=True):
            value += min(1.0, C / norm) * p.grad
    return total


SAMPLED = {
    "poisson": {"sample_rate": 0.5, "steps": 4},
    "truncated_poisson": {"sample_rate": 0.7, "steps": 4, "max_batch_size": 4},
    "balls_in_bins": {"steps": 2},
    "cyclic": {"steps": 2},
}


class TestDrawnExamples:
    """`examples_per_step`: m of a unit's examples are in a batch, and clipped as one."""

    @pytest.mark.parametrize(("m", "most"), [(1, 1), (2, 1), (3, 6)])
    @pytest.mark.parametrize("sampling", SAMPLED)
    def test_steps_are_those_of_the_reference(self, sampling, m, most):
        run = build(
            examples_per_step=m, examples_per_unit=most, unit_ids=IDS, batch_size=2 * m,
            sampling=sampling, wrap_model=sampling != "poisson", **SAMPLED[sampling],
        )  # fmt: skip
        assert run.optimizer.expected_batch_size == 2.0
        seen = set()
        for _ in range(2):
            for x, _, _ in steps(run):
                for own in members_of(x, m):
                    (unit,) = {IDS[i] for i in own}
                    assert len(own) == min(m, IDS.count(unit))
                    seen.update(own)
                parameters = run.model.parameters()
                for p, expected in zip(parameters, clipped_sum(x, m), strict=True):
                    torch.testing.assert_close(p.grad, expected)
        assert len(seen) > len(set(IDS)), "other examples in other steps"

    @pytest.mark.parametrize(
        ("options", "unit"),
        [
            ({"unit_ids": IDS}, "all examples with the same entry in unit_ids, of which a step ta"),
            ({"unit_ids": IDS, "examples_per_unit": 6},
             "all examples with the same entry in unit_ids, at most 6, of which a step takes 1"),
            ({"examples_per_unit": 4}, "4 consecutive examples of the data set, of which a step t"),
        ],
    )  # fmt: skip
    def test_the_statement_says_so(self, options, unit):
        run = build(examples_per_step=1, **{"examples_per_unit": 1} | options)
        statement = run.engine.privacy_statement(1e-3)
        assert statement.unit.startswith(unit)
        assert statement.sample_rate == 1.0, "8 units of a batch, and 7 or 6 in all"

    def test_a_resume_draws_the_same_examples(self, path):
        options = {"examples_per_step": 1, "examples_per_unit": 1, "unit_ids": IDS, "batch_size": 2,
                 "noise_multiplier": 1.0}  # fmt: skip
        run = build(sampling="cyclic", **options)
        for _ in steps(run):
            pass
        save(run, path)
        again, other = build(sampling="cyclic", **options), build(
            sampling="cyclic", **options | {"examples_per_step": 2, "batch_size": 4}
        )  # fmt: skip
        changed = "examples_per_step was 1 and is 2, so noise and samples come from a new key"
        load(again, path)
        with pytest.warns(UserWarning, match=changed):
            load(other, path)
        first, second = ([x.tolist() for x, _, _ in steps(one)] for one in (run, again))
        assert first == second


class TestAccount:
    def test_statement_and_account_are_of_units(self):
        run = build(noise_multiplier=1.0)
        for _ in steps(run):
            pass
        statement = run.engine.privacy_statement(1e-3)
        assert statement.unit == "4 consecutive examples of the data set"
        assert statement.sample_rate == 1 / 3  # 6 units, of which the last has two examples
        assert run.engine.accountant.history == [(1.0, 1 / 3, 3)]
        assert run.optimizer.expected_batch_size == 2.0

    def test_the_account_has_the_rate_of_units_of_any_size(self):
        loader = DataLoader(TensorDataset(torch.arange(float(SAMPLES))), batch_size=2 * MOST)
        drawn = {"unit_ids": IDS, "examples_per_unit": 6, "examples_per_step": MOST}
        assert len(loader) == 3
        assert Sampled.of(drawn, data_loader=loader).rates == (1 / 4, 4)  # 7 or 8 units, 2 a batch

    def test_a_target_epsilon_takes_the_rate_of_units(self):
        arguments = runs.arguments(**given())
        del arguments["noise_multiplier"]
        target = {"target_epsilon": 3.0, "target_delta": 1e-3, "epochs": 2}
        engine = PrivacyEngine(accountant="rdp")
        optimizer = engine.make_private_with_epsilon(**arguments, **target)[1]
        sigma = noise_multiplier_for(
            target_epsilon=3.0, target_delta=1e-3, sample_rate=1 / 3, steps=6, accountant="rdp",
            epsilon_tolerance=0.01, alphas=None,
        )  # fmt: skip
        assert optimizer.noise_multiplier == sigma


class TestRefused:
    def test_a_part_of_the_loaders_batch(self):
        run = build(sample_rate=1.0)
        for x, _ in run.loader:
            with pytest.raises(
                ValueError, match=r"forward of 4 examples, and the loader has .* 24"
            ):
                run.model(x[:4])
            break

    def test_another_loader_over_the_sampler(self):
        run = build()
        with pytest.raises(RuntimeError, match="it would split units of 4 rows: use dp_clipping"):
            next(iter(run.loader.batch_sampler))

    def test_other_units_in_one_account(self):
        engine = PrivacyEngine(accountant="rdp")
        build(engine)
        with pytest.raises(
            ValueError, match=r"accounted for units of 4: .* PrivacyEngine for each"
        ):
            build(engine, examples_per_unit=2)

    def test_units_of_other_ids_in_one_account(self):
        rows = len(build(PrivacyEngine(accountant="rdp")).loader.dataset)
        units = -(-rows // 4)
        ids, others = [row % units for row in range(rows)], [row // 4 for row in range(rows)]
        for first, second in ((None, ids), (ids, others), (ids, None)):
            engine = PrivacyEngine(accountant="rdp")
            build(engine, unit_ids=first)
            build(engine, unit_ids=first)
            with pytest.raises(ValueError, match=r"unit_ids make other units .* PrivacyEngine for"):
                build(engine, unit_ids=second)


class TestCheckpoints:
    @pytest.mark.parametrize("new_keys", [False, True])
    def test_other_units_are_refused(self, path, new_keys):
        run = build()
        save(run, path)
        other = build(examples_per_unit=2)
        with pytest.raises(ValueError, match="examples_per_unit is 4 in the checkpoint and 2"):
            load(other, path, new_keys=new_keys)

    @pytest.mark.parametrize("noise_multiplier", [0.0, 1.1])
    def test_other_ids_are_refused(self, path, noise_multiplier):
        """Also where other noise means new keys."""
        rows = len(build(PrivacyEngine(accountant="rdp")).loader.dataset)
        units = -(-rows // 4)
        run = build(unit_ids=[row % units for row in range(rows)])
        save(run, path)
        others = [row // 4 for row in range(rows)]
        other = build(unit_ids=others, noise_multiplier=noise_multiplier)
        with pytest.raises(ValueError, match="unit_ids put other examples together than in the sa"):
            load(other, path)
        load(other, path, new_keys=True)
