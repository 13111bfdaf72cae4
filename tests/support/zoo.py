"""Small networks on which per-sample gradients go wrong easily, each with a batch and a loss.

`CASES` holds them and `every_case` runs a test on each. A network is seeded, has no dropout, and
all its parameters differ from their initial ones and zeros, so that no error hides behind a bias
of zero or a scale of one. In shapes: B samples, T tokens, p inputs, d outputs.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import rnn

from ddp_by_hand.experiments.verify_correctness.reference import (
    Batch,
    PerSampleLoss,
    per_sample_sum,
)
from ddp_by_hand.lm.model import ModelConfig, Transformer
from tests.support.registered_layers import Apart, Dense, Gate

SIZE = 4  # of a batch whose B, T, p and d shall be the same number
VOCABULARY = 50
PAD = 0


@dataclass(frozen=True)
class Case:
    """A network, its data and its loss.

    `batch(B)` makes any number of samples, also one. `needs` are packages besides torch.
    `or_refused`: a parameter or a batch dimension is out of the ordinary, so an implementation may
    refuse the network by name; what it must not do is return other gradients.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    per_sample_loss: PerSampleLoss
    needs: tuple[str, ...] = ()
    or_refused: bool = False


class Criterion:
    """A per-sample loss with the attribute `reduction`, as `torch.nn`'s losses have it."""

    def __init__(self, per_sample_loss: PerSampleLoss, reduction: str = "mean") -> None:
        self.per_sample_loss = per_sample_loss
        self.reduction = reduction

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        losses = self.per_sample_loss(outputs, targets)
        return losses if self.reduction == "none" else getattr(losses, self.reduction)()


# Losses: outputs and targets -> [B], in float32 or wider.


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """[B, ..., V] and [B, ...] -> [B]: the mean over a sample's targets that are not -100."""
    wide = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
    losses = F.cross_entropy(wide.movedim(-1, 1), targets, reduction="none")
    return per_sample_sum(losses) / per_sample_sum(targets != -100).clamp(min=1)


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    wide = torch.promote_types(outputs.dtype, torch.float32)
    return per_sample_sum((outputs.to(wide) - targets).square())


def product(outputs: Tensor, targets: Tensor) -> Tensor:
    """Σ outputs · targets: the targets are the gradients of the outputs, exactly."""
    wide = torch.promote_types(outputs.dtype, torch.float32)
    return per_sample_sum(outputs.to(wide) * targets)


# Batches. A length of None is B itself.


def numbers(batch_size: int, *shape: int | None, out: tuple[int | None, ...]) -> Batch:
    """Normal numbers of [B, *shape], and targets of [B, *out]; None stands for B."""
    draw = torch.Generator().manual_seed(1)
    shape, out = (tuple(batch_size if n is None else n for n in s) for s in (shape, out))
    inputs = torch.randn(batch_size, *shape, generator=draw)
    return inputs, torch.randn(batch_size, *out, generator=draw)


def classes(batch_size: int, *shape: int, count: int = 3) -> Batch:
    """Normal numbers of [B, *shape], and a class of `count` for each sample."""
    draw = torch.Generator().manual_seed(1)
    inputs = torch.randn(batch_size, *shape, generator=draw)
    return inputs, torch.randint(count, (batch_size,), generator=draw)


def tokens(batch_size: int, length: int | None = 6, count: int | None = None) -> Batch:
    """Token ids of [B, T] with repetitions and padding ids, and the next ones, or a class each."""
    draw = torch.Generator().manual_seed(1)
    length = batch_size if length is None else length
    ids = torch.randint(VOCABULARY, (batch_size, length + 1), generator=draw)
    ids[:, ::4] = ids[:, 1:2]
    if length > 3:
        ids[:, 2] = PAD
    if count is None:
        return ids[:, :-1], ids[:, 1:]
    return ids[:, :-1], torch.randint(count, (batch_size,), generator=draw)


