"""The sharded optimizer is the plain one: same steps, same checkpoint, on any number of ranks."""

import copy

import pytest
import torch
from torch import nn, optim

from ddp.sharded.optimizer import ELEMENTWISE
from ddp_by_hand.lm.rank_pool import Context
from tests.support.beside import (
    Beside,
    Chain,
    chain_loss,
    make_optimizer,
    wrapped,
)
from tests.support.on_ranks import on_ranks

NAME = "zero1"


def in_groups(model: nn.Module) -> list[dict]:
    weights = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": weights, "weight_decay": 0.3}, {"params": others, "lr": 0.02}]


def pair_with_optimizers(context: Context, cls=torch.optim.AdamW, **options):
    torch.manual_seed(0)
    pair = Beside(context, NAME)
    ours = pair.model.make_optimizer(cls, params=in_groups(pair.model), **options)
    return pair, ours, cls(in_groups(pair.reference), **options)


def train(pair: Beside, optimizers, steps: range) -> None:
    for step in steps:
        pair.train(optimizers, chain_loss(step))


def saved(context: Context) -> tuple[dict, dict]:
    """A whole state equals the plain optimizer's; both with groups and a schedule."""
    pair, ours, plain = pair_with_optimizers(context, lr=0.01)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (ours, plain)]
    for step in range(3):
        train(pair, (ours, plain), range(step, step + 1))
        for scheduler in schedulers:
            scheduler.step()
    state, expected = ours.state_dict(), plain.state_dict()
    assert state["param_groups"] == expected["param_groups"]
    assert state["state"].keys() == expected["state"].keys()
    for number, values in expected["state"].items():
        assert state["state"][number].keys() == values.keys()
        for key, value in values.items():
            torch.testing.assert_close(state["state"][number][key], value)
    held = sum(v.numel() for values in ours.state.values() for v in values.values() if v.dim())
    numel = sum(p.numel() for p in pair.model.parameters())
    assert held < 2 * numel / context.world_size + 8 * len(pair.model.units)
    copy.deepcopy(plain).load_state_dict(state)
    return pair.model.state_dict(), state


def resumed(context: Context, model_state: dict, state: dict) -> None:
    """On another number of ranks, and what is loaded is not written to later."""
    pair, ours, plain = pair_with_optimizers(context, lr=0.5)
    pair.model.load_state_dict(model_state)
    pair.reference.load_state_dict(pair.model.module.state_dict())
    before = copy.deepcopy(state)
    plain.load_state_dict(copy.deepcopy(state))
    ours.load_state_dict(state)
    train(pair, (ours, plain), range(10, 13))
    for number, values in before["state"].items():
        for key, value in values.items():
            assert torch.equal(value, state["state"][number][key])


def test_a_checkpoint_moves_between_numbers_of_ranks(cpu_ranks):
    model_state, state = cpu_ranks.run(3, saved)[0]
    for world_size in (1, 2, 4):
        cpu_ranks.run(world_size, resumed, model_state, state)


@on_ranks(2)
def test_a_loaded_state_is_of_the_slices_dtype(context: Context) -> None:
    """The state keeps the dtype of the slices where the network computes in another one."""
    model = wrapped(context, "fsdp", param_dtype=torch.bfloat16)
    optimizer = model.make_optimizer(torch.optim.AdamW, fused=True)
    for step in range(2):
        chain_loss(step)(model, context.rank).backward()
        model.finish_gradient_synchronization()
        optimizer.step()
        state = optimizer.state_dict()
        optimizer.load_state_dict(state)
        for number, values in optimizer.state_dict()["state"].items():
            for key, value in values.items():
                assert value.dtype == torch.float32
                assert torch.equal(value, state["state"][number][key])


