"""The comparison of correlated noise with Poisson DP-SGD, on few pictures."""

import pytest
import torch

from ddp_by_hand.experiments import correlated_noise
from ddp_by_hand.experiments.correlated_noise import Options, main, split_of
from dp_clipping import CorrelatedNoise
from dp_clipping.accounting import cyclic
from tests.support.wrong_input import is_one_line

SMALL = (
    "--pictures 256 --batches 8 --filters 2 --seeds 2 --epsilons 8 --bands 4 --learning-rates 4 16"
)


@pytest.fixture(autouse=True)
def _few(monkeypatch):
    threads = torch.get_num_threads()
    monkeypatch.setattr(correlated_noise, "HELD_OUT", 64)
    yield
    torch.set_num_threads(threads)


@pytest.mark.filterwarnings("ignore:Optimal order is the largest alpha")
@pytest.mark.filterwarnings("ignore:delta is")
def test_both_sides_spend_the_budget(capsys):
    assert main(SMALL.split()) == 0
    head, _, independent, *correlated = capsys.readouterr().out.splitlines()
    assert head.split()[:1] == ["ε"]
    assert "independent, poisson" in independent
    for row, name, epochs in zip(correlated, ("√(1 - x)", "planned"), (None, 1), strict=True):
        assert f"4 bands {name}, cyclic" in row
        sigma = float(row.split("cyclic")[1].split()[0])
        spent = cyclic.epsilon([[(sigma, 1 / 8, 8)]], 1e-5, CorrelatedNoise(4, epochs).sensitivity)
        assert 7.9 < spent < 8.02
        assert 0 < float(independent.split()[3]) < sigma


def test_pictures_have_one_use_each_and_bands_are_positive(capsys):
    options = Options(pictures=256, filters=2)
    split = split_of(options)
    features, digits = split.training.tensors
    assert features.shape == (256, 64)
    assert len(digits) == 256
    everything = torch.cat((features, split.tuning[0], split.test[0]))
    assert len(everything.unique(dim=0)) == 256 + 64 + 64
    torch.testing.assert_close(everything.norm(dim=1), torch.ones(len(everything)))
    is_one_line(main, ["--bands", "0"], "--bands 0", capsys)
