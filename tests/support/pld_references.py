"""Computes bounds of ε by dp-accounting's own composition, with fixed intervals.

    python -m tests.support.pld_references

prints the rows of `tests/dp_clipping/accounting/test_pld.py`: σ, q, steps, and ε at δ = 1e-5 by the
optimistic and by the pessimistic estimate. It takes ten minutes. Grids that are too large for that
are left out.
"""

from itertools import product

from dp_accounting.pld import privacy_loss_distribution

DELTA = 1e-5
SIGMAS = (0.05, 0.1, 0.15, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
RATES = (0.001, 0.01, 0.1)
STEPS = (100, 1_000, 10_000, 100_000)
LARGEST_STEP, LARGEST_SUM = 600_000, 4_000_000


def main() -> None:
    for sigma, rate in product(SIGMAS, RATES):
        interval = 1e-3 if sigma < 0.15 else 1e-4
        range_of_a_step = 10 / sigma + 0.5 / sigma**2
        if 2 * range_of_a_step / interval > LARGEST_STEP:
            continue
        ones = [
            privacy_loss_distribution.from_gaussian_mechanism(
                sigma, sampling_prob=rate, value_discretization_interval=interval,
                pessimistic_estimate=estimate,
            )
            for estimate in (False, True)
        ]  # fmt: skip
        for steps in STEPS:
            spread = (steps * rate) ** 0.5 / sigma**2 * 10
            if spread / interval > LARGEST_SUM:
                continue
            low, high = (one.self_compose(steps).get_epsilon_for_delta(DELTA) for one in ones)
            print(f"    ({sigma:g}, {rate:g}, {steps}, {low:.6g}, {high:.6g}),", flush=True)


if __name__ == "__main__":
    main()
