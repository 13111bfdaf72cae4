"""Gradients and activations that are changed in place while a step keeps them."""

import copy
import re
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from ddp_by_hand.experiments.verify_correctness import reference as oracle
from dp_clipping import register_layer
from dp_clipping.capture.checks.kept import KeptValues
from dp_clipping.step.sums import work
from tests.dp_clipping.conftest import MODES, assert_close, clipped_sums, private
from tests.support import registered_layers, zoo
from tests.support.backwards import with_backward
from tests.support.engine import on_any_batches
from tests.support.turns import in_turn
from tests.support.zoo import Net

BATCH, WIDTH, CLIP = 3, 8, 0.01
every_mode = pytest.mark.parametrize("mode", MODES)
CHANGED = "was changed in place in backward"


def through_numpy(g):
    g.detach().numpy()[...] *= 100


def detached(g):
    with torch.no_grad():
        g.detach().view(-1).mul_(100)


WRITES = {
    "mul_": lambda g: g.mul_(100),
    "of a detached view": detached,
    "data": lambda g: g.data.mul_(100),
    "numpy": through_numpy,
}


class Tokens(nn.Embedding):
    def forward(self, x):
        return super().forward((x.detach() > 0).long().sum(-1))


class Apart(registered_layers.Apart):
    """A registered layer without per-sample gradients."""


KINDS = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "embedding": lambda: nn.Embedding(WIDTH + 1, WIDTH),
    "subclass": lambda: Tokens(WIDTH + 1, WIDTH),
    "layer_norm": lambda: nn.LayerNorm(WIDTH),
    "group_norm": lambda: nn.GroupNorm(2, WIDTH),
    "convolution": lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding=1),
    "vmap": lambda: Net(lambda net, x: x + net.bias, bias=nn.Parameter(torch.randn(WIDTH))),
    "table": lambda: Net(
        lambda net, x: (x.unflatten(1, (2, -1)) + net.table).flatten(1),
        table=nn.Parameter(torch.randn(2, WIDTH // 2)),
    ),
    "twice": lambda: Net(  # its factors are joined
        lambda net, x: net.linear(net.linear(x).tanh()), linear=nn.Linear(WIDTH, WIDTH)
    ),
    "cell": lambda: nn.GRUCell(WIDTH, WIDTH),
    "recurrent": lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True),
    "attention": lambda: nn.MultiheadAttention(WIDTH, 2, batch_first=True),
    "registered": lambda: Apart(WIDTH, WIDTH),
}


class Branches(nn.Module):
    """A layer beside a function that changes the gradient of both."""

    def __init__(self, kind, write, layer_first=False):
        super().__init__()
        self.kind, self.write, self.layer_first = kind, write, layer_first
        self.first, self.layer = nn.Linear(WIDTH, WIDTH), KINDS[kind]()
        self.out = nn.Linear(WIDTH, 2)

    def call(self, x):
        if self.kind == "embedding":
            return self.layer((x.detach() > 0).long().sum(-1))
        if self.kind == "convolution":
            return self.layer(x[..., None])[..., 0]
        if self.kind == "recurrent":
            return self.layer(x[:, None])[0][:, 0]
        if self.kind == "attention":
            return self.layer(x[:, None], x[:, None], x[:, None])[0][:, 0]
        return self.layer(x)

    def forward(self, x):
        x = self.first(x)
        if self.layer_first:  # then its backward comes last, and sees what was changed
            a = self.call(x)
            return self.out(a + with_backward(x, self.write))
        b = with_backward(x, self.write)
        return self.out(self.call(x) + b)


def data(size=BATCH):
    draw = torch.Generator().manual_seed(0)
    return torch.randn(size, WIDTH, generator=draw) * 3, torch.randn(size, 2, generator=draw)


def loss(outputs, targets):
    return (outputs - targets).square().mean(1)


def seeded(kind, write, **options):
    torch.manual_seed(0)
    register_layer(
        Apart, norm=registered_layers.gate_norms, weighted_sum=registered_layers.gate_sums
    )
    return Branches(kind, write, **options).train()


def sums_of(network, mode, batch=None, steps=1, before=lambda step: None, **options):
    """The clipped sums of the last of some steps: name -> sum."""
    x, y = batch or data()
    run = on_any_batches(
        module=network, criterion=loss, loss_reduction="sum", grad_sample_mode=mode, lr=0.0,
        noise_multiplier=0.0, **{"max_grad_norm": CLIP} | options,
    )  # fmt: skip
    model, optimizer, criterion = run.model, run.optimizer, run.criterion
    for step in range(steps):
        if step:
            optimizer.step()
            optimizer.zero_grad()
        before(step)
        criterion(model(x), y).backward()
    optimizer.pre_step()
    return {name: p.grad.clone() for name, p in network.named_parameters()}


