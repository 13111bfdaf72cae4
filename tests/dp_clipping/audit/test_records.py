"""`engine.record_sums` on the right product, and on broken ones."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from ddp_by_hand.examples.audit_faults import FAULTS, RECORD
from dp_clipping import PrivacyEngine
from dp_clipping.guard.guard import LayoutDiscovery
from tests.dp_clipping.audit import test_audits
from tests.dp_clipping.audit.test_audits import network

QUICK = ("noise-from-data", "divided-by-batch", "norm-without-weights")


def given(net: nn.Module, **changes) -> dict:
    own = {"noise_multiplier": 2.0, "max_grad_norm": 0.5, "units": 6, "removed": 2}
    return test_audits.given(net, **own | changes)


def recorded(net: nn.Module | None = None, **changes):
    return PrivacyEngine().record_sums(**given(net or network(), **changes))


def test_the_product_is_right(caplog):
    found = recorded()
    assert found.ok, found.faults
    # Gradients of these samples are longer than C.
    assert found.distances.tolist() == pytest.approx([0.5, 0.5], rel=1e-4)
    assert found.hostile.tolist() == pytest.approx([0.5, 0.5], rel=1e-4)
    assert found.noise_std == pytest.approx(1.0, abs=found.chance)
    assert not found.in_evaluation
    assert "ok: no unit moves the sum" in str(found)
    assert not caplog.records  # of constants of its own runs


@pytest.mark.parametrize(
    "changes",
    [
        {"max_grad_norm": [0.3, 0.4], "clipping": "per_layer"},
        {"examples_per_unit": 2, "unit_ids": [n % 12 for n in range(24)]},
        {"noise_multiplier": 0},
        pytest.param(
            {"grad_sample_mode": "ghost", "clipping_function": "automatic"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"criterion": nn.CrossEntropyLoss(reduction="sum"), "loss_reduction": "sum"},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["thresholds", "units", "no noise", "automatic", "sum"],
)
def test_settings(changes):
    found = recorded(**changes)
    assert found.ok, found.faults
    assert 0.45 < float(found.hostile.min()) <= 0.5 * 1.001


class Moved(Dataset):
    """Moves each sample at random, another way each time that it is asked for."""

    def __init__(self, samples: Dataset):
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple:
        x, y = self.samples[index]
        return x + torch.randn(6), y


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"views": 3},
        {"views": 2, "examples_per_unit": 2, "unit_ids": [n % 13 for n in range(24)]},
    ],
    ids=["views", "three", "of units"],
)
def test_random_views_of_a_sample_are_no_fault(changes):
    data = Moved(given(network())["data_loader"].dataset)
    found = recorded(data_loader=DataLoader(data, batch_size=8), **changes)
    assert found.ok, found.faults
    assert 0.45 < float(found.hostile.min()) <= 0.5 * 1.001


def test_a_network_that_is_always_random_is_named():
    class Random(nn.Module):
        def forward(self, x):
            return x + torch.rand(len(x), 1)

    found = recorded(nn.Sequential(Random(), *network()), removed=1)
    assert found.faults[0].startswith("two replays of the same step differ")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name, (_, by) in FAULTS.items()
        if RECORD in by
    ],
)
def test_a_fault_is_found(name):
    with FAULTS[name][0]():
        found = recorded(max_grad_norm=1.0)
    assert not found.ok
    assert "FAIL" in str(found)


def test_samples_that_see_each_other_are_found_where_no_check_looks(monkeypatch):
    """A mean over the batch, hidden from the product's own checks."""

    class Centred(nn.Module):
        def forward(self, x):
            return x - x.mean(0)

    monkeypatch.setattr(LayoutDiscovery, "_check", lambda self, batch: None)
    found = recorded(nn.Sequential(*network(), Centred()), criterion=nn.CrossEntropyLoss())
    assert any("moves the sum" in fault for fault in found.faults)


@pytest.mark.parametrize(("units", "removed"), [(6, 6), (6, 0), (1, 1)])
def test_numbers_of_units(units, removed):
    with pytest.raises(ValueError, match=r"removed is \d, .* units=16, removed=4"):
        recorded(units=units, removed=removed)
