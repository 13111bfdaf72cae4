"""`PrivacyArguments`, and the arguments and adapters that private training refuses."""

import copy
import logging
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from dp_clipping.arguments.checks import checked
from dp_clipping.arguments.sampled import Sampled
from dp_clipping.kinds import WrongType, instance_of, shown

LOG = logging.getLogger(__name__)
OPTIMIZERS = (  # that read `.grad` in `step()`, and nowhere else
    "adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop", "stable_adamw",
)  # fmt: skip
OPTIONS = (  # of make_private, which no argument of a trainer stands for
    "adaptive_threshold", "clipping", "clipping_function", "data_parallel_group", "gamma",
    "grad_sample_mode", "loss_reduction", "memory_budget", "noise_generator", "noise_mechanism",
    "norm_algorithm", "norm_reduction", "rand_on_empty", "tile_size",
)  # fmt: skip
ENGINE = ("accountant", "secure_mode", "checks")  # arguments of PrivacyEngine
SAMPLED = (
    "sample_rate", "steps", "sampling", "max_batch_size", "examples_per_unit", "unit_ids",
    "examples_per_step", "views",
)  # fmt: skip
UNREACHED = (
    "the loss has no gradient for {names}, which would get noise and nothing else: freeze them, "
    "p.requires_grad_(False), or let the loss use them (of a PEFT model: "
    'model.set_adapter("..") activates an adapter, model.enable_adapter_layers() all)'
)
FROZEN = (
    'of the active adapter {names} are frozen and will not move: model.set_adapter(".."), or '
    "LoraConfig(inference_mode=False), trains it"
)
STILL = (
    "{names} have not moved in {steps} steps: is the learning rate 0, or did a scheduler leave it "
    "there? TrainingArguments(learning_rate=1e-3, ..)"
)


class NotLogged(float):
    """A loss that is not shown, since ε does not cover it: as a number NaN, printed as words."""

    def __repr__(self) -> str:
        return "not shown: PrivacyArguments(log_unprotected=True)"

    def __format__(self, specification: str) -> str:
        return repr(self)


