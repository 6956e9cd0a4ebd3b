"""The parameters of a served model at its worker: who reads them waits for the weights that are on their way, and what is
written into them here is found before the next step.

Between a step and the landing of its weights their memory belongs to the server. So their class has a ``__torch_function__``
during that time only, which waits. Other tensors that share the memory (``parameter.detach()``, a ``state_dict``) cannot wait:
while there are any, a step returns when the weights are here.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from ..transport import NotSupported

_version = torch._C.TensorBase._version.__get__  # type: ignore[attr-defined]
_users = torch._C._storage_Use_Count
_data = torch._C.TensorBase.data
_grad = torch._C.TensorBase.grad.__get__  # type: ignore[union-attr]


class ServedParameter(nn.Parameter):
    """Made from an ordinary parameter by ``Watch``, and made one again at its end. A copy is an ordinary one."""

    _watch: Watch
    __module__ = "torch.nn.parameter"  # by this opt_einsum and others choose what they call

    @property
    def data(self) -> torch.Tensor:
        """As ever. What is written into it shows in no version, so the value is compared before the next step."""
        self._watch.lend(self)
        found: torch.Tensor = _data.__get__(self)  # type: ignore[attr-defined]
        return found

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """Copies a value into the memory where weights land. Raises ``NotSupported`` for another shape, dtype or device."""
        mine = self.data
        if value.data_ptr() == mine.data_ptr() and value.shape == mine.shape and value.stride() == mine.stride():
            return
        if (value.shape, value.dtype, value.device) != (mine.shape, mine.dtype, mine.device):
            name, text = self._watch.name_of(self), f"{tuple(value.shape)} {value.dtype} on {value.device}"
            why = f"the data of {name!r}, {tuple(mine.shape)} {mine.dtype}, cannot become {text}: servers keep it"
            raise NotSupported(why, hint="close() the model, or do that before serve()")
        mine.copy_(value)

    def share_memory_(self) -> Any:
        raise NotSupported(f"{self._watch.name_of(self)!r} lies where a server writes: its memory cannot be exchanged")

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.detach().clone(memory_format=torch.preserve_format), self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter, (self.detach().clone(memory_format=torch.preserve_format), self.requires_grad)


nn.parameter.ServedParameter = ServedParameter  # type: ignore[attr-defined]  # where torch.compile looks for it then


def _waiting(cls: Any, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None) -> Any:
    """The ``__torch_function__`` of such a class while weights are on their way."""
    if func in _HARMLESS and (cls._watch.leaves or func != _grad):
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))
    cls._watch.pull()
    return func(*args, **(kwargs or {}))


class Watch:
    """All parameters of one served model, which become ``ServedParameter``; ``pull`` waits for their weights. One thread at a
    time."""

    def __init__(self, names: Sequence[str], parameters: Sequence[nn.Parameter], pull: Callable[[], None]) -> None:
        self.pull = pull
        self._names, self._parameters = names, parameters
        self._classes = [type(parameter) for parameter in parameters]
        self._kinds = {kind: self._kind(kind) for kind in dict.fromkeys(self._classes)}
        # They share the versions of the parameters, and are read faster than these.
        self._views = [parameter.detach() for parameter in parameters]
        for parameter, kind in zip(parameters, self._classes):
            parameter.__class__ = self._kinds[kind]
        self._storages = [view.untyped_storage()._cdata for view in self._views]
        self._alone = [_users(storage) for storage in self._storages]
        self._lent: dict[int, torch.Tensor] = {}
        """By position: what a parameter was when somebody asked for its ``data``."""
        self._position = {id(parameter): at for at, parameter in enumerate(parameters)}
        self._away = False
        self.leaves = True
        """Whether the step that is under way is known to leave gradients as they are."""
        self._by = 0
        """The thread that made the last step."""
        self.left_behind = False
        """In a forked child: the weights land in its parent."""
        self._versions: list[int] = []
        self.seen()
        _watches.add(self)

    def _kind(self, base: type) -> type:
        names = {"_watch": self, "__module__": ServedParameter.__module__}
        return type(ServedParameter.__name__, (ServedParameter, base), names)

    def name_of(self, parameter: nn.Parameter) -> str:
        return self._names[self._position[id(parameter)]]

    @property
    def shared(self) -> bool:
        """Whether other tensors share the memory of a parameter."""
        return list(map(_users, self._storages)) != self._alone

    def away(self, leaves: bool) -> None:
        """A step is being sent: the weights are on their way, and what it makes of gradients, unless it ``leaves`` them."""
        self._away, self.leaves, self._by = True, leaves, threading.get_ident()
        for kind in self._kinds.values():
            kind.__torch_function__ = classmethod(_waiting)  # type: ignore[attr-defined]

    def here(self) -> bool:
        """They have landed. Whether they were away."""
        if not self._away:
            return False
        self._away = False
        for kind in self._kinds.values():
            del kind.__torch_function__  # type: ignore[attr-defined]
        for at, kept in list(self._lent.items()):
            if _users(self._storages[at]) == self._alone[at]:
                del self._lent[at]
            else:
                kept.copy_(self._views[at])
        return True

    def lend(self, parameter: nn.Parameter) -> None:
        if self._away:
            self.pull()
        at = self._position[id(parameter)]
        if at not in self._lent:
            self._lent[at] = self._views[at].clone()

    def seen(self) -> None:
        """The servers have what is here, or will write it."""
        self._versions = list(map(_version, self._views))

    def written(self) -> list[int]:
        """Positions of the parameters that somebody has written into since ``seen``. Only while the weights are here."""
        now = list(map(_version, self._views))
        found = [] if now == self._versions else [at for at, new in enumerate(now) if new != self._versions[at]]
        for at, kept in self._lent.items():
            if not torch.equal(kept, self._views[at]):
                kept.copy_(self._views[at])
                found.append(at)
        return sorted(set(found))

    def close(self) -> None:
        """The parameters are ordinary ones again. Idempotent."""
        _watches.discard(self)
        self.here()
        for parameter, kind in zip(self._parameters, self._classes):
            parameter.__class__ = kind
        self._lent.clear()
        self._views.clear()


_watches: weakref.WeakSet[Watch] = weakref.WeakSet()


# A forked child has the weights of the last step, as in one process.


def _before_fork() -> None:
    """The thread that forks waits for the weights if it made the step: no other one may wait in its place."""
    for watch in list(_watches):
        if watch._away and watch._by == threading.get_ident():
            with suppress(Exception):  # whoever uses the model here hears of it
                watch.pull()


def _in_child() -> None:
    for watch in list(_watches):
        watch.left_behind = watch._away


# Hooks that run before a fork do so in the opposite order of these calls: this one, then the copies of ``transport/memory``.
os.register_at_fork(before=_before_fork, after_in_child=_in_child)


def _harmless() -> frozenset[Any]:
    """What looks at no value."""
    tensor = torch.Tensor
    read = "requires_grad shape dtype device layout is_leaf grad_fn ndim is_sparse is_cuda is_cpu nbytes itemsize _version"
    methods = "size dim numel nelement stride element_size is_floating_point is_complex requires_grad_ is_contiguous __hash__"
    found = [getattr(tensor, name).__get__ for name in [*read.split(), "grad"]]
    found += [getattr(tensor, name) for name in methods.split()]
    setters = [getattr(tensor, name).__set__ for name in ("grad", "requires_grad")]
    return frozenset([*found, *setters])


_HARMLESS = _harmless()
