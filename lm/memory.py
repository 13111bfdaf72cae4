"""Predicts the peak memory of a training step of each variant from the model's shape.

Three kinds last the whole step, W ranks sharing some of them (Rajbhandari et al. 2020, "ZeRO",
arXiv 1910.02054, section 3): parameters, optimizer state (two of the parameters' size for AdamW),
and buffers. Activations grow through forward and shrink through backward, in which gradients grow.
So the peak is at the start of backward, where the loss has copies of the logits [B, T, V], or after
one of the blocks: `predict_memory` walks through both and returns the kinds at the peak.

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

from dataclasses import replace

from lm.model import ModelConfig

MIB = 1 << 20
KINDS = ("parameters", "gradients", "optimizer", "activations", "buffers")
REPLICATED = (
    "none", "ddp", "ddp_individual", "ddp_individual_v2", "ddp_bucketed", "ddp_copy_engine",
    "torch_ddp", "torch_ddp_tuned",
)  # fmt: skip
SHARDED = ("zero1", "zero2", "fsdp")
VARIANTS = REPLICATED + SHARDED
BUCKET_MB = {"torch_ddp": 25.0, "torch_ddp_tuned": 100.0, "ddp_copy_engine": 100.0}
DEFAULT_BUCKET_MB = 200.0  # of the other variants that batch
PULLED_BYTES = 64 * MIB  # what the copy engine's variant pulls at a time, at most


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


def block_activations(model: ModelConfig, tokens: int, dtype: str, fused_norm: bool = True) -> int:
    """Returns the bytes that one block keeps from forward to backward, for `tokens` on a rank."""
    arithmetic, residual = (4 if dtype == "float32" else 2), (2 if dtype == "bfloat16" else 4)
    casts = 5 if dtype == "mixed" else 2
    per_width = 2 * residual + (casts + 5) * arithmetic
    if not fused_norm:  # RMSNorm computes in float32, and autograd keeps input and normed input
        per_width += 8 + 2 * (4 - residual)
    kept = per_width * model.d_model + 4 * arithmetic * model.d_ff + 8 + 4 * model.num_heads
    copies = 2 * (block_parameters(model) - 2 * model.d_model) if dtype == "mixed" else 0
    return tokens * kept + copies


def loss_activations(model: ModelConfig, tokens: int, dtype: str, fused_norm: bool = True) -> int:
    """Returns what final norm, head and loss keep, with the loss's copies at its backward.

    Those are the log-probabilities, their gradient and that of the logits, all float32.
    """
    arithmetic, residual = (4 if dtype == "float32" else 2), (2 if dtype == "bfloat16" else 4)
    width = residual + arithmetic + (0 if fused_norm else 4 + 4 - residual)
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
    fused_norm: bool = True,
    activation_scale: float = 1.0,
) -> dict[str, int]:
    """Returns kind -> bytes on one rank at the peak of a training step with AdamW.

    Args:
        variant: one of `VARIANTS`.
        batch_size: sequences of `model.context_length` tokens per rank.
        dtype: `float32`, `mixed` (float32 under bfloat16 autocast) or `bfloat16`.
        fused_norm: whether RMSNorm is one kernel, as on GPUs.
        activation_scale: a factor on activations, from a measured peak.
    """
    if variant not in VARIANTS:
        raise ValueError(f"variant {variant!r} is unknown: choose from {', '.join(VARIANTS)}")
    width = 2 if dtype == "bfloat16" else 4
    tokens, whole = batch_size * model.context_length, total_parameters(model) * width
    table = model.vocab_size * model.d_model * width
    block = block_parameters(model) * width
    per_block = activation_scale * block_activations(model, tokens, dtype, fused_norm)
    loss = activation_scale * loss_activations(model, tokens, dtype, fused_norm)
    parts = {kind: (ranks if variant in shards else 1) for kind, shards in _SHARDED_KINDS.items()}
    bucket = min(bucket_mb(variant, bucket_size_mb) * MIB, whole)
    kept_always, in_backward = _buffers(
        variant, whole, bucket, block, outside=whole - model.num_layers * block
    )
    moments = [(model.num_layers * per_block + loss, 0, kept_always)]
    for done in range(model.num_layers + 1):  # blocks whose gradients are there, the head's too
        reduced = (table + done * block) / parts["gradients"]
        kept = (model.num_layers - done) * per_block
        moments.append((kept, reduced, kept_always + in_backward))
    if not model.tie_embeddings:  # the token embedding's gradient comes last
        moments.append((0, whole / parts["gradients"], kept_always + in_backward))
    kept, reduced, buffers = max(moments, key=sum)
    sizes = (whole / parts["parameters"], reduced, 2 * whole / parts["optimizer"], kept, buffers)
    return {kind: round(size) for kind, size in zip(KINDS, sizes, strict=True)}


_SHARDED_KINDS = {
    "parameters": ("fsdp",),
    "gradients": ("zero2", "fsdp"),
    "optimizer": SHARDED,
}


def _buffers(
    variant: str, gradients: int, bucket: float, block: int, outside: int
) -> tuple[float, float]:
    """Returns what a variant allocates beside the gradients: always, and in backward, in bytes.

    PyTorch's DDP keeps its buckets, and has twice as many while it rebuilds them after its first
    backward. Shared memory of the copy engine stays through forward. A flat bucket exists whole as
    soon as its first gradient is ready; a sharded one until its slice has been reduced. FSDP holds
    what is in no block whole until its gradients are there, two blocks, and the gradients of two.
    """
    return {
        "torch_ddp": (2 * gradients, 0),
        "torch_ddp_tuned": (2 * gradients, 0),
        "ddp_copy_engine": (
            gradients + min(PULLED_BYTES, gradients),
            -gradients,
        ),  # where the gradients then lie
        "ddp_bucketed": (0, bucket),
        "zero1": (0, bucket),
        "zero2": (0, 2 * bucket),  # one is filled while the one before is reduced
        "fsdp": (outside + 2 * block, outside + 2 * block),
    }.get(variant, (0, 0))


def largest_model(variant: str, model: ModelConfig, capacity_bytes: float, **run) -> ModelConfig:
    """Returns the deepest model of these widths whose predicted peak is within the capacity.

    `run` is as for `predict_memory`. Raises ValueError if one block does not fit.
    """

    def fits(layers: int) -> bool:
        kinds = predict_memory(variant, replace(model, num_layers=layers), **run)
        return sum(kinds.values()) <= capacity_bytes

    if not fits(1):
        raise ValueError(f"{variant}: one block of width {model.d_model} does not fit")
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return replace(model, num_layers=low)