def keywords(batch_size: int, length: int | None = 6, count: int | None = None) -> Batch:
    """The same for Hugging Face, padded on the right to T from lengths T, T - 1, T - 2, T, ..."""
    ids, targets = tokens(batch_size, length, count)
    ids = ids.where(ids != PAD, 1)
    lengths = ids.shape[1] - torch.arange(batch_size) % min(3, ids.shape[1])
    mask = torch.arange(ids.shape[1]) < lengths[:, None]
    if count is None:
        targets = targets.where(mask, -100)
    return {"input_ids": ids.where(mask, PAD), "attention_mask": mask.long()}, targets


# Networks


class Tables(nn.Module):
    """Tables of several widths, whose rows are added up or averaged, and one of one row each."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(VOCABULARY - width, width, mode=mode, padding_idx=padding_idx)
            for width, mode, padding_idx in (
                (3, "mean", None), (4, "sum", PAD), (5, "mean", PAD), (4, "sum", None)
            )
        )  # fmt: skip
        self.column, self.head = nn.Embedding(VOCABULARY, 4), nn.Linear(20, 3)

    def forward(self, ids: Tensor) -> Tensor:
        rows = [bag(ids[:, n:] % bag.num_embeddings) for n, bag in enumerate(self.bags)]
        return self.head(torch.cat([*rows, self.column(ids[:, 1])], 1).tanh())


class Net(nn.Module):
    """Named members and a function of them: `Net(lambda net, x: net.b(net.a(x)), a=..., b=...)`."""

    def __init__(self, function: Callable, **members: nn.Module | nn.Parameter | Tensor) -> None:
        super().__init__()
        self.function = function
        for name, member in members.items():
            if type(member) is Tensor:
                self.register_buffer(name, member)
            else:
                setattr(self, name, member)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(self, *inputs)


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    """Builds, and moves every parameter a little, whatever the global generator's state."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = build().train()
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


def mlp(p: int, width: int, d: int) -> nn.Module:
    return nn.Sequential(nn.Linear(p, width), nn.Tanh(), nn.Linear(width, d))


def transformer(**changes) -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "d_model": 16, "num_layers": 2, "num_heads": 2, "d_ff": 24}
    return Transformer(ModelConfig(**(sizes | changes)))


def same_weight() -> nn.Module:
    """Two linear layers with one weight and a bias each."""
    net = Net(lambda net, x: net.b(torch.tanh(net.a(x))), a=nn.Linear(5, 5), b=nn.Linear(5, 5))
    net.b.weight = net.a.weight
    return net


def half_frozen() -> nn.Module:
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    net[:4].requires_grad_(False)
    net[2].bias.requires_grad_(True)
    return net


def positions(ids: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    """Token and position embeddings; `ids` makes the position ids of tokens [B, T]."""
    return lambda: Net(
        lambda net, x: net.head(torch.tanh(net.word(x) + net.position(ids(x)))),
        word=nn.Embedding(VOCABULARY, 4),
        position=nn.Embedding(8, 4),
        head=nn.Linear(4, VOCABULARY),
    )


def reused_on_fewer(net: Net, x: Tensor) -> Tensor:
    """The same layer on [B, 6, 5], on [B, 3, 5] and on [B, 5]."""
    x = torch.tanh(net.layer(x)).unflatten(1, (3, 2)).sum(2)
    return net.layer(torch.tanh(net.layer(x)).sum(1))


def time_major_flattened(net: Net, x: Tensor) -> Tensor:
    x = x.transpose(0, 1)
    return net.b(torch.tanh(net.a(x.flatten(0, 1)))).unflatten(0, x.shape[:2]).transpose(0, 1)


def two_linears(function: Callable, p: int = 5, width: int = 7, d: int = 3) -> nn.Module:
    return Net(function, a=nn.Linear(p, width), b=nn.Linear(width, d))


def routed(net: Net, x: Tensor) -> Tensor:
    """Tokens of all samples meet in an expert's batch: [number of them, p], ragged by sample."""
    chosen = x[..., 0] > 0
    return net.shared(x).masked_scatter(chosen[..., None], net.expert(x[chosen]))


def attention(net: Net, x: Tensor) -> Tensor:
    return x + net.attention(x, x, x, need_weights=False)[0]


def class_token(net: Net, x: Tensor) -> Tensor:
    x = torch.cat([net.token.expand(len(x), 1, -1), net.embed(x)], dim=1)
    return net.head(torch.tanh(net.mix(x.transpose(1, 2)))[:, :, 0])


def queries(net: Net, x: Tensor) -> Tensor:
    """Learned queries that are an embedding's weight, as in DETR, look at the samples' tokens."""
    keys = net.keys(x)
    scores = net.queries.weight @ keys.transpose(1, 2)
    return net.head(scores.softmax(-1) @ keys).sum(1)


# Networks of Hugging Face, from configurations

SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_labels": 3, "pad_token_id": PAD,
}  # fmt: skip
ENDS = {"bos_token_id": 1, "eos_token_id": 2}


