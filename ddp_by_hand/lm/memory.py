"""Predicts the peak memory of a training step of each variant from the model's shape.

W ranks share some of the kinds (Rajbhandari et al. 2020, "ZeRO", arXiv 1910.02054, section 3).
Parameters and optimizer state (two of the parameters' size for AdamW) last the whole step.
Activations grow through forward and shrink through backward, in which gradients grow. Buffers are
what a variant allocates beside them: parts of buckets that are not filled yet, gradients on the
wire, whole parameters that `fsdp` has gathered. `diloco` has two more copies of the parameters in
its optimizer's state: where the round began, and the outer momentum. The peak is at the start of
backward, where the loss has copies of the logits [B, T, V], where a gradient arrives, in the
optimizer's step, or where the network is built. `predict_memory` walks through all these moments
and returns the kinds at the peak.

What a block keeps for backward, in bytes per token, is counted from `lm.model.Block` (D = d_model,
F = d_ff, H heads; a = bytes of a number in arithmetic, r = of one in the residual stream):

    inputs of both norms           2rD    and 8D more where RMSNorm is not one fused kernel (CPU)
    inputs of the linear layers    aD, aD, and one cast each under autocast: 3aD and 2aD
    query, key, value, attention   5aD    the output also as copied for the next layer
    gate, silu(gate), up, product  4aF
    norms' and softmax's sums      8 + 4H

Under autocast every matrix also leaves its bfloat16 copy, 2 bytes a weight, until its backward.
Tokens, positions and the libraries' workspaces are not counted, nor the allocator's unused blocks.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from ddp.buckets import Gradient, plan_buckets
from ddp.internals.replicas import MESSAGE_BYTES
from ddp_by_hand.lm.model import ModelConfig

MIB = 1 << 20
REPLICATED = (
    "none", "ddp", "ddp_individual", "ddp_individual_v2", "ddp_bucketed", "ddp_copy_engine",
    "diloco", "torch_ddp", "torch_ddp_tuned",
)  # fmt: skip
SHARDED = ("zero1", "zero2", "fsdp")
VARIANTS = (*REPLICATED, *SHARDED, "torch_zero1", "torch_fsdp")
BUCKET_MB = {"torch_ddp": 25.0, "torch_ddp_tuned": 100.0, "ddp_copy_engine": 100.0}
DEFAULT_BUCKET_MB = 200.0  # of the other variants that batch
PULLED_BYTES = 64 * MIB  # what the copy engine's variant pulls at a time, at most


class Kinds(NamedTuple):
    """Bytes on one rank at one moment of a step."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float


KINDS = Kinds._fields


def bucket_mb(variant: str, given: float | None = None) -> float:
    """Returns a variant's bucket size in MiB: the given one, or its default."""
    return given or BUCKET_MB.get(variant, DEFAULT_BUCKET_MB)


def block_parameters(model: ModelConfig) -> int:
    """Returns the number of parameters of one block."""
    return 4 * model.d_model**2 + 3 * model.d_model * model.d_ff + 2 * model.d_model


def total_parameters(model: ModelConfig) -> int:
    """Returns the number of parameters of the `Transformer`."""
    tables = model.vocab_size * model.d_model * (1 if model.tie_embeddings else 2)
    return model.num_layers * block_parameters(model) + tables + model.d_model


def block_activations(model: ModelConfig, tokens: int, dtype: str, on_gpu: bool = True) -> int:
    """Returns the bytes that one block keeps from forward to backward, for `tokens` on a rank."""
    arithmetic, residual = (4 if dtype == "float32" else 2), (2 if dtype == "bfloat16" else 4)
    casts = 5 if dtype == "mixed" else 2
    per_width = 2 * residual + (casts + 5) * arithmetic
    if not on_gpu:  # RMSNorm computes in float32, and autograd keeps input and normed input
        per_width += 8 + 2 * (4 - residual)
    kept = per_width * model.d_model + 4 * arithmetic * model.d_ff + 8 + 4 * model.num_heads
    copies = 2 * (block_parameters(model) - 2 * model.d_model) if dtype == "mixed" else 0
    return tokens * kept + copies


def loss_activations(model: ModelConfig, tokens: int, dtype: str, on_gpu: bool = True) -> int:
    """Returns what final norm, head and loss keep, with the loss's copies at its backward.

    Those are the log-probabilities, their gradient and that of the logits, all float32.
    """
    arithmetic, residual = (4 if dtype == "float32" else 2), (2 if dtype == "bfloat16" else 4)
    width = residual + arithmetic + (0 if on_gpu else 4 + 4 - residual)
    copies = 2 * model.vocab_size * model.d_model if dtype == "mixed" else 0
    return tokens * (width * model.d_model + 12 * model.vocab_size + 4) + copies


