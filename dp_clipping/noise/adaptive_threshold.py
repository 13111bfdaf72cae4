"""A clipping threshold that follows a quantile of the norms, with noise of its own.

    C ← C · exp(-η (b̃ - q))        b̃ = ½ + (Σ_i (b_i - ½) + σ_b ξ) / m,   ξ ~ N(0, 1)

b_i is 1 if sample i's norm is at most C and else 0, q the quantile that C is to reach, η the
learning rate and m the expected batch size, a public constant: the geometric update of G. Andrew,
O. Thakkar, B. McMahan, S. Ramaswamy, Differentially private learning with adaptive clipping (2021),
arXiv:1905.03871.

**What it costs.** A step releases two things, the gradient and the count, as one vector

    ( Σ_i c_i g_i / (z_Δ C),  Σ_i (b_i - ½) / σ_b )  +  N(0, I).

Adding or removing one sample moves the first part by at most 1/z_Δ, since ‖c_i g_i‖ ≤ C, and the
second by exactly ½/σ_b. The two are orthogonal: together at most √(z_Δ⁻² + (2σ_b)⁻²). That is one
Gaussian mechanism of noise multiplier

    z = (z_Δ⁻² + (2σ_b)⁻²)^(-1/2),   so   z_Δ = (z⁻² - (2σ_b)⁻²)^(-1/2)

on the gradient makes a step cost what the accountant counts, z. Both parts are of the same Poisson
batch, so amplification by sampling holds for the pair; C is a function of what earlier steps
released, so composition is the ordinary adaptive one. K clipping groups, a count each, move the
second part by √K/(2σ_b): then K(2σ_b)⁻² stands for (2σ_b)⁻².

**Why b_i - ½.** The factor 2 is there because a sample moves a sum of b_i - ½ by ½. The count
Σ b_i itself moves by 1 and would need (σ_b)⁻² instead. Where the batch size n is public, Σ b_i is
Σ (b_i - ½) + n/2 and the two are the same; in a Poisson batch n depends on the data, so nothing may
be added to the sum or divide it but the constant m. For the same reason a step whose batch is empty
releases its noise as well.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dp_clipping.clipping.coefficients import HIGHEST, LOWEST
from dp_clipping.kinds import number, positive
from dp_clipping.noise.gaussian import NoiseStream, standard_normal

STREAM = ".clipping_threshold"
"""Name of the noise. No parameter's name begins with a dot."""

DEFAULT_STD = 1 / 20  # of m, as in the paper: moves C by 1 % a step at η = 0.2
MOST = 100.0  # of the exponent of one update, far beyond any limit of C
SETTINGS = ("quantile", "learning_rate", "count_std", "expected_batch_size", "lowest", "highest")


