"""Networks and losses in which samples see each other are refused, and no others are."""

import functools
import itertools
import random
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from dp_clipping.capture.checks.summaries import summary
from dp_clipping.capture.samples.batch import tensors_of
from dp_clipping.criterion import PrivateCriterion
from dp_clipping.layers.batch_layout import Layout
from dp_clipping.sampling.usage import Ticket
from dp_clipping.trials.tolerances import WHOLE
from tests.dp_clipping.conftest import Unseen, assert_exact, private
from tests.support import zoo
from tests.support.backwards import with_backward
from tests.support.on_ranks import on_ranks
from tests.support.turns import in_turn


class Function(nn.Module):
    """`function(net, x)` with two linear layers and a norm."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.first, self.second, self.norm = nn.Linear(5, 5), nn.Linear(5, 3), nn.LayerNorm(5)
        self.drop, self.draws = nn.Dropout(0.5), torch.Generator()

    def forward(self, x):
        return self.function(self, x)


@dataclass
class Outputs:
    logits: Tensor
    count: int = 0


def attention(net, x):
    """Causal, over the batch."""
    h = net.first(x)
    mask = torch.full((len(x), len(x)), -1e9).triu(1)
    return net.second((h @ h.t() + mask).softmax(-1) @ h)


def hooked(net, x):
    h = net.first(x) * 1
    if h.requires_grad:
        h.register_hook(lambda gradient: gradient / gradient.norm())
    return net.second(h)


def hooked_output(net, x):
    """The hook is on the very tensor that the layer returned."""
    h = net.first(x)
    if h.requires_grad:
        h.register_hook(lambda gradient: gradient / gradient.norm())
    return net.second(h)


def zero_head(net, x):
    """Forward is the same whatever the batch: its head is zero from the start."""
    y = net.second(net.first(x))
    return y - y.mean(0)


def recurrent(net, x):
    """batch_first forgotten."""
    memory = nn.functional.scaled_dot_product_attention
    x = x[:, None].transpose(0, 1)
    return net.second(memory(x, x, x, is_causal=True)[0])


def over(function):
    """The function of the network's output, in which all tokens are mixed with their like."""

    def forward(net, x):
        y = net.second(net.first(x[:, None] * torch.arange(1, 4)[:, None]))
        return function(y - y.mean(0))

    return forward


def by_number(net, x):
    """Only the gradients are divided by it."""
    h = net.first(x)
    return net.second(h / len(h) + (h - h / len(h)).detach())


def with_dropout(net, x):
    return net.second(net.drop(net.first(x)) / len(x))


def dropped_out_of_more(net, x):
    """A function drops out where a check has one sample more than the batch's."""
    h = net.first(x)
    return net.second((nn.functional.dropout(h) if len(x) in (4, 9) else h) / len(x))


MIXING = {
    "their number": (lambda net, x: net.second(net.first(x)) / len(x), "end of"),
    "their number, by root": (lambda net, x: net.second(net.first(x) * len(x) ** 0.5), "second"),
    "gradients by their number": (by_number, "first"),
    "their number, after dropout": (with_dropout, "second"),
    "their number, after dropout of more": (dropped_out_of_more, "second"),
    "their places": (
        lambda net, x: net.second(net.first(x) * torch.arange(len(x))[:, None]),
        "second",
    ),
    "centred inputs": (lambda net, x: net.second(net.first(x - x.mean(0))), "first"),
    "the last one": (lambda net, x: net.second(torch.cat([net.first(x)[:-1], -x[-1:]])), "second"),
    "a softmax over the batch": (lambda net, x: net.second(net.first(x).softmax(0)), "second"),
    "the batch's largest": (lambda net, x: net.second(net.first(x) / x.amax()), "second"),
    "the last line": (lambda net, x: net.second(net.first(x)).cumsum(0).flip(0), "end of"),
    "before a norm": (lambda net, x: net.second(net.norm(x - x.mean(0))), "norm"),
    "causal attention": (attention, "second"),
    "another": (recurrent, "second"),
    "a cumulative sum": (lambda net, x: net.second(net.first(x).cumsum(0)), "second"),
    "extremes": (lambda net, x: net.second(net.first(x) - net.first(x).amax(0)), "(first|second)"),
    "an extreme that is rare": (
        lambda net, x: net.second(net.first(x) / net.first(x).abs().amax().clamp(min=100)),
        "second",
    ),
    "the sample before": (lambda net, x: net.second(net.first(x + 0.1 * x.roll(1, 0))), "first"),
    "the last sees the first": (
        lambda net, x: net.second(net.first(torch.cat([x[:-1], x[-1:] + x[:1]]))),
        "first",
    ),
    "no gradient": (lambda net, x: net.second(net.first(x) / x.std().detach()), "second"),
    "a zero head": (zero_head, "second"),
    "a hook": (hooked, "first"),
    "a hook on an output": (hooked_output, "first"),
    "backward": (
        lambda net, x: net.second(with_backward(net.first(x), lambda gy: gy / gy.norm())),
        "first",
    ),
    "a dataclass": (over(Outputs), "end of"),
    "a list in a dictionary": (over(lambda y: {"count": 1, "logits": [y]}), "end of"),
    "flattened": (over(lambda y: y.flatten(0, 1)), "end of"),
    "flattened by tokens": (over(lambda y: y.transpose(0, 1).flatten(0, 1)), "end of"),
    "tokens first": (over(lambda y: y.transpose(0, 1)), "end of"),
    "in training only": (
        lambda net, x: net.second(net.first(x - x.mean(0) if net.training else x)),
        "first",
    ),
}


