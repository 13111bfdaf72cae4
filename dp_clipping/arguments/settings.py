"""The arguments of `PrivacyEngine.make_private`, gathered and checked once."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from dp_clipping.accounting.mechanism import Mechanism
from dp_clipping.arguments.accounted import accounted, check_sampling
from dp_clipping.arguments.checks import (
    check_arguments,
    check_kernel_options,
    check_kinds,
    check_loader,
    check_mechanism,
    check_rates,
    check_secure,
    check_units,
    given_units,
    number_of_units,
    rates_of,
)
from dp_clipping.arguments.numbers import check_expected_batch_size
from dp_clipping.arguments.opacus_names import MODES, refuse
from dp_clipping.clipping.coefficients import described
from dp_clipping.kinds import plain
from dp_clipping.modes import Policy, policy_of
from dp_clipping.noise import mechanisms
from dp_clipping.noise.adaptive_threshold import AdaptiveThreshold
from dp_clipping.noise.correlated import CorrelatedNoise
from dp_clipping.sampling.loader import expected_batch_size_of
from dp_clipping.sampling.units import Units


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of one private run; `PrivacyEngine.make_private` explains each field.

    There is a field for each argument, and `secure_mode` of the engine. Numbers are converted to
    Python's own types.

    Raises:
        ValueError: for an argument of the wrong type or out of range, by name.
    """

    module: nn.Module
    optimizer: Optimizer
    criterion: Callable[..., Tensor]
    data_loader: DataLoader
    noise_multiplier: float
    max_grad_norm: float | list[float]
    batch_first: bool
    loss_reduction: str
    poisson_sampling: bool
    clipping: str
    noise_generator: torch.Generator | None
    grad_sample_mode: str
    wrap_model: bool
    rand_on_empty: bool
    clipping_function: str
    gamma: float
    expected_batch_size: Any  # a number; None until `with_batch_size` asks the loader
    norm_algorithm: str
    memory_budget: int | None
    tile_size: int | None
    norm_reduction: str
    adaptive_threshold: AdaptiveThreshold | None
    data_parallel_group: dist.ProcessGroup | None
    cuda_graph: bool
    sample_rate: float | None
    steps: int | None
    noise_mechanism: str | CorrelatedNoise
    examples_per_unit: int
    unit_ids: Sequence[Hashable] | None
    sampling: str
    max_batch_size: int | None
    secure_mode: bool = False  # the engine's

    def __post_init__(self) -> None:
        check_kinds(
            module=self.module, data_loader=self.data_loader, criterion=self.criterion,
            noise_generator=self.noise_generator, adaptive_threshold=self.adaptive_threshold,
            data_parallel_group=self.data_parallel_group, batch_first=self.batch_first,
            poisson_sampling=self.poisson_sampling, wrap_model=self.wrap_model,
            rand_on_empty=self.rand_on_empty, cuda_graph=self.cuda_graph,
        )  # fmt: skip
        check_arguments(
            self.noise_multiplier, self.max_grad_norm, self.clipping, self.clipping_function,
            self.gamma,
        )  # fmt: skip
        check_mechanism(self.noise_mechanism, self.adaptive_threshold, self.cuda_graph)
        if self.secure_mode:
            check_secure(
                self.module, self.noise_mechanism, self.adaptive_threshold, self.noise_generator,
                self.cuda_graph, self.sampling,
            )  # fmt: skip
        check_kernel_options(self.norm_algorithm, self.memory_budget, self.tile_size)
        check_rates(self.sample_rate, self.steps, self.poisson_sampling)
        check_sampling(
            self.sampling, max_batch_size=self.max_batch_size, sample_rate=self.sample_rate,
            poisson_sampling=self.poisson_sampling, noise_mechanism=self.noise_mechanism,
        )  # fmt: skip
        check_units(
            self.examples_per_unit, self.unit_ids, poisson_sampling=self.poisson_sampling,
            rand_on_empty=self.rand_on_empty,
        )  # fmt: skip
        object.__setattr__(self, "examples_per_unit", int(self.examples_per_unit))
        if self.max_batch_size is not None:
            object.__setattr__(self, "max_batch_size", int(self.max_batch_size))
        numbers = ["noise_multiplier", "max_grad_norm", "gamma"]
        if self.expected_batch_size is not None:
            check_expected_batch_size(self.expected_batch_size)
            numbers.append("expected_batch_size")
        for name in numbers:
            object.__setattr__(self, name, plain(getattr(self, name)))

    @cached_property
    def policy(self) -> Policy | None:
        """Returns how the mode works; None for `no_dp`. Raises ValueError for an unknown mode."""
        refuse("grad_sample_mode", self.grad_sample_mode, MODES)
        return policy_of(
            self.grad_sample_mode, clipping_function=self.clipping_function, gamma=self.gamma,
            per_layer=self.clipping == "per_layer", norm_algorithm=self.norm_algorithm,
            memory_budget=self.memory_budget, tile_size=self.tile_size,
        )  # fmt: skip

    @cached_property
    def units(self) -> Units | None:
        """Returns the units that are sampled; None if single examples are sampled."""
        return given_units(
            self.data_loader, self.examples_per_unit, self.unit_ids, self.poisson_sampling
        )

    @property
    def units_of_data(self) -> int:
        """Returns how many units of privacy the data have."""
        return number_of_units(self.data_loader, self.examples_per_unit, self.units)

    @cached_property
    def unit(self) -> tuple[int, bytes]:
        """Returns k and a digest of `unit_ids`, which is empty without: equal for equal units."""
        named = self.units is not None and self.units.are_named
        return self.examples_per_unit, self.units.digest() if named and self.units else b""

    @cached_property
    def rates(self) -> tuple[float, int]:
        """Returns q and the batches per epoch, as given or from the loader's length."""
        return rates_of(self.data_loader, self.sample_rate, self.steps, self.units, self.sampling)

    @cached_property
    def mechanism(self) -> Mechanism:
        """Returns what a step releases: noise and sampling together, with its account."""
        return accounted(
            self.noise_mechanism, self.sampling, units=self.units_of_data,
            max_batch_size=self.max_batch_size,
        )  # fmt: skip

    def with_batch_size(self, world_size: int) -> "Settings":
        """Returns these settings with the loader's batch size, if no other one is expected."""
        if self.expected_batch_size is not None:
            return self
        size = expected_batch_size_of(self.data_loader, world_size, self.examples_per_unit)
        return replace(self, expected_batch_size=size)

    def public(self) -> dict[str, Any]:
        """Returns the settings that a checkpoint saves and a load compares."""
        dataset: Any = self.data_loader.dataset
        return {
            "mode": self.grad_sample_mode,
            "noise_multiplier": self.noise_multiplier,
            "max_grad_norm": self.max_grad_norm,
            "clipping": self.clipping,
            "clipping_function": described(self.clipping_function),
            "gamma": self.gamma,
            "noise_mechanism": mechanisms.described(self.noise_mechanism),
            "secure_mode": self.secure_mode,
            "loss_reduction": self.loss_reduction,
            "expected_batch_size": self.expected_batch_size,
            "poisson_sampling": self.poisson_sampling,
            "sampling": self.sampling,
            "max_batch_size": self.max_batch_size,
            "num_samples": len(dataset),
            "sample_rate": self.rates[0],
            "examples_per_unit": self.examples_per_unit,
            "num_units": None if self.units is None else len(self.units),
            "unit_ids are given": self.unit_ids is not None,
        }

    def compared(self) -> dict[str, Any]:
        """Returns the settings that must be equal on all ranks."""
        adaptive = self.adaptive_threshold
        return self.public() | {
            "batch_first": self.batch_first,
            "rand_on_empty": self.rand_on_empty,
            "norm_algorithm": self.norm_algorithm,
            "norm_reduction": self.norm_reduction,
            "len(data_loader)": len(self.data_loader),
            "steps": self.rates[1],
            "noise_generator is given": self.noise_generator is not None,
            "adaptive_threshold": adaptive and adaptive.state_dict(),
        }


