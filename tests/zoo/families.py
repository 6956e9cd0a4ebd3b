"""The families of the zoo, those of other packages only where these are installed."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from typing import Any

import torch

NEEDS = {
    "plain": (),
    "loops": (),
    "torchvision": ("torchvision",),
    "timm": ("timm",),
    "transformers": ("transformers",),
    "architectures": ("transformers",),
    "torch_geometric": ("torch_geometric",),
    "trainers": ("lightning", "transformers", "accelerate"),
    "libraries": (
        "torchvision",
        "timm",
        "segmentation_models_pytorch",
        "torch_geometric",
        "diffusers",
        "monai",
        "kornia",
        "x_transformers",
        "vit_pytorch",
        "neuralop",
        "e3nn",
        "pytorch_forecasting",
        "gluonts",
        "zuko",
        "sentence_transformers",
        "denoising_diffusion_pytorch",
    ),
}
"""Packages by family."""

MODULES = {
    "plain": "plain_models",
    "loops": "training_loops",
    "torchvision": "vision_models",
    "timm": "timm_models",
    "transformers": "language_models",
    "architectures": "architectures",
    "torch_geometric": "graph_models",
    "trainers": "trainer_loops",
    "libraries": "libraries",
}


def missing(family: str) -> list[str]:
    return [name for name in NEEDS[family] if importlib.util.find_spec(name) is None]


def entries(family: str) -> Mapping[str, Any]:
    import_packages(family)
    return importlib.import_module(f".{MODULES[family]}", __package__).ENTRIES


def import_packages(family: str) -> None:
    if NEEDS[family] and importlib.util.find_spec("torchvision") is not None:
        _import_torchvision()
    for package in NEEDS[family]:
        importlib.import_module(package)


def _import_torchvision() -> None:
    """Its wheel of the package index is compiled for CUDA. Beside a torch for CPUs its operators do not load, and it cannot be
    imported before somebody has declared those that it describes itself."""
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        importlib.import_module("torchvision")
