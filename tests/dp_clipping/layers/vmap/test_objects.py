"""Objects that blocks fill and read within one step, and what trials leave in them: nothing."""

import copy
import functools
from collections import OrderedDict, UserDict, deque
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from dp_clipping.trials.objects import Objects
from tests.dp_clipping.conftest import MODES, assert_exact, assert_step, private, private_loss
from tests.support import zoo
from tests.support.turns import in_turn

SIZES = (4, 1, 6, 3)  # of batches one after another


def assert_exact_in_each(network, shape, mode="bookkeeping", units=1, **options) -> None:
    """Several steps of other sizes."""
    network = network.double()
    model = private(copy.deepcopy(network), mode, rows_per_unit=units, **options)
    for size in SIZES:
        x = torch.randn(size * units, *shape, dtype=torch.float64)
        with torch.no_grad():
            batch = x, torch.randn_like(copy.deepcopy(network)(x))
        assert_step(model, network, batch, rows_per_unit=units)


class Matrix(nn.Module):
    """A parameter of its own that no arithmetic covers but that of vmap."""

    def __init__(self, elementwise: bool = False):
        super().__init__()
        self.elementwise, self.layer = elementwise, nn.Linear(4, 4)
        self.w = nn.Parameter(torch.randn(4) if elementwise else torch.randn(4, 4) / 2)

    def product(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        return x * self.w if self.elementwise else x @ self.w


class Push(Matrix):
    def forward(self, x: Tensor, memory) -> Tensor:
        memory.append(self.product(x).tanh())
        return memory[-1]


class Pop(Matrix):
    def forward(self, x: Tensor, memory) -> Tensor:
        return self.product(x) + memory.pop()


class Skips(nn.Module):
    """Blocks that fill, and empty, what is made in each forward or kept and cleared."""

    def __init__(self, make, elementwise=False, is_kept=False):
        super().__init__()
        self.down = nn.ModuleList([Push(elementwise), Push(elementwise)])
        self.up = nn.ModuleList([Pop(elementwise), Pop(elementwise)])
        self.make = make
        if is_kept:
            self.memory = make()

    def forward(self, x: Tensor) -> Tensor:
        memory = self.memory if hasattr(self, "memory") else self.make()
        memory.clear()
        for block in (*self.down, *self.up):
            x = block(x, memory)
        return x


class Slotted:
    __slots__ = ("__hidden", "calls", "seen")

    def __init__(self):
        self.calls = 0


@dataclass
class Context:
    calls: int = 0
    seen: tuple | None = None


class Writes(Matrix):
    def forward(self, x: Tensor, context) -> Tensor:
        context.seen = self.product(x).tanh(), x.mean(-1, keepdim=True)
        context.calls += 1
        return x @ self.layer.weight


class Reads(Matrix):
    def forward(self, x: Tensor, context) -> Tensor:
        return self.product(x + context.seen[0] * context.seen[1])


class Through(nn.Module):
    """One block writes into an object what the next one reads."""

    def __init__(self, make):
        super().__init__()
        self.writes, self.reads, self.make = Writes(), Reads(), make

    def forward(self, x: Tensor) -> Tensor:
        context = self.make()
        y = self.reads(self.writes(x, context), context)
        assert context.calls == 1
        return y


class TwoCalls(nn.Module):
    def __init__(self, elementwise):
        super().__init__()
        self.around, self.between = Around(elementwise), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.around(self.between(self.around(x, True)), False)


class Around(nn.Module):
    def __init__(self, elementwise):
        super().__init__()
        self.gain, self.elementwise = nn.Parameter(torch.rand(4) + 0.5), elementwise
        self.turn = nn.Parameter(torch.randn(4, 4))
        self.turn.requires_grad_(not elementwise)

    def forward(self, x: Tensor, is_first: bool) -> Tensor:
        if is_first:
            self.mean = x.mean(1, keepdim=True)
            return (x - self.mean) * self.gain @ self.turn
        return x @ self.turn.detach() / self.gain + self.mean


class Ring(nn.Module):
    """A hidden state that is kept between the calls of one step."""

    def __init__(self, memory=None):
        super().__init__()
        self.w, self.u = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))
        self.state, self.memory = None, memory

    def forward(self, x: Tensor) -> Tensor:
        if self.memory is not None:
            self.memory.append(x @ self.w)
            return sum(self.memory).tanh() @ self.u
        self.state = (x @ self.w + (0 if self.state is None else self.state @ self.u)).tanh()
        return self.state


