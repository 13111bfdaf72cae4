"""A law of the paper's models, from what the paper publishes: its table 2.

The paper's data is not part of its code, and the coefficients of its equation 3 are not printed.
The exponents are (figure 18), but they were fitted to runs of more than 100,000 steps and say that
the fewest steps are best, where table 2 has about 10,000. So the law is fitted to table 2: to the
twenty losses, and to the fact that no other size, steps or batch of the same FLOPs has a lower one.

The models are BERTs of 4.5 M to 335 M parameters, masked language modelling of sequences of 512
tokens, BookCorpus and Wikipedia, DP-Adam.
"""

from ddp_by_hand.experiments.plan_privacy.law import Law, Observation
from ddp_by_hand.experiments.plan_privacy.parametric import Optimum, fit

SOURCE = (
    "fitted to table 2 of McKenna et al. 2025 (arXiv:2501.18914): BERTs of 4.5 M to 335 M "
    "parameters, masked language modelling of 512 tokens"
)
DELTA = 1e-8  # the paper's
SMALLEST, LARGEST = 4.6e6, 3.3e8  # sizes at which the paper's search ended
# As printed: units N, ε, cross-entropy, parameters M, steps T, batch B. Computed here: σ for
# (ε, DELTA) at q = B / N by `noise.exact_noise(.., "rdp")`, and the slopes of ln σ in ln q, ln T.
TABLE_2 = (
    (1e5, 1, 7.28, 4.6e6, 1.8e3, 5.1e2, 1.494, 0.492, 0.202),
    (1e5, 4, 6.65, 4.6e6, 1.8e3, 4.1e3, 2.705, 0.905, 0.446),
    (1e5, 16, 5.60, 1.7e7, 2.7e3, 1.4e4, 3.232, 0.938, 0.468),
    (1e5, 64, 4.63, 2.0e7, 6.3e3, 1.9e4, 2.291, 0.908, 0.459),
    (1e6, 1, 5.89, 4.6e6, 2.5e3, 8.2e3, 2.383, 0.883, 0.430),
    (1e6, 4, 4.62, 1.9e7, 6.5e3, 2.3e4, 2.842, 0.923, 0.458),
    (1e6, 16, 3.61, 1.7e7, 1.4e4, 4.6e4, 2.456, 0.909, 0.454),
    (1e6, 64, 2.82, 4.9e7, 1.2e4, 1.9e5, 3.099, 0.947, 0.476),
    (1e7, 1, 3.73, 1.7e7, 9.6e3, 7.8e4, 4.219, 0.959, 0.486),
    (1e7, 4, 2.81, 4.9e7, 1.1e4, 2.2e5, 3.481, 0.949, 0.473),
    (1e7, 16, 2.15, 7.0e7, 1.2e4, 7.4e5, 3.569, 0.954, 0.476),
    (1e7, 64, 1.66, 3.3e8, 4.9e4, 8.8e5, 2.914, 0.939, 0.472),
    (1e8, 1, 2.26, 1.3e8, 5.8e4, 2.2e5, 2.969, 0.934, 0.467),
    (1e8, 4, 1.66, 3.3e8, 4.9e4, 8.8e5, 2.954, 0.935, 0.468),
    (1e8, 16, 1.32, 3.3e8, 9.3e4, 1.0e6, 1.483, 0.792, 0.396),
    (1e8, 64, 1.23, 3.3e8, 1.1e5, 8.8e5, 0.726, 0.461, 0.231),
    (1e9, 1, 1.36, 3.3e8, 9.4e4, 8.8e5, 1.621, 0.742, 0.401),
    (1e9, 4, 1.23, 3.3e8, 1.1e5, 8.8e5, 0.769, 0.341, 0.145),
    (1e9, 16, 1.22, 3.3e8, 1.1e5, 8.8e5, 0.515, 0.211, 0.095),
    (1e9, 64, 1.20, 3.3e8, 1.1e5, 1.1e6, 0.395, 0.201, 0.110),
)


def published_law() -> Law:
    """Returns the law; its ranges are those of the paper's experiments."""
    return fit(
        [optimum.seen for optimum in optima()], optima(), parameters=(4.5e6, 3.35e8),
        steps=(1e3, 1.28e5), ratios=(2.0**-23, 2.0**-6), tokens=512, unit="nats per masked token",
        source=SOURCE,
    )  # fmt: skip


def optima() -> list[Optimum]:
    """Returns the rows of table 2; with B = FLOPs / (6 M S T), ln σ̄ grows in ln T and ln M."""
    found = []
    for _, _, loss, size, steps, batch, sigma, by_rate, by_steps in TABLE_2:
        seen = Observation(size, steps, sigma / batch, loss)
        is_free = SMALLEST < size < LARGEST
        found.append(Optimum(seen, 1 - by_rate + by_steps, 1 - by_rate if is_free else None))
    return found
