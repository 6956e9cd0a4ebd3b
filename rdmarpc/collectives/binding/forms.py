"""The forms in which torch's binding of ``ProcessGroup`` takes a collective: one table, and what brings them all to one.

Each method here is written for its tensors and its options. torch's binding has overloads beside that: with an operation, a
root, or a timeout in the options' place, by place or by name. The test-suite compares the table with the installed torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial, wraps
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

Form = tuple[str, ...]
_GATHER_ONE = "output", "input", "opts"
_LISTS = "outputs", "inputs", "opts"
_EXCHANGE: tuple[Form, ...] = (
    ("output", "input", "output_split_sizes", "input_split_sizes", "opts"),
    ("output", "input", "output_split_sizes", "input_split_sizes", "timeout"),
)
_SCATTER_ONE = "outputTensor", "inputTensor", "opts"
FORMS: Mapping[str, tuple[Any, tuple[Form, ...]]] = {
    "allreduce": (
        dist.AllreduceOptions,
        (("tensors", "opts"), ("tensors", "op", "timeout"), ("tensor", "op", "timeout")),
    ),
    "allreduce_coalesced": (dist.AllreduceCoalescedOptions, (("tensors", "opts"),)),
    "reduce": (dist.ReduceOptions, (("tensors", "opts"), ("tensor", "root", "op", "timeout"))),
    "broadcast": (dist.BroadcastOptions, (("tensors", "opts"), ("tensor", "root", "timeout"))),
    "barrier": (dist.BarrierOptions, (("opts",), ("timeout",))),
    "allgather": (
        c10d.AllgatherOptions,
        (("output_tensors", "input_tensors", "opts"), ("output_tensors", "input_tensor", "timeout")),
    ),
    "all_gather_single": (c10d.AllgatherOptions, (_GATHER_ONE,)),
    "all_gather_single_coalesced": (c10d.AllgatherOptions, (_LISTS,)),
    "allgather_coalesced": (c10d.AllgatherOptions, (("output_lists", "input_list", "opts"),)),
    "gather": (
        dist.GatherOptions,
        (("output_tensors", "input_tensors", "opts"), ("output_tensors", "input_tensor", "root", "timeout")),
    ),
    "scatter": (
        dist.ScatterOptions,
        (("output_tensors", "input_tensors", "opts"), ("output_tensor", "input_tensors", "root", "timeout")),
    ),
    "reduce_scatter": (
        dist.ReduceScatterOptions,
        (("output_tensors", "input_tensors", "opts"), ("output", "input", "op", "timeout")),
    ),
    "reduce_scatter_single": (dist.ReduceScatterOptions, (_SCATTER_ONE,)),
    "reduce_scatter_single_coalesced": (dist.ReduceScatterOptions, (_LISTS,)),
    "all_to_all_single": (dist.AllToAllOptions, _EXCHANGE),
    "alltoall": (dist.AllToAllOptions, (("output_tensors", "input_tensors", "opts"),)),
}
"""By method: the class of its options, and the names of its arguments in each form."""
_OF_OPTIONS = {"op": "reduceOp", "root": "rootRank", "timeout": "timeout"}
_DEFAULTS: Mapping[str, Any] = {"op": None, "timeout": None, "output_split_sizes": (), "input_split_sizes": ()}
"""Of arguments that may be left out. torch's binding asks for split sizes; its Python gives none for even ones."""
_TYPES: Mapping[str, Any] = {
    "op": (dist.ReduceOp, dist.ReduceOp.RedOpType, type(None)),
    "root": int,
    "timeout": (timedelta, type(None)),
}
Method = TypeVar("Method", bound=Callable[..., Any])


def _bound(names: Form, options: Any, args: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any] | None:
    """The arguments by name, ``None`` if they are not of this form."""
    if len(args) > len(names):
        return None
    given = dict(zip(names, args))
    if any(name in given or name not in names for name in named):
        return None
    given.update(named)
    types = {**_TYPES, "opts": (options, type(None))}
    if any(name in types and not isinstance(value, types[name]) for name, value in given.items()):
        return None
    missing = [name for name in names if name not in given and name != "opts" and name not in _DEFAULTS]
    return None if missing else given


def bind(method: str, args: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
    """The arguments of a call in the order of the method's first form, its options at the end. Raises ``TypeError`` for what
    torch's binding does not take either."""
    options, forms = FORMS[method]
    for names in forms:
        given = _bound(names, options, args, named)
        if given is None:
            continue
        opts = given.get("opts") or options()
        for name, field in _OF_OPTIONS.items():
            if given.get(name) is not None:
                setattr(opts, field, given[name])
        tensors = [given.get(name, _DEFAULTS.get(name)) for name in names if name != "opts" and name not in _OF_OPTIONS]
        return [*tensors, opts]
    shown = "; ".join(f"{method}({', '.join(names)})" for names in forms)
    got = [type(each).__name__ for each in args] + [f"{name}: {type(each).__name__}" for name, each in named.items()]
    raise TypeError(f"{method} takes {shown}; got ({', '.join(got)})")


def forms(name: str) -> Callable[[Method], Method]:
    """Makes of a method for tensors and options one for all forms of that name."""
    return partial(_with_forms, name)


def _with_forms(name: str, method: Any) -> Any:
    options, shapes = FORMS[name]
    count = len(shapes[0])

    @wraps(method)
    def call(self: Any, *args: Any, **named: Any) -> Any:
        if len(args) == count and not named and type(args[-1]) is options:
            return method(self, *args)
        return method(self, *bind(name, args, named))

    return call
