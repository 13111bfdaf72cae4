"""One record for each kind of layer, and for each shape and layout that its arithmetic tells apart.

A record makes a network of one layer, behind a linear one if its inputs are numbers, so that the
layer's input gradients count too. `RECORDS` holds all; a new kind of layer adds its own here.
"""

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pytest
import torch
from opacus.layers import DPGRU, DPLSTM, DPRNN
from torch import Tensor, nn
from torch.nn.utils import parametrizations, rnn

from ddp_by_hand.experiments.verify_correctness.reference import Batch
from tests.support import zoo
from tests.support.private_steps import REFERENCE
from tests.support.registered_layers import Apart, Dense, Gate

IDS = 9  # different ids of embeddings
Call = Callable[["Network", Tensor], Tensor]


class Network(nn.Module):
    """A layer that a function calls, behind a linear layer on the last dimension of numbers."""

    def __init__(self, layer: nn.Module, call: Call, width: int | None, is_reused: bool) -> None:
        super().__init__()
        self.layer, self.call, self.is_reused = layer, call, is_reused
        self.first = None if width is None else nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.first is None else torch.tanh(self.first(x)) + x
        y = self.call(self, x)
        if not self.is_reused:
            return y
        return y * self.call(self, x.flip(1) if x.dim() > 1 else (x + 1) % IDS).sin()


@dataclass(frozen=True)
class Record:
    """A kind of layer and its samples.

    Attributes:
        layer: makes it.
        shape: of a sample's numbers, or of its ids.
        call: returns the outputs, the samples first.
        ids: the dtype of ids; None for numbers.
        tokens: the dimension of inputs and outputs over which gradients add up token by token, so
            that tokens may cancel; None if there is none.
        needs: a package besides torch.
        in_16_bit: whether its code runs in 16 bit, and in autocast with the dtypes that it expects.
        options: of `make_private`, for modes with kernels.
    """

    name: str
    layer: Callable[[], nn.Module]
    shape: tuple[int, ...]
    call: Call = lambda net, x: net.layer(x)
    ids: torch.dtype | None = None
    tokens: int | None = None
    needs: tuple[str, ...] = ()
    in_16_bit: bool = True
    options: tuple[tuple[str, Any], ...] = ()

    def case(self, *, is_reused: bool = False, is_first: bool = False) -> zoo.Case:
        """Returns the network with samples and a loss whose output gradients are random.

        `is_reused`: the layer is used twice. `is_first`: without a layer before it.
        """
        return _case(self, is_reused, is_first)

    def batch(self, build: Callable[[], nn.Module], count: int) -> Batch:
        draw = torch.Generator().manual_seed(1)
        if self.ids is None:
            x = torch.randn(count, *self.shape, generator=draw)
        else:
            x = torch.randint(IDS, (count, *self.shape), generator=draw, dtype=self.ids)
        with torch.no_grad():
            outputs = build()(x)
        return x, torch.randn(outputs.shape, generator=draw)


@cache
def _case(record: Record, is_reused: bool, is_first: bool) -> zoo.Case:
    """Returns one object in each call, so that its samples' gradients are computed once."""
    width = None if is_first or record.ids is not None else record.shape[-1]
    build = partial(
        zoo.seeded, lambda: Network(record.layer(), record.call, width, is_reused)
    )  # fmt: skip
    return zoo.Case(record.name, build, partial(record.batch, build), zoo.product, record.needs)


# Where the samples are in what the layer sees


def batch_second(net: Network, x: Tensor) -> Tensor:
    return net.layer(x.transpose(0, 1)).transpose(0, 1)


def flattened(net: Network, x: Tensor) -> Tensor:
    return net.layer(x.flatten(0, 1)).unflatten(0, x.shape[:2])


def time_major_flattened(net: Network, x: Tensor) -> Tensor:
    x = x.transpose(0, 1)
    return net.layer(x.flatten(0, 1)).unflatten(0, x.shape[:2]).transpose(0, 1)