@dataclass(frozen=True)
class Sampled:
    """How a training samples its data, and the account of that: what ε needs beside σ and steps.

    Attributes:
        rate: q.
        batches: of an epoch.
        units: of privacy, in the data.
        mechanism: noise and sampling, with their account.
    """

    rate: float
    batches: int
    units: int
    mechanism: Mechanism


def sampled(loader: DataLoader, arguments: Mapping[str, Any]) -> Sampled:
    """Returns how a training samples its data, from arguments of `make_private`.

    Raises:
        WrongType, ValueError: for those of `arguments` that say so.
    """
    check_loader(loader)
    rate, steps = arguments.get("sample_rate"), arguments.get("steps")
    is_poisson = arguments.get("poisson_sampling", True)
    sampling = arguments.get("sampling", "poisson")
    check_rates(rate, steps, is_poisson)
    noise, cap = arguments.get("noise_mechanism", "gaussian"), arguments.get("max_batch_size")
    check_sampling(
        sampling, max_batch_size=cap, sample_rate=rate, poisson_sampling=is_poisson,
        noise_mechanism=noise,
    )  # fmt: skip
    each, unit_ids = arguments.get("examples_per_unit", 1), arguments.get("unit_ids")
    check_units(
        each, unit_ids, poisson_sampling=is_poisson,
        rand_on_empty=bool(arguments.get("rand_on_empty")),
    )  # fmt: skip
    units = given_units(loader, each, unit_ids, is_poisson)
    number = number_of_units(loader, each, units)
    return Sampled(
        *rates_of(loader, rate, steps, units, sampling),
        number,
        accounted(noise, sampling, units=number, max_batch_size=cap),
    )
