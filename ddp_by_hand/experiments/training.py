"""A classifier in training, with privacy or without, whose steps are timed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ddp_by_hand.experiments.rounds import BASELINE, FUSED_STEP, PER_LAYER
from dp_clipping.modes import MODES

OURS = "flash_bookkeeping"
OPACUS = "opacus_"  # in front of the name of one of its modes
OPACUS_VARIANTS = ("opacus_hooks", "opacus_ghost")
CHOICES = (BASELINE, *MODES, *(mode + PER_LAYER for mode in MODES[1:]), *OPACUS_VARIANTS)
CHOICES += (OURS + FUSED_STEP, OURS + PER_LAYER + FUSED_STEP)
Batch = tuple[Tensor, Tensor]


def options_of(variant: str) -> dict[str, Any]:
    """Returns the options of `make_private` that a private variant's name stands for."""
    name = variant.removeprefix(OPACUS).removesuffix(FUSED_STEP)
    clipping = "per_layer" if name.endswith(PER_LAYER) else "flat"
    options = {"grad_sample_mode": name.removesuffix(PER_LAYER), "clipping": clipping}
    return options | ({"fused_step": True} if variant.endswith(FUSED_STEP) else {})


class ClassifierTraining:
    """A Hugging Face classifier with AdamW; see `lm.timing.Trainee`.

    Attributes:
        model: the network, or the private model around it.
        loader: announces batches, if it is private.
    """

    def __init__(
        self, network: nn.Module, device: torch.device, learning_rate: float = 1e-5,
        capturable: bool = False,
    ) -> None:  # fmt: skip
        self.model = network
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            [p for p in network.parameters() if p.requires_grad],
            lr=learning_rate,
            fused=device.type == "cuda",
            capturable=capturable,
        )
        self.criterion: Callable[[Tensor, Tensor], Tensor] = nn.CrossEntropyLoss()
        self._finish: Callable[[], None] = lambda: None  # backward waits for FSDP's own exchange

    def make_private(self, engine: Any, batch_size: int, **options: Any) -> None:
        """Makes it private by `engine`, a `PrivacyEngine` of this package or Opacus's.

        Batches of fixed size are compared: nothing is published, and no ε is stated.
        """
        # Only its length and its batches' sizes are used: what is trained on comes from elsewhere.
        loader = DataLoader(range(64 * batch_size), batch_size, collate_fn=torch.tensor)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="poisson_sampling=False")
            self.model, self.optimizer, *others = engine.make_private(
                module=self.model, optimizer=self.optimizer, criterion=self.criterion,
                data_loader=loader, poisson_sampling=False, **options,
            )  # fmt: skip
        self.loader = others[-1]
        if len(others) == 2:  # Opacus returns no criterion for its `hooks`
            self.criterion = others[0]
        if hasattr(self.model, "skip_checks"):
            self.model.skip_checks()  # they would be in some of the few steps that are timed
            self._finish = self.model.finish_synchronization

    def make_variant(self, variant: str, samples: int, **options: Any) -> None:
        """Makes it what a variant is called: `ordinary`, a mode, or `opacus_` and a mode of it."""
        if variant == BASELINE:
            return
        engine = import_module("opacus" if variant.startswith(OPACUS) else "dp_clipping")
        self.make_private(
            engine.PrivacyEngine(accountant="rdp"), samples, noise_multiplier=1.0,
            max_grad_norm=1.0, **options_of(variant), **options,
        )  # fmt: skip

    def backward(self, batch: Batch) -> None:
        """Runs forward and backward and exchanges the sums between ranks."""
        tokens, labels = batch
        self.criterion(self.model(input_ids=tokens).logits, labels).backward()
        self._finish()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
