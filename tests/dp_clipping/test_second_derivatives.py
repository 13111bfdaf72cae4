"""Networks that differentiate in their own forward, as for forces from an energy."""

import contextlib

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from ddp_by_hand.experiments.verify_correctness import reference as oracle
from tests.dp_clipping.conftest import MODES, assert_close
from tests.support.engine import on_any_batches
from tests.support.turns import in_turn

every_mode = pytest.mark.parametrize("mode", MODES)
WIDTH, CLIP = 5, 0.5


class Energy(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 16), nn.Linear(16, 1)

    def energy(self, x):
        return self.second(F.softplus(self.first(x)))

    def total(self, x):
        return self.energy(x).sum()

    def forward(self, x):
        x = x.clone().requires_grad_(True)
        energy = self.energy(x)
        (slope,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return torch.cat([energy, -slope], 1)


# ---- other ways to the same derivative ---------------------------------------------------------


class Jacobian(Energy):
    def forward(self, x):
        slope = torch.autograd.functional.jacobian(self.total, x, create_graph=True)
        return torch.cat([self.energy(x), -slope], 1)


class Dual(Energy):
    """The same in forward mode."""

    def forward(self, x):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, torch.ones_like(x))
            energy, along = forward_ad.unpack_dual(self.energy(dual))
        return torch.cat([energy, along.expand(-1, WIDTH)], 1)


class Constant(Energy):
    """A gradient that is not differentiated again, and layers that are called again."""

    def forward(self, x):
        with torch.enable_grad():
            z = x.detach().requires_grad_(True)
            (slope,) = torch.autograd.grad(self.total(z), z)
        return torch.cat([self.energy(x * slope), x], 1)


# ---- other layers ------------------------------------------------------------------------------


class Norms(Energy):
    def __init__(self):
        super().__init__()
        self.norm, self.other = nn.LayerNorm(16), nn.RMSNorm(16)

    def energy(self, x):
        return self.second(self.other(self.norm(self.first(x)).tanh()))


class Tied(Energy):
    def __init__(self):
        super().__init__()
        self.first, self.again = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.again.weight, self.second = self.first.weight, nn.Linear(WIDTH, 1)

    def energy(self, x):
        return self.second(self.again(self.first(x).tanh()).tanh())


class Checkpointed(Energy):
    def energy(self, x):
        return self.second(checkpoint(lambda z: self.first(z).tanh(), x, use_reentrant=False))


class WithinCheckpoint(Energy):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class Recurrent(Energy):
    kind, packs = nn.GRU, False

    def __init__(self):
        super().__init__()
        self.first = self.kind(WIDTH, 16, batch_first=True)

    def energy(self, x):
        x = torch.stack([x, 2 * x], 1)
        if self.packs:
            x = pack_padded_sequence(x, [2] * len(x), batch_first=True)
        y = self.first(x)[0]
        y = pad_packed_sequence(y, batch_first=True)[0] if self.packs else y
        return self.second(y[:, -1])


class OneByOne(Recurrent):
    """A layer is called for each sample, without a dimension for it."""

    def energy(self, x):
        return self.second(torch.stack([self.first(row[None])[0][-1] for row in x]))


class Critic(Energy):
    """A frozen part is differentiated, by `torch.func` and by autograd."""

    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1))
        self.critic.requires_grad_(False)

    def forward(self, x):
        h = x + self.energy(x)
        slope = torch.func.grad(lambda z: self.critic(z).sum())(h)
        z = h.detach().requires_grad_(True)
        with torch.enable_grad():
            (other,) = torch.autograd.grad(self.critic(z).pow(2).sum(), z, create_graph=True)
        return torch.cat([self.energy(x), slope + other], 1)


class FixedPoint(Energy):
    """An implicit layer: backward solves for the gradient at z = f(z), by gradients of f."""

    def forward(self, x):
        with torch.no_grad():
            z = self.step(x, torch.zeros(len(x), 16))
        z = self.step(x, z)
        before = z.detach().requires_grad_(True)
        again = self.step(x, before)

        def solve(gradient):
            (further,) = torch.autograd.grad(again, before, gradient, retain_graph=True)
            return gradient + further

        if z.requires_grad:
            z.register_hook(solve)
        return torch.cat([self.second(z), x], 1)

    def step(self, x, z):
        return torch.tanh(self.first(x + z[:, :WIDTH]))


