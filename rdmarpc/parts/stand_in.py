"""Stand-ins for a whole model: what lies elsewhere is replaced, what is cut stays itself over the stand-ins of its children.

A ``RemotePart`` stands for a module that lies at another worker as a whole; a module that is cut stays itself, over stand-ins
of what lies elsewhere, with ``Shell`` mixed in where its own tensors do.
"""

from __future__ import annotations

import copy
import functools
import operator
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..transport import NotSupported
from .buffer import RemoteBuffer, changed
from .compiled import is_compiled, unwrapped
from .entries import EXTRA, entries_of, load_entries, loads_by_method, loads_itself
from .parameter import Owners, RemoteParameter
from .placing import Places, join, own_tensors
from .remote_part import RemotePart, check_kept, given, new_part
from .tables import TABLES, Table, has


def mirror(original: nn.Module, owners: Owners, worker: str, path: str, made: dict[int, Any], top: bool = True) -> RemotePart:
    """The stand-in of a module tree. ``made`` maps what was mirrored already: shared modules and parameters stay shared."""
    part = made[id(original)] = new_part(original, owners, worker, path, top)
    for name, parameter in original._parameters.items():
        if parameter is not None and id(parameter) not in made:
            made[id(parameter)] = owners.new_parameter(parameter, worker, f"{path}.{name}")
        dict.__setitem__(part._parameters, name, None if parameter is None else made[id(parameter)])
    for name, buffer in original._buffers.items():
        if buffer is not None and id(buffer) not in made:
            made[id(buffer)] = RemoteBuffer(buffer, owners, worker, path, name)
        dict.__setitem__(part._buffers, name, None if buffer is None else made[id(buffer)])
    for name, child in original._modules.items():
        inner = None if child is None else _mirrored(child, owners, worker, f"{path}.{name}", made)
        dict.__setitem__(part._modules, name, inner)
    return part


def _mirrored(child: nn.Module, owners: Owners, worker: str, path: str, made: dict[int, Any]) -> RemotePart:
    """The stand-in of a module inside of a part."""
    known = made.get(id(child))
    part = known if isinstance(known, RemotePart) else mirror(child, owners, worker, path, made, top=False)
    if known is not None:  # one without tensors, an activation say, may be here, too
        made[id(child)] = known
    part._place.within = True
    return part


