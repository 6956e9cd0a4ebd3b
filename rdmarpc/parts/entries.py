"""What one module contributes to ``state_dict``, and what it takes out of one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn


def entries_of(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Names and shapes of what this very module contributes to ``state_dict``, in that order."""
    skipped = module._non_persistent_buffers_set
    tensors = {**module._parameters, **{k: v for k, v in module._buffers.items() if k not in skipped}}
    return {name: tuple(tensor.shape) for name, tensor in tensors.items() if tensor is not None}


def take_entries(
    wanted: Mapping[str, tuple[int, ...]],
    worker: str,
    state_dict: Mapping[str, Any],
    prefix: str,
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
    others: Iterable[str],
) -> dict[str, torch.Tensor]:
    """The entries of one module, out of those under its prefix, in host memory; what does not fit goes into the lists as torch
    has it.
    ``others``: names below the prefix that are somebody else's."""
    entries = {}
    for name, shape in wanted.items():
        value = state_dict.get(prefix + name)
        if value is None:
            if strict:
                missing_keys.append(prefix + name)
        elif tuple(value.shape) != shape:
            error_msgs.append(f"size mismatch for {prefix + name}: {tuple(value.shape)} given, {shape} on worker {worker!r}")
        else:
            entries[name] = value.detach().cpu()
    if strict:
        known = {*wanted, *others}
        for key in state_dict:
            if key.startswith(prefix) and key[len(prefix) :].split(".")[0] not in known:
                unexpected_keys.append(key)
    return entries
