"""Computes coefficients from norms: how much of each sample's gradient is summed.

| function | c(n) | source |
| --- | --- | --- |
| `abadi` | min(1, C / n) | Abadi et al. 2016, arXiv:1607.00133 |
| `automatic` | C / (n + γ) | Bu et al. 2022, arXiv:2206.07136 |

Both bound a contribution c(n)·n by C, whatever n is: that bound is the sensitivity to which noise
is calibrated. So n is never the computed norm but an upper bound of the norm of the summed values,
with a margin for its own rounding, and a sample whose norm is not finite contributes nothing.

**Which C.** Squared norms are float32 (float64 for a model in float64), and a square below 2⁻¹²⁶
may be computed as zero. Of a gradient of N numbers that takes at most √N·2⁻⁶³ from n: 1e-13 for
10¹² numbers. Under a threshold C_k ≥ `LOWEST` that is far less than the margin, and with γ ≥
`LOWEST` n + γ is not below the true norm. A square above 3.4e38 is infinite: a sample of n > 1.8e19
contributes nothing. Up to `HIGHEST` every C and every coefficient is a float32 number. So

    LOWEST ≤ C_k ≤ HIGHEST   and, for `automatic`,   LOWEST ≤ γ ≤ HIGHEST

and other values are refused. `register_clipping_function` adds functions, which are held to the
same bound. A norm that is formed as a product of two needs more, since a square
that is lost in one factor may be multiplied with a large one: see norms.py.
"""

import hashlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

ClippingFunction = Callable[[Tensor, Tensor], Tensor]

CLIPPING_FUNCTIONS = ("abadi", "automatic")
_REGISTERED: dict[str, tuple[ClippingFunction, float]] = {}
_PROBES = (0.0, 1e-30, 1e-12, 1e-6, 1e-3, 0.1, 0.5, 0.99, 1.0, 1.01, 1.5, 2.0, 3.7, 10.0, 1e3, 1e9)
LIMITS = (1e-3, 1.0, 37.0)  # that functions are tried with
GAMMA = 0.01
LOWEST, HIGHEST = 1e-10, 1e30
LOST = 1e-13  # what a norm may lack where squares are computed as zero
MARGIN = {torch.float64: 2.0**-40, torch.float32: 2e-5}


def register_clipping_function(name: str, fn: ClippingFunction, bound: float = 1.0) -> None:
    """Registers a function as `clipping_function=name` of `make_private`, for every mode.

    `fn(norms, C)` returns coefficients c [B] for unclipped norms n [B] and a threshold C, a tensor
    of one number, which is C_k of a clipping group. Noise is calibrated to C, so a contribution
    c(n)·n must not exceed C, and c must depend on the sample's own norm alone. Both are checked
    here at some norms and thresholds. In training they hold by construction: `fn` is given one norm
    at a time (by `torch.vmap`), and what it returns is cut off at `bound`·C / n.

    Args:
        name: a new one, or that of a function which computes the same.
        fn: a function made of PyTorch's operators, without `if` on a tensor and without random
            numbers.
        bound: the largest c(n)·n, as a multiple of C: above 0, at most 1.

    Raises:
        ValueError: for a name that is taken, a `bound` out of range, and a function that exceeds
            it, returns other than finite numbers of 0 or more, or mixes samples.
    """
    if not isinstance(name, str) or not name or not callable(fn):
        raise ValueError(
            'give a name and a function: register_clipping_function("half", '
            "lambda norms, C: (0.5 * C / norms).clamp(max=1), bound=0.5)"
        )
    if name in CLIPPING_FUNCTIONS:
        raise ValueError(f"clipping function {name!r} is taken: give another name")
    if isinstance(bound, bool) or not isinstance(bound, int | float) or not 0 < bound <= 1:
        raise ValueError(
            f"bound is {bound!r}: give the largest c(n)·n as a multiple of C, above 0 and at most "
            "1; divide the coefficients of a function that exceeds it"
        )
    for limit in LIMITS:
        norms = limit * torch.tensor(_PROBES, dtype=torch.float64, device="cpu")
        _check_function(
            name, fn, float(bound), norms, torch.tensor(limit, dtype=torch.float64, device="cpu")
        )
    mine = fn, float(bound)
    if _digest(*_REGISTERED.setdefault(name, mine)) != _digest(*mine):
        raise ValueError(
            f"clipping function {name!r} is taken by one that computes something else: give "
            "another name, or restart Python"
        )


def known_clipping_functions() -> tuple[str, ...]:
    """Returns the names that `clipping_function` may be."""
    return (*CLIPPING_FUNCTIONS, *_REGISTERED)


def registered(name: str) -> tuple[ClippingFunction, float]:
    """Returns a function that was registered, and its bound.

    Raises ValueError for a name that was not.
    """
    if name not in _REGISTERED:
        raise ValueError(
            f"clipping function {name!r} is not known in this process: call "
            "dp_clipping.register_clipping_function(name, fn, bound=..) first"
        )
    return _REGISTERED[name]


def described(name: str) -> str:
    """Returns a name that ranks and checkpoints compare: it identifies what a function computes.

    That of one that was registered has a hash of its bound and its coefficients at some norms.
    """
    if name not in _REGISTERED:
        return name
    return f"{name} ({_digest(*_REGISTERED[name])})"


