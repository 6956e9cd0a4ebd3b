"""Checkpoints in the format of ``torch.distributed.checkpoint``, of models whose tensors lie anywhere.

Each worker writes and reads what lies there (``owners.py``), if it sees the folder. Any program reads the folder with
``torch.distributed.checkpoint.load`` into the model alone. DCP is imported when it is used: that takes a second.
"""

from __future__ import annotations

import os
import pickle
import random
import shutil
import threading
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from .stream import Stream
from .tensor import bring_home, make_empty, place_of

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

_RNG = "rng"
_swapping = threading.Lock()
_library = torch.library.Library("rdmarpc", "FRAGMENT")
_library.define("write_part(Tensor[] tensors, Tensor told) -> Tensor")
_library.define("read_part(Tensor(a!)[] tensors, Tensor told) -> Tensor")


def _by_owners(name: str) -> Callable[..., torch.Tensor]:
    def part(tensors: list[torch.Tensor], told: torch.Tensor) -> torch.Tensor:
        from . import owners

        return getattr(owners, name)(tensors, told)

    return part


for _name in ("write", "read"):
    _library.impl(f"{_name}_part", _by_owners(_name), "CompositeExplicitAutograd")
_operators = [torch.ops.rdmarpc.write_part.default, torch.ops.rdmarpc.read_part.default]
"""torch makes an operator's object at its first use; of two that two threads make it goes on with one that may be gone."""


