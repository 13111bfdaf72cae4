"""`PrivateSFTTrainer` and `PrivateDPOTrainer`: trainers of TRL whose training is private."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from dp_clipping.integrations.preference_losses import LOSSES, Pairs, loss_of_pairs
from dp_clipping.integrations.trainer_arguments import (
    PrivacyArguments,
    refuse_arguments,
    refuse_dataset,
    refuse_missing,
)
from dp_clipping.integrations.transformers import PrivateTrainer
from dp_clipping.kinds import WrongType, shown

try:
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
except ImportError as error:
    raise ImportError(
        f"PrivateSFTTrainer and PrivateDPOTrainer need trl ({error}): "
        "pip install 'ddp-by-hand[trl]'"
    ) from error

__all__ = ["PrivacyArguments", "PrivateDPOTrainer", "PrivateSFTTrainer"]


class _PrivateTRLTrainer(PrivateTrainer):
    """A private trainer of TRL: refuses what mixes samples, and logs what is asked for."""

    _config: Any = SFTConfig
    _refused: Callable[[Any, Any], list[tuple[bool, str, str]]]
    _noted: dict[str, list[float]]  # of the microbatches since the last log

    def __init__(
        self, model: Any = None, args: Any = None, *, privacy: Any = None, **given: Any
    ) -> None:
        self._refuse(model, args, privacy, given)
        self._noted = {}
        super().__init__(model=model, args=args, privacy=privacy, **given)
        examples = len(given["train_dataset"])
        if self.aux_loss_enabled:
            raise ValueError(
                "the loss of this model balances experts over the tokens of the batch: give "
                f"{self._config.__name__}(router_aux_loss_coef=0.0)"
            )
        if _has_units(privacy) and len(self.train_dataset) != examples:
            raise ValueError(
                f"{examples - len(self.train_dataset)} examples of train_dataset were left out, as "
                "max_length leaves nothing of them to train on, so units are not those of unit_ids "
                "or of consecutive examples: leave these examples out, or give a larger max_length"
            )

    def _refuse(self, model: Any, args: Any, privacy: Any, given: dict) -> None:
        name, config = type(self).__name__, self._config
        refuse_missing({"model": model, "args": args}, privacy, config.__name__)
        if not isinstance(args, config):
            raise WrongType(
                f"args is {shown(args)}: give {name}(args={config.__name__}(output_dir='..'), ..)"
            )
        refuse_dataset(given.get("train_dataset"), name)
        columns = getattr(given["train_dataset"], "column_names", ())
        refuse_arguments(args, [
            (args.activation_offloading, "activation_offloading=True",
             "activations are kept for the gradients of samples: gradient_checkpointing=True saves "
             "memory"),
            (bool(args.router_aux_loss_coef), f"router_aux_loss_coef={args.router_aux_loss_coef}",
             "it balances experts over the tokens of the batch: router_aux_loss_coef=0.0"),
            *type(self)._refused(args, privacy),
        ])  # fmt: skip
        adapters = given.get("peft_config") or getattr(model, "active_peft_config", None)
        if getattr(adapters, "is_prompt_learning", False):
            raise ValueError(
                f"{type(adapters).__name__} puts virtual tokens before each sample, which are not "
                "built here: give peft_config=LoraConfig(..)"
            )
        if {"image", "images"} & set(columns):
            raise NotImplementedError(
                "train_dataset has images, of which a batch has not one row per sample: use a loop "
                "of your own with PrivacyEngine().make_private(module=model, ..)"
            )

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Logs what is noted of microbatches too, which `log_unprotected` asks for."""
        if self.model.training:
            logs.update({name: sum(values) / len(values) for name, values in self._noted.items()})
            self._noted.clear()
        super().log(logs, start_time)


def _has_units(privacy: PrivacyArguments) -> bool:
    return privacy.examples_per_unit > 1 or privacy.unit_ids is not None


def _outputs(network: Any, model: Any, inputs: dict[str, Tensor], labels: Tensor) -> Tensor:
    """Returns log-probabilities of the labels [B, T - 1], or logits [B, T, V].

    The first ones TRL computes without logits, from the weights of the head. A head that is trained
    is called as a layer, whose gradients of samples are cheap.

    Args:
        network: called; the model, maybe in a wrapper.
    """
    if any(p.requires_grad for p in model.get_output_embeddings().parameters()):
        return network(**inputs, use_cache=False).logits
    return network(**inputs, labels=labels, fused_lm_head=True).log_probs


def _log_probs(outputs: Tensor, labels: Tensor) -> Tensor:
    """Returns log-probabilities of the labels after the first, [.., T - 1]; 0 where one is −100."""
    labels = labels[..., 1:]
    if outputs.dim() == labels.dim():
        return outputs.where(labels != -100, 0)  # so the gradient by padding is 0 as well
    logits = outputs[..., :-1, :].float().movedim(-1, 1)
    return -F.cross_entropy(logits, labels, reduction="none")


