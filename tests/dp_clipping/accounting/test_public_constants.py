"""The attack on divisors that follow from the number of samples: it works where one does.

Of two data sets that differ in one sample, the update of one step has noise of standard deviation
σC / divisor in each of many elements, so their spread tells the divisor, and with it which data set
it was, however large σ is (Opacus's issue 819; arXiv:2605.15648).
"""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.support.engine import backward, build, fixed

PUBLIC = {"sample_rate": 1 / 6, "steps": 6, "expected_batch_size": 4.0}


def observed(samples, seed, batch_size=4, **constants):
    """Returns the divisor that the update of a step shows, and all that an observer sees.

    The gradients are zero: the update is noise alone.
    """
    network = nn.Linear(400, 100, bias=False)
    nn.init.zeros_(network.weight)
    run = build(
        module=network, accountant="pld", lr=1.0, batch_size=batch_size, noise_multiplier=5.0,
        dataset=TensorDataset(torch.zeros(samples, 400), torch.zeros(samples, dtype=torch.long)),
        max_grad_norm=1.0, noise_generator=fixed(seed), **constants,
    )  # fmt: skip
    backward(run, next(iter(run.loader)))
    run.optimizer.step()
    update = network.weight.detach()
    known = len(run.loader), run.loader.sample_rate, run.optimizer.expected_batch_size
    return 5.0 / update.std().item(), update, known, run.engine.privacy_statement(1e-3)


@pytest.mark.parametrize("of", ["opacus", "full batch"])
def test_it_works_where_the_divisor_follows_from_the_data(of):
    for samples, seed in ((24, 0), (25, 1)):
        divisor = samples // -(-samples // 4) if of == "opacus" else samples
        options = {"expected_batch_size": divisor} if of == "opacus" else {"batch_size": samples}
        found, *_, statement = observed(samples, seed, **options)
        assert found == pytest.approx(divisor, rel=0.015)  # 4 and 3, 24 and 25
        assert statement.public_constants["divisor"] == (of == "opacus")  # as it was given


def test_it_finds_nothing_where_constants_are_given():
    """Under the same noise nothing at all differs."""
    one, other = (observed(samples, 0, **PUBLIC) for samples in (24, 25))
    assert one[0] == pytest.approx(4.0, rel=0.015)
    assert torch.equal(one[1], other[1])
    assert one[2:] == other[2:]
    assert all(one[3].public_constants.values())


def test_without_constants_the_steps_and_the_rate_tell():
    one, other = (observed(samples, 0) for samples in (24, 25))
    assert torch.equal(one[1], other[1])  # the divisor is the loader's batch size
    assert one[2][:2] == (6, 1 / 6)
    assert other[2][:2] == (7, 1 / 7)
    assert not one[3].public_constants["steps"]