LISTS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Never called: what uses them looks inside."""


def stand_ins(net: nn.Module, owners: Owners, places: Places) -> tuple[nn.Module, dict[int, Any]]:
    """The stand-in of a whole model, and those of all its modules and parameters by ``id`` of the originals."""
    made: dict[int, Any] = {}
    top = stand_in(net, owners, places, "", made)
    kept: dict[int, Any] = {}
    for module in net.modules():
        shell = made.get(id(module), module)
        if shell is not module and not isinstance(shell, RemotePart):
            # Modules that it also keeps in a list of its own, say.
            for key, value in vars(shell).items():
                if key not in TABLES:
                    where = f"attribute {key!r} of {type(module).__name__}"
                    if id(value) not in kept:  # what several modules share they go on sharing
                        kept[id(value)] = _inside(value, made, where)
                    vars(shell)[key] = kept[id(value)]
    return top, made


def _inside(value: Any, made: Mapping[int, Any], where: str) -> Any:
    """``_over`` for all that containers hold: the very same ones, if nothing in them is to be exchanged."""
    leaves, tree = pytree.tree_flatten(value)
    found = [_over(leaf, made, where) for leaf in leaves]
    return value if all(map(operator.is_, found, leaves)) else pytree.tree_unflatten(found, tree)


def _over(value: Any, made: Mapping[int, Any], where: str) -> Any:
    """What an attribute of a cut module becomes: the stand-in of a module or parameter, a method or ``functools.partial`` of
    one. ``NotSupported`` for a function whose variables hold one."""
    if id(value) in made:
        return made[id(value)]
    if isinstance(value, types.MethodType):
        owner = _over(value.__self__, made, where)
        return value if owner is value.__self__ else types.MethodType(value.__func__, owner)
    if type(value) is functools.partial:
        given = value.func, value.args, value.keywords
        func, args, kwargs = found = _inside(given, made, where)
        return value if found is given else functools.partial(func, *args, **kwargs)
    if isinstance(value, types.FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or ())
        for name, held in [*((name, _held(cell)) for name, cell in cells), *_defaults(value)]:
            for leaf in pytree.tree_leaves(held):
                if made.get(id(leaf), leaf) is not leaf:
                    raise NotSupported(
                        f"{where} is a function that keeps {name!r}, a {type(leaf).__name__} of the model before wrap()",
                        hint="make it a method, or look the module up in the forward",
                    )
    return value


def _held(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it has nothing yet
        return None


def _defaults(function: types.FunctionType) -> list[tuple[str, Any]]:
    return [("defaults", function.__defaults__ or ()), *(function.__kwdefaults__ or {}).items()]


def stand_in(original: nn.Module, owners: Owners, places: Places, path: str, made: dict[int, Any]) -> nn.Module:
    """The module that the wrapped model has at this path: the original where all of it stays here, a ``RemotePart`` where all
    of it is at one other worker, else a copy of the module over the stand-ins of its children. ``made`` as in ``mirror``."""
    if id(original) in made:
        return made[id(original)]
    home = places.owner(path)
    if path and places.whole(path) and not (isinstance(original, LISTS) and home != places.caller):
        if home != places.caller:
            part = mirror(original, owners, home, path, made)
            for inner in part.modules() if loads_itself(original) else ():
                inner._place.loads_itself = True  # type: ignore[union-attr]
            return part
        made[id(original)] = original
        return original
    shell = made[id(original)] = unwrapped(original) if is_compiled(original) else copy.copy(original)
    tables: dict[str, dict[str, Any]] = {"_parameters": dict(original._parameters), "_buffers": dict(original._buffers)}
    vars(shell).update(tables)
    if home != places.caller and own_tensors(original):
        _give_away(shell, original, owners, home, path, made)
    children = {
        name: None if child is None else stand_in(child, owners, places, join(path, name), made)
        for name, child in original._modules.items()
    }
    away = vars(shell).get("_away")
    vars(shell)["_modules"] = Table(children, _keeper(children, path, None))
    for table in ("_parameters", "_buffers"):
        vars(shell)[table] = Table(vars(shell)[table], _keeper(vars(shell)[table], path, away))
    return shell


def _keeper(entries: Mapping[str, Any], path: str, away: Away | None) -> Callable[[str, Any], None]:
    """See ``Table``. ``away``: the module's own tensors are elsewhere, so it cannot get new ones."""
    homes = {name: worker for name, entry in entries.items() if (worker := _home(entry))}

    def refuse(name: str, value: Any) -> None:
        worker = homes.get(name) or (away.worker if away is not None else None)
        if worker is not None:
            raise NotSupported(
                f"{join(path, name)!r} lives on worker {worker!r}: it cannot be added, replaced or deleted from here",
                peer=worker,
                hint="do that before wrap()",
            )

    return refuse


def _home(entry: Any) -> str:
    """The worker of something that a table has, or of something inside of it; empty for what is all here."""
    if isinstance(entry, (RemoteParameter, RemoteBuffer)):
        return entry.worker
    if not isinstance(entry, nn.Module):
        return ""
    for module in entry.modules():
        if isinstance(module, RemotePart):
            return module._place.worker
        if isinstance(module, Shell):
            return module._away.worker
    return ""


def _give_away(shell: nn.Module, original: nn.Module, owners: Owners, home: str, path: str, made: dict[int, Any]) -> None:
    for name, parameter in original._parameters.items():
        if parameter is not None:
            if id(parameter) not in made:
                made[id(parameter)] = owners.new_parameter(parameter, home, join(path, name))
            shell._parameters[name] = made[id(parameter)]
    for name in own_tensors(original):
        if name in shell._buffers:
            buffer = original._buffers[name]
            if buffer is not None and id(buffer) not in made:
                made[id(buffer)] = RemoteBuffer(buffer, owners, home, path, name)
            shell._buffers[name] = made[id(buffer)]
        vars(shell).pop(name, None)
    vars(shell)["_away"] = Away(owners, home, path, original)
    shell.__class__ = type(type(original).__name__, (Shell, type(original)), {"__module__": type(original).__module__})


class Away:
    """Where the tensors of a shell are, their names, and what they contribute to ``state_dict``."""

    def __init__(self, owners: Owners, worker: str, path: str, original: nn.Module) -> None:
        self.owners, self.worker, self.path = owners, worker, path
        self.names, self.entries = frozenset(own_tensors(original)), entries_of(original)
        self.kind = type(original)

    def refusal(self, why: str) -> NotSupported:
        return NotSupported(
            f"tensors of {self.path!r} live on worker {self.worker!r}: {why}", peer=self.worker, hint="do that before wrap()"
        )


