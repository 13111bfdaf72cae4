"""Hooks of users on parameters see the noisy gradient once a step, and change it."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ddp import wrap
from dp_clipping import PrivacyEngine


def batch():
    return torch.randn(6, 4), torch.randn(6, 3)


def made(network, noise_multiplier=0.0, optimizer=None, **options):
    """A private run of few steps, whose noise follows from a seed."""
    generator = torch.Generator().manual_seed(3)
    engine = PrivacyEngine()
    own = engine.make_private(
        module=network, optimizer=optimizer or torch.optim.SGD(network.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(*batch()), batch_size=6), criterion=nn.MSELoss(),
        noise_multiplier=noise_multiplier, max_grad_norm=0.1, poisson_sampling=False,
        noise_generator=generator, **options,
    )  # fmt: skip
    return engine, *own[:3]


def gradients(run, inputs):
    """Gradients that the optimizer is about to apply."""
    _, model, optimizer, criterion = run
    criterion(model(inputs[0]), inputs[1]).backward()
    optimizer.pre_step()
    return {n: p.grad.clone() for n, p in model.network.named_parameters()}


@pytest.fixture
def network():
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


pytestmark = pytest.mark.filterwarnings("ignore:(noise and sampling|poisson_sampling=False)")


@pytest.mark.parametrize("mode", ["flash_bookkeeping", "ghost", "per_sample"])
@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_a_hook_changes_the_noisy_gradient(network, mode, noise):
    inputs, projection = batch(), torch.randn(5, 5)
    plain = gradients(made(copy.deepcopy(network), noise, grad_sample_mode=mode), inputs)
    seen = []
    network[0].weight.register_hook(lambda g: projection @ g)
    network[0].weight.register_hook(lambda g: seen.append(g.clone()))
    network[2].bias.register_hook(lambda g: [g.zero_(), None][1])
    run = made(network, noise, grad_sample_mode=mode)
    hooked = gradients(run, inputs)
    torch.testing.assert_close(hooked["0.weight"], projection @ plain["0.weight"])
    assert not hooked["2.bias"].any()
    for name in ("0.bias", "2.weight"):
        torch.testing.assert_close(hooked[name], plain[name])
    assert [torch.equal(x, hooked["0.weight"]) for x in seen] == [True], "once a step, in order"
    run[2].step()
    assert len(seen) == 1, "pre_step and step are one"


def test_a_check_is_of_the_gradient_before_hooks(network):
    seen = []
    network[0].weight.register_hook(lambda g: seen.append(g) or 3 * g)
    engine, model, _, criterion = made(network)
    report = engine.check(model, batch(), loss=lambda m, c, b: c(m(b[0]), b[1]))
    assert report.ok, report
    criterion(model(batch()[0]), batch()[1]).backward()
    assert not seen, "no gradient without noise"


def test_hooks_are_back_on_a_standard_module(network):
    handle = network[0].weight.register_hook(lambda g: 2 * g)
    gone = network[0].weight.register_hook(lambda g: 5 * g)
    run = made(network)
    gone.remove()
    first = gradients(run, inputs := batch())["0.weight"]
    run[2].step()
    plain = run[1].to_standard_module()
    plain.zero_grad()
    plain(torch.ones(1, 4)).sum().backward()
    hooked = plain[0].weight.grad
    handle.remove()
    plain.zero_grad()
    plain(torch.ones(1, 4)).sum().backward()
    torch.testing.assert_close(hooked, 2 * plain[0].weight.grad)
    assert first.any(), inputs


def test_a_later_hook_is_on_the_standard_module_too(network):
    network[0].weight.register_hook(lambda g: 2 * g)
    run = made(network)
    network[0].weight.register_hook(lambda g: 3 * g)
    plain = run[1].to_standard_module()
    alone = copy.deepcopy(plain)
    for one in (plain, alone):
        one(torch.ones(1, 4)).sum().backward()
    torch.testing.assert_close(plain[0].weight.grad, 6 * alone[0].weight.grad)


@pytest.mark.parametrize("wrong", [lambda g: g[0], lambda g: g.double(), lambda g: 0])
def test_what_a_hook_returns_is_like_the_gradient(network, wrong):
    network[0].weight.register_hook(wrong)
    run = made(network)
    with pytest.raises((RuntimeError, TypeError), match=r"to assign a gradient|assigned grad"):
        gradients(run, batch())


@pytest.mark.parametrize("other", ["hook", "noise"])
def test_a_refused_make_private_leaves_hooks_where_they_were(network, other):
    network[0].weight.register_hook(lambda g: 2 * g)
    handle = other == "hook" and network[2].bias.register_post_accumulate_grad_hook(print)
    with pytest.raises(ValueError, match="has a hook" if handle else "beyond float32"):
        made(network, noise_multiplier=1.0 if handle else 1e300)
    if handle:
        handle.remove()
    plain = copy.deepcopy(network)  # hooks are not copied
    for one in (network, plain):
        one(torch.ones(1, 4)).sum().backward()
    torch.testing.assert_close(network[0].weight.grad, 2 * plain[0].weight.grad)
    assert made(network)


def test_hooks_that_would_not_be_called_are_refused(network):
    handle = network[0].weight.register_post_accumulate_grad_hook(print)
    with pytest.raises(ValueError, match=r"0\.weight has a hook of register_post.*register_hook"):
        made(network)
    handle.remove()
    _, model, _, criterion = made(network)
    x, y = batch()
    for name in ("register_hook", "register_post_accumulate_grad_hook"):
        handle = getattr(network[2].bias, name)(print)
        with pytest.raises(RuntimeError, match=r"2\.bias was given a hook after make_private"):
            criterion(model(x), y).backward()
        handle.remove()
        model.zero_grad()
    model.zero_grad()
    criterion(model(x), y).backward()


def test_a_hook_that_fails_drops_the_step(network):
    def fail(gradient):
        raise ArithmeticError

    network[0].weight.register_hook(fail)
    run = made(network, 1.0)
    with pytest.raises(ArithmeticError):
        gradients(run, batch())
    assert all(p.grad is None for p in network.parameters())


def of_ranks(context, name):
    torch.manual_seed(0)
    network = nn.Linear(4, 3)
    network.weight.register_hook(lambda g: 2 * g)
    wrapped = wrap(name, network, process_group=context.group)
    if name == "zero2":
        optimizer = wrapped.make_optimizer(torch.optim.SGD, lr=0.1)
        with pytest.raises(ValueError, match=r"this rank's part of the gradient: remove it, and"):
            made(wrapped, optimizer=optimizer)
        return None
    _, model, optimizer, criterion = made(wrapped)
    x, y = torch.ones(2, 4), torch.full((2, 3), float(context.rank))
    criterion(model(x), y).backward()
    optimizer.pre_step()
    weight, bias = network.weight.grad, network.bias.grad
    torch.testing.assert_close(weight, 2 * bias[:, None].expand(3, 4))  # as inputs are 1
    return weight.numpy()


def test_hooks_on_ranks_see_the_gradient_of_all(cpu_ranks):
    first, second = cpu_ranks.run(2, of_ranks, "ddp_bucketed")
    assert first.any()
    assert (first == second).all()
    cpu_ranks.run(2, of_ranks, "zero2")


def test_orthogonal_subspace_tuning_stays_in_its_subspace():
    peft = pytest.importorskip("peft")
    from ddp_by_hand.experiments.matrix.adapters import adapted
    from ddp_by_hand.experiments.matrix.trial import PerSampleLoss

    subject = adapted("OSF")
    layer = next(m for m in subject.network.modules() if isinstance(m, peft.tuners.osf.OSFLayer))
    low, high = layer._osf_U_low_init["default"], layer.osf_svd_params["default"]["U_low"]
    before = high.detach().clone()
    engine = PrivacyEngine()
    trained = [p for p in subject.network.parameters() if p.requires_grad]
    model, optimizer, criterion, loader = engine.make_private(
        module=subject.network, optimizer=torch.optim.SGD(trained, lr=0.1),
        data_loader=DataLoader([subject.sample(i) for i in range(6)], 3), criterion=PerSampleLoss(),
        noise_multiplier=1.0, max_grad_norm=1.0, poisson_sampling=False,
    )  # fmt: skip
    for inputs, targets in loader:
        criterion(subject.outputs_of(model(**inputs)), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    moved = high.detach() - before
    outside = moved - low @ (low.T @ moved)  # W is square: the low part spans the complement
    assert moved.norm() > 0.01
    assert outside.norm() < 1e-4 * moved.norm()


def test_a_model_with_hooks_is_freed(network):
    network[0].weight.register_hook(lambda g: g)
    alive = weakref.ref(made(network)[1])
    gc.collect()
    assert alive() is None
