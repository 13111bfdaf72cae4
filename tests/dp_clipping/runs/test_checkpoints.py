"""Saving and loading take what make_private has returned, and nothing else."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.support.engine import build


def made(wrap_model=True):
    data = TensorDataset(torch.randn(20, 3), torch.randint(2, (20,)))
    run = build(module=nn.Linear(3, 2), dataset=data, batch_size=5, wrap_model=wrap_model)
    return run.engine, (run.model, run.optimizer, run.criterion, run.loader)


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
