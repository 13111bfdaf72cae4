"""The law as a formula: equation 3 of the paper's appendix E, and its fit.

R. McKenna et al., "Scaling Laws for Differentially Private Language Models" (ICML 2025,
arXiv:2501.18914), equations 2 and 3:

    L(M, T, σ̄) = E + A / M^α + B / T^β + C · s(σ̄)^γ / M^α₂,   s(σ̄) = sigmoid((ln σ̄ + 8) / 1.6)

The paper has the number of examples in place of the steps T, which was 1,024 T in all of its runs,
so B absorbs the factor.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ddp_by_hand.experiments.plan_privacy.law import Law, Observation, ranges_of

CENTRE, WIDTH = 8.0, 1.6  # of equation 2
LEVEL = 0.3  # weight of a slope d ln L / d ln T or M that should be 0, beside a relative error of L
BOUNDS = ((0.02, 2.0), (0.02, 2.0), (0.1, 4.0), (-0.5, 0.5))  # α, β, γ, α₂ that a fit may find
STARTS = ((0.47, 0.12, 0.95, -0.07), (0.3, 0.5, 1.5, 0.0), (0.1, 1.0, 2.0, 0.1))


class Optimum(NamedTuple):
    """An observation that no training of the same FLOPs improves on.

    `by_steps` and `by_parameters` say how fast ln σ̄ grows with ln T and ln M if the batch shrinks
    accordingly, at the same (ε, δ); None where the search for it ended at a limit.
    """

    seen: Observation
    by_steps: float
    by_parameters: float | None


class Exponents(NamedTuple):
    alpha: float
    beta: float
    gamma: float
    alpha2: float


@dataclass(frozen=True)
class ParametricLaw(Law):
    coefficients: tuple[float, ...]  # E, A, B, C
    exponents: Exponents

    def loss(self, parameters: Any, steps: Any, ratio: Any) -> Any:
        terms = terms_of(self.exponents, parameters, steps, ratio)
        return sum(c * term for c, term in zip(self.coefficients, terms, strict=True))


def terms_of(exponents: Exponents, parameters: Any, steps: Any, ratio: Any) -> list[Any]:
    """Returns the terms that E, A, B and C are factors of."""
    alpha, beta, gamma, alpha2 = exponents
    parameters, steps = np.asarray(parameters, float), np.asarray(steps, float)
    noise = noise_term(ratio) ** gamma
    return [1.0, parameters**-alpha, steps**-beta, noise * parameters**-alpha2]


def noise_term(ratio: Any) -> Any:
    """Returns s(σ̄)."""
    return 1 / (1 + np.exp(-(np.log(ratio) + CENTRE) / WIDTH))


def equations(
    exponents: Exponents, seen: Sequence[Observation], optima: Sequence[Optimum]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns matrix and right side of the equations that E, A, B and C should satisfy.

    One for each loss, relative to it, and one for each direction in which an optimum is level.
    """
    parameters, steps, ratio, loss = np.array(seen, float).T
    terms = terms_of(exponents, parameters, steps, ratio)
    rows = [np.stack([np.broadcast_to(term, loss.shape) / loss for term in terms], axis=1)]
    alpha, beta, gamma, alpha2 = exponents
    for one in optima:
        size, many, at, reached = one.seen
        _, of_size, of_steps, of_noise = terms_of(exponents, size, many, at)
        by_noise = gamma * (1 - noise_term(at)) / WIDTH * of_noise
        level = [[0, 0, -beta * of_steps, one.by_steps * by_noise]]
        if one.by_parameters is not None:
            by_size = one.by_parameters * by_noise - alpha2 * of_noise
            level.append([0, -alpha * of_size, 0, by_size])
        rows.append(LEVEL * np.array(level, float) / reached)
    matrix = np.concatenate(rows)
    return matrix, np.concatenate([np.ones(len(loss)), np.zeros(len(matrix) - len(loss))])


def coefficients_for(
    exponents: Exponents, seen: Sequence[Observation], optima: Sequence[Optimum] = ()
) -> tuple[tuple[float, ...], np.ndarray]:
    """Returns E, A, B, C of 0 or more with the least squared errors, and the errors."""
    from scipy.optimize import nnls

    matrix, right = equations(exponents, seen, optima)
    sizes = np.abs(matrix[: len(seen)]).max(axis=0)  # nnls would drop columns of small numbers
    found, _ = nnls(matrix / sizes, right)
    return tuple((found / sizes).tolist()), matrix @ (found / sizes) - right


def fit(
    seen: Sequence[Observation], optima: Sequence[Optimum] = (), **of_law: Any
) -> ParametricLaw:
    """Fits the formula to observed losses, and to optima among them where they are known.

    `of_law` are the law's other fields; ranges default to those of the observations. Raises
    ValueError for fewer than eight observations, the number of unknowns.
    """
    if len(seen) < 8:
        raise ValueError(f"a law has 8 unknowns and {len(seen)} losses to fit them: give more")
    exponents = best_exponents(seen, optima)
    coefficients, errors = coefficients_for(exponents, seen, optima)
    deviation = float(np.abs(errors[: len(seen)]).mean())
    fields = ranges_of(seen) | of_law
    return ParametricLaw(
        **fields, deviation=deviation, coefficients=coefficients, exponents=exponents
    )


def best_exponents(seen: Sequence[Observation], optima: Sequence[Optimum] = ()) -> Exponents:
    """Searches the exponents; for each, E, A, B and C are the best ones (variable projection)."""
    from scipy.optimize import minimize

    def squares(x: np.ndarray) -> float:
        return float((coefficients_for(Exponents(*x), seen, optima)[1] ** 2).sum())

    tried = [minimize(squares, start, method="Nelder-Mead", bounds=BOUNDS,
                      options={"xatol": 1e-4, "fatol": 1e-10, "maxiter": 4000})
             for start in STARTS]  # fmt: skip
    best = min(tried, key=lambda one: one.fun)
    return Exponents(*map(float, best.x))
