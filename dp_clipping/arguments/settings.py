"""The arguments of `PrivacyEngine.make_private`, gathered and checked once."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from dp_clipping.arguments.checks import check, refuse_first
from dp_clipping.arguments.sampled import Sampled
from dp_clipping.arguments.thresholds import check_max_grad_norm
from dp_clipping.clipping.coefficients import check_range, described
from dp_clipping.kinds import plain
from dp_clipping.modes import Policy, policy_of
from dp_clipping.noise import mechanisms
from dp_clipping.noise.adaptive_threshold import AdaptiveThreshold
from dp_clipping.sampling.schemes import FIXED

SAVED = (
    "noise_multiplier", "max_grad_norm", "clipping", "gamma", "secure_mode", "loss_reduction",
    "expected_batch_size", "poisson_sampling", "sampling", "max_batch_size", "examples_per_unit",
    "num_units", "examples_per_step", "views",
)  # fmt: skip
"""Names the settings that a checkpoint has as given; `public` adds those in another form."""

COMPARED = (
    "batch_first", "rand_on_empty", "norm_algorithm", "norm_reduction", "fused_step", "checks",
)  # fmt: skip
"""Names the settings that ranks compare beside those."""


@dataclass(frozen=True, kw_only=True)
class Settings(Sampled):
    """The settings of one private run; `PrivacyEngine.make_private` explains each field.

    There is a field for each argument, and `secure_mode` of the engine. Numbers are converted to
    Python's own types.

    Raises:
        WrongType, ValueError: for an argument of the wrong type or out of range, and for arguments
            that do not go together, by name.
    """

    module: nn.Module
    optimizer: Optimizer
    criterion: Callable[..., Tensor]
    noise_multiplier: float
    max_grad_norm: float | list[float]
    batch_first: bool
    loss_reduction: str
    clipping: str
    grad_sample_mode: str
    wrap_model: bool
    clipping_function: str
    gamma: float
    norm_algorithm: str
    norm_reduction: str
    cuda_graph: bool
    fused_step: bool
    noise_generator: torch.Generator | None = None
    expected_batch_size: Any = None  # a number, once `with_batch_size` has asked the loader
    memory_budget: int | None = None
    tile_size: int | None = None
    adaptive_threshold: AdaptiveThreshold | None = None
    data_parallel_group: dist.ProcessGroup | None = None
    secure_mode: bool = False  # the engine's
    checks: str = "first"  # the engine's

    def __post_init__(self) -> None:
        check("data_loader", self.data_loader)
        super().__post_init__()
        check_max_grad_norm(self.max_grad_norm, self.clipping)
        if self.clipping_function == "automatic":
            check_range("gamma", self.gamma)
        self._refuse_beside_mechanism()
        for name in ("noise_multiplier", "max_grad_norm", "gamma", "expected_batch_size"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, plain(value))

    def _refuse_beside_mechanism(self) -> None:
        """Raises ValueError for settings that noise beside the default's does not go with."""
        noise, parameters = self.noise_mechanism, self.module.named_parameters()
        is_other = not isinstance(noise, str) or mechanisms.mechanism_of(noise) is not None
        wide = [n for n, p in parameters if p.requires_grad and p.dtype == torch.float64]
        instead = 'leave it out, or give noise_mechanism="gaussian"'
        of_secure = (
            (self.noise_generator is not None,
             "noise_generator, whose seed others may know: leave it out"),
            (self.adaptive_threshold is not None,
             "adaptive_threshold, whose counts get other noise: leave it out"),
            (noise != "gaussian",
             f'noise_mechanism={noise!r}, whose noise is not of integers: give '
             'noise_mechanism="gaussian"'),
            (self.cuda_graph, "cuda_graph=True, which draws noise of another generator: leave it "
             "out"),
            (self.fused_step, "fused_step=True, whose kernel draws noise of another generator: "
             "leave it out"),
            (self.sampling != "poisson",
             f"sampling={self.sampling!r}, for which secure noise has no account: give "
             'sampling="poisson"'),
            (wide, f"parameters in float64, such as {wide[:1]}: give module=network.float()"),
        )  # fmt: skip
        refuse_first(
            (is_other and self.adaptive_threshold,
             f"noise_mechanism {noise!r} does not go with adaptive_threshold, whose noisy counts "
             f"its account omits: {instead}"),
            (is_other and self.cuda_graph,
             f"noise_mechanism {noise!r} does not go with cuda_graph=True, whose kernel makes "
             f"independent Gaussian noise: {instead}"),
            (isinstance(noise, str) and is_other and self.fused_step,
             f"noise_mechanism {noise!r} does not go with fused_step=True, whose kernel makes "
             f"Gaussian noise: {instead}"),
            *((self.secure_mode and holds,
               f"secure_mode=True does not go with {what}, or build PrivacyEngine()")
              for holds, what in of_secure),
        )  # fmt: skip

    @cached_property
    def policy(self) -> Policy | None:
        """Returns how the mode works; None for `no_dp`."""
        return policy_of(
            self.grad_sample_mode, clipping_function=self.clipping_function, gamma=self.gamma,
            per_layer=self.clipping == "per_layer", norm_algorithm=self.norm_algorithm,
            memory_budget=self.memory_budget, tile_size=self.tile_size,
        )  # fmt: skip

    def with_batch_size(self, world_size: int) -> "Settings":
        """Returns these settings with the loader's batch size, if no other one is expected."""
        if self.expected_batch_size is not None:
            return self
        return replace(self, expected_batch_size=self.expected_units(world_size))

    @property
    def public_constants(self) -> dict[str, bool]:
        """Returns whether rate, steps, divisor and account are constants for neighbouring data.

        Those that are not follow from the number of units, which neighbours differ in; those of
        cyclic batches have the same one. A divisor that is the number of units tells it, whoever
        has given it.
        """
        if self.sampling == "cyclic":
            return dict.fromkeys(("sample_rate", "steps", "divisor", "account"), True)
        has_steps, has_rate = self.steps is not None, self.sample_rate is not None
        return {
            "sample_rate": has_steps if self.sampling in FIXED else has_rate,
            "steps": has_steps or has_rate,
            "divisor": self.loss_reduction == "sum"
            or self.expected_batch_size != self.units_of_data,
            "account": self.sampling != "truncated_poisson",
        }

    def public(self) -> dict[str, Any]:
        """Returns the settings that a checkpoint saves and a load compares."""
        return {name: getattr(self, name) for name in SAVED} | {
            "mode": self.grad_sample_mode,
            "clipping_function": described(self.clipping_function),
            "noise_mechanism": mechanisms.described(self.noise_mechanism),
            "num_samples": len(self.data_loader.dataset),
            "sample_rate": self.rates[0],
            "unit_ids are given": self.unit_ids is not None,
        }

    @property
    def num_units(self) -> int | None:
        """Returns how many units of several examples are drawn; None: single examples are."""
        return len(self.units) if self.has_units and self.units is not None else None

    def compared(self) -> dict[str, Any]:
        """Returns the settings that must be equal on all ranks."""
        adaptive = self.adaptive_threshold
        return self.public() | {name: getattr(self, name) for name in COMPARED} | {
            "len(data_loader)": len(self.data_loader),
            "steps": self.rates[1],
            "unit_ids": self.unit[1].hex(),
            "noise_generator is given": self.noise_generator is not None,
            "adaptive_threshold": adaptive and adaptive.state_dict(),
        }  # fmt: skip
