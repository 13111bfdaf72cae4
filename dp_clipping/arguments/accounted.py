"""The mechanism of `make_private`'s arguments, or the reason why no account covers them."""

from functools import partial, reduce
from typing import Any

from dp_clipping.accounting import balls_in_bins, cyclic, truncated_poisson
from dp_clipping.accounting.history import History, joined
from dp_clipping.accounting.mechanism import ADD_OR_REMOVE, DEFAULT, ZERO_OUT, Mechanism
from dp_clipping.kinds import check_count, check_type
from dp_clipping.noise.correlated import EXAMPLE, CorrelatedNoise
from dp_clipping.noise.mechanisms import NoiseMechanism, mechanism_of
from dp_clipping.sampling.schemes import FIXED, SAMPLINGS


def check_sampling(
    sampling: Any,
    *,
    max_batch_size: Any = None,
    sample_rate: float | None = None,
    poisson_sampling: bool = True,
    noise_mechanism: Any = DEFAULT.name,
) -> None:
    """Raises WrongType or ValueError for a sampling that does not go with other arguments."""
    check_type("sampling", sampling, str, f"one of {', '.join(SAMPLINGS)}")
    if sampling not in SAMPLINGS:
        raise ValueError(f"sampling {sampling!r} is unknown: choose one of {', '.join(SAMPLINGS)}")
    is_correlated = isinstance(noise_mechanism, CorrelatedNoise)
    if is_correlated and sampling != "cyclic":
        raise ValueError(
            f"noise_mechanism={noise_mechanism!r} does not go with sampling={sampling!r}, for "
            f"which no account of correlated noise is known: {EXAMPLE}"
        )
    if max_batch_size is not None and sampling != "truncated_poisson":
        raise ValueError(
            f'max_batch_size is for sampling="truncated_poisson", and sampling is {sampling!r}: '
            "leave it out; BatchMemoryManager(max_physical_batch_size=..) splits larger batches"
        )
    if sampling == "poisson":
        return
    if sampling == "truncated_poisson":
        wanted = "the most units that a batch of all ranks may have, a whole number of 1 or more"
        if max_batch_size is None:
            raise ValueError(
                f"max_batch_size is missing: give {wanted}, as make_private(.., "
                'sampling="truncated_poisson", max_batch_size=128)'
            )
        check_count("max_batch_size", max_batch_size, wanted)
        if max_batch_size < 1:
            raise ValueError(f"max_batch_size is {max_batch_size}: give {wanted}")
    is_registered = not is_correlated and noise_mechanism != DEFAULT.name
    for is_given, what, instead in (
        (not poisson_sampling, "poisson_sampling=False, which leaves the loader's own batches",
         "leave it out"),
        (is_registered, f"noise_mechanism={noise_mechanism!r}, whose account is "
         "for Poisson batches", 'leave it out, or give sampling="poisson"'),
        (sample_rate is not None and sampling in FIXED, "sample_rate, as each unit is in one batch "
         "of each epoch", "give steps=, the number of batches of an epoch, a public constant"),
    ):  # fmt: skip
        if is_given:
            raise ValueError(f"sampling={sampling!r} does not go with {what}: {instead}")


def accounted(
    noise_mechanism: str | CorrelatedNoise, sampling: str, *, units: int,
    max_batch_size: int | None = None,
) -> Mechanism:  # fmt: skip
    """Returns the mechanism of these settings, whose account covers a run's steps.

    Args:
        units: of privacy, in the data.
        max_batch_size: as given, for truncated Poisson sampling.

    Raises:
        ValueError: no account is known of both together.
    """
    check_sampling(sampling, max_batch_size=max_batch_size, noise_mechanism=noise_mechanism)
    if isinstance(noise_mechanism, CorrelatedNoise):
        return Mechanism(
            f"{noise_mechanism}, cyclic", "cyclic", ZERO_OUT,
            f"Gaussian mechanism of {noise_mechanism} on the steps that use one unit "
            "(dp-accounting)",
            partial(cyclic.epsilon, sensitivity=noise_mechanism.sensitivity), in_order=True,
        )  # fmt: skip
    if sampling == "truncated_poisson":
        assert max_batch_size is not None
        limits = f"at most {max_batch_size} of {units} units"
        return Mechanism(
            f"gaussian, truncated_poisson, {limits}", "truncated_poisson", ADD_OR_REMOVE,
            f"privacy loss distribution of truncated batches, {limits} (dp-accounting)",
            partial(
                truncated_poisson.epsilon, units=units, max_batch_size=int(max_batch_size)
            ),
        )  # fmt: skip
    if sampling == "balls_in_bins":
        return Mechanism(
            "gaussian, balls_in_bins", "balls_in_bins", ADD_OR_REMOVE,
            "privacy loss distribution of random allocation (dp-accounting)",
            balls_in_bins.epsilon, in_order=True,
        )  # fmt: skip
    if sampling == "cyclic":
        return Mechanism(
            "gaussian, cyclic", "cyclic", ZERO_OUT,
            "Gaussian mechanism of the steps that use one unit (dp-accounting)",
            cyclic.epsilon, in_order=True,
        )  # fmt: skip
    noise = mechanism_of(noise_mechanism)
    return DEFAULT if noise is None else _registered(noise)


def _registered(noise: NoiseMechanism) -> Mechanism:
    """Returns the mechanism of registered noise on Poisson batches."""

    def epsilon(histories: Any, delta: float) -> float:
        whole: History = reduce(joined, histories, [])
        return noise.epsilon(whole, delta)

    accountant = f"that of noise mechanism {noise.name!r}"
    return Mechanism(noise.name, accountant=accountant, epsilon=epsilon)