NETWORKS = (
    Energy, Jacobian, Dual, Constant, Norms, Tied, Checkpointed, WithinCheckpoint, Recurrent,
    OneByOne, Critic, FixedPoint,
)  # fmt: skip


# ---- steps -------------------------------------------------------------------------------------


def data(size=8):
    draw = torch.Generator().manual_seed(1)
    return torch.randn(size, WIDTH, generator=draw), torch.randn(size, 1 + WIDTH, generator=draw)


def loss(outputs, targets):
    return (outputs - targets).square().mean(1)


def trained(network, mode, **options):
    run = on_any_batches(
        module=network, criterion=loss, loss_reduction="sum", grad_sample_mode=mode, lr=0.0,
        noise_multiplier=0.0, batch_size=4, **{"max_grad_norm": CLIP} | options,
    )  # fmt: skip
    return run.model, run.optimizer, run.criterion, run.loader


def sums_of(network, mode, **options):
    model, optimizer, criterion, _ = trained(network, mode, **options)
    x, y = data(4)
    criterion(model(x), y).backward()
    optimizer.pre_step()
    return {n: p.grad.clone() for n, p in network.named_parameters() if p.requires_grad}


def expected_of(network):
    """The clipped sum, of one ordinary backward for each sample."""
    return oracle.clipped_sum(oracle.per_sample_gradients(network, data(4), loss), CLIP)


def build(kind):
    torch.manual_seed(0)
    return kind().train()


@pytest.mark.parametrize(
    ("kind", "mode"), in_turn([pytest.param(n, id=n.__name__) for n in NETWORKS], MODES)
)
def test_a_network_that_differentiates_in_its_forward(kind, mode):
    network = build(kind)
    expected = expected_of(network)
    assert_close(sums_of(network, mode), expected, 1e-4)


# ---- what is refused ---------------------------------------------------------------------------


def by_vmap(network, x):
    return torch.func.vmap(torch.func.grad(network.total))(x)


def by_jvp(network, x):
    return torch.func.jvp(network.energy, (x,), (torch.ones_like(x),))[1].expand(-1, WIDTH)


def by_vjp(network, x):
    energy, pull = torch.func.vjp(network.energy, x)
    return pull(torch.ones_like(energy))[0]


TRANSFORMS = {
    "grad": lambda network, x: torch.func.grad(network.total)(x),
    "vmap of grad": by_vmap,
    "jvp": by_jvp,
    "vjp": by_vjp,
}


class Transformed(Energy):
    def __init__(self, transform, after=0):
        super().__init__()
        self.transform, self.after = transform, after

    def forward(self, x):
        if len(x) < self.after:
            return torch.cat([self.energy(x), x], 1)
        return torch.cat([self.energy(x), self.transform(self, x)], 1)


@pytest.mark.parametrize(("name", "mode"), in_turn(TRANSFORMS, MODES))
def test_transforms_of_torch_func_are_refused_by_what_they_are(name, mode):
    network = build(lambda: Transformed(TRANSFORMS[name]))
    with pytest.raises(
        ValueError, match=r"transform of torch\.func.*torch\.autograd\.grad\(energy\.sum\(\), x"
    ):
        sums_of(network, mode)


class Later(Transformed):
    """Differentiates in batches that are not the first."""

    begins = False

    def forward(self, x):
        slope = self.transform(self, x) if self.begins else x
        return torch.cat([self.energy(x) + self.energy(2 * x), slope], 1)


def by_autograd(network, x):
    x = x.clone().requires_grad_(True)
    return torch.autograd.grad(network.total(x), x, create_graph=True)[0]


def constant(network, x):
    z = x.detach().requires_grad_(True)
    return torch.autograd.grad(network.total(z), z)[0]


LATER = (TRANSFORMS["grad"], by_jvp, by_autograd, constant)