@pytest.mark.parametrize(("name", "size"), in_turn(MIXING, (2, 3, 4, 9)))
def test_a_network_that_mixes_samples_is_refused(name, size):
    function, layer = MIXING[name]
    network = zoo.seeded(lambda: Function(function))
    if function is zero_head:
        for parameter in network.second.parameters():
            nn.init.zeros_(parameter)
    model = private(network)
    torch.manual_seed(size)
    pattern = rf"what .*{layer}.* sees of a sample depends on the other samples|"
    pattern += rf"gradient that {layer} is given for a sample depends on the other samples"
    with pytest.raises(ValueError, match=pattern):
        model(torch.randn(size, 5))
    assert model.network.training


@pytest.mark.parametrize("name", ["a norm", "a table"])
def test_one_percent_of_mixing_is_refused_under_autocast(name):
    """Mixes float32 numbers, which autocast leaves alone."""
    table = zoo.Net(
        lambda net, x: net.head((h := net.words(x).mean(1)) + 0.01 * h.mean(0)),
        words=nn.Embedding(9, 5), head=nn.Linear(5, 3),
    )  # fmt: skip
    norm = Function(lambda net, x: net.second((h := net.norm(x)) + 0.01 * h.mean(0)))
    model = private(norm if name == "a norm" else table)
    x = torch.randn(12, 5) if name == "a norm" else torch.randint(9, (12, 4))
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(ValueError, match="depends on the other samples"),
    ):
        model(x)


def test_a_network_that_fails_in_other_company_is_refused():
    """Fails here where a sample is there twice: an error tells of the other samples too."""

    def function(net, x):
        if len(x.unique(dim=0)) < len(x):
            raise ArithmeticError("of copies")
        return net.second(net.first(x))

    with pytest.raises(ValueError, match=r"not on some of the rows in it.*of copies"):
        private(zoo.seeded(lambda: Function(function)))(torch.randn(4, 5))


def test_dropout_and_a_bad_sample_are_no_mixing():
    net = Function(
        lambda net, x: net.second(nn.functional.dropout(net.first(x), 0.5, net.training))
    )
    x = torch.randn(4, 5)
    x[1] = torch.nan
    model = private(zoo.seeded(lambda: net))
    assert model(x).shape == (4, 3)
    assert model.network.training
    assert all(module.training for module in net.modules())


def step(model, batch, targets=None):
    """A private step without an optimizer."""
    criterion = PrivateCriterion(model, zoo.Criterion(zoo.squared_error), "mean")
    outputs = model(batch)
    criterion(outputs, outputs.detach() * 0 if targets is None else targets).backward()
    model.zero_grad()


@pytest.mark.parametrize("first", [0, 1, 2])
def test_a_first_batch_of_few_samples_settles_nothing(first):
    """Nor does one that has the same sample again and again."""
    model = private(zoo.seeded(lambda: Function(lambda net, x: net.second(net.first(x)))))
    batch = torch.randn(max(first, 1), 5).repeat(1 if first else 4, 1)
    for _ in range(4):
        step(model, batch)
    model.network.function = lambda net, x: net.second(net.first(x - x.mean(0)))
    with pytest.raises(ValueError, match="what first sees of a sample depends on the other"):
        step(model, torch.randn(3, 5))


@pytest.mark.parametrize("begins", [2, 3, 5])
def test_mixing_that_begins_later_is_found_in_batches_1_2_4_8(begins):
    """As by a counter of forwards; the search does not count."""

    def function(net, x):
        net.calls = getattr(net, "calls", 0) + 1
        return net.second(net.first(x - x.mean(0) if net.calls >= begins else x))

    model = private(zoo.seeded(lambda: Function(function)))
    found = 1 << (begins - 1).bit_length()
    for _ in range(found - 1):
        step(model, torch.randn(4, 5))
    assert model.network.calls == found - 1
    with pytest.raises(ValueError, match="what first sees of a sample depends on the other"):
        step(model, torch.randn(4, 5))


def centred_beyond(size):
    return lambda net, x: net.second(net.first(x - x.mean(0) if len(x) > size else x))


