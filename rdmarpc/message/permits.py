"""The functions and classes that peers may use here: ``RpcBackendOptions(allow=[...])``.

Everything that arrives pickled, in requests, answers and errors, is read by way of one ``Permits``. It resolves a name only if
the object behind it is allowed: named by the user, defined in a module that the user named, or one of what messages are made of
(``_VALUES``). Nothing is imported for a peer. Functions of ours that peers call are resolved where a message names its
function, and nowhere else: as an argument they could be called with a sender of the peer's choice.

Unpickling calls what it resolves, and sets attributes (BUILD). The C unpickler would set those of classes and functions too, so
a pickle that may have a BUILD in it is read by Python's own, which only builds instances of what is allowed.

Not restricted: what an allowed function or class does with its arguments. The constructor, ``__setstate__`` and operators of an
allowed class are called with arguments, and on state, of a peer's choice.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable, Iterable
from dataclasses import is_dataclass
from itertools import accumulate
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, ModuleType
from typing import Any, ClassVar

import numpy as np
import torch

from ..transport import RdmaError

_VALUES = {
    "builtins": "bool bytearray bytes complex dict float frozenset int list range set slice str tuple",
    "collections": "Counter OrderedDict defaultdict deque",
    "datetime": "date datetime time timedelta timezone",
    "decimal": "Decimal",
    "fractions": "Fraction",
    "uuid": "UUID",
    "numpy": "dtype ndarray",
    "numpy._core.multiarray": "_reconstruct scalar",
    "numpy._core.numeric": "_frombuffer",
    "numpy.core.multiarray": "_reconstruct scalar",
    "numpy.core.numeric": "_frombuffer",
    "torch": "Size device Tensor",
    "torch.nn.parameter": "Parameter",
    "torch._utils": "_rebuild_meta_tensor_no_storage _rebuild_nested_tensor _rebuild_tensor_v2",
    "torch.serialization": "_get_layout",
    "rdmarpc.servers.bundle": "Bundle",
    "rdmarpc.base.here": "WorkerInfo",
    "rdmarpc.message.incoming": "in_parts landed landed_on_gpu",
    "rdmarpc.message.gpu": "_from_host",
    "rdmarpc.message.reducers": "_coo _compressed _parameter _quantised _storage _subclass _typed_storage _zeros landed_array",
    "rdmarpc.references.handle": "_receive",
    "rdmarpc.nn": "_receive",
    "rdmarpc.places.replaced": "lying",
}
"""Names in pickles that are allowed whatever ``allow`` says, by module: values of Python and numpy without behaviour (numbers,
containers, dates, arrays, dtypes), and how tensors, references and remote modules are made again over what landed beside the
pickle. So are exceptions of Python, of torch and of ours, so that errors keep their types, and records of which the set-up of
served models consists."""
_PLAIN = {"torch": "Size device", "builtins": "complex"}
"""Those that a pickle of plain values (``serialize.flat``) may have."""
_REFUSED = {
    *("builtins", "ctypes", "functools", "importlib", "io", "operator", "os", "pickle", "posix", "runpy", "shutil"),
    *("subprocess", "sys", "torch", "types"),
}
"""Modules in which there is something that runs anything: they cannot be allowed as a whole."""
_BUILD = b"b"
_WRAP = "rdmarpc.wrap"
_OPENING = (("rdmarpc.places.wrap", "wrap"), ("rdmarpc.places.devices", "device"))
_MANY = 4096
_FINISHED = (torch.Tensor, torch.nn.Parameter)
_NAMED_SO = (FunctionType, BuiltinFunctionType, MethodDescriptorType)
_KINDS = (torch.dtype, torch.layout, torch.memory_format, torch.qscheme)
_OWNERS = ("_VariableFunctionsClass", "TensorBase")
_CALLED = {
    "rdmarpc.api": "_bring _hand_out",
    "rdmarpc.message.gpu": "probe",
    "rdmarpc.gradients.waves": "_settle _survey",
    "rdmarpc.servers.local": "create load_state_dict state_dict step",
    "rdmarpc.nn": "_made _make _parameters _remote_forward _remote_forward_on _train",
    "rdmarpc.references.handle": "_accumulate _backward _fetch _run _run_async _run_made _type_of",
    "rdmarpc.servers.server": "ask enter leave why",
    "rdmarpc.calls.termination": "_report",
    "rdmarpc.timeline": "_hand_over _written",
}
"""Functions of ours that other workers call: allowed where a message names its function, and nowhere else."""
_PLACES = {"rdmarpc.places.runners": "counters_here new_region open_stream reach_region take_large"}
"""Those of them by which other workers have tensors here."""


class _Owner:
    """A class of torch's in a pickle: nothing can be done with it but to look up a member that is allowed."""

    __slots__ = ("of", "shown")

    def __init__(self, of: Any, shown: str) -> None:
        self.of, self.shown = of, shown