@dataclass(frozen=True, kw_only=True)
class PrivacyArguments:
    """How private the training of a `PrivateTrainer` is; beside its `TrainingArguments`.

    Args:
        target_delta: δ, far below 1 / samples. ε is stated at this δ.
        target_epsilon: ε at the end of the training; it determines the noise.
        noise_multiplier: σ, in place of `target_epsilon`.
        max_grad_norm: C, the norm to which each sample's gradient is clipped. It is not the
            Trainer's own, which would clip the sum of the batch and is off.
        examples_per_unit: k, of which each unit of privacy (a user, a document) has so many at
            most. Batch sizes still count examples, and are multiples of k.
        unit_ids: the unit of each example of `train_dataset`. Default: k consecutive examples.
        examples_per_step: m, how many of a unit's examples a step draws. Batch sizes are then
            multiples of m, and with `unit_ids` k may be left out.
        views: how often `train_dataset` is asked for each sample of a batch, to clip the mean
            gradient; as of `PrivacyEngine.make_private`. Microbatches hold
            `per_device_train_batch_size` rows, a multiple of it.
        accountant: as of `PrivacyEngine`.
        sample_rate: probability of each sample to be in a batch, as a public constant. Default:
            1 / batches of an epoch.
        steps: batches of an epoch, as a public constant. Default: as the Trainer counts them.
        sampling: how the units of a batch are chosen, as of `PrivacyEngine.make_private`.
        max_batch_size: with `sampling="truncated_poisson"`, the most units of a batch.
        secure_mode: as of `PrivacyEngine`: cryptographic noise and batches, and an ε that includes
            what rounding costs.
        checks: which batches are looked at, as of `PrivacyEngine`: `"first"`, `"sampled"` or
            `"off"`.
        pad_batches: every microbatch has `per_device_train_batch_size` rows; see
            `BatchMemoryManager`.
        log_unprotected: also logs what ε does not cover: the training loss, tokens that were seen
            and operations that they took.
        key_folder: where checkpoints' keys are written. Default: beside `output_dir`, with
            `.keys` appended to its name.
        new_keys: `resume_from_checkpoint` draws a new key: the checkpoint's is lost, or the data
            have changed.
        options: further arguments of `PrivacyEngine.make_private`.

    Raises:
        ValueError: for an argument out of range.
    """

    target_delta: float
    target_epsilon: float | None = None
    noise_multiplier: float | None = None
    max_grad_norm: float | list[float] = 1.0
    examples_per_unit: int = 1
    unit_ids: Sequence[Hashable] | None = None
    examples_per_step: int | None = None
    views: int = 1
    accountant: str = "pld"
    sample_rate: float | None = None
    steps: int | None = None
    sampling: str = "poisson"
    max_batch_size: int | None = None
    secure_mode: bool = False
    checks: str = "first"
    pad_batches: bool = False
    log_unprotected: bool = False
    key_folder: str | None = None
    new_keys: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.target_epsilon is None) == (self.noise_multiplier is None):
            raise ValueError(
                "give one of target_epsilon and noise_multiplier: "
                "PrivacyArguments(target_epsilon=8.0, target_delta=1e-5)"
            )
        instance_of(Mapping, "a dict of arguments of make_private").check("options", self.options)
        for name in self.options:
            if name not in OPTIONS:
                raise ValueError(
                    f"options has {name}, which the trainer gives itself or does not take: leave "
                    "it out, or write it as an argument of PrivacyArguments, if it is one"
                )
        Sampled.of(self.of_make_private())

    def of_engine(self) -> dict[str, Any]:
        """Returns the arguments of `PrivacyEngine`."""
        return {name: getattr(self, name) for name in ENGINE}

    def of_make_private(self) -> dict[str, Any]:
        """Returns the arguments of `make_private` that no training changes."""
        return {name: getattr(self, name) for name in SAMPLED} | dict(self.options)

    def sampled(self, loader: DataLoader) -> Sampled:
        """Returns how the training samples its data, and the account of that."""
        return Sampled.of(self.of_make_private(), data_loader=loader)


_checked = checked("PrivacyArguments(target_epsilon=8.0, target_delta=1e-5, max_grad_norm=1.0)")
setattr(PrivacyArguments, "__init__", _checked(PrivacyArguments.__init__))  # noqa: B010


def arguments_of_loop(args: Any) -> Any:
    """Returns `TrainingArguments` for a loop whose batches are Poisson batches.

    Microbatches are made by `LogicalBatches`, which resumes where it was, so the loop neither
    accumulates nor skips batches. Its clipping of the whole gradient is off.
    """
    if args.max_grad_norm:
        LOG.warning(
            "%s.max_grad_norm=%g is off: PrivacyArguments.max_grad_norm clips each sample; "
            "%s(max_grad_norm=0) says so too",
            (name := type(args).__name__),
            args.max_grad_norm,
            name,
        )
    args = copy.copy(args)
    args.gradient_accumulation_steps = 1
    args.max_grad_norm = 0.0
    args.ignore_data_skip = True
    return args


def refuse_missing(
    given: Mapping[str, Any], privacy: Any, config: str = "TrainingArguments"
) -> None:
    """Raises ValueError or WrongType for a trainer without a model or arguments."""
    if given.get("args") is None:
        raise ValueError(f'args is missing: give args={config}(output_dir="..")')
    if not isinstance(privacy, PrivacyArguments):
        raise WrongType(
            f"privacy is {shown(privacy)}: give "
            "privacy=PrivacyArguments(target_epsilon=8.0, target_delta=1e-5)"
        )
    model = given.get("model")
    if not isinstance(model, nn.Module) and given.get("model_init") is None:
        name = repr(model) if isinstance(model, str) else ".."
        raise WrongType(
            f"model is {shown(model)}: give model=AutoModelForCausalLM.from_pretrained({name})"
        )