@pytest.mark.parametrize(
    ("size", "before", "refused"),
    [(1, [1], 3), (7, [4] * 4, 8)],  # one sample alone has no company to change
    ids=["a second sample", "larger batches"],
)
def test_mixing_beyond_some_size_is_refused_again_and_again(size, before, refused):
    model = private(zoo.seeded(lambda: Function(centred_beyond(size))))
    for count in before:
        step(model, torch.randn(count, 5))
        model.eval().train()
    for _ in range(3):
        with pytest.raises(ValueError, match="what first sees of a sample depends on the other"):
            step(model, torch.randn(refused, 5))


def test_the_search_leaves_no_trace():
    def function(net, x):
        net.calls += 1
        y = net.second(net.first(x + torch.randn_like(x) * random.random()))
        return y + torch.randn(y.shape, generator=net.generator)

    def build():
        net = Function(function)
        net.calls, net.generator = 0, torch.Generator().manual_seed(1)
        return net

    net, other = zoo.seeded(build), zoo.seeded(build)
    model, x = private(net), torch.randn(4, 5)
    runs = []
    for run in (model, other):
        torch.manual_seed(0)
        random.seed(0)
        runs.append([run(x) for _ in range(4)])
    for found, expected in zip(*runs, strict=True):
        torch.testing.assert_close(found, expected)
    assert net.calls == other.calls == 4
    assert torch.equal(net.generator.get_state(), other.generator.get_state())
    assert all(p.grad is None for p in net.parameters())


def variational(width):
    def function(net, x):
        mean, scale = net.mean(x), net.scale(x)
        return net.decode(mean + torch.randn_like(mean) * scale.exp()), mean, scale

    members = {"mean": nn.Linear(5, width), "scale": nn.Linear(5, width)}
    return zoo.Net(function, decode=nn.Linear(width, 3), **members)


def cancelling(net, x):
    large = 1e6 * x.abs().sum(-1, keepdim=True)
    return net.second(net.first(x) + large - large)


def noisy_and_flattened(net, x):
    tokens = net.first((x + torch.randn_like(x))[:, None].repeat(1, 4, 1))
    return net.second(tokens.transpose(0, 1).flatten(0, 1)).unflatten(0, (4, -1)).transpose(0, 1)


def as_often_as_one_asks(net, x):
    """All are computed as often as one sample asks, and a sample keeps what it asked for."""
    times, h = (x[:, :1].abs() * 3).long() + 1, x
    for done in range(int(times.max())):
        h = torch.where(done < times, net.norm(h + net.first(h)), h)
    return net.second(h)


SEEDS = itertools.count()


def unseeded() -> torch.Generator:
    """Returns a generator that no seed of the checks determines."""
    return torch.Generator().manual_seed(next(SEEDS))


APART = {
    **{f"latent width {w}": lambda w=w: variational(w) for w in (1, 2, 3, 5, 8, 40)},
    "nearly cancelling sums": lambda: Function(cancelling),
    "noise before a flattened layer": lambda: Function(noisy_and_flattened),
    "stochastic depth": lambda: Function(
        lambda net, x: net.second(x + (torch.rand(len(x), 1) > 0.5) * net.first(x))
    ),
    "as often as one asks": lambda: Function(as_often_as_one_asks),
    "noise of its own generator": lambda: Function(
        lambda net, x: net.second(net.first(x) + torch.randn(x.shape, generator=net.draws).to(x))
    ),
    "unseeded noise": lambda: Function(
        lambda net, x: net.second(net.first(x) + torch.randn(x.shape, generator=unseeded()).to(x))
    ),
    "dropout": lambda: nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.3), nn.Linear(8, 3)),
    "in place": lambda: nn.Sequential(nn.Linear(5, 8), nn.ReLU(inplace=True), nn.Linear(8, 3)),
}


@pytest.mark.parametrize(
    ("name", "dtype"), in_turn(APART, (torch.float32, torch.bfloat16, torch.float64))
)
def test_a_network_that_keeps_samples_apart_is_not(name, dtype):
    for size in (2, 5, 16):
        torch.manual_seed(size)
        model = private(zoo.seeded(APART[name]).to(dtype))
        for _ in range(2):
            outputs = model(torch.randn(size, 5).to(dtype))
        assert tensors_of(outputs)[0].shape[0] == size


def contrast(criterion, outputs, targets):
    return (outputs @ targets.t()).logsumexp(1)


def running_mean(criterion, outputs, targets):
    losses = (outputs - targets).square().sum(1)
    before = 1 if criterion.kept is None else criterion.kept
    criterion.kept = losses.detach().mean()
    return losses / before


def queue(criterion, outputs, targets):
    losses = (outputs - targets).square().sum(1)
    if criterion.queue:
        losses = losses + (outputs @ torch.stack(criterion.queue).t()).logsumexp(1)
    criterion.queue.extend(outputs.detach())
    return losses


def class_weights(criterion, outputs, targets):
    kinds = (targets[:, 0] > 0).long()
    return (outputs - targets).square().sum(1) / torch.bincount(kinds, minlength=2)[kinds]


