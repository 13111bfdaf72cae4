"""Image classifiers of torchvision and timm, in small."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ddp_by_hand.experiments.matrix.trial import SAMPLES, Row, Subject, subject_of

SIDE = 64


def rows_of_torchvision() -> Iterator[Row]:
    for name, build in _torchvision().items():
        yield Row("Image classifiers", name, partial(_subject, build))


def rows_of_timm() -> Iterator[Row]:
    import timm

    for name, options in TIMM.items():
        build = partial(timm.create_model, name, num_classes=3, **options)
        yield Row("Image classifiers", name, partial(_subject, build))


def _subject(build: Callable[[], nn.Module]) -> Subject:
    return subject_of(build(), {"x": torch.randn(SAMPLES, 3, SIDE, SIDE)}, _logits)


def _logits(outputs: Any) -> Tensor:
    """Returns the classifier's output, which comes first where there are others."""
    return outputs[0] if isinstance(outputs, tuple) else outputs


def _torchvision() -> dict[str, Callable[[], nn.Module]]:
    from torchvision import models as m

    convnext = [m.convnext.CNBlockConfig(8, 16, 1), m.convnext.CNBlockConfig(16, None, 1)]
    swin = dict(patch_size=[4, 4], embed_dim=16, depths=[1, 1], num_heads=[2, 2],
                window_size=[4, 4], num_classes=3)  # fmt: skip
    v2 = dict(block=m.swin_transformer.SwinTransformerBlockV2,
              downsample_layer=m.swin_transformer.PatchMergingV2)  # fmt: skip
    maxvit = dict(input_size=(SIDE, SIDE), stem_channels=16, partition_size=4, head_dim=8,
                  block_channels=[16, 16], block_layers=[1, 1],
                  stochastic_depth_prob=0.2)  # fmt: skip
    mobile, efficient = m.mobilenetv3.InvertedResidualConfig, m.efficientnet.MBConvConfig
    regnet = m.regnet.BlockParams([1, 1], [16, 16], [8, 8], [1.0, 1.0], [2, 2], se_ratio=0.25)
    blocks = [efficient(1, 3, 1, 16, 8, 1, 1, 1), efficient(4, 3, 2, 8, 16, 1, 1, 1)]
    return {
        "convnext": partial(m.ConvNeXt, convnext, num_classes=3),
        "densenet": partial(m.DenseNet, 4, (1, 1, 1, 1), 8, num_classes=3),
        "efficientnet": partial(
            m.EfficientNet, blocks, dropout=0.2, num_classes=3, last_channel=32,
        ),
        "maxvit": partial(m.MaxVit, num_classes=3, **maxvit),
        "mobilenet_v2": partial(m.MobileNetV2, num_classes=3, width_mult=0.5,
                                inverted_residual_setting=[[1, 16, 1, 1], [6, 24, 1, 2]]),
        "mobilenet_v3": partial(m.MobileNetV3, [mobile(16, 3, 16, 16, True, "RE", 2, 1, 1.0)], 32,
                                num_classes=3),
        "regnet": partial(m.RegNet, regnet, num_classes=3),
        "resnet": partial(m.ResNet, m.resnet.BasicBlock, [1, 1, 1, 1], num_classes=3),
        "resnext": partial(m.ResNet, m.resnet.Bottleneck, [1, 1, 1, 1], num_classes=3, groups=4,
                           width_per_group=4),
        "shufflenet_v2": partial(m.ShuffleNetV2, [1, 1, 1], [8, 16, 16, 16, 32], num_classes=3),
        "squeezenet1_1": partial(m.squeezenet1_1, num_classes=3),
        "swin": partial(m.SwinTransformer, **swin),
        "swin_v2": partial(m.SwinTransformer, **swin, **v2),
        "vit": partial(m.VisionTransformer, SIDE, 16, 2, 2, 16, 32, num_classes=3),
    }  # fmt: skip


_VIT = {"img_size": SIDE, "embed_dim": 16, "depth": 2, "num_heads": 2}
_STAGES = {"depths": (1, 1, 1, 1)}
TIMM: dict[str, dict[str, Any]] = {
    "beit_base_patch16_224": _VIT,
    "cait_xxs24_224": _VIT,
    "convit_tiny": {
        "img_size": SIDE, "embed_dim": 4, "depth": 2, "num_heads": 4, "local_up_to_layer": 1,
    },
    "davit_tiny": _STAGES | {"embed_dims": (16, 16, 32, 32), "num_heads": (2, 2, 2, 2)},
    "deit_tiny_distilled_patch16_224": _VIT,
    "densenet121": {"growth_rate": 4, "block_config": (1, 1, 1, 1)},
    "dla46_c": {},
    "edgenext_xx_small": {},
    "efficientvit_b0": {},
    "eva02_tiny_patch14_224": _VIT,
    "fasternet_t0": _STAGES,
    "ghostnet_050": {},
    "inception_next_atto": _STAGES,
    "mobilenetv3_small_050": {},
    "mobilevit_xxs": {},
    "mobilevitv2_050": {},
    "pvt_v2_b0": _STAGES,
    "regnetx_002": {},
    "regnety_002": {},
    "resnetv2_50": {"layers": (1, 1, 1, 1), "channels": (32, 32, 32, 32)},
    "shvit_s1": {},
    "starnet_s050": {},
    "swiftformer_xs": {},
    "swin_tiny_patch4_window7_224": {
        "img_size": SIDE, "embed_dim": 16, "depths": (1, 1), "num_heads": (2, 2), "window_size": 4,
    },
    "test_byobnet": {},
    "test_convnext": {},
    "test_efficientnet": {},
    "test_mambaout": {},
    "test_nfnet": {},
    "test_resnet": {},
    "test_vit": {"img_size": SIDE},
    "vit_relpos_small_patch16_224": _VIT,
    "xcit_nano_12_p16_224": {"img_size": SIDE, "depth": 2},
}  # fmt: skip
"""Name of a model -> what makes it small."""
