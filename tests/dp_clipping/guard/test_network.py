"""Networks in which samples see each other are refused, and no others are."""

import itertools
import random
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from dp_clipping.capture.checks.summaries import summary
from dp_clipping.capture.samples.batch import tensors_of
from dp_clipping.criterion import PrivateCriterion
from dp_clipping.layers.batch_layout import Layout
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