def plain(criterion, outputs, targets):
    return (outputs - targets).square().sum(1)


def logged(criterion, outputs, targets):
    losses = plain(criterion, outputs, targets)
    criterion.kept = losses.mean().item()
    criterion.queue.append(criterion.kept)
    return losses


def annealed(criterion, outputs, targets):
    criterion.count += 1
    return plain(criterion, outputs, targets) * criterion.count


OF_OTHERS = "loss of a sample depends on "
ACROSS = {
    "similarities": (lambda c, o, t: (o @ o.t()).logsumexp(1), OF_OTHERS),
    "in-batch negatives": (contrast, OF_OTHERS),
    "centred": (lambda c, o, t: (o - o.mean(0)).square().sum(1), OF_OTHERS),
    "differences": (lambda c, o, t: (o - o.roll(1, 0)).square().sum(1), OF_OTHERS),
    "the sample before": (lambda c, o, t: (o.roll(1, 0) - t).square().sum(1), OF_OTHERS),
    "a cumulative sum": (lambda c, o, t: plain(c, o, t).cumsum(0), OF_OTHERS),
    "others' targets": (lambda c, o, t: (o - t.roll(1, 0)).square().sum(1), OF_OTHERS),
    "class weights": (class_weights, OF_OTHERS),
    "a count": (lambda c, o, t: plain(c, o, t) / (1 + (t > 0).sum()), OF_OTHERS),
    "the largest": (lambda c, o, t: plain(c, o, t) / plain(c, o, t).detach().max(), OF_OTHERS),
    "a running mean": (running_mean, "one batch is carried into the next, in kept"),
    "a queue": (queue, "one batch is carried into the next, in queue"),
    "its own": (plain, None),
    "a log": (logged, None),
    "a weight that grows": (annealed, None),
    "their number": (lambda c, o, t: plain(c, o, t) / len(o), OF_OTHERS + "how many"),
    "their places from the end": (
        lambda c, o, t: plain(c, o, t) * torch.arange(len(o), 0, -1),
        OF_OTHERS,
    ),
    "their places": (lambda c, o, t: plain(c, o, t) * torch.arange(1, len(o) + 1), OF_OTHERS),
    "noise": (lambda c, o, t: (o - t + torch.randn_like(o)).square().sum(1), None),
    "others' targets by chance": (
        lambda c, o, t: (o - t[torch.randperm(len(t))]).square().sum(1),
        OF_OTHERS,
    ),
    "noise beside a mean": (
        lambda c, o, t: (o - t + torch.randn_like(o)).square().sum(1) * o.detach().abs().mean(),
        OF_OTHERS,
    ),
    "dropout": (lambda c, o, t: plain(c, nn.functional.dropout(o, 0.02), t), None),
    "noise of Python": (lambda c, o, t: plain(c, o, t) * random.random(), None),
}


class Loss:
    reduction = "mean"

    def __init__(self, function):
        self.function, self.kept, self.queue, self.count = function, None, [], 0

    def __call__(self, outputs, targets):
        return self.function(self, outputs, targets)


@pytest.mark.parametrize(("name", "size"), in_turn(ACROSS, (2, 4, 7)))
def test_a_loss_across_the_batch_is_refused(name, size):
    function, message = ACROSS[name]
    model, criterion = private(nn.Linear(5, 3)), Loss(function)
    loss = PrivateCriterion(model, criterion, "mean")
    torch.manual_seed(size)
    x, y = torch.randn(size, 5), torch.randn(size, 3)
    loss(model(x[:1]), y[:1])
    if message is None:
        loss(model(x), y).backward()
        assert criterion.count in (0, 2)  # what the search has called is not counted
        assert len(criterion.queue) in (0, 2)
        return
    with pytest.raises(ValueError, match=message):
        loss(model(x), y).backward()
    assert all(p.grad is None for p in model.network.parameters())


@pytest.mark.parametrize("mixing", [0.0, 1e-2])
@pytest.mark.parametrize("size", [2, 4, 7])
def test_a_loss_of_nearly_cancelling_terms_that_are_summed_in_another_order(size, mixing):
    def another_order(criterion, outputs, targets):
        terms = (outputs * targets).unbind(1)
        total = functools.reduce(torch.add, terms if len(outputs) % 2 else terms[::-1])
        return total * (1 + mixing * outputs.detach().abs().mean())

    network = nn.Linear(5, 3)
    x = torch.randn(size, 5)
    y = 1e4 * torch.cross(network(x).detach(), torch.randn(size, 3), dim=1) + torch.randn(size, 3)
    model = private(network)
    loss = PrivateCriterion(model, Loss(another_order), "mean")
    with pytest.raises(ValueError, match=OF_OTHERS) if mixing else nullcontext():
        loss(model(x), y).backward()


