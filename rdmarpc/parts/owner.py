"""The owner's side of ``wrap``: the models that have parts in this process, and how parts travel here.

Modules are pickled without the data of their tensors. The data travels beside the pickle, as tensors of the call, from host
memory to host memory; each tensor then moves to its device.
"""

from __future__ import annotations

import gc
import io
import pickle
import sys
import types
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from ..calls import agent as _agent
from ..calls.agent import Agent
from ..graph.edges.gpu_slot import reaches
from ..graph.edges.station import Leased
from ..graph.trace.devices import CPU, find, named, tensors_of
from ..graph.wire.layout import dense, strides
from ..graph.work.host import Host
from ..message.reducers import other_name
from ..transport import NotSupported, RdmaError
from . import compiled

_hosts: weakref.WeakKeyDictionary[Agent, dict[str, tuple[str, Host]]] = weakref.WeakKeyDictionary()


Spec = tuple[tuple[int, ...], int, bool, bool, str]
"""Of a tensor: shape, memory order, is a parameter, requires_grad, device (``devices.named``)."""


class Packed:
    """Parts (modules and tensors, by path) ready to travel: ``blob`` (pickle), ``tensors`` (contiguous; those on the CPU share
    memory with the parts) and their ``specs``. ``given(path)``: the device that a part gets; ``None``: its tensors get those
    that they have here. ``paths`` of all modules of the model, by ``id``: those that are in none of the parts do not travel
    with them."""

    def __init__(
        self,
        modules: Mapping[str, nn.Module | torch.Tensor],
        given: Callable[[str], torch.device | None] = lambda path: None,
        paths: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        stream = io.BytesIO()
        inside = {id(module) for part in modules.values() if isinstance(part, nn.Module) for module in part.modules()}
        others = {key: path for key, path in paths.items() if key not in inside}
        pickler = _Pickler(stream, _homes(modules, given), others)
        try:
            pickler.dump(dict(modules))
        except NotSupported:
            raise
        except Exception as error:  # of the parts' own methods
            raise NotSupported(
                f"the part(s) {', '.join(map(repr, modules))} cannot be pickled, so they cannot move: {error}",
                hint="define their classes and functions at the top level of a module that every worker can import",
            ) from error
        self.blob, self.tensors, self.specs = stream.getvalue(), pickler.tensors, pickler.specs


def _homes(
    parts: Mapping[str, nn.Module | torch.Tensor], given: Callable[[str], torch.device | None]
) -> dict[int, torch.device]:
    """The devices of tensors, by ``id``, that the placement says; those of a part go together, as in ``Module.to``."""
    found: dict[int, torch.device] = {}
    for path, part in parts.items():
        device = given(path)
        if device is not None:
            modules = part.modules() if isinstance(part, nn.Module) else ()
            tensors = [part] if isinstance(part, torch.Tensor) else [t for m in modules for t in tensors_of(m).values()]
            found.update((id(tensor), device) for tensor in tensors)
    return found


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, homes: Mapping[int, torch.device], others: Mapping[int, str]) -> None:
        super().__init__(stream, protocol=5)
        self.tensors: list[torch.Tensor] = []
        self.specs: list[Spec] = []
        self._homes, self._others = homes, others
        self._seen: dict[int, int] = {}

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.MethodType) and obj.__func__ is not getattr(type(obj.__self__), obj.__name__, None):
            return _bound, (obj.__func__, obj.__self__)  # of a function that is no attribute of the class
        if isinstance(obj, type):
            return other_name(obj) or NotImplemented
        if not isinstance(obj, nn.Module):
            return NotImplemented
        if id(obj) in self._others:
            raise NotSupported(
                f"a part that is to move refers to {self._others[id(obj)] or 'the model'!r}, which is not in that part: "
                "its worker would have a copy of that",
                hint="pass it what it needs as arguments, or place both as one part",
            )
        return compiled.reduced(obj)

    def persistent_id(self, obj: Any) -> int | None:
        if type(obj) not in (torch.Tensor, nn.Parameter) or obj.layout is not torch.strided or obj.is_quantized:
            return None
        if id(obj) not in self._seen:
            plain = obj.detach()
            view, order = dense(plain) or (plain.contiguous(), 0)
            self._seen[id(obj)] = len(self.tensors)
            self.tensors.append(view.cpu())
            device = named(self._homes.get(id(obj), obj.device))
            self.specs.append((tuple(obj.shape), order, isinstance(obj, nn.Parameter), obj.requires_grad, device))
        return self._seen[id(obj)]


