"""A forward or backward that carries what it saw into the next batch is refused by name."""

import copy
from collections import deque

import pytest
import torch
from torch import Tensor, nn

from dp_clipping.criterion import PrivateCriterion
from tests.dp_clipping.conftest import private, private_loss
from tests.support import zoo
from tests.support.engine import on_any_batches, step
from tests.support.turns import in_turn

STEPS = 5


class Network(nn.Module):
    """A linear layer, and what a case adds."""

    def __init__(self):
        super().__init__()
        self.calls = 0
        self.linear = nn.Linear(4, 3)
        self.make()

    def make(self) -> None:
        """What a case adds."""

    def note(self, x: Tensor) -> None:
        """What a case does with an input."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.note(x)
        return self.linear(x)


class Scaled(Network):
    """Has a parameter of its own, so the whole network is one layer."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale)


REFUSED: dict[str, tuple[type, str]] = {}


def refused(name: str):
    """Registers a network under the name that a refusal gives."""
    return lambda kind: REFUSED.setdefault(kind.__name__, (kind, name))[0]


@refused("scale")
class InitialisedByTheFirstBatch(Scaled):
    def make(self):
        self.initialized = False

    def note(self, x):
        if not self.initialized:
            self.scale.data.copy_(1 / (x.std(0) + 1))
            self.initialized = True


@refused("scale")
class InitialisedBehindABuffer(Scaled):
    def make(self):
        self.register_buffer("initialized", torch.tensor(0), persistent=False)

    def note(self, x):
        if not self.initialized:
            self.scale.data = 1 / (x.std(0) + 1)
            self.initialized.fill_(1)


@refused("frozen")
class RunningMeanInAFrozenParameter(Network):
    def make(self):
        self.frozen = nn.Parameter(torch.zeros(4), requires_grad=False)

    def note(self, x):
        with torch.no_grad():
            self.frozen.mul_(0.9).add_(x.mean(0), alpha=0.1)


@refused("scale")
class Shrinking(Scaled):
    def note(self, x):
        with torch.no_grad():
            self.scale.mul_(0.9)


@refused("mean")
class BufferOfTheFirstForward(Network):
    def note(self, x):
        if not hasattr(self, "mean"):
            self.register_buffer("mean", x.mean(0))


@refused("mean")
class BufferFromTheThirdOn(Network):
    def make(self):
        self.register_buffer("mean", torch.zeros(4))

    def note(self, x):
        if self.calls > 2:
            self.mean += x.mean(0)


@refused("mean")
class BufferReplacedFromTheThirdOn(Network):
    def make(self):
        self.register_buffer("mean", torch.zeros(4))

    def note(self, x):
        if self.calls > 2:
            self.mean = x.mean(0)


@refused("mean")
class NonPersistentBuffer(Network):
    def make(self):
        self.register_buffer("mean", torch.zeros(4), persistent=False)

    def note(self, x):
        self.mean.lerp_(x.mean(0), 0.1)


@refused("scale")
class ParameterReplaced(Scaled):
    def note(self, x):
        if self.calls == 3:
            self.scale = nn.Parameter(self.scale.detach() * 2)


@refused("scale")
class ParameterOfOtherMemory(Scaled):
    def note(self, x):
        if self.calls == 3:
            self.scale.data = self.scale.data * 2


@refused("late")
class ParameterAdded(Network):
    def note(self, x):
        if self.calls == 3:
            self.late = nn.Parameter(torch.ones(3))


@refused("late")
class ModuleAdded(Network):
    def note(self, x):
        if not hasattr(self, "late"):
            self.late = nn.Linear(4, 4)


@refused("unused")
class ParameterRemoved(Network):
    def make(self):
        self.unused = nn.Parameter(torch.ones(3))

    def note(self, x):
        if self.calls == 3:
            del self.unused


@refused("mean")
class AverageInATensor(Network):
    def make(self):
        self.mean = torch.zeros(4)

    def note(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)


