"""Checkpoints of wrapped models in the format of ``torch.distributed.checkpoint``: each worker writes and reads its own part.

A folder has a checkpoint for each worker, and a ``.metadata`` over all of them, which is written last. So any program reads it
with ``torch.distributed.checkpoint.load`` into the model alone. All workers must see the folder.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import pickle
import shutil
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..calls import agent as _agent
from ..graph.servers.updates import load_state
from ..graph.work import stored
from ..graph.work.stored import Piece
from ..parts.parameter import RemoteParameter
from . import optimizer as remote_optimizer
from .session import Session
from .state import is_wrapped, state_of

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

_log = logging.getLogger("rdmarpc")


def save_checkpoint(state: dict[str, Any], folder: str | os.PathLike[str]) -> None:
    """Write a checkpoint. ``state`` is as for ``torch.distributed.checkpoint.save``: by name, wrapped models, optimizers over
    their parameters, anything with ``state_dict`` and ``load_state_dict``, and plain data. The generators of all workers are
    saved too.

    Each owner writes its own part; nothing is gathered here. An optimizer's state is saved by the names of parameters, as
    ``torch.distributed.checkpoint.state_dict`` has it. A checkpoint that was in the folder is replaced when the new one is
    complete. ``OSError`` where a worker cannot write; ``ValueError`` for an optimizer of a parameter that no model in ``state``
    has.
    """
    folder = Path(folder).absolute()
    draft = folder.with_name(f"{folder.name}.{uuid.uuid4().hex[:8]}.tmp")
    names, here, there = _divide(state)
    for name, optimizer in _optimizers(state).items():
        found = {names[id(p)]: optimizer.state[p] for p in _here(optimizer) if optimizer.state.get(p)}
        here[name] = {"state": found, "param_groups": _groups(optimizer, names)}
    me = _agent.current().name
    here["rng"] = {me: stored.generators()}
    try:
        folders = [me]
        stored.write(str(draft / me), here)
        for session, model, worker, pieces, optimizers in there:
            folders.append(f"{worker}-{model}")
            session.ask_owner(worker, "save", str(draft / folders[-1]), model, pieces, optimizers, worker)
        _join(draft, folders)
        _swap(draft, folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    _remember(state, str(folder))


def load_checkpoint(
    state: dict[str, Any], folder: str | os.PathLike[str], *, successors: Mapping[str, str] | None = None
) -> None:
    """The inverse of ``save_checkpoint``, in place: models, optimizers and generators get their state, plain data is replaced
    in ``state``. The placement may be another one than that of the checkpoint. ``successors``: worker -> the worker whose
    generators it takes over; a worker that the checkpoint has no generators for keeps its own, which is logged.

    Raises what ``torch.distributed.checkpoint.load`` raises for a folder without a checkpoint, and for missing keys;
    ``ValueError`` for an optimizer with other groups than in the checkpoint."""
    place = str(Path(folder).absolute())
    names, here, there = _divide(state)
    metadata = stored.metadata_of(place)
    optimizers = _optimizers(state)
    for name, optimizer in optimizers.items():
        if stored.groups(metadata, name) > len(optimizer.param_groups):
            raise ValueError(f"optimizer {name!r} has fewer groups than in the checkpoint")
        local = [names[id(p)] for p in _here(optimizer)]
        found = stored.optimizer_target(metadata, name, local)
        here[name] = {"state": found, "param_groups": _groups(optimizer, names)}
    successors, me = successors or {}, _agent.current().name
    source = successors.get(me, me)
    has = stored.read_generators(metadata, here, source)
    stored.read(place, here)
    for name, optimizer in optimizers.items():
        _load_optimizer(optimizer, names, here[name])
    for key, value in state.items():
        if is_wrapped(value):
            _load_local(value, here[key])
        elif key not in optimizers and not hasattr(value, "load_state_dict"):
            state[key] = here[key]
    lacking = [] if has else [me]
    for session, model, worker, pieces, members in there:
        if not session.ask_owner(worker, "restore", place, model, pieces, members, successors.get(worker, worker)):
            lacking.append(worker)
    if has:
        stored.set_generators(here["rng"][source])
    if lacking:
        _log.warning("%s has no states of generators for %s", place, ", ".join(map(repr, lacking)))
    _remember(state, place)


Part = tuple[Session, str, str, list[Piece], dict[str, tuple[int, dict[int, str]]]]
"""Of one owner: the session, the model's name, the worker, what of the model it has, and of which optimizers."""


