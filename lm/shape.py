"""Counts the operations of a training step, by which measured times are scaled to other sizes."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from lm.memory import block_parameters
from lm.model import ModelConfig, Transformer, forward_loss

Counts = tuple[float, float, float, float]  # products, attention, other, pieces


@dataclass(frozen=True)
class Shape:
    """A model, sequences per rank, the arithmetic (`--dtype`), and the size of buckets."""

    model: ModelConfig
    batch_size: int
    dtype: str
    bucket_size_mb: float | None = None

    @classmethod
    def of(cls, config: Mapping) -> "Shape":
        """Reads the configuration of a trace, or of a row of the benchmark's results."""
        names = ("batch_size", "dtype", "bucket_size_mb")
        return cls(ModelConfig(**config["model"]), *(config[name] for name in names))

    @property
    def tokens(self) -> int:
        """Returns the tokens per rank and step, n."""
        return self.batch_size * self.model.context_length

    @property
    def width(self) -> int:
        """Returns the bytes of one number of a gradient."""
        return 2 if self.dtype == "bfloat16" else 4

    @property
    def gradients(self) -> dict[str, int]:
        """Returns name -> number of elements, in the order in which backward makes them final."""
        return arrivals(self.model)

    @property
    def gradient_bytes(self) -> int:
        return self.width * sum(self.gradients.values())

    def backward_counts(self, name: str) -> Counts:
        """Returns the operations of backward before one gradient is final, per kind of work.

        Products are multiply-adds, n per weight. Attention is n · T · D. Other work moves bytes:
        n · F at the feed-forward's gradients, n · V at the head's, V · D at the embedding's, n · D
        elsewhere.
        """
        model, n = self.model, self.tokens
        numel = self.gradients[name]
        if name.startswith("token_embedding"):
            return numel * n if model.tie_embeddings else 0, 0, numel, 1
        wide = {"feed_forward.": model.d_ff, "head.": model.vocab_size}
        width = next((w for part, w in wide.items() if part in name), model.d_model)
        return numel * n, n * model.context_length * model.d_model, n * width, 1

    def forward_counts(self) -> list[Counts]:
        """Returns the operations of each unit's forward: the embedding, blocks, head with loss.

        Bytes moved: (20 D + 5 F) n in a block, D n in the embedding, 4 V n in the loss.
        """
        model, n = self.model, self.tokens
        attention = n * model.context_length * model.d_model
        moved = (20 * model.d_model + 5 * model.d_ff) * n
        block = (block_parameters(model) * n, attention, moved, 1)
        head = (model.vocab_size * model.d_model * n, 0, 4 * model.vocab_size * n, 1)
        return [(0, 0, model.d_model * n, 0), *[block] * model.num_layers, head]


@functools.cache
def arrivals(model: ModelConfig) -> dict[str, int]:
    """Returns name -> number of elements of each gradient, in the order of backward.

    It runs a backward on the meta device, which computes shapes only.
    """
    found: dict[str, int] = {}
    with torch.device("meta"):
        network, tokens = Transformer(model), torch.zeros(1, 2, dtype=torch.long)
    for name, parameter in network.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p, name=name: found.update({name: p.numel()})
        )
    forward_loss(network, (tokens, tokens)).backward()
    return found


def in_block(name: str) -> str:
    """Returns a parameter's name inside its block, which is the same in all blocks."""
    return name.split(".", 2)[2] if name.startswith("blocks.") else name


def rates(work: Counts, counts: Counts) -> Counts:
    """Returns seconds per operation of each kind, of work that took so many seconds.

    Time of a kind that should have no operations counts as other work.
    """
    unexpected = sum(w for w, c in zip(work, counts, strict=True) if not c)
    whole = (*work[:2], work[2] + unexpected, work[3])
    return tuple(w / c if c else 0.0 for w, c in zip(whole, counts, strict=True))


def seconds(rates: Counts, counts: Counts) -> float:
    """Returns what so many operations take."""
    return sum(r * c for r, c in zip(rates, counts, strict=True))
