"""Federated averaging is the plain loop over clients, and goes on where it was."""

import shutil
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from ddp_by_hand.examples import federated
from dp_clipping import PrivacyEngine

SMALL = ["--clients", "60", "--rounds", "3", "--expected", "8", "--local-steps", "2"]
pytestmark = pytest.mark.filterwarnings("ignore")


def test_a_round_is_the_plain_loop_over_its_clients():
    clients, expected, lr, most = 40, 10, 0.7, 1.3
    start, updates = torch.randn(23).double(), torch.randn(clients, 23).double()
    updates *= torch.linspace(0.02, 1, clients).double()[:, None]  # some above the norm, some below
    server = nn.Linear(23, 1, bias=False, dtype=torch.float64)
    server.load_state_dict({"weight": start[None]})
    engine = PrivacyEngine()
    server, optimizer, criterion, loader = engine.make_private(
        module=server, optimizer=torch.optim.SGD(server.parameters(), lr=lr),
        criterion=torch.flatten, noise_multiplier=0.0,
        data_loader=DataLoader(range(clients), batch_size=expected), max_grad_norm=most,
        sample_rate=expected / clients, steps=4, wrap_model=False,
    )  # fmt: skip
    found, rounds = start.clone(), []
    for batch in loader:
        rounds.append(batch.tolist())
        federated.run_round(
            server, optimizer, criterion, batch, lambda client, p: updates[client] + 0.1 * p
        )
        own = [updates[client] + 0.1 * found for client in batch.tolist()]
        clipped = [one * min(1.0, most / float(one.norm())) for one in own]
        found = found + lr * sum(clipped, torch.zeros(23).double()) / expected
    assert len(rounds) == 4
    assert any(rounds)
    torch.testing.assert_close(server.weight[0].detach(), found, rtol=1e-11, atol=1e-11)
    before = server.weight.detach().clone()
    federated.run_round(server, optimizer, criterion, torch.tensor([], dtype=torch.long), None)
    assert optimizer.steps == 5
    assert torch.equal(server.weight, before)


def weight(path: Path) -> torch.Tensor:
    return torch.load(path, weights_only=True)["module_state_dict"]["weight"]


@pytest.mark.slow
def test_a_run_states_epsilon_and_goes_on_where_it_was(tmp_path, capsys, monkeypatch):
    whole, again = tmp_path / "whole/round.pt", tmp_path / "again/round.pt"
    save = PrivacyEngine.save_checkpoint

    def copied(engine, **given):
        save(engine, **given)
        if given["optimizer"].steps == 1:
            shutil.copytree(whole.parent, again.parent)

    monkeypatch.setattr(PrivacyEngine, "save_checkpoint", copied)
    assert federated.main([*SMALL, "--checkpoint", str(whole)]) == 0
    out = capsys.readouterr().out
    own = float(out.split("(epsilon, delta) = (")[1].split(",")[0])
    other = float(out.split("by dp-accounting alone:")[1].split()[0])
    assert own == pytest.approx(other, rel=0.01)
    assert 7.8 < own <= 8
    assert "an example, an item of the loader, is a client" in out
    assert "right on held-out clients" in out

    monkeypatch.setattr(PrivacyEngine, "save_checkpoint", save)
    assert not torch.equal(weight(again), weight(whole))
    assert federated.main([*SMALL, "--checkpoint", str(again), "--resume"]) == 0
    assert "round   1" not in capsys.readouterr().out
    assert torch.equal(weight(again), weight(whole))

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(federated, "run_round", interrupted)
    assert federated.main([*SMALL, "--checkpoint", str(tmp_path / "new.pt")]) == 130
