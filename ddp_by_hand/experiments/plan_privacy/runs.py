"""Trains small transformers privately on text, for a law of one's own and for its check."""

import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from ddp_by_hand.examples.private_text import BETAS, WARMUP_STEPS, Text
from ddp_by_hand.lm.model import ModelConfig, Transformer
from ddp_by_hand.lm.schedule import learning_rate
from dp_clipping import PrivacyEngine

CONTEXT = 64  # bytes that a sequence predicts
PEAK = 1e-2  # learning rate of Adam, of all runs


@dataclass(frozen=True)
class SmallRun:
    """A private training: the width of its transformer, steps T, batch B and noise-batch ratio.

    `ratio` is σ / B: the standard deviation of the noise on the mean of a batch's clipped
    gradients, in units of the clipping threshold C = 1.
    """

    width: int
    steps: int
    batch: int
    ratio: float
    seed: int = 0

    @property
    def noise_multiplier(self) -> float:
        return self.ratio * self.batch


def shape_of(width: int) -> ModelConfig:
    """Returns the shape of a width: two blocks of four heads, over bytes."""
    return ModelConfig(
        d_model=width, num_layers=2, num_heads=4, d_ff=2 * width, context_length=CONTEXT
    )


def parameters_of(width: int) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in Transformer(shape_of(width)).parameters())


def train(run: SmallRun, text: Text, marks: Sequence[int], delta: float | None) -> dict:
    """Trains by `PrivacyEngine` with Poisson sampling, on the device of the text.

    Returns `losses`, step -> nats per byte on held-out sequences at each of `marks`; `seconds` of
    training without these looks; `epsilon` at `delta`, where one is given; `parameters`, `tokens`
    (expected).
    Raises ValueError for a batch larger than the text.
    """
    samples = len(text.training)
    if run.batch > samples:
        raise ValueError(f"batch is {run.batch}, and there are {samples} sequences: give fewer")
    torch.manual_seed(run.seed)
    network = Transformer(shape_of(run.width)).to(text.training.device)
    engine = PrivacyEngine(accountant="pld")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*runs as bookkeeping")
        model, optimizer, criterion, loader = engine.make_private(
            module=network,
            optimizer=torch.optim.Adam(network.parameters(), betas=BETAS),
            criterion=nn.CrossEntropyLoss(),
            data_loader=DataLoader(TensorDataset(text.training), run.batch),
            noise_multiplier=run.noise_multiplier,
            max_grad_norm=1.0,
            expected_batch_size=run.batch,
            sample_rate=run.batch / samples,
            steps=run.steps,
        )
    losses, looking, began = {}, 0.0, time.perf_counter()
    for step, (sequences,) in enumerate(loader, start=1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, WARMUP_STEPS, PEAK)
        tokens = sequences.long()
        outputs = model(tokens[:, :-1])
        targets = rearrange(tokens[:, 1:], "b t -> (b t)")
        logits = rearrange(outputs, "b t v -> (b t) v")
        criterion(logits, targets, shape=outputs.shape).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in marks:
            started = time.perf_counter()
            losses[step] = held_out_loss(network, text.held_out)
            looking += time.perf_counter() - started
    return {
        "parameters": sum(p.numel() for p in network.parameters()),
        "tokens": run.steps * run.batch * CONTEXT,
        "losses": losses,
        "seconds": time.perf_counter() - began - looking,
        "epsilon": None if delta is None else engine.get_epsilon(delta),
    }


def held_out_loss(network: nn.Module, sequences: Tensor) -> float:
    """Returns the mean cross-entropy in nats per byte; sequences are [n, T + 1]."""
    total = 0.0
    with torch.no_grad():
        for part in sequences.long().split(128):
            logits = rearrange(network(part[:, :-1]), "b t v -> (b t) v")
            targets = rearrange(part[:, 1:], "b t -> (b t)")
            total += float(cross_entropy(logits, targets, reduction="sum"))
    return total / sequences[:, 1:].numel()
