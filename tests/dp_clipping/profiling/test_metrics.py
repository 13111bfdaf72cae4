"""Metrics of each step: what ε covers, and apart from it what was asked for by name."""

import re
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from ddp import wrap
from dp_clipping import BatchMemoryManager, PrivacyEngine
from dp_clipping.profiling.metrics import UNPROTECTED
from tests.support.engine import build, fixed

DOCUMENT = Path(__file__).parents[3] / "docs/private_training.md"
pytestmark = pytest.mark.filterwarnings("ignore:noise and sampling come from a fixed seed")


def data() -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(32, 5, generator=draw), torch.arange(32) % 2)


def made(engine, group=None, **options) -> tuple:
    torch.manual_seed(0)
    network = nn.Linear(5, 2)
    run = build(
        engine=engine, dataset=data(), batch_size=8, max_grad_norm=0.7, noise_generator=fixed(2),
        module=network if group is None else wrap("ddp_bucketed", network, process_group=group),
        **{"grad_sample_mode": "bookkeeping", **options},
    )  # fmt: skip
    return run.model, run.optimizer, run.criterion, run.loader


def train(model, optimizer, criterion, loader, microbatch=3, pad=False, look=lambda *_: None):
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=microbatch, optimizer=optimizer, pad_batches=pad
    ) as batches:
        for x, y in batches:
            real = batches.real
            look(model, x[:real], y[:real], optimizer.step_state.skips_next)
            criterion(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()


def test_what_is_covered():
    engine, seen = PrivacyEngine(accountant="rdp"), []
    private = made(engine)
    engine.on_step(seen.append, delta=1e-5)
    train(*private)
    assert [one["step"] for one in seen] == [1, 2, 3, 4]
    assert {tuple(one) for one in seen} == {
        ("step", "noise_multiplier", "max_grad_norm", "epsilon")
    }
    assert seen[-1]["epsilon"] == engine.get_epsilon(1e-5)
    assert 0 < seen[0]["epsilon"] < seen[-1]["epsilon"]
    assert (seen[0]["noise_multiplier"], seen[0]["max_grad_norm"]) == (1.0, pytest.approx(0.7))


@pytest.mark.parametrize("pad", [False, True])
def test_what_is_not_covered(pad):
    """Of all samples of a Poisson batch, in whatever microbatches, and without padding."""
    engine, seen, expected, parts = PrivacyEngine(accountant="rdp"), [], [], []

    def look(model, x, y, is_not_last):
        weight, bias = (p.detach() for p in model.parameters())
        losses = F.cross_entropy(F.linear(x, weight, bias), y, reduction="none")
        g = torch.softmax(F.linear(x, weight, bias), 1) - F.one_hot(y, 2)
        norms = g.norm(dim=1) * (x.square().sum(1) + 1).sqrt()
        parts.append((losses, norms))
        if not is_not_last:
            losses, norms = (torch.cat(each) for each in zip(*parts, strict=True))
            expected.append([
                losses.mean().item(), len(losses), (norms > 0.7).double().mean().item(),
                norms.median().item(), 0,
            ])  # fmt: skip
            parts.clear()

    private = made(engine)
    engine.on_step(seen.append, unprotected=UNPROTECTED)
    train(*private, pad=pad, look=look)
    assert [set(one) for one in seen] == [
        {"step", "noise_multiplier", "max_grad_norm", "unprotected"}
    ] * 4
    found = [list(one["unprotected"].values()) for one in seen]
    assert [list(one["unprotected"]) for one in seen] == [list(UNPROTECTED)] * 4
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-5)


def test_only_what_was_asked_for_and_not_in_each_step():
    engine, seen = PrivacyEngine(accountant="rdp"), []
    private = made(engine)
    engine.on_step(seen.append, unprotected="loss", every=2)
    train(*private)
    assert [one["step"] for one in seen] == [2, 4]
    assert [list(one["unprotected"]) for one in seen] == [["loss"]] * 2


