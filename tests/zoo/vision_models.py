"""torchvision's models with random weights, small images."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torchvision.models as tv
from torch import nn

from .entry import Entry, images

SGD = torch.optim.SGD


def _named(name: str, **more: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(tv, name)(weights=None, **more)


def _of(name: str, size: int = 64, refused: str = "", places: Any = ("half", "thirds"), **more: Any) -> Entry:
    return Entry(_named(name, num_classes=10, **more), images(3, size), kind=SGD, refused=refused, places=places)


def _detector() -> nn.Module:
    return tv.detection.fcos_resnet50_fpn(weights=None, weights_backbone=None, num_classes=3, min_size=64, max_size=64)


def _scenes(n: int) -> Any:
    boxes = torch.tensor([[5.0, 5.0, 30.0, 30.0], [20.0, 10.0, 60.0, 50.0]])
    return ([torch.rand(3, 64, 64)], [{"boxes": boxes, "labels": torch.tensor([1, 2])}]), {}


SEGMENT: dict[str, Any] = {"weights": None, "weights_backbone": None, "num_classes": 4}

ENTRIES: dict[str, Entry] = {
    "resnet18": _of("resnet18"),
    "resnext50": _of("resnext50_32x4d", places=("thirds",)),
    "densenet121": _of("densenet121", places=("half",)),
    "googlenet": _of("googlenet", aux_logits=True, init_weights=False, places=("half",)),
    "inception_v3": _of("inception_v3", 96, aux_logits=False, init_weights=False, places=("half",)),
    "squeezenet1_1": _of("squeezenet1_1"),
    "shufflenet_v2": _of("shufflenet_v2_x0_5"),
    "mnasnet": _of("mnasnet0_5"),
    "mobilenet_v2": _of("mobilenet_v2", places=("half",)),
    "mobilenet_v3_small": _of("mobilenet_v3_small"),
    "efficientnet_b0": _of("efficientnet_b0", places=("half",)),
    "regnet_y": _of("regnet_y_400mf", places=("half",)),
    "convnext_tiny": Entry(
        lambda: tv.ConvNeXt([tv.convnext.CNBlockConfig(8, 16, 1), tv.convnext.CNBlockConfig(16, None, 2)], num_classes=10),
        images(3, 32),
        kind=SGD,
    ),
    "vit": Entry(lambda: tv.VisionTransformer(32, 8, 3, 2, 16, 32, num_classes=10), images(3, 32)),
    "swin_t": Entry(lambda: tv.SwinTransformer([4, 4], 8, [2, 2], [2, 4], [4, 4], num_classes=10), images(3, 32)),
    "maxvit": Entry(lambda: tv.MaxVit((64, 64), 16, 2, [16, 32], [1, 1], 8, 0.0, num_classes=10), images(3, 64)),
    "vgg11_bn": Entry(_named("vgg11_bn", num_classes=10), images(3, 32), kind=SGD, places=("half",)),
    "fcn_resnet50": Entry(
        lambda: tv.segmentation.fcn_resnet50(**SEGMENT), images(3, 64), kind=SGD, places=({"classifier": "worker1"},)
    ),
    "lraspp": Entry(partial(tv.segmentation.lraspp_mobilenet_v3_large, **SEGMENT), images(3, 64), kind=SGD, places=("half",)),
    "r3d_18": Entry(
        lambda: tv.video.r3d_18(weights=None, num_classes=5),
        lambda n: ((torch.randn(1, 3, 4, 32, 32),), {}),
        kind=SGD,
        places=("half",),
    ),
    "fcos": Entry(
        _detector,
        _scenes,
        kind=SGD,
        places=({"head.regression_head": "worker1"},),
        loss=lambda out: sum(out.values()),
        evaluated=False,
    ),
    "fcos, backbone elsewhere": Entry(
        _detector,
        _scenes,
        kind=SGD,
        places=({"backbone.body": "worker1"},),
        loss=lambda out: sum(out.values()),
        evaluated=False,
        served=False,
    ),
}
