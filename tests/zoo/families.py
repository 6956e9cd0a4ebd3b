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
}


def missing(family: str) -> list[str]:
    return [name for name in NEEDS[family] if importlib.util.find_spec(name) is None]


def entries(family: str) -> Mapping[str, Any]:
    if NEEDS[family] and importlib.util.find_spec("torchvision") is not None:
        _import_torchvision()
    return importlib.import_module(f".{MODULES[family]}", __package__).ENTRIES


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
