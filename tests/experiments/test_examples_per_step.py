"""The comparison of how many examples of a unit a step takes, on few pictures."""

from collections import Counter

import pytest
import torch

from ddp_by_hand.experiments import correlated_noise
from ddp_by_hand.experiments.examples_per_step import Options, main, units_of_pictures
from dp_clipping.accounting.target_epsilon import noise_multiplier_for

SMALL = (
    "--pictures 256 --most 8 --rows 16 --steps 4 --filters 2 --seeds 2 --epsilons 8 --drawn 2 "
    "--learning-rates 4 16"
)


@pytest.fixture(autouse=True)
def _few(monkeypatch):
    threads = torch.get_num_threads()
    monkeypatch.setattr(correlated_noise, "HELD_OUT", 64)
    yield
    torch.set_num_threads(threads)


@pytest.mark.filterwarnings("ignore:delta is")
def test_all_spend_the_budget_on_as_many_pictures(capsys):
    assert main(SMALL.split()) == 0
    head, _, drawn, whole = capsys.readouterr().out.splitlines()
    assert head.split()[:1] == ["ε"]
    units = len(set(units_of_pictures(Options(pictures=256, most=8))))
    for row, name, batch in ((drawn, "2", 8), (whole, "all, at most 8", 2)):
        _, shown, of_batch, sigma, *_ = (cell.strip() for cell in row.split("  ") if cell.strip())
        assert (shown, int(of_batch)) == (name, batch)
        expected = noise_multiplier_for(
            target_epsilon=8.0, target_delta=1e-5, sample_rate=batch / units, steps=4,
            accountant="pld", epsilon_tolerance=0.01, alphas=None,
        )  # fmt: skip
        assert float(sigma) == pytest.approx(expected, abs=1e-3)


def test_units_differ_in_size():
    sizes = Counter(units_of_pictures(Options(pictures=4096, most=64)))
    assert sum(sizes.values()) == 4096
    assert set(sizes.values()) >= {1, 2, 3}
    assert 32 < max(sizes.values()) <= 64
