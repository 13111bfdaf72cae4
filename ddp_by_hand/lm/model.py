"""A decoder-only transformer, without code for devices, ranks or parallelism.

Pre-norm blocks (Xiong et al. 2020) with RMSNorm (Zhang and Sennrich 2019), rotary positions
(Su et al. 2021, "RoFormer"), causal attention (Vaswani et al. 2017) and the SwiGLU feed-forward
(Shazeer 2020, "GLU Variants Improve Transformer"). Read it from the bottom: `forward_loss` calls
`Transformer`, which is a list of `Block`.

In shapes: B sequences, T tokens, D = d_model, H heads of K = D / H, F = d_ff, V = vocab_size.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

INITIAL_STD = 0.02
NORM_EPS = 1e-6  # RMSNorm's own default follows the dtype: in bfloat16 it would drown 0.02² inputs


@dataclass(frozen=True)
class ModelConfig:
    """The sizes of a `Transformer`.

    `context_length` is what data and FLOP counts use; the network itself takes any T. Raises
    ValueError for a size below 1, heads that do not divide `d_model`, or heads of odd size.
    """

    vocab_size: int = 256
    d_model: int = 128
    num_layers: int = 4
    num_heads: int = 4
    d_ff: int = 512
    context_length: int = 128
    tie_embeddings: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type is int and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{field.name} is {value!r}: give a whole number of 1 or more")
        if self.d_model % self.num_heads:
            raise ValueError(
                f"num_heads is {self.num_heads}, which does not divide d_model {self.d_model}: "
                "choose a divisor"
            )
        if self.head_size % 2:
            raise ValueError(
                f"d_model {self.d_model} over num_heads {self.num_heads} gives heads of odd size "
                f"{self.head_size}, and rotary positions turn pairs: choose an even quotient"
            )

    @property
    def head_size(self) -> int:
        """Width of one attention head, K."""
        return self.d_model // self.num_heads


# | preset | parameters    | what for                                                            |
# | laptop |     1,115,264 | seconds on two cores                                                |
# | small  |    85,347,072 | GPT-2's 124 M shape; its other 39 M are a vocabulary and positions  |
# | 730m   |   738,248,704 | one data-centre GPU; 3.0 GB of gradients per step in float32        |
# | 1.2b   | 1,204,881,408 | the same, longer context; 4.8 GB of gradients per step in float32   |
PRESETS: dict[str, ModelConfig] = {
    "laptop": ModelConfig(),
    "small": ModelConfig(d_model=768, num_layers=12, num_heads=12, d_ff=2048, context_length=512),
    "730m": ModelConfig(
        vocab_size=32_000,
        d_model=2048,
        num_layers=12,
        num_heads=16,
        d_ff=5504,
        context_length=512,
    ),
    "1.2b": ModelConfig(
        vocab_size=32_000,
        d_model=2048,
        num_layers=16,
        num_heads=32,
        d_ff=8192,
        context_length=1024,
    ),
}


class Rotation:
    """Rotary position embedding (Su et al. 2021): position t turns pair i by t · 10000^(-2i/K).

    A query at s and a key at t then meet in a product that depends on s - t only. Pair i is
    (i, i + K/2), the halves of a head, not its neighbours: the same up to a fixed permutation.

    `cos` and `sin` are float32 [T, K/2], made anew by each forward: as buffers they would be
    broadcast by data parallelism and rounded by `.to(bfloat16)`. The class is a plain one because
    FSDP's mixed precision rounds tensors among a block's arguments, also inside a dataclass.
    """

    def __init__(self, length: int, head_size: int, device: torch.device) -> None:
        position = torch.arange(length, device=device, dtype=torch.float32)
        pair = torch.arange(0, head_size, 2, device=device, dtype=torch.float32)
        angle = position[:, None] * 10_000.0 ** (-pair / head_size)
        self.cos = angle.cos()
        self.sin = angle.sin()

    def turn(self, x: Tensor) -> Tensor:
        """Turns x [..., T, K]; computed in float32 or wider, returned in the dtype of x."""
        left, right = x.chunk(2, dim=-1)
        turned = (left * self.cos - right * self.sin, right * self.cos + left * self.sin)
        return torch.cat(turned, dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention, x [B, T, D] -> [B, T, D].

    The number of heads follows from the width of the projections, so that tensor parallelism can
    give a rank some of the heads.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.d_model
        self.head_size = config.head_size
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.output = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, rotation: Rotation) -> Tensor:
        query = rotation.turn(self._heads(self.query(x)))
        key = rotation.turn(self._heads(self.key(x)))
        value = self._heads(self.value(x))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(rearrange(mixed, "b h t k -> b t (h k)"))

    def _heads(self, x: Tensor) -> Tensor:
        """Splits [B, T, H·K] into heads [B, H, T, K]."""
        return rearrange(x, "b t (h k) -> b h t k", k=self.head_size)


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020): down(silu(gate(x)) * up(x)), x [B, T, D] -> [B, T, D]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.up = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.down = nn.Linear(config.d_ff, config.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One layer: x + attention(norm(x)), then the same with the feed-forward; x [B, T, D]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.d_model, eps=NORM_EPS)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.d_model, eps=NORM_EPS)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, rotation: Rotation) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Transformer(nn.Module):
    """tokens [B, T] int64 -> logits [B, T, V] in the dtype of the head.

    Parameters only, no buffers. Built the same from the same global seed; a model made on the
    meta device is filled by `to_empty` and `reset_parameters`.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.final_norm = nn.RMSNorm(config.d_model, eps=NORM_EPS)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.token_embedding.weight
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialises as GPT-2 does (Radford et al. 2019): N(0, 0.02²), norms 1.

        The two projections per layer that write to the residual stream are divided by
        sqrt(2 · layers), so that its variance does not grow with depth.
        """
        residual_std = INITIAL_STD / (2 * self.config.num_layers) ** 0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                nn.init.ones_(parameter)
            else:
                writes = name.endswith(("attention.output.weight", "feed_forward.down.weight"))
                nn.init.normal_(parameter, std=residual_std if writes else INITIAL_STD)

    def forward(self, tokens: Tensor) -> Tensor:
        rotation = Rotation(tokens.shape[1], self.config.head_size, tokens.device)
        x = self.token_embedding(tokens)
        for block in self.blocks:
            x = block(x, rotation)
        return self.head(self.final_norm(x))


def forward_loss(model: Callable[[Tensor], Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    """Returns the mean cross-entropy of next-token prediction, in float32 or float64.

    `batch` is (inputs, targets), both [B, T] int64 on the model's device; `model` is anything that
    maps inputs to logits [B, T, V], a data-parallel wrapper too.
    """
    inputs, targets = batch
    logits = model(inputs)
    wide = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(
        rearrange(logits, "b t v -> (b t) v").to(wide), rearrange(targets, "b t -> (b t)")
    )


def flops_per_token(config: ModelConfig) -> int:
    """Returns training FLOPs per token: 6 · N + 12 · L · T · D (PaLM, 2022, appendix B).

    N counts the weights of matrix products, the head but not the embedding's look-up nor the norms;
    6 is one multiply-add forward and two backward. The second term is attention's two products,
    without the discount of one half that causal masking would allow; recomputation is not counted.
    """
    per_layer = 4 * config.d_model**2 + 3 * config.d_model * config.d_ff
    matmul_weights = config.num_layers * per_layer + config.vocab_size * config.d_model
    return 6 * matmul_weights + 12 * config.num_layers * config.context_length * config.d_model
