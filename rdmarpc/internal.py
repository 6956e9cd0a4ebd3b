"""``torch.distributed.rpc.internal``: the pickler of RPC, for programs that use it by themselves."""

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
    """The RPC pickle of ``obj`` and the tensors in it (the objects themselves). References travel in messages only, or by
    ``RRef._serialize``: here they are refused."""
    return dumps(obj)


def deserialize(binary_data: bytes, tensor_table: list[torch.Tensor]) -> Any:
    """Inverse of ``serialize``."""
    return loads(binary_data, tensor_table)


class _Pickler:
    serialize = staticmethod(serialize)
    deserialize = staticmethod(deserialize)


_internal_rpc_pickler = _Pickler()