def hugging_face(kind: str, configuration: str, **sizes) -> nn.Module:
    import transformers

    return getattr(transformers, kind)(getattr(transformers, configuration)(**sizes))


def llama(kind: str, **changes) -> nn.Module:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16}
    return hugging_face(kind, "LlamaConfig", **SIZES, **heads, **ENDS, **changes)


def gpt2(kind: str) -> nn.Module:
    return hugging_face(
        kind, "GPT2Config", vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=16,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, num_labels=3, pad_token_id=PAD, **ENDS,
    )  # fmt: skip


def bert(kind: str) -> nn.Module:
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    heads = {"num_attention_heads": 2, "max_position_embeddings": 16}
    return hugging_face(kind, "BertConfig", **SIZES, **heads, **none)


def lora(kind: str, task: str, modules: list[str]) -> nn.Module:
    """The base is frozen; adapters train, and with `SEQ_CLS` the new head `score` too."""
    import peft

    config = peft.LoraConfig(
        task_type=task, r=3, lora_alpha=6, lora_dropout=0.0, target_modules=modules,
        init_lora_weights=False,
    )  # fmt: skip
    return peft.get_peft_model(llama(kind), config)


# Cases


def _case(
    name: str,
    build: Callable[[], nn.Module],
    batch: Callable[[int], Batch],
    per_sample_loss: PerSampleLoss = squared_error,
    **more,
) -> Case:
    return Case(name, partial(seeded, build), batch, per_sample_loss, **more)


_odd = partial(_case, or_refused=True)


def _numbers(*shape: int | None, out: tuple[int | None, ...]) -> Callable[[int], Batch]:
    return lambda batch_size: numbers(batch_size, *shape, out=out)


def _classes(*shape: int) -> Callable[[int], Batch]:
    return lambda batch_size: classes(batch_size, *shape)


def _unused() -> nn.Module:
    return Net(
        lambda net, x: net.head(x + torch.tanh(net.used(x))),
        skipped=nn.Linear(6, 6), used=nn.Linear(6, 6), head=nn.Linear(6, 3),
    )  # fmt: skip


def _table() -> nn.Module:
    return Net(
        lambda net, x: net.head(torch.tanh(x + net.scale(net.layer(net.table)))),
        table=torch.randn(6, 4), layer=nn.Linear(4, 5), scale=nn.LayerNorm(5),
        head=nn.Linear(5, 3),
    )  # fmt: skip


