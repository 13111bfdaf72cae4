"""The law of the paper, from what it publishes: exponents in figure 18, losses in table 2.

Its coefficients E, A, B and C are not published, nor is its data part of its code. Table 2 has the
best configurations of twenty budgets with their losses. With the exponents as published, the four
coefficients are fitted to these twenty losses. The models are BERTs of 4.5 M to 335 M parameters,
sequences of 512 tokens, masked language modelling in nats per masked token, DP-Adam, on the
English Wikipedia and BookCorpus.
"""

from experiments.plan_privacy.law import Exponents, Law, Observation, fit

SOURCE = (
    "McKenna et al. 2025 (arXiv:2501.18914): exponents of figure 18; E, A, B, C fitted here to the "
    "20 losses of table 2. BERTs, 512 tokens, masked language modelling"
)
EXPONENTS = Exponents(alpha=0.47, beta=0.12, gamma=0.95, alpha2=-0.07)
DELTA = 1e-8
# units N, ε, cross-entropy, parameters M, steps T, batch B as printed in table 2; the last column
# is σ of Opacus's PRV accountant for (ε, 1e-8) at q = B / N, which the paper does not print
TABLE_2 = (
    (1e5, 1, 7.28, 4.6e6, 1.8e3, 5.1e2, 1.494),
    (1e5, 4, 6.65, 4.6e6, 1.8e3, 4.1e3, 2.705),
    (1e5, 16, 5.60, 1.7e7, 2.7e3, 1.4e4, 3.232),
    (1e5, 64, 4.63, 2.0e7, 6.3e3, 1.9e4, 2.291),
    (1e6, 1, 5.89, 4.6e6, 2.5e3, 8.2e3, 2.383),
    (1e6, 4, 4.62, 1.9e7, 6.5e3, 2.3e4, 2.842),
    (1e6, 16, 3.61, 1.7e7, 1.4e4, 4.6e4, 2.456),
    (1e6, 64, 2.82, 4.9e7, 1.2e4, 1.9e5, 3.099),
    (1e7, 1, 3.73, 1.7e7, 9.6e3, 7.8e4, 4.219),
    (1e7, 4, 2.81, 4.9e7, 1.1e4, 2.2e5, 3.481),
    (1e7, 16, 2.15, 7.0e7, 1.2e4, 7.4e5, 3.569),
    (1e7, 64, 1.66, 3.3e8, 4.9e4, 8.8e5, 2.914),
    (1e8, 1, 2.26, 1.3e8, 5.8e4, 2.2e5, 2.969),
    (1e8, 4, 1.66, 3.3e8, 4.9e4, 8.8e5, 2.954),
    (1e8, 16, 1.32, 3.3e8, 9.3e4, 1.0e6, 1.483),
    (1e8, 64, 1.23, 3.3e8, 1.1e5, 8.8e5, 0.726),
    (1e9, 1, 1.36, 3.3e8, 9.4e4, 8.8e5, 1.621),
    (1e9, 4, 1.23, 3.3e8, 1.1e5, 8.8e5, 0.769),
    (1e9, 16, 1.22, 3.3e8, 1.1e5, 8.8e5, 0.515),
    (1e9, 64, 1.20, 3.3e8, 1.1e5, 1.1e6, 0.395),
)


def published_law() -> Law:
    """Returns the paper's law; ranges are those of its experiments."""
    seen = [Observation(m, t, sigma / b, loss) for _, _, loss, m, t, b, sigma in TABLE_2]
    return fit(
        seen, EXPONENTS, parameters=(4.5e6, 3.35e8), steps=(1e3, 1.28e5),
        ratios=(2.0**-23, 2.0**-6), tokens=512, unit="nats per masked token", source=SOURCE,
    )  # fmt: skip
