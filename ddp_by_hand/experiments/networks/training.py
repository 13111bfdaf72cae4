"""A network of a row in training: ordinary, private, or private by Opacus."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from ddp_by_hand.experiments.networks.rows import NetworkRow, Task
from ddp_by_hand.experiments.training import OPACUS, ClassifierTraining


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