def _position_ids(shape: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.arange(x.shape[1], device=x.device).reshape(shape)


def _words(tied: bool = False, **options) -> nn.Module:
    word = nn.Embedding(VOCABULARY, 4, **options)
    net = nn.Sequential(word, nn.Tanh(), nn.Linear(4, VOCABULARY))
    if tied:
        net[2].weight = word.weight
    return net


def _by_distance(net: Net, x: Tensor) -> Tensor:
    place = torch.arange(x.shape[1], device=x.device)
    distances = (place[:, None] - place).abs().clamp(max=3)
    return net.layer(torch.tanh(net.distance(distances).sum(-1)) @ x)


class Frames(nn.Module):
    """Pictures of a film [B, T, 2, H, W], of which a convolution sees B·T at a time, and a film."""

    def __init__(self) -> None:
        super().__init__()
        self.picture, self.film = nn.Conv2d(2, 16, 3, padding=1), nn.Conv3d(16, 8, (2, 2, 3))
        self.norm = nn.GroupNorm(2, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(1, (2, 2))
        pictures = self.norm(self.picture(x.flatten(0, 1))).unflatten(0, (len(x), 2))
        return self.film(pictures.transpose(1, 2)).flatten(2)


class FixedBatchNorm(nn.BatchNorm2d):
    """A batch norm that stays in evaluation, with statistics of earlier data."""

    def train(self, mode: bool = True) -> "FixedBatchNorm":
        return super().train(False)


def _wide() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(4, 16, 3, padding=1),
        nn.GroupNorm(4, 16),
        nn.ReLU(inplace=True),
        nn.Conv2d(16, 32, 3, stride=2, groups=2),
        nn.ConvTranspose2d(32, 16, 2, bias=False),
        nn.Conv2d(16, 8, (2, 1), dilation=(1, 2)),
    )


def _on_images(name: str, layer: Callable[[], nn.Module]) -> Case:
    """A layer with eight channels of output, pooled."""

    def build() -> nn.Module:
        return Net(
            lambda net, x: net.head(torch.tanh(net.layer(x)).flatten(2).sum(2)),
            layer=layer(), head=nn.Linear(8, 3),
        )  # fmt: skip

    return _case(name, build, _classes(4, 7, 6), cross_entropy)


def packed(net: Net, ids: Tensor) -> Tensor:
    """Sequences of other lengths, through both directions, their states and their last ones."""
    x = torch.tanh(net.embed(ids))
    lengths = (1 + ids[:, 0] % ids.shape[1]).cpu()
    y, (last, _) = net.layer(rnn.pack_padded_sequence(x, lengths, True, enforce_sorted=False))
    y, _ = rnn.pad_packed_sequence(y, batch_first=True, total_length=ids.shape[1])
    return net.head(y).sum(1) + net.head(last[:2].transpose(0, 1).flatten(1))


def cells(net: Net, x: Tensor) -> Tensor:
    """A loop over time steps, in which each cell is called."""
    first, second, third, found = None, None, None, []
    for t in range(x.shape[1]):
        first = net.a(x[:, t], first)
        second = net.b(first[0], second)
        third = net.c(second, third)
        found.append(third)
    return torch.stack(found, 1)


_LABELS, _PROJECTIONS = partial(keywords, count=3), ["q_proj", "v_proj", "down_proj"]
_HUGGING_FACE: dict[str, tuple] = {  # how it is built, its batch, and its package if it has another
    "llama_labels": (partial(llama, "LlamaForSequenceClassification"), _LABELS),
    "llama_lm": (partial(llama, "LlamaForCausalLM"), keywords),
    "gpt2_lm": (partial(gpt2, "GPT2LMHeadModel"), keywords),
    "bert_labels": (partial(bert, "BertForSequenceClassification"), _LABELS),
    "lora_lm": (partial(lora, "LlamaForCausalLM", "CAUSAL_LM", _PROJECTIONS), keywords, "peft"),
    "lora_labels": (
        partial(lora, "LlamaForSequenceClassification", "SEQ_CLS", _PROJECTIONS), _LABELS, "peft",
    ),
}  # fmt: skip

CASES: tuple[Case, ...] = (
    _case("mlp", lambda: mlp(6, 8, 3), _classes(6), cross_entropy),
    _case("tokens", lambda: mlp(5, 7, 3), _numbers(6, 5, out=(6, 3))),
    _case(
        "tokens_t_p_d_are_b", lambda: mlp(SIZE, SIZE, SIZE), _numbers(None, SIZE, out=(None, SIZE))
    ),
    _case("half_frozen", half_frozen, _classes(6), cross_entropy),
    _case("unused", _unused, _classes(6), cross_entropy),
    _case("transformer", transformer, tokens, cross_entropy),
    _case("transformer_tied", lambda: transformer(tie_embeddings=True), tokens, cross_entropy),
    _case("same_weight", same_weight, _numbers(6, 5, out=(6, 5))),
    _case(
        "changed_in_place",
        lambda: two_linears(lambda net, x: net.b(net.a(x).add_(x).relu_()), 5, 5),
        _numbers(6, 5, out=(6, 3)),
    ),
    _case(
        "reused_on_fewer_tokens", lambda: Net(reused_on_fewer, layer=nn.Linear(5, 5)),
        _numbers(6, 5, out=(5,)),
    ),
    # The batch dimension is not the first of what a layer sees, or is not there at all.
    _odd(
        "time_major_flattened", partial(two_linears, time_major_flattened),
        _numbers(6, 5, out=(6, 3)),
    ),
    _odd("table", _table, _numbers(6, 5, out=(6, 3))),
    _odd(
        "routed", lambda: Net(routed, shared=nn.Linear(5, 3), expert=nn.Linear(5, 3)),
        _numbers(6, 5, out=(6, 3)),
    ),
    # Embeddings
    _case(
        "relative_positions",
        lambda: Net(_by_distance, distance=nn.Embedding(4, 2), layer=nn.Linear(5, 3)),
        _numbers(6, 5, out=(6, 3)),
    ),
    _case("positions_batch_of_one", positions(_position_ids((1, -1))), tokens, cross_entropy),
    _case("embedding", _words, tokens, cross_entropy),
    _case("padding_idx", lambda: _words(padding_idx=PAD), tokens, cross_entropy),
    _case("padding_idx_tied", lambda: _words(True, padding_idx=PAD), tokens, cross_entropy),
    _case("tables", Tables, lambda b: tokens(b, 6, 3), cross_entropy),
    _odd(
        "embedding_as_head",
        lambda: Net(
            lambda net, x: F.linear(torch.tanh(net.layer(net.word(x))), net.word.weight),
            word=nn.Embedding(VOCABULARY, 4), layer=nn.Linear(4, 4),
        ),
        tokens, cross_entropy,
    ),
    # Norms and convolutions
    _case(
        "layer_norm", lambda: nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Linear(6, 3)),
        _numbers(6, 5, out=(6, 3)),
    ),
    _on_images(
        "instance_norm",
        lambda: nn.Sequential(nn.Conv2d(4, 8, 1), nn.InstanceNorm2d(8, affine=True)),
    ),
    _on_images("wide", _wide),
    _on_images("frames", Frames),
    _on_images("group_norm", lambda: nn.Sequential(nn.Conv2d(4, 8, 1), nn.GroupNorm(4, 8))),
    _on_images(
        "fixed_batch_norm", lambda: nn.Sequential(nn.Conv2d(4, 8, 1), FixedBatchNorm(8).train())
    ),
    # Parameters that no module of a common type owns, or that are read outside their module
    _odd(
        "multihead_attention",
        lambda: Net(attention, attention=nn.MultiheadAttention(8, 2, batch_first=True)),
        _numbers(6, 8, out=(6, 8)),
    ),
    _odd(
        "encoder_layer",
        lambda: nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True),
        _numbers(6, 8, out=(6, 8)),
    ),
    _odd(
        "class_token",
        lambda: Net(
            class_token, token=nn.Parameter(torch.randn(1, 1, 4)), embed=nn.Linear(5, 4),
            mix=nn.Linear(7, 7), head=nn.Linear(4, 3),
        ),
        _classes(6, 5), cross_entropy,
    ),
    _odd(
        "queries",
        lambda: Net(
            queries, queries=nn.Embedding(2, 4), keys=nn.Linear(5, 4), head=nn.Linear(4, 3)
        ),
        _classes(6, 5), cross_entropy,
    ),
    _odd(
        "layer_for_samples_and_table",
        lambda: Net(
            lambda net, x: net.layer(x) @ net.layer(net.table.weight).t(),
            layer=nn.Linear(5, 4), table=nn.Embedding(3, 5),
        ),
        _classes(5), cross_entropy,
    ),
    _odd(
        "scalar",
        lambda: Net(
            lambda net, x: net.layer(x * net.scale),
            scale=nn.Parameter(torch.tensor(1.5)), layer=nn.Linear(5, 3),
        ),
        _classes(5), cross_entropy,
    ),
    _odd(
        "bilinear",
        lambda: Net(lambda net, x: net.layer(x, x.flip(1)), layer=nn.Bilinear(5, 5, 3)),
        _classes(5), cross_entropy,
    ),
    # Recurrent layers
    _case(
        "lstm_packed",
        lambda: Net(
            packed, embed=nn.Embedding(VOCABULARY, 4),
            layer=nn.LSTM(4, 5, 2, batch_first=True, bidirectional=True), head=nn.Linear(10, 3),
        ),
        lambda b: tokens(b, count=3), cross_entropy,
    ),
    _case(
        "gru_time_major",
        lambda: Net(
            lambda net, x: net.b(net.a(x.transpose(0, 1))[0])[0].transpose(0, 1),
            a=nn.GRU(5, 4), b=nn.RNN(4, 3, bias=False),
        ),
        _numbers(6, 5, out=(6, 3)),
    ),
    _case(
        "cells",
        lambda: Net(
            cells, a=nn.LSTMCell(5, 4), b=nn.GRUCell(4, 4, bias=False), c=nn.RNNCell(4, 3)
        ),
        _numbers(6, 5, out=(6, 3)),
    ),
    # Layers of a user's own
    _case(
        "registered",
        lambda: Net(lambda net, x: net.b(net.a(x), 0.5), a=Gate(5, 4), b=Dense(4, 3)),
        _numbers(6, 5, out=(6, 3)),
    ),
    _case(
        "registered_apart",
        lambda: Net(lambda net, x: net.b(net.a(x), 0.5), a=Apart(5, 4), b=Apart(4, 3)),
        _numbers(6, 5, out=(6, 3)),
    ),
    *(
        _case(name, build, batch, cross_entropy, needs=("transformers", *others))
        for name, (build, batch, *others) in _HUGGING_FACE.items()
    ),
)  # fmt: skip
BY_NAME: dict[str, Case] = {case.name: case for case in CASES}


def parameters(*names: str) -> list:
    """These cases, or all, as parameters for pytest; skipped where a package is missing."""
    return [
        pytest.param(
            case,
            id=case.name,
            marks=[
                pytest.mark.skipif(importlib.util.find_spec(need) is None, reason=f"needs {need}")
                for need in case.needs
            ],
        )
        for case in ([BY_NAME[name] for name in names] if names else CASES)
    ]


every_case = pytest.mark.parametrize("case", parameters())


# For the loss `product`, whose gradient is g_i = Σ_t y_t x_tᵀ with inputs x and targets y.


def linear(p: int = 8, d: int = 6) -> nn.Linear:
    return seeded(lambda: nn.Linear(p, d, bias=False))


def poisoned_sample(batch: Batch, sample: int = 0, value: float = float("nan")) -> Batch:
    """One number of one sample's floating-point inputs is `value`: NaN or an infinity."""
    inputs = batch[0].clone()
    inputs[sample].view(-1)[0] = value
    return inputs, batch[1]