@on_ranks(2)
def test_other_elementwise_optimizers(context: Context) -> None:
    for cls, options in (
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        (torch.optim.NAdam, {"lr": 0.01}),
        (torch.optim.Adagrad, {"lr": torch.tensor(0.01)}),
    ):
        pair, ours, plain = pair_with_optimizers(context, cls, **options)
        train(pair, (ours, plain), range(2))
        ours.load_state_dict(ours.state_dict())
        train(pair, (ours, plain), range(2, 4))


class Signs(torch.optim.Optimizer):
    """Steps by the sign of each element's gradient."""

    treats_elements_alone = True

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.calls += 1
        for group in self.param_groups:
            group["count"] = self.calls
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad.sign(), alpha=group["lr"])


@on_ranks(2)
def test_what_a_step_notes_in_a_group_stays(context: Context) -> None:
    """It is saved, and counts once for all slices; names of parameters stay too."""
    pair = Beside(context, NAME)
    ours = pair.model.make_optimizer(Signs, params=pair.model.module.named_parameters())
    plain = Signs(pair.reference.named_parameters())
    train(pair, (ours, plain), range(2))
    ours.load_state_dict(ours.state_dict())
    train(pair, (ours, plain), range(2, 3))
    assert ours.state_dict()["param_groups"] == plain.state_dict()["param_groups"]


class Own(torch.optim.SGD):
    """Steps as SGD does, and does not say that it treats elements alone."""


@on_ranks(1)
def test_only_optimizers_that_treat_elements_alone_are_accepted(context: Context) -> None:
    model = wrapped(context, NAME, nn.Linear(3, 2))
    for cls in (*ELEMENTWISE, Signs):
        model.make_optimizer(cls)
    for cls in (optim.Muon, optim.LBFGS, optim.Adafactor, optim.SparseAdam, Own):
        said = (
            rf"^{cls.__name__} may look at whole tensors.*{cls.__name__}\.treats_elements.*\"ddp_b"
        )
        with pytest.raises(TypeError, match=said):
            model.make_optimizer(cls)


@on_ranks(2)
def test_refusals(context: Context) -> None:
    model = wrapped(context, NAME)
    with pytest.raises(ValueError, match=r"does not train parameters of shapes \[\[3\]\]"):
        model.make_optimizer(torch.optim.SGD, params=[nn.Parameter(torch.ones(3))])
    with pytest.raises(ValueError, match="Invalid learning rate"):
        model.make_optimizer(torch.optim.Adam, lr=-1.0)
    optimizer = model.make_optimizer(torch.optim.Adam)
    with pytest.raises(RuntimeError, match=r"params=\[\.\.\.\]"):
        optimizer.add_param_group({"params": []})
    with pytest.raises(TypeError, match=r"another one by make_optimizer\(\)"):
        copy.deepcopy(optimizer)
    before = [p.detach().clone() for p in model.parameters()]
    chain_loss(0)(model, context.rank).backward()
    with pytest.raises(RuntimeError, match=r"this rank's alone: call finish_gradient_sync"):
        optimizer.step()
    model.finish_gradient_synchronization()
    with pytest.raises(RuntimeError, match=r"step by model\.make_optimizer\(cls"):
        torch.optim.Adam(model.parameters()).step()
    for p, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, value)
    with pytest.raises(ValueError, match="parameter group"):
        optimizer.load_state_dict(torch.optim.Adam(nn.Linear(5, 5).parameters()).state_dict())
    assert not optimizer.state


@pytest.mark.parametrize("name", [NAME, "fsdp"])
@on_ranks(2)
def test_frozen_parameters_are_given_too(context: Context, name: str) -> None:
    """Gives those of `network.parameters()`, which a state numbers like the plain optimizer's."""
    network = Chain()
    network.layers[1].requires_grad_(False)
    pair = Beside(context, name, network)
    ours, plain = (
        make_optimizer(module, torch.optim.AdamW, params=list(module.parameters()), lr=0.01)
        for module in (pair.model, pair.reference)
    )
    train(pair, (ours, plain), range(2))
    state, expected = ours.state_dict(), plain.state_dict()
    assert state["param_groups"] == expected["param_groups"]
    assert state["state"].keys() == expected["state"].keys()
    ours.load_state_dict(expected)
    train(pair, (ours, plain), range(2, 4))
    frozen = list(pair.model.module.layers[1].parameters())
    with pytest.raises(ValueError, match="does not train parameters of shapes"):
        pair.model.make_optimizer(torch.optim.SGD, params=frozen)


