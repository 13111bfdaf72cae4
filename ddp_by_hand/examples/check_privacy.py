"""Checks the numbers of a `privacy.json` with dp-accounting alone: `dp-check-privacy FILE`.

δ of each ε is computed again from the steps in the file, and μ and the true positive rates from the
file's ε. Nothing of `dp_clipping` is imported: this file can be copied alone, and needs
dp-accounting, NumPy and SciPy. Exit status 1 names the numbers that do not hold; 2 says what cannot
be checked here, such as the account of a user's own noise.
"""

import argparse
import json
import math
import sys
from functools import reduce
from itertools import combinations, groupby

import numpy as np
from dp_accounting.pld import privacy_loss_distribution as pld
from scipy.special import log_ndtr, ndtr, ndtri

PART, MORE = 0.015, 0.002  # an ε may be off by these parts of it and of the largest one
LOOSE = 0.01  # of the largest one: so much larger than needed it may be, as small ones are
ROUNDING = 2.0**-50  # of δ, for each step: what an FFT may get wrong
GRID = 0.02  # of balls-in-bins batches: a part of the standard deviation


def expand(history):
    return [(sigma, q) for sigma, q, steps in history for _ in range(steps)]


def per_epoch(history):
    rates = {round(1 / q) for _, q, _ in history}
    return rates.pop() if len(rates) == 1 else 1


def gaussian(mu):
    """Returns δ of the Gaussian mechanism (Balle and Wang 2018) as a function of ε."""
    return lambda e: ndtr(mu / 2 - e / mu) - np.exp(e + log_ndtr(-mu / 2 - e / mu))


def squared_mu(history, bands, weights=None):
    """Returns the largest μ² of a unit that is in each `per_epoch`-th step of cyclic batches."""
    steps, apart = expand(history), per_epoch(history)
    if bands is None:
        return max(sum(sigma**-2.0 for sigma, _ in steps[i::apart]) for i in range(apart))
    if weights is None:
        weights = np.cumprod([1.0] + [(j - 1.5) / j for j in range(1, bands)])
    weights, moved = np.array(weights), np.zeros(len(steps))
    for t in range(len(steps)):
        before = moved[max(0, t - bands + 1) : t][::-1]
        moved[t] = (t % apart == 0) - weights[1 : 1 + len(before)] @ before
    return (moved @ moved) / min(sigma for sigma, _ in steps) ** 2


def poisson(entries, account):
    """Returns δ of (truncated) Poisson batches: the larger one of both neighbours."""

    def whole(larger):
        found = []
        spread = min(q * math.expm1(min(100.0, sigma**-2.0)) ** 0.5 for sigma, q, _ in entries)
        h = max(1e-6, min(1e-3, 0.1 * spread))
        for (sigma, q), same in groupby(sorted(entries), lambda entry: tuple(entry[:2])):
            if "units" in account:
                one = pld.from_truncated_subsampled_gaussian_mechanism(
                    account["units"] + larger, q, account["max_batch_size"], sigma, h
                )
            else:
                one = pld.from_gaussian_mechanism(
                    sigma, sampling_prob=q, value_discretization_interval=h
                )
            found.append(one.self_compose(sum(entry[2] for entry in same)))
        return reduce(lambda a, b: a.compose(b), found)

    both = [whole(larger) for larger in ((0, 1) if "units" in account else (0,))]
    return lambda e: np.maximum.reduce([one.get_delta_for_epsilon(e) for one in both])


def split(values, mass, h):
    """Returns k and masses on exp(k·h), which keep the mean: each number's on its neighbours."""
    k = np.floor(np.log(values) / h).astype(int)
    upper = mass * (values - np.exp(k * h)) / (np.exp(k * h) * math.expm1(h))
    first = k.min()
    found = np.bincount(k - first, mass - upper, np.ptp(k) + 2)
    found += np.bincount(k - first + 1, upper, np.ptp(k) + 2)
    k = first + np.arange(len(found))
    kept = found * np.maximum(1, np.exp(k * h)) > 1e-18
    return k[kept], found[kept]


def cells(x):
    """Returns the mass of N(0, 1) between neighbours of x."""
    low, high = x[:-1], x[1:]
    return np.where(low > 0, ndtr(-low) - ndtr(-high), ndtr(high) - ndtr(low))


def added(one, other):
    """Returns the distribution (values, mass) of the sum of two independent numbers."""
    values = np.add.outer(one[0], other[0]).ravel()
    mass = np.outer(one[1], other[1]).ravel()
    mean = values @ mass
    h = GRID * min(2.0, (((values - mean) ** 2) @ mass) ** 0.5 / mean)
    k, mass = split(values, mass, h)
    return np.exp(k * h), mass