def refuse_dataset(dataset: Any, trainer: str = "PrivateTrainer") -> None:
    """Raises ValueError or WrongType for training data that cannot be sampled by index."""
    if dataset is None:
        raise ValueError(f"train_dataset is missing: {trainer}(train_dataset=.., ..)")
    if isinstance(dataset, Mapping):
        raise WrongType(
            f"train_dataset is {shown(dataset)}: give one of the data sets in it, "
            f"train_dataset=datasets[{next(iter(dataset), 'train')!r}]"
        )
    if not isinstance(dataset, Sized):
        raise WrongType(
            "train_dataset has no length, and each sample takes part with a probability: give "
            "one that is indexed, such as train_dataset=list(train_dataset)"
        )
    if not len(dataset):
        raise ValueError("train_dataset is empty: PrivateTrainer(train_dataset=.., ..)")


def refuse_arguments(args: Any, refusals: Iterable[tuple[bool, str, str]]) -> None:
    """Raises ValueError for the first that is given: whether it is, its name, and why it is not."""
    for is_given, name, why in refusals:
        if is_given:
            raise ValueError(f"{type(args).__name__}({name}): {why}")


def refusals_of(
    args: Any, privacy: PrivacyArguments, has_data_parallel: bool
) -> list[tuple[bool, str, str]]:
    """Returns what private training cannot follow of a Trainer, for `refuse_arguments`."""
    loader = args.accelerator_config
    of_checkpoints = "activation_checkpointing_kwargs"
    if not hasattr(args, of_checkpoints):  # its name at first
        of_checkpoints = "gradient_checkpointing_kwargs"
    checkpointing = getattr(args, of_checkpoints) or {}
    optim = str(getattr(args.optim, "value", args.optim))
    sampling = str(getattr(args.train_sampling_strategy, "value", args.train_sampling_strategy))
    return [
        (args.fp16, "fp16=True",
         "its loss scaler skips steps by what it sees in the data: use bf16=True"),
        (args.torch_compile, "torch_compile=True",
         "the Trainer would compile the private model: call model.compile() before "
         "PrivateTrainer(model=model, ..)"),
        (bool(args.fsdp), f"fsdp={args.fsdp!r}",
         "shard the model with torch.distributed.fsdp.fully_shard, and train it with "
         "engine.make_private(module=model, ..) in a loop of your own (docs/sharded.md)"),
        (bool(args.deepspeed), "deepspeed=..",
         "it takes gradients that are not clipped: shard the model with "
         "torch.distributed.fsdp.fully_shard, and train it with engine.make_private(module=model, "
         "..) in a loop of your own (docs/sharded.md)"),
        (args.parallelism_config is not None, "parallelism_config=..",
         "samples would be split over ranks: use torchrun with data_parallel=.. of PrivateTrainer"),
        (args.n_gpu > 1, "..) on several GPUs of one process",
         "nn.DataParallel has no clipped sums: start one process per GPU with torchrun "
         f"--nproc_per_node={args.n_gpu}, or set CUDA_VISIBLE_DEVICES=0"),
        (args.world_size > 1 and not has_data_parallel, "..) on several ranks",
         "nothing adds up the ranks' clipped sums: PrivateTrainer(data_parallel="
         'functools.partial(ddp.wrap, "ddp_bucketed"), ..)'),
        (args.auto_find_batch_size, "auto_find_batch_size=True",
         "it trains again with other batches after it ran out of memory: give "
         "per_device_train_batch_size=.., and gradient_accumulation_steps=.. for larger batches"),
        (args.label_smoothing_factor != 0, f"label_smoothing_factor={args.label_smoothing_factor}",
         "it is a mean over the tokens of the batch: PrivateTrainer(compute_loss_func=f, ..) with "
         "an f(outputs, labels, num_items_in_batch=None) that returns one loss per sample"),
        (args.neftune_noise_alpha is not None, f"neftune_noise_alpha={args.neftune_noise_alpha}",
         "its noise on a sample depends on the longest one of the batch: leave it out"),
        (args.use_liger_kernel, "use_liger_kernel=True",
         "its loss does not call the layers whose gradients are clipped: leave it out"),
        (sampling not in ("random", "None"), f"train_sampling_strategy={sampling!r}",
         "batches are Poisson samples, in which each sample takes part independently: leave it "
         "out"),
        (optim not in OPTIMIZERS, f"optim={optim!r}",
         f"known to step on noisy gradients only are {', '.join(OPTIMIZERS)}; of any other give "
         "the optimizer itself: PrivateTrainer(optimizers=(optimizer, None), ..)"),
        (bool(loader.split_batches or loader.dispatch_batches),
         "accelerator_config={'split_batches': .., 'dispatch_batches': ..}",
         "each rank draws its own part of a Poisson batch: leave them out"),
        ("num_steps" in (loader.gradient_accumulation_kwargs or {}),
         "accelerator_config={'gradient_accumulation_kwargs': {'num_steps': ..}}",
         "a step is one Poisson batch: leave it out, and give gradient_accumulation_steps=.. for a "
         "larger one"),
        (args.include_num_input_tokens_seen != "no" and not privacy.log_unprotected,
         "include_num_input_tokens_seen=..",
         "the number of tokens in the batches is not covered by epsilon: leave it out, or allow it "
         "with PrivacyArguments(log_unprotected=True)"),
        (bool(checkpointing.get("use_reentrant")),
         f"{of_checkpoints}={{'use_reentrant': True}}",
         "reentrant checkpointing hides what a layer does: use {'use_reentrant': False}"),
    ]  # fmt: skip


