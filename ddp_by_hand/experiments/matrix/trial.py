"""Trains an architecture privately, as it is and after one change, and says what came of it."""

from __future__ import annotations

import copy
import math
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ddp_by_hand.experiments.rounds import failure_of
from dp_clipping import PrivacyEngine

SAMPLES, BATCH, STEPS = 6, 3, 2
WORKS, CHANGED, REFUSED, FAILED = "works", "changed", "refused", "failed"


@dataclass(frozen=True)
class Subject:
    """A network in its default settings, with its inputs [SAMPLES, ..] by argument and targets.

    `outputs_of` returns what the loss is computed from, [SAMPLES, ..]. Targets of integers are
    classes of its last dimension, others are numbers of its shape.
    """

    network: nn.Module
    inputs: dict[str, Tensor]
    targets: Tensor
    outputs_of: Callable[[Any], Tensor] = lambda outputs: outputs.logits

    def sample(self, i: int) -> tuple[dict[str, Tensor], Tensor]:
        return {name: x[i] for name, x in self.inputs.items()}, self.targets[i]


@dataclass(frozen=True)
class Row:
    """An architecture: its section of the page, its name and how it is built."""

    section: str
    name: str
    build: Callable[[], Subject]


@dataclass(frozen=True)
class Outcome:
    """The outcome of a row: `status`, and the change, or the first sentence of the message."""

    row: Row
    status: str
    words: str = ""


class PerSampleLoss:
    """The mean cross-entropy of a sample's outputs, or the mean squared error."""

    reduction = "mean"

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if targets.is_floating_point():
            losses = (outputs.float() - targets).square()
        else:
            losses = F.cross_entropy(outputs.float().movedim(-1, 1), targets, reduction="none")
        losses = losses.flatten(1).mean(1) if losses.dim() > 1 else losses
        return losses if self.reduction == "none" else losses.mean()


class Differs(Exception):
    """The private step is not the sum of clipped gradients."""


def _group_norm(network: nn.Module, inputs: dict[str, Tensor]) -> nn.Module | None:
    if not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in network.modules()):
        return None
    return PrivacyEngine.get_compatible_module(network)


def _group_norm_of_timm(network: nn.Module, inputs: dict[str, Tensor]) -> nn.Module | None:
    found = [(n, m) for n, m in network.named_modules() if type(m).__name__ == "BatchNormAct2d"]
    for name, m in found:
        channels = m.num_features
        norm = nn.GroupNorm(math.gcd(32, channels), channels)
        network.set_submodule(name, nn.Sequential(norm, m.drop, m.act))
    if not found:
        return None
    return _group_norm(network, inputs) or network


def _run_once(network: nn.Module, inputs: dict[str, Tensor]) -> nn.Module | None:
    with torch.no_grad():
        network(**inputs)
    return network


Change = Callable[[nn.Module, dict[str, Tensor]], nn.Module | None]
CHANGES: dict[str, Change] = {
    "`PrivacyEngine.get_compatible_module(model)`: GroupNorm for BatchNorm": _group_norm,
    "`nn.Sequential(nn.GroupNorm(32, C), m.drop, m.act)` for each `BatchNormAct2d` m of timm": (
        _group_norm_of_timm
    ),
    "a forward before `make_private`": _run_once,
}
"""Changes in the order in which they are tried. Each returns None where it changes nothing."""


def subject_of(
    network: nn.Module,
    inputs: dict[str, Tensor],
    outputs_of: Callable[[Any], Tensor] = lambda outputs: outputs.logits,
) -> Subject:
    """Returns the subject with a random class for each row of the last dimension of its outputs."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        # Of a copy: a first forward may prepare a network for those that follow.
        *rows, classes = outputs_of(copy.deepcopy(network).train()(**inputs)).shape
    return Subject(network, inputs, torch.randint(classes, rows), outputs_of)


def seeded(build: Callable[[], Subject]) -> Subject:
    """Builds, and moves each trainable parameter, so that none is a zero that hides an error."""
    with torch.random.fork_rng(devices=[]), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        subject = build()
        for parameter in subject.network.train().parameters():
            if parameter.requires_grad and parameter.is_floating_point():
                parameter += 0.02 * torch.randn_like(parameter)
    return subject


def train(subject: Subject, network: nn.Module) -> None:
    """Compares a private step with one backward per sample, and takes two steps.

    Raises:
        Differs: norms or clipped sums are not those of one backward per sample.
        Exception: what the library or the network raised.
    """
    engine = PrivacyEngine()
    trainable = [p for p in network.parameters() if p.requires_grad]
    model, optimizer, criterion, loader = engine.make_private(
        module=network, optimizer=torch.optim.SGD(trainable, lr=0.01), criterion=PerSampleLoss(),
        data_loader=DataLoader([subject.sample(i) for i in range(SAMPLES)], BATCH),
        noise_multiplier=1.0, max_grad_norm=1.0, poisson_sampling=False,
    )  # fmt: skip

    def loss_of(model: Any, criterion: Any, batch: Any) -> Any:
        inputs, targets = batch
        return criterion(subject.outputs_of(model(**inputs)), targets)

    report = engine.check(model, next(iter(DataLoader(loader.dataset, BATCH))), loss=loss_of)
    if not report.ok:
        raise Differs(report.faults[0])
    steps = 0
    for batch in islice(loader, STEPS):
        loss_of(model, criterion, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
    assert steps == STEPS
    if not all(p.isfinite().all() for p in trainable):
        raise Differs("a parameter is not finite after two steps")


def attempt(row: Row, change: Change | None = None) -> bool:
    """Trains a row, perhaps changed. Returns whether there was anything to change."""
    subject = seeded(row.build)
    network: nn.Module | None = subject.network
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(1)
        np.random.seed(1)  # which models of speech mask with
        network = change(subject.network.train(), subject.inputs) if change else subject.network
        if network is None:
            return False
        train(subject, network.train())
    return True


def try_row(row: Row) -> Outcome:
    """Returns what came of a row."""
    try:
        attempt(row)
        return Outcome(row, WORKS)
    except Exception as error:
        found = _reason(error)
    for words, change in CHANGES.items():
        try:
            if attempt(row, change):
                return Outcome(row, CHANGED, words)
        except Exception:
            continue
    status = REFUSED if found.startswith("refused: ") else FAILED
    return Outcome(row, status, found.partition(": ")[2])


def _reason(error: Exception) -> str:
    """Returns `refused: ` or `raised: ` and the first sentence of the message."""
    verb, _, text = failure_of(error)["reason"].partition(": ")
    text = re.split(r"(?<=[a-z)\]])\. |; (?:use|give|set|keep)\b", " ".join(text.split()))[0]
    return f"{verb}: {text}"