def test_a_target_that_is_compared_with_a_constant_has_no_errors():
    """Else a loss would change with the last bit of it, and what others change be no finding."""

    def by_ratings(criterion, outputs, targets):
        losses = (outputs - (targets >= 0.5).to(outputs.dtype)).square().sum(1)
        return losses * outputs.detach().abs().mean()

    model = private(nn.Linear(5, 3))
    loss = PrivateCriterion(model, Loss(by_ratings), "mean")
    with pytest.raises(ValueError, match=OF_OTHERS):
        loss(model(torch.randn(6, 5)), torch.full((6, 3), 0.5)).backward()


@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("name", [name for name in ACROSS if ACROSS[name][1] == OF_OTHERS])
def test_a_loss_across_a_batch_that_is_padded_is_refused(name, size):
    model = private(nn.Linear(5, 3))
    loss = PrivateCriterion(model, Loss(ACROSS[name][0]), "mean")
    rows = [*range(size), *[0] * (8 - size)]  # copies of the first sample follow
    x, y = torch.randn(size, 5), torch.randn(size, 3)
    x[0], y[0] = 3, -3  # of the largest loss
    model.step_state.usage.hand_over(Ticket(size, rows=8))
    with pytest.raises(ValueError, match=OF_OTHERS):
        loss(model(x[rows]), y[rows]).backward()


LATER = [name for name, (_, message) in ACROSS.items() if message and "carried" not in message]


@pytest.mark.parametrize("size", [4, 20])
@pytest.mark.parametrize("name", LATER)
def test_a_loss_that_begins_to_look_across_the_batch_is_refused_at_the_next_check(name, size):
    function, message = ACROSS[name]
    model, criterion = private(nn.Linear(5, 3)), Loss(plain)
    loss = PrivateCriterion(model, criterion, "mean")
    torch.manual_seed(size)
    x, y = torch.randn(size, 5), torch.randn(size, 3)
    for _ in range(3):
        loss(model(x), y).backward()
        model.zero_grad()
    criterion.function = function
    with pytest.raises(ValueError, match=message):
        loss(model(x), y).backward()
    assert all(p.grad is None for p in model.network.parameters())


def several(net, x):
    """Outputs of which a loss may use what it should not."""
    y = net.layer(x)
    return {"logits": y, "balance": y.mean(), "keys": [y * 2]}


@pytest.mark.parametrize("use", ["balance", "keys", "between", "hook", None])
def test_every_tensor_that_a_loss_is_made_of_is_looked_at(use):
    def criterion(logits, targets, balance=0.0, keys=None):
        losses = (logits - targets).square().sum(1) + balance
        return losses if keys is None else losses + (logits @ keys[0].t()).logsumexp(1)

    model = private(zoo.Net(several, layer=nn.Linear(5, 3)))
    outputs = model(torch.randn(4, 5))
    more = {use: outputs[use]} if use in outputs else {}
    logits = outputs["logits"]
    if use == "between":
        logits = logits - logits.mean(0)
    if use == "hook":
        logits.register_hook(lambda gradient: gradient / gradient.norm())
    loss = PrivateCriterion(model, criterion, "mean")
    if use is None:
        loss(logits, torch.zeros(4, 3), **more).backward()
        assert len(model.per_sample_gradient_norms) == 4
        return
    with pytest.raises(ValueError, match=r"depends on the outputs of other|no dimension counts"):
        loss(logits, torch.zeros(4, 3), **more)


@pytest.mark.parametrize("length", [4, 6, 8, 12])
@pytest.mark.parametrize("joined", [False, True])
def test_ctc_is_not(length, joined):
    """[T, B, C], also where T is B or a multiple of it."""
    model = private(
        zoo.Net(lambda net, x: net.layer(x).log_softmax(-1).transpose(0, 1), layer=nn.Linear(5, 7))
    )
    sizes = torch.tensor([1, 2, 1, 1])
    targets = torch.randint(1, 7, (4, 2))
    if joined:
        targets = torch.cat([row[:size] for row, size in zip(targets, sizes, strict=True)])
    loss = PrivateCriterion(model, nn.CTCLoss(), "mean")
    outputs = model(torch.randn(4, length, 5))
    loss(outputs, targets, torch.full((4,), length), sizes).backward()
    assert len(model.per_sample_gradient_norms) == 4


