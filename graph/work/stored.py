"""What a worker writes into a checkpoint of ``torch.distributed.checkpoint``, and takes out of one: its own part, by names that
the whole model has, so that no other worker needs the values. DCP is imported when it is used: that takes a second."""

from __future__ import annotations

import pickle
import random
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

Piece = tuple[str, str, tuple[str, ...] | None]
"""Path of a module, prefix of its entries in the model's ``state_dict``, and their names where not all below is meant."""
Optimizers = Mapping[str, tuple[int, Mapping[int, str]]]
"""Name in the checkpoint -> number of the optimizer, and the names of its parameters by position."""


def write(folder: str, state: dict[str, Any]) -> None:
    """A checkpoint of this process alone. ``OSError`` where the folder cannot be written."""
    import torch.distributed.checkpoint as dcp

    Path(folder).mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that torch.distributed is not used
        dcp.save(state, checkpoint_id=folder, no_dist=True)


def read(folder: str, state: dict[str, Any]) -> None:
    """Fill ``state`` in place. Raises what DCP raises for keys that are not in the checkpoint."""
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=folder, no_dist=True)


def metadata_of(folder: str) -> Metadata:
    import torch.distributed.checkpoint as dcp

    return dcp.FileSystemReader(folder).read_metadata()


def entries(root: nn.Module, pieces: Sequence[Piece]) -> dict[str, Any]:
    """What modules contribute to the model's ``state_dict``: the tensors themselves."""
    found: dict[str, Any] = {}
    for path, prefix, names in pieces:
        module = root.get_submodule(path)
        if names is None:
            found.update({prefix + key: value for key, value in module.state_dict().items()})
        else:
            own = {**module._parameters, **module._buffers}
            found.update({prefix + name: own[name].detach() for name in names})  # type: ignore[union-attr]
    return found


def take_entries(root: nn.Module, pieces: Sequence[Piece], found: Mapping[str, Any]) -> None:
    """Tensors were filled in place; the rest (``get_extra_state``) goes the way of ``load_state_dict``."""
    for path, prefix, names in pieces:
        if names is None:
            module = root.get_submodule(path)
            module.load_state_dict({key: found[prefix + key] for key in module.state_dict()})


def optimizer_target(metadata: Metadata, name: str, parameters: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Room for the state of these parameters as far as the checkpoint has any."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    wanted = {*parameters}
    found: dict[str, dict[str, Any]] = {}
    for key, path in (metadata.planner_data or {}).items():
        if len(path) == 4 and path[:2] == (name, "state") and path[2] in wanted:
            stored = metadata.state_dict_metadata[key]
            room: torch.Tensor | None = None
            if isinstance(stored, TensorStorageMetadata):
                room = torch.empty(stored.size, dtype=stored.properties.dtype, device="cpu")
            found.setdefault(path[2], {})[path[3]] = room
    return found


def groups(metadata: Metadata, name: str) -> int:
    """How many groups an optimizer has in the checkpoint."""
    paths = (metadata.planner_data or {}).values()
    return 1 + max((path[2] for path in paths if path[:2] == (name, "param_groups") and len(path) > 2), default=-1)


def generators(gpu: torch.device | None = None) -> dict[str, Any]:
    """The states of the random number generators of this process."""
    found = {
        "torch": torch.get_rng_state(),
        "python": pickle.dumps(random.getstate()),
        "numpy": pickle.dumps(np.random.get_state()),
    }
    if gpu is not None:
        found["gpu"] = torch.get_device_module(gpu).get_rng_state(gpu)
    return found


def set_generators(found: Mapping[str, Any], gpu: torch.device | None = None) -> None:
    torch.set_rng_state(found["torch"])
    random.setstate(pickle.loads(found["python"]))
    np.random.set_state(pickle.loads(found["numpy"]))
    if gpu is not None and "gpu" in found:
        torch.get_device_module(gpu).set_rng_state(found["gpu"], gpu)


def read_generators(metadata: Metadata, state: dict[str, Any], worker: str, gpu: torch.device | None = None) -> bool:
    """Add room for the generators of ``worker`` to what is to be read. Whether the checkpoint has them."""
    known = {path[2] for path in (metadata.planner_data or {}).values() if path[:2] == ("rng", worker)}
    if known:
        state["rng"] = {worker: {key: value for key, value in generators(gpu).items() if key in known}}
    return bool(known)
