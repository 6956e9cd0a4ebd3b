"""A buffer that lies at another worker: shape without data. What computes with it gets the values that it has at the moment."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .parameter import DEVICE, HARMLESS, Owners


class RemoteBuffer(torch.Tensor):
    """In ``model.buffers()`` it stands for ``name`` of the module ``path`` at ``worker``. An operation fetches the values, one
    that writes in place sends them back."""

    worker: str
    _where: tuple[Owners, str, str, str]
    _home: torch.device

    @staticmethod
    def __new__(cls, like: torch.Tensor, owner: Owners, worker: str, path: str, name: str) -> RemoteBuffer:
        self = torch.Tensor._make_subclass(cls, torch.empty_like(like, device="meta").detach())
        self.worker = worker
        self._where, self._home = (owner, worker, path, name), like.device
        return self

    def __init__(self, like: torch.Tensor, owner: Owners, worker: str, path: str, name: str) -> None:
        """Made in ``__new__``."""

    def value(self) -> torch.Tensor:
        """A copy of the owner's, as of all the steps before."""
        owner, worker, path, name = self._where
        found: torch.Tensor = owner.ask_owner(worker, "own_state", path)[name]
        return found.to(self._home)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"RemoteBuffer({'.'.join(self._where[2:])!r} on {self._where[1]!r}, {tuple(self.shape)}, {self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return memo.setdefault(id(self), self.value())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.value().__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == DEVICE:
            return args[0]._home
        if func in HARMLESS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        fetched: dict[int, tuple[RemoteBuffer, torch.Tensor, int]] = {}

        def local(leaf: Any) -> Any:
            if not isinstance(leaf, RemoteBuffer):
                return leaf
            if id(leaf) not in fetched:
                with torch.inference_mode(False):  # else it would have no version
                    value = leaf.value()
                fetched[id(leaf)] = leaf, value, value._version
            return fetched[id(leaf)][1]

        args, kwargs = pytree.tree_map(local, (args, kwargs))
        result = func(*args, **kwargs)
        for buffer, value, version in fetched.values():
            if value._version != version:
                owner, worker, path, name = buffer._where
                owner.ask_owner(worker, "load", path, {name: value.cpu()})
            result = buffer if result is value else result
        return result


def changed(buffer: torch.Tensor | None, value: torch.Tensor) -> None:
    """The owner of a ``RemoteBuffer`` has this one there now."""
    assert isinstance(buffer, RemoteBuffer)
    with torch._C.DisableTorchFunctionSubclass():
        buffer.data = torch.empty_like(value, device="meta").detach()