def test_an_empty_batch_has_metrics():
    engine, seen = PrivacyEngine(accountant="rdp"), []
    private = made(engine, sample_rate=1e-9, steps=1)
    engine.on_step(seen.append, unprotected=UNPROTECTED)
    train(*private)
    assert seen[0]["unprotected"] == dict.fromkeys(UNPROTECTED, 0)


def test_refusals():
    engine = PrivacyEngine(accountant="rdp", hide_unprotected=True)
    with pytest.raises(RuntimeError, match="before on_step"):
        engine.on_step(print)
    made(engine)
    with pytest.raises(RuntimeError, match="not covered by ε"):
        engine.on_step(print, unprotected=["loss"])
    with pytest.raises(ValueError, match="'accuracy' is unknown: choose from loss, samples"):
        engine.on_step(print, unprotected=["accuracy"])
    for wrong in ({"call": 3}, {"call": print, "every": 0}, {"call": print, "delta": 2.0}):
        with pytest.raises(ValueError, match=r"give|delta"):
            engine.on_step(**wrong)
    plain = PrivacyEngine(accountant="rdp")
    made(plain, grad_sample_mode="no_dp")
    with pytest.raises(ValueError, match="mode no_dp has no metrics of samples"):
        plain.on_step(print, unprotected=["loss"])


def on_ranks(context) -> list[dict]:
    engine, seen = PrivacyEngine(accountant="rdp"), []
    private = made(engine, context.group)
    engine.on_step(seen.append, delta=1e-5, unprotected=UNPROTECTED)
    train(*private)
    return seen


def test_ranks_see_what_one_process_sees(cpu_ranks):
    engine, expected = PrivacyEngine(accountant="rdp"), []
    private = made(engine)
    engine.on_step(expected.append, delta=1e-5, unprotected=UNPROTECTED)
    train(*private)
    for seen in cpu_ranks.run(2, on_ranks):
        for one, other in zip(seen, expected, strict=True):
            assert one.pop("unprotected") == pytest.approx(other["unprotected"], rel=1e-5)
            assert one == {name: x for name, x in other.items() if name != "unprotected"}


def test_the_documented_tensorboard_example(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"^```python\n([^`]*SummaryWriter[^`]*)^```", DOCUMENT.read_text(), re.M)
    engine = PrivacyEngine(accountant="rdp")
    model, optimizer, criterion, loader = made(engine)
    names = {"engine": engine}
    exec(block, names)
    train(model, optimizer, criterion, loader)
    for folder, tags in (("runs/private", {"epsilon"}), ("runs/unprotected", {"loss"})):
        for writer in (names["covered"], names["not_covered"]):
            writer.flush()
        events = EventAccumulator(str(tmp_path / folder))
        events.Reload()
        assert set(events.Tags()["scalars"]) >= tags
        assert [one.step for one in events.Scalars(next(iter(tags)))] == [1, 2, 3, 4]


def test_the_documented_example_of_weights_and_biases(monkeypatch):
    """Both libraries have `init(project=)` and `log(dict, step=)`."""
    logged, begun = [], []
    stand_in = types.ModuleType("wandb")
    stand_in.init = lambda project: begun.append(project)
    stand_in.log = lambda metrics, step=None: logged.append((metrics, step))
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    (block,) = re.findall(r"^```python\n([^`]*import wandb[^`]*)^```", DOCUMENT.read_text(), re.M)
    engine = PrivacyEngine(accountant="rdp")
    private = made(engine)
    exec(block, {"engine": engine})
    train(*private)
    assert begun
    assert [step for _, step in logged] == [1, 2, 3, 4]
    assert [set(metrics) for metrics, _ in logged] == [{"epsilon"}] * 4, "nothing else is covered"
    assert logged[-1][0]["epsilon"] == pytest.approx(engine.get_epsilon(1e-5))
