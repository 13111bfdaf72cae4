"""Objects that blocks fill and read within one step, and what trials leave in them: nothing."""

import copy
import functools
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from tests.dp_clipping.conftest import MODES, assert_step, private
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


class Around(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain, self.turn = nn.Parameter(torch.rand(4) + 0.5), nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor, is_first: bool) -> Tensor:
        if is_first:
            self.mean = x.mean(1, keepdim=True)
            return (x - self.mean) * self.gain @ self.turn
        return x @ self.turn.detach() / self.gain + self.mean


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


class Leaves(nn.Module):
    """Runs under vmap, or one sample after another, and leaves what it computes in an object."""

    def __init__(self, leave, in_turn):
        super().__init__()
        self.start, self.leave, self.in_turn = nn.Parameter(torch.randn(4)), leave, in_turn

    def forward(self, x: Tensor, memory) -> Tensor:
        y = x.clone()
        y[:, 0] = self.start
        if self.in_turn:
            y = torch.stack([row if row.sum() > 0 else -row for row in y])
        self.leave(memory, y.tanh())
        return y


class TakesUp(nn.Module):
    """Uses what a module has left in an object that it was given."""

    def __init__(self, make, leave, take, in_turn=False):
        super().__init__()
        self.leaves, self.end = Leaves(leave, in_turn), nn.Linear(4, 4)
        self.make, self.take = make, take

    def forward(self, x: Tensor) -> Tensor:
        memory = self.make()
        y = self.leaves(x, memory)
        return self.end(y * self.take(memory, y))


LEFT = {
    "a list": (list, lambda memory, y: memory.append(y), lambda memory, y: memory.pop()),
    "a dict": (dict, lambda memory, y: memory.update(y=y), lambda memory, y: memory["y"]),
    "a dataclass": (
        Context, lambda memory, y: setattr(memory, "seen", (y,)), lambda memory, y: memory.seen[0]
    ),
    "a number": (
        Context, lambda memory, y: setattr(memory, "calls", len(y)),
        lambda memory, y: memory.calls / max(len(y), 1),
    ),
}  # fmt: skip
NETWORKS = {
    **{f"{name} under vmap": functools.partial(TakesUp, *how) for name, how in LEFT.items()},
    **{f"{name} in turn": functools.partial(TakesUp, *how, True) for name, how in LEFT.items()},
    "a list": lambda: Skips(list),
    "a list, without vmap": lambda: Skips(list, elementwise=True),
    "a list that is kept": lambda: Skips(list, is_kept=True),
    "a dataclass": lambda: Through(Context),
    "slots": lambda: Through(Slotted),
    "statistics of the first call": lambda: zoo.Net(
        lambda net, x: net.around(net.between(net.around(x, True)), False),
        around=Around(), between=nn.Linear(4, 4),
    ),
    "tables": Kept,
    "of a parameter": Twice,
}  # fmt: skip


STYLES = {
    "bookkeeping": {}, "per_sample": {"mode": "per_sample"}, "ghost": {"mode": "ghost"},
    "units": {"units": 2},
}  # fmt: skip


@pytest.mark.parametrize(("name", "options"), in_turn(NETWORKS, STYLES))
def test_state_of_one_step_trains(name, options):
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

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, memory: list) -> Tensor:
        y = self.layer(x) + sum(memory)
        memory[:] = [y.detach()]
        return y


def test_an_object_that_carries_from_step_to_step_is_refused():
    x, memory = torch.randn(4, 4), []
    model = private(Recalls())
    model(x, memory)
    model(x, [])
    for again in (memory, memory[:]):
        with pytest.raises(ValueError, match=r"an argument holds what an earlier.*memory=\[\]"):
            model(x, again)
    for size in (4, 2, 0, 3):
        memory = []
        model(x[:size], memory)
        assert memory[0].shape == (size, 4)


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


class Records(Matrix):
    """Weighs what a layer returns in each call; its first forward registers the hook for that."""

    def __init__(self):
        super().__init__()
        self.weights, self.records, self.is_hooked = nn.Parameter(torch.randn(2)), [], False

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_hooked:
            self.layer.register_forward_hook(lambda module, args, y: self.records.append(y))
            self.is_hooked = True
        self.records.clear()
        self.layer(self.product(x).tanh())
        y = torch.stack(self.records, 1)
        self.records.clear()
        return (y * self.weights.view(-1, 1)).sum(1)


def test_a_hook_of_the_first_forward_is_registered_once():
    """As Hugging Face's models register hooks for hidden states, whose weighted sum is read."""
    assert_exact_in_each(nn.Sequential(Records(), nn.Linear(4, 2)), (4,))


class Dropped(Matrix):
    """Lists what its layers return, of which it leaves out one at random."""

    def forward(self, x: Tensor) -> dict:
        y = self.product(x)
        states = (x, y) if torch.rand(()) < 0.5 else (y,)
        return {"states": states, "y": y}


@pytest.mark.parametrize("one_by_one", [False, True])
def test_lists_of_other_lengths_are_empty_in_steps(one_by_one, caplog):
    """Such lists are the hidden states of transformers' models of speech, under LayerDrop."""

    def unread(net, x):
        y = net.dropped(x)["y"]
        return net.out(y if not one_by_one or y.isfinite().all() else x) * net.scale

    parts = {"dropped": Dropped(), "out": nn.Linear(4, 2), "scale": nn.Parameter(torch.ones(2))}
    network = zoo.Net(unread, **parts).double()
    model = private(copy.deepcopy(network))
    for _ in range(12):
        x, y = (torch.randn(3, n, dtype=torch.float64) for n in (4, 2))
        assert_step(model, network, (x, y))
    assert caplog.text.count("does not list as many tensors in each forward") == 1


def test_a_list_of_other_lengths_that_is_read_is_empty():
    read = zoo.Net(
        lambda net, x: net.out(net.dropped(x)["states"][-1]), dropped=Dropped(), out=nn.Linear(4, 2)
    )
    model = private(read)

    def train():
        for _ in range(12):
            model(torch.randn(8, 4))

    with pytest.raises((IndexError, ValueError), match="tuple index out of range"):
        train()
    assert len(model.eval()(torch.randn(8, 4))) == 8
