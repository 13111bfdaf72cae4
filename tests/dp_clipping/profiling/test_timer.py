"""Private steps with the profiling switch on compute the same, and name their ranges."""

import pytest
import torch

from dp_clipping.profiling.profile import SWITCH
from tests.dp_clipping.conftest import clipped_sums, private
from tests.support import zoo


@pytest.mark.parametrize("mode", ["ghost", "bookkeeping", "per_sample"])
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_the_same_bits_and_every_phase(monkeypatch, mode, clipping):
    case, found = zoo.BY_NAME["transformer"], []
    for switch in ("0", "1"):
        monkeypatch.setenv(SWITCH, switch)
        model = private(case.build(), mode, 0.5, clipping)
        found.append(clipped_sums(model, case.batch(4), case.per_sample_loss))
    plain, timed = found
    assert all(torch.equal(plain[name], timed[name]) for name in plain)
    assert model.step_context.profile is not None
