"""Checks the arguments of `make_private`."""

import inspect
import math
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from dp_clipping.arguments import opacus_names
from dp_clipping.arguments.numbers import check_max_grad_norm, check_noise_multiplier
from dp_clipping.clipping.coefficients import check_range, known_clipping_functions
from dp_clipping.kinds import WrongType, check_count, check_number, check_type, is_count, shown
from dp_clipping.noise.adaptive_threshold import AdaptiveThreshold
from dp_clipping.noise.correlated import CorrelatedNoise
from dp_clipping.noise.mechanisms import mechanism_of
from dp_clipping.planning.plan import NORM_ALGORITHMS
from dp_clipping.sampling.loader import batches_of
from dp_clipping.sampling.schemes import FIXED
from dp_clipping.sampling.units import Units, units_of

CLIPPINGS = ("flat", "per_layer")
TILE_SIZES = (16, 32, 64, 128, 256)


def check_arguments(
    noise_multiplier: float,
    max_grad_norm: float | Sequence[float],
    clipping: str,
    clipping_function: str,
    gamma: float,
) -> None:
    check_noise_multiplier(noise_multiplier)
    opacus_names.refuse("clipping", clipping, opacus_names.CLIPPINGS)
    if clipping not in CLIPPINGS:
        raise ValueError(f"clipping {clipping!r} is unknown: choose one of {', '.join(CLIPPINGS)}")
    check_max_grad_norm(max_grad_norm, clipping)
    if clipping_function not in known_clipping_functions():
        known = ", ".join(known_clipping_functions())
        raise ValueError(
            f"clipping_function {clipping_function!r} is unknown: choose one of {known}, or call "
            "dp_clipping.register_clipping_function(name, fn, bound=..) first"
        )
    check_number("gamma", gamma, "a finite number above 0")
    if not 0 < gamma < math.inf:
        raise ValueError(f"gamma is {gamma}: give a finite number above 0")
    if clipping_function == "automatic":
        check_range("gamma", gamma)


def check_mechanism(
    noise_mechanism: str | CorrelatedNoise, adaptive_threshold: AdaptiveThreshold | None,
    cuda_graph: bool,
) -> None:  # fmt: skip
    """Raises ValueError for an unknown mechanism, or settings that do not go with it."""
    check_type(
        "noise_mechanism", noise_mechanism, (str, CorrelatedNoise),
        '"gaussian", CorrelatedNoise(bands=8), or the name of a registered one',
    )  # fmt: skip
    if isinstance(noise_mechanism, str) and mechanism_of(noise_mechanism) is None:
        return
    for name, is_given in (
        ("adaptive_threshold, whose noisy counts its account does not cover", adaptive_threshold),
        ("cuda_graph=True, whose kernel makes independent Gaussian noise", cuda_graph),
    ):
        if is_given:
            raise ValueError(
                f"noise_mechanism {noise_mechanism!r} does not go with {name}: leave it out, or "
                'give noise_mechanism="gaussian"'
            )


def check_secure(
    module: Any, noise_mechanism: Any, adaptive_threshold: Any, noise_generator: Any,
    cuda_graph: bool, sampling: str,
) -> None:  # fmt: skip
    """Raises ValueError for what secure noise is not made for, or has no certificate for."""
    wide = [
        name
        for name, p in module.named_parameters()
        if p.requires_grad and p.dtype == torch.float64
    ]
    for name, is_given, instead in (
        ("noise_generator, whose seed others may know", noise_generator, "leave it out"),
        ("adaptive_threshold, whose counts get other noise", adaptive_threshold, "leave it out"),
        (
            f"noise_mechanism={noise_mechanism!r}, whose noise is not of integers",
            noise_mechanism != "gaussian", 'give noise_mechanism="gaussian"',
        ),
        ("cuda_graph=True, which draws noise of another generator", cuda_graph, "leave it out"),
        (
            f"sampling={sampling!r}, for which secure noise has no account",
            sampling != "poisson", 'give sampling="poisson"',
        ),
        (f"parameters in float64, such as {wide[:1]}", wide, "give module=network.float()"),
    ):  # fmt: skip
        if is_given not in (None, False, []):
            raise ValueError(
                f"secure_mode=True does not go with {name}: {instead}, or build "
                "PrivacyEngine() without secure_mode"
            )