@every_mode
@pytest.mark.parametrize("transform", LATER)
def test_derivatives_that_begin_later(transform, mode, monkeypatch):
    """They are refused, and `reset_batch_layouts` is the cure for those that can be had."""
    network = build(lambda: Later(transform))
    model, optimizer, criterion, _ = trained(network, mode)
    x, y = data(4)
    for _ in range(2):  # the second batch is checked, the third is not
        criterion(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    monkeypatch.setattr(Later, "begins", True)
    if (transform, mode) != (constant, "per_sample"):  # which is right
        with pytest.raises((RuntimeError, ValueError), match=r"torch\.autograd\.grad\(energy"):
            model(x)
    if transform in LATER[:2]:
        return
    expected = expected_of(network)
    model.reset_batch_layouts()
    optimizer.zero_grad()
    criterion(model(x), y).backward()
    optimizer.pre_step()
    assert_close({n: p.grad for n, p in network.named_parameters()}, expected, 1e-4)


class Backward(Energy):
    def forward(self, x):
        z = x.detach().requires_grad_(True)
        with torch.enable_grad():
            self.total(z).backward()
        return torch.cat([self.energy(x * z.grad), x], 1)


@every_mode
def test_backward_in_a_forward_is_refused_by_what_it_is(mode):
    network = build(Backward)
    with pytest.raises(RuntimeError, match=r"forward calls backward\(\).*torch\.autograd\.grad"):
        sums_of(network, mode)


class Plain(Energy):
    def forward(self, x):
        return torch.cat([self.energy(x), x], 1)


@every_mode
@pytest.mark.parametrize("kind", [Plain, Norms])
def test_a_penalty_in_the_loop_is_refused(kind, mode):
    """A gradient of outputs that is differentiated again; in the forward it is right."""

    class Outputs(kind):
        forward = Plain.forward

    model, *_ = trained(build(Outputs), mode)
    x = data(4)[0].requires_grad_(True)
    outputs = model(x)
    with pytest.raises(RuntimeError, match=r"create_graph=True.*in the forward of the network"):
        torch.autograd.grad(outputs.sum(), x, create_graph=True)


class Twice(Energy):
    """Layers with two uses."""

    def forward(self, x):
        return torch.cat([self.energy(x) + self.energy(2 * x), x], 1)


@every_mode
@pytest.mark.parametrize("same_forward", [False, True])
@pytest.mark.parametrize("kind", [Plain, Twice])
def test_a_gradient_in_the_loop_that_is_not_differentiated(kind, same_forward, mode):
    """As an attack on inputs takes it: right, or refused, and the step after it is right."""
    network = build(kind)
    expected = expected_of(network)
    model, optimizer, criterion, _ = trained(network, mode)
    x, y = data(4)
    z = x.clone().requires_grad_(True)
    outputs = model(z)
    with contextlib.suppress(RuntimeError):
        torch.autograd.grad(outputs.sum(), z, retain_graph=True)
    criterion(outputs if same_forward else model(x), y).backward()
    optimizer.pre_step()
    assert_close({n: p.grad for n, p in network.named_parameters()}, expected, 1e-4)


class Packed(Recurrent):
    packs = True


class WithoutDerivative(Energy):
    """Attention's fast path on a CPU has no second derivative."""

    def forward(self, x):
        z = self.first(x).view(-1, 1, 4, 4).requires_grad_(True)
        energy = F.scaled_dot_product_attention(z, z, z)
        (slope,) = torch.autograd.grad(energy.sum(), z, create_graph=True)
        return torch.cat([self.second(slope.flatten(1)), x], 1)


CAUSES = {
    Packed: "first .GRU. is differentiated in the network's forward.*give it padded ones",
    WithoutDerivative: "derivative for aten.*is not implemented",
}


@pytest.mark.parametrize("kind", CAUSES)
def test_what_cannot_be_differentiated_is_told_as_it_is(kind):
    with pytest.raises((RuntimeError, ValueError), match=CAUSES[kind]) as raised:
        sums_of(build(kind), "flash_bookkeeping")
    assert "number of samples" not in str(raised.value)
