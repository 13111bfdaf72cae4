"""PEFT's adapters of a tiny Llama: every kind of tuner, in its default settings but for ranks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from ddp_by_hand.experiments.matrix.configs import tiny_config
from ddp_by_hand.experiments.matrix.text import token_inputs
from ddp_by_hand.experiments.matrix.trial import Row, Subject, subject_of

TARGETS = {"target_modules": ["q_proj", "v_proj"]}
RANK = TARGETS | {"r": 2}
TOKENS: dict[str, Any] = {"num_virtual_tokens": 3}
OPTIONS: dict[str, dict[str, Any]] = {
    "AdaLora": RANK | {"total_step": 100},
    "AdaptionPrompt": {"adapter_len": 3, "adapter_layers": 1},
    "Beft": TARGETS,
    "BOFT": TARGETS,
    "C3A": TARGETS | {"block_size": 8},
    "Deft": RANK,
    "Delora": RANK,
    "FourierFT": TARGETS | {"n_frequency": 10},
    "Frod": TARGETS,
    "Glora": RANK,
    "Gralora": RANK,
    "Hira": RANK,
    "HRA": RANK,
    "IA3": TARGETS | {"target_modules": ["k_proj", "v_proj", "down_proj"],
                      "feedforward_modules": ["down_proj"]},
    "Lily": RANK,
    "LNTuning": {"target_modules": ["input_layernorm", "post_attention_layernorm"]},
    "LoHa": RANK,
    "LoKr": RANK,
    "Lora": RANK,
    "Lora, use_dora=True": RANK | {"use_dora": True},
    "Miss": RANK,
    "MultitaskPromptTuning": TOKENS | {"num_tasks": 2},
    "OFT": TARGETS | {"oft_block_size": 4},
    "OSF": TARGETS | {"effective_rank": 4},
    "Peanut": RANK,
    "Poly": RANK,
    "PrefixTuning": TOKENS,
    "PromptEncoder": TOKENS | {"encoder_hidden_size": 16},
    "PromptTuning": TOKENS,
    "Psoft": RANK,
    "Pvera": RANK,
    "RandLora": RANK,
    "Road": TARGETS | {"group_size": 4},
    "Shira": RANK,
    "TinyLora": RANK,
    "TrainableTokens": {"token_indices": [3, 4, 5]},
    "UniLora": RANK,
    "VBLoRA": RANK | {"num_vectors": 8, "vector_length": 8},
    "Vera": RANK,
    "WaveFT": TARGETS | {"n_frequency": 10},
}  # fmt: skip
"""Name of PEFT's configuration class, without `Config` -> its options."""


def rows() -> Iterator[Row]:
    for name in OPTIONS:
        yield Row("Adapters of a causal language model", name, partial(adapted, name))


def adapted(name: str) -> Subject:
    import peft
    import torch
    import transformers

    network = transformers.LlamaForCausalLM(tiny_config("llama"))
    inputs = token_inputs(network)
    kind = getattr(peft, f"{name.partition(',')[0]}Config")
    config = kind(task_type="CAUSAL_LM", **OPTIONS[name])
    network = peft.get_peft_model(network, config)
    if name in ("MultitaskPromptTuning", "Poly"):
        inputs["task_ids"] = torch.zeros(len(inputs["input_ids"]), dtype=torch.long)
    return subject_of(network, inputs)
