"""A forward or backward that carries what it saw into the next batch is refused by name."""

import copy
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dp_clipping.criterion import PrivateCriterion
from tests.dp_clipping.conftest import private, private_loss
from tests.support import zoo
from tests.support.backwards import with_backward
from tests.support.engine import on_any_batches, step
from tests.support.turns import in_turn

STEPS = 5


def nothing(*_: object) -> None:
    """Does nothing, where a case leaves a part out."""


class Network(nn.Module):
    """A linear layer, and what a case adds.

    Args:
        make: (network), when it is built.
        note: (network, input), in each forward.
        forward: (network, input) -> output, in the place of the layer.
        scales: has a parameter of its own, so the whole network is one layer.
    """

    def __init__(
        self, make: Callable = nothing, note: Callable = nothing,
        forward: Callable = lambda net, x: net.linear(x), *, scales: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.calls, self.linear = 0, nn.Linear(4, 3)
        self.note, self.run, self.scales = note, forward, scales
        if scales:
            self.scale = nn.Parameter(torch.ones(4))
        make(self)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = x * self.scale if self.scales else x
        self.note(self, x)
        return self.run(self, x)


def has(**values: object) -> Callable[[nn.Module], None]:
    """Makes attributes, copies of these for each network."""

    def make(net: nn.Module) -> None:
        for name, value in values.items():
            setattr(net, name, copy.deepcopy(value))

    return make


def buffer(name: str = "mean", size: int = 4, **options: bool) -> Callable[[nn.Module], None]:
    return lambda net: net.register_buffer(name, torch.zeros(size), **options)


def put(name: str, value: Callable[..., object]) -> Callable:
    """Sets an attribute to a function of the network, and in a forward of the input."""
    return lambda *given: setattr(given[0], name, value(*given))


def from_the_third(note: Callable) -> Callable:
    return lambda net, x: note(net, x) if net.calls > 2 else None


def in_the_third(note: Callable) -> Callable:
    return lambda net, x: note(net, x) if net.calls == 3 else None


def average(net: nn.Module, x: Tensor) -> Tensor:
    return 0.9 * net.mean + 0.1 * x.mean(0)


def initialise(net: nn.Module, x: Tensor) -> None:
    if not net.initialized:
        net.scale.data.copy_(1 / (x.std(0) + 1))
        net.initialized = True


def initialise_behind_a_buffer(net: nn.Module, x: Tensor) -> None:
    if not net.initialized:
        net.scale.data = 1 / (x.std(0) + 1)
        net.initialized.fill_(1)


def made_once(name: str, make: Callable) -> Callable:
    """Makes a member in the first forward, of its input."""
    return lambda net, x: None if hasattr(net, name) else make(net, x)


def hook_backward(net: nn.Module) -> None:
    net.mean = 0.0
    net.linear.register_full_backward_hook(
        lambda module, before, after: setattr(net, "mean", 0.9 * net.mean + after[0].mean())
    )


def hook_forward(net: nn.Module) -> None:
    net.linear.register_forward_hook(lambda module, args, output: setattr(
        module, "mean", 0.9 * getattr(module, "mean", 0) + 0.1 * output.detach().mean()
    ))  # fmt: skip


def list_a_module(net: nn.Module) -> None:
    part = nn.Module()
    buffer()(part)
    net.parts = {"0": part}


def add_the_last_batch(net: nn.Module, x: Tensor) -> Tensor:
    y = net.linear(x + net.seen)
    net.seen = x.mean(0)
    return y


def in_backward(note: Callable[[nn.Module, Tensor], object]) -> Callable:
    return lambda net, x: with_backward(net.linear(x), lambda gy: [note(net, gy), None][1])


NO_MEAN = has(mean=torch.zeros(4))
REFUSED = {  # the name that the refusal gives, and a network
    "initialised by the first batch": (
        "scale", lambda: Network(has(initialized=False), initialise, scales=True)),
    "initialised behind a buffer": (
        "scale", lambda: Network(buffer("initialized", 1, persistent=False),
                                 initialise_behind_a_buffer, scales=True)),
    "running mean in a frozen parameter": (
        "frozen", lambda: Network(
            has(frozen=nn.Parameter(torch.zeros(4), requires_grad=False)),
            lambda net, x: net.frozen.mul_(0.9).add_(x.detach().mean(0), alpha=0.1))),
    "shrinking": (
        "scale", lambda: Network(note=lambda net, x: net.scale.detach().mul_(0.9), scales=True)),
    "buffer of the first forward": (
        "mean", lambda: Network(note=made_once(
            "mean", lambda net, x: net.register_buffer("mean", x.mean(0))))),
    "buffer from the third on": (
        "mean", lambda: Network(
            buffer(), from_the_third(lambda net, x: net.mean.add_(x.mean(0))))),
    "buffer replaced from the third on": (
        "mean", lambda: Network(buffer(), from_the_third(put("mean", lambda _, x: x.mean(0))))),
    "non-persistent buffer": (
        "mean", lambda: Network(
            buffer(persistent=False), lambda net, x: net.mean.lerp_(x.mean(0), 0.1))),
    "parameter replaced": (
        "scale", lambda: Network(
            note=in_the_third(put("scale", lambda net, _: nn.Parameter(net.scale.detach() * 2))),
            scales=True)),
    "parameter of other memory": (
        "scale", lambda: Network(
            note=in_the_third(lambda net, _: setattr(net.scale, "data", net.scale.data * 2)),
            scales=True)),
    "parameter added": (
        "late", lambda: Network(
            note=in_the_third(put("late", lambda *_: nn.Parameter(torch.ones(3)))))),
    "module added": (
        "late", lambda: Network(
            note=made_once("late", put("late", lambda *_: nn.Linear(4, 4))))),
    "parameter removed": (
        "unused", lambda: Network(
            has(unused=nn.Parameter(torch.ones(3))),
            in_the_third(lambda net, _: delattr(net, "unused")))),
    "average in a tensor": ("mean", lambda: Network(NO_MEAN, put("mean", average))),
    "average in a tensor in place": (
        "mean", lambda: Network(
            NO_MEAN, lambda net, x: net.mean.data.mul_(0.9).add_(x.mean(0), alpha=0.1))),
    "average from the third on": (
        "mean", lambda: Network(NO_MEAN, from_the_third(put("mean", average)))),
    "average in a number": (
        "mean", lambda: Network(
            has(mean=0.0), put("mean", lambda net, x: 0.9 * net.mean + 0.1 * x.mean().item()))),
    "list": (
        "history", lambda: Network(
            has(history=[]), lambda net, x: net.history.append(x.mean().item()))),
    "list from the third on": (
        "history", lambda: Network(
            has(history=deque(maxlen=4)),
            from_the_third(lambda net, x: net.history.append(x.mean())))),
    "extreme": (
        "largest", lambda: Network(
            has(largest=0.0),
            put("largest", lambda net, x: max(net.largest, x.abs().max().item())))),
    "queue of features, as of a contrastive loss": (
        "queue", lambda: Network(
            has(queue=torch.zeros(3, 4)),
            lambda net, x: net.queue[net.calls % 3].copy_(x.mean(0)))),
    "hook of backward": ("mean", lambda: Network(hook_backward)),
    "object of its own": (
        r"tracker.values.mean", lambda: Network(
            has(tracker=SimpleNamespace(values={"mean": torch.zeros(4)})),
            lambda net, x: net.tracker.values.update(mean=net.tracker.values["mean"] + x.mean(0)))),
    "buffer of a module in a list": (
        "parts.0.mean", lambda: Network(
            list_a_module, lambda net, x: net.parts["0"].mean.add_(x.mean(0)))),
    "last batch, which each one sees": (
        "seen", lambda: Network(has(seen=torch.zeros(4)), forward=add_the_last_batch)),
    "hook of forward": ("linear.mean", lambda: Network(hook_forward)),
    "buffer in backward": (
        "mean", lambda: Network(
            buffer(size=3), forward=in_backward(lambda net, gy: net.mean.add_(gy.mean(0))))),
    "attribute in backward": (
        "mean", lambda: Network(
            has(mean=torch.zeros(3)), forward=in_backward(
                put("mean", lambda net, gy: net.mean + gy.mean(0) * net.linear.weight.sum())))),
}  # fmt: skip


def steps(
    network: nn.Module, count: int = STEPS, rows: int = 4, mode: str = "bookkeeping",
    longer: bool = False,
):  # fmt: skip
    """Trains on batches of 4 features, or of one more each time."""
    torch.manual_seed(0)
    model = private(network.train(), mode)
    for n in range(count):
        x = torch.randn(rows, 4 + n * longer)
        private_loss(model, (x, torch.randn(rows, 3)), zoo.product).backward()
        model.zero_grad()
    return model


@pytest.mark.parametrize("case", REFUSED)
def test_state_that_carries_data_is_refused_by_name(case):
    name, make = REFUSED[case]
    with pytest.raises(ValueError, match=rf"[ ,.]{name}[:\[,]"):
        steps(make())


ATTRIBUTES = ("initialized", "mean", "history", "seen", "largest", "queue", "calls")


@pytest.mark.parametrize("case", [case for case in REFUSED if "backward" not in case])
def test_a_refused_search_leaves_no_trace(case):
    """All that the first forward has changed is as it was before."""
    network = REFUSED[case][1]()
    before, attributes = copy.deepcopy(network.state_dict()), _attributes(network)
    owned = list(network.parameters())
    try:
        steps(network, 1)
    except ValueError:
        after = network.state_dict()
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert all(map(torch.equal, owned, network.parameters()))
        assert len(owned) == len(list(network.parameters()))
        assert attributes == _attributes(network)


def _attributes(network):
    values = {name: getattr(network, name) for name in ATTRIBUTES if hasattr(network, name)}
    return copy.deepcopy({n: v.tolist() if hasattr(v, "tolist") else v for n, v in values.items()})


def warm_up(net: nn.Module, x: Tensor) -> None:
    net.rate = min(1.0, net.rate + 0.25)
    net.rates.append(net.rate)


def with_table(table: Callable[[nn.Module, int], Tensor]) -> Callable:
    """Multiplies with a table that is as long as the batch's samples."""
    return lambda net, x: net.linear(x[:, :4] * table(net, x.shape[1])[:4])


def keep_table(net: nn.Module, length: int = 4) -> None:
    net.register_buffer("cached", torch.ones(length).cos(), persistent=False)


def longer(net: nn.Module, length: int) -> Tensor:
    """As rotary embeddings that are made longer, by Hugging Face's way."""
    if length > len(net.cached):
        keep_table(net, length)
    return net.cached


def of_known_length(net: nn.Module, length: int) -> Tensor:
    if getattr(net, "length", 0) < length:
        net.length = length
        keep_table(net, length)
    return net.cached


def looked_up(net: nn.Module, length: int) -> Tensor:
    return net.tables.setdefault(length, torch.ones(length).cos())


def log_outputs(net: nn.Module) -> None:
    log = []
    net.linear.register_forward_hook(lambda module, args, y: log.append(y.detach().mean()))


def make_a_constant_without_a_version(net: nn.Module) -> None:
    with torch.inference_mode():
        net.register_buffer("constant", torch.ones(4))


ACCEPTED = {
    "counter": lambda: Network(),
    "counter in a buffer": lambda: Network(
        lambda net: net.register_buffer("steps", torch.tensor(0), persistent=False),
        lambda net, x: net.steps.add_(1)),
    "warm-up, by a number and a list": lambda: Network(
        has(rate=0.0, rates=[]), warm_up, lambda net, x: net.linear(x) * net.rate),
    "table in a buffer": lambda: Network(
        keep_table, forward=with_table(longer)),
    "table made in the first forward": lambda: Network(forward=with_table(of_known_length)),
    "tables in a dictionary": lambda: Network(has(tables={}), forward=with_table(looked_up)),
    "features kept for a look": lambda: Network(
        note=put("features", lambda net, x: {"x": x, "mean": [x.mean(0)]})),
    "log of a hook": lambda: Network(log_outputs),
    "random, by torch's generator and its own": lambda: Network(
        put("generator", lambda *_: torch.Generator().manual_seed(0)),
        put("noise", lambda net, x: torch.randn(3) + torch.randn(3, generator=net.generator))),
    "weight norm": lambda: Network(
        put("linear", lambda net: nn.utils.parametrizations.weight_norm(net.linear))),
    "checkpointed": lambda: Network(
        forward=lambda net, x: checkpoint(net.linear, x, use_reentrant=False)),
    "inference": lambda: Network(
        make_a_constant_without_a_version,
        forward=lambda net, x: net.linear(x + net.constant.clone())),
}  # fmt: skip


@pytest.mark.parametrize(("case", "mode"), in_turn(ACCEPTED, ["bookkeeping", "ghost"]))
def test_state_that_carries_none_is_not(case, mode):
    steps(ACCEPTED[case](), mode=mode, longer="table" in case)


@pytest.mark.parametrize("rows", [1, 2])
def test_what_the_optimizer_and_the_user_change_between_steps_is_not(rows):
    network = Network(scales=True)
    model = steps(network, 2, rows)
    with torch.no_grad():
        network.scale.mul_(2)
    network.load_state_dict(copy.deepcopy(network.state_dict()))
    network.load_state_dict(copy.deepcopy(network.state_dict()), assign=False)
    network.note_to_self, network.calls = torch.ones(3), 0
    private_loss(model, (torch.randn(rows, 4), torch.randn(rows, 3)), zoo.product).backward()


def test_the_search_counts_no_call():
    network = Network()
    steps(network, 1)
    assert network.calls == 1


def test_a_forward_that_fails_in_the_search_leaves_no_trace():
    def fail(net, x):
        net.scale.data.zero_()
        raise RuntimeError("of the network's own")

    network = Network(note=fail, scales=True)
    with pytest.raises(ValueError, match="scale"):
        steps(network, 1)
    assert torch.equal(network.scale, torch.ones(4))
    assert network.calls == 0


class Centred(nn.Module):
    """A loss that keeps a centre of what it has seen."""

    reduction = "sum"

    def __init__(self, keep: str):
        super().__init__()
        self.keep, self.calls = keep, 0
        self.mean = torch.zeros(3)
        if keep == "buffer":
            del self.mean
            self.register_buffer("mean", torch.zeros(3))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        self.last = outputs.detach().mean(0)
        losses = (outputs - targets - self.mean).square().sum(1)
        if self.keep == "in place":
            self.mean.mul_(0.9).add_(self.last, alpha=0.1)
        elif self.keep != "nothing":
            self.mean = 0.9 * self.mean + 0.1 * self.last
        return losses


@pytest.mark.parametrize("keep", ["buffer", "attribute", "in place", "nothing"])
def test_a_criterion_that_carries_data_is_refused(keep):
    network = Network()
    model = private(network)
    criterion = PrivateCriterion(model, Centred(keep), "sum")

    def step() -> None:
        criterion(model(torch.randn(4, 4)), torch.randn(4, 3)).backward()
        model.zero_grad()

    if keep == "nothing":
        for _ in range(3):
            step()
        return
    with pytest.raises(ValueError, match=r"mean[,:]"):
        step()


RUNS: list[int] = []


class WritesInSomeRun(nn.Module):
    """Writes past version counters, in one run of a check."""

    def __init__(self, what: str, run: int):
        super().__init__()
        self.layer, self.what, self.run = nn.Linear(4, 3), what, run
        self.register_buffer("sums", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        RUNS.append(1)
        if len(RUNS) == self.run:
            tensor = self.sums if self.what == "sums" else self.layer.weight
            tensor.data.add_(x.detach().mean())
        return self.layer(x) + self.sums


@pytest.mark.parametrize("run", [4, 5, 7, 10, "later"])
@pytest.mark.parametrize("what", ["sums", "weight"])
def test_a_write_past_version_counters_is_found_in_any_run_of_a_check(what, run):
    RUNS.clear()
    network = WritesInSomeRun(what, -1)
    model = private(network)
    if run == "later":
        for _ in range(3):
            batch = torch.randn(4, 4), torch.randn(4, 3)
            private_loss(model, batch, zoo.squared_error).backward()
            model.zero_grad()
        run = len(RUNS) + 2
    network.run = run
    with pytest.raises(ValueError, match=what):
        model(torch.randn(4, 4))


class MeanOfParameters(nn.Module):
    """Predicts what a network gives whose parameters are a running mean of its own (BYOL)."""

    def __init__(self, is_in_forward: bool):
        super().__init__()
        self.own, self.mean = nn.Linear(4, 3), nn.Linear(4, 3).requires_grad_(False)
        self.is_in_forward = is_in_forward

    @torch.no_grad()
    def update(self) -> None:
        for mean, own in zip(self.mean.parameters(), self.own.parameters(), strict=True):
            mean.lerp_(own, 0.1)

    def forward(self, x: Tensor) -> Tensor:
        if self.is_in_forward:
            self.update()
        return self.own(x) - self.mean(-x)


def test_a_running_mean_of_parameters_is_updated_in_the_loop():
    with pytest.raises(ValueError, match=r"changes mean\.weight, .* in the loop, after optimizer"):
        private(MeanOfParameters(True))(torch.randn(4, 4))
    run = on_any_batches(
        module=MeanOfParameters(False), criterion=nn.CrossEntropyLoss(), noise_multiplier=0.0
    )
    for _ in range(3):
        step(run)
        before = run.model.network.mean.weight.clone()
        run.model.network.update()
        assert not torch.equal(before, run.model.network.mean.weight)