def test_a_criterion_is_not_called_for_an_empty_draw():
    """CTC refuses to be."""
    model = private(nn.Linear(4, 5))
    loss = PrivateCriterion(model, nn.CTCLoss(), "mean")
    lengths = torch.zeros(0, dtype=torch.long)
    outputs = model(torch.randn(0, 6, 4)).log_softmax(-1).transpose(0, 1)
    found = loss(outputs, torch.zeros(0, 2, dtype=torch.long), lengths, lengths)
    found.backward()
    assert found.item() == 0
    assert model.per_sample_gradient_norms.shape == (0,)
    assert all(not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("across", [False, True])
def test_so_is_one_where_the_batch_is_the_second_dimension(across):
    """Tokens [T], before samples [B]; T is a multiple of B."""

    class Last:
        reduction = "mean"

        def __call__(self, outputs, targets):
            last = outputs[-1] - outputs[-1].mean(0) * across
            return (last - targets).square().sum(1)

    model = private(nn.Linear(5, 3), batch_first=False)
    loss = PrivateCriterion(model, Last(), "mean")
    x, y = torch.randn(8, 4, 5), torch.randn(4, 3)
    if not across:
        loss(model(x), y).backward()
        assert len(model.per_sample_gradient_norms) == 4
        return
    with pytest.raises(ValueError, match="loss of a sample depends on the outputs of other"):
        loss(model(x), y)


@pytest.mark.parametrize("returned", [None, 1.0, (torch.ones(4),), {"loss": 1}])
def test_a_criterion_that_returns_no_tensor_is_named(returned):
    loss = PrivateCriterion(private(nn.Linear(5, 3)), lambda o: returned, "mean")
    with pytest.raises(TypeError, match="the criterion returned"):
        loss(loss.model(torch.randn(4, 5)))
    with pytest.raises(TypeError, match="shape is"):
        loss(loss.model(torch.randn(4, 5)), shape=(4,))


@pytest.mark.parametrize("p", [0.02, 0.5])
def test_functional_dropout_before_many_layers_is_no_mixing(p):
    def function(net, x):
        x = nn.functional.dropout(net.first(x), p, net.training)
        return net.second(nn.functional.dropout(net.norm(x), p, net.training))

    for seed in range(10):
        torch.manual_seed(seed)
        assert private(Function(function))(torch.randn(4, 5)).shape == (4, 3)


def test_a_checkpointed_block_with_functional_dropout_is_no_mixing():
    """Backward computes the block again, and dropout is off there as it was in forward."""

    def function(net, x):
        rows = [net.first(x), x]
        return torch.utils.checkpoint.checkpoint(dropped, net, *rows, use_reentrant=False)

    def dropped(net, x, y):
        gates = nn.functional.dropout(net.norm(x).sigmoid(), 0.5, net.training)
        return net.second(gates * y)

    assert private(Function(function))(torch.randn(4, 5)).shape == (4, 3)


def frozen_norm():
    return nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5).requires_grad_(False), nn.Linear(5, 3))


def test_a_frozen_batch_norm_is_refused_once_train_reaches_it():
    net = frozen_norm()
    net[1].eval()
    model, x = private(net), torch.randn(4, 5)
    assert model(x).shape == (4, 3)
    model.train()
    before = net[1].running_mean.clone()
    with pytest.raises(ValueError, match=r"1 \(BatchNorm1d\).*1\.eval\(\) after each model.train"):
        model(x)
    torch.testing.assert_close(net[1].running_mean, before)
    net[1].eval()
    assert model(x).shape == (4, 3)


def test_a_module_without_a_batching_rule_runs_sample_by_sample():
    class States(nn.GRU):
        def forward(self, x):
            return super().forward(x)[0]

    network = nn.Sequential(States(5, 4, batch_first=True), nn.Linear(4, 2)).double()
    assert_exact(network, tuple(torch.randn(4, 3, n, dtype=torch.float64) for n in (5, 2)))


FORWARDS, PRECISIONS = Unseen(), Unseen()


@pytest.mark.parametrize("skips", [False, True])
def test_checks_may_be_skipped_for_a_measurement(skips):
    """The first batch is looked at in any case; then only those that count as powers of two."""
    FORWARDS.values.clear()
    model = private(zoo.seeded(lambda: Function(lambda net, x: net.second(net.first(x)))))
    model.network.first.register_forward_hook(lambda *_: FORWARDS.values.append(1))
    if skips:
        model.skip_checks()
    x = torch.randn(4, 5)
    model(x)
    assert len(FORWARDS.values) > 1
    FORWARDS.values.clear()
    for _ in range(3):  # 2, 3 and 4
        model(x)
    assert (len(FORWARDS.values) == 3) == skips


def test_a_summary_tells_large_whole_numbers_apart():
    """Also token ids beyond what float32 holds; their company moves nothing but the last bits."""
    x = torch.randint(2**30, (3, 1000), generator=torch.Generator().manual_seed(0))
    other = x.clone()
    other[1, 500] += 1
    one, two = (summary(ids, Layout("dimension", 0), 3).values for ids in (x, other))
    assert torch.equal(one[0], two[0])
    room = WHOLE * one[1, -1]
    assert bool(((one[1] - two[1]).abs() > room).any())
    alone = summary(x[:1], Layout("dimension", 0), 1).values
    assert bool(((alone[0] - one[0]).abs() <= WHOLE * one[0, -1]).all())


