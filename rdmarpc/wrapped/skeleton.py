"""The model that is traced: what the wrapped model is now, without data."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeCopyMode

from ..graph.trace.capture import copy_attributes, mode_of
from ..graph.trace.devices import tensors_of
from ..parts.placing import Places, join
from ..parts.remote_part import RemotePart
from ..parts.stand_in import LISTS
from ..parts.tables import TABLES
from ..transport import NotSupported


def refreshed(live: nn.Module, known: nn.Module, places: Places, original: nn.Module) -> nn.Module:
    """A skeleton of ``live``, the stand-in of a whole model, with its present modules, hooks and attributes; of what lies
    elsewhere, that of ``known``, the skeleton of the ``original``. References to modules of the original are such to those of
    the skeleton. Raises ``NotSupported`` for what was put where a part of another worker stood."""
    paths = dict(known.named_modules(remove_duplicate=False))
    originals = dict(original.named_modules(remove_duplicate=False))
    memo: dict[int, Any] = {}
    cut: dict[int, tuple[nn.Module, nn.Module | None]] = {}
    here: list[nn.Module] = []
    left = [("", live)]
    while left:
        path, module = left.pop()
        before = paths.get(path)
        if isinstance(module, RemotePart):
            if before is None:
                raise _moved(path, places.owner(path))
            memo[id(module)] = flagged(before, module)
            for inner, there in before.named_modules(remove_duplicate=False):
                memo.setdefault(id(originals.get(join(path, inner) if inner else path, there)), there)
            continue
        _check_place(path, module, places)
        _known_tensors(module, before, memo)
        if not path or not places.whole(path) or isinstance(module, LISTS):
            cut[id(module)] = module, before
            away: Any = vars(module).get("_away")
            made = memo[id(module)] = object.__new__(type(module) if away is None else away.kind)
            memo[id(originals.get(path, module))] = made
        else:
            here.append(module)
        left += [(join(path, name), child) for name, child in module._modules.items() if child is not None]
    with FakeCopyMode(mode_of(known)):
        for module in reversed(here):  # the innermost first
            copy_attributes(module, memo)
            try:
                copy.deepcopy(module, memo)
            except Exception as error:  # of its own methods
                raise NotSupported(f"a {type(module).__name__} cannot be copied without its data: {error}") from error
        for module, before in reversed(cut.values()):
            _copy_cut(module, before, memo)
    return without_hooks(memo[id(live)])


def without_hooks(top: nn.Module) -> nn.Module:
    """The same, without the hooks of the model as a whole: those run here, around its forward."""
    for name, table in vars(top).items():
        if name.endswith("_hooks"):
            vars(top)[name] = type(table)()
    return top


def flagged(known: nn.Module, live: nn.Module) -> nn.Module:
    """A skeleton under the present flags of what stands for it."""
    here = dict(live.named_modules(remove_duplicate=False))
    for path, module in known.named_modules(remove_duplicate=False):
        if path in here:
            module.training = here[path].training
    flags = dict(live.named_parameters(remove_duplicate=False))
    for path, parameter in known.named_parameters(remove_duplicate=False):
        if path in flags:
            parameter.requires_grad_(flags[path].requires_grad)
    return known


def _check_place(path: str, module: nn.Module, places: Places) -> None:
    home = places.owner(path)
    if home == places.caller:
        return
    if path and places.whole(path) and not isinstance(module, LISTS):
        raise _moved(path, home)
    with torch._C.DisableTorchFunctionSubclass():
        for name, tensor in tensors_of(module).items():
            if not hasattr(tensor, "worker"):  # a stand-in
                raise _moved(join(path, name), home)


def _moved(path: str, home: str) -> NotSupported:
    return NotSupported(
        f"{path!r} was added or replaced after wrap(), where its placement names worker {home!r}",
        hint="change the model before wrap(), or wrap it again",
    )


def _known_tensors(module: nn.Module, before: nn.Module | None, memo: dict[int, Any]) -> None:
    """Keep the tensors without data that there are."""
    if before is None:
        return
    with torch._C.DisableTorchFunctionSubclass():
        there = tensors_of(before)
        for name, tensor in tensors_of(module).items():
            fake = there.get(name)
            if fake is not None and hasattr(tensor, "worker"):  # a stand-in
                memo[id(tensor)] = fake.requires_grad_(tensor.requires_grad)
                continue
            if fake is None or (fake.shape, fake.dtype) != (tensor.shape, tensor.dtype):
                continue  # a tensor that was moved is still captured on the device where it was (``devices``)
            if isinstance(tensor, nn.Parameter) == isinstance(fake, nn.Parameter) and fake.is_leaf:
                memo[id(tensor)] = fake.requires_grad_(tensor.requires_grad)


def _copy_cut(module: nn.Module, before: nn.Module | None, memo: dict[int, Any]) -> None:
    """Fill the copy of a module that is traced through: its present attributes, and those of its tensors that lie elsewhere."""
    own = vars(memo[id(module)])
    shared = {key: value for key, value in vars(module).items() if key != "_away"}
    for name, value in shared.items():
        if name in TABLES:
            own[name] = {key: copy.deepcopy(entry, memo) for key, entry in value.items()}
            continue
        try:
            own[name] = copy.deepcopy(value, memo)
        except Exception:  # what cannot be copied is shared
            own[name] = value
    if before is not None and "_away" in vars(module):
        for name, tensor in tensors_of(before).items():
            if name not in before._parameters and name not in before._buffers:
                own.setdefault(name, tensor)
        for table in ("_parameters", "_buffers"):
            own[table] = {**getattr(before, table), **own[table]}