class Rolled(nn.Module):
    def __init__(self, memory=None):
        super().__init__()
        self.cell, self.end = Ring(memory), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.cell.state = None
        if self.cell.memory is not None:
            self.cell.memory.clear()
        return self.end(torch.stack([self.cell(x[:, t]) for t in range(x.shape[1])], 1))


class Kept(nn.Module):
    """Attributes that are computed once: of nothing, of the input's length, of the parameter."""

    def __init__(self, of_parameter=False):
        super().__init__()
        self.w, self.of_parameter = nn.Parameter(torch.randn(4, 4)), of_parameter
        self.table = self.turn = None

    @functools.cached_property
    def numbers(self) -> Tensor:
        return torch.arange(4.0, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None or len(self.table) < x.shape[1]:
            self.table = torch.arange(float(x.shape[1]), dtype=torch.float64)[:, None].cos()
        if self.turn is None and self.of_parameter:
            self.turn = torch.linalg.qr(self.w)[0]
        x = x * self.table[: x.shape[1]] + self.numbers
        return x @ (self.turn if self.of_parameter else self.w)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.kept = Kept(of_parameter=True)

    def forward(self, x: Tensor) -> Tensor:
        self.kept.turn = None
        return self.kept(self.kept(x).tanh())


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4) / 2)

    def forward(self, x: Tensor) -> Tensor:
        self.last = (x @ self.w @ x.transpose(1, 2)).softmax(-1)
        return self.last @ x


