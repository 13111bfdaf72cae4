"""A Llama for sequence classification, sharded by FSDP2 before it has any weights.

The network is made on the meta device, where parameters have shapes and no memory; `fully_shard`
divides them; then every rank draws, or reads, one parameter after the other and keeps its part. At
no time does a GPU hold the whole model.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, distribute_tensor

from ddp_by_hand.experiments.attention import register_attention
from ddp_by_hand.lm.parallel import DATA, materialize, shard_fully
from ddp_by_hand.measure.extras import require

if TYPE_CHECKING:
    from transformers import PretrainedConfig

LABELS = 3
PAD = 0  # never drawn: every token of a batch counts
TOKEN = "HF_TOKEN"  # read here, and written nowhere
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@dataclass(frozen=True)
class LlamaShape:
    """The sizes of a Llama; weights are random."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_value_heads: int
    vocabulary: int

    def config(self, layers: int | None = None) -> PretrainedConfig:
        """Returns the config, with another number of layers if one is given."""
        from transformers import LlamaConfig

        return _for_classes(LlamaConfig(
            vocab_size=self.vocabulary, hidden_size=self.hidden,
            intermediate_size=self.intermediate, num_hidden_layers=layers or self.layers,
            num_attention_heads=self.heads, num_key_value_heads=self.key_value_heads,
            max_position_embeddings=131_072,
        ))  # fmt: skip


SHAPES = {
    "llama-3.1-8b": LlamaShape(4096, 14_336, 32, 32, 8, 128_256),
    "llama-3.2-1b": LlamaShape(2048, 8192, 16, 32, 8, 128_256),
    "tiny": LlamaShape(64, 160, 2, 4, 2, 512),
}


def config_of(name: str) -> PretrainedConfig:
    """Returns the config of a built-in shape, a folder or a Hugging Face name.

    Raises:
        ValueError: it is none of them, or not to be had.
    """
    require("transformers")
    import transformers

    if name in SHAPES:
        return SHAPES[name].config()
    try:
        with _quiet_hub():
            config = transformers.AutoConfig.from_pretrained(name, token=os.environ.get(TOKEN))
    except Exception as error:  # the library raises many kinds
        text = without_token(str(error)).strip().splitlines()[0]
        raise ValueError(
            f"--model-name {name!r} is neither one of {', '.join(SHAPES)} nor a model that "
            f"could be read ({text}); gated models need {TOKEN} in the environment"
        ) from None
    return _for_classes(config)


def _for_classes(config: PretrainedConfig) -> PretrainedConfig:
    config.num_labels, config.pad_token_id, config.use_cache = LABELS, PAD, False
    return config


def random_batch(
    size: tuple[int, int], vocabulary: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Makes random tokens [B, T] and labels [B] on the generator's device."""
    where: Any = {"generator": generator, "device": generator.device}
    tokens = torch.randint(PAD + 1, vocabulary, size, **where)
    return tokens, torch.randint(LABELS, size[:1], **where)


@contextmanager
def _quiet_hub() -> Iterator[None]:
    """Silences the library's line per attempt; the final error says what failed."""
    log = logging.getLogger("huggingface_hub")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def on_meta(config: PretrainedConfig, train_embedding: bool) -> nn.Module:
    """Builds the network on the meta device, in float32; freezes the token embedding by default."""
    from transformers import AutoModelForSequenceClassification

    attention = register_attention() if config.model_type == "llama" else "sdpa"
    with torch.device("meta"):
        network = AutoModelForSequenceClassification.from_config(
            config, attn_implementation=attention
        ).to(torch.float32)
    network.get_input_embeddings().weight.requires_grad_(train_embedding)
    return network.train()


def build(
    name: str | None,
    config: PretrainedConfig,
    device: torch.device,
    seed: int,
    train_embedding: bool,
    group: dist.ProcessGroup | None = None,
) -> nn.Module:
    """Builds the network sharded over the group (None: all ranks), on this rank's device.

    Weights depend on the seed, or on the files of a `name` that is no built-in shape, not on the
    number of ranks.

    Shards are float32; on GPUs layers compute in bfloat16 and gradients are reduced in float32.
    """
    network = on_meta(config, train_embedding)
    mesh = DeviceMesh.from_group(group or dist.group.WORLD, device.type, mesh_dim_names=(DATA,))
    shard_fully(network, mesh, mixed_precision=HALF if device.type == "cuda" else None)
    torch.manual_seed(seed)
    std = getattr(config, "initializer_range", 0.02)
    materialize(network, device, reset=lambda: _draw(network, std))
    _rebuild_buffers(network, config, device)
    if name not in (None, *SHAPES):
        _load(network, files_of(name))
    return network


def _draw(network: nn.Module, std: float) -> None:
    """Initialises parameters: matrices normal, scales 1, biases 0."""
    for name, parameter in network.named_parameters():
        if parameter.dim() > 1:
            parameter.normal_(0.0, std)
        else:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)


def _rebuild_buffers(network: nn.Module, config: PretrainedConfig, device: torch.device) -> None:
    """Computes buffers such as rotary tables from the config, since no file has them."""
    for name, module in network.named_modules():
        buffers = dict(module.named_buffers(recurse=False))
        if not buffers:
            continue
        try:
            fresh = dict(type(module)(config).named_buffers(recurse=False))
        except Exception:  # other signatures, other needs
            fresh = {}
        for key, buffer in buffers.items():
            if key not in fresh:
                raise ValueError(
                    f"buffer {name}.{key} ({type(module).__name__}) does not follow from the "
                    "config: this experiment is for Llama and models built like it"
                )
            buffer.copy_(fresh[key].to(device))


def files_of(name: str) -> list[Path]:
    """Returns the weight files of a folder or a Hugging Face name; downloads them if necessary.

    Raises:
        ValueError: there are none that could be had.
    """
    folder = Path(name)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        options = {"allow_patterns": ["*.safetensors"], "ignore_patterns": ["original/*"]}
        try:
            with _quiet_hub():
                folder = Path(snapshot_download(name, token=os.environ.get(TOKEN), **options))
        except Exception as error:  # the library raises many kinds
            text = without_token(str(error)).strip().splitlines()[0]
            raise ValueError(f"--model-name {name!r}: no weights to be had ({text})") from None
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"--model-name {name!r}: no .safetensors file there")
    return files


@torch.no_grad()
def _load(network: nn.Module, files: list[Path]) -> None:
    """Loads tensor by tensor on each rank; what the files lack (the head) stays random."""
    from safetensors import safe_open

    wanted = dict(network.named_parameters())
    found = 0
    for file in files:
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                if (parameter := wanted.get(name)) is not None:
                    _fill(parameter, tensors.get_tensor(name), name)
                    found += 1
    if not found:
        raise ValueError(f"{files[0].parent}: its tensors have none of this network's names")


def _fill(parameter: Any, value: Tensor, name: str) -> None:
    if parameter.shape != value.shape:
        raise ValueError(
            f"{name} is {list(value.shape)} in the file and {list(parameter.shape)} by the config"
        )
    if isinstance(parameter, DTensor):
        value = value.to(parameter.device, parameter.dtype)
        value = distribute_tensor(
            value, parameter.device_mesh, parameter.placements, src_data_rank=None
        )  # None: all ranks have read the same, nothing is sent
    parameter.copy_(value)


def without_token(text: str) -> str:
    """Replaces the access token in a text by ***."""
    token = os.environ.get(TOKEN)
    return text.replace(token, "***") if token else text
