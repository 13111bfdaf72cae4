"""Settings of a step are those at its first backward; see `distributed/test_agreement.py`."""

import numpy as np
import pytest
import torch

from dp_clipping.distributed.agreement import Agreement
from dp_clipping.step.fixed_settings import FixedSettings
from tests.support import engine


def test_what_is_changed_later_is_the_next_steps():
    run = engine.build()
    state = run.model.step_state
    engine.backward(run, engine.data()[:3])
    run.optimizer.noise_multiplier = np.float32(5)
    engine.backward(run, engine.data()[3:5])
    assert state.settings.noise_multiplier == 1.0
    run.optimizer.step()
    run.optimizer.zero_grad()
    engine.backward(run, engine.data()[:5])
    assert state.settings.noise_multiplier == 5.0
    assert type(state.settings.noise_multiplier) is float


def test_a_step_that_is_refused_can_be_run_again():
    """Refuses a setting out of range, and counts the samples as unused."""
    run, fresh = engine.build(), engine.build()
    run.optimizer.expected_batch_size = 0
    with pytest.raises(ValueError, match="expected_batch_size"):
        engine.backward(run, engine.data()[:5])
    assert run.model.step_state.is_idle
    run.optimizer.expected_batch_size = fresh.optimizer.expected_batch_size
    for one in (run, fresh):
        engine.backward(one, engine.data()[:5])
    for ours, theirs in zip(run.network.parameters(), fresh.network.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_a_process_alone_agrees():
    run = engine.build()
    assert run.optimizer.fixed_settings.agreement is None
    run.optimizer.fixed_settings.agree()


@pytest.mark.parametrize("early", [False, True])
def test_ranks_refuse_samples_together_where_they_agree_late(early, one_rank):
    run = engine.build()
    agreement = Agreement(torch.distributed.group.WORLD, early=early)
    run.optimizer.fixed_settings = FixedSettings(run.optimizer, agreement)
    engine.backward(run, engine.data()[:3])

    def refuse():
        with run.model.step_state.refused_together():
            raise ValueError("sample 3 is cut")

    if not early:
        refuse()
    with pytest.raises(ValueError, match="sample 3 is cut"):
        refuse() if early else run.optimizer.step()
