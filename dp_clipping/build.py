"""Builds what `PrivacyEngine.make_private` returns, one object after the other."""

import logging
import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from dp_clipping import cuda_graph
from dp_clipping.accounting.target_epsilon import noise_multiplier_for
from dp_clipping.arguments.checks import check
from dp_clipping.arguments.given import check_adaptive, check_optimizer
from dp_clipping.arguments.sampled import Sampled
from dp_clipping.arguments.settings import Settings
from dp_clipping.arguments.thresholds import check_noise
from dp_clipping.criterion import PrivateCriterion
from dp_clipping.distributed.agreement import Agreement
from dp_clipping.distributed.detect import sharding_of
from dp_clipping.distributed.dtensor import is_fsdp2, size_of
from dp_clipping.distributed.sharding import Sharding
from dp_clipping.model import PrivateModel
from dp_clipping.noise import fused_update
from dp_clipping.noise.add_noise import source_of
from dp_clipping.noise.correlated import CorrelatedNoise
from dp_clipping.noise.keys import Keys
from dp_clipping.noise.secure.certificate import Certificate, certificate_of
from dp_clipping.noise.secure.source import SecureNoise
from dp_clipping.optimizer import Hook, PrivateOptimizer
from dp_clipping.sampling.given_loader import batch_size_of
from dp_clipping.sampling.loader import PoissonLoader
from dp_clipping.sampling.schemes import scheme_of
from dp_clipping.validation import check_module

LOG = logging.getLogger(__name__)
TO_USER = 5  # frames from a warning here: `_build`, `make_private`, its decorator, the user's call


@dataclass(frozen=True)
class Ranks:
    """The processes of one private run.

    Attributes:
        sharding: how the module is spread over them; None: each has the whole.
        data_parallel_group: ranks with other samples; None: there are none.
        everyone: all ranks of the run; None: this process alone.
        device: the device of the parameters.
    """

    sharding: Sharding | None
    data_parallel_group: dist.ProcessGroup | None
    everyone: dist.ProcessGroup | None
    device: torch.device


def ranks_of(settings: Settings) -> Ranks:
    """Returns the ranks of the run, after checking that module and optimizer fit one.

    Raises:
        ValueError: for an optimizer of other parameters, or a module that mixes samples.
    """
    module, is_private = settings.module, settings.policy is not None
    sharded: Any = filter(is_fsdp2, module.modules())
    for one in sharded:
        one.reshard()  # gathered, it has other parameters than the optimizer
    check_optimizer(settings.optimizer, module)
    if is_private:
        check_module(module)
    device, group = next(module.parameters()).device, getattr(module, "process_group", None)
    if group is None and hasattr(module, "gradient_ready") and dist.is_initialized():
        group = dist.group.WORLD
    ranks = Ranks(None, group, group, device)
    sharding = sharding_of(module, settings.data_parallel_group) if is_private else None
    if sharding is not None:
        if settings.memory_budget is not None:
            raise ValueError(
                "memory_budget is not for sharded models, whose ranks must run backward "
                "equally often: choose flash_bookkeeping, or flash, which keeps nothing"
            )
        LOG.info(sharding.describe())
        ranks = Ranks(sharding, sharding.data_parallel_group, sharding.everyone, device)
    others = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if sharding is not None:
        parts = size_of(sharding.everyone)
        if sharding.tensor_group is not None and parts < others:
            warnings.warn(
                f"{others} ranks, and tensor parallelism divides module among {parts}: each "
                f"{parts} ranks train a network of their own, on samples of the whole data set; to "
                "train one together give data_parallel_group=mesh.get_group(name), of the mesh's "
                "other axis",
                stacklevel=TO_USER,
            )
    elif is_private and not hasattr(module, "gradient_ready") and others > 1:
        warnings.warn(
            f"{others} ranks, and module is neither wrapped nor sharded: each rank trains a "
            "network of its own, on samples of the whole data set; to train one together give "
            'ddp.wrap("ddp_bucketed", network) or shard it',
            stacklevel=TO_USER,
        )
    if settings.cuda_graph:
        cuda_graph.refuse(settings, ranks)
    if settings.fused_step and is_private:
        fused_update.refuse(settings, ranks)
    return ranks


def build_loader(settings: Settings, ranks: Ranks, keys: Keys) -> DataLoader:
    """Returns a loader of the sampling's batches, or the user's own, with a warning."""
    if not settings.poisson_sampling:
        warnings.warn(
            "poisson_sampling=False: batches are not Poisson samples, and the ε that the "
            "accountant states does not hold",
            stacklevel=TO_USER,
        )
        return settings.data_loader
    group = ranks.data_parallel_group
    return PoissonLoader(
        settings.data_loader,
        key=keys.sampling,
        sample_rate=settings.rates[0],
        steps=settings.rates[1],
        rank=0 if group is None else dist.get_rank(group),
        world_size=size_of(group),
        batch_first=settings.batch_first,
        rand_on_empty=settings.rand_on_empty,
        units=settings.units,
        checks=settings.checks,
        scheme=scheme_of(
            settings.sampling,
            units=settings.units_of_data,
            sample_rate=settings.rates[0],
            secure=settings.secure_mode,
            max_batch_size=settings.max_batch_size,
        ),
    )


