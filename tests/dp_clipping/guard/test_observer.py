"""One forward and backward of a captured network, and what each layer sees in it."""

import torch
from torch import nn

from dp_clipping.capture.samples.batch import Batch
from dp_clipping.guard.guard import LayoutDiscovery
from dp_clipping.guard.observer import FACTORS, Observer
from dp_clipping.trials.perturb import Perturbed
from tests.dp_clipping.conftest import private


def observed(network: nn.Module, x: torch.Tensor, **options):
    capture = private(network, "bookkeeping").capture
    discovery = LayoutDiscovery(capture, True)
    discovery.look(Batch((x,), {}, True))
    batch = Batch((x,), {}, True)
    return Observer(capture, discovery._search.layouts_of, batch, range(3)).run(**options)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def test_every_layer_is_seen_forward_and_backward():
    seen = observed(network(), torch.randn(3, 3))
    assert set(seen.summaries) == {
        *(("0", what, 0) for what in ("input", "gradient")),
        *(("2", what, 0) for what in ("input", "gradient")),
        ("", "output", 0),
    }
    assert not seen.is_random


def test_gradients_of_a_sample_that_does_not_stay_are_others():
    x, scale = torch.randn(3, 3), torch.tensor([1.0, FACTORS[1], 1.0])
    perturbed = Perturbed(torch.arange(3), scale == 1)
    one, other = (observed(network(), x, perturbed=p).summaries for p in (None, perturbed))
    gradients = ("0", "gradient", 0)
    expected = one[gradients].values * scale[:, None]
    torch.testing.assert_close(other[gradients].values[:, -1], expected[:, -1].abs())
    torch.testing.assert_close(other["0", "input", 0].values, one["0", "input", 0].values)


def test_errors_of_rounding_change_little():
    x = torch.randn(3, 3)
    one, other = (observed(network(), x, seed=s).summaries for s in (None, 1))
    output = ("", "output", 0)
    assert not torch.equal(one[output].values, other[output].values)
    torch.testing.assert_close(one[output].values, other[output].values, rtol=1e-5, atol=1e-6)


def test_dropout_is_told():
    assert observed(nn.Sequential(*network(), nn.Dropout(0.5)), torch.randn(3, 3)).is_random
