"""timm's models with random weights, as small as they come."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import timm
import torch
from timm.models.convmixer import ConvMixer
from timm.models.metaformer import GroupNorm1, MetaFormer
from timm.models.mlp_mixer import GatedMlp, MlpMixer, SpatialGatingBlock
from torch import nn

from .entry import Entry, images


def _of(name: str, size: int = 32, places: Any = ("half",), **more: Any) -> Entry:
    settings = {"pretrained": False, "num_classes": 5, **more}
    return Entry(lambda: timm.create_model(name, **settings), images(3, size), kind=torch.optim.SGD, places=places)


def _made(make: Callable[[], nn.Module], size: int = 32) -> Entry:
    """Of a class: some of timm's functions fix the sizes."""
    return Entry(make, images(3, size), kind=torch.optim.SGD, places=("half",))


TINY: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 3, "num_heads": 2}
_RATES = ("drop_rate", "pos_drop_rate", "patch_drop_rate", "proj_drop_rate", "attn_drop_rate", "drop_path_rate")
DROPPING: dict[str, Any] = dict.fromkeys(_RATES, 0.2)

ENTRIES: dict[str, Entry] = {
    "vit_tiny": _of("vit_tiny_patch16_224", places=("half", "thirds"), **TINY),
    "vit_tiny, every dropout": _of("vit_tiny_patch16_224", places=("half", "thirds"), **TINY, **DROPPING),
    "deit_tiny_distilled": _of("deit_tiny_distilled_patch16_224", **TINY),
    "eva02_tiny": _of("eva02_tiny_patch14_224", **TINY),
    "mixer": _made(lambda: MlpMixer(5, 32, patch_size=8, embed_dim=24, num_blocks=3)),
    "gmlp": _made(
        lambda: MlpMixer(
            5, 32, patch_size=8, embed_dim=24, num_blocks=3, mlp_ratio=6, block_layer=SpatialGatingBlock, mlp_layer=GatedMlp
        )
    ),
    "resnet10t": _of("resnet10t", places=("half", "thirds")),
    "resnetv2": _of("resnetv2_50", layers=(1, 1, 1, 1), channels=(16, 32, 32, 64), stem_chs=8),
    "convnext_atto": _of("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 16, 24, 32)),
    "convmixer": _made(lambda: ConvMixer(16, 3, kernel_size=7, patch_size=4, num_classes=5, act_layer=nn.ReLU)),
    "mobilenetv4": _of("mobilenetv4_conv_small_050"),
    "efficientnet_lite0": _of("efficientnet_lite0", 64),
    "ghostnet": _of("ghostnet_050", 64),
    "fastvit": _of("fastvit_t8", 64),
    "poolformer": _made(
        lambda: MetaFormer(
            num_classes=5,
            depths=(1, 1, 1, 1),
            dims=(8, 16, 16, 24),
            downsample_norm=None,
            mlp_act=nn.GELU,
            mlp_bias=True,
            norm_layers=GroupNorm1,
            layer_scale_init_values=1e-5,
            res_scale_init_values=None,
            use_mlp_head=False,
        ),
        64,
    ),
    "swin_s3": _of(
        "swin_tiny_patch4_window7_224", img_size=32, window_size=4, embed_dim=12, depths=(2, 2), num_heads=(2, 4), patch_size=4
    ),
    "visformer": _of("visformer_tiny", 64, img_size=64, embed_dim=48, depth=(1, 1, 1), num_heads=3),
    "cait": _of("cait_xxs24_224", **TINY),
    "xcit": _of("xcit_nano_12_p16_224", img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2),
}