def predict_memory(
    variant: str,
    model: ModelConfig,
    *,
    ranks: int,
    batch_size: int,
    dtype: str = "float32",
    bucket_size_mb: float | None = None,
    on_gpu: bool = True,
) -> dict[str, int]:
    """Returns kind -> bytes on the fullest rank at the peak of a training step with AdamW.

    Args:
        variant: one of `VARIANTS`.
        batch_size: sequences of `model.context_length` tokens per rank.
        dtype: `float32`, `mixed` (float32 under bfloat16 autocast) or `bfloat16`. In a mixed run
            FSDP gathers bfloat16 parameters, so that nothing is cast: it takes the same in both.
        on_gpu: RMSNorm is one kernel, and PyTorch's DDP has its old buckets while it has new ones.
    """
    if variant not in VARIANTS:
        raise ValueError(f"variant {variant!r} is unknown: choose from {', '.join(VARIANTS)}")
    if dtype == "mixed" and variant in ("fsdp", "torch_fsdp"):
        dtype = "bfloat16"
    capacity = int(bucket_mb(variant, bucket_size_mb) * MIB)
    step = _Step(variant, model, ranks, batch_size * model.context_length, dtype, capacity, on_gpu)
    peak = max(step.moments(), key=sum)
    return {kind: round(size) for kind, size in peak._asdict().items()}


def memory_after_backward(
    variant: str, model: ModelConfig, *, ranks: int, dtype: str = "float32"
) -> dict[str, int]:
    """Returns kind -> bytes of what a rank holds from the end of backward to the optimizer's step.

    All activations are freed by then, and all gradients are there, so it shows what is sharded.
    Arguments are those of `predict_memory`.
    """
    step = _Step(variant, model, ranks, 0, dtype, 0, True)
    parameters = step.whole / (ranks if "fsdp" in variant else 1)
    gradients = step.whole / (ranks if "fsdp" in variant or variant == "zero2" else 1)
    held = Kinds(parameters, gradients, step.state(), 0, 0)
    return {kind: round(size) for kind, size in held._asdict().items()}


