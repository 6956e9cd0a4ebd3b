"""The package's own names in pickles, which are allowed whatever ``allow`` says (see ``permits``).

* values of Python and numpy without behaviour: numbers, containers, dates, arrays, dtypes;
* exceptions of Python, of torch and of ours, so that errors keep their types;
* records of which the set-up of served models consists;
* how tensors, references and remote modules are made again over what landed beside the pickle;
* and, where a message names the function to call, those of ours that other workers call.
"""

from __future__ import annotations

import sys
from dataclasses import is_dataclass
from typing import Any

import torch

_BUILTINS = (
    "bool",
    "bytearray",
    "bytes",
    "complex",
    "dict",
    "float",
    "frozenset",
    "int",
    "list",
    "range",
    "set",
    "slice",
    "str",
)
_VALUES = {
    "builtins": (*_BUILTINS, "tuple"),
    "collections": ("Counter", "OrderedDict", "defaultdict", "deque"),
    "datetime": ("date", "datetime", "time", "timedelta", "timezone"),
    "decimal": ("Decimal",),
    "fractions": ("Fraction",),
    "uuid": ("UUID",),
    "numpy": ("dtype", "ndarray"),
    "numpy._core.multiarray": ("_reconstruct", "scalar"),
    "numpy._core.numeric": ("_frombuffer",),
    "numpy.core.multiarray": ("_reconstruct", "scalar"),
    "numpy.core.numeric": ("_frombuffer",),
    "torch": ("Size", "device", "Tensor"),
    "torch.nn.parameter": ("Parameter",),
    "torch._utils": ("_rebuild_meta_tensor_no_storage", "_rebuild_nested_tensor", "_rebuild_tensor_v2"),
    "torch.serialization": ("_get_layout",),
    "rdmarpc.servers.bundle": ("Bundle",),
    "rdmarpc.base.worker_info": ("WorkerInfo",),
    "rdmarpc.message.incoming": ("in_parts", "landed", "landed_on_gpu"),
    "rdmarpc.message.arrays": ("landed_array",),
    "rdmarpc.message.gpu": ("_from_host",),
    "rdmarpc.message.reducers": (
        "_coo",
        "_compressed",
        "_parameter",
        "_quantised",
        "_storage",
        "_subclass",
        "_typed_storage",
        "_zeros",
    ),
    "rdmarpc.references.handle": ("_receive",),
    "rdmarpc.nn": ("_receive",),
    "rdmarpc.places.replaced": ("lying",),
}
_PLAIN = {"torch": ("Size", "device"), "builtins": ("complex",)}
_KINDS = (torch.dtype, torch.layout, torch.memory_format, torch.qscheme)
_OWNERS = ("_VariableFunctionsClass", "TensorBase")
_CALLED = {
    "rdmarpc.gather": ("_bring", "_hand_out"),
    "rdmarpc.message.gpu": ("probe",),
    "rdmarpc.gradients.waves": ("_settle", "_survey"),
    "rdmarpc.servers.local": ("create", "load_state_dict", "state_dict", "step"),
    "rdmarpc.nn": ("_made", "_make", "_parameters", "_remote_forward", "_remote_forward_on", "_train"),
    "rdmarpc.references.handle": ("_accumulate", "_backward", "_fetch", "_type_of"),
    "rdmarpc.references.proxy": ("_run", "_run_async"),
    "rdmarpc.servers.server": ("ask", "enter", "leave", "why"),
    "rdmarpc.calls.termination": ("_report",),
    "rdmarpc.timeline": ("_hand_over", "_written"),
}
_PLACES = {"rdmarpc.places.runners": ("counters_here", "new_region", "open_stream", "reach_region", "take_large")}


class Owner:
    """A class of torch's in a pickle: nothing can be done with it but to look up a member that is allowed."""

    __slots__ = ("of", "shown")

    def __init__(self, of: Any, shown: str) -> None:
        self.of, self.shown = of, shown


def find(module: str, name: str) -> Any:
    """The object behind a name in a pickle; ``None`` if it is none of those above. Functions that other workers call are not
    found here: see ``called``."""
    if name in _VALUES.get(module, ()):
        return getattr(sys.modules.get(module), name, None)
    if module == "torch._C" and name in _OWNERS:
        return Owner(getattr(torch._C, name), "torch" if name == _OWNERS[0] else "torch.Tensor")
    return _exception(module, name) or _record(module, name) or find_plain(module, name)


def _record(module: str, name: str) -> Any:
    """A record type (dataclass or named tuple) of ``rdmarpc.servers``, of which the messages of served models consist. Records
    have no behaviour. ``None`` for any other name."""
    found = getattr(sys.modules.get(module), name, None) if module.startswith("rdmarpc.servers.") else None
    if isinstance(found, type) and found.__module__ == module and (is_dataclass(found) or issubclass(found, tuple)):
        return found
    return None


def _exception(module: str, name: str) -> Any:
    if module != "builtins" and module.partition(".")[0] not in ("rdmarpc", "torch"):
        return None
    found = getattr(sys.modules.get(module), name, None)
    if isinstance(found, type) and issubclass(found, Exception) and found.__module__ == module:
        return found
    return None


def find_plain(module: str, name: str) -> Any:
    """The object behind a name that a pickle of plain values (``serialize.flat``) may contain; ``None`` for any other name."""
    if name in _PLAIN.get(module, ()):
        return getattr(sys.modules[module], name)
    if module in ("torch", "torch._utils"):
        found = getattr(torch, name.removeprefix("torch."), None)
        if isinstance(found, _KINDS):
            return found
    return None


def called(module: str, name: str) -> bool:
    """Whether other workers call that function of ours."""
    return name in _CALLED.get(module, ())


def places_tensors(module: str, name: str) -> bool:
    """Whether that is one of ours by which other workers have tensors here."""
    return name in _PLACES.get(module, ())


def owner_of(function: Any) -> bool:
    """Whether torch pickles a function as a member of one of its classes."""
    name = getattr(function, "__name__", "")
    return any(getattr(getattr(torch._C, owner), name, None) == function for owner in _OWNERS)
