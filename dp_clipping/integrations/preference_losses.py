"""Losses of preference pairs, each a function of its own pair: [pairs] of log ratios [pairs].

Losses that sort or average over a batch ("aot", "aot_unpaired") are not among them: one pair would
change those of others.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Pairs:
    """The parts of the loss of preference pairs; each tensor is [pairs].

    Attributes:
        chosen, rejected: log(π(y|x) / π_ref(y|x)) of the completions, summed over their tokens.
        chosen_tokens, rejected_tokens: how many these are.
        chosen_log_prob: log π(y|x) of the chosen one.
        beta: how strongly the policy is held to the reference.
        label_smoothing: the probability that a label is wrong.
        tau: the temperature of "discopop".
    """

    chosen: Tensor
    rejected: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor
    chosen_log_prob: Tensor
    beta: float
    label_smoothing: float
    tau: float

    @property
    def margin(self) -> Tensor:
        return self.beta * (self.chosen - self.rejected)

    @property
    def mean_difference(self) -> Tensor:
        """Returns the difference of the log ratios' means over tokens."""
        return self.chosen / self.chosen_tokens - self.rejected / self.rejected_tokens


def _exo(pair: Pairs) -> Tensor:
    smoothing = torch.tensor(pair.label_smoothing, device=pair.chosen.device)
    wins, loses = pair.margin, -pair.margin
    return torch.sigmoid(wins) * (F.logsigmoid(wins) - torch.log1p(-smoothing)) + torch.sigmoid(
        loses
    ) * (F.logsigmoid(loses) - torch.log(smoothing))


def _robust(pair: Pairs) -> Tensor:
    smoothing = pair.label_smoothing
    clean, flipped = -F.logsigmoid(pair.margin), -F.logsigmoid(-pair.margin)
    return ((1 - smoothing) * clean - smoothing * flipped) / (1 - 2 * smoothing)


def _nca(pair: Pairs) -> Tensor:
    chosen, rejected = pair.beta * pair.chosen, pair.beta * pair.rejected
    return -F.logsigmoid(chosen) - 0.5 * (F.logsigmoid(-chosen) + F.logsigmoid(-rejected))


def _discopop(pair: Pairs) -> Tensor:
    mixture = torch.sigmoid(pair.margin / pair.tau)
    return -F.logsigmoid(pair.margin) * (1 - mixture) + torch.exp(-pair.margin) * mixture


# Under TRL's names. Rafailov et al. 2023 (sigmoid), Zhao et al. 2023 (hinge), Azar et al. 2023
# (ipo), Ji et al. 2024 (exo_pair), Chen et al. 2024 (nca_pair), Chowdhury et al. 2024 (robust),
# Jung et al. 2024 (bco_pair), Wu et al. 2024 (sppo_hard), D'Oosterlinck et al. 2024 (apo_zero,
# apo_down), Lu et al. 2024 (discopop), Meng et al. 2024 (sigmoid_norm).
LOSSES: dict[str, Callable[[Pairs], Tensor]] = {
    "sigmoid": lambda pair: -F.logsigmoid(pair.margin),
    "hinge": lambda pair: torch.relu(1 - pair.margin),
    "ipo": lambda pair: (pair.mean_difference - 1 / (2 * pair.beta)).square(),
    "exo_pair": _exo,
    "nca_pair": _nca,
    "robust": _robust,
    "bco_pair": lambda pair: (
        -F.logsigmoid(pair.beta * pair.chosen) - F.logsigmoid(-pair.beta * pair.rejected)
    ),
    "sppo_hard": lambda pair: (
        (pair.chosen - 0.5 / pair.beta).square() + (pair.rejected + 0.5 / pair.beta).square()
    ),
    "apo_zero": lambda pair: (
        1 - torch.sigmoid(pair.beta * pair.chosen) + torch.sigmoid(pair.beta * pair.rejected)
    ),
    "apo_down": lambda pair: (
        torch.sigmoid(pair.beta * pair.chosen) + 1 - torch.sigmoid(pair.margin)
    ),
    "discopop": _discopop,
    "sft": lambda pair: -pair.chosen_log_prob / pair.chosen_tokens,
    "sigmoid_norm": lambda pair: -F.logsigmoid(pair.beta * pair.mean_difference),
}


def loss_of_pairs(
    log_probs: Tensor, tokens: Tensor, reference: Tensor, args: Any
) -> tuple[Tensor, Pairs]:
    """Returns the loss of each pair, [pairs], and what it was made of.

    Args:
        log_probs: log π(y|x) of the chosen and the rejected completion, [pairs, 2].
        tokens: of each completion.
        reference: log π_ref(y|x).
        args: a `DPOConfig`.
    """
    ratios, counts = log_probs - reference, tokens.clamp(min=1)
    pairs = Pairs(
        ratios[:, 0], ratios[:, 1], counts[:, 0], counts[:, 1], log_probs[:, 0],
        args.beta, args.label_smoothing, args.discopop_tau,
    )  # fmt: skip
    weights: Sequence[float] = args.loss_weights or [1.0] * len(args.loss_type)
    losses = [
        weight * LOSSES[name](pairs) for name, weight in zip(args.loss_type, weights, strict=True)
    ]
    return torch.stack(losses).sum(0), pairs
