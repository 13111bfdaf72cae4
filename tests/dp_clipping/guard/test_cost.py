"""What checks cost: forwards and backwards of the network, Python calls, and whose graph lives."""

import weakref

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.data import DataLoader, TensorDataset

from dp_clipping import PrivacyEngine
from dp_clipping.guard import losses
from dp_clipping.guard.guard import LayoutDiscovery
from tests.support import host_cost

ROWS, CHECKED = 8, (1, 2, 4, 8)


class Kept:
    """A tensor that autograd keeps for a backward."""

    def __init__(self, x: torch.Tensor):
        self.x = x


class Counted(nn.Module):
    """A network of 12 layers that counts what of it runs, and what graphs live meanwhile."""

    def __init__(self):
        super().__init__()
        self.network, self.tokens = host_cost.transformer(12)

    def forward(self, x):
        runs.append(["forward", len(x) / ROWS, living()])
        with saved_tensors_hooks(keep, lambda kept: kept.x):
            y = self.network(x)
        if y.requires_grad:
            y.register_hook(lambda _: runs.append(["backward", len(x) / ROWS, 0]))
        return y


runs: list[list] = []
kept: list[weakref.ref] = []


def keep(x):
    found = Kept(x.detach())
    kept.append(weakref.ref(found))
    return found


def living() -> int:
    kept[:] = [ref for ref in kept if ref() is not None]
    return len(kept)


@pytest.fixture
def step():
    runs.clear()
    kept.clear()
    torch.manual_seed(0)
    network = Counted()
    x, y = torch.randint(50, (ROWS, 16)), torch.randint(3, (ROWS,))

    def of_each(outputs, targets):
        runs.append(["criterion", len(outputs) / ROWS, living()])
        return nn.functional.cross_entropy(outputs, targets, reduction="none")

    model, optimizer, criterion, _ = PrivacyEngine(accountant="rdp").make_private(
        module=network, optimizer=torch.optim.AdamW(network.parameters()), criterion=of_each,
        data_loader=DataLoader(TensorDataset(x, y), batch_size=ROWS), noise_multiplier=1.0,
        max_grad_norm=1.0, poisson_sampling=False,
    )  # fmt: skip

    def one():
        runs.clear()
        criterion(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return one


def price() -> float:
    """Returns ordinary steps: a backward without gradients of weights is as long as a forward."""
    return sum(share / 3 for what, share, _ in runs if what != "criterion")


def test_the_first_check_costs_at_most_ten_steps_and_a_later_one_two(step):
    for number in range(1, 9):
        step()
        checks = price() - 2 / 3  # of the step itself
        forwards = sum(what == "forward" for what, *_ in runs) - 1
        if number not in CHECKED:
            assert forwards == 0
        elif number == 1:
            assert forwards <= 10  # host time, however few the samples
            assert checks <= 10
        else:
            assert forwards <= 2
            assert checks <= 2


def test_no_run_of_a_check_begins_while_another_graph_lives(step):
    for _ in range(2):
        step()
        own = [what for what, *_ in runs].index("criterion")
        assert runs[own][2] > 0  # the step's own call, of its outputs
        assert len(runs) > own + 2  # the criterion is called again, and is so after the backward
        assert all(alive == 0 for n, (_, _, alive) in enumerate(runs) if n != own)


@pytest.mark.parametrize(("small", "most"), [(0, 0.75), (losses.SMALL, 1 + 1 / ROWS)])
def test_no_run_of_a_check_has_more_samples_than_fit_beside_the_step(
    step, monkeypatch, small, most
):
    """Bounds runs of the network by a batch, and of losses, beside its outputs, by 3/4 of one.

    Of small arguments they are of the batch and one sample more, and half as many.
    """
    monkeypatch.setattr(losses, "SMALL", small)
    for number in range(1, 9):
        step()
        shares = {"forward": [], "backward": [], "criterion": []}
        for what, share, _ in runs:
            shares[what].append(share)
        assert max(shares["forward"] + shares["backward"]) <= 1
        own, *checks = shares["criterion"]
        assert own == 1
        assert max(checks, default=0) <= most
        assert bool(checks) == (number in CHECKED)
        if number in CHECKED[1:]:
            assert len(checks) == (3 if small else 6)


def test_python_calls_of_checks(step, monkeypatch):
    """Beside 2,400 in an ordinary step of this network."""
    counts = []

    def counted(function):
        def call(*args):
            found = []
            counts.append(host_cost.calls_of(lambda: found.append(function(*args)))[0])
            return found[0]

        return call

    monkeypatch.setattr(LayoutDiscovery, "ensure", counted(LayoutDiscovery.ensure))
    for _ in range(3):
        step()
    first, second = counts  # nothing is due in the third one
    assert first < 155_000
    assert second < 20_700
