"""Copies of all remote parts of a model in this process, kept as their owners have them.

Invariants:
1. A parameter's copy is one leaf for the life of the model: graphs of several forwards meet in it, as in one process. It is
   written only where the owner's value is another one, and then in place: a graph that needs the old value says so.
2. A gradient that reaches a copy goes to its owner at once and is added to what is there; the copy keeps none.
3. What a forward changes in a part (buffers, attributes) goes to its owner before anything else happens there, and so does
   what the program writes into memory that a part keeps: a result that it was given, an input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..graph.caller.written import was_written
from ..graph.guards.kept import Kept, plain
from ..graph.work.access import INTERNAL
from ..parts.parameter import Owners, RemoteParameter
from ..parts.placing import join
from ..parts.remote_part import RemotePart
from ..parts.stand_in import Shell
from ..transport import NotSupported
from . import hooks
from .aside import aside
from .mixing import Mixing

_MISSING = object()
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_DENSE = "parts that run at their workers may have sparse gradients (Embedding(sparse=True)); here they are to be dense"


class Replica:
    """``top`` is the stand-in of the whole model. One thread at a time."""

    def __init__(self, owners: Owners, top: nn.Module) -> None:
        self.parts: dict[str, nn.Module] = {}
        """Every module that lies elsewhere in a whole part, by path."""
        self.tensors: dict[str, torch.Tensor] = {}
        """What cut modules have elsewhere, by path."""
        self.graphs: dict[tuple[str, str], Any] = {}
        """What forwards here have left in attributes, by path and name, whose tensors have a graph: owners have it without."""
        self.mixing = Mixing(top)
        self._owners, self._top = owners, top
        self._leaves: dict[int, nn.Parameter] = {}
        self._values: dict[int, torch.Tensor] = {}
        """What the owners have, where nothing that a forward does reaches it."""
        self._by_path: dict[str, RemoteParameter] = {}
        self._workers: dict[str, str] = {}
        self._epoch: Any = None
        self._backward = False
        self._before: dict[str, dict[str, tuple[Any, Any]]] = {}
        self._kept: list[tuple[str, str, Any, list[tuple[torch.Tensor, int]]]] = []
        """Attributes, and the versions of their tensors, as of ``_moment``."""
        self._moment: tuple[int, ...] = ()

    def leaf(self, parameter: RemoteParameter) -> nn.Parameter:
        """The copy of a parameter, with the owner's present value."""
        self.refresh()
        self.flag_leaf(parameter)
        return self._leaves[id(parameter)]

    @property
    def current(self) -> bool:
        """Whether nothing was sent since the copies were made, so what they hold is what the owners have."""
        return self._epoch is not None and self._epoch == self._owners.caller.control.epoch()

    def part(self, path: str) -> nn.Module | None:
        """The copy of a module, while it is what its owner has."""
        return self.parts.get(path) if self.current else None

    def refresh(self) -> None:
        """Fetch what the owners have, if it may be something else now."""
        self._backward = False  # one that has failed does not say so
        self.give_written()
        with aside():
            self._owners.values.flush()
            if not self.current:
                self._fetch()
            self.flag(self._top)

    def _fetch(self) -> None:
        memo: dict[int, Any] = {}
        self._owners.fetch_parts(memo)
        before, self.parts, self.tensors, self._workers = self.parts, {}, {}, {}
        for module in self._top.modules():
            if isinstance(module, RemotePart):
                place = module._place
                self.parts[place.path], self._workers[place.path] = memo[id(module)], place.worker
                hooks.join(module, memo[id(module)])
            elif isinstance(module, Shell):
                away = module._away
                own = {**module._parameters, **module._buffers}
                found = {**memo[id(away)], **{name: memo[id(t)] for name, t in own.items() if t is not None}}
                self.tensors.update({join(away.path, name): tensor for name, tensor in found.items()})
                self._workers[away.path] = away.worker
        new = {id(p): memo[id(p)] for p in self._top.parameters() if isinstance(p, RemoteParameter)}
        for parameter in self._top.parameters():
            if isinstance(parameter, RemoteParameter):
                self._take(parameter, new[id(parameter)])
        self._put_leaves(new)
        self._epoch = self._owners.caller.control.epoch()
        self._owners.settings.give_common(self.parts)
        _keep_tensors(before, self.parts, self._workers)
        for (path, name), value in tuple(self.graphs.items()):
            if path in self.parts and _alike(_own(self.parts[path]).get(name), value):
                setattr(self.parts[path], name, value)
            else:
                del self.graphs[path, name]
        self.remember()

    def _take(self, parameter: RemoteParameter, value: nn.Parameter) -> None:
        """What the owner has now, into the leaf."""
        leaf = self._leaves.get(id(parameter))
        if leaf is None or leaf.shape != value.shape or leaf.dtype != value.dtype:
            leaf = self._leaves[id(parameter)] = value
            leaf.grad = None
            leaf.requires_grad_(True)  # for the hook, which stays when it is frozen
            leaf.register_post_accumulate_grad_hook(_giver(parameter, self.mixing, self._went_back))
            self.mixing.used = True
            self._values[id(parameter)] = leaf.detach().clone()
            return
        if not _same(leaf, value):
            with torch.no_grad():
                leaf.copy_(value)
        self._values[id(parameter)] = value.detach()

    def _put_leaves(self, new: dict[int, nn.Parameter]) -> None:
        """In the place of the parameters that came."""
        leaves = {id(value): self._leaves[key] for key, value in new.items()}
        for module in self.parts.values():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = leaves.get(id(parameter), parameter)
        self.tensors = {path: leaves.get(id(tensor), tensor) for path, tensor in self.tensors.items()}

    def flag(self, within: nn.Module) -> None:
        """Give copies the present flags of what stands for them in a module, which a forward may change as it runs."""
        for module in within.modules():
            if isinstance(module, RemotePart):
                copied = self.parts[module._place.path]
                copied.training, copied._is_full_backward_hook = module.training, module._is_full_backward_hook
        for parameter in within.parameters():
            if isinstance(parameter, RemoteParameter):
                self.flag_leaf(parameter)

    def flag_leaf(self, parameter: RemoteParameter) -> None:
        """``flag`` of one parameter."""
        leaf = self._leaves[id(parameter)]
        with torch._C.DisableTorchFunctionSubclass():
            wanted = parameter.requires_grad
        if leaf.requires_grad != wanted:
            with aside():
                leaf.requires_grad_(wanted)

    # -- what a forward changes

    @contextmanager
    def changed(self, path: str, name: str) -> Iterator[nn.Module]:
        """Around what changes an attribute at its owner while a forward runs here: gives the copy, which is to change too."""
        self.graphs.pop((path, name), None)
        current, module = self.current, self.parts[path]
        yield module
        self._before[path].pop(name, None)
        if name in (own := _own(module)):
            self._before[path][name] = own[name], _mark(own[name])
        if current:
            self._epoch = self._owners.caller.control.epoch()

    def remember(self) -> None:
        """What the parts hold now is what their owners have."""
        self._before = {path: {n: (v, _mark(v)) for n, v in _own(module).items()} for path, module in self.parts.items()}
        self._before[""] = {path: (tensor, _mark(tensor)) for path, tensor in self.tensors.items()}
        self._members = {path: _members(module) for path, module in self.parts.items()}
        self._versions = {key: leaf._version for key, leaf in self._leaves.items()}
        self._note()

    def _note(self) -> None:
        """What was written until now has been seen."""
        self._moment = self._owners.caller.control.moment()
        of_parts = ((path, name, value) for path, module in self.parts.items() for name, value in _own(module).items())
        of_cut = ((*_split(path), tensor) for path, tensor in self.tensors.items() if not isinstance(tensor, nn.Parameter))
        self._kept = [
            (*item, [(tensor, tensor._version) for tensor in tensors])
            for item in (*of_parts, *of_cut)
            if (tensors := _tensors(item[2])) and not self._is_common(*item)
        ]

    def give_written(self) -> None:
        """Send what the program has written into memory that a part keeps. ``NotSupported`` where the owner may have something
        else by now."""
        if self._owners.eager is not None or self._backward or not self.parts:
            return
        written = [item[:3] for item in self._kept if any(tensor._version != version for tensor, version in item[3])]
        remote = [p for p in self._top.parameters() if isinstance(p, RemoteParameter) and id(p) in self._leaves]
        parameters = [p for p in remote if self._leaves[id(p)]._version != self._versions[id(p)]]
        if not written and not parameters:
            return
        control, current = self._owners.caller.control, self.current
        stale = self._moment != control.moment() or (parameters and not current)
        self.remember()
        if stale:
            path, name = (parameters[0].path, "") if parameters else written[0][:2]
            raise was_written(repr(join(path, name) if name else path))
        with aside():
            for parameter in parameters:
                parameter.data.copy_(self._leaves[id(parameter)].detach())
            self._send(written)
            self._moment = control.moment()
            if current:
                self._epoch = control.epoch()

    def give_back(self) -> None:
        """Send what a forward has changed. ``NotSupported`` for what cannot travel."""
        with aside():
            self._give_back()

    def _give_back(self) -> None:
        for parameter in self._top.parameters():
            if isinstance(parameter, RemoteParameter) and self._leaves[id(parameter)]._version != self._versions[id(parameter)]:
                self._versions[id(parameter)] = self._leaves[id(parameter)]._version
                raise parameter._refuse("the forward writes into it", "write into it between steps")
        written = [p for p in self._top.parameters() if isinstance(p, RemoteParameter) and self._is_written(p)]
        for parameter in written:
            parameter.data.copy_(leaf := self._leaves[id(parameter)].detach())
            self._values[id(parameter)].copy_(leaf)
        changed = self._changed()
        if changed or written:
            self._give(changed)
            self._epoch = self._owners.caller.control.epoch()
        else:
            self._note()

    def _changed(self) -> list[tuple[str, str, Any]]:
        """Attributes and buffers that are not what they were, as (path of the module, name, value)."""
        changed: list[tuple[str, str, Any]] = []
        seen: set[int] = set()
        for path, module in self.parts.items():
            if id(module) not in seen:
                seen.add(id(module))
                self._check_members(path, module)
                found = self._changes(path, _own(module), self._before[path])
                changed += [item for item in found if not self._is_common(*item)]
        for path, tensor in self.tensors.items():
            if _moved(tensor, self._before[""][path][1]):
                changed.append((*_split(path), tensor))
        return changed

    def _went_back(self) -> None:
        """A backward reaches a copy: what it changes in parts (a hook may count) is sent when it is over."""
        if not self._backward:
            self._backward = True
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._give_back_later)

    def _give_back_later(self) -> None:
        self._backward = False
        if self._owners.eager is not None:
            return  # the forward that runs gives back
        with aside():
            current, changed = self.current, self._changed()
            if changed:
                self._give(changed)
                self._epoch = self._owners.caller.control.epoch() if current else None

    def _is_written(self, parameter: RemoteParameter) -> bool:
        """Whether the forward has written into its ``data``, of which autograd knows nothing."""
        return not _same(self._leaves[id(parameter)].detach(), self._values[id(parameter)])

    def _is_common(self, path: str, name: str, value: Any) -> bool:
        """Whether that is the very value that modules here have, too."""
        held = path in self._before and value is self._before[path].get(name, (_MISSING,))[0]
        return held and self._owners.settings.is_common(self._workers[path], path, name)

    def _check_members(self, path: str, module: nn.Module) -> None:
        before, now = self._members[path], _members(module)
        for name in {**before, **now}:
            if before.get(name) is not now.get(name):
                raise NotSupported(
                    f"the forward exchanges {name!r} of {path!r}, which lives at another worker",
                    hint="let it choose between modules, or parameters, that stay where they are",
                )

    @staticmethod
    def _changes(path: str, now: dict[str, Any], before: dict[str, tuple[Any, Any]]) -> list[tuple[str, str, Any]]:
        found = []
        for name, value in now.items():
            old, mark = before.get(name, (_MISSING, None))
            same = value is old or (plain(value) and type(value) is type(old) and value == old)
            if not same or _moved(value, mark):
                found.append((path, name, value))
        if gone := before.keys() - now.keys():
            raise NotSupported(f"the forward deletes attribute {min(gone)!r} of {path!r}, which lives at another worker")
        return found

    def _give(self, changed: list[tuple[str, str, Any]]) -> None:
        """To the owners, which have them then."""
        self._owners.values.flush()
        self._send(changed)
        self.remember()

    def _send(self, changed: list[tuple[str, str, Any]]) -> None:
        found: dict[str, dict[tuple[str, str], Any]] = {}
        for path, name, value in changed:
            self.graphs.pop((path, name), None)
            if _has_graph(value):
                self.graphs[path, name] = value
            value = value.detach().clone() if isinstance(value, torch.Tensor) else value
            found.setdefault(self._workers[path], {})[path, name] = value
        for worker, attributes in found.items():
            self._owners.settings.give(worker, attributes)


