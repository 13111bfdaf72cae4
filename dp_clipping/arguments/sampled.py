"""How a training samples its data: what ε needs beside σ and the number of steps."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, partial, reduce
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from dp_clipping.accounting import balls_in_bins, cyclic, truncated_poisson
from dp_clipping.accounting.history import History, joined
from dp_clipping.accounting.mechanism import ADD_OR_REMOVE, DEFAULT, ZERO_OUT, Mechanism
from dp_clipping.arguments.checks import check, refuse_first
from dp_clipping.noise.correlated import EXAMPLE, CorrelatedNoise
from dp_clipping.noise.mechanisms import mechanism_of
from dp_clipping.sampling.given_loader import batches_of, expected_batch_size_of
from dp_clipping.sampling.schemes import FIXED
from dp_clipping.sampling.units import Units, units_of

WHOLE = ("steps", "max_batch_size", "examples_per_unit", "examples_per_step", "views")


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """The arguments of `make_private` that say how the data are sampled, and what follows of them.

    Without a loader the arguments are checked, and nothing follows yet.

    Raises:
        WrongType, ValueError: for an argument of the wrong type or out of range, and for arguments
            that do not go together, by name.
    """

    data_loader: Any = None
    sample_rate: float | None = None
    steps: int | None = None
    poisson_sampling: bool = True
    rand_on_empty: bool = False
    sampling: str = "poisson"
    max_batch_size: int | None = None
    examples_per_unit: int = 1
    unit_ids: Sequence[Hashable] | None = None
    examples_per_step: int | None = None
    views: int = 1
    noise_mechanism: str | CorrelatedNoise = DEFAULT.name

    @staticmethod
    def of(arguments: Mapping[str, Any], **more: Any) -> "Sampled":
        """Returns how `make_private` would sample, from arguments of it; other ones are left out.

        Args:
            more: `data_loader`, if there is one.
        """
        if "data_loader" in more:
            check("data_loader", more["data_loader"])
        own = {one.name for one in fields(Sampled)}
        return Sampled(**{k: value for k, value in {**arguments, **more}.items() if k in own})

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if value is not None or one.default is not None:
                check(one.name, value)
            if value is not None and one.name in WHOLE:
                object.__setattr__(self, one.name, int(value))
        if self.data_loader is not None:
            _refuse_without_length(self.data_loader)
        noise, sampling, each = self.noise_mechanism, self.sampling, self.examples_per_unit
        is_correlated = isinstance(noise, CorrelatedNoise)
        is_rated, drawn = self.sample_rate is not None, self.examples_per_step
        of_poisson = {
            "sampling": sampling != "poisson", "sample_rate": is_rated,
            "steps": self.steps is not None, "unit_ids": self.unit_ids is not None,
            "examples_per_step": drawn is not None, "views": self.views > 1,
        }  # fmt: skip
        beside = ", ".join(name for name, is_given in of_poisson.items() if is_given)
        other = f"sampling={sampling!r} does not go with "
        refuse_first(
            (is_correlated and sampling != "cyclic",
             f"noise_mechanism={noise!r} does not go with sampling={sampling!r}, for which no "
             f"account of correlated noise is known: {EXAMPLE}"),
            (self.max_batch_size is not None and sampling != "truncated_poisson",
             f'max_batch_size is for sampling="truncated_poisson", and sampling is {sampling!r}: '
             "leave it out; BatchMemoryManager(max_physical_batch_size=..) splits larger batches"),
            (self.max_batch_size is None and sampling == "truncated_poisson",
             "max_batch_size is missing: give the most units that a batch of all ranks may have, "
             'as make_private(.., sampling="truncated_poisson", max_batch_size=128)'),
            (not self.poisson_sampling and beside,
             f"{beside} does not go with poisson_sampling=False, which leaves the loader's own "
             "batches: leave it out"),
            (sampling != "poisson" and not is_correlated and noise != DEFAULT.name,
             f"{other}noise_mechanism={noise!r}, whose account is for Poisson batches: leave it "
             'out, or give sampling="poisson"'),
            (sampling in FIXED and is_rated,
             f"{other}sample_rate, as each unit is in one batch of each epoch: give steps=, the "
             "number of batches of an epoch, a public constant"),
            (self.unit_ids is not None and each == 1 and drawn is None,
             "unit_ids says which examples are one unit, and examples_per_unit=1 is one example: "
             "give examples_per_unit, the most examples that a unit has, or examples_per_step, how "
             "many of them a step draws, or leave unit_ids out"),
            (drawn is not None and self.unit_ids is None and each == 1,
             f"examples_per_step={drawn} is drawn among a unit's examples, and here a unit is one "
             "example: give unit_ids, the unit of each example, or examples_per_unit"),
            (drawn is not None and each > 1 and drawn > each,
             f"examples_per_step={drawn} is more than examples_per_unit={each}, the most examples "
             f"that a unit has: give examples_per_step={each} or less, or leave it out"),
            (self.rand_on_empty and self.rows_per_unit * self.views > 1,
             "rand_on_empty=True makes up one row for an empty batch, and a unit has "
             f"{self.rows_per_unit * self.views}: leave rand_on_empty out, a batch without samples "
             "is a step like any other"),
        )  # fmt: skip

        if is_correlated and noise.epochs is not None and self.data_loader is not None:
            object.__setattr__(self, "noise_mechanism", noise.in_epochs_of(self.rates[1]))

    @property
    def rows_per_unit(self) -> int:
        """Returns how many rows a batch has for each unit, each once for a view: m, or k."""
        return self.examples_per_unit if self.examples_per_step is None else self.examples_per_step

    @property
    def has_units(self) -> bool:
        """Returns whether a unit may have several examples."""
        return self.examples_per_unit > 1 or self.examples_per_step is not None

    @cached_property
    def units(self) -> Units | None:
        """Returns the units that Poisson sampling draws; None: it draws examples, or there is none.

        With `views` an example is a unit of one.

        Raises:
            ValueError: for `unit_ids` that are not one for each example.
        """
        if not (self.has_units or self.views > 1) or not self.poisson_sampling:
            return None
        most, drawn = self.examples_per_unit, self.examples_per_step
        return units_of(
            len(self.data_loader.dataset), most if most > 1 or drawn is None else None,
            self.unit_ids, drawn, self.views,
        )  # fmt: skip

    @property
    def units_of_data(self) -> int:
        """Returns how many units of privacy the data have."""
        if self.units is not None:
            return len(self.units)
        return -(-len(self.data_loader.dataset) // self.examples_per_unit)

    @cached_property
    def unit(self) -> tuple[int, bytes]:
        """Returns k and a digest of `unit_ids`, which is empty without: equal for equal units."""
        named = self.units is not None and self.units.are_named
        return self.examples_per_unit, self.units.digest() if named and self.units else b""

    @cached_property
    def rates(self) -> tuple[float, int]:
        """Returns q and the batches of an epoch, in which each sample takes part once on average.

        What is not given follows from the loader's length, and so from the size of the data; q is 1
        for a loader without batches, which is refused later. With a sampling in which each sample
        takes part exactly once, q is 1 over the batches.
        """
        steps, loader = self.steps, self.data_loader
        units = self.units if self.has_units else None
        if self.sampling in FIXED and steps is not None:
            return 1 / steps, steps
        if self.sample_rate is None:
            length = len(loader) if units is None else batches_of(loader, len(units), units.size)
            length = max(1, length)
            return 1 / length, steps or length
        rate = float(self.sample_rate)
        return rate, steps or max(1, round(1 / rate))

    @cached_property
    def mechanism(self) -> Mechanism:
        """Returns what a step releases: noise and sampling together, with its account."""
        return accounted(
            self.noise_mechanism, self.sampling, units=self.units_of_data,
            max_batch_size=self.max_batch_size,
        )  # fmt: skip

    def expected_units(self, world_size: int) -> float:
        """Returns the units of a batch of the loader, times the ranks if each has its own data."""
        return expected_batch_size_of(self.data_loader, world_size, self.rows_per_unit)


def _refuse_without_length(loader: DataLoader) -> None:
    """Raises ValueError for a loader whose samples cannot be counted."""
    dataset: Any = loader.dataset
    try:
        len(loader), len(dataset)
    except TypeError:
        kind = type(dataset).__name__
        instead = f"give {kind} a __len__"
        if isinstance(dataset, IterableDataset):
            instead = "take its samples into a list, DataLoader(list(dataset), batch_size=64)"
        raise ValueError(
            f"data_loader has no length, as its {kind} has none, and each sample takes part with "
            f"probability 1 / len(data_loader): {instead}"
        ) from None


def accounted(
    noise: str | CorrelatedNoise, sampling: str, *, units: int, max_batch_size: int | None = None
) -> Mechanism:
    """Returns the mechanism of these settings, whose account covers a run's steps.

    Args:
        noise: `noise_mechanism` of `make_private`; what goes with which sampling is checked before.
        units: of privacy, in the data.
        max_batch_size: for truncated Poisson sampling.
    """
    if isinstance(noise, CorrelatedNoise):
        drawn: dict[str, Any] = {"bands": noise.bands}
        if noise.batches is not None:
            drawn["weights"] = list(noise.weights(noise.bands))
        return Mechanism(
            f"{noise}, cyclic", "cyclic", ZERO_OUT,
            f"Gaussian mechanism of {noise} on the steps that use one unit (dp-accounting)",
            partial(cyclic.epsilon, sensitivity=noise.sensitivity),
            constants=drawn,
        )  # fmt: skip
    if sampling == "truncated_poisson":
        assert max_batch_size is not None
        constants: dict[str, Any] = {"units": units, "max_batch_size": int(max_batch_size)}
        limits = f"at most {max_batch_size} of {units} units"
        return Mechanism(
            f"gaussian, truncated_poisson, {limits}", "truncated_poisson", ADD_OR_REMOVE,
            f"privacy loss distribution of truncated batches, {limits} (dp-accounting)",
            partial(truncated_poisson.epsilon, **constants),
            curve=partial(truncated_poisson.curve, **constants), constants=constants,
        )  # fmt: skip
    if sampling == "balls_in_bins":
        return Mechanism(
            "gaussian, balls_in_bins", "balls_in_bins", ADD_OR_REMOVE,
            "privacy loss distribution of random allocation (dp-accounting)",
            balls_in_bins.epsilon, curve=balls_in_bins.curve,
        )  # fmt: skip
    if sampling == "cyclic":
        return Mechanism(
            "gaussian, cyclic", "cyclic", ZERO_OUT,
            "Gaussian mechanism of the steps that use one unit (dp-accounting)",
            cyclic.epsilon,
        )  # fmt: skip
    registered = mechanism_of(noise)
    if registered is None:
        return DEFAULT

    def epsilon(histories: Any, delta: float) -> float:
        whole: History = reduce(joined, histories, [])
        return registered.epsilon(whole, delta)

    accountant = f"that of noise mechanism {registered.name!r}"
    return Mechanism(registered.name, accountant=accountant, epsilon=epsilon)