@refused("mean")
class AverageInATensorInPlace(Network):
    def make(self):
        self.mean = torch.zeros(4)

    def note(self, x):
        self.mean.data.mul_(0.9).add_(x.mean(0), alpha=0.1)


@refused("mean")
class AverageFromTheThirdOn(Network):
    def make(self):
        self.mean = torch.zeros(4)

    def note(self, x):
        if self.calls > 2:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)


@refused("mean")
class AverageInANumber(Network):
    def make(self):
        self.mean = 0.0

    def note(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.mean().item()


@refused("history")
class List(Network):
    def make(self):
        self.history = []

    def note(self, x):
        self.history.append(x.mean().item())


@refused("history")
class ListFromTheThirdOn(Network):
    def make(self):
        self.history = deque(maxlen=4)

    def note(self, x):
        if self.calls > 2:
            self.history.append(x.mean())


@refused("largest")
class Extreme(Network):
    def make(self):
        self.largest = 0.0

    def note(self, x):
        self.largest = max(self.largest, x.abs().max().item())


@refused("queue")
class Queue(Network):
    """The last features, as a contrastive loss keeps them."""

    def make(self):
        self.queue = torch.zeros(3, 4)

    def note(self, x):
        self.queue[self.calls % 3] = x.mean(0)


@refused("mean")
class BackwardHook(Network):
    def make(self):
        self.mean = 0.0
        self.linear.register_full_backward_hook(self.seen)

    def seen(self, module, before, after):
        self.mean = 0.9 * self.mean + after[0].mean()


class Tracker:
    def __init__(self):
        self.values = {"mean": torch.zeros(4)}


@refused("tracker.values.mean")
class ObjectOfItsOwn(Network):
    def make(self):
        self.tracker = Tracker()

    def note(self, x):
        self.tracker.values["mean"] = self.tracker.values["mean"] + x.mean(0)


@refused("parts.0.mean")
class BufferOfAModuleInAList(Network):
    def make(self):
        part = nn.Module()
        part.register_buffer("mean", torch.zeros(4))
        self.parts = {"0": part}

    def note(self, x):
        self.parts["0"].mean += x.mean(0)


@refused("seen")
class LastBatch(Network):
    """Each batch sees the one before."""

    def make(self):
        self.seen = torch.zeros(4)

    def forward(self, x):
        y = self.linear(x + self.seen)
        self.seen = x.mean(0)
        return y


@refused("linear.mean")
class ForwardHook(Network):
    def make(self):
        def note(module, args, output):
            module.mean = 0.9 * getattr(module, "mean", 0) + 0.1 * output.detach().mean()

        self.linear.register_forward_hook(note)


class Backward(torch.autograd.Function):
    """The identity; its backward calls a function."""

    @staticmethod
    def forward(ctx, x, function):
        ctx.function = function
        return x.clone()

    @staticmethod
    def backward(ctx, gy):
        ctx.function(gy)
        return gy, None


class InBackward(Network):
    def forward(self, x):
        return Backward.apply(self.linear(x), self.seen)


@refused("mean")
class BufferInBackward(InBackward):
    def make(self):
        self.register_buffer("mean", torch.zeros(3))

    def seen(self, gy):
        self.mean += gy.mean(0)


@refused("mean")
class AttributeInBackward(InBackward):
    def make(self):
        self.mean = torch.zeros(3)

    def seen(self, gy):
        self.mean = self.mean + gy.mean(0) * self.linear.weight.sum()


def steps(network: nn.Module, count: int = STEPS, rows: int = 4, mode: str = "bookkeeping"):
    torch.manual_seed(0)
    model = private(network.train(), mode)
    for n in range(count):
        x = torch.randn(rows, 4 + n if isinstance(network, Longer) else 4)
        private_loss(model, (x, torch.randn(rows, 3)), zoo.product).backward()
        model.zero_grad()
    return model


@pytest.mark.parametrize("case", REFUSED)
def test_state_that_carries_data_is_refused_by_name(case):
    kind, name = REFUSED[case]
    with pytest.raises(ValueError, match=rf"[ ,.]{name}[:\[,]"):
        steps(kind())


ATTRIBUTES = ("initialized", "mean", "history", "seen", "largest", "queue", "calls")


@pytest.mark.parametrize("case", [case for case in REFUSED if "Backward" not in case])
def test_a_refused_search_leaves_no_trace(case):
    """All that the first forward has changed is as it was before."""
    network = REFUSED[case][0]()
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


ACCEPTED: dict[str, type] = {}


def accepted(kind: type) -> type:
    return ACCEPTED.setdefault(kind.__name__, kind)


@accepted
class Counter(Network):
    """`calls` alone."""


@accepted
class CounterInABuffer(Network):
    def make(self):
        self.register_buffer("steps", torch.tensor(0), persistent=False)

    def note(self, x):
        self.steps += 1


@accepted
class WarmUp(Network):
    """A schedule by a count, kept as a number and as a tensor."""

    def make(self):
        self.rate, self.rates = 0.0, []

    def note(self, x):
        self.rate = min(1.0, self.rate + 0.25)
        self.rates.append(self.rate)

    def forward(self, x):
        return super().forward(x) * self.rate


class Longer(Network):
    """Batches that have another length each."""

    def forward(self, x):
        return super().forward(x[:, :4] * self.table(x.shape[1])[:4])


@accepted
class TableInABuffer(Longer):
    """As rotary embeddings that are made longer, by Hugging Face's way."""

    def make(self):
        self.register_buffer("cached", torch.ones(4).cos(), persistent=False)

    def table(self, length):
        if length > len(self.cached):
            self.register_buffer("cached", torch.ones(length).cos(), persistent=False)
        return self.cached


@accepted
class TableMadeInTheFirstForward(Longer):
    def table(self, length):
        if getattr(self, "length", 0) < length:
            self.length = length
            self.register_buffer("cached", torch.ones(length).cos(), persistent=False)
        return self.cached


@accepted
class TablesInADict(Longer):
    def make(self):
        self.tables = {}

    def table(self, length):
        if length not in self.tables:
            self.tables[length] = torch.ones(length).cos()
        return self.tables[length]


@accepted
class KeptForALook(Network):
    """Attention weights, losses, features: written by each forward, read by none."""

    def note(self, x):
        self.features = {"x": x, "mean": [x.mean(0)]}


@accepted
class LogOfAHook(Network):
    def make(self):
        log = []
        self.linear.register_forward_hook(lambda module, args, y: log.append(y.detach().mean()))


@accepted
class Random(Network):
    """By torch's generator, by one of its own, and by Python's."""

    def make(self):
        self.generator = torch.Generator().manual_seed(0)

    def note(self, x):
        self.noise = torch.randn(3) + torch.randn(3, generator=self.generator)


@accepted
class WeightNorm(Network):
    def make(self):
        self.linear = nn.utils.parametrizations.weight_norm(self.linear)


@accepted
class Checkpointed(Network):
    def forward(self, x):
        run = torch.utils.checkpoint.checkpoint
        return run(super().forward, x, use_reentrant=False)


@accepted
class Inference(Network):
    """A constant that has no version."""

    def make(self):
        with torch.inference_mode():
            self.register_buffer("constant", torch.ones(4))

    def forward(self, x):
        return super().forward(x + self.constant.clone())


@pytest.mark.parametrize(("case", "mode"), in_turn(ACCEPTED, ["bookkeeping", "ghost"]))
def test_state_that_carries_none_is_not(case, mode):
    steps(ACCEPTED[case](), mode=mode)


@pytest.mark.parametrize("rows", [1, 2])
def test_what_the_optimizer_and_the_user_change_between_steps_is_not(rows):
    network = Scaled()
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
    class Failing(Scaled):
        def note(self, x):
            self.scale.data.zero_()
            raise RuntimeError("of the network's own")

    network = Failing()
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