@dataclass(frozen=True)
class _Step:
    """Walks through the moments of a step; `width` is the bytes of a number that a rank keeps."""

    variant: str
    model: ModelConfig
    ranks: int
    tokens: int
    dtype: str
    capacity: int
    on_gpu: bool

    @property
    def width(self) -> int:
        """Returns 4 also for FSDP in bfloat16, which keeps and reduces float32 slices."""
        return 2 if self.dtype == "bfloat16" and "fsdp" not in self.variant else 4

    @cached_property
    def whole(self) -> int:
        return self.width * total_parameters(self.model)

    @cached_property
    def per_block(self) -> int:
        return block_activations(self.model, self.tokens, self.dtype, self.on_gpu)

    @cached_property
    def loss(self) -> int:
        return loss_activations(self.model, self.tokens, self.dtype, self.on_gpu)

    def moments(self) -> Iterator[Kinds]:
        """Yields what is allocated at every moment that can be the peak."""
        is_divided = "fsdp" in self.variant
        parameters, optimizer = self.whole / (self.ranks if is_divided else 1), self.state()
        found = self._divided() if is_divided else self._whole_parameters()
        for kept, gradients, buffers in found:
            yield Kinds(parameters, gradients, optimizer, kept, buffers)
        table = self.width * self.model.vocab_size * self.model.d_model
        copied = {"fsdp": 2 * table, "zero1": self.capacity, "zero2": self.capacity}
        building = max(MESSAGE_BYTES, copied.get(self.variant, 0))  # broadcast, or divided
        yield Kinds(self.whole, 0, 0, 0, min(building, self.whole))

    def state(self) -> float:
        """Returns the bytes of an optimizer's state: two numbers for each that is stepped."""
        return 2 * self.stepped() + (2 * self.whole if self.variant == "diloco" else 0)

    def stepped(self) -> float:
        """Returns the bytes of parameters that a rank steps.

        ZeroRedundancyOptimizer gives whole parameters, the largest first, to the emptiest rank.
        """
        if self.variant in (*SHARDED, "torch_fsdp"):
            return self.whole / self.ranks
        if self.variant != "torch_zero1":
            return self.whole
        gradients = self._gradients()
        loads = [0] * min(self.ranks, len(gradients))  # further ranks get none
        for nbytes in sorted(gradients, reverse=True):
            loads[loads.index(min(loads))] += nbytes
        return max(loads)

    def _gradients(self) -> list[int]:
        """Returns the bytes of each gradient, in the order of backward."""
        d, f = self.model.d_model, self.model.d_ff
        table = [self.model.vocab_size * d]
        blocks = self.model.num_layers * [f * d, f * d, f * d, d, d * d, d * d, d * d, d * d, d]
        head = [] if self.model.tie_embeddings else table
        return [self.width * numel for numel in (*head, d, *blocks, *table)]

    def _kept(self, arrived: int) -> float:
        """Returns the activations that are left when one more gradient than `arrived` is there."""
        layers, before = self.model.num_layers, 1 if self.model.tie_embeddings else 2
        if arrived < before - 1:  # the head's: of the loss, the gradient of the logits is left
            gone = 12 - (4 if self.dtype == "float32" else 2)
            return layers * self.per_block + self.loss - gone * self.tokens * self.model.vocab_size
        return self.per_block * min(layers, max(0.0, layers - (arrived - before + 1) / 9))

    def _whole_parameters(self) -> Iterator[tuple[float, float, float]]:
        """Yields activations, gradients and buffers of variants with whole parameters.

        A flat bucket is allocated when its first gradient arrives, which is copied into it; that of
        zero1 and zero2 when its last one has. zero2 frees a bucket when the next but one is sent.
        PyTorch's DDP keeps its buckets; when it has
        planned them anew, on a GPU the old ones are freed late. Memory that copy engines share
        stays through forward.
        """
        shared = self.whole if self.variant == "ddp_copy_engine" else 0
        always = min(PULLED_BYTES, shared)
        if self.variant.startswith("torch"):
            always = self.whole * (2 if self.on_gpu else 1)
        yield self.model.num_layers * self.per_block + self.loss, 0, shared + always
        sizes, arrived, sent, own = self._gradients(), 0, [], 0.0
        is_divided = self.variant in ("zero1", "zero2")
        is_flat = self.variant in ("ddp_bucketed", "ddp_copy_engine") or is_divided
        described = [Gradient(nbytes // self.width, "", self.width) for nbytes in sizes]
        order = list(range(len(sizes)))
        for bucket in plan_buckets(described, order, self.capacity if is_flat else 0):
            begun = arrived + bucket.nbytes
            for i in bucket.members:
                kept, arrived = self._kept(i), arrived + sizes[i]
                copied = sizes[i] if is_flat else 0
                if self.variant == "zero2":
                    yield kept, own, sum(sent) + bucket.nbytes + arrived - begun
                elif not is_divided:
                    yield kept, arrived, max(begun, shared) - arrived + copied + always
            if self.variant == "zero2":
                yield kept, own + bucket.nbytes / self.ranks, sum(sent[-1:]) + 2 * bucket.nbytes
            elif is_divided:
                yield kept, arrived, bucket.nbytes
            sent, own = [*sent[-1:], bucket.nbytes], own + bucket.nbytes / self.ranks
        if self.variant == "diloco":  # two buckets of the outer step, and a difference for the next
            sent = [b.nbytes for b in plan_buckets(described, order, self.capacity)]
            yield 0, arrived, max(map(sum, zip(sent, [*sent[1:], 0], strict=True))) + max(sizes)

    def _divided(self) -> Iterator[tuple[float, float, float]]:
        """Yields the same of `fsdp` and `fully_shard`, where at most two blocks are whole.

        A block's gradients are copied to a flat buffer, which is on the wire until the next block's
        are copied. What is in no block is whole from forward until its gradients are there.
        `fully_shard` keeps that, and the head's gradient, to the end. It frees a block before it
        copies its gradients.
        """
        model, slices, is_ours = self.model, self.width / self.ranks, self.variant == "fsdp"
        width = 2 if self.dtype == "bfloat16" else 4  # of what is gathered, and its gradients
        table, block = model.vocab_size * model.d_model, block_parameters(model)
        outside = total_parameters(model) - model.num_layers * block
        head = table if is_ours and not model.tie_embeddings else 0  # reduced before the blocks
        yield model.num_layers * self.per_block + self.loss, 0, width * outside
        held, flat, reduced = width * (outside + table), self.width * head, head
        yield self._kept(0), 0, held + flat + width * block  # with the head's gradient
        held -= 2 * width * head
        for left in range(model.num_layers, 0, -1):
            blocks, kept = width * min(2, left) * block, (left - 1) * self.per_block
            yield left * self.per_block, slices * reduced, held + blocks + flat
            yield kept, slices * reduced, held + blocks + width * block + flat
            freed = 0 if is_ours else width * block
            reduced, flat = reduced + block, self.width * block
            yield kept, slices * reduced, held + blocks + width * block - freed + flat
        if is_ours:
            yield 0, self.whole / self.ranks, held + width * head + self.width * table
            yield 0, self.whole / self.ranks, width * (outside + block)  # the optimizer's step
        else:
            yield 0, slices * reduced, 2 * width * outside + flat
            yield 0, self.whole / self.ranks, (width + self.width) * outside


def largest_model(
    variant: str, model: ModelConfig, capacity_bytes: float, most_blocks: int = 1 << 16, **run
) -> ModelConfig:
    """Returns the deepest model of these widths whose predicted peak is within the capacity.

    It has at most `most_blocks`, because the prediction walks through all of them.
    `run` is as for `predict_memory`. Raises ValueError if one block does not fit.
    """

    def peak(layers: int) -> int:
        return sum(predict_memory(variant, replace(model, num_layers=layers), **run).values())

    first, each = peak(1), peak(2) - peak(1)
    if first > capacity_bytes:
        raise ValueError(f"{variant}: one block of width {model.d_model} does not fit")
    low, high, step = 1, most_blocks + 1, 1
    probe = int((capacity_bytes - first) // max(each, 1)) + 1  # if each block took as much
    while high - low > 1:
        probe = min(max(probe, low + 1), high - 1)
        fits = peak(probe) <= capacity_bytes
        low, high = (probe, high) if fits else (low, probe)
        probe += step if fits else -step
        step *= 2
    return replace(model, num_layers=low)