def _bound(function: Callable[..., Any], instance: Any) -> types.MethodType:
    return types.MethodType(function, instance)


class _Unpickler(pickle.Unpickler):
    def __init__(self, blob: bytes, tensors: list[torch.Tensor], specs: list[Spec]) -> None:
        super().__init__(io.BytesIO(blob))
        self._tensors, self._specs = tensors, specs
        self._made: dict[int, torch.Tensor] = {}

    def persistent_load(self, pid: Any) -> torch.Tensor:
        if pid not in self._made:
            shape, order, parameter, requires_grad, device = self._specs[pid]
            # A received tensor is ours to keep, so the part lives in the arena from the start.
            tensor = self._tensors[pid].as_strided(shape, strides(shape, order))
            if device:
                tensor = tensor.to(find(device))
            self._made[pid] = nn.Parameter(tensor, requires_grad) if parameter else tensor.requires_grad_(requires_grad)
        return self._made[pid]


def _table(agent: Agent) -> dict[str, tuple[str, Host]]:
    if agent not in _hosts:
        _hosts[agent] = {}
        table = _hosts[agent]

        def lost(worker: str, error: RdmaError) -> None:
            for model, (caller, host) in list(table.items()):
                host.lost(worker, error)
                if worker == caller:
                    table.pop(model, None)

        agent.on_peer_lost(lost)
        agent.at_close(partial(_close_all, table))
    return _hosts[agent]


def _close_all(table: dict[str, tuple[str, Host]]) -> None:
    """Hosts refer to their agent: what would be kept by it would keep it."""
    if not table:
        return
    while table:
        _, (_, host) = table.popitem()
        host.close({})  # nobody reaches our memory any more
    del host
    gc.collect()  # a station and its slots refer to each other, and mappings of peers would stay with them


def open_model(
    model: str,
    caller: str,
    blob: bytes,
    tensors: list[torch.Tensor],
    specs: list[Spec],
    timeout: float,
) -> bool:
    """Called at an owner: take these parts in. Whether it can write into accelerators' memory of others. ``NotSupported`` where
    it does not have the devices of the parts."""
    agent = _agent.current()
    parts = unpack(blob, tensors, specs)
    _note_classes(parts)
    _table(agent)[model] = (caller, Host(agent.name, agent.device, agent.channel, parts, timeout))
    return reaches(agent.device)


def _note_classes(parts: Mapping[str, nn.Module | torch.Tensor]) -> None:
    """Note what constructors of transformers (5) note of their class in their process: which outputs it can record. Models that
    are unpickled were constructed elsewhere."""
    noted = getattr(sys.modules.get("transformers.utils.output_capturing"), "_CAN_RECORD_REGISTRY", None)
    if noted is None:
        return
    modules = (module for part in parts.values() if isinstance(part, nn.Module) for module in part.modules())
    for module in modules:
        if hasattr(module, "_can_record_outputs"):
            noted[module] = module._can_record_outputs


def ask_model(model: str, method: str, args: tuple[Any, ...]) -> Any:
    """Called at an owner: a method of its ``Host``, or of the ``Access`` to its parts."""
    host = _host(model)
    return getattr(host if hasattr(host, method) else host.access, method)(*args)


def take_model(model: str, commands: int) -> tuple[bytes, list[torch.Tensor], list[Spec]]:
    """Called at an owner: copies of its parts as they are after so many commands, in host memory, for ``unpack``."""

    def pack(parts: Mapping[str, nn.Module | torch.Tensor]) -> tuple[bytes, list[torch.Tensor], list[Spec]]:
        packed = Packed(parts, lambda path: CPU)
        return packed.blob, [tensor.clone() for tensor in packed.tensors], packed.specs

    return _host(model).access.take(pack, commands)


def unpack(blob: bytes, tensors: list[torch.Tensor], specs: list[Spec]) -> dict[str, nn.Module | torch.Tensor]:
    """The parts, by path, that travelled as ``Packed``."""
    return _Unpickler(blob, tensors, specs).load()


def _host(model: str) -> Host:
    found = _table(_agent.current()).get(model)
    if found is None:
        raise RdmaError("this model is not (or no longer) known here", peer=_agent.current().name)
    return found[1]


def stop_model(model: str) -> Leased:
    """Called at an owner: see ``Host.stop``."""
    found = _table(_agent.current()).get(model)
    return {} if found is None else found[1].stop()


def close_model(model: str, leased: Leased | None) -> None:
    """Called at an owner: give everything back, see ``Host.close``. Idempotent."""
    found = _table(_agent.current()).pop(model, None)
    if found is not None:
        found[1].close(leased)