def build_model(
    settings: Settings, ranks: Ranks, loader: DataLoader, hide_unprotected: bool
) -> PrivateModel:
    """Returns the model, which takes Poisson batches from the loader."""
    poisson = loader if isinstance(loader, PoissonLoader) else None
    model = PrivateModel(
        settings, sharding=ranks.sharding, usage=None if poisson is None else poisson.usage,
        hide_unprotected=hide_unprotected,
    )  # fmt: skip
    if poisson is None:
        model.step_state.usage.batch_size = batch_size_of(loader)
    else:
        poisson.is_training = lambda: model.training
        poisson.on_batch = lambda number: model.step_state.begin_batch(number, model.training)
    return model


def build_criterion(settings: Settings, model: PrivateModel) -> PrivateCriterion:
    """Returns the criterion.

    Raises:
        ValueError: if thresholds, noise and criterion do not fit the model, which is then the
            user's network again.
    """
    is_private = settings.policy is not None
    try:
        if is_private:
            sensitivity = sum(c * c for c in model.thresholds.clip_norms()) ** 0.5
            check_noise(settings.noise_multiplier, sensitivity)
        if settings.adaptive_threshold is not None:
            check_adaptive(
                settings.adaptive_threshold, model.thresholds.clip_norms(),
                settings.noise_multiplier, settings.expected_batch_size, is_private,
            )  # fmt: skip
        return PrivateCriterion(model, settings.criterion, settings.loss_reduction)
    except BaseException:
        model.to_standard_module()
        raise


def build_optimizer(
    settings: Settings, ranks: Ranks, model: PrivateModel, keys: Keys, count: Hook
) -> PrivateOptimizer:
    """Returns the optimizer, whose steps `count` counts."""
    agreement, everyone = None, ranks.everyone
    if settings.policy is not None and everyone is not None and size_of(everyone) > 1:
        agreement = Agreement(everyone, early=ranks.device.type != "cpu")
    is_secure = settings.secure_mode and settings.policy is not None
    source = SecureNoise(sum(sizes_of(model))) if is_secure else None
    return PrivateOptimizer(
        settings, model=model, noise_key=keys.noise, count=count, agreement=agreement,
        noise_source=source or source_of(settings.noise_mechanism),
    )  # fmt: skip


def certificate_for(settings: Settings, model: PrivateModel) -> Certificate | None:
    """Returns what the account of secure noise includes; None for noise that is not secure."""
    if not settings.secure_mode or settings.policy is None:
        return None
    return certificate_of(
        sizes_of(model), settings.expected_batch_size, settings.rates[0], settings.units_of_data
    )


def noise_for_target(
    engine: Any, module: Any, training: Sampled, *, steps: int, expected_batch_size: float | None,
    **target: Any,
) -> float:  # fmt: skip
    """Returns σ with which `steps` steps of what `make_private` makes end at (ε, δ).

    Args:
        engine: a `PrivacyEngine`.
        module: of its `make_private`.
        training: how the loader is sampled.
        expected_batch_size: as given to `make_private`, or None.
        target: `target_epsilon`, `target_delta` and others of `noise_multiplier_for`.

    Raises:
        ValueError: for noise whose ε is a function of the user's, and as `noise_multiplier_for`.
    """
    noise = training.noise_mechanism
    if noise != "gaussian" and not isinstance(noise, CorrelatedNoise):
        raise ValueError(
            "target_epsilon is for Gaussian noise: find the noise with the epsilon function of "
            "your mechanism, and call make_private(noise_multiplier=.., noise_mechanism=..)"
        )
    rate, _ = training.rates
    find = partial(
        noise_multiplier_for, sample_rate=rate, steps=steps, mechanism=training.mechanism,
        accountant=engine.accountant.mechanism(), **target,
    )  # fmt: skip
    if not engine.secure_mode:
        return find()
    # By a certificate that is not better than that of the run.
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    parameters = module.parameters() if isinstance(module, nn.Module) else ()
    sizes = [ranks * p.numel() for p in parameters if p.requires_grad]
    if expected_batch_size is None:
        expected_batch_size = training.expected_units(ranks)
    check("expected_batch_size", expected_batch_size)
    certificate = certificate_of(sizes, float(expected_batch_size), rate, training.units_of_data)
    wanted = {name: target[name] for name in ("target_epsilon", "target_delta")}
    return certificate.noise_multiplier(**wanted, steps=steps, find=find)


def sizes_of(model: PrivateModel) -> list[int]:
    """Returns the elements of each trained parameter, on all ranks together."""
    if model.policy is None:
        return []
    slices = {} if model.sharding is None else model.sharding.slices
    return [
        sum(length for _, length in slices[p]) if p in slices else p.numel()
        for p in model.capture.parameters
    ]