class Inspected(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.end = Attention(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.attention(x)) * self.attention.last.amax(-1, keepdim=True)


NETWORKS = {
    "a list": lambda: Skips(list),
    "a list, without vmap": lambda: Skips(list, elementwise=True),
    "a list that is kept": lambda: Skips(list, is_kept=True),
    "a dataclass": lambda: Through(Context),
    "slots": lambda: Through(Slotted),
    "statistics of the first call": lambda: TwoCalls(elementwise=False),
    "statistics, without vmap": lambda: TwoCalls(elementwise=True),
    "a hidden state": Rolled,
    "a window": lambda: Rolled(deque(maxlen=2)),
    "tables": Kept,
    "of a parameter": Twice,
}


@pytest.mark.parametrize("name", NETWORKS)
def test_state_of_one_step_trains(name):
    assert_exact_in_each(NETWORKS[name](), (3, 4))


@pytest.mark.parametrize("options", [{"mode": "per_sample"}, {"mode": "ghost"}, {"units": 2}])
@pytest.mark.parametrize("name", ["a list", "slots", "statistics of the first call"])
def test_in_every_mode_and_for_units(name, options):
    assert_exact_in_each(NETWORKS[name](), (3, 4), **options)


class Collecting(nn.Module):
    """Puts into the caller's object what a block with a parameter of its own makes."""

    def __init__(self):
        super().__init__()
        self.push, self.end, self.calls = Push(), nn.Linear(4, 4), 0

    def forward(self, x: Tensor, memory) -> Tensor:
        self.calls += 1
        return self.end(self.push(x, memory))


@pytest.mark.parametrize("mode", MODES)
def test_what_the_real_forward_leaves_is_real_and_stays(mode):
    network = Collecting()
    model = private(network, mode)
    for number, size in enumerate((5, 2, 0, 3), 1):
        memory = []
        y = model(torch.randn(size, 3, 4), memory)
        assert network.calls == number
        assert [x.shape for x in memory] == [(size, 3, 4)] == [y.shape]
        if size:
            torch.testing.assert_close(network.end(memory[0]), y)
            assert memory[0].requires_grad


def test_a_loss_may_read_what_a_block_has_kept():
    network = Inspected()
    model, x = private(network), torch.randn(4, 3, 4)

    def loss(y, target):
        return network.attention.last.square().sum((1, 2)) + y.sum((1, 2))

    private_loss(model, (x, torch.zeros(4)), loss).backward()
    for n in range(4):
        network.zero_grad()
        loss(network(x[n : n + 1]), None).sum().backward()
        norm = sum(p.grad.square().sum() for p in network.parameters()).sqrt()
        torch.testing.assert_close(model.per_sample_gradient_norms[n], norm)


class Remembers(nn.Module):
    """Runs one sample after another, and keeps what it computes of each, or a constant."""

    def __init__(self, keeps_samples: bool):
        super().__init__()
        self.w, self.keeps_samples, self.last = nn.Parameter(torch.randn(4, 4)), keeps_samples, None

    def forward(self, x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for n in range(len(x)):
            y[n] = x[n] @ self.w if x[n].sum() > 0 else x[n]
        self.last = y if self.keeps_samples else torch.arange(4.0)
        return y


def test_objects_that_keep_samples_are_refused_where_they_run_one_sample_after_another():
    x = torch.randn(4, 4)
    model = private(nn.Sequential(nn.Linear(4, 4), Remembers(keeps_samples=False)))
    model(x)
    assert "one sample after another" in model.plan_table()
    with pytest.raises(ValueError, match=r"1 \(Remembers\) leaves what it computes of a sample"):
        private(nn.Sequential(nn.Linear(4, 4), Remembers(keeps_samples=True)))(x)


class Recalls(nn.Module):
    """Adds what it was given in the object of an argument, and leaves its own there."""

    def __init__(self, reads: bool):
        super().__init__()
        self.layer, self.reads = nn.Linear(4, 4), reads

    def forward(self, x: Tensor, memory: list) -> Tensor:
        y = self.layer(x)
        if self.reads and memory:
            y = y + memory[-1]
        memory[:] = [y.detach()]
        return y


def test_an_object_that_carries_from_step_to_step_is_refused():
    x, memory = torch.randn(4, 4), []
    model = private(Recalls(reads=True))
    model(x, memory)
    with pytest.raises(ValueError, match=r"an argument holds what an earlier.*model\(x, memory=\["):
        model(x, memory)
    model(x, [])
    model, memory = private(Recalls(reads=False)), []
    for size in (4, 4, 2, 0, 3):
        model(x[:size], memory)
        assert memory[0].shape == (size, 4)


class Average(nn.Module):
    def __init__(self, holder):
        super().__init__()
        self.w, self.holder = nn.Parameter(torch.randn(4, 4)), holder

    def forward(self, x: Tensor) -> Tensor:
        self.holder.seen = 0.9 * self.holder.seen + x.detach().mean(0)
        return x @ self.w + self.holder.seen


@pytest.mark.parametrize("make", [lambda: Context(seen=torch.zeros(4)), nn.Module])
def test_state_that_is_carried_stays_refused(make):
    holder = make()
    holder.seen = torch.zeros(4)
    with pytest.raises(ValueError, match="is carried into the next"):
        private(Average(holder))(torch.randn(4, 4))
    assert not holder.seen.any()


@pytest.mark.parametrize("where", ["argument", "inside"])
def test_an_iterator_is_refused_where_it_would_be_read_twice(where):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, 4))

        def forward(self, x: Tensor, factors) -> Tensor:
            return x @ self.w * next(factors)

    network, given = Scaled(), (iter([1.0]),)
    if where == "inside":
        call = lambda net, x: net.scaled(x, iter([1.0, 2.0]))  # noqa: E731
        network, given = zoo.Net(call, scaled=network), ()
    with pytest.raises(
        ValueError, match=r"is given an iterator \(list_iterator\).*list\(iterator\)"
    ):
        private(network)(torch.randn(3, 4), *given)


