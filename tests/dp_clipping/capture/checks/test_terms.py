"""What a loss is made of is seen in its graph, and each message's way out trains."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from dp_clipping.capture.checks.terms import leaves_of, penalized
from dp_clipping.criterion import PrivateCriterion
from tests.dp_clipping.conftest import private
from tests.support.engine import build, fixed, in_parts

AFTER_NOISE = r"optimizer\.pre_step\(\); for p, g in zip\(parameters, torch\.autograd\.grad\("
FREEZE = r"call model\.requires_grad_\(False\) before the forward for it"


def test_leaves_are_those_of_the_graph():
    one, other = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    assert leaves_of((one * other.detach()).sum()) == {one}
    assert leaves_of(one) == {one}
    assert leaves_of(one.detach()) == set()


def test_a_penalty_is_a_term_of_one_number():
    x, weight = torch.ones(3, 2, requires_grad=True), torch.ones(2, requires_grad=True)
    assert penalized((x @ weight) + weight.square().sum(), [weight]) == {weight}
    assert penalized((x * weight).sum(1) * weight.mean(), [weight]) == set()
    assert penalized((x * weight).sum(1) + 1, [weight]) == set()


def test_a_network_in_front_keeps_its_graph():
    """Checks go down to the network's inputs, and not through what has made them."""
    model = private(nn.Linear(5, 3), "bookkeeping")
    criterion = PrivateCriterion(model, nn.CrossEntropyLoss(), "mean")
    x = torch.randn(4, 5, requires_grad=True)
    made = nn.Linear(5, 5)(x).exp()
    criterion(model(made), torch.tensor([0, 1, 2, 0])).backward()
    assert all(p.grad is not None for p in model.parameters())
    assert torch.autograd.grad(made.sum(), x)[0].shape == x.shape


def make(criterion):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 1))
    start = [p.detach().clone() + 1 for p in network.parameters()]
    run = build(
        module=network, criterion=criterion(network, start), max_grad_norm=1.0, batch_size=8,
        dataset=TensorDataset(torch.randn(24, 5), torch.ones(24, 1)), noise_generator=fixed(0),
    )  # fmt: skip
    run.start = start
    return run


PENALTIES = {
    "FedProx": lambda network, start: sum(
        (p - q).square().sum() for p, q in zip(network.parameters(), start, strict=True)
    ),
    "L2": lambda network, _: 0.1 * sum(p.norm() for p in network.parameters()),
    "elastic net": lambda network, _: sum(
        p.abs().mean() + p.square().mean() for p in network.parameters()
    ),
    "one layer": lambda network, _: network[0].weight.square().sum(),
    "orthogonal": lambda network, _: (
        (network[0].weight.T @ network[0].weight - torch.eye(5)).square().sum()
    ),
}


def plain(network, start):
    return nn.BCEWithLogitsLoss()


@pytest.mark.parametrize("term", PENALTIES.values(), ids=PENALTIES)
def test_a_penalty_on_the_weights_comes_after_the_noise(term):
    def inside(network, start):
        return lambda out, y: (out - y).square().mean(1) + term(network, start)

    for criterion, added in ((plain, True), (inside, False)):
        run = make(criterion)
        x, y = next(batch for batch in run.loader if len(batch[0]) > 1)
        loss, penalty = run.criterion(run.model(x), y), term(run.network, run.start)
        with pytest.raises((RuntimeError, ValueError), match=AFTER_NOISE):
            (loss + penalty if added else loss).backward()

    run = make(plain)
    parameters = [p for p in run.network.parameters() if p.dim() == 2][:1]
    for x, y in run.loader:
        penalty = term(run.network, run.start)
        run.criterion(run.model(x), y).backward()
        run.optimizer.pre_step()
        noisy = parameters[0].grad.clone()
        for p, g in zip(parameters, torch.autograd.grad(penalty, parameters), strict=True):
            p.grad += g
        assert not torch.equal(parameters[0].grad, noisy)
        run.optimizer.step()
        run.optimizer.zero_grad()


def test_a_weight_that_the_loss_multiplies_with_is_no_penalty():
    run = make(lambda network, _: lambda out, y: out.flatten() * network[2].bias.exp())
    x, y = next(batch for batch in run.loader if len(batch[0]) > 1)
    with pytest.raises(RuntimeError, match="used outside of the module that owns it"):
        run.criterion(run.model(x), y).backward()


ordinary = functional.binary_cross_entropy_with_logits


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("is_private", [True, False])
def test_a_generator_is_trained_through_the_frozen_network(mode, is_private):
    run, maker = make(plain), nn.Linear(3, 5)
    criterion = run.criterion if is_private else ordinary
    if is_private or mode == "train":
        x, y = next(iter(run.loader))
        run.criterion(run.model(x), y).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        getattr(run.model, mode)()
        with pytest.raises(RuntimeError, match=FREEZE):
            criterion(run.model(maker(torch.randn(4, 3))), torch.ones(4, 1)).backward()
    run, maker = make(plain), nn.Linear(3, 5)
    for x, y in run.loader:
        run.criterion(run.model(x), y).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.model.requires_grad_(False)
        getattr(run.model, mode)()
        maker.zero_grad()
        ordinary(run.model(maker(torch.randn(4, 3))), torch.ones(4, 1)).backward()
        assert maker.weight.grad.abs().sum() > 0
        run.model.requires_grad_(True)
        run.model.train()


@pytest.mark.parametrize("way", ["freeze", "zero_grad"])
def test_a_generator_is_trained_between_parts_of_a_batch(way):
    """What the private network's step applies is the same with a generator's step in between."""
    applied = []
    for trains in (False, True):
        run, maker = make(plain), nn.Linear(3, 5)
        run.optimizer.noise_multiplier = 0.0
        torch.manual_seed(1)
        with in_parts(run, 3) as parts:
            for part, (x, y) in enumerate(parts):
                run.criterion(run.model(x), y).backward()
                run.optimizer.step()
                run.optimizer.zero_grad()
                if part == 2:
                    break
                if not trains:
                    continue
                run.model.eval().requires_grad_(way != "freeze")
                ordinary(run.model(maker(torch.randn(4, 3))), torch.ones(4, 1)).backward()
                run.model.train().requires_grad_(True)
                if way == "zero_grad":
                    run.optimizer.zero_grad()  # which keeps the sums of the parts so far
                    with pytest.raises(RuntimeError, match=r"unclipped: between parts .* freeze"):
                        run.model(x)
                    return
        applied.append([p.detach().clone() for p in run.network.parameters()])
    assert all(map(torch.equal, *applied))