def check_kinds(
    *,
    module: Any,
    data_loader: Any,
    criterion: Any,
    noise_generator: Any,
    adaptive_threshold: Any,
    data_parallel_group: Any,
    **flags: Any,
) -> None:
    """Raises WrongType for an argument of `make_private` of the wrong type; `flags` are bool."""
    none = type(None)
    for name, value, kind, wanted in (
        ("module", module, nn.Module, "the network, a torch.nn.Module"),
        ("noise_generator", noise_generator, (torch.Generator, none),
         "torch.Generator().manual_seed(..), for tests only, or None"),
        ("adaptive_threshold", adaptive_threshold, (AdaptiveThreshold, none),
         "a dp_clipping.noise.adaptive_threshold.AdaptiveThreshold, or None"),
    ):  # fmt: skip
        check_type(name, value, kind, wanted)
    if isinstance(module, torch.jit.ScriptModule):
        raise WrongType("module is a ScriptModule, whose layers are hidden: give the network")
    if not callable(criterion) or isinstance(criterion, type):
        raise WrongType(
            f"criterion is {shown(criterion)}: give a callable that has a reduction, such as "
            "nn.CrossEntropyLoss()"
        )
    if data_parallel_group is not None:
        group_class: Any = dist.ProcessGroup if dist.is_available() else ()
        check_type(
            "data_parallel_group",
            data_parallel_group,
            group_class,
            "a torch.distributed.ProcessGroup or None",
        )
    for name, flag in flags.items():
        check_type(name, flag, bool, "True or False")
    check_loader(data_loader)


def check_loader(data_loader: Any) -> None:
    """Raises WrongType or ValueError for anything but a DataLoader whose data can be counted."""
    check_type(
        "data_loader", data_loader, DataLoader,
        "a torch.utils.data.DataLoader, as DataLoader(dataset, batch_size=64)",
    )  # fmt: skip
    dataset = data_loader.dataset
    try:
        len(data_loader), len(dataset)
    except TypeError:
        kind = type(dataset).__name__
        is_stream = isinstance(dataset, IterableDataset)
        instead = (
            "take its samples into a list, DataLoader(list(dataset), batch_size=64)"
            if is_stream
            else f"give {kind} a __len__"
        )
        raise ValueError(
            f"data_loader has no length, as its {kind} has none, and each sample takes part with "
            f"probability 1 / len(data_loader): {instead}"
        ) from None


def check_rates(sample_rate: float | None, steps: int | None, poisson_sampling: bool) -> None:
    """Raises WrongType or ValueError for a sample rate or a number of steps out of range."""
    if not poisson_sampling and not (sample_rate is None and steps is None):
        raise ValueError(
            "sample_rate and steps are those of Poisson sampling: leave them out, or "
            "poisson_sampling=False"
        )
    if sample_rate is not None:
        wanted = "a probability above 0, at most 1: expected batch size / samples, both public"
        check_number("sample_rate", sample_rate, wanted)
        if not 0 < sample_rate <= 1:
            raise ValueError(f"sample_rate is {sample_rate}: give {wanted}")
    if steps is not None:
        check_count("steps", steps, "a whole number of 1 or more: the batches of an epoch")
        if steps < 1:
            raise ValueError(f"steps is {steps}: give a whole number of 1 or more")


def check_units(
    examples_per_unit: int,
    unit_ids: Any,
    *,
    poisson_sampling: bool,
    rand_on_empty: bool,
) -> None:
    """Raises WrongType or ValueError for units of privacy that no batch can be made of."""
    check_count("examples_per_unit", examples_per_unit, "a whole number of 1 or more")
    if examples_per_unit < 1:
        raise ValueError(
            f"examples_per_unit is {examples_per_unit}: give a whole number of 1 or more"
        )
    if unit_ids is not None and examples_per_unit == 1:
        raise ValueError(
            "unit_ids says which examples are one unit, and examples_per_unit=1 is one example: "
            "give examples_per_unit, the most examples that a unit has, or leave unit_ids out"
        )
    if unit_ids is not None and not poisson_sampling:
        raise ValueError(
            "unit_ids is for Poisson sampling, which puts a unit's examples side by side: leave "
            "it out and let each batch of the loader have examples_per_unit of them for each "
            "unit, or leave out poisson_sampling=False"
        )
    if rand_on_empty and examples_per_unit > 1:
        raise ValueError(
            "rand_on_empty=True makes up one example for an empty batch, and examples_per_unit="
            f"{examples_per_unit} takes units of {examples_per_unit}: leave rand_on_empty out, a "
            "batch without samples is a step like any other"
        )


def given_units(
    loader: DataLoader, examples_per_unit: int, unit_ids: Any, poisson_sampling: bool
) -> Units | None:
    """Returns the units that Poisson sampling draws; None: it draws examples, or there is none."""
    if examples_per_unit == 1 or not poisson_sampling:
        return None
    return units_of(len(cast(Any, loader.dataset)), int(examples_per_unit), unit_ids)


