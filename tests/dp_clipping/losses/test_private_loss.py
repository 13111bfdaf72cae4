"""A private loss is used like one number; test_criterion.py has what comes of its backward."""

import math
import warnings

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from dp_clipping import PrivacyEngine
from dp_clipping.criterion import PrivateCriterion
from dp_clipping.losses.private_loss import PrivateLoss
from tests.dp_clipping.conftest import private
from tests.support import zoo
from tests.support.engine import build

pytestmark = pytest.mark.filterwarnings("ignore:poisson_sampling=False")


def make(engine, around=lambda network: network, poisson_sampling=False):
    """A private linear layer, and a batch of its loader."""
    torch.manual_seed(0)
    run = build(
        engine=engine, module=around(nn.Linear(4, 2, bias=False)), max_grad_norm=1.0,
        dataset=TensorDataset(torch.randn(6, 4), torch.arange(6) % 2),
        poisson_sampling=poisson_sampling,
    )  # fmt: skip
    run.batch = next(iter(run.loader))
    return run


@pytest.fixture
def run():
    return make(PrivacyEngine())


def loss_of(run):
    x, y = run.batch
    return run.criterion(run.model(x), y)


@pytest.fixture
def loss():
    return PrivateLoss(private(nn.Linear(2, 2)), None, torch.tensor([1.0, 3.0]), "mean")


def test_it_is_one_number(loss):
    assert loss.item() == float(loss) == loss.detach() == 2.0
    assert f"{loss:.1f}" == "2.0"
    assert repr(loss) == "PrivateLoss(2.0000, mean of 2 samples)"


def test_arithmetic_acts_on_each_sample(loss):
    made = -(2 * loss + 1 - loss) / 4
    assert made.loss_per_sample.tolist() == [-0.5, -1.0]


def test_it_is_reduced_already(run):
    loss = loss_of(run)
    assert loss.mean() is torch.mean(loss) is loss
    assert loss.sum().item() == loss.item()
    with pytest.raises(
        RuntimeError, match=r"is the mean of its batch already: call loss\.backward"
    ):
        loss.sum().backward()


def test_a_frozen_network_has_no_backward(run):
    run.model.requires_grad_(False)
    with pytest.raises(RuntimeError, match=r"call model\.requires_grad_\(True\)"):
        loss_of(run).backward()
    run.model.requires_grad_(True)
    loss_of(run).backward()


