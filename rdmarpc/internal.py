"""``torch.distributed.rpc.internal``: the pickler of calls, for programs that use it by themselves."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .message.serialize import dumps, loads


class PythonUDF(NamedTuple):
    """A call as an object that can be serialized."""

    func: Any
    args: Any
    kwargs: Any


def serialize(obj: Any) -> tuple[bytes, list[torch.Tensor]]:
    """The pickle of ``obj`` without its tensors, and the list of these tensors (the objects themselves, no copies). References
    raise: they travel in messages only, or by ``RRef._serialize``."""
    return dumps(obj)


def deserialize(binary_data: bytes, tensor_table: list[torch.Tensor]) -> Any:
    """The object that ``serialize`` took apart. ``tensor_table``: the tensors, in the order in which ``serialize`` returned
    them."""
    return loads(binary_data, tensor_table)


class _Pickler:
    serialize = staticmethod(serialize)
    deserialize = staticmethod(deserialize)


_internal_rpc_pickler = _Pickler()
