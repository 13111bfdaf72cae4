"""`engine.audit` on the right product, and on broken ones. Seeds are fixed, so results are too."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset, TensorDataset

from ddp import wrap
from ddp_by_hand.examples.audit_faults import AUDIT, FAULTS
from dp_clipping import PrivacyEngine
from dp_clipping.noise.adaptive_threshold import AdaptiveThreshold

RARE = {"sample_rate": 0.05, "steps": 64, "noise_multiplier": 2.0}
SHORT = {"sample_rate": 0.5, "steps": 8, "noise_multiplier": 3.0}
SMALL = {"canaries": 400, "sample_rate": 0.5, "steps": 3}
CALLS = {"audit": {"canaries": 16, "steps": 1}, "record_sums": {"units": 6, "removed": 2}}
QUICK = ("no-noise-on-one-shard", "no-clipping")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))


def keeping_outputs() -> nn.Module:
    net = network()
    net.kept = net(torch.ones(1, 6))
    return net


def data(examples: int = 24) -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(examples, 6, generator=draw)
    return TensorDataset(x, torch.randint(4, (examples,), generator=draw))


def given(net: nn.Module, seed: int = 0, **changes) -> dict:
    return {
        "module": net,
        "optimizer": torch.optim.Adam(net.parameters()),
        "data_loader": DataLoader(data(), batch_size=8),
        "noise_multiplier": 1.0,
        "max_grad_norm": 1.0,
        "grad_sample_mode": "bookkeeping",
        "noise_generator": torch.Generator().manual_seed(seed),
        **changes,
    }


def audited(seed: int = 0, net: nn.Module | None = None, **changes):
    return PrivacyEngine().audit(**given(net or network(), seed, **changes))


class TestTheRightProduct:
    def test_a_short_run(self):
        found = audited(**SHORT)
        assert found.ok, found.faults
        assert 0 < found.epsilon_lower_bound < found.epsilon
        # The bound is not lazily low either.
        assert SHORT["noise_multiplier"] < found.refuted_noise <= 3 * SHORT["noise_multiplier"]
        assert "ok: nothing that the run shows" in str(found)

    @pytest.mark.parametrize(
        "changes",
        [
            {"examples_per_unit": 2, "unit_ids": [n % 12 for n in range(24)]},
            {"views": 2},
            {"adaptive_threshold": AdaptiveThreshold(1.0, expected_batch_size=8)},
        ],
        ids=["units", "views", "adaptive"],
    )
    @pytest.mark.slow
    def test_settings(self, changes):
        """With little noise, most canaries that were in a batch are told."""
        found = audited(noise_multiplier=0.3, **SMALL, **changes)
        assert found.ok, found.faults
        assert found.guesses.correct > 0.8 * found.guesses.made

    def test_split_batches_give_the_same_report(self):
        few = {"canaries": 24, "sample_rate": 0.5, "steps": 1, "noise_multiplier": 0.5}
        assert str(audited(**few)) == str(audited(**few, max_physical_batch_size=10))


class TestFaults:
    @pytest.mark.parametrize(
        "name",
        [
            pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
            for name, (_, by) in FAULTS.items()
            if AUDIT in by
        ],
    )
    def test_a_fault_is_found(self, name):
        setting = RARE if name == "same-batch-always" else SHORT
        with FAULTS[name][0]():
            found = audited(**setting)
        assert not found.ok
        assert "FAIL" in str(found)


class Sequences(Dataset):
    """Sequences in dicts, as of Hugging Face."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict:
        x, y = data()[index]
        return {"inputs": x.expand(5, 6), "labels": y}


