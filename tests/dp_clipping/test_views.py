"""`views`: the mean gradient of several draws of a sample is clipped, and ε is as without."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import Dataset

from ddp_by_hand.experiments.verify_correctness import reference as oracle
from dp_clipping import MODES
from tests.dp_clipping.conftest import assert_close
from tests.support import engine as runs
from tests.support import zoo
from tests.support.engine import in_parts
from tests.support.saved_runs import load, save

SAMPLES, CLASSES, V, C = 9, 3, 3, 0.2
PRIVATE = [mode for mode in MODES if mode != "no_dp"]
USERS = ["a", "b", "a", "c", "b", "c", "c", "d", "e"]  # at most 3 examples of one


class Augmented(Dataset):
    """Images [1, 6, 6] with their number as an entry, shifted at random each time they are read."""

    def __init__(self, is_random=True):
        draw = torch.Generator().manual_seed(3)
        self.images = torch.randn(SAMPLES, 1, 6, 6, generator=draw, dtype=torch.float64)
        self.is_random, self.reads = is_random, []

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        self.reads.append(index)
        image = self.images[index].clone()
        if self.is_random:
            image += torch.randn(1, 1, 1, dtype=torch.float64)
        image[0, 0, 0] = index
        return image, index % CLASSES


def network():
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(64, CLASSES)
    return nn.Sequential(*layers).double()


def build(engine=None, data=None, batch_size=SAMPLES // 3, lr=0.0, **options):
    net = network()
    reduction = options.setdefault("loss_reduction", "mean")
    data = data or Augmented()
    run = runs.build(
        engine=engine, module=net, dataset=data, batch_size=batch_size, lr=lr,
        criterion=nn.CrossEntropyLoss(reduction=reduction),
        **{"views": V, "noise_multiplier": 0.0, "max_grad_norm": C, **options},
    )  # fmt: skip
    run.data = data
    return run


def numbers(x):
    return x[:, 0, 0, 0].long().tolist()


def by_definition(run, x, y, clipping="flat", limit=C):
    """Returns norms and clipped sum of the yielded rows: one backward per sample.

    The loss of that backward is the mean over the sample's views, added up over a unit's examples.
    """
    model = run.optimizer.model
    rows = {}  # of each unit: the example, and the rows that it has
    for row, number in enumerate(numbers(x)):
        unit = USERS[number] if model.examples_per_unit > model.views else number
        rows.setdefault(unit, {}).setdefault(number, []).append(row)
    each = oracle.per_sample_gradients(network(), (x, y), zoo.cross_entropy)
    gradients = {
        name: torch.stack([
            sum(g[of_example[: model.views]].mean(0) for of_example in examples.values())
            for examples in rows.values()
        ])
        for name, g in each.items()
    }  # fmt: skip
    return oracle.norms(gradients), oracle.clipped_sum(gradients, limit, clipping)


def step(run, x, y):
    """Returns norms and `.grad` times the divisor of a whole step; None for a part of one."""
    run.criterion(run.model(x), y).backward()
    found = None
    model = run.optimizer.model
    if run.optimizer.pre_step():
        mean = run.optimizer.loss_reduction == "mean"
        divisor = run.optimizer.expected_batch_size if mean else 1
        sums = {n: p.grad.clone() * divisor for n, p in run.network.named_parameters()}
        found = model.per_sample_gradient_norms, sums
    run.optimizer.step()
    run.optimizer.zero_grad()
    return found


def assert_as_defined(run, found, x, y, **how):
    norms, sums = by_definition(run, x, y, **how)
    assert_close(found[1], sums, 1e-9)
    torch.testing.assert_close(found[0].double(), norms, rtol=1e-6, atol=1e-12)


class TestSteps:
    @pytest.mark.parametrize("clipping", ["flat", "per_layer"])
    @pytest.mark.parametrize("mode", PRIVATE)
    def test_a_step_is_one_backward_of_the_mean_for_each_sample(self, mode, clipping):
        limit = C if clipping == "flat" else [C, 2 * C, C / 2]
        run = build(
            grad_sample_mode=mode, clipping=clipping, max_grad_norm=limit, sample_rate=0.5,
            steps=3, wrap_model=mode != "ghost",
        )  # fmt: skip
        for x, y in run.loader:
            found = step(run, x, y)
            if len(x):
                assert_as_defined(run, found, x, y, clipping=clipping, limit=limit)

    def test_the_data_set_is_asked_for_each_view(self):
        run = build(sample_rate=1.0, steps=1)
        run.data.reads.clear()
        (x, _), *_ = run.loader
        assert numbers(x) == run.data.reads == [i for i in range(SAMPLES) for _ in range(V)]
        views = x.unflatten(0, (-1, V))
        assert (views[:, 0] != views[:, 1]).flatten(1).any(1).all()

    @pytest.mark.parametrize("reduction", ["mean", "sum"])
    @pytest.mark.parametrize("mode", ["no_dp", "bookkeeping"])
    def test_a_printed_loss_is_that_of_samples(self, mode, reduction):
        run = build(sample_rate=1.0, steps=1, grad_sample_mode=mode, loss_reduction=reduction)
        ((x, y),) = run.loader
        loss = run.criterion(run.model(x), y)
        rows = F.cross_entropy(network()(x), y, reduction="none")
        expected = rows.mean() if reduction == "mean" else rows.sum() / V
        torch.testing.assert_close(loss.detach(), expected.detach())
        if mode == "bookkeeping":
            assert f"{SAMPLES} samples" in repr(loss)

    @pytest.mark.parametrize("pad", [False, True])
    def test_units_of_several_examples_have_views_of_each(self, pad):
        run = build(
            examples_per_unit=3, unit_ids=USERS, sample_rate=1.0, steps=1, max_grad_norm=2 * C
        )
        assert run.optimizer.expected_batch_size == 1.0
        assert run.model.examples_per_unit == 3 * V
        rows = []
        with in_parts(run, 6 * V, pad_batches=pad) as pieces:
            for x, y in pieces:
                rows.append((x[: pieces.real], y[: pieces.real]))
                found = step(run, x, y)
        x, y = map(torch.cat, zip(*rows, strict=True))
        assert len(found[0]) == len(set(USERS)) == len(x) / (3 * V)
        assert_as_defined(run, found, x, y, limit=2 * C)

    def test_check_compares_the_means_of_views(self):
        run = build()
        x, y = zip(*(run.data[i] for i in range(4) for _ in range(V)), strict=True)
        batch = torch.stack(x), torch.tensor(y)
        found = run.engine.check(run.model, batch)
        assert found.ok, found
        norms, _ = by_definition(run, *batch)
        torch.testing.assert_close(found.norms.double(), norms, rtol=1e-6, atol=0)


class TestAccount:
    def test_rate_divisor_and_statement_are_of_samples(self):
        with_views, plain = build(noise_multiplier=1.0), build(noise_multiplier=1.0, views=1)
        for run in (with_views, plain):
            for x, y in run.loader:
                step(run, x, y)
        assert with_views.engine.accountant.history == plain.engine.accountant.history
        assert [run.optimizer.expected_batch_size for run in (with_views, plain)] == [3.0, 3.0]
        found = [run.engine.privacy_statement(1e-3).as_dict() for run in (with_views, plain)]
        assert found[0] == found[1]

    def test_a_resume_goes_on_with_other_views_under_a_new_key(self, path):
        run = build(noise_multiplier=1.0)
        for x, y in run.loader:
            step(run, x, y)
        save(run, path)
        for views in (V, 1):
            again = build(noise_multiplier=1.0, views=views)
            if views == V:
                load(again, path)
                here, there = again.loader.batch_sampler, run.loader.batch_sampler
                assert here.shares(3) == there.shares(3)
            else:
                with pytest.warns(UserWarning, match="views was 3 and is 1, so noise"):
                    load(again, path)


@pytest.mark.parametrize("wrap_model", [False, True])
def test_a_moving_average_follows_steps_and_not_parts_of_them(wrap_model):
    run = build(
        sample_rate=0.9, steps=4, lr=0.5, noise_multiplier=1.0, wrap_model=wrap_model,
        batch_size=SAMPLES,
    )  # fmt: skip
    averaged = AveragedModel(run.model, multi_avg_fn=get_ema_multi_avg_fn(0.75))
    run.engine.on_step(lambda _: averaged.update_parameters(run.model))
    expected = [p.detach().clone() for p in run.network.parameters()]
    whole = parts = 0
    with in_parts(run, 2 * V) as pieces:
        for x, y in pieces:
            parts += 1
            if step(run, x, y) is None:
                continue
            for old, p in zip(expected, run.network.parameters(), strict=True):
                old.copy_(p.detach() if not whole else 0.75 * old + 0.25 * p.detach())
            whole += 1
    assert parts > whole == averaged.n_averaged == 4
    assert type(averaged.module) is nn.Sequential
    for p, old in zip(averaged.parameters(), expected, strict=True):
        torch.testing.assert_close(p.detach(), old)
    x = torch.randn(2, 1, 6, 6, dtype=torch.float64)
    averaged(x).sum().backward()  # an ordinary network
