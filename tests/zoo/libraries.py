"""Models of libraries, by what each library lists: nobody has chosen them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from .entry import Batch, images
from .guessed import library
from .tried import Proposal, Tried, numel

SIZES = (32, 64, 128, 224)


def smallest(make: Callable[[str], nn.Module], names: list[str]) -> str:
    """Of eight at most, the one with the fewest parameters. On ``meta``: none is made."""
    return min(names[:: -(-len(names) // 8)], key=lambda name: numel(partial(make, name)) or sys.maxsize)


TINY: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 3, "num_heads": 2}


def timm() -> Iterator[tuple[str, Tried]]:
    """The smallest model of each module."""
    import timm

    make = partial(timm.create_model, pretrained=False, num_classes=10)

    def proposals(module: str) -> Iterator[Proposal]:
        name = smallest(make, timm.list_models(module=module))
        yield partial(make, name, **TINY), images()
        for size in SIZES:
            yield partial(make, name, img_size=size), images(3, size)
            yield partial(make, name), images(3, size)

    for module in timm.list_modules():
        if timm.list_models(module=module):
            yield module, Tried(partial(proposals, module))


def _scenes(n: int) -> Batch:
    boxes = torch.tensor([[5.0, 5.0, 30.0, 30.0], [20.0, 10.0, 60.0, 50.0]])
    return ([torch.rand(3, 64, 64)], [{"boxes": boxes, "labels": torch.tensor([1, 2])}]), {}


def _frames(frames: int, size: int) -> Callable[[int], Batch]:
    return lambda n: ((torch.randn(2, 3, frames, size, size),), {})


def _pairs(n: int) -> Batch:
    return (torch.rand(1, 3, 128, 128), torch.rand(1, 3, 128, 128)), {}


def torchvision() -> Iterator[tuple[str, Tried]]:
    """The smallest model of each module."""
    from torchvision import models

    def make(name: str, **more: Any) -> nn.Module:
        if not name.startswith("raft"):
            more["num_classes"] = 10
        return models.get_model(name, weights=None, **more)

    def proposals(names: list[str]) -> Iterator[Proposal]:
        name = smallest(make, names)
        for more in ({"weights_backbone": None}, {}, {"init_weights": False}):
            yield partial(make, name, **more), _pairs
            yield partial(make, name, min_size=64, max_size=64, **more), _scenes
            yield partial(make, name, **more), _scenes
            for size in SIZES:
                yield partial(make, name, **more), images(3, size)
                yield partial(make, name, image_size=size, **more), images(3, size)
                yield partial(make, name, input_size=(size, size), **more), images(3, size)
            yield partial(make, name, **more), _frames(4, 32)
            yield partial(make, name, **more), _frames(16, 64)
            yield partial(make, name, **more), _frames(16, 224)

    modules: dict[str, list[str]] = {}
    for name in models.list_models():
        if not name.startswith("quantized_"):
            modules.setdefault(models.get_model_builder(name).__module__.removeprefix("torchvision.models."), []).append(name)
    for module, names in modules.items():
        yield module, Tried(partial(proposals, names))


def segmentation_models_pytorch() -> Iterator[tuple[str, Tried]]:
    """Every decoder, and the smallest encoder of each class."""
    import segmentation_models_pytorch as smp

    def proposals(decoder: str, encoders: list[str]) -> Iterator[Proposal]:
        make = lambda encoder: smp.create_model(decoder, encoder, encoder_weights=None, classes=3)  # noqa: E731
        name = smallest(make, encoders)
        for size in SIZES:
            yield partial(make, name), images(3, size)

    for decoder in smp.MODEL_ARCHITECTURES_MAPPING:
        yield decoder, Tried(partial(proposals, decoder, ["resnet18"]))
    classes: dict[str, list[str]] = {}
    for name, encoder in smp.encoders.encoders.items():
        classes.setdefault(encoder["encoder"].__name__, []).append(name)
    for kind, names in classes.items():
        yield kind, Tried(partial(proposals, "unet", names))


LIBRARIES: dict[str, Callable[[], Iterator[tuple[str, Tried]]]] = {
    "timm": timm,
    "torchvision": torchvision,
    "segmentation_models_pytorch": segmentation_models_pytorch,
    "torch_geometric": partial(library, "torch_geometric.nn", graphs=True),
    "diffusers": partial(library, "diffusers.models.autoencoders", "diffusers.models.unets", shrink_first=True),
    "monai": partial(library, "monai.networks"),
    "neuralop": partial(library, "neuralop"),
    "e3nn": partial(library, "e3nn.nn", "e3nn.o3"),
    "gluonts": partial(library, "gluonts.torch"),
}
for _name in (
    "kornia", "x_transformers", "vit_pytorch", "pytorch_forecasting", "zuko", "sentence_transformers",
    "denoising_diffusion_pytorch",
):  # fmt: skip
    LIBRARIES[_name] = partial(library, _name)

ENTRIES = {f"{name}: {model}": tried for name, models in LIBRARIES.items() for model, tried in models()}
