"""Small private runs through `make_private`, and single steps of them."""

from types import SimpleNamespace

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dp_clipping import PrivacyEngine

SAMPLES, BATCH, CLASSES = 24, 6, 3


def data(count=SAMPLES, width=4):
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(count, width, generator=draw)
    return TensorDataset(x, torch.randint(CLASSES, (count,), generator=draw))


def network(width=4):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 5), nn.Tanh(), nn.Linear(5, CLASSES))


def fixed(seed=5):
    return torch.Generator().manual_seed(seed)


def arguments(**changes):
    """For `make_private`, of any engine."""
    net = changes.pop("module", None) or network()
    return {
        "module": net,
        "optimizer": torch.optim.SGD(net.parameters(), lr=0.1),
        "data_loader": DataLoader(data(), batch_size=BATCH),
        "noise_multiplier": 1.0,
        "max_grad_norm": 0.5,
        **changes,
    }


def build(*, engine=None, accountant="rdp", hide_unprotected=False, **changes):
    engine = engine or PrivacyEngine(accountant=accountant, hide_unprotected=hide_unprotected)
    model, optimizer, criterion, loader = engine.make_private(**arguments(**changes))
    return SimpleNamespace(
        engine=engine, model=model, optimizer=optimizer, criterion=criterion, loader=loader
    )


def backward(run, batch):
    x, y = batch
    run.criterion(run.model(x), y).backward()


def step(run, batch=None):
    backward(run, batch or data()[:5])
    run.optimizer.step()
    run.optimizer.zero_grad()


def parameters(run):
    return [p.detach().clone() for p in run.model.parameters()]