def one_by_one(network):
    """The same, of one ordinary backward for each sample."""
    return oracle.clipped_sum(oracle.per_sample_gradients(network, data(), loss), CLIP)


def right_or_refused(kind, mode, write, **options):
    """Returns whether a step was refused by the layer's name; else it is the ordinary one."""
    network = seeded(kind, WRITES[write], **options)
    expected = one_by_one(network)
    try:
        found = sums_of(network, mode)
    except RuntimeError as error:
        if not re.match(rf"layer\.[\w, .]*: .*{CHANGED}.*return gradient \* 2", str(error)):
            raise
        return True
    assert_close(found, expected, 1e-4)
    return False


@pytest.mark.parametrize(("kind", "mode"), in_turn(KINDS, MODES))
def test_a_sibling_that_writes_to_the_gradient(kind, mode):
    refused = right_or_refused(kind, mode, "mul_")
    if kind in ("linear", "embedding", "vmap", "table", "registered"):
        assert refused >= (mode == "bookkeeping")
    assert not right_or_refused(kind, mode, "mul_", layer_first=True)


@every_mode
@pytest.mark.parametrize("write", WRITES)
def test_writes_without_a_version_are_seen_where_batches_are_checked(write, mode):
    refused = right_or_refused("linear", mode, write)
    assert refused == (mode != "per_sample")  # which forms G as it arrives


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_no_contribution_is_larger_than_its_threshold(size, clipping):
    """As the first report of it: 40.6 C, of one sample, without a word."""
    network = seeded("linear", WRITES["mul_"])
    groups = {"max_grad_norm": [CLIP] * 3} if clipping == "per_layer" else {}
    with pytest.raises(RuntimeError, match=rf"^layer\.weight: .*{CHANGED}"):
        sums_of(network, "flash_bookkeeping", data(size), clipping=clipping, **groups)


@every_mode
def test_the_cure_works(mode):
    network = seeded("linear", lambda g: g * 100)
    assert_close(sums_of(network, mode), one_by_one(network), 1e-4)


def test_a_change_in_a_later_step():
    """Where no batch is checked: versions are compared in every step."""
    network = seeded("linear", lambda g: None)

    def write_from_now_on(step):
        if step == 20:  # batches 16 and 32 are checked
            network.write = WRITES["mul_"]

    with pytest.raises(RuntimeError, match=CHANGED):
        sums_of(network, "bookkeeping", steps=21, before=write_from_now_on)


@pytest.mark.parametrize("kind", ["linear", "embedding", "table"])
def test_a_change_after_its_norm(kind, monkeypatch):
    """Compares what waits for its sum again; no norm waits here, as on sharded models."""
    monkeypatch.setattr(work, "PENDING_BYTES", -1)
    monkeypatch.setattr(work.Work, "_has_room", lambda self: False)
    for name in ("_kinds", "_staying"):  # what waits in any case: nothing
        own = property(lambda self: (), lambda self, value: None)
        monkeypatch.setattr(work.Work, name, own, raising=False)
    assert right_or_refused(kind, "bookkeeping", "mul_")


def write_output_gradient(*arguments):
    """A hook of a node or a module that has the output's gradient last."""
    arguments[-1][0].mul_(100)


