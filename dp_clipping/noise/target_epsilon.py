"""Finds the noise multiplier that ends a training at a given ε, by Opacus's search."""

import warnings

LOWEST = 0.2
"""Smallest σ that is searched for: below it Opacus's PRV accountant takes minutes per value."""


def noise_multiplier_for(
    *,
    target_epsilon: float,
    target_delta: float,
    sample_rate: float,
    epochs: int,
    accountant: str,
) -> float:
    """Returns σ with which `epochs` epochs end at (ε, δ), as `opacus` computes it.

    Args:
        sample_rate: probability of a sample to be in a step's batch.
        accountant: `"prv"`, `"rdp"` or `"gdp"`.

    Raises:
        ValueError: if a σ below `LOWEST` would do, or if the accountant finds none.
    """
    from opacus.accountants.utils import get_noise_multiplier  # importing Opacus takes seconds

    most = _epsilon_of_lowest(target_delta, sample_rate, epochs)
    if target_epsilon >= most:
        raise ValueError(
            f"target_epsilon is {target_epsilon:g}: with noise_multiplier {LOWEST:g} epsilon is "
            f"{most:.3g} at most, and the search ends there; give a smaller target_epsilon, or "
            "choose the noise by make_private(noise_multiplier=..)"
        )
    try:
        return get_noise_multiplier(
            target_epsilon=target_epsilon,
            target_delta=target_delta,
            sample_rate=sample_rate,
            epochs=epochs,
            accountant=accountant,
        )
    except ValueError as error:
        raise ValueError(
            f"target_epsilon is {target_epsilon:g}: accountant {accountant} finds no "
            f"noise_multiplier for it ({error}); give another target_epsilon or accountant, or "
            "choose the noise by make_private(noise_multiplier=..)"
        ) from error


def _epsilon_of_lowest(delta: float, sample_rate: float, epochs: int) -> float:
    """Returns an upper bound of ε under σ = `LOWEST`: that of Rényi, which is fast to compute."""
    from opacus.accountants import create_accountant

    accountant = create_accountant(mechanism="rdp")
    accountant.history = [(LOWEST, sample_rate, int(epochs / sample_rate))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its best order may be the last that it tries
        return float(accountant.get_epsilon(delta=delta))