def summed(sigma, steps):
    """Returns the distribution of Λ_1 + ... + Λ_steps, Λ = exp(x/σ − 1/(2σ²)), x ~ N(0, 1)."""
    x = np.linspace(-9, 9 + 1 / sigma, 4001)
    mass = cells(x)
    ratio = cells(x - 1 / sigma) / mass
    h = GRID * min(2.0, 1 / sigma)
    k, mass = split(ratio, mass, h)
    power, total = (np.exp(k * h), mass), (np.zeros(1), np.ones(1))
    while steps:
        if steps & 1:
            total = added(total, power)
        steps >>= 1
        power = added(power, power) if steps else power
    return total


def balls_in_bins(histories):
    """Returns δ of epochs in which a unit is in one of b batches: S = 1/b Σ Λ_j, composed."""
    epochs = []
    for history in histories:
        steps, b = [sigma for sigma, _ in expand(history)], per_epoch(history)
        parts = [steps[i : i + b] for i in range(0, len(steps), b)]
        epochs += [(min(part), b, len(part)) for part in parts]
    if min(epochs)[0] < 0.2:  # no amplification is stated
        return gaussian(sum(sigma**-2.0 for sigma, _, _ in epochs) ** 0.5)
    h, found = GRID * min(min(1, (math.expm1(s**-2.0) / b) ** 0.5) for s, b, _ in epochs), []
    for (sigma, b, steps), same in groupby(sorted(epochs)):
        values, mass = summed(sigma, steps)
        k, mass = split((values + b - steps) / b, mass, h)
        removed = dict(zip(k.tolist(), (mass * np.exp(k * h)).tolist(), strict=True))
        kept = dict(zip((-k).tolist(), mass.tolist(), strict=True))
        one = pld.PrivacyLossDistribution.create_from_rounded_probability(
            removed, 0.0, h, rounded_probability_mass_function_add=kept, infinity_mass_add=0.0,
            symmetric=False,
        )  # fmt: skip
        found.append(one.self_compose(len(list(same))))
    return reduce(lambda a, b: a.compose(b), found).get_delta_for_epsilon


def delta_of(file):
    """Returns δ as a function of ascending ε, computed from the steps of the file."""
    account, histories = file["account"], [h for h in file["account"]["histories"] if h]
    if account["sampling"] == "cyclic":
        return gaussian(
            sum(squared_mu(h, account.get("bands"), account.get("weights")) for h in histories)
            ** 0.5
        )
    if account["sampling"] == "balls_in_bins":
        return balls_in_bins(histories)
    if account["sampling"] not in ("poisson", "truncated_poisson"):
        raise NotImplementedError(f"sampling {account['sampling']!r} is not known here")
    if account["noise"] != "gaussian":
        raise NotImplementedError(f"the account of noise {account['noise']!r} is its author's")
    entries = [tuple(entry) for history in histories for entry in history]
    if not (secure := file.get("secure")):
        return poisson(entries, account)
    scale = (1 + 1e-6) * (1 + secure["summation bound / C"])
    of = poisson(
        [(1 / (scale / s + secure["grid bound / noise"]), *r) for s, *r in entries], account
    )
    more, other = secure["sampler epsilon"], secure["sampler delta"]
    return lambda e: (
        of(np.maximum(e - more, 0)) * np.exp(more / 2) + other * (1 + np.exp(np.minimum(e, 700)))
    )


def missed(curve, rate):
    """Returns the least false negative rate at a false positive rate that the curve allows."""
    low = [1 - d - math.exp(min(e, 700)) * rate for d, e in curve]
    return max(0, *low, *[math.exp(-min(e, 700)) * (1 - d - rate) for d, e in curve])


def hit(curve, rate):
    """Returns the largest true positive rate, exact where it is too small for 1 - missed."""
    low = [d + math.exp(min(e, 700)) * rate for d, e in curve]
    return min(1, *low, *[math.exp(-e) * (d + rate) - math.expm1(-e) for d, e in curve])


def mu_of(curve, delta):
    """Returns the μ that covers the curve from δ on: the largest one that a kink needs."""
    lines = [(d, e) for d, e in curve if d >= delta]
    kinks = [(1 - d) / (1 + math.exp(min(e, 700))) for d, e in lines if e]
    kinks += [
        (b - a) * math.exp(-min(e, 700)) / -math.expm1(f - e)
        for (a, e), (b, f) in combinations(lines, 2)
        if f < e
    ]
    both = [(x, missed(curve, x)) for x in kinks]  # of one pair they are equal, but for rounding
    both = [(x, y) for x, y in both if x <= y * (1 + 1e-9)]
    ends = [ndtri(hit(curve, x)) if y > 0.5 else -ndtri(y) for x, y in both]
    return max([0.0, *(end - ndtri(x) for end, (x, _) in zip(ends, both, strict=True))])