def _giver(parameter: RemoteParameter, mixing: Mixing, began: Callable[[], None]) -> Callable[[torch.Tensor], None]:
    """What adds a gradient that has reached the copy to the one at the owner. ``began`` is called before."""

    def give(leaf: torch.Tensor) -> None:
        began()
        grad, leaf.grad = leaf.grad, None
        with torch._C.DisableTorchFunctionSubclass():
            frozen = not parameter.requires_grad  # since the forward: then autograd leaves it out
        if grad is None or frozen:
            return
        if grad.layout is not torch.strided or grad.requires_grad:
            if grad.layout is not torch.strided:
                raise parameter._refuse(f"a gradient is {grad.layout}; it cannot be sent there", _DENSE)
            why = "create_graph=True in backward(); it cannot be sent there"
            raise parameter._refuse(why, "torch.autograd.grad gives gradients that have a graph")
        mixing.given(parameter)
        with aside():
            there = parameter.grad
            if there is None:
                parameter.grad = grad
            else:
                there.add_(grad)

    return give


def _keep_tensors(before: dict[str, nn.Module], parts: dict[str, nn.Module], workers: dict[str, str]) -> None:
    """The tensors that copies of parts had before may be the program's, too. They stay where their worker has the same: all of
    them or none, as they may share memory."""
    found: dict[str, list[tuple[nn.Module, str, Any, Any]]] = {}
    for path, module in parts.items():
        old = _own(before[path]) if path in before else {}
        items = found.setdefault(workers[path], [])
        items += [(module, name, old.get(name), value) for name, value in _own(module).items() if _tensors(value)]
    for items in found.values():
        if all(_alike(old, value) for _, _, old, value in items):
            for module, name, old, _ in items:
                (module._buffers if name in module._buffers else vars(module))[name] = old


