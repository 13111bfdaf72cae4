"""Saving and loading take what make_private has returned, and nothing else."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dp_clipping import PrivacyEngine


def made(wrap_model=True):
    network = nn.Linear(3, 2)
    data = TensorDataset(torch.randn(20, 3), torch.randint(2, (20,)))
    engine = PrivacyEngine(accountant="rdp")
    return engine, engine.make_private(
        module=network, optimizer=torch.optim.SGD(network.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=5), noise_multiplier=1.0, max_grad_norm=1.0,
        wrap_model=wrap_model,
    )  # fmt: skip


@pytest.mark.parametrize("wrap_model", [True, False])
def test_a_module_of_this_engine(wrap_model, tmp_path):
    engine, (model, optimizer, _, loader) = made(wrap_model)
    given = {"path": tmp_path / "run.pt", "module": model, "optimizer": optimizer}
    engine.save_checkpoint(**given, data_loader=loader)
    for p in model.parameters():
        p.detach().add_(1.0)
    before = [p.clone() for p in model.parameters()]
    engine.load_checkpoint(**given, data_loader=loader)
    assert not any(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_others_are_refused(tmp_path):
    engine, (model, *_) = made()
    _, (other, other_optimizer, _, other_loader) = made()
    for call in (engine.save_checkpoint, engine.load_checkpoint):
        with pytest.raises(ValueError, match="module is not one that this engine's make_private"):
            call(path=tmp_path / "run.pt", module=other)
        with pytest.raises(ValueError, match="optimizer is not the one that make_private returned"):
            call(path=tmp_path / "run.pt", module=model, optimizer=other_optimizer)
        with pytest.raises(ValueError, match="data_loader is not the one"):
            call(path=tmp_path / "run.pt", module=model, data_loader=other_loader)