class TestOtherNetworks:
    def test_batches_of_another_form(self):
        class Flat(nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = network()

            def forward(self, inputs, labels=None):
                return {"logits": self.layers(inputs.mean(1))}

        found = audited(
            net=Flat(),
            data_loader=DataLoader(Sequences(), batch_size=8),
            loss=lambda model, criterion, batch: criterion(
                model(**batch)["logits"], batch["labels"]
            ),
            noise_multiplier=0.3,
            **SMALL,
        )
        assert found.ok, found.faults
        assert found.guesses.correct > 0.8 * found.guesses.made


class TestTheUsersObjects:
    @pytest.mark.parametrize(("call", "options"), CALLS.items())
    def test_nothing_changes(self, call, options):
        net = network()
        arguments = given(net)
        before, state = copy.deepcopy(net.state_dict()), torch.get_rng_state()
        engine = PrivacyEngine()
        getattr(engine, call)(**arguments, **options)
        assert all(torch.equal(net.state_dict()[name], x) for name, x in before.items())
        assert torch.equal(torch.get_rng_state(), state)
        assert all(p.grad is None for p in net.parameters())
        assert not engine.accountant.history
        assert not arguments["optimizer"].state
        assert len(arguments["optimizer"].param_groups) == 1
        engine.make_private(**arguments)  # is not private yet


class TestRefusals:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"noise_multiplier": 0}, "noise_multiplier=0 states no epsilon"),
            ({"poisson_sampling": False}, "poisson_sampling=False has no stated epsilon"),
            ({"sampling": "cyclic"}, "sampling='cyclic' is not for an audit"),
            ({"grad_sample_mode": "no_dp"}, "clips nothing"),
            ({"cuda_graph": True}, "cuda_graph is not for an audit"),
            ({"fused_step": True}, "fused_step is not for an audit"),
            ({"canaries": 3}, "canaries is 3: give 16 or more"),
            ({"canaries": True}, "canaries is True"),
            ({"confidence": 1.0}, "confidence is 1.0"),
            ({"delta": 0}, "delta is 0"),
            ({"unit_ids": [0] * 24}, "examples_per_unit"),
            ({"examples_per_step": 1}, "examples_per_step is not for an audit: leave it out"),
            ({"nois": 1}, "unexpected keyword argument 'nois"),
            ({"optimizer": torch.optim.SGD(network().parameters(), lr=0.1)}, "optimizer"),
            ({"net": keeping_outputs()}, r"trains a copy, and copy\.deepcopy"),
        ],
    )
    def test_by_name(self, changes, message):
        with pytest.raises((ValueError, TypeError), match=message):
            audited(**changes)

    def test_a_private_network(self):
        net = network()
        arguments = given(net)
        model, *_ = PrivacyEngine().make_private(**arguments)
        for module in (net, model):
            with pytest.raises(ValueError, match="is private or prepared already"):
                PrivacyEngine().audit(**{**arguments, "module": module})

    @pytest.mark.parametrize("name", ["ddp_bucketed", "zero2", "fsdp", "fully_shard", "torch"])
    def test_wrapped_and_sharded_networks(self, name, one_rank):
        net = network()
        arguments = given(net)
        if name == "fully_shard":
            module = fully_shard(net)
            arguments["optimizer"] = torch.optim.Adam(net.parameters())
        elif name == "torch":
            module = nn.parallel.DistributedDataParallel(net)
        else:
            module = wrap(name, net)
        for attack in (PrivacyEngine().audit, PrivacyEngine().record_sums):
            with pytest.raises(
                ValueError, match=r"module is wrapped or sharded, .* before ddp\.wrap"
            ):
                attack(**{**arguments, "module": module})

    @pytest.mark.parametrize("call", CALLS)
    def test_hidden_and_secure_engines(self, call):
        with pytest.raises(RuntimeError, match="hide_unprotected"):
            getattr(PrivacyEngine(hide_unprotected=True), call)(**given(network()))
        with pytest.raises(ValueError, match="keys of a seed"):
            getattr(PrivacyEngine(secure_mode=True), call)(**given(network()))


def test_an_infinite_bound_is_shown():
    found = audited(canaries=16, steps=1)
    assert math.isinf(found.refuted_noise)
    assert "none, up to 5" in str(found)
