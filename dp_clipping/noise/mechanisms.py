"""`register_noise_mechanism`: noise of another distribution, with its own accounting.

Noise on a sum is σC·z. Each number of z is `quantile(u)` of a uniform number u, whose address is
(key, step, parameter, offset) as that of Gaussian noise is. So shards, replicas and resumed runs
agree on it, whatever the distribution.
"""

import hashlib
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from dp_clipping.accounting.history import History
from dp_clipping.noise.correlated import CorrelatedNoise
from dp_clipping.noise.gaussian import Values, uniform

Quantile = Callable[[Tensor], Tensor]
Epsilon = Callable[[History, float], float]

DEFAULT = "gaussian"
EXAMPLE = "register_noise_mechanism(name, quantile, epsilon=lambda history, delta: ..)"
GRID = 1 << 18
SCALE = 1e-2  # relative error of a standard deviation: heavy tails are cut off by a grid
SIGMAS, DELTAS = (0.5, 1.0, 2.0, 5.0), (1e-3, 1e-5, 1e-8)


class NoiseMechanism(NamedTuple):
    """A distribution of noise, and what it costs.

    Attributes:
        name: as given to `make_private`.
        quantile: uniform numbers in (0, 1), float64 -> noise of standard deviation 1.
        epsilon: steps [(σ, q, number)] and δ -> ε.
    """

    name: str
    quantile: Quantile
    epsilon: Epsilon

    @property
    def values(self) -> Values:
        """Returns the conversion of random words to noise."""
        return Values(2, lambda words: self.quantile(uniform(words)).to(torch.float32, copy=True))


_REGISTERED: dict[str, NoiseMechanism] = {}


def register_noise_mechanism(
    name: str, quantile: Quantile, *, epsilon: Epsilon | None = None
) -> None:
    """Registers a distribution of noise as `noise_mechanism=name` of `make_private`.

    The noise on a clipped sum is `noise_multiplier`·C·z, where each number of z is `quantile` of a
    uniform number in (0, 1). Key, step, parameter and offset select that number.

    Args:
        name: a new one.
        quantile: the inverse of the distribution function of noise with mean 0 and standard
            deviation 1: float64 [n] -> [n], element by element, of PyTorch's operators.
        epsilon: `epsilon(history, delta)` returns ε at this δ for steps with Poisson sampling. Each
            `(σ, q, number)` in `history` stands for `number` steps with noise multiplier σ and
            sample rate q. A unit changes their sums by a vector of norm at most C.

    Raises:
        ValueError: for a name that is taken, no `epsilon`, a quantile that is not increasing, or
            has another mean or standard deviation; and an `epsilon` that is negative, that does not
            rise with more steps or less noise, or that one step of this noise provably exceeds.
    """
    if not isinstance(name, str) or not name or not callable(quantile):
        raise ValueError(f"give a name and a function of uniform numbers: {EXAMPLE}")
    if epsilon is None or not callable(epsilon):
        raise ValueError(
            f"noise mechanism {name!r} has no account, and ε would be that of Gaussian noise: give "
            f"epsilon=, as {EXAMPLE}"
        )
    mechanism = NoiseMechanism(name, quantile, epsilon)
    if name == DEFAULT or "," in name:
        why = "is taken" if name == DEFAULT else "has a comma, as those with a sampling have"
        raise ValueError(f"noise mechanism {name!r} {why}: give another name")
    _check_quantile(mechanism)
    _check_epsilon(mechanism)
    if _digest(_REGISTERED.setdefault(name, mechanism)) != _digest(mechanism):
        raise ValueError(
            f"noise mechanism {name!r} is taken by one that computes something else: give another "
            "name, or restart Python"
        )


def known_mechanisms() -> tuple[str, ...]:
    """Returns the names that `noise_mechanism` may be."""
    return (DEFAULT, *_REGISTERED)


def mechanism_of(name: str) -> NoiseMechanism | None:
    """Returns a mechanism that was registered; None for Gaussian noise.

    Raises ValueError for one that was not.
    """
    if name == DEFAULT:
        return None
    if name not in _REGISTERED:
        raise ValueError(
            f"noise_mechanism {name!r} is unknown: choose one of {', '.join(known_mechanisms())}, "
            f"or call dp_clipping.{EXAMPLE} first"
        )
    return _REGISTERED[name]


def described(name: str | CorrelatedNoise) -> str:
    """Returns a name for ranks and checkpoints to compare, with a hash of what it computes."""
    if isinstance(name, CorrelatedNoise):
        return str(name)
    mechanism = mechanism_of(name)
    if mechanism is None:
        return name
    return f"{name} ({_digest(mechanism)})"


