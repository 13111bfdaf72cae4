"""`PrivateTrainer`: a Hugging Face Trainer whose training is differentially private."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from dp_clipping.accounting.statement import PrivacyStatement
from dp_clipping.build import noise_for_target
from dp_clipping.engine import PrivacyEngine
from dp_clipping.integrations.logical_batches import LogicalBatches, Microbatches
from dp_clipping.integrations.trainer_arguments import (
    NotLogged,
    PrivacyArguments,
    adapters_of,
    arguments_of_loop,
    refusals_of,
    refuse_arguments,
    refuse_dataset,
    refuse_divided,
    refuse_missing,
    refuse_unreached,
    warn_of_still,
)
from dp_clipping.losses.private_loss import PrivateLoss

try:
    from accelerate.utils import send_to_device
    from transformers import Trainer, TrainingArguments
    from transformers.trainer_utils import TrainOutput, seed_worker
except ImportError as error:
    raise ImportError(
        f"PrivateTrainer needs transformers and accelerate ({error}): "
        "pip install 'ddp-by-hand[transformers]'"
    ) from error

__all__ = ["PrivacyArguments", "PrivateTrainer"]

STATE, SCHEDULER = "privacy.pt", "scheduler.pt"
NO_LOSS = (
    "the model returns no loss for a batch of {names}: let samples have labels, as "
    "data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False) makes them of a text, or "
    "give compute_loss_func=f, an f(outputs, labels, num_items_in_batch=None) that returns one "
    "loss a sample"
)
UNPROTECTED = ("loss", "train_loss", "total_flos", "num_input_tokens_seen")


class PrivateTrainer(Trainer):
    """A `transformers.Trainer` whose training is differentially private.

    It takes the Trainer's arguments, and:

    Args:
        privacy: ε or σ, δ, C, and what else makes the training private.
        data_parallel: on several ranks, wraps the model in what adds up clipped sums:
            `functools.partial(ddp.wrap, "ddp_bucketed")`.

    A batch of `per_device_train_batch_size` · `gradient_accumulation_steps` · ranks is the expected
    size of a Poisson batch, for which the optimizer and the learning rate take one step. It runs in
    microbatches of at most `per_device_train_batch_size` samples, as many as it needs.

    The loss of a sample is the mean over its own tokens; the model computes it from its labels. A
    `compute_loss_func(outputs, labels, num_items_in_batch=None)` returns one loss per sample, and a
    `compute_loss` of your own `self.criterion(outputs, labels)` or what the model computes.

    Logs have `epsilon` so far, and `grad_norm` of the gradient with its noise. The training loss is
    not covered by ε: it is logged with `PrivacyArguments(log_unprotected=True)`.

    Beside each model that it saves once training has begun, in checkpoints too, are `privacy.json`
    and a section of its `README.md` with the guarantee so far.

    A checkpoint has the state of the privacy engine in `privacy.pt`, without the weights, which are
    beside it. Its key, with which the noise can be subtracted, is written to
    `PrivacyArguments.key_folder`: publish the one without the other. `resume_from_checkpoint` goes
    on bit for bit.

    Attributes:
        engine: the `PrivacyEngine`.
        criterion: `compute_loss_func`, called for one loss per sample; set in training.

    Raises:
        ValueError: for arguments that private training cannot follow, with what to use instead.
    """

    def __init__(
        self,
        *args: Any,
        privacy: PrivacyArguments | None = None,
        data_parallel: Callable[[nn.Module], nn.Module] | None = None,
        **kwargs: Any,
    ):
        given = dict(zip(("model", "args"), args, strict=False)) | kwargs
        refuse_missing(given, privacy)
        assert privacy is not None
        own: TrainingArguments = given.pop("args")
        refuse_arguments(own, refusals_of(own, privacy, data_parallel is not None))
        self.privacy, self._data_parallel = privacy, data_parallel
        self._accumulation_steps = own.gradient_accumulation_steps
        self.engine = PrivacyEngine(**privacy.of_engine())
        self._made: tuple[nn.Module, Any, Any] | None = None  # network, batches, and data of those
        self._epsilon = (-1, 0.0)  # steps, and ε after them
        super().__init__(*args[2:], args=arguments_of_loop(own), **given)
        self._user_loss = self.compute_loss_func
        self.compute_loss = partial(self._checked, self.compute_loss)

    def privacy_statement(self) -> PrivacyStatement:
        """Returns the guarantee of the training so far, with all that it depends on: `print` it."""
        return self.engine.privacy_statement(delta=self.privacy.target_delta)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves the model and its `privacy.json`, and states the guarantee in its `README.md`."""
        super().save_model(output_dir, _internal_call)
        self._state_privacy(output_dir)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Writes the Trainer's `README.md`, and the guarantee into it."""
        super().create_model_card(*args, **kwargs)
        self._state_privacy()

    def _state_privacy(self, output_dir: str | None = None) -> None:
        """Writes the statement beside the model's files, on rank 0, once training has begun."""
        if self._made is not None and self.args.should_save:
            self.privacy_statement().write_beside(output_dir or self.args.output_dir)

    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """Trains privately; metrics have `epsilon`, and the loss if it is to be logged."""
        before = {name: p.detach().clone() for name, p in adapters_of(self.model).items()}
        output = super().train(*args, **kwargs)
        warn_of_still(before, self.model, self.state.global_step)
        metrics = {**output.metrics, "epsilon": self._spent()}
        if self.privacy.log_unprotected:
            return output._replace(metrics=metrics)
        metrics = {name: x for name, x in metrics.items() if name not in UNPROTECTED}
        return output._replace(training_loss=NotLogged("nan"), metrics=metrics)

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Raises ValueError: each trial trains on the data, and so spends its own ε."""
        raise ValueError(
            "hyperparameter_search trains on the private data in each trial, and the choice of the "
            "best one is not covered by epsilon: choose settings on public data"
        )

    def get_train_dataloader(self) -> DataLoader:
        """Returns a plain loader: its batches are replaced by Poisson batches of the same size."""
        args = self.args
        refuse_dataset(self.train_dataset)
        own = super().get_train_dataloader()  # whose columns are those that the model takes
        workers = args.dataloader_num_workers
        return DataLoader(
            own.dataset,
            batch_size=self.get_total_train_batch_size(args),
            collate_fn=own.collate_fn,
            num_workers=workers,
            pin_memory=args.dataloader_pin_memory and args.device.type != "cpu",
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
            multiprocessing_context=args.dataloader_multiprocessing_context,
            worker_init_fn=partial(seed_worker, num_workers=workers, rank=args.process_index),
            drop_last=args.dataloader_drop_last,
        )

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        return args.train_batch_size * self._accumulation_steps * args.world_size

    def set_initial_training_values(self, args: TrainingArguments, dataloader: DataLoader) -> Any:
        batches = range(self.privacy.sampled(dataloader).rates[1])
        epoch: DataLoader = DataLoader(dataloader.dataset, batch_size=None, sampler=batches)
        return super().set_initial_training_values(args, epoch)  # of which its length counts

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> None:
        """Returns None: a sample's loss does not depend on the others' tokens."""

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: DataLoader, resume_from_checkpoint: str | None
    ) -> tuple[nn.Module, LogicalBatches]:
        if self._created_lr_scheduler:
            self.lr_scheduler, self._created_lr_scheduler = None, False
        target = self.privacy.target_epsilon
        if target and len(self.engine.accountant) and resume_from_checkpoint is None:
            raise ValueError(
                "train() was called before, and target_epsilon is for one training: give "
                "PrivacyArguments(noise_multiplier=..), with which epsilon adds up"
            )
        if self._made is not None and self._made[2] is not self.train_dataset:
            raise ValueError(
                "train_dataset was replaced since train() was called, and epsilon is of one data "
                "set: create a PrivateTrainer for each"
            )
        is_made = self._made is not None and self._made[0] is self.model
        if not is_made:
            self._make_private(max_steps, train_dataloader)
        self.create_scheduler(num_training_steps=max_steps)
        if resume_from_checkpoint is not None:
            self.optimizer.leave_microbatches(half_way=True)  # of a step that was interrupted
            self._load_optimizer_and_scheduler(resume_from_checkpoint)
        if target and (is_made or resume_from_checkpoint is not None):
            self._refuse_above(target, max_steps - self.optimizer.steps)
        batches = self._made[1]
        handler = self.callback_handler
        handler.model, handler.optimizer = self.model, self.optimizer
        handler.lr_scheduler, handler.train_dataloader = self.lr_scheduler, batches
        return self.model_wrapped, batches

    def _make_private(self, max_steps: int, loader: DataLoader) -> None:
        privacy, network = self.privacy, self._network()
        if self._data_parallel is not None and self.args.world_size > 1:
            network = self._data_parallel(network)
            refuse_divided(network)
        self.model.train()  # from_pretrained and an evaluation leave it otherwise
        self.create_optimizer()
        arguments = privacy.of_make_private()
        noise = privacy.noise_multiplier
        if noise is None:
            noise = noise_for_target(
                self.engine, network, privacy.sampled(loader), steps=max_steps,
                expected_batch_size=arguments.get("expected_batch_size"),
                target_epsilon=privacy.target_epsilon, target_delta=privacy.target_delta,
            )  # fmt: skip
        self.model_wrapped, self.optimizer, self.criterion, loader = self.engine.make_private(
            module=network, optimizer=self.optimizer, data_loader=loader,
            criterion=self._loss_per_sample(), noise_multiplier=noise,
            max_grad_norm=privacy.max_grad_norm, wrap_model=False, **arguments,
        )  # fmt: skip
        if self._user_loss is not None:
            self.compute_loss_func = lambda outputs, labels, **_: self.criterion(outputs, labels)
        self._refuse_unreached_adapters(loader)
        size = self.args.train_batch_size
        batches = LogicalBatches(loader, self.optimizer, size, privacy.pad_batches)
        self._made = self.model, batches, self.train_dataset

    def _network(self) -> nn.Module:
        """Returns the network of the private run, whose forward takes a batch."""
        return self.model

    def _loss_per_sample(self) -> Callable[..., Any] | None:
        """Returns the criterion of the private run; None: the model computes its loss."""
        return self._user_loss and partial(self._user_loss, num_items_in_batch=None)

    def _refuse_above(self, target: float, left: int) -> None:
        """Raises ValueError if so many more steps would end above `target_epsilon`."""
        epsilon = self.engine.epsilon_at_end(self.optimizer, left, self.privacy.target_delta)
        if epsilon > target:
            raise ValueError(
                f"epsilon would end at {epsilon:.3f}, above target_epsilon={target:g}, which is "
                "for the steps of the first run: give its TrainingArguments(num_train_epochs=.., "
                "max_steps=..), or PrivacyArguments(noise_multiplier=..), by which epsilon adds up"
            )

    def _refuse_unreached_adapters(self, loader: DataLoader) -> None:
        """Raises ValueError for adapters that no loss reaches."""

        def of_a_sample() -> Tensor:
            batch = loader.collate_fn.collate_fn([loader.dataset[0]])
            inputs = send_to_device(dict(batch), self.args.device)
            found = self.compute_loss(self.model_wrapped, inputs)
            return getattr(found, "loss_per_sample", found).sum()

        self.model_wrapped.eval()
        with torch.random.fork_rng(devices=[]):
            refuse_unreached(self.model, of_a_sample)
        self.model_wrapped.train()

    def _run_epoch(self, **kwargs: Any) -> None:
        """Runs an epoch, or the rest of one after a resume."""
        steps = self._steps_of_epoch = kwargs["num_update_steps_per_epoch"]
        done = self.state.global_step - kwargs["epoch"] * steps
        super()._run_epoch(**kwargs | {"num_update_steps_per_epoch": steps - done})

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        epoch, done = divmod(self.state.global_step, self._steps_of_epoch)
        self.state.epoch = epoch + done / self._steps_of_epoch
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def training_step(
        self, model: nn.Module, inputs: Microbatches, num_items_in_batch: Any = None
    ) -> Tensor:
        """Runs forward and backward of all microbatches of a Poisson batch.

        Returns:
            The mean loss of its samples, if it is to be logged; else 0.
        """
        total, samples = torch.zeros((), device=self.args.device), 0
        for microbatch in inputs:
            loss = super().training_step(model, microbatch)
            if self.privacy.log_unprotected:
                total += loss * inputs.samples
                samples += inputs.samples
                self.current_flos += float(super().floating_point_ops(microbatch))
                super()._track_num_input_tokens(microbatch)
            if not inputs.is_last:
                self.optimizer.step()
        return total / max(1, samples)

    def _checked(self, of: Callable, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns the loss of `compute_loss`, a subclass's too, if samples can be told apart."""
        try:
            found = of(model, inputs, *args, **kwargs)
        except ValueError as error:
            if "did not return a loss" in str(error):
                raise ValueError(NO_LOSS.format(names=", ".join(inputs))) from error
            raise
        is_private = isinstance(found[0] if isinstance(found, tuple) else found, PrivateLoss)
        if model.training and torch.is_grad_enabled() and not is_private:
            raise ValueError(
                f"{type(self.model).__name__} computes a loss in which samples cannot be told "
                "apart: PrivateTrainer(compute_loss_func=f, ..) with an f(outputs, labels, "
                "num_items_in_batch=None) that returns one loss per sample"
            )
        return found

    def autocast_smart_context_manager(
        self, cache_enabled: bool | None = True
    ) -> AbstractContextManager:
        if not self.args.bf16:
            return nullcontext()
        return torch.autocast(self.args.device.type, torch.bfloat16, cache_enabled=cache_enabled)

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        """Returns the arguments of an accelerator that does not change the model's forward."""
        return super()._build_accelerator_args(**kwargs) | {"mixed_precision": "no"}

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Tensor:
        """Returns the norm of the gradient that the optimizer is about to apply: it has noise."""
        self.optimizer.pre_step()
        held = [p for group in self.optimizer.param_groups for p in group["params"]]
        return nn.utils.get_total_norm([p.grad for p in held if p.grad is not None])

    def floating_point_ops(self, inputs: Any) -> int:
        return 0 if isinstance(inputs, Microbatches) else super().floating_point_ops(inputs)

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """Does nothing: microbatches are counted where they run."""

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Logs ε beside training's metrics, and removes metrics that ε does not cover."""
        if "loss" in logs or "train_runtime" in logs:
            logs["epsilon"] = self._spent()
        if not self.privacy.log_unprotected:
            for name in UNPROTECTED:
                logs.pop(name, None)
        super().log(logs, start_time)

    def _spent(self) -> float:
        """Returns ε so far."""
        steps = sum(count for *_, count in self.engine.accountant.history)
        if self._epsilon[0] != steps:
            self._epsilon = steps, self.engine.get_epsilon(self.privacy.target_delta)
        return self._epsilon[1]

    def _key_file(self, checkpoint: str) -> str:
        folder = self.privacy.key_folder or os.path.normpath(self.args.output_dir) + ".keys"
        Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
        return str(Path(folder) / f"{Path(checkpoint).name}.key")

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self.engine.save_checkpoint(
            path=os.path.join(output_dir, STATE), module=self.model_wrapped,
            optimizer=self.optimizer, data_loader=self._made[1].loader,
            key_path=self._key_file(output_dir),
            # The Trainer writes the model, and of one with adapters these alone.
            weights="trainable" if hasattr(self.model, "peft_config") else "none",
        )  # fmt: skip
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER))

    def _load_optimizer_and_scheduler(self, checkpoint: str) -> None:
        path = os.path.join(checkpoint, STATE)
        if not os.path.isfile(path):
            raise ValueError(
                f"{checkpoint} has no {STATE}, so what was spent before is not known (it was saved "
                "with save_only_model=True, or by another Trainer): give a checkpoint that "
                "PrivateTrainer has saved"
            )
        self.engine.load_checkpoint(
            path=path, module=self.model_wrapped, optimizer=self.optimizer,
            data_loader=self._made[1].loader, key_path=self._key_file(checkpoint),
            new_keys=self.privacy.new_keys,
        )  # fmt: skip
        scheduler = torch.load(os.path.join(checkpoint, SCHEDULER), weights_only=True)
        self.lr_scheduler.load_state_dict(scheduler)