READ = {  # what loops do with a loss besides backward()
    "compared": lambda x: bool(x < 10) and bool(x == x) and not bool(torch.tensor(0.0) > x),
    "isnan": lambda x: torch.isnan(x).item() or x.isnan().any().item() or math.isnan(x),
    "isfinite": lambda x: torch.isfinite(x).all().item() and bool(x),
    "stack": lambda x: torch.stack([x, 2 * x]).mean().item(),
    "cat": lambda x: torch.cat([x.reshape(1), x.unsqueeze(0)]).tolist(),
    "functions": lambda x: [f(x).item() for f in (torch.exp, torch.sqrt, abs, torch.log)],
    "powers": lambda x: [(x**2).item(), (1 / x).item(), (x // 1).item(), x.clamp(max=1.0).item()],
    "largest": lambda x: max(x, 2 * x).item() + min([x, 2 * x]).item() + torch.max(x, 2 * x).item(),
    "sums": lambda x: (sum([x, 0.5 * x]) / 2 - 1).item() + torch.add(x, x, alpha=2).item(),
    "numbers": lambda x: [float(x), int(x), complex(x), x.item(), x.tolist(), math.exp(x)],
    "text": lambda x: (f"{x:.3f}", "{:.2e}".format(x), "%.3f" % x, "%d" % x),  # noqa: UP031, UP032
    "kind": lambda x: (x.shape, x.dtype, x.device, x.ndim, x.dim(), x.numel(), x.is_cuda, x.layout),
    "gradient": lambda x: (x.requires_grad, x.is_leaf, x.grad_fn is None, x.grad),
    "numpy": lambda x: [x.detach().cpu().numpy().item(), x.data.item(), x.to("cpu").item()],
    "is a tensor": lambda x: torch.is_tensor(x) and isinstance(x, Tensor) and x.is_floating_point(),
    "made like it": lambda x: (torch.zeros_like(x).item(), x.new_ones(2).tolist()),
    "total": lambda x: add_in_place(torch.zeros(()), x).item() + torch.zeros(()).add_(x).item(),
    "entry": lambda x: torch.zeros(2).index_fill(0, torch.tensor([1]), x).tolist(),
    "repeated": lambda x: (x.repeat(3).shape, x.expand(2).tolist(), torch.equal(x, x), x in [x]),
    "dtypes": lambda x: (x.double().dtype, x.half().dtype, x.float().item(), x.clone().item()),
}  # fmt: skip


def add_in_place(total, loss):
    total += loss
    return total


@pytest.mark.filterwarnings("ignore:Converting a tensor", "ignore:The .grad attribute")
@pytest.mark.parametrize("read", READ.values(), ids=READ)
def test_it_is_read_like_a_tensor(run, read):
    loss = loss_of(run)
    ordinary = loss.detach().requires_grad_() * 1
    with warnings.catch_warnings(action="error"):
        found = read(loss)
    expected = read(ordinary)
    assert found == (pytest.approx(expected) if isinstance(expected, float) else expected)


def test_numpy_takes_it(run):
    loss = loss_of(run)
    assert np.mean([loss, loss]) == np.asarray(loss) == loss.numpy() == round(loss, 9)


NOT_PRIVATE = {  # name -> how a backward would go around the engine, and the message
    "stack": (lambda x: torch.stack([x, x]).mean().backward(), r"behind stack, .*\(loss_a \+ 0\.5"),
    "exp": (lambda x: x.exp().backward(), "behind exp, .*into the criterion"),
    "entry": (lambda x: entry(x).sum().backward(), "behind __setitem__, .*into the criterion"),
    "expanded": (lambda x: x.expand(2).sum().backward(), "behind expand, .*into the criterion"),
    "view": (lambda x: x.view(1).backward(), "behind view, .*call backward"),
    "grad": (lambda x: torch.autograd.grad(x, [torch.ones(1)]), r"call loss\.backward\(\), and"),
    "hook": (lambda x: x.register_hook(print), r"optimizer\.pre_step\(\) after loss\.backward"),
    "retain_grad": (lambda x: x.retain_grad(), r"optimizer\.pre_step\(\) after loss\.backward"),
    "in place": (lambda x: x.mul_(2), r"mul\(\) would .* in place: .*loss = 0\.5 \* loss"),
    "weights": (lambda x: torch.autograd.backward([x], [torch.ones(())]), r"\.backward\(\)"),
    "scaler": (lambda x: torch.amp.GradScaler("cpu").scale(x), "use bfloat16, which needs no"),
    "other": (
        lambda x: torch.autograd.backward([x, torch.ones((), requires_grad=True)]),
        r"call backward\(\) of the private loss, and of the others after optimizer\.step",
    ),
}  # fmt: skip


def entry(loss):
    buffer = torch.zeros(2)
    buffer[0] = loss
    return buffer


@pytest.mark.parametrize(("around", "message"), NOT_PRIVATE.values(), ids=NOT_PRIVATE)
def test_no_backward_goes_around_the_engine(run, around, message):
    with pytest.raises((RuntimeError, ValueError, TypeError), match=message):
        around(loss_of(run))
    assert all(p.grad is None for p in run.model.parameters())


BACKWARD = {  # equal to loss.backward()
    "autograd": torch.autograd.backward,
    "list": lambda loss: torch.autograd.backward([loss]),
    "mean": lambda loss: torch.mean(loss).backward(),
    "moved": lambda loss: loss.to("cpu").clone().float().backward(),
    "function": lambda loss: torch.mul(torch.add(loss, loss), 0.5).backward(),
    "in place": lambda loss: add_in_place(torch.zeros(()), loss).backward(),
}


@pytest.mark.parametrize("backward", BACKWARD.values(), ids=BACKWARD)
def test_what_is_still_the_loss_has_its_backward(run, backward):
    other = make(PrivacyEngine())
    loss_of(run).backward()
    backward(loss_of(other))
    torch.testing.assert_close(other.network.weight.grad, run.network.weight.grad)


def test_with_hide_unprotected_only_its_kind_can_be_looked_at():
    loss = loss_of(make(PrivacyEngine(hide_unprotected=True)))
    assert (loss.shape, loss.dtype, loss.requires_grad) == ((), torch.float32, True)
    for read in (torch.isnan, float, lambda x: x < 1, torch.Tensor.numpy, torch.tensor):
        with pytest.raises(RuntimeError, match="not covered by ε"):
            read(loss)
    loss.backward()


def test_losses_of_two_forwards_add_up_to_a_number(run):
    first = loss_of(run)
    total = first + loss_of(run)
    assert total.item() == 2 * first.item()
    with pytest.raises(RuntimeError, match="a module private whose forward returns both outputs"):
        total.backward()
    losses = [loss_of(run) for _ in range(4)]
    assert (sum(losses) / 4).item() == pytest.approx(first.item())
    running = 0.0
    for loss in losses:
        running = 0.5 * running + 0.5 * loss
    assert float(running) == pytest.approx((1 - 0.5**4) * first.item())


def test_losses_of_evaluations_of_any_size_add_up(run):
    x, y = run.batch
    run.model.eval()
    parts = [run.criterion(run.model(x[:n]), y[:n]) for n in (3, 1)]
    assert float(parts[0] + parts[1]) == pytest.approx(sum(float(p) for p in parts))


def both(network):
    return zoo.Net(lambda net, real, fake: (net.body(real), net.body(fake)), body=network)


@pytest.mark.parametrize("poisson", [False, True])
def test_two_backwards_of_a_gan_are_told_what_works(poisson):
    """D(real).backward(); D(fake).backward() is refused once, with what works."""
    run = make(PrivacyEngine(), poisson_sampling=poisson)
    x, y = run.batch
    run.criterion(run.model(x), y).backward()
    with pytest.raises(RuntimeError, match=r"two losses of .* forward returns both outputs, as "):
        run.criterion(run.model(torch.randn_like(x)), 1 - y).backward()
    run = make(PrivacyEngine(), both, poisson_sampling=poisson)
    x, y = run.batch
    real, fake = run.model(x, torch.randn_like(x))
    (run.criterion(real, y) + run.criterion(fake, 1 - y)).backward()
    run.optimizer.step()


@pytest.mark.parametrize(
    "options", [{"retain_graph": True}, {"create_graph": True}, {"gradient": torch.ones(())}]
)
def test_arguments_of_a_tensors_backward_show_what_works(loss, options):
    with pytest.raises(ValueError, match=r"each forward has one backward, .*\.backward\(\)"):
        loss.backward(**options)


class Checkpointed(nn.Sequential):
    def forward(self, x):
        x = x if x.requires_grad else x.requires_grad_()  # as enable_input_require_grads() does
        return checkpoint(super().forward, x, use_reentrant=True)


@pytest.mark.parametrize("before", ["trained", "frozen", "nothing"])
def test_reentrant_checkpointing_is_refused(before):
    first = nn.Identity() if before == "nothing" else nn.Linear(2, 2)
    first.requires_grad_(before == "trained")
    network = nn.Sequential(first, Checkpointed(nn.Linear(2, 2)), nn.Linear(2, 2))
    model = private(network, "bookkeeping")
    criterion = PrivateCriterion(model, nn.CrossEntropyLoss(), "mean")
    with pytest.raises(RuntimeError, match=r"checkpoint\(\.\., use_reentrant=False\)"):
        criterion(model(torch.randn(3, 2)), torch.tensor([0, 1, 0])).backward()