def refuse_divided(network: Any) -> None:
    """Raises ValueError for a wrapper with which each rank steps a part of the parameters."""
    if hasattr(network, "gradient_pieces"):
        raise ValueError(
            f"data_parallel gives a {type(network).__name__}, whose optimizer it makes itself, and "
            'a Trainer makes its own: give functools.partial(ddp.wrap, "ddp_bucketed"), or train '
            "it with engine.make_private(module=model, ..) in a loop of your own (docs/sharded.md)"
        )


def adapters_of(model: Any) -> dict[str, nn.Parameter]:
    """Returns the trainable parameters of a model with PEFT adapters; of another one, none."""
    own = model.named_parameters() if hasattr(model, "peft_config") else ()
    return {name: p for name, p in own if p.requires_grad}


def refuse_unreached(model: Any, loss: Callable[[], Tensor]) -> None:
    """Checks that the loss of a sample reaches each adapter; accumulates no gradient.

    Warns of modules whose active adapter is frozen as a whole.

    Raises:
        ValueError: it does not reach one; the message names it.
    """
    adapters = adapters_of(model)
    if not adapters:
        return
    if frozen := _frozen(model):
        warnings.warn(FROZEN.format(names=_some(frozen)), stacklevel=2)
    total = loss()
    found: Any = [None] * len(adapters)
    if total.requires_grad:
        found = torch.autograd.grad(total, list(adapters.values()), allow_unused=True)
    missing = [name for name, g in zip(adapters, found, strict=True) if g is None]
    if missing:
        raise ValueError(UNREACHED.format(names=_some(missing)))


def warn_of_still(before: dict[str, Tensor], model: Any, steps: int) -> None:
    """Warns of adapters that `steps` steps have not changed."""
    now = adapters_of(model)
    still = [name for name, x in before.items() if name in now and torch.equal(x, now[name])]
    if still and steps:
        warnings.warn(STILL.format(names=_some(still), steps=steps), stacklevel=3)


def _frozen(model: Any) -> list[str]:
    """Returns the modules whose active adapters are frozen as a whole."""
    active = set(getattr(model, "active_adapters", ()))
    trained: dict[str, bool] = {}
    for name, p in model.named_parameters():
        module, _, rest = name.partition(".lora_")
        if rest and active & set(rest.split(".")):
            trained[module] = trained.get(module, False) or p.requires_grad
    return [module for module, is_trained in trained.items() if not is_trained]


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