def save_checkpoint(state: dict[str, Any], folder: str | os.PathLike[str]) -> None:
    """Write a checkpoint. ``state`` is as for ``torch.distributed.checkpoint.save``: by name, models, optimizers over their
    parameters, anything with ``state_dict`` and ``load_state_dict``, and plain data. The states of the generators of torch,
    Python and numpy are saved too.

    An optimizer's state is saved by the names of parameters, as ``torch.distributed.checkpoint.state_dict`` has it. A
    checkpoint that was in the folder is replaced when the new one is complete. ``OSError`` where it cannot be written,
    ``PeerLost`` for a worker that dies meanwhile; ``ValueError`` for an optimizer of a parameter that no model in ``state``
    has.
    """
    import torch.distributed.checkpoint as dcp

    from .owners import Writer

    folder = Path(folder).absolute()
    draft = folder.with_name(f"{folder.name}.{uuid.uuid4().hex[:8]}.tmp")
    names = _names(state)
    content = {key: _content(value, names) for key, value in state.items()} | {_RNG: _generators()}
    beside = _beside(state, content)
    try:
        draft.mkdir(parents=True)
        with _alone():
            dcp.save(content, storage_writer=Writer(str(draft)), no_dist=True)
        _swap(draft, folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    _remember(state, str(folder), beside)


def load_checkpoint(state: dict[str, Any], folder: str | os.PathLike[str]) -> None:
    """The inverse of ``save_checkpoint``, in place: models, optimizers and generators get their state wherever it lies, plain
    data is replaced in ``state``. The placement may be another one than that of the checkpoint.

    Raises what ``torch.distributed.checkpoint.load`` raises for a folder without a checkpoint, and for missing keys;
    ``ValueError`` for an optimizer with other groups than in the checkpoint, before anything is loaded."""
    from .owners import Reader

    place = str(Path(folder).absolute())
    metadata = Reader(place).read_metadata()
    names = _names(state)
    _check_groups(state, names, place, metadata)
    content = {key: _room(key, value, names, metadata) for key, value in state.items()} | {_RNG: _generators()}
    _read(content, place)
    for key, value in state.items():
        if isinstance(value, torch.optim.Optimizer):
            _load_optimizer(value, names, content[key])
        elif hasattr(value, "load_state_dict"):
            value.load_state_dict(content[key])
        elif isinstance(value, torch.Generator):  # whoever draws from it (a sampler, a loader of data) has this object
            value.set_state(content[key].get_state())
        else:
            state[key] = content[key]
    _set_generators(content[_RNG])
    _remember(state, place, _beside(state, content))


Beside = dict[str, dict[str, torch.Tensor]]
"""Of each model in a checkpoint: what it had and its ``state_dict`` has not (buffers that are not persistent, what its hooks
leave out), by name, here."""


def check_models(state: Mapping[str, Any], folder: str, beside: Beside) -> None:
    """Raises ``RuntimeError`` for what models have and neither the checkpoint nor ``beside`` has, ``ValueError`` for tensors of
    other sizes, and optimizers with other groups."""
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict
    from torch.distributed.checkpoint.default_planner import create_default_local_load_plan

    from .owners import Reader

    metadata = Reader(folder).read_metadata()
    _check_groups(state, _names(state), folder, metadata)
    models = {key: value.state_dict() for key, value in state.items() if isinstance(value, nn.Module)}
    create_default_local_load_plan(flatten_state_dict(models)[0], metadata)
    for key in beside.keys() & models.keys():
        if unknown := [name for name, _ in _unsaved(state[key], models[key]) if name not in beside[key]]:
            raise RuntimeError(f"{', '.join(unknown)} of {key!r} were not there when the checkpoint was saved or loaded")


def _check_groups(state: Mapping[str, Any], names: Mapping[int, str], folder: str, metadata: Metadata) -> None:
    """``ValueError`` for an optimizer with other groups than in the checkpoint."""
    groups = {key: _groups(value, names) for key, value in state.items() if isinstance(value, torch.optim.Optimizer)}
    paths = {name: path for name, path in (metadata.planner_data or {}).items() if path[0] in groups}
    paths = {name: path for name, path in paths.items() if path[1] == "param_groups" and path[3:] == ("params",)}
    found: dict[str, Any] = dict.fromkeys(paths)
    _read(found, folder)
    for key, ours in groups.items():
        theirs = {path[2]: found[name] for name, path in paths.items() if path[0] == key}
        if theirs and theirs != {number: group["params"] for number, group in enumerate(ours)}:
            raise ValueError(f"the groups of optimizer {key!r} have other parameters than in the checkpoint")


@torch.no_grad()
def fill(rooms: dict[str, torch.Tensor], key: str, folder: str, beside: Beside) -> None:
    """Have tensors be what those of these names of the model ``key`` were. ``RuntimeError`` where nobody knows."""
    from .owners import Reader

    stored, kept = Reader(folder).read_metadata().state_dict_metadata, beside.get(key, {})
    known = [name for name in rooms if name not in kept]
    if unknown := [name for name in known if getattr(stored.get(f"{key}.{name}"), "size", None) != rooms[name].shape]:
        raise RuntimeError(f"{', '.join(unknown)} of {key!r} are not in the checkpoint as they are in the model")
    _read({f"{key}.{name}": rooms[name] for name in known}, folder)
    for name in rooms.keys() & kept.keys():
        rooms[name].copy_(kept[name])


@torch.no_grad()
def restore(state: Mapping[str, Any], beside: Beside) -> None:
    for key in beside.keys() & state.keys():
        for name, tensor in named_tensors(state[key]):
            if name in beside[key]:
                tensor.copy_(beside[key][name])


def _beside(state: Mapping[str, Any], content: Mapping[str, Any]) -> Beside:
    models = {key: value for key, value in state.items() if "_placement" in getattr(value, "__dict__", ())}
    return {
        key: {name: bring_home(tensor.detach()).clone() for name, tensor in _unsaved(model, content[key])}
        for key, model in models.items()
    }


def _unsaved(model: nn.Module, content: Mapping[str, Any]) -> list[tuple[str, torch.Tensor]]:
    found = named_tensors(model)
    return [(name, tensor) for name, tensor in found if name not in content and not nn.parameter.is_lazy(tensor)]


def named_tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _read(content: dict[str, Any], folder: str) -> None:
    """What a checkpoint has of these names, in place."""
    import torch.distributed.checkpoint as dcp

    from .owners import Reader

    if content:
        with _alone():
            dcp.load(content, storage_reader=Reader(folder), no_dist=True)


@contextmanager
def _alone() -> Iterator[None]:
    """For DCP in this process alone. It warns that torch.distributed is not used; a lost worker, a file that cannot be written
    or read, Ctrl-C, and errors of the program's own classes are raised as themselves: DCP raises a list of what its ranks have
    raised, which is no ``Exception``."""
    from torch.distributed.checkpoint import CheckpointException

    from .owners import cause

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except CheckpointException as error:
        for found, _ in error.failures.values():
            if (behind := cause(found)) is not None:
                raise behind from None
        raise


def _names(state: Mapping[str, Any]) -> dict[int, str]:
    """The names of the parameters of all models, by ``id``."""
    if _RNG in state:
        raise ValueError(f"the name {_RNG!r} in a checkpoint is that of the generators")
    models = {key: value for key, value in state.items() if isinstance(value, nn.Module)}
    names = {
        id(parameter): f"{key}.{name}" if len(models) > 1 else name
        for key, model in models.items()
        for name, parameter in model.named_parameters()
    }
    for key, value in state.items():
        if isinstance(value, torch.optim.Optimizer) and not all(id(p) in names for p in _parameters(value)):
            why = "has parameters that no model in the state has: give it, or nn.ParameterList(them)"
            raise ValueError(f"optimizer {key!r} {why}")
    return names


def _content(value: Any, names: Mapping[int, str]) -> Any:
    """What is saved of it, as it lies."""
    if isinstance(value, torch.optim.Optimizer):
        states = value.state_dict()["state"]  # ``value.state`` of a served model is at its servers
        found = {names[id(p)]: dict(states[at]) for at, p in enumerate(_parameters(value)) if states.get(at)}
        return {"state": found, "param_groups": _groups(value, names)}
    return value.state_dict() if hasattr(value, "state_dict") else value


def _room(key: str, value: Any, names: Mapping[int, str], metadata: Metadata) -> Any:
    """Where DCP loads it to. Of an optimizer: as much as the checkpoint has of these parameters, where each of them lies."""
    paths = {name: path for name, path in (metadata.planner_data or {}).items() if path[0] == key}
    if not isinstance(value, torch.optim.Optimizer):
        if hasattr(value, "state_dict"):
            return value.state_dict()
        plain = {key: bring_home(value)}
        return (_completed(plain, paths, metadata) if isinstance(value, (dict, list)) else plain)[key]
    parameters = {names[id(parameter)]: parameter for parameter in _parameters(value)}
    found: dict[str, dict[str, Any]] = {}
    for name, path in paths.items():
        if len(path) == 4 and path[1] == "state" and (parameter := parameters.get(path[2])) is not None:
            place = None if path[3] == "step" else place_of(parameter)  # torch counts steps here
            found.setdefault(path[2], {})[path[3]] = _empty(metadata.state_dict_metadata[name], place, parameter)
    options = {name: path for name, path in paths.items() if path[1] == "param_groups"}
    kept = {path[2:4] for path in options.values()}
    groups = [  # without what a schedule has added since: as in torch, they are those of the checkpoint then
        {name: option for name, option in group.items() if name == "params" or (at, name) in kept}
        for at, group in enumerate(bring_home(_groups(value, names)))
    ]
    return _completed({key: {"state": found, "param_groups": groups}}, options, metadata)[key]


def _completed(room: dict[str, Any], paths: Mapping[str, Any], metadata: Metadata) -> dict[str, Any]:
    """With room for all that the checkpoint has at ``paths``: DCP loads what it is asked for, and says nothing of the rest."""
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict
    from torch.distributed.checkpoint._traverse import set_element

    there = flatten_state_dict(room)[0]
    for name, path in paths.items():
        if name not in there:
            set_element(room, path, _empty(metadata.state_dict_metadata[name], None))
    return room


def _empty(stored: Any, place: Stream | None, parameter: torch.Tensor | None = None) -> torch.Tensor | None:
    """Room for what a checkpoint has stored, which is a tensor at a place, or anything else. What is of a parameter's shape has
    its strides: fused optimizers take them for equal."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    if not isinstance(stored, TensorStorageMetadata):
        return None
    like = torch.empty(stored.size, dtype=stored.properties.dtype, device="meta")
    strides = like.stride() if parameter is None or parameter.shape != like.shape else parameter.stride()
    return make_empty(place, like.shape, strides, like.dtype)


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _groups(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> list[dict[str, Any]]:
    return [{**group, "params": [names[id(p)] for p in group["params"]]} for group in optimizer.param_groups]


def _load_optimizer(optimizer: torch.optim.Optimizer, names: Mapping[int, str], found: Mapping[str, Any]) -> None:
    groups = found["param_groups"]
    numbers = {names[id(parameter)]: number for number, parameter in enumerate(_parameters(optimizer))}
    numbered = [{**group, "params": [numbers[name] for name in group["params"]]} for group in groups]
    states = {numbers[name]: entries for name, entries in found["state"].items()}
    optimizer.load_state_dict({"state": states, "param_groups": numbered})


def _generators() -> dict[str, Any]:
    """The states of the random number generators of this process, from which all random numbers of a model come."""
    return {
        "torch": torch.get_rng_state(),
        "python": pickle.dumps(random.getstate()),
        "numpy": pickle.dumps(np.random.get_state()),
    }


def _set_generators(found: Mapping[str, Any]) -> None:
    torch.set_rng_state(found["torch"])
    random.setstate(pickle.loads(found["python"]))
    np.random.set_state(pickle.loads(found["numpy"]))


def _swap(draft: Path, folder: Path) -> None:
    """The draft takes the folder's place."""
    old = draft.with_suffix(".old")
    with _swapping:
        if folder.exists():
            folder.rename(old)
        draft.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _remember(state: dict[str, Any], folder: str, beside: Beside) -> None:
    for value in state.values():
        if "_placement" in getattr(value, "__dict__", ()):
            value._placement.saved = (state, folder, beside)