class Attributes:
    def __init__(self):
        self.x = torch.zeros(1)


def test_everything_is_put_back():
    module, slotted, data = nn.Linear(1, 1), Slotted(), Attributes()
    module.register_buffer("buffer", torch.zeros(1), persistent=False)
    module.child = nn.Identity()
    module.child.note = ["a"]
    held = {
        "list": [1, [2]], "dict": {"a": 1, "b": 2}, "ordered": OrderedDict(a=1, b=2), "set": {1},
        "deque": deque([1, 2]), "user": UserDict(a=1), "slots": slotted, "object": data,
        "partial": functools.partial(data.__init__), "tuple": ({"c": 1},),
    }  # fmt: skip
    buffer, x = module.buffer, data.x
    objects = Objects((held,), {}, module, with_values=True)
    held["list"][1].append(3)
    held["list"].append(4)
    del held["dict"]["a"]
    held["dict"]["a"] = 1
    held["ordered"].move_to_end("a")
    held["set"].add(2)
    held["deque"].rotate()
    held["user"]["b"] = 2
    held["tuple"][0]["c"] = 2
    slotted.calls, slotted.seen = 1, 2
    data.x.add_(1)
    data.new = 1
    module.buffer = torch.ones(1)
    module.child.note.append("b")
    module.note = 1
    objects.put_back()
    assert held["list"] == [1, [2]]
    assert held["set"] == {1}
    assert held["deque"] == deque([1, 2])
    assert list(held["dict"]) == list(held["ordered"]) == ["a", "b"]
    assert held["user"] == {"a": 1}
    assert held["tuple"][0] == {"c": 1}
    assert slotted.calls == 0
    assert not hasattr(slotted, "seen")
    assert not hasattr(data, "new")
    assert data.x is x
    assert not x.any()
    assert module.buffer is buffer
    assert module.child.note == ["a"]
    assert not hasattr(module, "note")


class Cached(nn.Module):
    """A model of Hugging Face with its default cache, or with one that the caller gives."""

    def __init__(self, kind: str, is_given: bool):
        super().__init__()
        transformers = pytest.importorskip("transformers")
        t5 = dict(
            vocab_size=20, d_model=8, d_kv=4, d_ff=8, num_layers=2, num_heads=2, dropout_rate=0.0,
            pad_token_id=0, decoder_start_token_id=0,
        )  # fmt: skip
        config, model = {
            "T5": (transformers.T5Config(**t5), transformers.T5ForConditionalGeneration),
            "GPT2": (
                transformers.GPT2Config(
                    n_layer=2, n_embd=8, n_head=2, vocab_size=20, n_positions=16, resid_pdrop=0.0,
                    embd_pdrop=0.0, attn_pdrop=0.0,
                ),
                transformers.GPT2LMHeadModel,
            ),
        }[kind]  # fmt: skip
        assert config.use_cache
        self.model, self.is_given, self.kind = model(config), is_given, kind

    def forward(self, ids: Tensor) -> Tensor:
        from transformers import DynamicCache, EncoderDecoderCache

        options = {} if self.kind == "GPT2" else {"decoder_input_ids": ids}
        if self.is_given:
            caches = DynamicCache(), DynamicCache()
            given = caches[0] if self.kind == "GPT2" else EncoderDecoderCache(*caches)
            options["past_key_values"] = given
        return self.model(input_ids=ids, **options).logits


@pytest.mark.parametrize(
    ("kind", "is_given"), in_turn(["T5", "GPT2"], {"made": False, "given": True})
)
def test_caches_as_they_are_by_default(kind, is_given):
    network = Cached(kind, is_given).double()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    batch = torch.randint(1, 20, (3, 5)), torch.randn(3, 5, 20, dtype=torch.float64)
    assert_exact(network, batch, tolerance=1e-6)
