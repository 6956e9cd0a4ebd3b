"""TorchScript functions that use RPC. TorchScript compiles calls and references (``rpc_async``, ``RRef[Tensor]``) to those of
torch's own agent, which does not run here. So such a function runs as the Python that it was compiled from: the same program,
which finds ours. All others are left as they are."""

from __future__ import annotations

from typing import Any

import torch

_MARKS = ("RRef(", "prim::rpc_", "aten::to_here", "aten::local_value")
_compiled: Any = torch.jit.ScriptFunction.__call__


def _call(function: Any, /, *args: Any, **kwargs: Any) -> Any:
    try:
        python = function._rdmarpc_python
    except AttributeError:
        text = f"{function.schema}{function.inlined_graph}"
        python = getattr(function, "_torchdynamo_inline", None) if any(mark in text for mark in _MARKS) else None
        function._rdmarpc_python = python
    return _compiled(function, *args, **kwargs) if python is None else python(*args, **kwargs)


torch.jit.ScriptFunction.__call__ = _call  # type: ignore[assignment, method-assign]
