"""Arguments and results as trees: the tensors and constants that they hold, and how to make the same objects of others.

What pytree knows (lists, dicts, named tuples, what users registered) is taken apart as it says. An object of any other class is
taken apart where Python itself says how to make an equal one: by its attributes where its class leaves that to ``object``
(dataclasses), else by its pickle, with the tensors beside it. Such a copy stands for the object as a copy of a tensor does: who
writes into it is found by comparing before and after (``Before``).
"""

from __future__ import annotations

import enum
import inspect
import io
import pickle
import pickletools
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.fx.immutable_collections import immutable_dict, immutable_list
from torch.utils import _pytree as pytree

from ...transport import NotSupported
from ..guards.content import foreign
from .sizes import Number

_CONSTANTS = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format, enum.Enum)
_SIMPLE = frozenset([type(None), torch.Tensor, nn.Parameter, bool, int, float, complex, str, bytes, torch.dtype, torch.device])


class Mark:
    """Stands for a leaf."""


_LEAVES = (
    Mark,
    torch.Tensor,
    fx.Proxy,
    fx.Node,
    nn.Module,
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
    range,
    type(...),
    type(None),
    *Number,
    *_CONSTANTS,
)
_HELD = (Mark, torch.Tensor, fx.Proxy, fx.Node, *Number)
"""What stands beside a pickle."""
_PLAIN = frozenset([tuple, list, dict, slice, immutable_list, immutable_dict])


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """How an object was taken apart: ``way`` is ``pytree``, ``attributes``, ``call`` or ``pickle``. Plain data, but for the
    class."""

    cls: type
    way: str
    context: Any = None

    def __eq__(self, other: object) -> bool:
        mine = (self.cls, self.way)
        return isinstance(other, Kind) and mine == (other.cls, other.way) and bool(self.context == other.context)

    def __hash__(self) -> int:
        return hash((self.cls, self.way))

    def make(self, items: Iterable[Any]) -> Any:
        """Such an object of these."""
        if self.way == "pytree":
            return pytree.SUPPORTED_NODES[_node_type(self.cls)].unflatten_fn(list(items), self.context)
        if self.way == "call":
            return slice(*items) if self.cls is slice else self.cls(items)
        if self.way == "pickle":
            return _Unpickler(self.context, list(items)).load()
        made: Any = object.__new__(self.cls)
        left = iter(items)
        attributes, slots = self.context
        if attributes:
            vars(made).update({name: next(left) for name in attributes})
        for name in slots:
            object.__setattr__(made, name, next(left))
        return made


class Built(NamedTuple):
    """Stands for an object among the arguments of an operation. A tuple, so that those who look for what is in an argument
    (``fx``) find it."""

    kind: Kind
    items: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Tree:
    """As a ``TreeSpec`` whose leaves may be objects: ``parts`` has, for each leaf of ``spec``, its kind, what is below it and
    how many leaves that has; ``None`` for what is a leaf."""

    spec: pytree.TreeSpec
    parts: tuple[tuple[Kind, Any, int] | None, ...]

    def unflatten(self, leaves: Iterable[Any]) -> Any:
        left = iter(leaves)
        made: list[Any] = []
        for part in self.parts:
            if part is None:
                made.append(next(left))
            else:
                kind, below, count = part
                made.append(kind.make(below.unflatten([next(left) for _ in range(count)])))
        return self.spec.unflatten(made)


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """The tensors and constants in it, and what puts it together: a ``TreeSpec`` or ``Tree``, which are hashable. Raises
    ``NotSupported`` for an object that cannot be taken apart."""
    leaves, spec = pytree.tree_flatten(tree)
    if not any(map(_open, leaves)):
        return leaves, spec
    flat: list[Any] = []
    parts: list[Any] = []
    for leaf in leaves:
        taken = apart(leaf)
        if taken is None:
            flat.append(leaf)
            parts.append(None)
        else:
            more, below = flatten(taken[1])
            flat += more
            parts.append((taken[0], below, len(more)))
    return flat, Tree(spec, tuple(parts))


def leaves_of(tree: Any) -> list[Any]:
    """The first half of ``flatten``."""
    return flatten(tree)[0]


def pick(tree: Any, at: int) -> Any:
    """One leaf: an operation of recorded graphs."""
    return flatten(tree)[0][at]


