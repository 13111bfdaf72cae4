"""A small private run of a diffusion model, and what is drawn of one that knows the noise."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from ddp_by_hand.examples import private_diffusion
from ddp_by_hand.examples.private_diffusion import drawn, schedule
from ddp_by_hand.experiments.networks.diffusion import DiT
from dp_clipping import PrivacyEngine


@pytest.fixture
def line(tmp_path):
    small = {"images": 24, "batch-size": 12, "epochs": 1, "size": 8, "width": 8, "views": 2}
    small |= {"max-physical-batch-size": 8}
    options = [word for name, value in small.items() for word in (f"--{name}", str(value))]
    return [*options, "--device", "cpu", "--output-dir", str(tmp_path)]


@pytest.mark.parametrize("network", ["unet", "dit"])
def test_a_run_says_what_it_spent_and_draws_pictures(network, line, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(private_diffusion, "NOISE_STEPS", 2)
    assert private_diffusion.main([*line, "--network", network]) == 0
    assert "epoch 1 of 1: ε 8.00 of 8 at δ 1e-05" in capsys.readouterr().out
    assert (tmp_path / "pictures.png").read_bytes().startswith(b"\x89PNG")
    parameters = torch.load(tmp_path / "model.pt")
    assert parameters["stem.weight"].shape[1] == 1


def test_a_step_of_a_transformer_is_as_defined():
    torch.manual_seed(0)
    network = DiT(width=8, channels=1, size=4, depth=2, heads=2)
    for p in network.parameters():  # some begin with zeros
        nn.init.normal_(p, std=0.3)
    engine = PrivacyEngine()
    model, *_ = engine.make_private(
        module=network, optimizer=torch.optim.SGD(network.parameters(), lr=0.1),
        criterion=nn.MSELoss(), data_loader=DataLoader(torch.randn(8, 1, 4, 4), batch_size=4),
        noise_multiplier=1.0, max_grad_norm=0.5, views=2,
    )  # fmt: skip
    x, times, noise = torch.randn(6, 1, 4, 4), torch.rand(6), torch.randn(6, 1, 4, 4)
    found = engine.check(model, (x, times, noise), loss=lambda m, c, b: c(m(b[0], b[1]), b[2]))
    assert found.ok, found
    assert found.norms.shape == (3,)


class OfOnePicture(nn.Module):
    """Returns the noise in pictures that are all the same."""

    def __init__(self, picture):
        super().__init__()
        self.picture = nn.Parameter(picture)

    def forward(self, x, times):
        signal, spread = schedule(times)
        return (x - signal * self.picture) / spread


def test_what_is_drawn_is_what_the_noise_was_added_to():
    picture = torch.linspace(-1, 1, 16).view(1, 4, 4)
    found = drawn(OfOnePicture(picture), (3, 1, 4, 4))
    torch.testing.assert_close(found, picture.expand(3, 1, 4, 4), rtol=0, atol=1e-4)