def number_of_units(loader: DataLoader, examples_per_unit: int, units: Units | None) -> int:
    """Returns how many units of privacy the data have; `units` is what `given_units` returns."""
    examples = len(loader.dataset)  # type: ignore[arg-type]
    return -(-examples // examples_per_unit) if units is None else len(units)


def rates_of(
    loader: DataLoader,
    sample_rate: float | None,
    steps: int | None,
    units: Units | None = None,
    sampling: str = "poisson",
) -> tuple[float, int]:
    """Returns q and the batches of an epoch, in which each sample takes part once on average.

    What is not given follows from the loader's length, and so from the size of the data; q is 1
    for a loader without batches, which is refused later. With a sampling in which each sample takes
    part exactly once, q is 1 over the batches.
    """
    if sampling in FIXED and steps is not None:
        return 1 / int(steps), int(steps)
    if sample_rate is None:
        length = len(loader) if units is None else batches_of(loader, len(units), units.size)
        length = max(1, length)
        return 1 / length, length if steps is None else int(steps)
    rate = float(sample_rate)
    return rate, max(1, round(1 / rate)) if steps is None else int(steps)


def check_kernel_options(
    norm_algorithm: str, memory_budget: int | None, tile_size: int | None
) -> None:
    if norm_algorithm not in NORM_ALGORITHMS:
        known = ", ".join(NORM_ALGORITHMS)
        raise ValueError(f"norm_algorithm {norm_algorithm!r} is unknown: choose one of {known}")
    if memory_budget is not None:
        check_count("memory_budget", memory_budget, "bytes, a whole number, or None")
    if memory_budget is not None and memory_budget < 0:
        raise ValueError(f"memory_budget is {memory_budget}: give bytes, 0 or more, or None")
    if tile_size is not None and not (is_count(tile_size) and tile_size in TILE_SIZES):
        known = ", ".join(map(str, TILE_SIZES))
        raise ValueError(f"tile_size is {tile_size}: choose one of {known}, or None")


def check_optimizer(optimizer: Optimizer, module: nn.Module) -> None:
    if isinstance(optimizer, type) or not hasattr(optimizer, "param_groups"):
        kind = "the class " if isinstance(optimizer, type) else "of type "
        kind += getattr(optimizer, "__name__", type(optimizer).__name__)
        raise WrongType(
            f"optimizer is {kind}: give a torch.optim.Optimizer over module.parameters()"
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{type(optimizer).__name__} computes the loss several times in a step, and each time "
            "would need noise and ε of its own: give an optimizer whose step() takes no closure, "
            "such as torch.optim.SGD or AdamW"
        )
    own = set(module.parameters())
    held = {p for group in optimizer.param_groups for p in group["params"]}
    if not held <= own:
        raise ValueError(
            "the optimizer holds parameters that are not the module's (of another network, or from "
            "before the module was wrapped, sharded or moved): build it last, as "
            f"{type(optimizer).__name__}(module.parameters(), ..)"
        )
    missing = [n for n, p in module.named_parameters() if p.requires_grad and p not in held]
    if missing:
        raise ValueError(
            f"trainable but not in the optimizer: {', '.join(missing[:5])}; freeze them with "
            "requires_grad_(False) or give them to the optimizer"
        )
    if hasattr(module, "gradient_pieces") and getattr(optimizer, "model", None) is not module:
        name = type(optimizer).__name__
        raise ValueError(
            f"optimizer steps whole parameters, and with {type(module).__name__} each rank has the "
            f"sums of its own slices only: build it as module.make_optimizer({name}, lr=..)"
        )


def check_adaptive(
    adaptive: AdaptiveThreshold,
    clip_norms: list[float],
    noise_multiplier: float,
    expected_batch_size: float,
    is_private: bool,
) -> None:
    if not is_private:
        raise ValueError("adaptive_threshold is for private modes: no_dp clips nothing")
    if adaptive.clip_norms != clip_norms:
        raise ValueError(
            f"the adaptive threshold starts at {adaptive.clip_norms[:4]} and max_grad_norm gives "
            f"{clip_norms[:4]} for {len(clip_norms)} clipping groups: build it from the same "
            "numbers"
        )
    if adaptive.expected_batch_size != expected_batch_size:
        raise ValueError(
            f"the adaptive threshold's expected_batch_size is {adaptive.expected_batch_size:g} and "
            f"the run's {expected_batch_size:g}: both must be the same public constant"
        )
    adaptive.gradient_noise_multiplier(noise_multiplier)