def _divide(state: Mapping[str, Any]) -> tuple[dict[int, str], dict[str, Any], list[Part]]:
    """The names of all parameters by ``id``, what is saved here (without optimizers), and the parts of the owners."""
    if "rng" in state:
        raise ValueError("the name 'rng' in a checkpoint is that of the generators")
    models = {key: value for key, value in state.items() if is_wrapped(value)}
    plain = {key: value for key, value in state.items() if isinstance(value, nn.Module) and key not in models}
    several = len(models) + len(plain) > 1
    names = {
        id(parameter): f"{key}.{name}" if several else name
        for key, model in {**models, **plain}.items()
        for name, parameter in model.named_parameters()
    }
    optimizers = _optimizers(state)
    for name, optimizer in optimizers.items():
        if not all(id(parameter) in names for parameter in _parameters(optimizer)):
            raise ValueError(f"optimizer {name!r} has parameters that no model in the state has: give the model, too")
    here = {key: value for key, value in state.items() if key not in models and key not in optimizers}
    there: list[Part] = []
    for key, model in models.items():
        session = state_of(model).session
        session.seeds.push()  # a seed that was set before comes before the states of generators
        session.apart = []
        try:
            here[key] = model.state_dict()
            apart = session.apart
        finally:
            session.apart = None
        members = {worker: _members(optimizers, names, session, worker) for worker in session.workers}
        for worker in session.workers:
            pieces = [piece for home, piece in apart if home == worker]
            there.append((session, key, worker, pieces, members[worker]))
    return names, here, there


def _members(
    optimizers: Mapping[str, torch.optim.Optimizer], names: Mapping[int, str], session: Session, worker: str
) -> dict[str, tuple[int, dict[int, str]]]:
    found = {}
    for name, optimizer in optimizers.items():
        for half in remote_optimizer.attach(optimizer):
            if half.owners is session:
                half.ensure()
                mine = [p for p in _parameters(optimizer) if isinstance(p, RemoteParameter) and p.owner is session]
                positions = {p.position: names[id(p)] for p in mine if p.worker == worker}
                if positions:
                    found[name] = (half.number, positions)
    return found


def _optimizers(state: Mapping[str, Any]) -> dict[str, torch.optim.Optimizer]:
    return {key: value for key, value in state.items() if isinstance(value, torch.optim.Optimizer)}


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _here(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The parameters whose state lies here: all of them, where the optimizer has no halves elsewhere."""
    halves = remote_optimizer.attach(optimizer)
    return [p for p in _parameters(optimizer) if not (halves and isinstance(p, RemoteParameter))]


def _groups(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> list[dict[str, Any]]:
    return [{**group, "params": [names[id(p)] for p in group["params"]]} for group in optimizer.param_groups]


def _load_optimizer(optimizer: torch.optim.Optimizer, names: Mapping[int, str], found: Mapping[str, Any]) -> None:
    for group, stored_group, now in zip(optimizer.param_groups, found["param_groups"], _groups(optimizer, names)):
        if stored_group["params"] != now["params"]:
            raise ValueError("the groups of the optimizer have other parameters than in the checkpoint")
        group.update({key: value for key, value in stored_group.items() if key != "params"})
    local = {names[id(p)]: p for p in _here(optimizer)}
    for parameter in local.values():
        optimizer.state.pop(parameter, None)
    parameters = [nn.Parameter(p) if not isinstance(p, nn.Parameter) else p for p in local.values()]
    entries = {at: found["state"][name] for at, name in enumerate(local) if name in found["state"]}
    load_state(optimizer, parameters, entries)


def _load_local(model: nn.Module, found: Mapping[str, Any]) -> None:
    """Tensors were filled in place; the rest goes to the modules that are here."""
    extra = {key: value for key, value in found.items() if not isinstance(value, torch.Tensor)}
    for key, value in extra.items():
        path = key.rpartition(".")[0]
        model.get_submodule(path).set_extra_state(value)


def _join(folder: Path, parts: Sequence[str]) -> None:
    """One ``.metadata`` over those of the parts."""
    whole: Metadata | None = None
    storage: dict[Any, Any] = {}
    entries: dict[str, Any] = {}
    paths: dict[str, Any] = {}
    for part in parts:
        whole = stored.metadata_of(str(folder / part))
        entries.update(whole.state_dict_metadata)
        paths.update(whole.planner_data or {})
        for index, place in (whole.storage_data or {}).items():
            storage[index] = dataclasses.replace(place, relative_path=f"{part}/{place.relative_path}")
        (folder / part / ".metadata").unlink()
    assert whole is not None
    whole = dataclasses.replace(whole, state_dict_metadata=entries, planner_data=paths, storage_data=storage)
    with open(folder / ".metadata", "wb") as file:
        pickle.dump(whole, file)
        file.flush()
        os.fsync(file.fileno())


def _swap(draft: Path, folder: Path) -> None:
    """The draft takes the folder's place."""
    old = draft.with_suffix(".old")
    if folder.exists():
        folder.rename(old)
    draft.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _remember(state: dict[str, Any], folder: str) -> None:
    for value in state.values():
        if is_wrapped(value):
            state_of(value).saved = (state, folder)
