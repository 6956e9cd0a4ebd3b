"""What a forward asks Python about its tensors, which has another answer in a trace."""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
import types
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils import _python_dispatch

from .roots import BETWEEN

_ENDS = ("RAISE_VARARGS", "RETURN_VALUE", "POP_TOP", "IS_OP", "COMPARE_OP", "CONTAINS_OP", "YIELD_VALUE")
"""What a statement ends with, or a question."""


@functools.lru_cache(maxsize=4096)
def asks_type(code: types.CodeType) -> dict[int, Path]:
    """Where a function asks for the class of something, other than for the text of an error, by ``type`` or ``__class__``: by
    the offset of the instruction, the name of what; an empty one for what has no name."""
    steps = [step for step in dis.get_instructions(code) if step.opname not in BETWEEN]
    found: dict[int, Path] = {}
    for at, step in enumerate(steps[:-1]):
        by_type = step.opname == "LOAD_GLOBAL" and step.argval == "type"
        if not by_type and not (step.opname == "LOAD_ATTR" and step.argval == "__class__"):
            continue
        if by_type and not steps[at + 1].opname.startswith("LOAD_"):
            continue
        of = _name_from(steps[at + 1 :]) if by_type else _name_to(steps[:at])
        end = next((s.opname for s in steps[at + 1 :] if s.opname in _ENDS or s.opname.startswith(("STORE", "POP_JUMP"))), "")
        if of != ("self",) and end != "RAISE_VARARGS":
            found[step.offset] = of
    return found


class Item(NamedTuple):
    """``[key]`` behind a name, where attributes are strings."""

    key: Any


Path = tuple[str | Item, ...]
"""A variable, and what is taken from it: ``args[0].shape`` is ``("args", Item(0), "shape")``."""


def _name_from(steps: Sequence[dis.Instruction]) -> Path:
    """The name that the only argument of a call has, which these begin with."""
    if steps[0].opname not in _VARIABLES:
        return ()
    path: list[str | Item] = [steps[0].argval]
    for before, step in itertools.pairwise(steps):
        if step.opname == "LOAD_ATTR":
            path.append(step.argval)
        elif _is_item(before, step):
            path.append(Item(before.argval))
        elif step.opname not in _CONSTANTS:
            return tuple(path) if step.opname in ("PRECALL", "CALL", "CALL_FUNCTION") and step.arg == 1 else ()
    return ()


def _name_to(steps: Sequence[dis.Instruction]) -> Path:
    """The name that these load last."""
    path: list[str | Item] = []
    left = list(steps)
    while left:
        step = left.pop()
        if step.opname in _VARIABLES:
            return (step.argval, *reversed(path))
        if step.opname == "LOAD_ATTR":
            path.append(step.argval)
        elif left and _is_item(left[-1], step):
            path.append(Item(left.pop().argval))
        else:
            return ()
    return ()


def _is_item(key: dis.Instruction, step: dis.Instruction) -> bool:
    subscript = step.opname == "BINARY_SUBSCR" or (step.opname == "BINARY_OP" and step.argrepr == "[]")
    return subscript and key.opname in _CONSTANTS


_CONSTANTS = ("LOAD_CONST", "LOAD_SMALL_INT")
_VARIABLES = ("LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_BORROW", "LOAD_DEREF", "LOAD_NAME", "LOAD_GLOBAL")


_OF_THE_LIBRARY = {("transformers.utils.generic", "infer_framework_from_repr"), ("einops._backends", "get_backend")}
"""They find out whose class it is: torch's in a trace, too."""


def is_traced(frame: types.FrameType, path: Path) -> bool:
    """Whether a value of this name may be of another class than in a step, and that matters."""
    if (frame.f_globals.get("__name__"), frame.f_code.co_name) in _OF_THE_LIBRARY:
        return False
    name: Any = path[0]
    value: Any = frame.f_locals.get(name, frame.f_globals.get(name))
    for step in path[1:]:
        if isinstance(value, torch.Tensor) or _computes(value, step):
            return True
        try:
            value = value[step.key] if isinstance(step, Item) else getattr(value, step, None)
        except Exception:  # the forward will raise it
            return False
    return isinstance(value, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, fx.Proxy))


def _computes(value: Any, step: str | Item) -> bool:
    """Whether it takes code of somebody's to know what comes of a step."""
    if isinstance(step, Item):
        return type(value) not in (tuple, list, dict)
    return isinstance(inspect.getattr_static(type(value), step, None), property)


_OF_MODES = {
    id(function): name
    for place, names in (
        (torch.overrides, "has_torch_function has_torch_function_unary has_torch_function_variadic"),
        (torch.overrides, "_get_current_function_mode _get_current_function_mode_stack _len_torch_function_stack"),
        (_python_dispatch, "_get_current_dispatch_mode _get_current_dispatch_mode_stack is_in_torch_dispatch_mode"),
        (torch._C, "_len_torch_dispatch_stack _len_torch_function_stack _has_torch_function"),
    )
    for name in names.split()
    if (function := getattr(place, name, None)) is not None
}
"""Of torch: what tells that operations are followed."""
_OF_EXPORTS = {id(getattr(torch.compiler, name)): name for name in ("is_compiling", "is_exporting", "is_dynamo_compiling")}


def asked_of_torch(function: object, exported: bool) -> str:
    """The name of a function of torch that has another answer in this kind of trace."""
    return _OF_MODES.get(id(function), "") or (_OF_EXPORTS.get(id(function), "") if exported else "")