class Shell(nn.Module):
    """Mixed into the class of a cut module whose own tensors are at another worker."""

    _away: Away

    def __getattr__(self, name: str) -> Any:
        away = vars(self)["_away"]
        if name in away.names and away.owners.eager is not None:
            return away.owners.eager.fetch(join(away.path, name))
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        away = vars(self)["_away"]
        if has(self, name, value):
            return
        if name not in away.names and not isinstance(value, torch.Tensor):
            super().__setattr__(name, value)
            return
        known = isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter) and name in away.names
        if not known or away.owners.eager is not None or name in self._parameters:
            raise away.refusal(f"{name!r} cannot be set from here")
        away.owners.settings.write((away.worker, away.path, name), value, False)
        if name in self._buffers:
            changed(self._buffers[name], value)

    def __delattr__(self, name: str) -> None:
        if name in self._away.names:
            raise self._away.refusal(f"{name!r} cannot be deleted from here")
        super().__delattr__(name)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        for tensor in (*self._parameters.values(), *self._buffers.values()):
            if tensor is not None:
                check_kept(fn, tensor, self._away.refusal)
        for child in self.children() if recurse else ():
            child._apply(fn)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            self._away.owners.fetch_parts(memo, True)
        return copy_cut(self, self._away.kind, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return given, (copy.deepcopy(self),)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        away = self._away
        if away.owners.apart is not None:
            away.owners.apart.append((away.worker, (away.path, prefix, tuple(away.entries))))
            return
        if keep_vars:
            own = {**self._parameters, **self._buffers}
            destination.update({prefix + name: own[name] for name in away.entries})
        else:
            values = away.owners.ask_owner(away.worker, "own_state", away.path)
            entries = {prefix + name: values[name] for name in away.entries}
            destination.update(entries)
            away.owners.state_copies.add(away.worker, entries)
        if away.kind.get_extra_state is not nn.Module.get_extra_state:
            destination[f"{prefix}{EXTRA}"] = self.get_extra_state()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool, *lists: Any) -> None:
        if loads_by_method(self._away.kind):
            raise self._away.refusal(f"{self._away.kind.__name__} has a way of its own to load them")
        for hook in self._load_state_dict_pre_hooks.values():
            hook(state_dict, prefix, local_metadata, strict, *lists)
        extra = self._away.kind.set_extra_state is not nn.Module.set_extra_state
        if extra and prefix + EXTRA in state_dict:
            self.set_extra_state(state_dict[prefix + EXTRA])
        elif extra and strict:
            lists[0].append(prefix + EXTRA)
        others = [*self._modules, EXTRA] if extra else self._modules
        load_entries(self._away, others, state_dict, prefix, local_metadata, strict, *lists)


def copy_cut(shell: nn.Module, kind: type[nn.Module], memo: dict[int, Any]) -> Any:
    """A module of class ``kind`` like this cut one, over copies of everything in it; ``memo`` has what stands for remote parts
    (``Owners.fetch_parts``)."""
    if id(shell) in memo:
        return memo[id(shell)]
    made = memo[id(shell)] = object.__new__(kind)
    nn.Module.__init__(made)
    for name, value in vars(shell).items():
        if name in TABLES:
            vars(made)[name] = {key: copy.deepcopy(entry, memo) for key, entry in value.items()}
        elif name != "_away":
            vars(made)[name] = copy.deepcopy(value, memo)
    if isinstance(shell, Shell):
        vars(made).update(memo[id(shell._away)])
    return made


def fill_memo(net: nn.Module, parts: Mapping[str, Any], memo: dict[int, Any]) -> None:
    """Put fetched parts, by path, into the memo of a ``deepcopy`` of the stand-ins of a model, under the present flags."""

    def pair(part: nn.Module, real: nn.Module) -> None:
        memo[id(part)] = real
        real.training = part.training
        for name, parameter in part._parameters.items():
            if parameter is not None:
                memo[id(parameter)] = real._parameters[name].requires_grad_(parameter.requires_grad)  # type: ignore[union-attr]
        for name, buffer in part._buffers.items():
            memo[id(buffer)] = real._buffers[name]
        for name, child in part._modules.items():
            if child is not None:
                pair(child, real.get_submodule(name))

    for module in net.modules():
        if isinstance(module, RemotePart) and module._place.top:
            pair(module, _fetched(parts, module._place.path))
        elif isinstance(module, Shell):
            away = module._away
            own = {name: _fetched(parts, join(away.path, name)) for name in away.names}
            for name, tensor in {**module._parameters, **module._buffers}.items():
                if tensor is not None:
                    memo[id(tensor)] = own.pop(name).requires_grad_(tensor.requires_grad)
            memo[id(away)] = own


def _fetched(parts: Mapping[str, Any], path: str) -> Any:
    """What has this path in fetched parts. A list of modules travels as one part, and its items are parts of their own here."""
    above = path
    inside: list[str] = []
    while above not in parts:
        above, _, name = above.rpartition(".")
        inside.insert(0, name)
    return functools.reduce(getattr, inside, parts[above])
