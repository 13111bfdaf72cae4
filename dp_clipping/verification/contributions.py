"""Measures what one sample may contribute under a clipping function, over hostile gradients."""

import torch
from torch import Tensor

from dp_clipping.clipping.accumulation import accumulation_dtype, squared_norms
from dp_clipping.clipping.coefficients import (
    CLIPPING_FUNCTIONS,
    GAMMA,
    LOWEST,
    coefficients,
    registered,
)
from dp_clipping.kinds import Argument, instance_of, is_count, whole

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
CLIP_NORMS = (LOWEST, 1e-6, 1e-3, 0.3, 1.0, 37.0, 1e6, 1e18)
HOSTILE = (
    0.0, 5e-324, 1e-200, 1e-45, 1e-40, 1e-30, 1e-25, 1e-22, 1e-20, 1e-19, 1e-16, 1e-13, 1e-8, 1e18,
    1.8e19, 1e20, 3e38, 1e200, 1e308, float("inf"), float("-inf"), float("nan"),
)  # fmt: skip
AROUND = (0.5, 0.9, 0.99, 1 - 1e-6, 1.0, 1 + 1e-6, 1.01, 1.1, 2.0, 1e3)  # times C
ROUNDING = 1e-6
WIDTHS = (1, 3, 1500)  # numbers of a gradient


def check_clipping_function(
    name: str, *, gamma: float = GAMMA, trials: int = 200, seed: int = 0
) -> float:
    """Returns the largest contribution c(n)·n that was found, as a multiple of the threshold C.

    Gradients of float64, float32, bfloat16 and float16, with norms that are random, near C, 0, too
    small and too large to be squared, infinite and NaN, are clipped as a training step does it, for
    thresholds from 1e-10 to 1e18. Call it in the tests of a function that you register.

    Args:
        name: `"abadi"`, `"automatic"` or one given to `register_clipping_function`.
        gamma: γ of `"automatic"`.
        trials: random norms for each threshold and dtype.
        seed: the seed of these numbers.

    Raises:
        ValueError: for a name that is not registered; and naming dtype, C and norm where a sample
            contributes more than its bound (1 + 1e-6), where one that is not finite contributes,
            or where a coefficient depends on the other samples. WrongType, for a `name` that
            is no string, and `trials` or `seed` that are no whole numbers.
    """
    instance_of(str, 'the name of a clipping function, as "abadi"').check("name", name)
    whole("a whole number of 1 or more, as trials=200").check("trials", trials)
    Argument("a whole number, as seed=0", is_count).check("seed", seed)
    bound = 1.0 if name in CLIPPING_FUNCTIONS else registered(name)[1]
    draw = torch.Generator().manual_seed(seed)
    largest = 0.0
    for dtype in DTYPES:
        for clip_norm in CLIP_NORMS:
            near = [clip_norm * factor for factor in AROUND]
            spread = 10 ** (
                24 * torch.rand(trials, generator=draw, dtype=torch.float64, device="cpu") - 12
            )
            wanted = torch.cat(
                (torch.tensor([*HOSTILE, *near], dtype=torch.float64, device="cpu"), spread)
            )
            for width in WIDTHS:
                rows = torch.randn(
                    len(wanted), width, generator=draw, dtype=torch.float64, device="cpu"
                )
                rows *= (wanted / rows.norm(dim=1))[:, None]
                found = _largest(name, gamma, rows.to(dtype), clip_norm, bound)
                largest = max(largest, found)
    return largest


def _largest(name: str, gamma: float, rows: Tensor, clip_norm: float, bound: float) -> float:
    """Returns the largest contribution of gradients [B, n], over C; raises ValueError."""
    limits = torch.tensor([clip_norm], dtype=torch.float64, device="cpu")
    squares = squared_norms(rows)[None]
    (c,) = coefficients(squares, limits, name, gamma)
    where = f"clipping function {name!r}, {rows.dtype}, C = {clip_norm:g}: a sample of norm "
    true = torch.linalg.vector_norm(rows.double() / clip_norm, dim=1) * clip_norm
    good = rows.isfinite().all(1)
    if (c[~good] != 0).any():
        raise ValueError(f"{where}{true[~good & (c != 0)][0].item():g} has a coefficient")
    odd = ~(c.isfinite() & (c >= 0))
    if odd.any():
        raise ValueError(f"{where}{true[odd][0].item():g} has the coefficient {c[odd][0].item():g}")
    summed = rows[good].to(accumulation_dtype(rows.dtype)) * c[good, None]
    products = torch.linalg.vector_norm(summed.double() / clip_norm, dim=1)
    over = ~(products <= bound * (1 + ROUNDING))
    if over.any():
        n, product = true[good][over][0].item(), products[over][0].item()
        raise ValueError(f"{where}{n:g} contributes {product:g} C, and its bound is {bound:g} C")
    for company in (slice(0, 1), slice(0, None, 2), slice(1, None, 3), slice(-1, None)):
        again = coefficients(squares[:, company], limits, name, gamma)[0]
        same = torch.isclose(again, c[company], rtol=ROUNDING, atol=0)
        if not same.all():
            n = true[company][~same][0].item()
            raise ValueError(f"{where}{n:g} has another coefficient beside other samples")
    return float(products.max())
