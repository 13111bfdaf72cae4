"""Networks that differentiate in their own forward, as for forces from an energy."""

import contextlib
from collections.abc import Callable

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


def by_autograd(net, x):
    """Returns energies and slopes [B, 1 + WIDTH]."""
    x = x.clone().requires_grad_(True)
    energy = net.energy(x)
    (slope,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
    return torch.cat([energy, -slope], 1)


def softplus(net, x):
    return net.second(F.softplus(net.first(x)))


class Energy(nn.Module):
    """Computes energies of samples [B, WIDTH], and in `forward` what else is returned of them.

    `members` are further layers, or others in the place of the two of `softplus`.
    """

    def __init__(self, forward: Callable = by_autograd, energy: Callable = softplus, **members):
        super().__init__()
        self.run, self.of = forward, energy
        layers = {"first": nn.Linear(WIDTH, 16), "second": nn.Linear(16, 1)}
        for name, layer in (layers | members).items():
            setattr(self, name, layer)

    def energy(self, x):
        return self.of(self, x)

    def total(self, x):
        return self.energy(x).sum()

    def forward(self, x):
        return self.run(self, x)


def by_jacobian(net, x):
    slope = torch.autograd.functional.jacobian(net.total, x, create_graph=True)
    return torch.cat([net.energy(x), -slope], 1)


def dual(net, x):
    """The same in forward mode."""
    with forward_ad.dual_level():
        inputs = forward_ad.make_dual(x, torch.ones_like(x))
        energy, along = forward_ad.unpack_dual(net.energy(inputs))
    return torch.cat([energy, along.expand(-1, WIDTH)], 1)


def slope(net, x):
    """Is not differentiated again."""
    z = x.detach().requires_grad_(True)
    with torch.enable_grad():
        return torch.autograd.grad(net.total(z), z)[0]


def tied() -> nn.Module:
    net = Energy(
        energy=lambda net, x: net.second(net.again(net.first(x).tanh()).tanh()),
        first=nn.Linear(WIDTH, WIDTH), again=nn.Linear(WIDTH, WIDTH), second=nn.Linear(WIDTH, 1),
    )  # fmt: skip
    net.again.weight = net.first.weight
    return net


def recurrent(net, x):
    return net.second(net.first(torch.stack([x, 2 * x], 1))[0][:, -1])


def packed(net, x):
    given = pack_padded_sequence(torch.stack([x, 2 * x], 1), [2] * len(x), batch_first=True)
    return net.second(pad_packed_sequence(net.first(given)[0], batch_first=True)[0][:, -1])


def one_by_one(net, x):
    """A layer is called for each sample, without a dimension for it."""
    return net.second(torch.stack([net.first(row[None])[0][-1] for row in x]))


def with_critic(net, x):
    """A frozen part is differentiated, by `torch.func` and by autograd."""
    h = x + net.energy(x)
    first = torch.func.grad(lambda z: net.critic(z).sum())(h)
    z = h.detach().requires_grad_(True)
    with torch.enable_grad():
        (other,) = torch.autograd.grad(net.critic(z).pow(2).sum(), z, create_graph=True)
    return torch.cat([net.energy(x), first + other], 1)


def fixed_point(net, x):
    """An implicit layer: backward solves for the gradient at z = f(z), by gradients of f."""

    def step(z):
        return torch.tanh(net.first(x + z[:, :WIDTH]))

    with torch.no_grad():
        z = step(torch.zeros(len(x), 16))
    z = step(z)
    before = z.detach().requires_grad_(True)
    again = step(before)

    def solve(gradient):
        (further,) = torch.autograd.grad(again, before, gradient, retain_graph=True)
        return gradient + further

    if z.requires_grad:
        z.register_hook(solve)
    return torch.cat([net.second(z), x], 1)


def gru() -> nn.Module:
    return nn.GRU(WIDTH, 16, batch_first=True)


def norms(**options) -> nn.Module:
    return Energy(
        energy=lambda net, x: net.second(net.other(net.norm(net.first(x)).tanh())),
        norm=nn.LayerNorm(16), other=nn.RMSNorm(16), **options,
    )  # fmt: skip


def recomputed(net, x):
    return net.second(checkpoint(lambda z: net.first(z).tanh(), x, use_reentrant=False))


NETWORKS = {
    "autograd": Energy,
    "jacobian": lambda: Energy(by_jacobian),
    "forward mode": lambda: Energy(dual),
    "constant, and layers that are called again": lambda: Energy(
        lambda net, x: torch.cat([net.energy(x * slope(net, x)), x], 1)),
    "norms": norms,
    "tied": tied,
    "checkpointed": lambda: Energy(energy=recomputed),
    "within a checkpoint": lambda: Energy(
        lambda net, x: checkpoint(by_autograd, net, x, use_reentrant=False)),
    "recurrent": lambda: Energy(energy=recurrent, first=gru()),
    "one by one": lambda: Energy(energy=one_by_one, first=gru()),
    "critic": lambda: Energy(with_critic, critic=nn.Sequential(
        nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1)).requires_grad_(False)),
    "fixed point": lambda: Energy(fixed_point),
}  # fmt: skip


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