class AdaptiveThreshold:
    """The threshold of the next step, one number per clipping group.

    Every rank has one and updates it with the same norms and the same key: no communication.

    Args:
        max_grad_norm: C of the first step; a list for several clipping groups.
        expected_batch_size: m.
        quantile: share of the samples whose norm shall be at most C.
        learning_rate: η.
        count_std: σ_b; default m / 20.
        lowest: the public lower limit of C, relative to its first value.
        highest: the public upper limit of C, relative to its first value.

    Raises:
        ValueError: for an argument out of range.
    """

    def __init__(
        self,
        max_grad_norm: float | Sequence[float],
        *,
        expected_batch_size: float,
        quantile: float = 0.5,
        learning_rate: float = 0.2,
        count_std: float | None = None,
        lowest: float = 1e-6,
        highest: float = 1e6,
    ):
        self._is_list = isinstance(max_grad_norm, list | tuple)
        norms: Any = max_grad_norm
        given = list(norms) if self._is_list else [norms]
        for limit in given:
            positive("a finite number above 0, or a list of them").check("max_grad_norm", limit)
        if not given:
            raise ValueError("max_grad_norm is []: give finite numbers above 0")
        self._first = [float(c) for c in given]
        values = {
            "expected_batch_size": expected_batch_size, "quantile": quantile,
            "learning_rate": learning_rate, "count_std": 0 if count_std is None else count_std,
            "lowest": lowest, "highest": highest,
        }  # fmt: skip
        for name, value in values.items():
            ARGUMENTS[name].check(name, value)
        self.expected_batch_size = float(expected_batch_size)
        self.quantile, self.learning_rate = quantile, learning_rate
        self.count_std = self.expected_batch_size * DEFAULT_STD if count_std is None else count_std
        self.lowest, self.highest = lowest, highest
        self.clip_norms = list(self._first)
        self.next_step = 0

    @property
    def max_grad_norm(self) -> float | list[float]:
        """Returns the thresholds as `make_private` takes them, for `optimizer.max_grad_norm`."""
        return list(self.clip_norms) if self._is_list else self.clip_norms[0]

    def gradient_noise_multiplier(self, noise_multiplier: float) -> float:
        """Returns z_Δ, with which gradient and counts together cost as much as `noise_multiplier`.

        Without noise (z = 0) there is none on the gradient either.

        Raises:
            ValueError: if the counts alone cost as much or more.
        """
        if noise_multiplier == 0:
            return 0.0
        needed = len(self.clip_norms) ** 0.5 * noise_multiplier / 2
        if needed >= self.count_std:
            raise ValueError(
                f"count_std is {self.count_std}: at noise_multiplier {noise_multiplier} the noisy "
                f"counts alone would cost the whole budget, give more than {needed:g} (several "
                "times as much: the gradient pays for what is missing), or a smaller "
                "noise_multiplier"
            )
        return noise_multiplier / (1 - (needed / self.count_std) ** 2) ** 0.5

    def update(self, squares: Tensor, *, step: int, noise_key: bytes, noisy: bool = True) -> None:
        """Sets the thresholds of the next step. Once a step, also for an empty batch.

        Args:
            squares: squared norms [K, G] of the global batch (`NormReducer.gather`),
                the same on every rank, of a step that was clipped by the present limits. What is
                not finite counts as above.
            step: number of the step, part of the key of the noise as in the optimizer.
            noise_key: the optimizer's.
            noisy: False in a run without noise (z = 0).

        Raises:
            RuntimeError: for a step whose count was released already: the same noise on two counts
                would give away their difference.
        """
        if step < self.next_step:
            raise RuntimeError(
                f"the threshold's count of step {step} was released already: update once per step, "
                "and build an AdaptiveThreshold(..) for each make_private"
            )
        self.next_step = step + 1
        stream = NoiseStream.derive(noise_key, step=step, parameter=STREAM, share=0)
        # On the CPU, so that the device has no say in the bits.
        noise = standard_normal(len(squares), stream, device="cpu").tolist()
        size = squares.shape[1]
        clip_norms = torch.tensor(self.clip_norms, dtype=torch.float64, device=squares.device)
        below = (squares.detach().double().sqrt() <= clip_norms[:, None]).sum(1).tolist()
        for k, (count, z) in enumerate(zip(below, noise, strict=True)):
            centred = count - size / 2 + (self.count_std * z if noisy else 0.0)
            share = 0.5 + centred / self.expected_batch_size
            exponent = -self.learning_rate * (share - self.quantile)
            moved = self.clip_norms[k] * math.exp(min(exponent, MOST))
            first = self._first[k]
            lowest, highest = self.lowest * first, self.highest * first
            self.clip_norms[k] = min(max(moved, lowest, LOWEST), highest, HIGHEST)

    def state_dict(self) -> dict[str, Any]:
        """Returns a public state: it is a function of what the steps have released."""
        settings = {name: getattr(self, name) for name in SETTINGS}
        return settings | {
            "limits": list(self.clip_norms), "first": list(self._first),
            "next_step": self.next_step,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the state of a saved run.

        Raises:
            ValueError: if its settings were others; nothing is changed then.
        """
        here = self.state_dict()
        if sorted(state) != sorted(here):
            raise ValueError(f"not the state of an adaptive threshold: it has {sorted(state)}")
        for name in (*SETTINGS, "first"):
            if state[name] != here[name]:
                raise ValueError(
                    f"the adaptive threshold's {name} is {state[name]} in the saved run and "
                    f"{here[name]} here: resume with the settings of the saved run"
                )
        self.clip_norms = [float(c) for c in state["limits"]]
        self.next_step = int(state["next_step"])


ARGUMENTS = {
    "expected_batch_size": positive("a number above 0"),
    "quantile": number("a number from 0 to 1", lambda x: 0 <= x <= 1),
    "learning_rate": positive("a finite number above 0"),
    "count_std": number("a finite number of 0 or more", lambda x: 0 <= x < math.inf),
    "lowest": number("a number above 0, at most 1", lambda x: 0 < x <= 1),
    "highest": number("a finite number of 1 or more", lambda x: 1 <= x < math.inf),
}
