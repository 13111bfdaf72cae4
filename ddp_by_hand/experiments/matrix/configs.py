"""Tiny configurations of Hugging Face models: sizes are small, and every other setting is default.

A configuration class names its sizes in one of a few ways (`hidden_size`, `d_model`, `n_embd`).
`tiny_config` gives each size that a class has a small value; `OWN` are the exceptions.
"""

from __future__ import annotations

from typing import Any

VOCABULARY = 40
WIDTH, HEADS, DEPTH = 16, 2, 2


def names_in(text: str) -> list[str]:
    """Returns the names that are listed in a text."""
    return text.split()


_WIDTHS = names_in("""
    hidden_size d_model n_embd embed_dim dim embedding_size channels projection_dim
    decoder_hidden_size output_dim hidden_dim
""")
_INNER = names_in("""
    intermediate_size ffn_dim d_ff encoder_ffn_dim decoder_ffn_dim n_inner mlp_dim
    feed_forward_size ffn_hidden_size
""")
_DEPTHS = names_in("""
    num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers
    num_decoder_layers num_encoder_layers
""")
_HEADS = names_in("""
    num_attention_heads num_heads n_head n_heads encoder_attention_heads decoder_attention_heads
    num_key_value_heads
""")
SIZES: dict[str, int] = {
    **dict.fromkeys(_WIDTHS, WIDTH),
    **dict.fromkeys(_INNER, 24),
    **dict.fromkeys(_DEPTHS, DEPTH),
    **dict.fromkeys(_HEADS, HEADS),
    **dict.fromkeys(["head_dim", "d_kv"], WIDTH // HEADS),
    **dict.fromkeys(["max_position_embeddings", "n_positions"], 64),
    **dict.fromkeys(["num_local_experts", "num_experts", "n_routed_experts"], 4),
    **dict.fromkeys(["moe_intermediate_size", "shared_expert_intermediate_size"], 8),
    "num_experts_per_tok": 2,
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "image_size": 64,
    "num_frames": 4,
    "num_labels": 3,
}
LISTS: dict[str, int] = {  # every entry of a list of these
    **dict.fromkeys(["depths", "num_blocks", "layer_depths", "stage_num_blocks", "layers"], 1),
    **dict.fromkeys(["hidden_sizes", "embed_dims", "embed_dim", "conv_dim"], WIDTH),
    **dict.fromkeys(["num_heads", "num_attention_heads"], HEADS),
}

_MAMBA = {"mamba_n_heads": 2, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8}
_SPEECH = {"conv_dim": [16] * 7, "num_conv_pos_embeddings": 16, "classifier_proj_size": 16}
_MLA = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "head_dim": 4,
    "n_group": 1,
    "topk_group": 1,
}
_LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_hidden_layers": 4,
}
_WINDOWS = {"window_size": 2, "num_heads": [2, 2, 2, 2]}
_WORDS = {"emb_dim": WIDTH, "n_words": VOCABULARY}
OWN: dict[str, dict[str, Any]] = {
    "audio-spectrogram-transformer": {"max_length": 64, "num_mel_bins": 32},
    "bamba": _MAMBA | {"attn_layer_indices": [1]},
    "bit": {"num_groups": 4, "embedding_size": 16},
    "codegen": {"rotary_dim": 4, "n_head": 4, "n_embd": 32},
    "deepseek_v2": _MLA,
    "deepseek_v3": _MLA,
    "donut-swin": _WINDOWS,
    "efficientnet": {"width_coefficient": 0.1, "depth_coefficient": 0.1, "hidden_dim": 64},
    "falcon": {"head_dim": ...},
    "falcon_h1": _MAMBA | {"mamba_d_ssm": 32},
    "flaubert": _WORDS,
    "funnel": {"block_sizes": [1, 1], "num_hidden_layers": ..., "num_decoder_layers": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": _MAMBA | {"layer_types": ["mamba", "attention"]},
    "hiera": {"image_size": [64, 64], "embed_dim": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4},
    "layoutlmv3": {"coordinate_size": 2, "shape_size": 4, "input_size": 64},
    "levit": {"hidden_sizes": [64, 64, 64], "key_dim": [8, 8, 8]},
    "luke": {"entity_vocab_size": 10, "entity_emb_size": WIDTH},
    "mamba2": {"num_heads": 4, "head_dim": 8, "n_groups": 1, "state_size": 8},
    "nemotron_h": {"mamba_num_heads": 2, "mamba_head_dim": 16, "n_groups": 1, "ssm_state_size": 8},
    "prophetnet": {"num_hidden_layers": ..., "num_encoder_layers": 2, "num_decoder_layers": 2},
    "qwen3_5_moe_text": _LINEAR,
    "qwen3_5_text": _LINEAR,
    "qwen3_next": _LINEAR,
    "recurrent_gemma": {"num_hidden_layers": 3, "lru_width": WIDTH},
    "swin": _WINDOWS,
    "swinv2": _WINDOWS,
    "vivit": {"tubelet_size": [2, 16, 16]},
    "whisper": {"max_source_positions": 32, "num_mel_bins": 8},
    "xlm": _WORDS,
    "xlnet": {"max_position_embeddings": ...},
    **dict.fromkeys(
        ["data2vec-audio", "hubert", "unispeech", "unispeech-sat", "wav2vec2",
         "wav2vec2-conformer", "wavlm"], _SPEECH,
    ),
}  # fmt: skip
"""Sizes of a model type that follow from others or have their own names; `...` is its default."""


def tiny_config(kind: str, **own: Any) -> Any:
    """Returns the configuration of a model type with small sizes and else its default settings."""
    import transformers

    return _tiny(transformers.CONFIG_MAPPING[kind], OWN.get(kind, {}) | own)


def _tiny(config_class: type, own: dict[str, Any]) -> Any:
    default: Any = config_class()
    found: dict[str, Any] = {}
    for name in config_class.sub_configs:
        part = getattr(default, name, None)
        if part is not None and not isinstance(part, dict):
            found[name] = _tiny(type(part), {})
    for name in {**SIZES, **LISTS}:
        if name in config_class.attribute_map or name in own:
            continue
        try:
            value = getattr(default, name)
        except Exception:  # it has none, or one per layer
            continue
        if name in LISTS and isinstance(value, list | tuple):
            found[name] = [LISTS[name]] * len(value)
        elif name in SIZES and not isinstance(value, list | tuple | dict):
            found[name] = SIZES[name]
    return config_class(**{name: x for name, x in (found | own).items() if x is not ...})
