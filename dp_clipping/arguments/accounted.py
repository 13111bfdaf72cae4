"""Chooses the account that covers noise and sampling together."""

from functools import partial, reduce
from typing import Any

from dp_clipping.accounting import balls_in_bins, cyclic, truncated_poisson
from dp_clipping.accounting.history import History, joined
from dp_clipping.accounting.mechanism import ADD_OR_REMOVE, DEFAULT, ZERO_OUT, Mechanism
from dp_clipping.noise.correlated import CorrelatedNoise
from dp_clipping.noise.mechanisms import NoiseMechanism, mechanism_of


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
    return DEFAULT if registered is None else _of(registered)


def _of(noise: NoiseMechanism) -> Mechanism:
    """Returns the mechanism of registered noise on Poisson batches."""

    def epsilon(histories: Any, delta: float) -> float:
        whole: History = reduce(joined, histories, [])
        return noise.epsilon(whole, delta)

    accountant = f"that of noise mechanism {noise.name!r}"
    return Mechanism(noise.name, accountant=accountant, epsilon=epsilon)