def described(tree: Any) -> str:
    """What two trees of different processes are compared by."""
    if isinstance(tree, Tree):
        below = [("" if p is None else f"{_kind_text(p[0])}({described(p[1])})") for p in tree.parts]
        return f"{_spec_text(tree.spec)}: {'; '.join(below)}"
    return _spec_text(tree)


def _spec_text(spec: pytree.TreeSpec) -> str:
    if spec.type is None:
        return "*"
    return f"{spec.type.__qualname__} {spec.context!r}[{', '.join(map(_spec_text, spec.children()))}]"


def _kind_text(kind: Kind) -> str:
    context = _steps(kind.context) if kind.way == "pickle" else kind.context
    return f"{kind.cls.__qualname__} {context!r}"


def _steps(blob: bytes) -> list[Any]:
    """What a pickle does: without what depends on whether two equal texts in it are one object."""
    steps: list[Any] = []
    memo: list[Any] = []
    last: Any = None
    objects = 0
    for opcode, argument, _ in pickletools.genops(blob):
        if opcode.name == "MEMOIZE":
            objects += not isinstance(last, str)
            memo.append(last if isinstance(last, str) else objects)
        elif "GET" in opcode.name:
            last = memo[argument]  # type: ignore[index]
            steps.append(last)
        elif opcode.name != "FRAME":
            last = argument
            steps.append(argument if isinstance(argument, str) else (opcode.name, argument))
    return steps