class PrivateSFTTrainer(_PrivateTRLTrainer, SFTTrainer):
    """A `trl.SFTTrainer` whose training is differentially private.

    It takes the arguments of `SFTTrainer`, and those of `PrivateTrainer`: `privacy` and
    `data_parallel`. Data are prepared as TRL does: chat templates, masks of prompts, truncation.

    The loss of a sample is the mean over its own tokens that have a label. (TRL divides by those of
    the whole batch.) A `compute_loss_func(outputs, labels, num_items_in_batch=None)` returns one
    loss per sample.

    Attributes:
        engine: the `PrivacyEngine`.

    Raises:
        ValueError: for arguments that private training cannot follow, with what to use instead.
    """

    @staticmethod
    def _refused(args: Any, privacy: Any) -> list[tuple[bool, str, str]]:
        each = "each sample needs rows of its own"
        return [
            (args.packing, "packing=True",
             f"{each}: leave it out; max_length truncates a sample, and longer texts are cut "
             "before, into examples of one unit, PrivacyArguments(examples_per_unit=.., "
             "unit_ids=..)"),
            (_has_units(privacy) and args.shuffle_dataset, "shuffle_dataset=True",
             "units are told by the order of train_dataset: leave it out, batches are random "
             "samples"),
            (args.padding_free, "padding_free=True", f"{each}: leave it out"),
        ]  # fmt: skip

    def _loss_per_sample(self) -> Callable[..., Any]:
        return super()._loss_per_sample() or self._losses

    def _losses(self, outputs: Tensor, labels: Tensor) -> Tensor:
        log_probs = _log_probs(outputs, labels)
        losses = -log_probs
        if self.args.loss_type == "dft":  # Wu et al. 2025
            losses = losses * log_probs.exp().detach()
        return losses.sum(1) / (labels[:, 1:] != -100).sum(1).clamp(min=1)

    def compute_loss(  # type: ignore[override]
        self, model: Any, inputs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Returns a private loss; in evaluation TRL's, the mean over the tokens of a batch."""
        if not torch.is_grad_enabled():
            return SFTTrainer.compute_loss(self, model, inputs, *args, **kwargs)
        inputs = dict(inputs)
        labels = inputs.pop("labels")
        if self._user_loss is not None:
            return self.criterion(model(**inputs), labels)
        outputs = _outputs(model, self.model, inputs, labels)
        if self.privacy.log_unprotected:
            self._total_train_tokens += int(inputs["attention_mask"].sum())
            self._noted["num_tokens"] = [self._total_train_tokens]
        return self.criterion(outputs, labels)


class PrivateDPOTrainer(_PrivateTRLTrainer, DPOTrainer):
    """A `trl.DPOTrainer` whose training is differentially private; an example is a preference pair.

    It takes the arguments of `DPOTrainer`, and those of `PrivateTrainer`: `privacy` and
    `data_parallel`. The gradient of a pair's loss, by both of its completions, is clipped as one.
    Batch sizes and `PrivacyArguments(examples_per_unit=k, unit_ids=..)` count pairs.

    The reference is `ref_model`, or the model as it is given: without new adapters, or a copy. Of
    the adapters of a given `PeftModel` TRL keeps a copy, and saves it in `ref/`.

    What precomputes it (`precompute_ref_log_probs`) sees the data without noise, and TRL keeps that
    in the cache of the data set: do not publish it.

    Attributes:
        engine: the `PrivacyEngine`.

    Raises:
        ValueError: for arguments that private training cannot follow, with what to use instead.
    """

    _config = DPOConfig

    @staticmethod
    def _refused(args: Any, privacy: Any) -> list[tuple[bool, str, str]]:
        mixing = [name for name in args.loss_type if name not in LOSSES]
        return [
            (bool(mixing), f"loss_type={mixing}",
             f"not known as a loss of one pair: give one or several of {', '.join(LOSSES)}"),
            (args.padding_free, "padding_free=True",
             "each sample needs rows of its own: leave it out"),
            (args.use_weighting, "use_weighting=True", "leave it out, all pairs have weight 1"),
            (args.ld_alpha is not None, f"ld_alpha={args.ld_alpha}",
             "leave it out, all tokens have weight 1"),
            (args.f_divergence_type != "reverse_kl",
             f"f_divergence_type={args.f_divergence_type!r}", "leave it at 'reverse_kl'"),
            (args.beta <= 0, f"beta={args.beta}", "give a number above 0"),
            ("robust" in args.loss_type and not 0 <= args.label_smoothing < 0.5,
             f"label_smoothing={args.label_smoothing}", "loss_type='robust' needs one below 0.5"),
            (bool(args.label_smoothing_factor),
             f"label_smoothing_factor={args.label_smoothing_factor}",
             "leave it out: it is of classes; label_smoothing is of preferences"),
            (args.sync_ref_model, "sync_ref_model=True",
             "a checkpoint has no reference to resume with: leave it out, or train again with "
             "ref_model=.."),
        ]  # fmt: skip

    def __init__(
        self, model: Any = None, ref_model: Any = None, args: Any = None, *,
        privacy: Any = None, **given: Any,
    ) -> None:  # fmt: skip
        self._refuse(model, args, privacy, given)
        in_memory = not getattr(given["train_dataset"], "cache_files", ())
        if args.precompute_ref_log_probs and args.world_size > 1 and in_memory:
            raise ValueError(
                "DPOConfig(precompute_ref_log_probs=True) on several ranks: TRL writes what it "
                "precomputes beside the data set, and this one is in memory: "
                "train_dataset.save_to_disk('pairs'), and on each rank give "
                "train_dataset=datasets.load_from_disk('pairs')"
            )
        is_adapted = given.get("peft_config") is not None or hasattr(model, "active_peft_config")
        if ref_model is None and not is_adapted and not args.precompute_ref_log_probs:
            ref_model = copy.deepcopy(model)
        super().__init__(
            model=model, args=args, privacy=privacy, **given | {"ref_model": ref_model}
        )

    def get_train_dataloader(self) -> DataLoader:
        """Returns a plain loader of pairs: each tensor is [pairs, 2, ..], the chosen one first."""
        loader = super().get_train_dataloader()
        loader.collate_fn = _Paired(loader.collate_fn)
        return loader

    def compute_ref_log_probs(self, model: Any, inputs: Any) -> tuple[Tensor, ...]:
        """Returns the reference's log-probabilities, computed in the precision of training."""
        with self.autocast_smart_context_manager():
            return super().compute_ref_log_probs(model, inputs)

    def _network(self) -> nn.Module:
        return _OfPairs(self.model)

    def _loss_per_sample(self) -> Callable[..., Any]:
        return lambda *given: self._of_pairs(*given)[0]

    def _of_pairs(self, outputs: Tensor, labels: Tensor, reference: Tensor) -> tuple[Tensor, Pairs]:
        log_probs, tokens = _log_probs(outputs, labels).sum(2), (labels != -100).sum(2)
        return loss_of_pairs(log_probs, tokens, reference, self.args)

    def compute_loss(  # type: ignore[override]
        self, model: Any, inputs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Returns a private loss; in evaluation TRL's, the mean over the pairs."""
        if not torch.is_grad_enabled():
            return DPOTrainer.compute_loss(self, model, inputs, *args, **kwargs)
        labels = inputs["input_ids"].masked_fill(inputs["completion_mask"] == 0, -100)
        reference = self._reference(inputs)
        outputs = model(inputs["input_ids"], inputs["attention_mask"], labels)
        if self.privacy.log_unprotected:
            self._note(outputs, labels, reference)
        return self.criterion(outputs, labels, reference)

    def _reference(self, inputs: Any) -> Tensor:
        """Returns log π_ref(y|x), [pairs, 2]."""
        if "reference" in inputs:
            return inputs["reference"]
        if not len(inputs["input_ids"]):
            return torch.zeros(0, 2, device=self.args.device)
        flat = {name: x.flatten(0, 1) for name, x in inputs.items()}
        found = self.compute_ref_log_probs(self.ref_model or self.model, flat)
        return torch.cat(found).view(-1, 2)

    @torch.no_grad()
    def _note(self, outputs: Tensor, labels: Tensor, reference: Tensor) -> None:
        """Keeps the rewards of a microbatch for the log."""
        pairs = self._of_pairs(outputs, labels, reference)[1]
        real = (labels != -100).flatten(1).any(1)
        chosen, rejected = pairs.beta * pairs.chosen[real], pairs.beta * pairs.rejected[real]
        for name, x in (
            ("chosen", chosen), ("rejected", rejected), ("margins", chosen - rejected),
            ("accuracies", (chosen > rejected).float()),
        ):  # fmt: skip
            if len(x):
                self._noted.setdefault(f"rewards/{name}", []).append(x.mean().item())


class _OfPairs(nn.Module):
    """Calls a model with both completions of each pair."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        """Returns log-probabilities [pairs, 2, T - 1] or logits [pairs, 2, T, V]."""
        inputs = {
            "input_ids": input_ids.flatten(0, 1),
            "attention_mask": attention_mask.flatten(0, 1),
        }
        return _outputs(self.model, self.model, inputs, labels.flatten(0, 1)).unflatten(
            0, (len(labels), 2)
        )


class _Paired:
    """Collates pairs with TRL's collator, to tensors [pairs, 2, ..]."""

    def __init__(self, collate_fn: Callable[[list], Any]):
        self.collate_fn = collate_fn

    def __call__(self, pairs: list) -> dict[str, Tensor]:
        batch = self.collate_fn(pairs)  # in which the chosen ones come first, then the rejected
        made = {
            name: torch.stack(batch[name].chunk(2), 1)
            for name in ("input_ids", "attention_mask", "completion_mask")
        }
        if "ref_chosen_logps" in batch:
            names = ("ref_chosen_logps", "ref_rejected_logps")
            made["reference"] = torch.stack([batch[name] for name in names], 1)
        return made