def _own(module: nn.Module) -> dict[str, Any]:
    """Buffers, and attributes of its own."""
    attributes = {name: value for name, value in vars(module).items() if name not in INTERNAL}
    return {**module._buffers, **attributes}


def _split(path: str) -> tuple[str, str]:
    above, _, name = path.rpartition(".")
    return above, name


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor) and not leaf.is_inference()]


def _members(module: nn.Module) -> dict[str, Any]:
    """Its parameters and children."""
    return {**module._parameters, **module._modules}


def _has_graph(value: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None for leaf in pytree.tree_leaves(value))


def _alike(one: Any, other: Any) -> bool:
    """Whether two values are the same but for graphs of their tensors."""
    (ours, tree), (theirs, other_tree) = pytree.tree_flatten(one), pytree.tree_flatten(other)
    return tree == other_tree and all(
        _same(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a is b or (plain(a) and a == b)
        for a, b in zip(ours, theirs)
    )


def _mark(value: Any) -> Any:
    """By which a change inside of a value is seen."""
    if isinstance(value, nn.Parameter):
        return None
    if isinstance(value, torch.Tensor):
        return value.detach().clone()  # batch norm writes behind the version counter
    return None if plain(value) else Kept(value)


def _moved(value: Any, mark: Any) -> bool:
    if isinstance(mark, Kept):
        return not mark.holds()
    return isinstance(mark, torch.Tensor) and not _same(value.detach(), mark)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit, as far as it shows: a NaN is like a NaN, the zeros differ."""
    if one.shape != other.shape or one.dtype != other.dtype or one.layout is not torch.strided:
        return False
    with torch.no_grad():
        if one.dtype.is_complex:
            one, other = torch.view_as_real(one), torch.view_as_real(other)
        if one.is_contiguous() and other.is_contiguous() and one.dim():
            bits = _BITS[one.element_size()]
            if torch.equal(one.view(bits), other.view(bits)):
                return True  # in one pass over them
        if not one.is_floating_point():
            return torch.equal(one, other)
        alike = (one == other) & (torch.signbit(one) == torch.signbit(other)) | (one.isnan() & other.isnan())
        return bool(alike.all())
