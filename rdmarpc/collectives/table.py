"""The collectives, a row each: how errors and profilers call one, torch's operator for it, the class of its options, and the
forms in which torch's binding of ``ProcessGroup`` takes it.

The methods of a group are written for their tensors and options (``collective``). torch's binding has overloads beside that:
with an operation, a root, or a timeout in the options' place, by place or by name. The test-suite compares the table with the
installed torch.

A tensor that autograd has saved, and that a collective then writes, gives a wrong gradient, silently. Operations of torch raise
a tensor's version, and the backward raises an error. So do these calls, when they are made: a call that a thread runs writes
later, but it is the program that orders the two. No gradient goes through them: gloo warns of that, or fails."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import lru_cache, wraps
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ..transport import timeouts
from .calls import Run
from .staging import Ends

Tensors = Sequence[torch.Tensor]
Form = tuple[str, ...]


class Row(NamedTuple):
    call: str
    operator: str
    options: Any
    forms: tuple[Form, ...]
    """The names of the arguments."""


_TABLE = """
allreduce | all_reduce | allreduce_ | Allreduce | tensors opts | tensors op timeout | tensor op timeout
allreduce_coalesced | all_reduce | allreduce_coalesced_ | AllreduceCoalesced | tensors opts
reduce | reduce | reduce_ | Reduce | tensors opts | tensor root op timeout
broadcast | broadcast | broadcast_ | Broadcast | tensors opts | tensor root timeout
barrier | barrier | barrier | Barrier | opts | timeout
allgather | all_gather | allgather_ | Allgather | output_tensors input_tensors opts | output_tensors input_tensor timeout
all_gather_single | all_gather | _allgather_base_ | Allgather | output input opts
all_gather_single_coalesced | all_gather | allgather_into_tensor_coalesced_ | Allgather | outputs inputs opts
allgather_coalesced | all_gather | allgather_coalesced_ | Allgather | output_lists input_list opts
gather | gather | gather_ | Gather | output_tensors input_tensors opts | output_tensors input_tensor root timeout
gather_single | gather | gather_into_tensor_ | Gather | output input opts
scatter | scatter | scatter_ | Scatter | output_tensors input_tensors opts | output_tensor input_tensors root timeout
reduce_scatter | reduce_scatter | reduce_scatter_ | ReduceScatter | output_tensors input_tensors opts | output input op timeout
reduce_scatter_single | reduce_scatter | _reduce_scatter_base_ | ReduceScatter | outputTensor inputTensor opts
reduce_scatter_single_coalesced | reduce_scatter | reduce_scatter_tensor_coalesced_ | ReduceScatter | outputs inputs opts
all_to_all_single | all_to_all | alltoall_base_ | AllToAll | SPLIT opts | SPLIT timeout
alltoall | all_to_all | alltoall_ | AllToAll | output_tensors input_tensors opts
""".replace("SPLIT", "output input output_split_sizes input_split_sizes")
"""Method, how it is called, operator, options, forms."""


def _row(call: str, operator: str, options: str, *forms: str) -> Row:
    return Row(call, operator, getattr(c10d, f"{options}Options"), tuple(tuple(form.split()) for form in forms))


_LINES = (line.split(" | ") for line in _TABLE.strip().splitlines())
ROWS: Mapping[str, Row] = {method: _row(*cells) for method, *cells in _LINES}
"""By method."""
_OF_OPTIONS = {"op": "reduceOp", "root": "rootRank", "timeout": "timeout"}
_DEFAULTS: Mapping[str, Any] = {"op": None, "timeout": None, "output_split_sizes": (), "input_split_sizes": ()}
"""Of arguments that may be left out. torch's binding asks for split sizes; its Python gives none for even ones."""
_TYPES: Mapping[str, Any] = {
    "op": (dist.ReduceOp, dist.ReduceOp.RedOpType, type(None)),
    "root": int,
    "timeout": (timedelta, type(None)),
}
_UNSET = timedelta(milliseconds=-1)
"""What torch has for no timeout in the options of a call."""
_HINT = "torch.distributed.nn.functional and torch.distributed._functional_collectives have collectives with gradients"


Made = tuple[Run, Tensors, Ends | None, Tensors, bool]
"""A call that was checked, and has still to be made: what it does; what it writes, here or (without the last, ``writes``) at
other ranks only; its ends, ``None`` if the memory of its tensors is all there is to it; what is written is made of, where no
gradient leads back from that. A plain tuple: small calls are made often."""


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
    row = ROWS[method]
    for names in row.forms:
        given = _bound(names, row.options, args, named)
        if given is None:
            continue
        opts = given.get("opts") or row.options()
        for name, field in _OF_OPTIONS.items():
            if given.get(name) is not None:
                setattr(opts, field, given[name])
        tensors = [given.get(name, _DEFAULTS.get(name)) for name in names if name != "opts" and name not in _OF_OPTIONS]
        return [*tensors, opts]
    shown = "; ".join(f"{method}({', '.join(names)})" for names in row.forms)
    got = [type(each).__name__ for each in args] + [f"{name}: {type(each).__name__}" for name, each in named.items()]
    raise TypeError(f"{method} takes {shown}; got ({', '.join(got)})")


def collective(method: Callable[..., Made]) -> Callable[..., Any]:
    """Makes of a method for tensors and options, which says what to do, one that takes all forms and does it."""
    name = method.__name__
    row = ROWS[name]
    count = len(row.forms[0])

    @wraps(method)
    def call(self: Any, *args: Any, **named: Any) -> Any:
        if len(args) != count or named or type(args[-1]) is not row.options:
            args = tuple(bind(name, args, named))
        limit = _limit(args[-1])
        run, outputs, ends, inputs, writes = method(self, *args)
        written(row.operator, outputs, inputs, writes)
        return self._start(row.call, run, outputs, ends, limit, not getattr(args[-1], "asyncOp", True))

    return call


def _limit(options: Any) -> float:
    """The timeout of a call's options in seconds; 0: that of the group. Raises ``ValueError`` unless it is longer than 0, or
    unset."""
    found = getattr(options, "timeout", None)
    if not isinstance(found, timedelta) or found == _UNSET:
        return 0.0
    return timeouts.above_zero(found.total_seconds(), "the timeout of a collective")


def written(operator: str, outputs: Tensors, inputs: Tensors = (), writes: bool = True) -> None:
    """Tell autograd of a call (``Made``): a backward that comes to one of its outputs gets a warning."""
    if writes and outputs:
        torch._C._increment_version(outputs)
    for each in outputs:
        if each.requires_grad and torch.is_grad_enabled():
            hook, hooks = _hook(operator), each._backward_hooks or {}
            if hook not in hooks.values():  # a parameter keeps its hooks
                each.register_hook(hook)
    if inputs and torch.is_grad_enabled() and any(each.requires_grad for each in inputs):
        _warn(operator)


@lru_cache(64)
def _hook(operator: str) -> Callable[[torch.Tensor], None]:
    return lambda _: _warn(operator)


def _warn(operator: str) -> None:
    warnings.warn(
        f"c10d::{operator}: an autograd kernel was not registered to the Autograd key(s) but we are trying to backprop through "
        f"it. This may lead to silently incorrect behavior. {_HINT}.",
        UserWarning,
        stacklevel=2,
    )