def with_gaps(net: Network, x: Tensor) -> Tensor:
    """The values have others between them in memory."""
    return net.layer(torch.stack([x, torch.zeros_like(x)], -1)[..., 0])


def features_outermost(net: Network, x: Tensor) -> Tensor:
    return net.layer(x.movedim(-1, 0).contiguous().movedim(0, -1))


def one_feature_expanded(net: Network, x: Tensor) -> Tensor:
    return net.layer(x[..., :1].expand(x.shape))


def shared(net: Network, x: Tensor) -> Tensor:
    """The layer sees positions of one batch, which all samples share."""
    return net.layer(torch.arange(x.shape[1], device=x.device)) * (1 + x[..., None])


def shared_by_one(net: Network, x: Tensor) -> Tensor:
    return net.layer(torch.arange(x.shape[1], device=x.device)[None]) * (1 + x[..., None])


# How a layer is called


def first_of(net: Network, x: Tensor) -> Tensor:
    return net.layer(x)[0]


def time_first(net: Network, x: Tensor) -> Tensor:
    y, last = net.layer(x.transpose(0, 1))
    last = last[0] if isinstance(last, tuple) else last
    return torch.cat([y.transpose(0, 1).flatten(1), last.transpose(0, 1).flatten(1)], 1)


def first_states(layer: nn.Module, x: Tensor) -> Any:
    """States that depend on the sample."""
    count = layer.num_layers * (2 if layer.bidirectional else 1)
    widths = (layer.proj_size or layer.hidden_size, layer.hidden_size)
    states = [x[:, 0, :1].sin().repeat(count, 1, width) for width in widths]
    return tuple(states) if isinstance(layer, nn.LSTM | DPLSTM) else states[1]


def with_states(net: Network, x: Tensor) -> Tensor:
    """Last states are outputs too."""
    y, last = net.layer(x, first_states(net.layer, x))
    last = last if isinstance(last, tuple) else (last,)
    return torch.cat([y.flatten(1), *(s.transpose(0, 1).flatten(1) for s in last)], 1)


def packed(net: Network, x: Tensor) -> Tensor:
    """Sequences of other lengths."""
    lengths = 1 + (x[:, 1:, 0] > 0).sum(1).cpu()
    given = rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    y, last = net.layer(given, first_states(net.layer, x))
    y, _ = rnn.pad_packed_sequence(y, batch_first=True, total_length=x.shape[1])
    last = last[0] if isinstance(last, tuple) else last
    if isinstance(net.layer, DPLSTM):  # whose last states are in torch's default dtype
        return y
    return torch.cat([y.flatten(1), last.transpose(0, 1).flatten(1)], 1)


def loop(net: Network, x: Tensor) -> Tensor:
    """A cell is called for each time step."""
    state, found = None, []
    for one in x.unbind(1):
        state = net.layer(one, state)
        found += state if isinstance(state, tuple) else [state]
    return torch.stack(found, 1)


def attend(net: Network, x: Tensor, **options: Any) -> Tensor:
    """Queries are some tokens, if `memory`; keys and values may be others, `three`."""
    layer, is_second = net.layer, not net.layer.batch_first
    length = 3 if options.pop("memory", False) else x.shape[1]
    keys, values = x, x
    if options.pop("three", False):
        keys, values = x.sin()[..., : layer.kdim], x.cos()[..., : layer.vdim]
    if options.pop("padding", False):
        options["key_padding_mask"] = x[..., 0] > 0.3
    if options.pop("mask", False):
        ones = torch.ones(length, x.shape[1], dtype=torch.bool, device=x.device)
        options["attn_mask"] = torch.triu(ones, 2)
    if options.pop("numbers", False):
        ones = torch.linspace(-1, 1, length * x.shape[1])
        options["attn_mask"] = ones.view(length, x.shape[1]).to(x)
    given = x[:, :length], keys, values
    given = tuple(y.transpose(0, 1) for y in given) if is_second else given
    y, weights = layer(*given, **options)
    y = y.transpose(0, 1) if is_second else y
    return y.flatten(1) if weights is None else torch.cat([y.flatten(1), weights.flatten(1)], 1)


