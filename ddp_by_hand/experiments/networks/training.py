"""A network of a row in training: ordinary, private, or private by Opacus."""

from __future__ import annotations

import linecache
import traceback
import warnings
from pathlib import Path
from typing import Any

import opacus
import torch
from torch import Tensor

import dp_clipping
from ddp_by_hand.experiments.networks.rows import NetworkRow, Task
from ddp_by_hand.experiments.training import OPACUS, ClassifierTraining
from ddp_by_hand.lm.watch import describe, status_of

_ENGINES = tuple(str(Path(package.__file__).parent) for package in (dp_clipping, opacus))


class NetworkTraining(ClassifierTraining):
    """Complete steps of a task with AdamW; see `lm.timing.Trainee`."""

    def __init__(self, task: Task, device: torch.device, capturable: bool = False):
        super().__init__(task.network, device, capturable=capturable)
        self.criterion = task.criterion

    def backward(self, batch: tuple[Any, Tensor]) -> None:
        inputs, targets = batch
        found = self.model(**inputs) if isinstance(inputs, dict) else self.model(*inputs)
        self.criterion(getattr(found, "logits", found), targets).backward()
        self._finish()


def training_of(
    variant: str, row: NetworkRow, is_small: bool, device: torch.device, compiled: bool = False,
    cuda_graph: bool = False,
) -> tuple[NetworkTraining, tuple[Any, Tensor]]:  # fmt: skip
    """Returns the variant, ready to step, and its batch.

    With `cuda_graph` the variant's step can be captured: see `graphs.GraphedTraining`.

    Raises ValueError where this is asked of Opacus.
    """
    task = row.build(is_small, device)
    capturable = cuda_graph and device.type == "cuda"
    training = NetworkTraining(task, device, capturable)
    if capturable and variant.startswith(OPACUS):
        raise ValueError("Opacus has no step that can be captured: measure it eagerly")
    for opacus_says in ("Secure RNG turned off", "Full backward hook is firing"):
        warnings.filterwarnings("ignore", message=opacus_says)
    options = {"cuda_graph": True} if capturable else {}
    training.make_variant(variant, len(task.targets), **options)
    if compiled:
        task.network.compile()
    return training, (task.inputs, task.targets)


def failure_of(error: Exception) -> dict[str, str]:
    """Returns the status of a cell and its reason: what an engine refused, or what was raised.

    An engine refuses by a `raise` of its own; anything else is a crash below or inside it.
    """
    last = traceback.extract_tb(error.__traceback__)[-1]
    line = linecache.getline(last.filename, last.lineno or 0).strip()
    is_refusal = last.filename.startswith(_ENGINES) and line.startswith("raise")
    verb = "refused" if is_refusal else "raised"
    return {"status": status_of(error), "reason": f"{verb}: {describe(error)}"}
