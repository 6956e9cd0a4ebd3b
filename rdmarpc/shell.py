"""What stands here for a module that is cut: the module itself, over stand-ins of what lies elsewhere."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from .placing import Places, join, own_tensors
from .remote_part import RemotePart, entries_of, mirror, take_entries

if TYPE_CHECKING:
    from .session import Session


_TABLES = ("_modules", "_parameters", "_buffers")
_LISTS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Never called: what uses them looks inside."""


def stand_ins(net: nn.Module, session: Session, places: Places) -> tuple[nn.Module, dict[int, Any]]:
    """The stand-in of a whole model, and those of all its modules and parameters by ``id`` of the originals."""
    made: dict[int, Any] = {}
    top = stand_in(net, session, places, "", made)
    for module in net.modules():
        shell = made.get(id(module), module)
        if shell is not module and not isinstance(shell, RemotePart):
            # Modules that it also keeps in a list of its own, say.
            for key, value in vars(shell).items():
                if key not in _TABLES and isinstance(value, (nn.Module, list, tuple, dict)):
                    vars(shell)[key] = pytree.tree_map(lambda leaf: made.get(id(leaf), leaf), value)
    return top, made


def stand_in(original: nn.Module, session: Session, places: Places, path: str, made: dict[int, Any]) -> nn.Module:
    """The module that the wrapped model has at this path: the original where all of it stays here, a ``RemotePart`` where all
    of it is at one other worker, else a copy of the module over the stand-ins of its children. ``made`` as in ``mirror``."""
    if id(original) in made:
        return made[id(original)]
    home = places.owner(path)
    if path and places.whole(path) and not (isinstance(original, _LISTS) and home != places.caller):
        if home != places.caller:
            return mirror(original, session, home, path, made)
        made[id(original)] = original
        return original
    shell = made[id(original)] = copy.copy(original)
    shell._modules, shell._parameters, shell._buffers = {}, dict(original._parameters), dict(original._buffers)
    if home != places.caller and own_tensors(original):
        _give_away(shell, original, session, home, path, made)
    for name, child in original._modules.items():
        shell._modules[name] = None if child is None else stand_in(child, session, places, join(path, name), made)
    return shell


def _give_away(shell: nn.Module, original: nn.Module, session: Session, home: str, path: str, made: dict[int, Any]) -> None:
    for name, parameter in original._parameters.items():
        if parameter is not None:
            if id(parameter) not in made:
                made[id(parameter)] = session.new_parameter(parameter, home, join(path, name))
            shell._parameters[name] = made[id(parameter)]
    for name in own_tensors(original):
        if name not in shell._parameters:
            shell._buffers.pop(name, None)
            vars(shell).pop(name, None)
    vars(shell)["_away"] = Away(session, home, path, original)
    shell.__class__ = type(type(original).__name__, (Shell, type(original)), {"__module__": type(original).__module__})


class Away:
    """Where the tensors of a shell are, their names, and what they contribute to ``state_dict``."""

    def __init__(self, session: Session, worker: str, path: str, original: nn.Module) -> None:
        self.session, self.worker, self.path = session, worker, path
        self.names, self.entries = frozenset(own_tensors(original)), entries_of(original)


class Shell(nn.Module):
    """Mixed into the class of a cut module whose own tensors are at another worker."""

    _away: Away

    def __getattr__(self, name: str) -> Any:
        away = vars(self)["_away"]
        if name in away.names and away.session.eager is not None:
            return away.session.eager.fetch(join(away.path, name))
        return super().__getattr__(name)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        away = self._away
        values = away.session.ask_owner(away.worker, "own_state", away.path)
        for name in away.entries:
            destination[prefix + name] = values[name]

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        away = self._away
        entries: dict[str, torch.Tensor] = take_entries(
            away.entries, away.worker, state_dict, prefix, strict, missing_keys, unexpected_keys, error_msgs, self._modules
        )
        if entries and not error_msgs:
            away.session.ask_owner(away.worker, "load", away.path, entries)
