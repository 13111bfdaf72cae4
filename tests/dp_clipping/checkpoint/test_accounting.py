"""The account: every draw once, before a parameter has moved, by Opacus's own accountants."""

import pytest
import torch
from opacus.accountants import create_accountant

from dp_clipping import MODES
from tests.support.engine import backward, build, data, parameters, step

DELTA = 1e-5

pytestmark = [
    pytest.mark.filterwarnings("ignore:noise and sampling come from a fixed seed"),
    pytest.mark.filterwarnings("ignore:GDP accounting is experimental"),
    pytest.mark.filterwarnings("ignore:Secure RNG turned off"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
]


@pytest.mark.parametrize("mode", MODES)
def test_a_step_is_counted_once_and_before_parameters_change(mode):
    run = build(grad_sample_mode=mode)
    account = run.engine.accountant
    start = parameters(run)
    seen = []
    original = run.optimizer.original_optimizer.step

    def watched():
        unchanged = all(torch.equal(a, b) for a, b in zip(start, parameters(run), strict=True))
        seen.append((sum(steps for _, _, steps in account.history), unchanged))
        original()

    run.optimizer.original_optimizer.step = watched
    step(run)
    assert seen == [(1, True)]
    sigma = 0.0 if mode == "no_dp" else 1.0
    assert account.history == [(sigma, 1 / 4, 1)]


def test_no_account_no_step():
    """Where counting fails, nothing is added to it, nothing lost and nothing applied."""
    run = build(accountant="gdp")
    step(run)
    run.optimizer.noise_multiplier = 2.0  # gdp cannot
    before = parameters(run)
    backward(run, data()[:5])
    with pytest.raises(
        ValueError, match=r"gdp has no ε of steps with several .* PrivacyEngine\(\)"
    ):
        run.optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, parameters(run), strict=True))
    assert run.engine.accountant.history == [(1.0, 1 / 4, 1)]
    assert run.engine.get_epsilon(DELTA) > 0


@pytest.mark.parametrize("accountant", ["prv", "rdp", "gdp"])
def test_epsilon_is_the_accountants(accountant):
    run = build(accountant=accountant, noise_multiplier=1.3)
    for batch in run.loader:
        step(run, batch)
    theirs = create_accountant(accountant)
    theirs.history = [(1.3, 1 / 4, 4)]
    assert run.engine.get_epsilon(DELTA) == theirs.get_epsilon(DELTA) > 0
