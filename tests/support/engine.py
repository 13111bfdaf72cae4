"""Small private runs through `make_private`, and single steps of them."""

import math
import warnings
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from dp_clipping import BatchMemoryManager, PrivacyEngine, register_noise_mechanism
from tests.dp_clipping.conftest import skip_all_checks

SAMPLES, BATCH, CLASSES = 24, 6, 3
CHECKED = {"module", "criterion", "dataset", "data_loader"}


def data(count=SAMPLES, width=4):
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(count, width, generator=draw)
    return TensorDataset(x, torch.randint(CLASSES, (count,), generator=draw))


def network(width=4):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 5), nn.Tanh(), nn.Linear(5, CLASSES))


def fixed(seed=5):
    return torch.Generator().manual_seed(seed)


def arguments(*, dataset=None, batch_size=BATCH, lr=0.1, **changes):
    """For `make_private`, of any engine."""
    module = changes.pop("module", None) or network()
    trained = [p for p in module.parameters() if p.requires_grad] or module.parameters()
    return {
        "module": module,
        "optimizer": torch.optim.SGD(trained, lr=lr),
        "data_loader": DataLoader(dataset or data(), batch_size=batch_size),
        "noise_multiplier": 1.0,
        "max_grad_norm": 0.5,
        **changes,
    }


def build(*, engine=None, accountant="rdp", hide_unprotected=False, **changes):
    """A private run, whose batches are checked if what they come of is the test's own."""
    is_checked = engine is not None or bool(CHECKED & changes.keys())
    engine = engine or PrivacyEngine(accountant=accountant, hide_unprotected=hide_unprotected)
    given = arguments(**changes)
    model, optimizer, criterion, loader = engine.make_private(**given)
    if not is_checked and given.get("grad_sample_mode") != "no_dp":
        skip_all_checks(optimizer.model)  # which take longer than the steps
    return SimpleNamespace(
        engine=engine, model=model, optimizer=optimizer, criterion=criterion, loader=loader,
        network=given["module"],
    )  # fmt: skip


def in_parts(run, size, manager=BatchMemoryManager, **options):
    """Splits the batches of a run into parts of at most so many samples."""
    return manager(
        data_loader=run.loader, max_physical_batch_size=size, optimizer=run.optimizer, **options
    )


def endless(run, microbatch=None, **options):
    """Yields batches, or parts of at most so many samples, epoch after epoch."""
    while True:
        if microbatch is None:
            yield from run.loader
        else:
            with in_parts(run, microbatch, **options) as parts:
                yield from parts


def on_any_batches(**changes):
    """A run on batches that do not come from its loader, which it is not warned of."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "poisson_sampling=False")
        return build(poisson_sampling=False, **changes)


def backward(run, batch):
    x, y = batch
    run.criterion(run.model(x), y).backward()


def ordinary_backward(run):
    """Runs a backward in evaluation, which is not private."""
    run.model.eval()
    F.cross_entropy(run.model(data()[5:6][0]), torch.tensor([1])).backward()
    run.model.train()


def step(run, batch=None):
    backward(run, batch or data()[:5])
    run.optimizer.step()
    run.optimizer.zero_grad()


def parameters(run):
    return [p.detach().clone() for p in run.model.parameters()]


def register_noise(name: str) -> None:
    """Registers normal noise as a user's own, with an account that is loose enough."""
    register_noise_mechanism(
        name, lambda u: math.sqrt(2) * torch.erfinv(2 * u - 1),
        epsilon=lambda history, delta: sum(
            n * (30 / s + 12 * math.log10(1 / delta) / 5 / s) for s, _, n in history
        ),
    )  # fmt: skip


# What changes gradients between backward and the noise, and what is said of it


def replace(net: nn.Module) -> None:
    net[0].weight.grad = net[0].weight.grad * 0.5


CHANGES = {
    "clip_grad_norm_": lambda net: nn.utils.clip_grad_norm_(net.parameters(), 1e-3),
    "clip_grad_value_": lambda net: nn.utils.clip_grad_value_(net.parameters(), 1e-3),
    "mul_": lambda net: net[2].bias.grad.mul_(0.5),
    "mul_ of a detached one": lambda net: net[2].bias.grad.detach().mul_(0.5),
    "zero_": lambda net: net[2].bias.grad.zero_(),
    "replaced": replace,
    "set to None": lambda net: setattr(net[0].weight, "grad", None),
    "zero_grad": lambda net: net.zero_grad(),
    "zeros": lambda net: net.zero_grad(set_to_none=False),
}
UNCLIPPED = r"ordinary backward.*added to the gradient of 0\.bias, 0\.weight, 2\.bias"
CHANGED = r"was changed between backward\(\) and optimizer\.step\(\).*call optimizer\.pre_step\(\)"