class NotAllowed(RdmaError):
    """A peer wanted something run, or made, that this worker's ``allow`` does not have."""


class Permits:
    """``allow``: modules (with what lies below a package), classes and functions. ``ValueError``, ``TypeError`` for what
    cannot be allowed. Thread-safe."""

    def __init__(self, allow: Iterable[Any]) -> None:
        self._modules: set[str] = set()
        self._named: dict[tuple[str, str], Any] = {}
        self._members: set[Any] = set()
        """Functions of torch that have no name of their own: torch pickles them as members of a class."""
        self._known: dict[tuple[str, str], Any] = {}
        self.wraps = False
        """Whether peers may have tensors here, and post operations of torch on them."""
        self.refused = 0
        for item in allow:
            self._add(item)

    def _add(self, item: Any) -> None:
        if isinstance(item, ModuleType):
            if item.__name__.partition(".")[0] == "rdmarpc" or item.__name__ in _REFUSED:
                raise ValueError(
                    f"allow: {item.__name__} cannot be allowed as a whole: name the functions and classes that are"
                )
            self._modules.add(item.__name__)
            return
        module, name = getattr(item, "__module__", None), getattr(item, "__qualname__", None)
        if (module, name) in _OPENING:
            self.wraps = True
        elif callable(item) and module and name and walk(module, name) is item:
            self._named[module, name] = item
        elif isinstance(item, _NAMED_SO) and _of_class(item):
            self._members.add(item)
        else:
            raise TypeError(f"allow takes modules, and functions and classes that can be imported by their names, got {item!r}")

    # -- names

    def find(self, module: str, name: str) -> Any:
        """The object behind a name in a pickle. Raises ``NotAllowed``, and ``AttributeError`` for a name that an allowed module
        lacks."""
        found = self._known.get((module, name))
        if found is None:
            found = self._find(module, name)
            if len(self._known) < _MANY:
                self._known[module, name] = found
        return found

    def _find(self, module: str, name: str) -> Any:
        if (module, name) in self._named:
            return self._named[module, name]
        if (module, name) == ("builtins", "getattr"):
            return self._member
        if (found := _of_messages(module, name)) is not None:
            return found
        if not self._covers(module, name):
            raise self._refuse(f"{module}.{name}")
        if (found := walk(module, name)) is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        # Itself, not what it imports, nor what can be reached by way of it.
        own = getattr(found, "__module__", ""), getattr(found, "__qualname__", "")
        if isinstance(found, ModuleType) or own != (module, name):
            raise self._refuse(f"{module}.{name}")
        return found

    def _covers(self, module: str, name: str) -> bool:
        """Whether the module is allowed, or a class of it in which the name is."""
        if not self._modules.isdisjoint(accumulate(module.split("."), "{}.{}".format)):
            return True
        return isinstance(self._named.get((module, name.rpartition(".")[0])), type)

    def find_called(self, module: str, name: str) -> Any:
        """As ``find``, for the function that a request names: also finds the functions of ours that peers call."""
        places_tensors = _has(_PLACES, module, name)
        if places_tensors and not self.wraps:
            raise self._refuse(f"{module}.{name}", _WRAP)
        return walk(module, name) if places_tensors or _has(_CALLED, module, name) else self.find(module, name)

    def _member(self, owner: Any, name: str) -> Any:
        """Stands for ``getattr`` in a pickle: functions of torch travel as members of a class."""
        found = getattr(owner.of, name, None) if type(owner) is _Owner else None
        if type(found) in _NAMED_SO and found in self._members:
            return found
        raise self._refuse(f"{getattr(owner, 'shown', type(owner).__name__)}.{name}")

    def permits_class(self, kind: type) -> bool:
        try:
            return self.find(kind.__module__, kind.__qualname__) is kind
        except (NotAllowed, AttributeError):
            return False

    def method(self, value: Any, name: str) -> Callable[..., Any]:
        """A method that a peer names, of a value that it refers to: of a class that the user has allowed, or inherited by one
        (but for those of two underscores, which it has to define)."""
        kind = type(value)
        defined = next((base for base in kind.__mro__ if name in base.__dict__), None)
        if defined is None:
            raise AttributeError(f"{kind.__name__!r} object has no attribute {name!r}")
        ordinary = defined is not object and not name.startswith("__") and self._names_class(kind)
        if ordinary or self._names_class(defined):
            return getattr(value, name)
        named = f"{kind.__module__}.{kind.__qualname__}"
        raise self._refuse(f"{named}.{name}", named)

    def _names_class(self, kind: type) -> bool:
        """Whether the user has allowed a class: those of our messages may be made, but not be called."""
        module, name = kind.__module__, kind.__qualname__
        return (module, name) in self._named or self._covers(module, name)

    def _refuse(self, what: str, add: str = "") -> NotAllowed:
        self.refused += 1
        what, add = what[:200], (add or what)[:200]
        module = "" if add == _WRAP else ", or the module that it is defined in"
        return NotAllowed(
            f"{what} is not among what this worker allows its peers to use",
            hint=f"if they may: RpcBackendOptions(allow=[..., {add}]) at this worker{module}",
        )

    # -- pickles

    def loads(self, data: bytes, buffers: Any = None) -> Any:
        return self._read(self.find, data, _BUILD in data, buffers)

    def load_plain(self, data: bytes) -> Any:
        """Unpickle tuples of plain values. Raises ``NotAllowed`` if the pickle names anything else."""
        return self._read(self._find_plain, data, False)

    def load_called(self, data: bytes) -> Any:
        """The function that a request names."""
        return self._read(self.find_called, data, _BUILD in data)

    def _read(self, find: Callable[[str, str], Any], data: bytes, builds: bool, buffers: Any = None) -> Any:
        reader: Any = (_Careful if builds else _Quick)(io.BytesIO(data), buffers=buffers)
        reader.permits, reader.find_class = self, find
        return reader.load()

    def _find_plain(self, module: str, name: str) -> Any:
        if (found := _plain(module, name)) is None:
            raise self._refuse(f"{module}.{name}")
        return found


