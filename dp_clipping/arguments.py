"""What the arguments of `make_private` may be; σ and C also whenever they are set anew."""

import inspect
import math
from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from dp_clipping.adaptive import AdaptiveThreshold
from dp_clipping.clip import CLIPPING_FUNCTIONS, check_range
from dp_clipping.plan import NORM_ALGORITHMS

CLIPPINGS = ("flat", "per_layer")
TILE_SIZES = (16, 32, 64, 128, 256)


def check_noise_multiplier(noise_multiplier: float) -> None:
    if not 0 <= noise_multiplier < math.inf:
        raise ValueError(
            f"noise_multiplier is {noise_multiplier}: give a finite number of 0 or more"
        )


def check_max_grad_norm(max_grad_norm: float | Sequence[float], clipping: str) -> None:
    limits = max_grad_norm if isinstance(max_grad_norm, Sequence) else [max_grad_norm]
    if not limits or not all(0 < limit < math.inf for limit in limits):
        raise ValueError(f"max_grad_norm is {max_grad_norm}: give a finite number above 0")
    if clipping == "flat" and isinstance(max_grad_norm, Sequence):
        raise ValueError("max_grad_norm is a list, which goes with clipping='per_layer'")


def expected_batch_size_of(loader: DataLoader, world_size: int) -> float:
    """The loader's batch size, times the ranks if each has its own part of the data."""
    batch_size = getattr(loader.batch_sampler, "batch_size", loader.batch_size)
    if batch_size is None:
        raise ValueError("the loader has no batch_size: give expected_batch_size=")
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    return float(batch_size * (world_size if isinstance(sampler, DistributedSampler) else 1))


def check_arguments(
    noise_multiplier: float,
    max_grad_norm: float | Sequence[float],
    clipping: str,
    clipping_function: str,
    gamma: float,
) -> None:
    check_noise_multiplier(noise_multiplier)
    if clipping not in CLIPPINGS:
        raise ValueError(f"clipping {clipping!r} is unknown: choose one of {', '.join(CLIPPINGS)}")
    check_max_grad_norm(max_grad_norm, clipping)
    if clipping_function not in CLIPPING_FUNCTIONS:
        known = ", ".join(CLIPPING_FUNCTIONS)
        raise ValueError(
            f"clipping_function {clipping_function!r} is unknown: choose one of {known}"
        )
    if not 0 < gamma < math.inf:
        raise ValueError(f"gamma is {gamma}: give a finite number above 0")
    if clipping_function == "automatic":
        check_range("gamma", gamma)


def check_kernel_options(
    norm_algorithm: str, memory_budget: int | None, tile_size: int | None
) -> None:
    if norm_algorithm not in NORM_ALGORITHMS:
        known = ", ".join(NORM_ALGORITHMS)
        raise ValueError(f"norm_algorithm {norm_algorithm!r} is unknown: choose one of {known}")
    if memory_budget is not None and memory_budget < 0:
        raise ValueError(f"memory_budget is {memory_budget}: give bytes, 0 or more, or None")
    if tile_size is not None and tile_size not in TILE_SIZES:
        known = ", ".join(map(str, TILE_SIZES))
        raise ValueError(f"tile_size is {tile_size}: choose one of {known}, or None")


def check_optimizer(optimizer: Optimizer, module: nn.Module) -> None:
    if not hasattr(optimizer, "param_groups"):
        raise ValueError(
            f"optimizer is of type {type(optimizer).__name__}: give a torch.optim.Optimizer over "
            "module.parameters()"
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"optimizer {type(optimizer).__name__} calls its closure, and so the gradient, several "
            "times a step, and each would need noise and a step of the account: give "
            "torch.optim.SGD or AdamW"
        )
    own = set(module.parameters())
    held = {p for group in optimizer.param_groups for p in group["params"]}
    if not held <= own:
        raise ValueError(
            "the optimizer holds parameters that are not the module's: build it from "
            "module.parameters()"
        )
    missing = [n for n, p in module.named_parameters() if p.requires_grad and p not in held]
    if missing:
        raise ValueError(
            f"trainable but not in the optimizer: {', '.join(missing[:5])}; freeze them with "
            "requires_grad_(False) or give them to the optimizer"
        )


def check_adaptive(
    adaptive: AdaptiveThreshold,
    limits: list[float],
    noise_multiplier: float,
    expected_batch_size: float,
    is_private: bool,
) -> None:
    if not is_private:
        raise ValueError("adaptive_threshold is for private modes: no_dp clips nothing")
    if adaptive.limits != limits:
        raise ValueError(
            f"the adaptive threshold starts at {adaptive.limits[:4]} and max_grad_norm gives "
            f"{limits[:4]} for {len(limits)} clipping groups: build it from the same numbers"
        )
    if adaptive.expected_batch_size != expected_batch_size:
        raise ValueError(
            f"the adaptive threshold's expected_batch_size is {adaptive.expected_batch_size:g} and "
            f"the run's {expected_batch_size:g}: both must be the same public constant"
        )
    adaptive.gradient_noise_multiplier(noise_multiplier)
