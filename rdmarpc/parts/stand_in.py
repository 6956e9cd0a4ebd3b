"""Stand-ins for modules whose tensors are at other workers: their names, their flags, and the way to their state.

A ``RemotePart`` stands for a module that lies at another worker as a whole; a module that is cut stays itself, over stand-ins
of what lies elsewhere, with ``Shell`` mixed in where its own tensors do.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..transport import NotSupported
from .parameter import Owners
from .placing import Places, join, own_tensors

_SETTINGS = (bool, int, float, str, torch.dtype)


class RemotePart(nn.Module):
    """Mirrors one module (and has a mirror for each of its children), with a ``RemoteParameter`` for each parameter.

    ``train``, ``eval`` and ``requires_grad_`` work as ever and travel with the next step. ``entries`` are the shapes of what
    this very module contributes to ``state_dict``.
    """

    def __init__(self, original: nn.Module, owners: Owners, worker: str, path: str) -> None:
        super().__init__()
        self.training = original.training
        self._version = original._version
        self._kind, self._owners, self._worker, self._path = type(original).__name__, owners, worker, path
        self._entries = entries_of(original)
        # Settings, for an eager forward that asks for them.
        plain = {k: v for k, v in vars(original).items() if isinstance(v, _SETTINGS) and not k.startswith("_")}
        self.__dict__.update({key: value for key, value in plain.items() if key not in self.__dict__})

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._owners.eager is None:
            raise self._refuse("call the whole model; a single part cannot be called from here")
        return self._owners.eager.call(self._path, args, kwargs)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self.children())

    def __getitem__(self, at: int) -> nn.Module:
        return list(self.children())[at]

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """The owner's values, as of all the steps before, on the CPU."""
        destination = {} if destination is None else destination
        for key, value in self._owners.ask_owner(self._worker, "state", self._path).items():
            destination[prefix + key] = value
        if hasattr(destination, "_metadata"):
            for name, module in self.named_modules():
                destination._metadata[(prefix + name).rstrip(".")] = {"version": module._version}
        return destination

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
        entries = take_entries(
            self._entries, self._worker, state_dict, prefix, strict, missing_keys, unexpected_keys, error_msgs, [*self._modules]
        )
        if entries and not error_msgs:
            self._owners.ask_owner(self._worker, "load", self._path, entries)

    def apply(self, fn: Callable[[nn.Module], Any]) -> RemotePart:
        """``module.apply(fn)`` at the owner; ``fn`` must be picklable."""
        self._owners.ask_owner(self._worker, "call", self._path, "apply", (fn,))
        return self

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        raise self._refuse("it cannot be converted or moved from here; do that before wrap()")

    def _get_name(self) -> str:
        return f"Remote{self._kind}"

    def extra_repr(self) -> str:
        return f"on {self._worker!r}"

    def _refuse(self, why: str) -> NotSupported:
        return NotSupported(f"{self._path!r} lives on worker {self._worker!r}: {why}", peer=self._worker)


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


def mirror(original: nn.Module, owners: Owners, worker: str, path: str, made: dict[int, Any]) -> RemotePart:
    """The stand-in of a module tree. ``made`` maps what was mirrored already: shared modules and parameters stay shared."""
    part = RemotePart(original, owners, worker, path)
    made[id(original)] = part
    for name, parameter in original._parameters.items():
        if parameter is None:
            part.register_parameter(name, None)
            continue
        if id(parameter) not in made:
            made[id(parameter)] = owners.new_parameter(parameter, worker, f"{path}.{name}")
        part.register_parameter(name, made[id(parameter)])
    for name, child in original._modules.items():
        if child is None:
            part._modules[name] = None
        else:
            known = id(child) in made
            part._modules[name] = made[id(child)] if known else mirror(child, owners, worker, f"{path}.{name}", made)
    return part


_TABLES = ("_modules", "_parameters", "_buffers")
_LISTS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Never called: what uses them looks inside."""


def stand_ins(net: nn.Module, owners: Owners, places: Places) -> tuple[nn.Module, dict[int, Any]]:
    """The stand-in of a whole model, and those of all its modules and parameters by ``id`` of the originals."""
    made: dict[int, Any] = {}
    top = stand_in(net, owners, places, "", made)
    for module in net.modules():
        shell = made.get(id(module), module)
        if shell is not module and not isinstance(shell, RemotePart):
            # Modules that it also keeps in a list of its own, say.
            for key, value in vars(shell).items():
                if key not in _TABLES and isinstance(value, (nn.Module, list, tuple, dict)):
                    vars(shell)[key] = pytree.tree_map(lambda leaf: made.get(id(leaf), leaf), value)
    return top, made


def stand_in(original: nn.Module, owners: Owners, places: Places, path: str, made: dict[int, Any]) -> nn.Module:
    """The module that the wrapped model has at this path: the original where all of it stays here, a ``RemotePart`` where all
    of it is at one other worker, else a copy of the module over the stand-ins of its children. ``made`` as in ``mirror``."""
    if id(original) in made:
        return made[id(original)]
    home = places.owner(path)
    if path and places.whole(path) and not (isinstance(original, _LISTS) and home != places.caller):
        if home != places.caller:
            return mirror(original, owners, home, path, made)
        made[id(original)] = original
        return original
    shell = made[id(original)] = copy.copy(original)
    shell._modules, shell._parameters, shell._buffers = {}, dict(original._parameters), dict(original._buffers)
    if home != places.caller and own_tensors(original):
        _give_away(shell, original, owners, home, path, made)
    for name, child in original._modules.items():
        shell._modules[name] = None if child is None else stand_in(child, owners, places, join(path, name), made)
    return shell


def _give_away(shell: nn.Module, original: nn.Module, owners: Owners, home: str, path: str, made: dict[int, Any]) -> None:
    for name, parameter in original._parameters.items():
        if parameter is not None:
            if id(parameter) not in made:
                made[id(parameter)] = owners.new_parameter(parameter, home, join(path, name))
            shell._parameters[name] = made[id(parameter)]
    for name in own_tensors(original):
        if name not in shell._parameters:
            shell._buffers.pop(name, None)
            vars(shell).pop(name, None)
    vars(shell)["_away"] = Away(owners, home, path, original)
    shell.__class__ = type(type(original).__name__, (Shell, type(original)), {"__module__": type(original).__module__})


class Away:
    """Where the tensors of a shell are, their names, and what they contribute to ``state_dict``."""

    def __init__(self, owners: Owners, worker: str, path: str, original: nn.Module) -> None:
        self.owners, self.worker, self.path = owners, worker, path
        self.names, self.entries = frozenset(own_tensors(original)), entries_of(original)


class Shell(nn.Module):
    """Mixed into the class of a cut module whose own tensors are at another worker."""

    _away: Away

    def __getattr__(self, name: str) -> Any:
        away = vars(self)["_away"]
        if name in away.names and away.owners.eager is not None:
            return away.owners.eager.fetch(join(away.path, name))
        return super().__getattr__(name)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        away = self._away
        values = away.owners.ask_owner(away.worker, "own_state", away.path)
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
            away.owners.ask_owner(away.worker, "load", away.path, entries)
