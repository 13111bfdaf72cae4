"""The rows: networks with their batches, at the size that is measured and in small.

All are trained from random weights on random data, without dropout. Each row names its batch, and
the dtype of its parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_by_hand.experiments.attention import register_attention
from ddp_by_hand.experiments.llama_fsdp.network import LABELS, SHAPES
from ddp_by_hand.experiments.networks.diffusion import UNet
from ddp_by_hand.experiments.networks.models import (
    AudioEncoder,
    ConvNeXt,
    LSTMClassifier,
    MobileNet,
    ResNet18,
    TableNet,
    TransformerClassifier,
    VideoResNet,
    WideResNet,
)
from ddp_by_hand.experiments.price.models import MODELS

NO_DROPOUT = {
    "bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "t5": {"dropout_rate": 0.0},
}


class Task(NamedTuple):
    """A network and a batch: `inputs` are the arguments of its forward.

    `criterion` takes the outputs and the targets; it has a `reduction`.
    """

    network: nn.Module
    inputs: tuple[Tensor, ...] | dict[str, Tensor]
    targets: Tensor
    criterion: nn.Module


@dataclass(frozen=True)
class NetworkRow:
    """A network at full size and in small.

    Attributes:
        batch: the batch at full size, and the dtype.
        dtype: the dtype of parameters and inputs that are no integers.
    """

    name: str
    batch: str
    dtype: torch.dtype
    full: Callable[[], Task]
    small: Callable[[], Task]

    def build(self, is_small: bool, device: torch.device) -> Task:
        """Returns the same weights and data each time."""
        torch.manual_seed(0)
        with torch.device(device):
            network, inputs, targets, criterion = self.small() if is_small else self.full()
        if isinstance(inputs, dict):
            inputs = {name: self._cast(value) for name, value in inputs.items()}
        else:
            inputs = tuple(map(self._cast, inputs))
        return Task(network.to(self.dtype).train(), inputs, self._cast(targets), criterion)

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor

    def __str__(self) -> str:
        return self.name


class SampleMean(nn.Module):
    """A loss [B, ...] of entries whose mean over a sample is the sample's loss."""

    def __init__(self, of_entries: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.of_entries, self.reduction = of_entries, "mean"

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        losses = self.of_entries(outputs, targets).flatten(1).mean(1)
        return losses if self.reduction == "none" else losses.mean()


def next_tokens(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns the cross entropy [B, T] of logits [B, T, V]."""
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return losses.view(targets.shape)


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square()


def classifier(network: nn.Module, classes: int, samples: int, *shape: int) -> Task:
    """Returns the classification of normal numbers [B, *shape]."""
    targets = torch.randint(classes, (samples,))
    return Task(network, (torch.randn(samples, *shape),), targets, nn.CrossEntropyLoss())


def vit(samples: int, side: int, **sizes: int) -> Task:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=side, num_labels=10, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, **sizes,
    )  # fmt: skip
    images = {"pixel_values": torch.randn(samples, 3, side, side)}
    targets = torch.randint(10, (samples,))
    return Task(ViTForImageClassification(config), images, targets, nn.CrossEntropyLoss())


def token_classifier(network: nn.Module, vocabulary: int, samples: int, length: int) -> Task:
    tokens = torch.randint(1, vocabulary, (samples, length))
    targets = torch.randint(2, (samples,))
    inputs = (tokens,) if isinstance(network, LSTMClassifier) else {"input_ids": tokens}
    return Task(network, inputs, targets, nn.CrossEntropyLoss())


def packed_classifier(network: nn.Module, vocabulary: int, samples: int, length: int) -> Task:
    """Returns the classification of sequences from a quarter of this length on."""
    task = token_classifier(network, vocabulary, samples, length)
    lengths = torch.randint(length // 4, length + 1, (samples,))
    return task._replace(inputs=(*task.inputs, lengths))


def bert(samples: int, length: int, **sizes: int) -> Task:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(num_labels=2, **NO_DROPOUT["bert"], **sizes)
    return token_classifier(
        BertForSequenceClassification(config), config.vocab_size, samples, length
    )


def llama(shape: str, layers: int, samples: int, length: int) -> Task:
    model = replace(MODELS["llama-3.2-1b"], shape=SHAPES[shape])
    network = model.build(layers, torch.get_default_device())
    task = token_classifier(network, model.shape.vocabulary, samples, length)
    return task._replace(targets=torch.randint(LABELS, (samples,)))


def gpt2(samples: int, length: int, **sizes: int) -> Task:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(use_cache=False, **NO_DROPOUT["gpt2"], **sizes)
    config._attn_implementation = register_attention()
    tokens = torch.randint(config.vocab_size, (samples, length + 1))
    network, inputs = GPT2LMHeadModel(config), {"input_ids": tokens[:, :-1]}
    return Task(network, inputs, tokens[:, 1:], SampleMean(next_tokens))


def t5(samples: int, length: int, answer: int, **sizes: int) -> Task:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(use_cache=False, **NO_DROPOUT["t5"], **sizes)
    targets = torch.randint(1, config.vocab_size, (samples, answer + 1))
    inputs = {
        "input_ids": torch.randint(1, config.vocab_size, (samples, length)),
        "decoder_input_ids": targets[:, :-1],
    }
    network = T5ForConditionalGeneration(config)
    return Task(network, inputs, targets[:, 1:], SampleMean(next_tokens))


def diffusion(width: int, samples: int, side: int) -> Task:
    images, noise = torch.randn(2, samples, 3, side, side)
    return Task(UNet(width), (images, torch.rand(samples)), noise, SampleMean(squares))


def table(samples: int, columns: int, categories: int, **sizes: int) -> Task:
    """Makes a tabular task: numbers, and bags of three categories per column."""
    network = TableNet(columns=columns, categories=categories, **sizes)
    bags = torch.randint(categories, (samples, columns, 3))
    targets = torch.randint(2, (samples,))
    return Task(network, (torch.randn(samples, 13), bags), targets, nn.CrossEntropyLoss())


_SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
          "intermediate_size": 64}  # fmt: skip
_BF16, _FP32 = torch.bfloat16, torch.float32
# fmt: off
_ROWS = (
    NetworkRow("wide_resnet_16_4", "512 x 3 x 32 x 32, float32", _FP32,
        lambda: classifier(WideResNet(16, 4), 10, 512, 3, 32, 32),
        lambda: classifier(WideResNet(10, 1), 10, 4, 3, 8, 8)),
    NetworkRow("resnet18", "128 x 3 x 224 x 224, bfloat16", _BF16,
        lambda: classifier(ResNet18(), 1000, 128, 3, 224, 224),
        lambda: classifier(ResNet18(8, 10), 10, 4, 3, 32, 32)),
    NetworkRow("vit_b16", "128 x 3 x 224 x 224, bfloat16", _BF16,
        lambda: vit(128, 224), lambda: vit(4, 16, patch_size=4, **_SMALL)),
    NetworkRow("bert_base", "64 x 128 tokens, bfloat16", _BF16,
        lambda: bert(64, 128), lambda: bert(4, 8, vocab_size=50, **_SMALL)),
    NetworkRow("gpt2_small", "16 x 1024 tokens, bfloat16", _BF16,
        lambda: gpt2(16, 1024), lambda: gpt2(
            4, 8, vocab_size=50, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)),
    NetworkRow("llama_1b", "16 x 512 tokens, nn.RMSNorm, bfloat16", _BF16,
        lambda: llama("llama-3.2-1b", 16, 16, 512), lambda: llama("tiny", 2, 4, 8)),
    NetworkRow("convnext_t", "128 x 3 x 224 x 224, bfloat16", _BF16,
        lambda: classifier(ConvNeXt(), 1000, 128, 3, 224, 224),
        lambda: classifier(ConvNeXt(16, (1, 1), 10), 10, 4, 3, 32, 32)),
    NetworkRow("mobilenet", "128 x 3 x 224 x 224, bfloat16", _BF16,
        lambda: classifier(MobileNet(), 1000, 128, 3, 224, 224),
        lambda: classifier(MobileNet(8, 10, 1), 10, 4, 3, 32, 32)),
    NetworkRow("audio_encoder", "16 x 64,000 samples of sound, bfloat16", _BF16,
        lambda: classifier(AudioEncoder(), 35, 16, 1, 64_000),
        lambda: classifier(AudioEncoder(16, 32, 1, 2, 5), 5, 4, 1, 1600)),
    NetworkRow("diffusion_unet", "64 x 3 x 32 x 32, float32", _FP32,
        lambda: diffusion(128, 64, 32), lambda: diffusion(16, 4, 8)),
    NetworkRow("t5_small", "32 x 512 to 128 tokens, bfloat16", _BF16,
        lambda: t5(32, 512, 128),
        lambda: t5(4, 8, 6, vocab_size=50, num_layers=1, num_heads=2, d_model=32, d_kv=16,
            d_ff=64)),
    NetworkRow("lstm", "64 x 128 tokens, float32", _FP32,
        lambda: token_classifier(LSTMClassifier(), 20_000, 64, 128),
        lambda: token_classifier(LSTMClassifier(50, 16, 1), 50, 4, 8)),
    NetworkRow("lstm_packed", "64 x 32 to 128 tokens, float32", _FP32,
        lambda: packed_classifier(LSTMClassifier(), 20_000, 64, 128),
        lambda: packed_classifier(LSTMClassifier(50, 16, 1), 50, 4, 8)),
    NetworkRow("transformer_encoder", "64 x 128 tokens, bfloat16", _BF16,
        lambda: token_classifier(TransformerClassifier(), 20_000, 64, 128),
        lambda: token_classifier(TransformerClassifier(50, 16, 2), 50, 4, 8)),
    NetworkRow("table", "1024 x 26 bags of categories and 13 numbers, float32", _FP32,
        lambda: table(1024, 26, 10_000), lambda: table(4, 3, 20, width=4, hidden=16)),
    NetworkRow("video_resnet18", "16 x 3 x 16 x 112 x 112, bfloat16", _BF16,
        lambda: classifier(VideoResNet(), 400, 16, 3, 16, 112, 112),
        lambda: classifier(VideoResNet(8, 5, 1), 5, 4, 3, 4, 16, 16)),
)
# fmt: on
ROWS = {row.name: row for row in _ROWS}