def test_checks_compute_convolutions_in_float32():
    """With another number of samples cuDNN takes another kernel, in TensorFloat-32 by default."""
    PRECISIONS.values.clear()

    def noted(net, x):
        PRECISIONS.values.append(torch.backends.cudnn.conv.fp32_precision)
        return net.second(net.first(x))

    before = torch.backends.cudnn.conv.fp32_precision
    model = private(Function(noted))
    model(torch.randn(4, 5))
    assert PRECISIONS.values.count("ieee") >= 4
    assert (
        PRECISIONS.values[-1] == before == torch.backends.cudnn.conv.fp32_precision
    )  # the step itself


def scaled(gradient):
    return gradient / 2


@pytest.mark.parametrize("where", ["hidden", "output"])
def test_a_hook_on_a_tensor_of_the_forward_runs_and_is_looked_at(where):
    """Also in the search for samples, where no gradient is asked for."""

    def network(hook):
        def function(net, x):
            h = net.first(x)
            y = net.second(h.relu())
            (h if where == "hidden" else y).register_hook(hook)
            return y

        return zoo.seeded(lambda: Function(function))

    x = torch.randn(4, 5)
    private(network(scaled))(x)
    with pytest.raises(ValueError, match=r"the gradient that (first|second) is given"):
        private(network(lambda gradient: gradient - gradient.mean(0)))(x)


class Trimmed(nn.Module):
    """Cuts tokens to the longest sample of the batch, and leaves out what is padding."""

    def __init__(self, where):
        super().__init__()
        self.where = where
        self.embedding, self.first, self.second = (
            nn.Embedding(9, 5),
            nn.Linear(5, 5),
            nn.Linear(5, 2),
        )

    def forward(self, x, lengths):
        if self.where == "tokens":
            x = x[:, : lengths.max()]
        h = self.embedding(x)
        if self.where == "features":
            h = h[:, : lengths.max()]
        mask = torch.arange(h.shape[1]) < lengths[:, None]
        return self.second((self.first(h).tanh() * mask[..., None]).sum(1))


def tokens_of(lengths):
    lengths = torch.tensor(lengths)
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(1, 9, (len(lengths), 7), generator=draw)
    return x * (torch.arange(7) < lengths[:, None]), lengths


@pytest.mark.parametrize("lengths", [(7, 3, 5, 2), (4, 3, 5, 2)])
@pytest.mark.parametrize("where", ["tokens", "features"])
def test_a_refused_trim_to_the_longest_sample_shows_where_it_belongs(where, lengths):
    x, lengths = tokens_of(lengths)
    with pytest.raises(ValueError, match=r"has another length for a sample.*def collate"):
        private(Trimmed(where))(x, lengths)
    private(Trimmed(None))(x[:, : lengths.max()], lengths)  # as the message says