def _digest(fn: ClippingFunction, bound: float) -> str:
    values = [bound]
    for limit in LIMITS:
        norms = limit * torch.tensor(_PROBES[1:], dtype=torch.float64, device="cpu")
        values += fn(norms, torch.tensor(limit, dtype=torch.float64, device="cpu")).tolist()
    text = " ".join(f"{value:.4g}" for value in values)  # another processor may round otherwise
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


def _check_function(
    name: str, fn: ClippingFunction, bound: float, norms: Tensor, limit: Tensor
) -> None:
    """Raises ValueError if a function is wrong at one of these norms."""
    where = f"clipping function {name!r} with C = {limit.item():g}"
    try:
        found, alone = fn(norms.clone(), limit.clone()), _one_by_one(fn, norms, limit)
    except Exception as error:
        raise ValueError(
            f"{where} raises {type(error).__name__} ({str(error).splitlines()[0][:120]}): it must "
            "take norms [B] and C as tensors, and one norm under torch.vmap, so write it with "
            "PyTorch's operators (torch.where in place of if)"
        ) from error
    if not isinstance(found, Tensor) or found.shape != norms.shape or alone.shape != norms.shape:
        raise ValueError(f"{where} must return one coefficient per sample, a tensor [B]")
    products = found * norms
    wrong = {
        "returns {c:g} for the norm {n:g}": ~(found.isfinite() & (found >= 0)),
        "lets a sample of norm {n:g} contribute {product:g}, and its bound is {bound:g} · C: give "
        "min(c, bound * C / norms)": products > bound * limit * (1 + 1e-6),
        "gives a sample another coefficient alone than among others: it must depend on the "
        "sample's own norm and C, and not be random": ~alone.isclose(found, rtol=1e-6, atol=0),
    }  # fmt: skip
    for message, at in wrong.items():
        at &= norms > 0  # c·n of a norm of 0 is 0, and 0/0 is cut off
        if at.any():
            c, n, product = (x[at][0].item() for x in (found, norms, products))
            raise ValueError(f"{where} {message.format(c=c, n=n, product=product, bound=bound)}")


def _one_by_one(fn: ClippingFunction, norms: Tensor, limit: Tensor) -> Tensor:
    """Returns coefficients from detached norms, each sample's from its own norm alone."""
    return torch.vmap(fn, in_dims=(0, None), randomness="different")(norms.clone(), limit.clone())


def _of_registered(name: str, norms: Tensor, clip_norms: Tensor) -> Tensor:
    """Returns c [K, B] from norms [K, B] and thresholds [K, 1], none above bound · C / n.

    A norm of 0 may be that of a gradient whose squares underflow, which `abadi` and `automatic` do
    not scale up and a function that returns C / n does: so n is its norm and what may be lost.
    """
    fn, bound = registered(name)
    rows = [_one_by_one(fn, n, limit[0]) for n, limit in zip(norms, clip_norms, strict=True)]
    scale = torch.stack(rows).to(norms)
    largest = torch.finfo(norms.dtype).max
    most = bound * clip_norms / (norms + LOST)
    return torch.minimum(scale.nan_to_num(nan=0.0, posinf=largest), most).clamp(min=0)


def clip_norms_of(
    max_grad_norm: float | Sequence[float], groups: int, clipping: str
) -> list[float]:
    """Returns C_k of each group: C itself for one, C/√K for K groups, or the list that was given.

    Σ C_k² = C² in each case: the sum over groups has sensitivity C.

    Raises:
        ValueError: for a threshold that float32 norms cannot be compared with.
    """
    if isinstance(max_grad_norm, Sequence):
        clip_norms = [float(c) for c in max_grad_norm]
    elif clipping == "flat":
        clip_norms = [float(max_grad_norm)]
    else:
        clip_norms = [float(max_grad_norm) / groups**0.5] * groups
    for limit in clip_norms:
        check_range("max_grad_norm", limit, "" if len(clip_norms) == 1 else " a clipping group")
    return clip_norms


def check_range(name: str, value: float, of: str = "") -> None:
    """Raises ValueError for a C_k or γ with which a contribution could not be kept below C."""
    if not LOWEST <= value <= HIGHEST:
        raise ValueError(
            f"{name} is {value}{of}, and squares of float32 norms hold numbers from {LOWEST:g} "
            f"to {HIGHEST:g}: give one of those, say {name}=1.0, and scale the loss if gradients "
            "are that small or large"
        )


def coefficients(
    squared_bounds: Tensor, clip_norms: Tensor, function: str, gamma: float = GAMMA
) -> Tensor:
    """Returns c [K, B] from upper bounds of squared norms [K, B] and thresholds [K], K groups.

    Zero for a sample of which any group's bound is not finite.
    """
    margin = 1 + MARGIN[squared_bounds.dtype]
    norms = squared_bounds.sqrt() * margin
    clip_norms = clip_norms.to(norms)[:, None]
    if function == "abadi":
        scale = (clip_norms / norms).clamp(max=1.0)
    elif function == "automatic":  # finite: an infinite one times zero would be NaN
        scale = (clip_norms / (norms + gamma)).clamp(max=torch.finfo(norms.dtype).max)
    else:
        scale = _of_registered(function, norms, clip_norms)
    return torch.where(finite_samples(squared_bounds), scale, 0.0)


def finite_samples(squared_bounds: Tensor) -> Tensor:
    """Returns which samples have finite norms in all groups: bool [B] from [K, B]."""
    return torch.isfinite(squared_bounds).all(dim=0)
