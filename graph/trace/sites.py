"""The operation that allocated the storage of each sent tensor, found while the capture runs on tensors without data.

Attributed by storage, not by edge: what an in-place operation, a view, a reshape or an identity hands on is the memory of
whoever allocated it (Xue et al., EuroSys'19, "dynamic tracing"; here before the first step, because fake tensors alias
each other as the real ones will).
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from .values import Mark, paths
from .writes import draws

INSIDE = "@"
"""In a path: what a replica of a part has inside."""

OPERATION, INPUT, PARAMETER, BUFFER, CONSTANT = "operation", "input", "parameter", "buffer", "constant"


@dataclass(frozen=True, slots=True)
class Site:
    """Where a storage comes from. Plain data.

    ``kind`` is one of the above. ``path`` is the innermost module that ran (or the function, as ``relu()``); otherwise the name
    of the input, parameter or buffer, and for a constant the module that brought it along. ``operation`` is the operation of
    aten, ``count`` says that it made the n-th storage (from 1) that came out of an operation in this ``instruction``, one of
    the traced operations.
    """

    kind: str
    path: str
    operation: str = ""
    count: int = 0
    instruction: str = ""

    def __str__(self) -> str:
        path = readable(self.path)
        if self.kind == INPUT:
            return called(path)
        if self.kind != OPERATION:
            return f"{self.kind} {path}"
        return f"{path}: {self.operation}" + (f" #{self.count}" if self.count > 1 else "")


class Allocations(TorchDispatchMode):
    """Who made which storage. Entered around a run of the captured graph, inside the fake mode; ``at`` before each of its
    operations, ``of(tensor)`` afterwards. ``drawing`` has those that draw random numbers. Keeps every storage of the run, so
    that no address comes twice: use it where tensors have no data."""

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._sites: dict[int, tuple[torch.UntypedStorage, Site]] = {}
        self._paths: dict[int, list[str]] = {}
        self._instruction, self._where, self._count = "", "", 0
        self.drawing: set[str] = set()
        for path, module in model.named_modules(remove_duplicate=False):
            self._paths.setdefault(id(module), []).append(path)
        for name, parameter in model.named_parameters():
            self.note(parameter, Site(PARAMETER, name))
        for name, buffer in model.named_buffers():
            self.note(buffer, Site(BUFFER, name))

    def at(self, instruction: str, where: str) -> None:
        """What runs from now on belongs to this traced operation (any name that no other has). ``where`` is the path of its
        module, or what to call it when no module runs."""
        self._instruction, self._where, self._count = instruction, where, 0

    def note(self, tensor: torch.Tensor, site: Site) -> None:
        """Where the storage of a tensor comes from, unless that is known."""
        storage = _storage(tensor)
        if storage is not None:
            self._sites.setdefault(storage._cdata, (storage, site))

    def of(self, tensor: torch.Tensor) -> Site | None:
        """``None`` for a tensor that nothing in the run made or met (or that has no storage)."""
        storage = _storage(tensor)
        found = None if storage is None else self._sites.get(storage._cdata)
        return None if found is None else found[1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and self.of(leaf) is None:
                self.note(leaf, Site(CONSTANT, self._path()))  # was there before: an attribute of a module
        if draws(func, args, kwargs or {}):
            self.drawing.add(self._instruction)
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and self.of(leaf) is None and _storage(leaf) is not None:
                self._count += 1
                operation = func.name().split(".")[0].removeprefix("aten::")
                self.note(leaf, Site(OPERATION, self._path(), operation, self._count, self._instruction))
        return result

    def _path(self) -> str:
        # From the stack rather than by hooks: some modules take another way when they have hooks.
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            if frame.f_code is nn.Module._call_impl.__code__:
                paths = self._paths.get(id(frame.f_locals["self"]))
                if paths:
                    return next((path for path in paths if f"{path}.".startswith(f"{self._where}.")), paths[0])
            frame = frame.f_back
        return self._where


SHARD = "shard"
"""In the ``meta`` of a node: the number of the replica for whose part of the batch it is."""

OF_INPUT = "of input"
"""There: the input of which it is that part."""


def place_of(node: fx.Node) -> str:
    """The path of what a node calls or gets; a function or method as ``relu()``, behind the module in which it is called."""
    if node.op in ("call_module", "get_attr"):
        return str(node.target)
    target: Any = node.target
    name: Any = (
        target if isinstance(target, str) else getattr(target, "_opname", None) or getattr(target, "__name__", str(target))
    )
    name = re.sub(r"^__(\w+)__$", r"\1", name)  # of tensors: getitem
    path = node.meta.get("scope", "")
    return f"{path}.{name}()" if path else f"{name}()"


def label_of(node: fx.Node) -> str:
    """The same for people: ``features.0 (replica 1)``."""
    label = node.meta.get("label") or readable(place_of(node))
    return f"{label} (replica {node.meta[SHARD]})" if SHARD in node.meta and " (replica " not in label else label


def readable(path: str) -> str:
    """A path of the model that was captured, in that which the user has."""
    if path.startswith("_tensor_constant"):
        return f"constant {path.removeprefix('_tensor_constant')}"
    replica, _, inside = path.partition(".") if path.startswith("@") else ("", "", path)
    inside = inside.replace(f".{INSIDE}", "")
    return f"{inside} (replica {replica[1:]})" if replica[1:] else inside


def called(name: str) -> str:
    """An input: ``input x``; one that has no name, by its number."""
    return "input " + (name.removeprefix("input") if re.fullmatch(r"input\d+", name) else name)


def input_names(model: nn.Module, join: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]], count: int) -> list[str]:
    """What the forward calls its tensor inputs: ``x``, ``batch['ids']``, ``pair[0]``. See ``capture`` for ``join``."""
    marks = [Mark() for _ in range(count)]
    try:
        args, kwargs = join(*marks)
    except Exception:  # of an object that looks at the tensors that it is made of
        return [f"input{at}" for at in range(count)]
    try:
        given = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        given = {"args": args, **kwargs}  # the call itself will say what is wrong
    found = {}
    for name, argument in given.items():
        for path, leaf in paths(argument):
            found[id(leaf)] = name + path
    return [found.get(id(mark), f"input{at}") for at, mark in enumerate(marks)]


def name_inputs(sites: Mapping[Any, Site], names: Sequence[str]) -> dict[Any, Site]:
    """The same with inputs by their names, where the trace calls them ``input0`` and so on."""
    called = {f"input{at}": name for at, name in enumerate(names)}
    return {
        key: replace(site, path=called.get(site.path, site.path)) if site.kind == INPUT else site for key, site in sites.items()
    }


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    return tensor.untyped_storage() if tensor.layout is torch.strided else None