RATES = [0.001, 0.01, 0.1]  # of false positives
CANNOT = (
    OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError,
    NotImplementedError,
)  # fmt: skip


def wrong(file):
    """Yields what does not hold, in words."""
    account, delta = file["account"], file["delta"]
    entries = [tuple(entry) for history in account["histories"] for entry in history]
    steps = sum(entry[2] for entry in entries)
    if steps != file["steps"]:
        yield f"steps is {file['steps']}, and the account has {steps}"
    for i, name in enumerate(("noise_multiplier", "sample_rate") if entries else ()):
        stated = file[name] if isinstance(file[name], list) else [file[name]]
        if set(stated) != {entry[i] for entry in entries}:
            yield f"{name} is {file[name]}, and that of the account's steps another one"
    curve = [(d, math.inf if e is None else e) for d, e in file["curve"]]
    stated = math.inf if file["epsilon"] is None else file["epsilon"]
    if dict(curve).get(delta) != stated:
        yield f"epsilon is {stated}, and that of the curve {dict(curve).get(delta)}"
    rates = [rate for rate, _ in file["true_positive_rates"]]
    if rates != RATES:
        yield f"true positive rates are of {rates}, and a statement has those of {RATES}"
    if math.isinf(stated):
        if file["mu"] is not None or any(rate != 1 for _, rate in file["true_positive_rates"]):
            yield "epsilon is infinite, and mu or a true positive rate is not that of no guarantee"
        return
    if file["answers"]["parameters"] != (words := f"ε = {stated:.4g} at δ = {delta:g}"):
        yield f"the answers say {file['answers']['parameters']!r}, and the numbers {words!r}"
    mu = math.inf if file["mu"] is None else file["mu"]
    if not math.isclose(mu, found := mu_of(curve, delta), rel_tol=1e-6, abs_tol=1e-9):
        yield f"mu is {mu}, and the curve needs {found}"
    for rate, stated in file["true_positive_rates"]:
        if not math.isclose(stated, found := 1 - missed(curve, rate), rel_tol=1e-6):
            yield f"the true positive rate at {rate} is {stated}, and the curve allows {found}"
    pairs = sorted(curve, key=lambda pair: pair[1])
    deltas, epsilons = (np.array(x, float) for x in zip(*pairs, strict=True))
    if any(sigma == 0 for sigma, _, _ in entries) or not entries:
        if entries or epsilons.any():
            yield f"epsilon is {file['epsilon']}, and there are {steps} steps, some without noise"
        return
    of, slack, more = delta_of(file), steps * ROUNDING, MORE * epsilons.max()
    above = of(epsilons * (1 + PART) + more) > deltas + slack
    lower = epsilons * (1 - PART) - LOOSE * epsilons.max()
    is_upper_bound = account["accountant"] not in (None, "pld")  # Opacus's may be far above
    checked = (lower > 0) & (deltas > 1e4 * slack) & (not is_upper_bound)
    below = checked & (of(np.maximum(lower, 0)) < deltas * (0.45 if file.get("secure") else 1))
    for bad, what in ((above, "smaller"), (below, "larger")):
        for d, e in zip(deltas[bad], epsilons[bad], strict=True):
            yield f"epsilon at delta {d:g} is {e:.4g}, {what} than that of the account's steps"


def refusal(path, error):
    """Says in one line why a file cannot be checked, and what writes one that can be."""
    if isinstance(error, NotImplementedError):
        return f"{path} cannot be checked: {error}"
    if isinstance(error, FileNotFoundError):
        what = f"there is no file {path}"
    elif isinstance(error, OSError):
        what = f"{path} cannot be read ({error.strerror})"
    elif isinstance(error, KeyError):
        what = f"{path} is no whole statement, it has no {error}"
    else:
        what = f"{path} is no statement, or was changed ({type(error).__name__})"
    return f"{what}: engine.privacy_statement(delta=1e-5).save('privacy.json') writes one"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", metavar="FILE", help="privacy.json, as a statement's save wrote it")
    path = parser.parse_args().file
    try:
        with open(path, encoding="utf-8") as text:
            file = json.load(text)
        found = list(wrong(file))
        epsilon = math.inf if file["epsilon"] is None else file["epsilon"]
        stated = (
            f"epsilon = {epsilon:.4g} at delta = {file['delta']:g} after {file['steps']} steps; "
            f"stated, not checked: unit {file['unit']!r}, neighbours {file['relation']!r}"
        )
    except CANNOT as error:
        print(refusal(path, error), file=sys.stderr)
        sys.exit(2)
    for words in found:
        print(words)
    if found:
        sys.exit(1)
    print(stated)
    print(
        f"{len(file['curve'])} pairs of epsilon and delta, mu and the true positive rates hold for "
        "these steps; whether they were those of the run cannot be seen here"
    )


if __name__ == "__main__":
    main()
