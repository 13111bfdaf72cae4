"""Counts the operations of a training step, by which measured times are scaled to other sizes."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

import torch

from ddp_by_hand.lm.memory import block_parameters
from ddp_by_hand.lm.model import ModelConfig, Transformer, forward_loss

Counts = tuple[float, float, float, float, float]  # products, attention, other, pieces, casts
Work = tuple[float, float, float, float]  # seconds: of products, attention, other, gaps
CASTS = 6  # bytes: a weight or its gradient is read in one dtype and written in the other, 4 and 2


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
    def arithmetic(self) -> int:
        """Returns the bytes of one number in products, and of a parameter that `fsdp` gathers."""
        return 4 if self.dtype == "float32" else 2

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
        elsewhere. Under autocast the gradients of products are cast to float32.
        """
        model, n = self.model, self.tokens
        numel, is_table = self.gradients[name], name.startswith("token_embedding")
        multiplied = "norm" not in name and (model.tie_embeddings or not is_table)
        casts = CASTS * numel if multiplied and self.dtype == "mixed" else 0
        if is_table:
            return numel * n if model.tie_embeddings else 0, 0, numel, 1, casts
        wide = {"feed_forward.": model.d_ff, "head.": model.vocab_size}
        width = next((w for part, w in wide.items() if part in name), model.d_model)
        return numel * n, n * model.context_length * model.d_model, n * width, 1, casts

    def forward_counts(self) -> list[Counts]:
        """Returns the operations of each unit's forward: the embedding, blocks, head with loss.

        Bytes moved: (20 D + 5 F) n in a block, D n in the embedding, 4 V n in the loss. Autocast
        casts the weights of products.
        """
        model, n = self.model, self.tokens
        attention = n * model.context_length * model.d_model
        moved = (20 * model.d_model + 5 * model.d_ff) * n
        of_block, of_head = block_parameters(model), model.vocab_size * model.d_model
        cast = CASTS if self.dtype == "mixed" else 0
        block = (of_block * n, attention, moved, 1, cast * (of_block - 2 * model.d_model))
        head = (of_head * n, 0, 4 * model.vocab_size * n, 1, cast * of_head)
        return [(0, 0, model.d_model * n, 0, 0), *[block] * model.num_layers, head]


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


class Times(NamedTuple):
    """Seconds of one step: forward per unit, backward per gradient; `copy` is per byte."""

    forward: list[float]
    backward: list[float]
    optimizer: float
    rest: float
    copy: float

    def times(self, factor: float) -> "Times":
        """Returns these times a factor."""
        forward, backward = ([factor * x for x in own] for own in self[:2])
        return Times(forward, backward, *(factor * x for x in self[2:]))


@dataclass(frozen=True)
class Computation:
    """Holds what was measured of a step without communication, at one shape.

    `forward` is of all units together, `backward` has an element per gradient; both have seconds of
    products, attention, other work and gaps. AdamW passes 7 times over memory of the parameters'
    size: it reads gradient, parameter and two moments, and writes the last three. A copy, or a
    division, is 2 passes. Casts by autocast move `CASTS` bytes at the same speed; other work has
    them in it.
    """

    shape: Shape
    forward: Work
    backward: list[Work]
    optimizer: float
    rest: float

    def scaled(self, shape: Shape, lean: float | None = None) -> Times:
        """Scales it to another shape by counts of operations, gradients by those of their kind.

        `lean` is for a model that computes in the dtype of the arithmetic: it casts no weights, and
        its other work is so many times what is left.
        """
        factors = (1.0,) * 5 if lean is None else (1.0, 1.0, lean, 1.0, 0.0)
        per_byte = self.optimizer / 7 / self.shape.gradient_bytes
        own = self.shape

        def seconds(rates: Sequence[float], counts: Counts) -> float:
            return sum(f * r * c for f, r, c in zip(factors, rates, counts, strict=True))

        all_units = map(sum, zip(*own.forward_counts(), strict=True))
        forward = _rates(self.forward, tuple(all_units), per_byte)
        kinds: dict[str, list[Counts]] = {}
        for name, work in zip(own.gradients, self.backward, strict=True):
            rates = _rates(work, own.backward_counts(name), per_byte)
            kinds.setdefault(in_block(name), []).append(rates)
        backward = {n: [*map(fmean, zip(*rates, strict=True))] for n, rates in kinds.items()}
        return Times(
            [seconds(forward, counts) for counts in shape.forward_counts()],
            [seconds(backward[in_block(n)], shape.backward_counts(n)) for n in shape.gradients],
            7 * per_byte * shape.gradient_bytes, self.rest, 2 * per_byte,
        )  # fmt: skip

    def leanness(self, other: float, moved: float) -> float:
        """Returns `lean` of a step with so many seconds of other work, copies of bytes included."""
        counts = [
            *self.shape.forward_counts(),
            *map(self.shape.backward_counts, self.shape.gradients),
        ]
        per_byte = self.optimizer / 7 / self.shape.gradient_bytes
        casts = per_byte * sum(each[4] for each in counts)
        plain = self.forward[2] + sum(work[2] for work in self.backward)
        return max(0.0, other - moved * per_byte) / (plain - casts)


def in_block(name: str) -> str:
    """Returns a parameter's name inside its block, which is the same in all blocks."""
    return name.split(".", 2)[2] if name.startswith("blocks.") else name


def _rates(work: Work, counts: Counts, per_byte: float) -> Counts:
    """Returns seconds per operation.

    Casts take at most all other work. Time of a kind that should have no operations counts as
    other work.
    """
    casts = min(work[2], per_byte * counts[4])
    unexpected = sum(w for w, c in zip(work, counts, strict=False) if not c)
    whole = (*work[:2], work[2] - casts + unexpected, work[3], casts)
    return tuple(w / c if c else 0.0 for w, c in zip(whole, counts, strict=True))