def paths(value: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves, each with where it is: ``[0]``, ``['a'].b``."""
    opened = apart(value)
    if opened is None:
        yield at, value
        return
    kind, children = opened
    context = kind.context
    for number, child in enumerate(children):
        if kind.way == "attributes":
            where = "." + (*context[0], *context[1])[number]
        elif pytree.is_namedtuple_class(kind.cls):
            where = "." + kind.cls._fields[number]  # type: ignore[attr-defined]
        elif kind.cls in (dict, OrderedDict, defaultdict):
            where = f"[{(context[1] if kind.cls is defaultdict else context)[number]!r}]"
        else:
            where = f"[{number}]"
        yield from paths(child, at + where)


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    leaves, spec = flatten(tree)
    return spec.unflatten([function(leaf) for leaf in leaves])


def key(leaf: Any) -> Any:
    """Something hashable that is equal where this constant is the same: 1, True and 1.0 are not."""
    return (type(leaf), repr(leaf) if isinstance(leaf, (float, complex)) else leaf)


def constants(leaves: Sequence[Any]) -> tuple[tuple[int, Any], ...]:
    """What of the leaves is no tensor, by position, as ``key`` has it, and where a tensor comes again: at which position it
    came first. Python can tell a tensor that is given twice from two that are equal."""
    first: dict[int, int] = {}
    found: list[tuple[int, Any]] = []
    for at, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor):
            found.append((at, key(leaf)))
        elif (before := first.setdefault(id(leaf), at)) != at:
            found.append((at, (torch.Tensor, before)))
    return tuple(found)


def tensors_of(leaves: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors among the leaves, each object once."""
    return list({id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}.values())


def filled(leaves: Sequence[Any], tensors: Iterable[Any]) -> list[Any]:
    """The leaves, with these in the place of their ``tensors_of``."""
    given = {id(leaf): tensor for leaf, tensor in zip(tensors_of(leaves), tensors)}
    return [given[id(leaf)] if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


def map_tensors(function: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """The same with ``function(tensor)`` for each tensor, which is called once for each object."""
    leaves, spec = flatten(tree)
    return spec.unflatten(filled(leaves, map(function, tensors_of(leaves))))


def encode(tree: Any, put: Callable[[Any], Any]) -> Any:
    """The same with ``put(leaf)`` for the leaves, in the order of ``flatten``: in plain tuples, lists, dicts and slices, and
    ``Built`` for all else."""
    if type(tree) in _PLAIN:
        return _map_plain(tree, lambda item: encode(item, put))
    taken = apart(tree)
    if taken is None:
        return put(tree)
    return Built(taken[0], tuple([encode(child, put) for child in taken[1]]))


def decode(tree: Any, leaf: Callable[[Any], Any] = lambda leaf: leaf) -> Any:
    """The inverse of ``encode``, in lists and dicts of its own. ``leaf(...)`` gives what belongs in the place of each."""
    if type(tree) is Built:
        return tree.kind.make([decode(item, leaf) for item in tree.items])
    if type(tree) in _PLAIN:
        return _map_plain(tree, lambda item: decode(item, leaf))
    return leaf(tree)


def _map_plain(tree: Any, function: Callable[[Any], Any]) -> Any:
    """A tuple, list, dict or slice with ``function(item)`` for each item."""
    if isinstance(tree, dict):
        return {name: function(item) for name, item in tree.items()}
    if type(tree) is slice:
        return slice(function(tree.start), function(tree.stop), function(tree.step))
    items = [function(item) for item in tree]
    return tuple(items) if type(tree) is tuple else items


def apart(value: Any) -> tuple[Kind, list[Any]] | None:
    """How to make it, of what; ``None``: it is a leaf. Raises ``NotSupported`` with the reason."""
    if not _open(value):
        return None
    try:
        return _opened(value, ())
    except _Intricate:
        return _pickled(value)


class _Intricate(Exception):
    """An object below has its own idea of what it is made of."""


def _node_type(cls: type) -> Any:
    return pytree.namedtuple if pytree.is_namedtuple_class(cls) else cls


def _opened(value: Any, above: tuple[int, ...]) -> tuple[Kind, list[Any]]:
    cls = type(value)
    if cls is slice:
        return Kind(slice, "call"), [value.start, value.stop, value.step]
    if cls is torch.Size:
        return Kind(torch.Size, "call"), list(value)
    node = _node_type(cls)
    if node in pytree.SUPPORTED_NODES and not (node is not cls and getattr(value, "__dict__", None)):
        children, context = pytree.SUPPORTED_NODES[node].flatten_fn(value)
        made = Kind(cls, "pytree", context), list(children)
    elif _by_attributes(cls):
        try:
            state: Any = object.__reduce_ex__(value, 2)[2] or {}
        except TypeError:
            raise _Intricate from None
        attributes, slots = (state[0] or {}, state[1]) if isinstance(state, tuple) else (state, {})
        made = Kind(cls, "attributes", (tuple(attributes), tuple(slots))), [*attributes.values(), *slots.values()]
    else:
        raise _Intricate
    for child in made[1]:
        if not _open(child):
            continue
        if id(child) in above:
            raise _Intricate
        _opened(child, (*above, id(value)))
    return made


def _by_attributes(cls: type) -> bool:
    """Whether the class leaves to ``object`` what its objects are made of."""
    return (
        cls is not object
        and cls.__new__ is object.__new__
        and cls.__reduce_ex__ is object.__reduce_ex__
        and cls.__reduce__ is object.__reduce__
        and getattr(cls, "__getstate__", None) is getattr(object, "__getstate__", None)
        and not any(hasattr(cls, name) for name in ("__setstate__", "__getnewargs__", "__getnewargs_ex__"))
    )


def _pickled(value: Any) -> tuple[Kind, list[Any]]:
    stream = io.BytesIO()
    pickler = _Pickler(stream)
    try:
        if type(value) is object:
            raise TypeError("it is known by its identity only")
        if isinstance(value, torch.Generator):
            raise TypeError("every draw changes it")
        pickler.dump(value)
    except Exception as error:  # of the object's own methods
        raise Unknown(
            f"a {type(value).__name__} cannot cross between workers: {error}",
            hint="tensors in tuples, lists, dicts and dataclasses can, and objects that can be pickled",
        ) from error
    return Kind(type(value), "pickle", stream.getvalue()), pickler.held


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=5)
        self.held: list[Any] = []
        self._at: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        if isinstance(obj, nn.Module):
            raise TypeError(f"it holds a module, a {type(obj).__name__}")
        if not isinstance(obj, _HELD):
            return None
        if id(obj) not in self._at:
            self._at[id(obj)] = len(self.held)
            self.held.append(obj)
        return self._at[id(obj)]


class _Unpickler(pickle.Unpickler):
    def __init__(self, blob: bytes, held: list[Any]) -> None:
        super().__init__(io.BytesIO(blob))
        self._held = held

    def persistent_load(self, pid: Any) -> Any:
        return self._held[pid]


_PADDED = "convert it to a padded tensor, or to values and offsets"
_DENSE = "convert it (x.to_dense()), or have one worker make and use it"
_AS_PLAIN = 'capture="here", or take the plain tensor: x.as_subclass(torch.Tensor)'


class Unknown(NotSupported):
    """An object that cannot be taken apart."""


class Before:
    """What the arguments of a call were, to compare them with what they are afterwards. Writes into tensors are not seen."""

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any], places: bool = False) -> None:
        self._args, self._kwargs = args, kwargs
        self._places: dict[int, str] = {}
        self._known = [(value, *flatten(value)) for value in (*args, *kwargs.values()) if _open(value)]
        if places:
            self._places = places_of((args, kwargs))

    def changed(self) -> list[Any]:
        """The arguments that something was put into, or taken out of."""
        found = []
        for value, leaves, tree in self._known:
            now, new = flatten(value)
            if new != tree or any(map(differ, now, leaves)):
                found.append(value)
        return found

    def moved(self) -> bool:
        """Whether an object is in another place among the arguments than it was."""
        then, now = self._places, places_of((self._args, self._kwargs))
        return any(number in then and then[number] != place for number, place in now.items())

    def names(self, forward: Callable[..., Any]) -> str:
        """The names of those that ``changed``."""
        changed = self.changed()
        given = named(forward, self._args, self._kwargs)
        return ", ".join(repr(name) for name, value in given.items() if any(value is one for one in changed))