def _digest(mechanism: NoiseMechanism) -> str:
    numbers = mechanism.quantile(_grid(64)).tolist()
    numbers += [mechanism.epsilon([(sigma, 1.0, 1)], 1e-5) for sigma in SIGMAS]
    text = " ".join(f"{number:.4g}" for number in numbers)
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


def lower_bound(quantile: Quantile, sigma: float, delta: float) -> float:
    """Returns an ε that one step without sampling exceeds at this δ.

    Of two sums that differ by C in one number, the larger is above t with P[z > t − 1/σ], the other
    with P[z > t]. (ε, δ) bounds the one by e^ε times the other and δ, for each t.
    """
    return _bound(*_tails(quantile, sigma), delta)


def _tails(quantile: Quantile, sigma: float) -> tuple[Tensor, Tensor]:
    """Returns P[z > t − 1/σ] and P[z > t] at many t."""
    u = torch.sigmoid(torch.linspace(-30, 30, GRID, dtype=torch.float64, device="cpu"))
    z = quantile(u.clone()).double()
    above = torch.searchsorted(z, z - 1 / sigma).clamp(max=GRID - 1)
    return 1 - u[above], 1 - u


def _bound(more: Tensor, less: Tensor, delta: float) -> float:
    """Returns the largest ε that two such probabilities exclude at δ."""
    return float(((more - delta).clamp(min=0) / less).max().log().clamp(min=0))


def _grid(points: int) -> Tensor:
    """Returns the middles of `points` equal parts of (0, 1)."""
    return (torch.arange(points, dtype=torch.float64, device="cpu") + 0.5) / points


def _check_quantile(mechanism: NoiseMechanism) -> None:
    where = f"quantile of noise mechanism {mechanism.name!r}"
    ends = torch.tensor([2.0**-53, 1 - 2.0**-53], dtype=torch.float64, device="cpu")
    u = torch.cat((ends[:1], _grid(GRID), ends[1:]))
    z = mechanism.quantile(u.clone())
    if not isinstance(z, Tensor) or z.shape != u.shape or not z.is_floating_point():
        raise ValueError(f"{where} must return a number for each, a tensor [n]")
    if not z.isfinite().all():
        raise ValueError(f"{where} is not finite at {u[~z.isfinite()][0].item():g}")
    some = torch.arange(0, len(u), len(u) // 7, device="cpu")
    again = torch.cat([mechanism.quantile(u[i : i + 1].clone()) for i in some.tolist()])
    if not torch.allclose(again, z[some], rtol=1e-6):
        raise ValueError(f"{where} gives a number another value alone, or is random")
    if (z.diff() < 0).any():
        raise ValueError(f"{where} decreases at {u[1:][z.diff() < 0][0].item():g}")
    middle = z[1:-1].double()
    mean, std = middle.mean().item(), middle.std().item()
    if abs(mean) > SCALE or abs(std - 1) > SCALE:
        raise ValueError(
            f"{where} has mean {mean:.3g} and standard deviation {std:.4g}: return "
            f"(z - {mean:.3g}) / {std:.4g}, since noise_multiplier is the standard deviation over C"
        )


def _check_epsilon(mechanism: NoiseMechanism) -> None:
    where = f"epsilon of noise mechanism {mechanism.name!r}"

    def at(*history: tuple[float, float, int], delta: float = 1e-5) -> float:
        found = mechanism.epsilon(list(history), delta)
        if isinstance(found, bool) or not isinstance(found, int | float) or not found >= 0:
            raise ValueError(f"{where} returns {found!r} for the steps {history}: return a number")
        return float(found)

    once, base = (1.0, 0.1, 1), at((1.0, 0.1, 10))
    for name, less, more in (
        ("more steps", base, at((1.0, 0.1, 20))),
        ("less noise", base, at((0.7, 0.1, 10))),
        ("a higher sample rate", base, at((1.0, 0.2, 10))),
        ("further steps of other noise", base, at((1.0, 0.1, 10), (2.0, 0.1, 10))),
        ("a smaller delta", at(once), at(once, delta=1e-8)),
    ):
        may_be_same = name in ("a higher sample rate", "a smaller delta")  # no amplification, pure
        if more < less or (more == less < math.inf and not may_be_same):
            raise ValueError(f"{where} does not rise with {name}: {less:.4g}, then {more:.4g}")
    for sigma in SIGMAS:
        tails = _tails(mechanism.quantile, sigma)
        for delta in DELTAS:
            stated = at((sigma, 1.0, 1), delta=delta)
            least = _bound(*tails, delta)
            if stated < 0.999 * least and stated < math.inf:
                raise ValueError(
                    f"{where} is {stated:.4g} for one step with noise_multiplier {sigma:g} and no "
                    f"sampling at delta {delta:g}, and telling two sums apart by one number shows "
                    f"that it is at least {least:.4g}"
                )
