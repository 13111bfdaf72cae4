"""The networks that experiments take: shapes of known models, random weights in bfloat16."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from ddp_by_hand.experiments.attention import register_attention
from ddp_by_hand.experiments.llama_fsdp.network import SHAPES, LlamaShape
from ddp_by_hand.experiments.rounds import Row


@dataclass(frozen=True)
class Model:
    """A Llama for sequence classification, `nn.RMSNorm` in place of the library's own.

    Attributes:
        layers: default number of decoder layers.
        rows: the batches that it is measured with on one GPU.
    """

    shape: LlamaShape
    layers: int
    rows: tuple[Row, ...]

    def build(self, layers: int, device: torch.device) -> nn.Module:
        from transformers import LlamaForSequenceClassification

        config = self.shape.config(layers)
        config._attn_implementation = register_attention()
        with torch.device(device):
            network = LlamaForSequenceClassification(config).to(torch.bfloat16)
            for module in list(network.modules()):
                for name, child in list(module.named_children()):
                    if type(child).__name__ == "LlamaRMSNorm":
                        norm = nn.RMSNorm(child.weight.shape[0], eps=child.variance_epsilon)
                        setattr(module, name, norm.to(torch.bfloat16))
        return network.train()


ROWS_OF_8B = (Row(8, 512), Row(4, 1024), Row(2, 2048), Row(2, 4096), Row(1, 8192))
MODELS = {
    "llama-3.2-1b": Model(
        SHAPES["llama-3.2-1b"], layers=16,
        rows=(Row(16, 512), Row(8, 1024), Row(4, 2048), Row(4, 4096), Row(2, 8192)),
    ),
    "llama-3.1-8b-block": Model(SHAPES["llama-3.1-8b"], layers=4, rows=ROWS_OF_8B),
    "llama-3.1-8b": Model(SHAPES["llama-3.1-8b"], layers=32, rows=ROWS_OF_8B),
    "tiny": Model(SHAPES["tiny"], SHAPES["tiny"].layers, rows=(Row(4, 32),)),
}  # fmt: skip


def compile_layers(network: nn.Module) -> None:
    """Compiles each decoder layer on its own, in place.

    They share one compiled graph unless hooks split it, as Opacus's do; it then needs some for
    each, and beyond its limit the compiler leaves layers as they are with a line in a log.
    """
    layers = network.model.layers
    torch._dynamo.config.recompile_limit = max(
        torch._dynamo.config.recompile_limit, 4 * len(layers)
    )
    for layer in layers:
        layer.compile()