@pytest.mark.parametrize(("name", "mode"), in_turn(NETWORKS, MODES))
def test_a_network_that_differentiates_in_its_forward(name, mode):
    network = build(NETWORKS[name])
    expected = expected_of(network)
    assert_close(sums_of(network, mode), expected, 1e-4)


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


@pytest.mark.parametrize(("name", "mode"), in_turn(TRANSFORMS, MODES))
def test_transforms_of_torch_func_are_refused_by_what_they_are(name, mode):
    transform = TRANSFORMS[name]
    network = build(lambda: Energy(lambda net, x: torch.cat([net.energy(x), transform(net, x)], 1)))
    with pytest.raises(
        ValueError, match=r"transform of torch\.func.*torch\.autograd\.grad\(energy\.sum\(\), x"
    ):
        sums_of(network, mode)


class Bare(nn.Module):
    """Differentiates by its own parameter's code, without a layer."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x):
        return torch.func.grad(lambda z: (z @ self.weight).tanh().sum())(x)


def test_a_transform_of_a_parameter_is_refused_by_what_it_is():
    with pytest.raises(
        ValueError, match=r"transform of torch\.func.*torch\.autograd\.grad\(energy\.sum\(\), x"
    ):
        sums_of(build(Bare), "bookkeeping")


def differentiated(network, x):
    x = x.clone().requires_grad_(True)
    return torch.autograd.grad(network.total(x), x, create_graph=True)[0]


LATER = (TRANSFORMS["grad"], by_jvp, differentiated, slope)


@every_mode
@pytest.mark.parametrize("transform", LATER)
def test_derivatives_that_begin_later(transform, mode):
    """They are refused, and `reset_batch_layouts` is the cure for those that can be had."""
    begins = []  # in batches that are not the first

    def forward(net, x):
        more = transform(net, x) if begins else x
        return torch.cat([net.energy(x) + net.energy(2 * x), more], 1)

    network = build(lambda: Energy(forward))
    model, optimizer, criterion, _ = trained(network, mode)
    x, y = data(4)
    for _ in range(2):  # the second batch is checked, the third is not
        criterion(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    begins.append(True)
    if (transform, mode) != (slope, "per_sample"):  # which is right
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


@every_mode
def test_backward_in_a_forward_is_refused_by_what_it_is(mode):
    def forward(net, x):
        z = x.detach().requires_grad_(True)
        with torch.enable_grad():
            net.total(z).backward()
        return torch.cat([net.energy(x * z.grad), x], 1)

    network = build(lambda: Energy(forward))
    with pytest.raises(RuntimeError, match=r"forward calls backward\(\).*torch\.autograd\.grad"):
        sums_of(network, mode)


def plain(net, x):
    return torch.cat([net.energy(x), x], 1)


def twice(net, x):
    """Layers have two uses."""
    return torch.cat([net.energy(x) + net.energy(2 * x), x], 1)


@every_mode
@pytest.mark.parametrize("kind", [Energy, norms])
def test_a_penalty_in_the_loop_is_refused(kind, mode):
    """A gradient of outputs that is differentiated again; in the forward it is right."""
    model, *_ = trained(build(lambda: kind(forward=plain)), mode)
    x = data(4)[0].requires_grad_(True)
    outputs = model(x)
    with pytest.raises(RuntimeError, match=r"create_graph=True.*in the forward of the network"):
        torch.autograd.grad(outputs.sum(), x, create_graph=True)


@every_mode
@pytest.mark.parametrize("same_forward", [False, True])
@pytest.mark.parametrize("forward", [plain, twice])
def test_a_gradient_in_the_loop_that_is_not_differentiated(forward, same_forward, mode):
    """As an attack on inputs takes it: right, or refused, and the step after it is right."""
    network = build(lambda: Energy(forward))
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


def by_attention(net, x):
    """Attention's fast path on a CPU has no second derivative."""
    z = net.first(x).view(-1, 1, 4, 4).requires_grad_(True)
    energy = F.scaled_dot_product_attention(z, z, z)
    (found,) = torch.autograd.grad(energy.sum(), z, create_graph=True)
    return torch.cat([net.second(found.flatten(1)), x], 1)


@pytest.mark.parametrize(
    ("make", "cause"),
    [
        (lambda: Energy(energy=packed, first=gru()),
         "first .GRU. is differentiated in the network's forward.*give it padded ones"),
        (lambda: Energy(by_attention), "derivative for aten.*is not implemented"),
    ],
    ids=["packed", "attention"],
)  # fmt: skip
def test_what_cannot_be_differentiated_is_told_as_it_is(make, cause):
    with pytest.raises((RuntimeError, ValueError), match=cause) as raised:
        sums_of(build(make), "flash_bookkeeping")
    assert "number of samples" not in str(raised.value)