class Ordered(torch.autograd.Function):
    """Sums tokens [B, T, d] one after another, from the last one on where there are many samples.

    As libraries that choose a kernel by the shape: results differ by rounding alone.
    """

    @staticmethod
    def forward(ctx, x):
        ctx.length = x.shape[1]
        return in_order(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient[:, None].expand(-1, ctx.length, -1)


class Spread(torch.autograd.Function):
    """Repeats [B, d] for T tokens; the gradients of these are summed as `Ordered` does."""

    @staticmethod
    def forward(ctx, x, length):
        return x[:, None].repeat(1, length, 1)

    @staticmethod
    def backward(ctx, gradient):
        return in_order(gradient), None


def in_order(x):
    tokens = x.unbind(1) if len(x) <= 3 else x.flip(1).unbind(1)
    return functools.reduce(torch.add, tokens)


def pool():
    """Sums tokens in a module with a parameter of its own."""
    return zoo.Net(lambda net, x: Ordered.apply(x) * net.scale, scale=nn.Parameter(torch.ones(5)))


def gradients_that_cancel(net, x):
    """The gradient of each token's sign is that of all tokens, and their sum is small."""
    signs = torch.linspace(-1, 1, x.shape[1])[:, None] * 1e4
    tokens = Spread.apply(net.first(x[:, 0]), x.shape[1])
    return net.second((tokens * signs).sum(1) + net.first(x[:, 1]))


ROUNDED_BY_SIZE = {
    "of the arguments": lambda net, x: net.second(net.first(Ordered.apply(x))),
    "of what code between layers makes": lambda net, x: net.first(Ordered.apply(x.sinh())),
    "of a layer's outputs": lambda net, x: net.second(Ordered.apply(net.first(x))),
    "in a module": lambda net, x: net.second(net.pool(x)),
    "of large constants in a module": lambda net, x: net.second(
        net.pool(x + 100 * torch.linspace(-1, 1, x.shape[1])[:, None])
    ),
    "of gradients": gradients_that_cancel,
}


def tokens_that_cancel(size, length=32):
    half = torch.randn(size, length // 2, 5)
    return torch.cat([half, -half * (1 + 1e-3 * torch.randn_like(half))], 1)


def network_of(function, mixing=0.0):
    def mixed(net, x):
        return function(net, x) * (1 + mixing * x.abs().mean())

    return zoo.Net(mixed, first=nn.Linear(5, 5), second=nn.Linear(5, 5), pool=pool())


@pytest.mark.parametrize("name", ROUNDED_BY_SIZE)
def test_nearly_cancelling_tokens_that_are_summed_in_another_order(name):
    x = tokens_that_cancel(8)
    for size in (2, 3, 8):
        model = private(network_of(ROUNDED_BY_SIZE[name]))
        assert len(model(x[:size])) == size


@pytest.mark.parametrize("mixing", [1e-2, 1e-3])
@pytest.mark.parametrize("name", ROUNDED_BY_SIZE)
def test_mixing_beside_nearly_cancelling_tokens_is_found(name, mixing):
    x = tokens_that_cancel(8)
    model = private(network_of(ROUNDED_BY_SIZE[name], mixing))
    with pytest.raises(ValueError, match="depends on the other samples"):
        model(x)


def test_layers_round_in_a_network_that_runs_on_one_sample_at_a_time():
    def in_parts(net, x):
        rows = in_order(net.first(x))
        return torch.cat([net.second(part) for part in rows.split(2)])

    half = 1000.0 * torch.randint(1, 9, (3, 16, 5))  # whole numbers have no errors of their own
    network = network_of(in_parts)
    network.first = nn.Linear(5, 5, bias=False)
    model = private(network)
    assert len(model(torch.cat([half, -half, torch.ones(3, 1, 5)], 1))) == 3
    assert [handle.name for handle in model.capture.handles] == [""]


def test_layers_round_where_a_backward_computes_them_again():
    def in_parts(net, x):
        rows = in_order(checkpoint(net.first, x, use_reentrant=False))
        return torch.cat([net.second(part) for part in rows.split(2)])

    half = 1e5 * torch.randn(3, 16, 5)
    block = network_of(in_parts)
    model = private(nn.Sequential(nn.Linear(5, 5), block))
    assert len(model(torch.cat([half, -half, torch.ones(3, 1, 5)], 1))) == 3
    assert [handle.name for handle in model.capture.handles] == ["0", "1"]
    assert not any(module._forward_hooks for module in block.children())


def with_mask(net, x, mask):
    """One number is added to all scores of a query, as where it sees nothing but padding."""
    queries = net.first(x)
    scores = (queries @ queries.mT + mask).softmax(-1)
    return net.second((scores @ net.first(x)).mean(1))


def with_weights(net, x, bias):
    return net.second((net.first(x) * bias.softmax(-1)[..., None]).sum(1))


def with_keys(net, x, keys):
    same = (keys[:, :, None] == keys[:, None, :]).float()
    return net.second((same @ net.first(x)).mean(1))


LOWEST = torch.finfo(torch.float32).min
EXACT = {  # functions that an error in one of two equal numbers would change
    "the lowest mask": (with_mask, torch.full((6, 6), LOWEST).repeat(8, 1, 1)),
    "a mask of -1e9": (with_mask, torch.full((6, 6), -1e9).repeat(8, 1, 1)),
    "weights of one number": (with_weights, torch.full((8, 6), -1e9)),
    "keys": (with_keys, torch.rand(8, 2, generator=torch.Generator().manual_seed(0)).repeat(1, 3)),
}


@pytest.mark.parametrize("mixing", [1e-3, 0.0])
@pytest.mark.parametrize("name", EXACT)
def test_equal_numbers_stay_equal_in_runs_with_errors(name, mixing):
    function, second = EXACT[name]

    def mixed(net, x, y):
        return function(net, x, y) * (1 + mixing * x.abs().mean())

    model = private(zoo.Net(mixed, first=nn.Linear(5, 5), second=nn.Linear(5, 3)))
    with (
        pytest.raises(ValueError, match="depends on the other samples") if mixing else nullcontext()
    ):
        model(torch.randn(8, 6, 5), second)


def noisy(net, x):
    return net.second(torch.rrelu(net.first(x), training=True))


def with_rank_0s_mean(net, x):
    """Mixes on one rank alone, on which the batch is smaller."""
    return net.second(net.first(x - x.mean(0) if len(x) == 4 else x))


ON_RANKS = {
    "apart": (lambda net, x: net.second(net.first(x)), False),
    "noise by values": (noisy, False),
    "centred": (lambda net, x: net.second(net.first(x - x.mean(0))), True),
    "their number": (lambda net, x: net.second(net.first(x) / len(x)), True),
    "centred on one rank": (with_rank_0s_mean, True),
}


@pytest.mark.parametrize("name", ON_RANKS)
@on_ranks(2)
def test_all_ranks_of_a_sharded_network_refuse_what_one_of_them_finds(context, name):
    function, mixes = ON_RANKS[name]
    network = zoo.seeded(lambda: Function(function))
    mesh = DeviceMesh.from_group(context.group, "cpu")
    model = private(fully_shard(network, mesh=mesh))
    x = torch.randn(4 + context.rank, 5)
    with pytest.raises(ValueError, match="on the other samples") if mixes else nullcontext():
        step(model, x)
