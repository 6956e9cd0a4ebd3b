"""The attributes of remote parts, as their caller reads and sets them.

What is set here is set at the owner at once. Values that can be changed inside (lists, configuration objects) went to the owner
as copies; those here are compared before each step, and what was changed goes there. What the owner's part has changed in its
copy cannot be read from here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from ..graph.guards.kept import Kept, plain
from ..graph.guards.side_effects import code_in
from ..graph.trace.capture import mode_of
from ..graph.work.access import AS_IT_CAME, CHANGED, INTERNAL, MISSING, PLAIN, TENSOR
from ..parts.parameter import Where
from ..parts.remote_part import Place
from ..transport import NotSupported


class Settings:
    """``ask(worker, method, ...)`` calls the owner's ``Access``; ``shape`` is the model without data, which gets the same
    attributes; ``moment()`` changes whenever a part may have run; ``recoded(path)`` is called when the module has got a
    function."""

    def __init__(
        self, ask: Callable[..., Any], shape: nn.Module, moment: Callable[[], Hashable], recoded: Callable[[str], None]
    ) -> None:
        self.number = 0
        """Of the present settings, for what is captured under them."""
        self.copies: Callable[[str], nn.Module | None] = lambda path: None
        """The copy of a module here, by path, while it is what its owner has, or a forward computes with it here."""
        self.changed: Callable[[str, str], AbstractContextManager[nn.Module | None]] = lambda path, name: nullcontext()
        """Around a change of an attribute: gives the copy that a forward computes with here, which is to change too."""
        self.here: Callable[[], Iterable[nn.Module]] = lambda: ()
        """The modules whose attributes are here."""
        self.hooked: list[tuple[Place, dict[str, set[int]]]] = []
        """The modules that came with hooks, and the numbers of those that are there, by table."""
        self._ask, self._shape, self._moment, self._recoded = ask, shape, moment, recoded
        self._numbers: dict[Hashable, int] = {frozenset(): 0}
        self._set: dict[Where, Hashable] = {}
        self._shared: dict[Where, Any] = {}
        self._watched: dict[int, tuple[Kept, list[Where]]] = {}
        self._fresh: dict[Where, Kept] = {}
        """What was shared since the owners were told what is common."""
        self._common: dict[str, set[tuple[str, str]]] = {}
        self._read: dict[Where, tuple[str, Any]] = {}
        self._read_at: Hashable = None

    def share(self, where: Where, value: Any) -> None:
        """See ``Attributes.share``."""
        self._forget(where)
        kept, places = self._watched.get(id(value)) or (Kept(value), [])
        if not kept.opaque:
            self._fresh[where] = kept
        if not kept.foreign and not kept.opaque:
            self._shared[where] = value
            places.append(where)
            self._watched[id(value)] = kept, places

    def _forget(self, where: Where) -> None:
        self._fresh.pop(where, None)
        self._common.get(where[0], set()).discard(where[1:])
        if where in self._shared:
            number = id(self._shared.pop(where))
            self._watched[number][1].remove(where)
            if not self._watched[number][1]:
                del self._watched[number]

    def push(self) -> None:
        """Before a step: tell the owners what was changed here inside of values that they have too, and the hooks that modules
        came with and that were removed here."""
        self._unhook()
        if self._fresh:
            self._join()
        changed = [places for kept, places in self._watched.values() if not kept.holds()]
        if not changed:
            return
        by_worker: dict[str, dict[tuple[str, str], Any]] = {}
        for worker, path, name in (where for places in changed for where in places):
            by_worker.setdefault(worker, {})[path, name] = self._shared[worker, path, name]
        for worker, values in by_worker.items():
            for (path, name), value in values.items():
                _check(f"{path}.{name}", worker, value)
            self._ask(worker, "write", values, False)
            for (path, name), value in values.items():
                self._apply((worker, path, name), value)
        for places in changed:
            value = self._shared[places[0]]
            self._watched[id(value)] = Kept(value), places

    def _unhook(self) -> None:
        for place, known in self.hooked:
            gone = [(name, number) for name, numbers in known.items() for number in numbers - place.came[name].keys()]
            if not gone:
                continue
            self._ask(place.worker, "unhook", place.path, gone)
            tables = vars(self._shape.get_submodule(place.path))
            for name, number in gone:
                known[name].discard(number)
                tables[name].pop(number, None)
            left = frozenset((name, number) for name, numbers in known.items() for number in numbers)
            self._count((place.worker, place.path, "its hooks"), left)

    def _join(self) -> None:
        """Tell the owners which of these values, or what is inside of them, modules here or parts at other workers have, too:
        those would not see what a part changes there."""
        holders: dict[int, set[str]] = {}
        for module in self.here():
            for name, value in vars(module).items():
                if name not in INTERNAL and id(value) not in holders:
                    holders.update((number, {""}) for number in Kept(value).inside)
        known = {where: kept for kept, places in self._watched.values() for where in places} | self._fresh
        for (worker, _, _), kept in known.items():
            for number in kept.inside:
                holders.setdefault(number, set()).add(worker)
        new: set[str] = set()
        for (worker, path, name), kept in known.items():
            common = self._common.setdefault(worker, set())
            if (path, name) not in common and any(len(holders[number]) > 1 for number in kept.inside):
                common.add((path, name))
                new.add(worker)
        self._fresh.clear()
        for worker in new:
            self._ask(worker, "join", self._common[worker])

    def give_common(self, parts: Mapping[str, nn.Module]) -> None:
        """See ``Attributes.give_common``."""
        for worker, names in self._common.items():
            for path, name in names:
                if (worker, path, name) in self._shared and path in parts:
                    setattr(parts[path], name, self._shared[worker, path, name])

    def is_common(self, worker: str, path: str, name: str) -> bool:
        """See ``Attributes.is_common``."""
        return (path, name) in self._common.get(worker, ()) and (worker, path, name) in self._shared

    def read(self, where: Where) -> Any:
        """See ``Attributes.read``."""
        worker, path, name = where
        copied = self.copies(path)
        if copied is not None:
            return getattr(copied, name)
        now = self._moment()
        if now != self._read_at:
            self._read.clear()
            self._read_at = now
        if where not in self._read:
            self._read[where] = self._ask(worker, "read", path, name)
        what, value = self._read[where]
        if what == PLAIN:
            return value
        if what == TENSOR:
            return value.clone()
        if what == MISSING:
            raise AttributeError(value)
        if what == AS_IT_CAME and where in self._shared:
            return self._shared[where]
        why = f"is a {value} that a part keeps" if what == CHANGED else "has tensors or modules in it"
        raise NotSupported(f"attribute {name!r} of {path!r}, which lives on worker {worker!r}, {why}: it cannot be read here")

    def write(self, where: Where, value: Any, gentle: bool) -> None:
        """See ``Attributes.write``."""
        worker, path, name = where
        _check(f"{path}.{name}", worker, value)
        if isinstance(value, torch.Tensor):
            value = value.detach().clone()
        with self.changed(path, name) as copied:
            self._ask(worker, "write", {(path, name): value}, True)
            if copied is not None:
                setattr(copied, name, value)
        self._read.clear()
        self._forget(where)
        if not plain(value) and not isinstance(value, torch.Tensor):
            self.share(where, value)
        if not gentle:
            self._apply(where, value)

    def give(self, worker: str, values: dict[tuple[str, str], Any]) -> None:
        """See ``Attributes.give``."""
        for (path, name), value in values.items():
            _check(f"{path}.{name}", worker, value)
        self._ask(worker, "write", values, True)
        self._read.clear()
        for path, name in values:
            self._forget((worker, path, name))

    def delete(self, where: Where) -> None:
        """See ``Attributes.delete``."""
        worker, path, name = where
        with self.changed(path, name) as copied:
            self._ask(worker, "delete", path, name)
            if copied is not None:
                delattr(copied, name)
        self._read.clear()
        self._forget(where)
        delattr(self._shape.get_submodule(path), name)
        self._count(where, ("deleted",))

    def _apply(self, where: Where, value: Any) -> None:
        """What is captured from now on sees it."""
        module = self._shape.get_submodule(where[1])
        if isinstance(value, torch.Tensor):
            before = getattr(module, where[2], None)
            mark: Hashable = (tuple(value.shape), value.stride(), value.dtype, str(value.device))
            if isinstance(before, torch.Tensor) and mark == (
                tuple(before.shape),
                before.stride(),
                before.dtype,
                str(before.device),
            ):
                return
            setattr(module, where[2], mode_of(self._shape).from_tensor(value))
        else:
            setattr(module, where[2], copy.deepcopy(value))
            mark = (type(value), value) if plain(value) else object()
        self._count(where, mark)
        if code_in(value):
            self._recoded(where[1])

    def _count(self, where: Where, mark: Hashable) -> None:
        self._set[where] = mark
        now = frozenset(self._set.items())
        self.number = self._numbers.setdefault(now, len(self._numbers))


def _check(what: str, worker: str, value: Any) -> None:
    """Refuse a value that cannot lie at an owner as it lies here."""
    why = ""
    if isinstance(value, torch.Tensor):
        if value.requires_grad or type(value) is not torch.Tensor:
            why = "a tensor that requires grad"
    else:
        kept = Kept(value)
        if kept.opaque or kept.foreign:
            why = f"a {kept.opaque}" if kept.opaque else "a value with tensors or modules in it"
    if why:
        said = f"{what} lives on worker {worker!r}: {why} cannot be set there"
        raise NotSupported(said, peer=worker, hint="set it before wrap()")