class Hooked(nn.Module):
    """A layer, and hooks on it or beside it that write to gradients."""

    def __init__(self, where):
        super().__init__()
        self.where = where
        self.first, self.layer = (nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.out = nn.Linear(WIDTH, 2)
        if where == "full backward hook":
            self.layer.register_full_backward_hook(write_output_gradient)
        if where == "full backward pre-hook":
            self.layer.register_full_backward_pre_hook(write_output_gradient)

    def forward(self, x):
        x = self.first(x)
        b = x * 1
        a = self.layer(x)
        if self.where == "hook on a sibling":
            b.register_hook(lambda g: g.mul_(100))
        if self.where == "hook on the sibling's node":
            b.grad_fn.register_hook(write_output_gradient)
        if self.where == "hook on the layer's node":
            a.grad_fn.register_hook(write_output_gradient)
        return self.out(a + b)


@every_mode
@pytest.mark.parametrize(
    "where",
    [
        "full backward hook", "full backward pre-hook", "hook on a sibling",
        "hook on the sibling's node", "hook on the layer's node",
    ],
)  # fmt: skip
def test_hooks_that_write(where, mode):
    """What they change beforehand is the gradient; what they change later is refused."""
    torch.manual_seed(0)
    network = Hooked(where).train()
    expected = one_by_one(network)
    try:
        found = sums_of(network, mode)
    except RuntimeError as error:
        if CHANGED not in str(error):
            raise
    else:
        assert_close(found, expected, 1e-4)


class UsedTwice(Branches):
    """The function is between two uses of a layer, whose factors are joined."""

    def forward(self, x):
        x = self.first(x)
        a = self.layer(x)
        b = with_backward(x, self.write)
        return self.out(a + b + self.layer(x))


class Between(Hooked):
    """Its activations are saved as they are, by hooks behind which no version is compared."""

    def forward(self, x):
        with saved_tensors_hooks(lambda z: z, lambda z: z):
            x = self.first(x).tanh() * 1

            def change(_):
                x.data.mul_(100)

            b = with_backward(x, change)
            return self.out(self.layer(x) + b)


@every_mode
@pytest.mark.parametrize(
    "build", [lambda: UsedTwice("linear", WRITES["mul_"]), lambda: Between("")],
    ids=["a_gradient_between_two_uses", "activations"],
)  # fmt: skip
def test_a_change_of_what_waits(build, mode):
    torch.manual_seed(0)
    network = build().train()
    if mode == "per_sample":
        assert_close(sums_of(network, mode), one_by_one(network), 1e-4)
        return
    with pytest.raises(RuntimeError, match=rf"^layer\.weight: .*{CHANGED}"):
        sums_of(network, mode)


def test_a_backward_that_counts_its_calls():
    calls = []

    def write(g):
        calls.append(1)
        return g * len(calls)

    with pytest.raises(RuntimeError, match=r"in the second backward of this mode.*bookkeeping"):
        sums_of(seeded("linear", write, layer_first=True), "ghost")


class OnGPU(torch.Tensor):
    is_cuda = True


@pytest.mark.parametrize("change", [0, 1])
def test_ids_are_compared_exactly_on_a_gpu(change):
    values, record = KeptValues(), private(nn.Linear(2, 2)).capture.trained[0]
    ids = torch.randint(10_000, (3, 64))
    values.compare_backwards(record, "embedding", [ids.as_subclass(OnGPU)])
    ids[1, 5] += change
    with pytest.raises(RuntimeError, match="other inputs") if change else nullcontext():
        values.compare_backwards(record, "embedding", [ids.as_subclass(OnGPU)])


@pytest.mark.gpu
def test_kernels_that_add_in_another_order_each_time():
    """Runs two backwards of padding by reflection, which differ in 16 bit by more than float32."""
    network = nn.Sequential(
        nn.Conv2d(64, 64, 3, padding=1),
        *[nn.Conv2d(64, 64, 3, padding=1, padding_mode="reflect") for _ in range(3)],
    ).to("cuda", torch.bfloat16)
    x, y = (torch.randn(4, 64, 5, 5, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for mode in ("ghost", "flash"):
        model = private(copy.deepcopy(network), mode)
        clipped_sums(model, (x, y), zoo.product)
        assert model.per_sample_gradient_norms.isfinite().all()


class Keys(nn.Module):
    """Adds a number that its loss does not see, whose gradient is what rounding leaves."""

    def __init__(self):
        super().__init__()
        self.first, self.key, self.out = (nn.Linear(WIDTH, n) for n in (WIDTH, 4, 2))
        self.noise = 0.0

    def forward(self, x):
        key = with_backward(self.key(x), self.draw)
        return self.out(self.first(x)) + 0 * key.sum(1, keepdim=True)

    def draw(self, g):
        self.noise = 1e-9 if not self.noise else -2 * self.noise
        return g + self.noise


def test_rounding_need_not_repeat_itself():
    torch.manual_seed(0)
    sums_of(Keys().train(), "ghost", max_grad_norm=1.0)


def check_on_kernels() -> None:
    right_or_refused("linear", "flash", "mul_")
    for kind in ("linear", "embedding", "layer_norm", "convolution", "vmap", "table"):
        refused = right_or_refused(kind, "flash_bookkeeping", "mul_")
        assert refused or kind in ("embedding", "convolution"), kind
    for clipping, mode in (("per_layer", "flash_bookkeeping"), ("flat", "flash")):
        groups = {"max_grad_norm": [CLIP] * 3} if clipping == "per_layer" else {}
        with pytest.raises(RuntimeError, match=CHANGED):
            sums_of(seeded("linear", WRITES["data"]), mode, clipping=clipping, **groups)
    assert_close(
        sums_of(seeded("linear", lambda g: g * 100), "flash_bookkeeping"),
        one_by_one(seeded("linear", lambda g: g * 100)), 1e-4,
    )  # fmt: skip


def test_on_kernels(interpreter):
    """What waits for a launch is compared before norms too."""
    interpreter.run(check_on_kernels)
