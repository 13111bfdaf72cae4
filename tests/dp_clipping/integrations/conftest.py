"""Private trainers of tiny language models, and what they are compared with."""

import copy
import math
import os
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

from ddp_by_hand.lm.rank_pool import Context  # noqa: E402
from dp_clipping.integrations.transformers import PrivacyArguments, PrivateTrainer  # noqa: E402
from tests.support.language_models import collated, language_model, reference_gradients, samples_of  # noqa: E402


class Recorded(torch.utils.data.Dataset):
    """Samples of a kind of model, and which of them were taken since `taken` was emptied."""

    def __init__(self, kind: str, count: int):
        self.samples, self.taken = samples_of(kind, count), []

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, i: int) -> dict:
        self.taken.append(i)
        return dict(self.samples[i])


def arguments(folder: Any, **options: Any) -> Any:
    given = {
        "per_device_train_batch_size": 4, "max_steps": 3, "learning_rate": 1e-2, "report_to": [],
        "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1,
        "max_grad_norm": 0.0, **options,
    }  # fmt: skip
    return transformers.TrainingArguments(str(folder), **given)


def privacy(**options: Any) -> PrivacyArguments:
    given = {"noise_multiplier": 1.0, "target_delta": 1e-5, "accountant": "rdp", **options}
    if "target_epsilon" in given:
        del given["noise_multiplier"]
    given["options"] = {"grad_sample_mode": "bookkeeping", **given.get("options", {})}
    return PrivacyArguments(**given)


def trainer_of(kind: str, folder: Any, *, network: Any = None, **options: Any) -> PrivateTrainer:
    """A trainer of 24 samples; `options` are those of `TrainingArguments`."""
    own = options.pop("privacy", {})
    given = options.pop("trainer", {})
    network = language_model(kind) if network is None else network
    return PrivateTrainer(
        **{"model": network, "args": arguments(folder, **options), "privacy": privacy(**own),
           "train_dataset": Recorded(kind, 24), "data_collator": collated, **given},
    )  # fmt: skip


def weights(trainer) -> dict:
    """Returns a copy of the state of its model."""
    return {name: x.clone() for name, x in trainer.model.state_dict().items()}


class Compared(transformers.TrainerCallback):
    """Compares each step's gradient with that of single samples in float64, each padded alone.

    A unit's samples come side by side, and what fills it up is one of them again: its gradient is
    the sum of theirs, added one by one. So do the views of a sample, which are equal here.
    """

    def __init__(self, trainer: PrivateTrainer, C: float):
        self.trainer, self.C, self.sizes = trainer, C, []
        self.dataset = trainer.train_dataset
        trainer.add_callback(self)

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.dataset.taken.clear()

    def on_step_begin(self, *_: Any, model: Any, **__: Any) -> None:
        self.before = copy.deepcopy(model)

    def on_optimizer_step(self, args: Any, *_: Any, model: Any, **__: Any) -> None:
        taken, self.dataset.taken = self.dataset.taken, []
        self.sizes.append(len(taken))
        privacy = self.trainer.privacy
        each, views = privacy.examples_per_step or privacy.examples_per_unit, privacy.views
        batch_size = self.trainer.get_total_train_batch_size(args) / each
        each *= views
        total = {
            name: torch.zeros_like(p, dtype=torch.float64) for name, p in model.named_parameters()
        }
        assert len(taken) % each == 0
        self.units = [sorted(set(taken[i : i + each])) for i in range(0, len(taken), each)]
        for members in self.units:
            unit = {name: torch.zeros_like(x) for name, x in total.items()}
            for i in members:
                batch = collated([self.dataset.samples[i]])
                _, found = reference_gradients(self.before, batch, math.inf)
                for name, g in found.items():
                    unit[name] += g
            norm = torch.stack([g.norm() for g in unit.values()]).norm()
            for name, g in unit.items():
                total[name] += g * min(1.0, self.C / float(norm))
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(
                parameter.grad.double(), total[name] / batch_size, rtol=1e-4, atol=1e-6, msg=name
            )


def as_launched(context: Context | None) -> int:
    """Sets what a launcher tells each of its processes; returns how many there are."""
    if context is None:
        return 1
    os.environ.update(
        RANK=str(context.rank), LOCAL_RANK=str(context.rank), WORLD_SIZE=str(context.world_size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT="1",
    )  # fmt: skip
    return context.world_size