class _Quick(pickle.Unpickler):
    """As pickle's own, but for attributes that can be set."""


_Python: Any = pickle._Unpickler


class _Careful(_Python):
    """Builds nothing but instances of what is allowed."""

    def load_build(self) -> None:
        kind = type(self.stack[-2])
        kind = np.dtype if issubclass(kind, np.dtype) else kind  # each has a class of its own
        if issubclass(kind, type) or kind in _FINISHED or not self.permits.permits_class(kind):
            raise self.permits._refuse(f"the state of a {kind.__module__}.{kind.__qualname__}", kind.__qualname__)
        super().load_build()

    dispatch: ClassVar[dict[int, Any]] = {**_Python.dispatch, _BUILD[0]: load_build}


def _has(table: dict[str, str], module: str, name: str) -> bool:
    return name in table.get(module, "").split()


def _of_messages(module: str, name: str) -> Any:
    """The object behind a name in a pickle that is allowed whatever ``allow`` says; ``None`` for any other name."""
    if _has(_VALUES, module, name):
        return getattr(sys.modules.get(module), name, None)
    if module == "torch._C" and name in _OWNERS:
        return _Owner(getattr(torch._C, name), "torch" if name == _OWNERS[0] else "torch.Tensor")
    # Of other modules nothing is looked up: that can import more.
    ours = module.partition(".")[0] in ("builtins", "rdmarpc", "torch")
    found = getattr(sys.modules.get(module), name, None) if ours else None
    if isinstance(found, type) and found.__module__ == module:
        record = module.startswith("rdmarpc.servers.") and (is_dataclass(found) or issubclass(found, tuple))
        if record or issubclass(found, Exception):
            return found
    return _plain(module, name)


def _plain(module: str, name: str) -> Any:
    """The object behind a name that a pickle of plain values (``serialize.flat``) may contain; ``None`` for any other name."""
    if _has(_PLAIN, module, name):
        return getattr(sys.modules[module], name)
    if module in ("torch", "torch._utils"):
        found = getattr(torch, name.removeprefix("torch."), None)
        if isinstance(found, _KINDS):
            return found
    return None


def _of_class(function: Any) -> bool:
    """Whether torch pickles a function as a member of one of its classes."""
    name = getattr(function, "__name__", "")
    return any(getattr(getattr(torch._C, owner), name, None) == function for owner in _OWNERS)


def walk(module: str, name: str) -> Any:
    """The object under a dotted name in a module that is imported already; ``None`` if there is none."""
    found: Any = sys.modules.get(module)
    for step in name.split("."):
        found = getattr(found, step, None)
    return found


current: Permits | None = None
"""The permits that ``init_rpc`` was given, one setting for the process; ``None``: everything is allowed."""
loads: Callable[..., Any] = pickle.loads
load_plain: Callable[[bytes], Any] = pickle.loads
load_called: Callable[[bytes], Any] = pickle.loads


def use(permits: Permits | None) -> None:
    """Read all pickles of peers with these permits from now on."""
    global current, loads, load_plain, load_called
    current = permits
    if permits is None:
        loads = load_plain = load_called = pickle.loads
    else:
        loads, load_plain, load_called = permits.loads, permits.load_plain, permits.load_called


def method(value: Any, name: str) -> Callable[..., Any]:
    """The method of ``value`` that a peer names, if the permits allow it."""
    return getattr(value, name) if current is None else current.method(value, name)