class ChangesArgument(NotSupported):
    """A part puts something into what it is given."""


def changes_argument(path: str, names: str) -> ChangesArgument:
    return ChangesArgument(
        f"part {path!r} changes its argument {names}, of which it has a copy at its worker",
        hint="return what is new instead of writing it into an argument",
    )


def _open(value: Any) -> bool:
    """Whether it is no leaf."""
    return type(value) not in _SIMPLE and not isinstance(value, _LEAVES)


def named(forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by name; those of ``*args`` as ``args[0]``."""
    try:
        given = inspect.signature(forward).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return {**{f"args[{at}]": value for at, value in enumerate(args)}, **kwargs}
    found: dict[str, Any] = {}
    for name, value in given.arguments.items():
        kind = given.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            found.update({f"{name}[{at}]": item for at, item in enumerate(value)})
        elif kind is inspect.Parameter.VAR_KEYWORD:
            found.update(value)
        else:
            found[name] = value
    return found


def own_class(leaf: Any) -> str:
    """The name of a tensor's class, if that is one of the user's or of a library beside torch; else nothing."""
    kind = type(leaf)
    return kind.__name__ if isinstance(leaf, torch.Tensor) and not foreign(kind.__module__) else ""


def sparse(tensor: torch.Tensor) -> str:
    """What a tensor that is not strided is called; nothing for any other."""
    return "" if tensor.layout is torch.strided else f"a tensor of layout {str(tensor.layout).removeprefix('torch.')}"


_COUNTS = frozenset(
    ["_nnz", "is_coalesced", "values", "indices", "_values", "_indices"]
    + ["crow_indices", "col_indices", "ccol_indices", "row_indices"]
)


def check_question(name: str, args: Sequence[Any]) -> None:
    """``NotSupported`` for what a trace asks a sparse tensor that has no data: it has no values either."""
    if name in _COUNTS and args and isinstance(args[0], torch.Tensor) and (kind := sparse(args[0])):
        raise NotSupported(f"the forward asks {kind} for its {name}, which depends on data")


def cannot_cross(what: str, kind: str) -> NotSupported:
    """For a tensor (``sparse``) that another worker is to get."""
    return NotSupported(f"{what} {kind}, which cannot cross between workers", hint=_DENSE)


def check_dense(what: str, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """``NotSupported``, with the name of the argument, for a tensor that cannot go to another worker as it is."""
    for name, value in named(forward, args, kwargs).items():
        for kind in (sparse(leaf) for leaf in leaves_of(value) if isinstance(leaf, torch.Tensor)):
            if kind:
                raise cannot_cross(f"{what} is given {name!r}:", kind)


def check_arguments(what: str, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """``NotSupported``, with the name of the argument, for one that is made of more than tensors and constants."""
    for name, value in named(forward, args, kwargs).items():
        try:
            leaves = leaves_of(value)
        except NotSupported as error:
            raise NotSupported(f"{what} is given {name!r}: {error.message}", hint=error.hint) from error
        for leaf in leaves:
            if isinstance(leaf, nn.Module):
                raise NotSupported(f"{what} is given {name!r}: a {type(leaf).__name__}, a module, cannot cross between workers")
            if isinstance(leaf, torch.Tensor) and leaf.is_nested:
                raise NotSupported(f"{what} is given {name!r}: a nested tensor cannot cross between workers", hint=_PADDED)
            if kind := own_class(leaf):
                raise NotSupported(f"{what} is given {name!r}: a {kind} would arrive as a plain tensor", hint=_AS_PLAIN)


class After(NamedTuple):
    """What a call gave, and its arguments as they are afterwards."""

    result: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def restore(live: Any, new: Any) -> Any:
    """Make what was passed what the copy of it became; what now belongs in its place. ``NotSupported`` for an object that only
    its class knows how to change."""
    cls = type(live)
    if live is new or cls is not type(new) or not _open(live):
        return new
    if isinstance(live, (list, deque)):
        items = [restore(old, item) for old, item in zip(live, new)] + list(new)[len(live) :]
        live.clear()
        live.extend(items)
    elif isinstance(live, dict) and cls in (dict, OrderedDict, defaultdict):
        made = {name: restore(live[name], item) if name in live else item for name, item in new.items()}
        live.clear()
        live.update(made)
    elif _by_attributes(cls) and hasattr(live, "__dict__") and not _slots(cls):
        mine, made = vars(live), vars(new)
        made = {name: restore(mine[name], item) if name in mine else item for name, item in made.items()}
        mine.clear()
        mine.update(made)
    elif cls is tuple:
        return tuple([restore(old, item) for old, item in zip(live, new)]) if len(live) == len(new) else new
    elif any(map(differ, leaves_of(live), leaves_of(new))) or flatten(live)[1] != flatten(new)[1]:
        raise NotSupported(f"a part changes a {cls.__name__} that it is given, which only its own worker sees")
    return live


def _slots(cls: type) -> bool:
    """Whether objects of this class have attributes in slots. (Abstract ones say that they have none.)"""
    return any(vars(base).get("__slots__") for base in cls.__mro__)


def places_of(tree: Any) -> dict[int, str]:
    """Where each list, dict and object in it is, by ``id``: what is moved by a call cannot be followed. Alias: the last."""
    found: dict[int, str] = {}

    def walk(value: Any, at: str) -> None:
        if _open(value):
            found[id(value)] = at
            opened = apart(value)
            children = opened[1] if opened is not None else ()
            for number, child in enumerate(children):
                walk(child, f"{at}.{type(child).__name__}{number}")

    walk(tree, "")
    return found


def differ(now: Any, then: Any) -> bool:
    """Whether two leaves are not the same tensor, or not the same constant."""
    if isinstance(now, (torch.Tensor, *Number)) or isinstance(then, (torch.Tensor, *Number)):
        return now is not then
    return now is not then and key(now) != key(then)


def mutable(tree: Any) -> bool:
    """Whether encoded arguments have anything that can be put into or taken out of."""
    if isinstance(tree, (list, dict)) or (type(tree) is Built and tree.kind.cls is not torch.Size):
        return True
    return isinstance(tree, tuple) and any(map(mutable, tree))


def check_result(what: str, result: Any) -> None:
    """``NotSupported`` for a result that is made of more than tensors and constants."""
    try:
        leaves = leaves_of(result)
    except NotSupported as error:
        raise NotSupported(f"{what} gives {error.message}", hint=error.hint) from error
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.is_nested:
            raise NotSupported(f"{what} gives a nested tensor, which cannot cross between workers", hint=_PADDED)
        if kind := own_class(leaf):
            raise NotSupported(f"{what} gives a {kind}, which would arrive as a plain tensor", hint=_AS_PLAIN)
        if not isinstance(leaf, (torch.Tensor, *Number, *_CONSTANTS, range, type, type(...))) and leaf is not None:
            raise NotSupported(
                f"{what} gives a {type(leaf).__name__}, which cannot cross between workers",
                hint="tensors in tuples, lists, dicts and objects can",
            )
