"""Language models of Hugging Face, on padded sequences of token ids."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from ddp_by_hand.experiments.matrix.configs import VOCABULARY, names_in, tiny_config
from ddp_by_hand.experiments.matrix.trial import SAMPLES, Row, Subject, subject_of

LENGTH = 7
CAUSAL = names_in("""
    afmoe apertus arcee aria_text axk2 bamba biogpt bitnet bloom codegen cohere cohere2
    cohere2_moe cpmant ctrl cwm deepseek_v2 deepseek_v3 deepseek_v4 diffllama doge ernie4_5
    ernie4_5_moe exaone4 exaone_moe falcon falcon_h1 falcon_mamba flex_olmo gemma gemma2
    gemma3_text gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite gpt-sw3 gpt2 gpt_bigcode
    gpt_neo gpt_neox gpt_neox_japanese gpt_oss gptj granite granitemoe granitemoehybrid
    granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 internlm3 jais2 jamba jetmoe
    laguna lfm2 llama llama4_text mamba mamba2 minicpm3 minimax minimax_m2 ministral ministral3
    mistral mixtral modernbert-decoder mpt nanochat nemotron nemotron_h olmo olmo2 olmo3
    olmo_hybrid olmoe openai-gpt opt persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3
    qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next recurrent_gemma roberta rwkv seed_oss
    smollm3 solar_open stablelm starcoder2 trocr vaultgemma xglm xlm xlnet
""")
MASKED = names_in("""
    albert bart bert big_bird camembert convbert data2vec-text deberta deberta-v2 distilbert
    electra ernie esm eurobert flaubert fnet funnel ibert longformer luke mbart megatron-bert
    mobilebert modernbert mpnet mra nomic_bert nystromformer rembert roberta
    roberta-prelayernorm roformer squeezebert tapas xlm xlm-roberta xlm-roberta-xl yoso
""")
SEQUENCES = names_in("""
    bart bigbird_pegasus blenderbot blenderbot-small encoder-decoder fsmt led longt5 m2m_100
    marian mbart mt5 mvp nllb-moe pegasus pegasus_x plbart prophetnet seamless_m4t_v2
    switch_transformers t5 t5gemma umt5
""")


def rows() -> Iterator[Row]:
    from transformers.models.auto import modeling_auto as auto

    for section, kinds, mapping in (
        ("Causal language models", CAUSAL, auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        ("Masked language models", MASKED, auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
        ("Encoder-decoder models", SEQUENCES, auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
    ):
        for kind in kinds:
            yield Row(section, kind, partial(language_model, kind, mapping))


def language_model(kind: str, mapping: dict[str, Any]) -> Subject:
    """Returns a language model with sequences of 7, 6 and 5 tokens, padded on the right."""
    import transformers

    name = mapping[kind]
    network = getattr(transformers, name if isinstance(name, str) else name[0])(tiny_config(kind))
    return subject_of(network, token_inputs(network))


def token_inputs(network: Any) -> dict[str, torch.Tensor]:
    """Returns token ids [SAMPLES, LENGTH] for a model, its mask and its decoder's tokens."""
    ids = torch.randint(3, VOCABULARY - 1, (SAMPLES, LENGTH))
    mask = torch.arange(LENGTH) < (LENGTH - torch.arange(SAMPLES) % 3)[:, None]
    inputs = {"input_ids": ids.where(mask, 0)}
    if "attention_mask" in inspect.signature(network.forward).parameters:
        inputs["attention_mask"] = mask.long()
    if network.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids
    return inputs