def windows(net: Network, x: Tensor) -> Tensor:
    """Two sequences of each sample, flattened."""
    x = x.unflatten(1, (2, -1)).flatten(0, 1)
    return net.layer(x, x, x)[0].unflatten(0, (-1, 2))


def itself(net: Network, x: Tensor) -> Tensor:
    return net.layer(x, x.flip(1))


def products(net: Network, x: Tensor) -> Tensor:
    return sum((x @ weight).tanh() for weight in net.layer)


def times(net: Network, x: Tensor) -> Tensor:
    return x * net.layer.scale


# Layers of a user's own


class Scale(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(shape) + 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class ScaledWords(nn.Embedding):
    """As Gemma's and BART's."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * 3.0


class Positions(nn.Embedding):
    """As BART's: it makes its ids."""

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        return super().forward(positions.expand(len(ids), -1) + 1)


class Adapted(nn.Linear):
    """Has layers of its own beside its weight."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.down, self.up = nn.Linear(inputs, 2, bias=False), nn.Linear(2, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.tanh()) + self.up(self.down(x))


class Twice(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x).sin())


class ByFunction(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(input=x * 2, weight=self.weight, bias=self.bias).relu()


class WithItsTransposed(nn.Linear):
    """Computes with its weight once as the layer does and once otherwise."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) @ self.weight


class ChannelsFirst(nn.LayerNorm):
    """As ConvNeXt's."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class Standardised(nn.Conv1d):
    """Computes with another weight than its own."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean()
        return nn.functional.conv1d(x, weight, self.bias, padding=self.padding)


class OwnArithmetic(nn.Conv2d):
    """Another convolution behind PyTorch's `forward`."""

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(x, weight - weight.mean((1, 2, 3), keepdim=True), bias)


class Padding(nn.Embedding):
    """Trains the row that the layer's own call would leave out."""

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.embedding(ids, self.weight)


class Translator(nn.Module):
    """Has one weight for the embeddings of an encoder and of a decoder and for the head."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Embedding(IDS, 4, padding_idx=2)
        self.decoder = nn.Embedding(IDS, 4)
        self.head = nn.Linear(4, IDS)
        self.decoder.weight = self.head.weight = self.encoder.weight

    def forward(self, ids: Tensor) -> Tensor:
        known = self.encoder(ids.repeat(1, 2)).mean(1, keepdim=True)
        return self.head(known + self.decoder(ids))


class WeightedBags(nn.Module):
    """Bags of ids with weights that are trained too."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(IDS, 4, mode="sum", padding_idx=2)
        self.weights = nn.Embedding(IDS, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.bag(ids, per_sample_weights=torch.tanh(self.weights(ids)).squeeze(2))


class TrainedMask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.bias = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, attn_mask=self.bias, need_weights=False)[0]


def of_transformers(module: str, name: str, *arguments: Any) -> nn.Module:
    return getattr(importlib.import_module(f"transformers.{module}"), name)(*arguments)


def one_weight_in_two_layers() -> nn.LSTM:
    lstm = nn.LSTM(4, 4, num_layers=2, batch_first=True)
    lstm.weight_hh_l1 = lstm.weight_hh_l0
    return lstm


def one_weight_of_two_projections() -> nn.MultiheadAttention:
    attention = nn.MultiheadAttention(4, 2, batch_first=True, vdim=3)
    attention.k_proj_weight = attention.out_proj.weight = attention.q_proj_weight
    return attention


# The records

HF = {"needs": ("transformers",)}
HF_NORMS = {
    "rms_norm_llama": ("models.llama.modeling_llama", "LlamaRMSNorm"),
    "rms_norm_t5": ("models.t5.modeling_t5", "T5LayerNorm"),
    "rms_norm_olmo": ("models.olmo2.modeling_olmo2", "Olmo2RMSNorm"),
    "rms_norm_gemma": ("models.gemma.modeling_gemma", "GemmaRMSNorm"),
}
WIDTH = (("norm_algorithm", "width"), ("tile_size", 16))
LENGTH = (("norm_algorithm", "input_length"),)
TWICE = (("memory_budget", 0),)
NO = {"need_weights": False}

R = Record
LINEAR = [
    R("linear", lambda: nn.Linear(5, 3), (6, 5), tokens=1, options=WIDTH),
    R("linear_no_bias", lambda: nn.Linear(5, 3, bias=False), (6, 5), tokens=1, options=LENGTH),
    R("linear_no_tokens", lambda: nn.Linear(5, 3), (5,)),
    R("linear_one_token", lambda: nn.Linear(5, 3), (1, 5)),
    R("linear_many_tokens", lambda: nn.Linear(3, 2), (33, 3), tokens=1, options=TWICE),
    R("linear_wide", lambda: nn.Linear(40, 70, bias=False), (4, 40), tokens=1),
    R("linear_large", lambda: nn.Linear(96, 80, bias=False), (16, 96), tokens=1),
    R("linear_long", lambda: nn.Linear(7, 130, bias=False), (257, 7), tokens=1),
    R("linear_to_one", lambda: nn.Linear(1, 1), (6, 1), tokens=1),
    R("linear_more_axes", lambda: nn.Linear(5, 3), (2, 3, 5), tokens=1),
    R("linear_batch_second", lambda: nn.Linear(5, 3), (6, 5), batch_second, tokens=1),
    R("linear_flattened", lambda: nn.Linear(5, 3), (6, 5), flattened, tokens=1),
    R("linear_time_major", lambda: nn.Linear(5, 3), (6, 5), time_major_flattened, tokens=1),
    R("linear_gaps", lambda: nn.Linear(5, 3), (6, 5), with_gaps, tokens=1, options=WIDTH),
    R("linear_features_first", lambda: nn.Linear(5, 3), (6, 5), features_outermost, tokens=1),
    R("linear_expanded", lambda: nn.Linear(5, 3), (6, 5), one_feature_expanded, tokens=1),
    R("linear_subclass", lambda: Adapted(5, 5), (6, 5)),
    R("linear_subclass_twice", lambda: Twice(5, 5), (6, 5)),
    R("linear_by_function", lambda: ByFunction(5, 5), (6, 5)),
    R("linear_transposed_too", lambda: WithItsTransposed(5, 5), (6, 5)),
    R("conv1d_of_transformers", lambda: of_transformers("pytorch_utils", "Conv1D", 3, 5), (6, 5),
      tokens=1, options=WIDTH, **HF),
    R("conv1d_of_transformers_no_tokens", lambda: of_transformers("pytorch_utils", "Conv1D", 3, 5),
      (5,), **HF),
]  # fmt: skip
NORMS = [
    R("rms_norm", lambda: nn.RMSNorm(5), (6, 5), tokens=1),
    R("rms_norm_two_axes", lambda: nn.RMSNorm((6, 5), eps=1e-3), (6, 5)),
    R("rms_norm_batch_second", lambda: nn.RMSNorm(5), (6, 5), batch_second, tokens=1),
    *(R(name, partial(of_transformers, *where, 5), (6, 5), tokens=1, **HF)
      for name, where in HF_NORMS.items()),
    R("layer_norm", lambda: nn.LayerNorm(5), (6, 5), tokens=1),
    R("layer_norm_no_tokens", lambda: nn.LayerNorm(5), (5,)),
    R("layer_norm_no_bias", lambda: nn.LayerNorm(5, bias=False), (6, 5), tokens=1),
    R("layer_norm_two_axes", lambda: nn.LayerNorm((6, 5)), (6, 5)),
    R("layer_norm_flattened", lambda: nn.LayerNorm(5), (6, 5), flattened, tokens=1),
    R("layer_norm_channels_first", lambda: ChannelsFirst(6), (6, 5)),
    R("group_norm", lambda: nn.GroupNorm(2, 6), (6, 3, 5)),
    R("group_norm_no_tokens", lambda: nn.GroupNorm(2, 6), (6,)),
    R("group_norm_of_frames", lambda: nn.GroupNorm(2, 4), (3, 4, 5), flattened),
    R("instance_norm1d", lambda: nn.InstanceNorm1d(6, affine=True), (6, 5)),
    R("instance_norm2d", lambda: nn.InstanceNorm2d(6, affine=True), (6, 3, 5)),
]  # fmt: skip
LONG = torch.int64
EMBEDDINGS = [
    R("embedding", lambda: nn.Embedding(IDS, 4), (7,), ids=LONG, tokens=1),
    R("embedding_int32", lambda: nn.Embedding(IDS, 4), (7,), ids=torch.int32, tokens=1),
    R("embedding_no_tokens", lambda: nn.Embedding(IDS, 4), (), ids=LONG),
    R("embedding_more_axes", lambda: nn.Embedding(IDS, 4), (3, 2), ids=LONG, tokens=1),
    R("embedding_padding", lambda: nn.Embedding(IDS, 4, padding_idx=2), (7,), ids=LONG),
    R("embedding_batch_second", lambda: nn.Embedding(IDS, 4), (7,), batch_second, LONG),
    R("embedding_large", lambda: nn.Embedding(500, 4), (7,), ids=LONG),
    R("embedding_shared", lambda: nn.Embedding(7, 4), (7,), shared),
    R("embedding_shared_by_one", lambda: nn.Embedding(IDS, 4), (7,), shared_by_one),
    R("embedding_scaled", lambda: ScaledWords(IDS, 4, padding_idx=2), (7,), ids=LONG),
    R("embedding_of_positions", lambda: Positions(IDS, 4), (7,), ids=LONG),
    R("embedding_trains_padding", lambda: Padding(IDS, 4, padding_idx=2), (7,), ids=LONG),
    R("embedding_tied", Translator, (7,), ids=LONG, tokens=1),
    R("bag_sum", lambda: nn.EmbeddingBag(IDS, 4, mode="sum"), (7,), ids=LONG),
    R("bag_mean", lambda: nn.EmbeddingBag(IDS, 4, mode="mean"), (7,), ids=torch.int32),
    R("bag_mean_padding", lambda: nn.EmbeddingBag(IDS, 4, padding_idx=2), (7,), ids=LONG),
    R("bag_weights", WeightedBags, (7,), ids=LONG),
    R("bag_several", lambda: nn.EmbeddingBag(IDS, 4, padding_idx=2), (2, 3), flattened, LONG),
    R("bag_max", lambda: nn.EmbeddingBag(IDS, 4, mode="max"), (7,), ids=LONG, in_16_bit=False),
]
CONVOLUTIONS = [
    R("conv1d", lambda: nn.Conv1d(4, 6, 3), (4, 9)),
    R("conv1d_all", lambda: nn.Conv1d(4, 6, 3, 2, 2, dilation=2, groups=2), (4, 9)),
    R("conv1d_replicate", lambda: nn.Conv1d(4, 6, 3, padding=2, padding_mode="replicate"), (4, 6)),
    R("conv1d_standardised", lambda: Standardised(4, 6, 3, padding=1), (4, 6)),
    R("conv2d", lambda: nn.Conv2d(4, 6, 3), (4, 7, 6)),
    R("conv2d_rows", lambda: nn.Conv2d(16, 20, (1, 3), padding=(0, 1), bias=False), (16, 2, 6),
      tokens=2),
    R("conv2d_1x1", lambda: nn.Conv2d(4, 6, 1), (4, 4, 6), tokens=2),
    R("conv2d_one_pixel", lambda: nn.Conv2d(4, 6, 3, padding=1), (4, 1, 1)),
    R("conv2d_stride_padding", lambda: nn.Conv2d(4, 6, (3, 2), (2, 1), (1, 2)), (4, 7, 6)),
    R("conv2d_groups", lambda: nn.Conv2d(4, 6, 3, groups=2, bias=False), (4, 7, 6)),
    R("conv2d_depthwise", lambda: nn.Conv2d(4, 8, 3, groups=4, padding="same"), (4, 7, 6)),
    R("conv2d_dilation", lambda: nn.Conv2d(4, 6, 2, 2, dilation=(2, 3), groups=2), (4, 7, 6)),
    R("conv2d_circular", lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"), (4, 5, 6)),
    R("conv2d_valid", lambda: nn.Conv2d(4, 6, (2, 3), padding="valid"), (4, 6, 5)),
    R("conv2d_same_even", lambda: nn.Conv2d(4, 6, (2, 4), padding="same", padding_mode="reflect"),
      (4, 6, 5)),
    R("conv2d_channels_last",
      lambda: nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last), (4, 5, 6)),
    R("conv2d_own_arithmetic", lambda: OwnArithmetic(4, 6, 3), (4, 5, 6)),
    R("conv2d_of_frames", lambda: nn.Conv2d(2, 16, 3, padding=1), (3, 2, 5, 4), flattened),
    R("conv3d", lambda: nn.Conv3d(2, 4, (2, 1, 3), padding="same", padding_mode="circular"),
      (2, 3, 4, 5)),
    R("conv3d_stride", lambda: nn.Conv3d(2, 4, 2, 2, 1), (2, 3, 4, 5)),
    R("conv_transpose1d", lambda: nn.ConvTranspose1d(4, 6, 3, 2), (4, 5)),
    R("conv_transpose2d", lambda: nn.ConvTranspose2d(4, 6, 3, stride=2), (4, 4, 5)),
    R("conv_transpose2d_all", lambda: nn.ConvTranspose2d(4, 6, 3, 2, 1, 1, 2, dilation=2),
      (4, 4, 5)),
    R("conv_transpose2d_size", lambda: nn.ConvTranspose2d(3, 4, 3, stride=3), (3, 3, 4),
      lambda net, x: net.layer(x, output_size=(10, 13))),
    R("conv_transpose3d", lambda: nn.ConvTranspose3d(2, 3, 2), (2, 2, 3, 3)),
]  # fmt: skip
RECURRENT = [
    R("lstm", lambda: nn.LSTM(4, 5), (6, 4), time_first),
    R("lstm_all", lambda: nn.LSTM(4, 5, 2, batch_first=True, bidirectional=True, proj_size=3),
      (6, 4), with_states),
    R("lstm_projected_no_bias", lambda: nn.LSTM(4, 5, bias=False, proj_size=2), (6, 4), time_first),
    R("lstm_packed", lambda: nn.LSTM(4, 5, batch_first=True, bidirectional=True, proj_size=3),
      (6, 4), packed),
    R("lstm_smallest", lambda: nn.LSTM(1, 1, batch_first=True), (1, 1), first_of),
    R("lstm_flattened", lambda: nn.LSTM(4, 5, batch_first=True), (3, 6, 4),
      lambda net, x: net.layer(x.flatten(0, 1))[0].unflatten(0, x.shape[:2])),
    R("lstm_one_weight_in_two_layers", one_weight_in_two_layers, (6, 4), first_of),
    R("gru", lambda: nn.GRU(4, 5, batch_first=True), (6, 4), first_of),
    R("gru_all", lambda: nn.GRU(4, 5, 2, batch_first=True, bidirectional=True), (6, 4),
      with_states),
    R("gru_no_bias", lambda: nn.GRU(4, 5, bias=False), (6, 4), time_first),
    R("gru_packed", lambda: nn.GRU(4, 5, 2, batch_first=True, bidirectional=True), (6, 4), packed),
    R("rnn_all", lambda: nn.RNN(4, 5, 2, batch_first=True, bidirectional=True), (6, 4),
      with_states),
    R("rnn_relu_packed", lambda: nn.RNN(4, 5, nonlinearity="relu", batch_first=True), (6, 4),
      packed),
    R("opacus_lstm", lambda: DPLSTM(4, 5, 2, batch_first=True, bidirectional=True), (6, 4),
      with_states),
    R("opacus_lstm_packed", lambda: DPLSTM(4, 5, batch_first=True), (6, 4), packed),
    R("opacus_gru", lambda: DPGRU(4, 5, bias=False), (6, 4), time_first),
    R("opacus_rnn", lambda: DPRNN(4, 5, bidirectional=True, nonlinearity="relu"), (6, 4),
      time_first),
    R("lstm_cell", lambda: nn.LSTMCell(4, 5), (3, 4), loop),
    R("gru_cell", lambda: nn.GRUCell(4, 5, bias=False), (3, 4), loop),
    R("rnn_cell", lambda: nn.RNNCell(4, 5), (3, 4), loop),
    R("rnn_cell_relu", lambda: nn.RNNCell(4, 5, nonlinearity="relu"), (3, 4), loop),
]  # fmt: skip


def attention(name: str, call: dict, **options: Any) -> Record:
    options = {"batch_first": True} | options
    return R(
        name, lambda: nn.MultiheadAttention(8, 2, **options), (5, 8), partial(attend, **call)
    )  # fmt: skip


ATTENTION = [
    attention("attention", {}),
    attention("attention_causal", {"mask": True, "is_causal": True} | NO),
    attention("attention_batch_second", {"padding": True} | NO, batch_first=False),
    attention("attention_memory", {"memory": True, "numbers": True, "padding": True},
              add_zero_attn=True),
    attention("attention_memory_batch_second", {"memory": True, "mask": True} | NO,
              batch_first=False),
    attention("attention_no_bias", {"memory": True} | NO, bias=False),
    attention("attention_three", {"three": True, "memory": True, "average_attn_weights": False}),
    attention("attention_widths", {"three": True, "memory": True} | NO, kdim=6, vdim=4),
    attention("attention_widths_no_bias", {"three": True} | NO, kdim=6, vdim=4, bias=False),
    attention("attention_more_keys", {"memory": True, "padding": True, "mask": True},
              add_bias_kv=True, add_zero_attn=True),
    attention("attention_more_keys_batch_second", {"padding": True} | NO, add_bias_kv=True,
              batch_first=False),
    R("attention_windows", lambda: nn.MultiheadAttention(4, 2, batch_first=True, add_bias_kv=True),
      (6, 4), windows),
    R("attention_one_weight", one_weight_of_two_projections, (6, 4),
      lambda net, x: net.layer(x, x, x[..., :3])[0]),
    R("decoder_layer", lambda: nn.TransformerDecoderLayer(4, 2, 6, 0.0, batch_first=True), (6, 4),
      itself),
    R("transformer_batch_second", lambda: nn.Transformer(4, 2, 1, 1, 6, 0.0), (6, 4),
      lambda net, x: net.layer(x.transpose(0, 1), x.transpose(0, 1)).transpose(0, 1)),
]  # fmt: skip
OTHERS = [
    R("scalar", lambda: Scale(), (6, 5)),
    R("scale", lambda: Scale(5), (6, 5)),
    R("parameter_alone", lambda: Scale(5), (6, 5), times),
    R("parameter_list", lambda: nn.ParameterList(torch.randn(5, 3) for _ in range(3)), (6, 5),
      products),
    R("bilinear", lambda: nn.Bilinear(5, 5, 3), (6, 5), itself),
    R("prelu", lambda: nn.PReLU(6), (6, 5)),
    R("trained_mask", TrainedMask, (6, 4)),
    R("weight_norm", lambda: parametrizations.weight_norm(nn.Linear(5, 3, bias=False)), (6, 5)),
    R("weight_norm_of_embedding", lambda: parametrizations.weight_norm(nn.Embedding(IDS, 4)), (7,),
      ids=LONG),
    R("orthogonal", lambda: parametrizations.orthogonal(nn.Linear(5, 3)), (6, 5), in_16_bit=False),
    R("registered", lambda: Gate(5, 4), (6, 5)),
    R("registered_dense", lambda: Dense(5, 4), (6, 5)),
    R("registered_apart", lambda: Apart(5, 4), (6, 5), in_16_bit=False),
    R("registered_batch_second", lambda: Gate(5, 4), (6, 5), batch_second),
    R("embedding_few_rows", lambda: nn.Embedding(IDS, 4), (40,), ids=LONG),
]  # fmt: skip
RECORDS = (*LINEAR, *NORMS, *EMBEDDINGS, *CONVOLUTIONS, *RECURRENT, *ATTENTION, *OTHERS)
NUMBER = {record.name: n for n, record in enumerate(RECORDS)}
assert len(NUMBER) == len(RECORDS)
CASES = [
    pytest.param(record, id=record.name, marks=[
        pytest.mark.skipif(importlib.util.find_spec(need) is None, reason=f"needs {need}")
        for need in record.needs
    ])
    for record in RECORDS
]  # fmt: skip
ALIKE = {  # with code, and launches, that another record has too
    "linear_more_axes", "linear_flattened", "linear_subclass", "linear_subclass_twice",
    "linear_by_function", "conv1d_of_transformers_no_tokens", "rms_norm_t5", "rms_norm_olmo",
    "rms_norm_gemma", "layer_norm_no_bias", "layer_norm_flattened", "instance_norm1d",
    "group_norm_of_frames", "embedding_more_axes", "embedding_scaled", "embedding_of_positions",
    "embedding_trains_padding", "bag_several", "conv1d_replicate", "conv1d_standardised",
    "conv2d_circular", "conv2d_valid", "conv2d_own_arithmetic", "conv2d_of_frames",
    "conv3d_stride", "conv_transpose2d", "conv_transpose2d_size", "lstm_projected_no_bias",
    "lstm_flattened", "gru_no_bias", "gru_all", "rnn_all", "rnn_relu_packed", "opacus_lstm",
    "opacus_lstm_packed", "opacus_gru", "gru_cell", "rnn_cell", "rnn_cell_relu",
    "attention_causal", "attention_batch_second", "attention_memory",
    "attention_memory_batch_second", "attention_no_bias", "attention_three",
    "attention_widths_no_bias", "attention_more_keys_batch_second", "attention_one_weight",
    "transformer_batch_second", "weight_norm_of_embedding", "registered_batch_second",
}  # fmt: skip
assert NUMBER.keys() >= ALIKE
UNLIKE = [case for case in CASES if case.id not in ALIKE]
REST = [case for case in CASES if case.id in ALIKE]


def mode_of(record: Record, start: int = 0) -> str:
    """Returns a mode, another for the next record."""
    return REFERENCE[(NUMBER[record.name] + start) % len(REFERENCE)]


def cancelling(batch: Batch, dim: int | None, dtype: torch.dtype) -> Batch:
    """Returns samples whose gradients nearly cancel, or are large.

    The first is as it was, the next three have tokens of which the second half nearly undoes the
    first, and the last one's tokens are all the same, with large numbers.
    """
    x, y = (tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in batch)
    x, y = x.clone(), y.clone()
    y[4] *= 1024
    if dim is None or x.shape[dim] < 2:
        return x, y
    for tensor in (x, y):
        tensor[4] = tensor[4].narrow(dim - 1, 0, 1)
    x[4] *= 1024 if x.is_floating_point() else 1
    half = x.shape[dim] // 2
    for i, epsilon in ((1, 1e-1), (2, 1e-3), (3, 1e-5)):
        x[i].narrow(dim - 1, half, half).copy_(x[i].narrow(dim - 1, 0, half))
        first = y[i].narrow(dim - 1, 0, half).double()
        noise = 1 + epsilon * torch.randn(first.shape, dtype=torch.float64)
        y[i].narrow(dim - 1, half, half).copy_(-first * noise)
    return x, y


QUIET = [
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
    pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight"),
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN"),
    pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask"),
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True"),
]
