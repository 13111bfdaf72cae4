"""Models of Hugging Face for images, video, sound, and images with text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ddp_by_hand.experiments.matrix.configs import VOCABULARY, names_in, tiny_config
from ddp_by_hand.experiments.matrix.text import LENGTH, token_inputs
from ddp_by_hand.experiments.matrix.trial import SAMPLES, Row, Subject, subject_of

SIDE = 64  # of an image
FRAMES = 6400  # of sound, after which 19 are left
IMAGES = names_in("""
    beit bit clip convnext convnextv2 cvt data2vec-vision deit dinov2 dinov2_with_registers
    donut-swin focalnet hiera ijepa imagegpt levit metaclip_2 mobilenet_v1 mobilenet_v2
    mobilevit mobilevitv2 poolformer pvt pvt_v2 regnet resnet segformer siglip swiftformer swin
    swinv2 vit vit_msn
""")
VIDEOS = names_in("""
    timesformer videomae vivit
""")
WAVES = names_in("""
    data2vec-audio hubert sew sew-d unispeech unispeech-sat wav2vec2 wav2vec2-conformer wavlm
""")
SOUNDS = [name for name in WAVES if name != "sew-d"]  # whose outcome depends on what is drawn
SOUNDS += ["audio-spectrogram-transformer", "whisper"]


def rows() -> Iterator[Row]:
    from transformers.models.auto import modeling_auto as auto

    images, ctc = (
        auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
        auto.MODEL_FOR_CTC_MAPPING_NAMES,
    )
    sounds = auto.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES
    videos = auto.MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING_NAMES
    for section, kinds, mapping, inputs_of in (
        ("Image classifiers", IMAGES, images, image_inputs),
        ("Video classifiers", VIDEOS, videos, video_inputs),
        ("Speech recognition (CTC)", [*WAVES, "wav2vec2-bert"], ctc, sound_inputs),
        ("Sound classifiers", SOUNDS, sounds,
         sound_inputs),
    ):  # fmt: skip
        for kind in kinds:
            yield Row(section, kind, partial(_build, kind, mapping[kind], inputs_of))
    for kind, (name, inputs_of, outputs_of) in TOGETHER.items():
        build = partial(_build, kind, name, inputs_of, outputs_of)
        yield Row("Several senses", kind, build)


def _build(
    kind: str, name: Any, inputs_of: Callable, outputs_of: Callable = lambda outputs: outputs.logits
) -> Subject:
    import transformers

    name = name if isinstance(name, str) else name[0]
    network = getattr(transformers, name)(tiny_config(kind, **CONFIGS.get(kind, {})))
    return subject_of(network, inputs_of(network), outputs_of)


def image_inputs(network: Any) -> dict[str, Tensor]:
    if network.config.model_type == "imagegpt":  #: colours of 64 pixels
        return {"input_ids": torch.randint(VOCABULARY - 1, (SAMPLES, 64))}
    return {"pixel_values": torch.randn(SAMPLES, 3, SIDE, SIDE)}


def video_inputs(network: Any) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(SAMPLES, network.config.num_frames, 3, SIDE, SIDE)}


def sound_inputs(network: Any) -> dict[str, Tensor]:
    config, name = network.config, network.main_input_name
    shapes = {
        "audio-spectrogram-transformer": ("max_length", "num_mel_bins"),
        "whisper": ("num_mel_bins", "max_source_positions"),
    }
    if config.model_type in shapes:
        shape = [getattr(config, size) for size in shapes[config.model_type]]
        shape[-1] *= 2 if config.model_type == "whisper" else 1
    elif name == "input_features":
        shape = [32, config.feature_projection_input_dim]
    else:
        shape = [FRAMES]
    return {name: torch.randn(SAMPLES, *shape)}


def speech_inputs(network: Any) -> dict[str, Tensor]:
    tokens = torch.randint(3, VOCABULARY - 1, (SAMPLES, LENGTH))
    return sound_inputs(network) | {"decoder_input_ids": tokens}


def image_and_text(network: Any) -> dict[str, Tensor]:
    return token_inputs(network) | image_inputs(network)


def image_in_text(network: Any, count: int) -> dict[str, Tensor]:
    """Returns text that begins with an image, which has so many tokens."""
    inputs = token_inputs(network)
    image = torch.full((SAMPLES, count), network.config.image_token_id)
    ids = torch.cat([image, inputs["input_ids"]], 1)
    mask = torch.cat([torch.ones_like(image), inputs["attention_mask"]], 1)
    kinds = {"token_type_ids": (ids == network.config.image_token_id).long()}
    inputs |= {"input_ids": ids, "attention_mask": mask} | image_inputs(network)
    return inputs | (kinds if network.config.model_type == "gemma3" else {})


def boxes(network: Any) -> dict[str, Tensor]:
    corners = torch.randint(1, 10, (SAMPLES, LENGTH, 2))
    return token_inputs(network) | {"bbox": torch.cat([corners, corners + 5], 2)}


_IMAGE_TOKEN = {"image_token_id": VOCABULARY - 1}
CONFIGS: dict[str, dict[str, Any]] = {
    "gemma3": _IMAGE_TOKEN | {"mm_tokens_per_image": 4},
    "internvl": _IMAGE_TOKEN,
}
_logits: Callable[[Any], Tensor] = lambda outputs: outputs.logits  # noqa: E731
_similar: Callable[[Any], Tensor] = lambda outputs: outputs.logits_per_image  # noqa: E731
TOGETHER: dict[str, tuple[str, Callable, Callable]] = {
    **{
        kind: (f"{name}Model", image_and_text, _similar)
        for kind, name in {"altclip": "AltCLIP", "chinese_clip": "ChineseCLIP", "clip": "CLIP",
                           "metaclip_2": "MetaClip2", "siglip": "Siglip"}.items()
    },
    "blip": ("BlipForConditionalGeneration", image_and_text, _logits),
    "git": ("GitForCausalLM", image_and_text, _logits),
    "vilt": ("ViltForQuestionAnswering", image_and_text, _logits),
    "layoutlm": ("LayoutLMForTokenClassification", boxes, _logits),
    "layoutlmv3": (
        "LayoutLMv3ForTokenClassification", lambda n: boxes(n) | image_inputs(n), _logits,
    ),
    "moonshine": ("MoonshineForConditionalGeneration", speech_inputs, _logits),
    "whisper": ("WhisperForConditionalGeneration", speech_inputs, _logits),
    "gemma3": ("Gemma3ForConditionalGeneration", partial(image_in_text, count=4), _logits),
    "internvl": ("InternVLForConditionalGeneration", partial(image_in_text, count=4), _logits),
}  # fmt: skip
"""Model type -> its class, inputs and outputs."""