@pytest.mark.parametrize("name", [NAME, "fsdp"])
@on_ranks(2)
def test_states_of_other_networks_are_refused(context: Context, name: str) -> None:
    """Loads a state that fits; one of no parameter is refused by name before anything changes."""
    model = wrapped(context, name)
    groups = in_groups(model)
    groups[0]["amsgrad"] = True  # so that a value exists which the defaults do not tell of
    optimizer = model.make_optimizer(torch.optim.Adam, params=groups, lr=0.1)
    chain_loss(0)(model, context.rank).backward()
    model.finish_gradient_synchronization()
    optimizer.step()
    good = optimizer.state_dict()
    for key, value, message in (
        ("exp_avg", torch.ones(6), r"exp_avg is \[6\] for a parameter \[6, 6\]"),
        (
            "max_exp_avg_sq",
            torch.ones(6, 1),
            r"max_exp_avg_sq is \[6, 1\] for a parameter \[6, 6\]",
        ),
        ("step", torch.ones(6, 6), r"step is \[6, 6\] for a parameter \[6, 6\].*weight"),
    ):
        bad = copy.deepcopy(good)
        bad["state"][0][key] = value
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(bad)
    bad = copy.deepcopy(good)
    bad["state"] |= {17: bad["state"][0], "x": {}}
    with pytest.raises(ValueError, match=r"parameters \[17, 'x'\], which are in none"):
        optimizer.load_state_dict(bad)
    for number, values in optimizer.state_dict()["state"].items():
        torch.testing.assert_close(values, good["state"][number])
    other = copy.deepcopy(good)
    numbers = [n for group in other["param_groups"] for n in group["params"]]
    for group in other["param_groups"]:
        group["params"] = [n + 5 for n in group["params"]]
    other["state"] = {n + 5: other["state"][n] for n in reversed(numbers)}
    other["state"][5]["step"] = float(other["state"][5]["step"])  # as of early versions of torch
    optimizer.load_state_dict(other)
    for number, values in optimizer.state_dict()["state"].items():
        torch.testing.assert_close(values, good["state"][number], check_dtype=False)


class WithNothing(nn.Module):
    """Two of its parameters have no element, one of them the last of its dtype."""

    def __init__(self):
        super().__init__()
        self.none = nn.Parameter(torch.empty(0, 3))
        self.weight = nn.Parameter(torch.ones(8))
        self.last = nn.Parameter(torch.empty(0))

    def forward(self, x):
        return (self.weight * x).sum() + self.none.sum() + self.last.sum()


@pytest.mark.parametrize("name", [NAME, "fsdp"])
@on_ranks(2)
def test_a_parameter_without_elements_has_a_state(context: Context, name: str) -> None:
    pair = Beside(context, name, WithNothing())
    ours = pair.model.make_optimizer(torch.optim.Adam, lr=0.1)
    plain = torch.optim.Adam(pair.reference.parameters(), lr=0.1)
    for step in range(3):
        x = [torch.randn(8, generator=torch.Generator().manual_seed(9 * step + r)) for r in (0, 1)]
        pair.backward(lambda model, rank, x=x: model(x[rank]))
        pair.finish()
        for optimizer in (ours, plain):
            optimizer.step()
            optimizer.zero_grad(set_to_none=step == 0)
        state, expected = ours.state_dict()["state"], plain.state_dict()["state"]
        assert set(state) == set(expected) == {0, 1, 2}
        for number, values in expected.items():
            torch.testing.assert_close(state[number], values)
        ours.load_state_dict(plain.state_dict() if step else ours.state_dict())
