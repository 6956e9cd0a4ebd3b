"""The parameters of a served model at its worker: what has to move with them into the memory where servers write; who reads
them waits for the weights that are on their way, and what is written into them here is found before the next step; what a step
leaves of their gradients.

Between a step and the landing of its weights their memory belongs to the server. So their class has a ``__torch_function__``
during that time only, which waits. Other tensors that share the memory (``parameter.detach()``, a ``state_dict``) cannot wait:
while there are any, a step returns when the weights are here.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from ..message.layout import span
from ..places.tensor import RemoteTensor
from ..transport import NotSupported, sole
from .bundle import dense

_version = torch._C.TensorBase._version.__get__  # type: ignore[attr-defined]
_users = torch._C._storage_Use_Count
_single = torch.empty(1, device="cpu")
_ASKING = _users(_single.untyped_storage()._cdata) - 1
"""By how many ``_users`` is more than the number of tensors."""
_data: Any = torch._C.TensorBase.data
_grad = torch._C.TensorBase.grad.__get__  # type: ignore[union-attr]


def _lending(name: str) -> Any:
    """A method as ever. What is written into what it gives may show in no version (numpy's writes), so the value is compared
    before the next step."""
    method = getattr(torch.Tensor, name)

    @functools.wraps(method)
    def lend(parameter: ServedParameter, *args: Any, **options: Any) -> Any:
        parameter._watch.lend(parameter)
        return method(parameter, *args, **options)

    return lend


class ServedParameter(nn.Parameter):
    """Made from an ordinary parameter by ``Watch``, and made one again at its end. A copy is an ordinary one."""

    _watch: Watch
    __module__ = "torch.nn.parameter"  # by this opt_einsum and others choose what they call
    detach, numpy, __dlpack__ = _lending("detach"), _lending("numpy"), _lending("__dlpack__")

    @property
    def data(self) -> torch.Tensor:
        """As ever (``_lending``)."""
        self._watch.lend(self)
        return _data.__get__(self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """As ever. Raises ``NotSupported`` for another shape, dtype or device."""
        self._watch.exchange(self, value)

    def share_memory_(self) -> Any:
        why = f"{self._watch.name_of(self)!r} lies where a server writes: its memory cannot be exchanged"
        raise NotSupported(why, hint="share a copy: detach().clone()")

    def _ordinary(self) -> nn.Parameter:
        return nn.Parameter(super().detach().clone(memory_format=torch.preserve_format), self.requires_grad)

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self._ordinary())

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            memo[id(self)] = self._ordinary()
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._ordinary().__reduce_ex__(protocol)


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
        self._moved: set[int] = set()
        """Positions of parameters whose ``data`` was exchanged: they may lie elsewhere than weights land."""
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
        for at in self._moved:
            _data.__get__(self._parameters[at]).copy_(self._views[at])
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
            with torch.inference_mode(False):
                self._lent[at] = self._views[at].clone()

    def exchange(self, parameter: ServedParameter, value: torch.Tensor) -> None:
        """See ``ServedParameter.data``."""
        mine = parameter.data
        same = value.stride() == mine.stride() or (value.is_contiguous() and mine.is_contiguous())
        if not same or (value.shape, value.dtype, value.device) != (mine.shape, mine.dtype, mine.device):
            name, text = self.name_of(parameter), f"{tuple(value.shape)} {value.dtype} on {value.device}"
            text += "" if same else f" with strides {value.stride()}"
            why = f"the data of {name!r}, {tuple(mine.shape)} {mine.dtype}, cannot become {text}: servers keep it"
            raise NotSupported(why, hint="close() the model, or do that before serve(); .data.copy_() takes other strides")
        torch.Tensor.data.__set__(parameter, value)  # type: ignore[attr-defined]
        self._moved.add(self._position[id(parameter)])

    def _move_back(self) -> None:
        """Have parameters lie where weights land again, unless something shows that they lie elsewhere: there, weights are
        copied to them. Raises ``NotSupported`` where something shows what lay there before: weights would land in that."""
        moved = [(at, self._parameters[at], self._views[at]) for at in sorted(self._moved)]
        moved = [each for each in moved if each[1].data_ptr() != each[2].data_ptr()]
        self._moved = {at for at, _, _ in moved}
        storages = [parameter.untyped_storage()._cdata for _, parameter, _ in moved]
        come, gone = Counter(storages), Counter(self._storages[at] for at, _, _ in moved)
        for at, parameter, _ in moved:
            home = self._storages[at]
            if _users(home) != self._alone[at] - gone[home] + come[home]:
                why = f"{self.name_of(parameter)!r} has other data, and weights would land where the data before is still shown"
                raise NotSupported(why, hint="drop what shows it (a state_dict(), .data, .detach()), or use .data.copy_()")
        back = [
            (at, parameter, view, _data.__get__(parameter).clone())
            for (at, parameter, view), storage in zip(moved, storages)
            if storage in gone or _users(storage) == come[storage] + _ASKING  # ``gone``: where another one's weights land
        ]
        for at, parameter, view, value in back:
            _data.__get__(view).copy_(value)
            _data.__set__(parameter, view)
            self._moved.discard(at)

    def seen(self) -> None:
        """The servers have what is here, or will write it."""
        self._versions = list(map(_version, self._views))

    def loaded(self) -> None:
        """As ``seen``, after values were sent to the servers."""
        self.seen()
        for at, kept in self._lent.items():
            kept.copy_(_data.__get__(self._parameters[at]))

    def written(self) -> list[int]:
        """Positions of the parameters that somebody has written into since ``seen``. Only while the weights are here."""
        self._move_back()
        now = list(map(_version, self._views))
        found = [] if now == self._versions else [at for at, new in enumerate(now) if new != self._versions[at]]
        for at, kept in self._lent.items():
            if not torch.equal(kept, _data.__get__(self._parameters[at])):
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


# -- whether parameters can move into the memory where servers write, and what has to move with them

Shown = tuple[torch.Tensor, nn.Parameter, int]
"""A buffer, or a tensor that is an attribute of a module; the parameter in whose memory it lies; at which element."""


def check_memory(net: nn.Module) -> list[Shown]:
    """What shows the memory of parameters within the model. Raises ``NotSupported`` for parameters that are served or elsewhere
    already, and for memory that could not be shared any more. Warns of tensors outside of the model that show it."""
    for name, parameter in net.named_parameters():
        if isinstance(parameter, RemoteTensor):
            raise NotSupported(f"{name!r} lies at a worker", hint="wrap a model, or serve it")
        if isinstance(parameter, ServedParameter):
            raise NotSupported(f"{name!r} is served already", hint="close() that served model first, also after an error")
    parameters = sorted(_spans(net.named_parameters()))
    for (_, end, first, _), (start, _, second, _) in pairwise(parameters):
        if start < end:
            why = f"{first!r} and {second!r} lie in the same memory, and servers step each by itself"
            raise NotSupported(why, hint="let the modules have one parameter: a.weight = b.weight")
    others = [*net.named_buffers(), *_attributes(net)]
    shown = [
        _within(this, that) for this in _spans(iter(others)) for that in parameters if this[0] < that[1] and that[0] < this[1]
    ]
    _look_outside(net, shown)
    return shown


_Span = tuple[int, int, str, torch.Tensor]
"""Where a tensor begins and ends in memory, its name, itself."""


def _spans(named: Iterator[tuple[str, torch.Tensor]]) -> Iterator[_Span]:
    for name, tensor in named:
        if tensor.numel() and tensor.is_cpu and tensor.layout is torch.strided:
            nbytes = span(tensor.shape, tensor.stride()) * tensor.element_size()
            yield tensor.data_ptr(), tensor.data_ptr() + nbytes, name, tensor


def _attributes(net: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for path, module in net.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
                yield f"{path}.{name}" if path else name, value


def _within(this: _Span, that: _Span) -> Shown:
    start, end, name, tensor = this
    first, last, holder, parameter = that
    assert isinstance(parameter, nn.Parameter)
    whole = tensor.dtype == parameter.dtype and first <= start and end <= last
    if not whole or dense(parameter.detach()) is None:
        why = f"{name!r} shares memory with {holder!r}, and would not when a server writes that"
        raise NotSupported(why, hint="clone() it")
    return tensor, parameter, (start - first) // parameter.element_size()


def _look_outside(net: nn.Module, shown: list[Shown]) -> None:
    views = [tensor for tensor, _, _ in shown]
    known = {
        id(tensor): tensor for tensor in [*net.parameters(), *views, *(view._base for view in views)] if tensor is not None
    }
    here = Counter(tensor.untyped_storage()._cdata for tensor in known.values())
    for name, parameter in net.named_parameters() if sole.STORAGE_USES >= 0 else ():
        storage = parameter.untyped_storage()
        if sole.storage_uses(storage._cdata) > sole.STORAGE_USES + here[storage._cdata] - 1:
            _warn(
                f"a tensor outside of the model shares the memory of {name!r} (a state_dict(), .data or .detach() of it): it "
                "keeps the values of now, and others may do so, too"
            )
            return


def _warn(text: str) -> None:
    """A ``UserWarning`` at the line of the user's program, however deep in this package and in torch its reason is found."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in ("rdmarpc", "torch"):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)


# -- what a step leaves of the gradients

_Sent = tuple[int, nn.Parameter, "weakref.ref[torch.Tensor]", int]
"""The position of a parameter at its server, itself, its gradient, and the version of that when it was sent."""


class Left:
    """The gradients of the last step of one model, by server. Torch's own optimizers leave them as they are; others drop,
    replace or write into them. Servers do that to copies, so here it is done once more, to the gradients that were sent.
    ``alone``: no other worker has sent any."""

    def __init__(self, alone: bool) -> None:
        self._alone = alone
        self._sent: dict[str, list[_Sent]] = {}
        self._stale: dict[int, weakref.ref[torch.Tensor]] = {}
        """By ``id`` of a parameter: a gradient that is not what one process would have."""

    def send(self, server: str, at: Iterable[int], parameters: Iterable[nn.Parameter]) -> None:
        """Gradients of these parameters, which lie at these positions there, are about to be sent."""
        found = [(where, parameter, parameter.grad) for where, parameter in zip(at, parameters)]
        self._sent[server] = [(at, p, weakref.ref(grad), grad._version) for at, p, grad in found if grad is not None]

    def landed(self, changed: Iterable[str], ask: Callable[[str], dict[int, Any]]) -> None:
        """The weights of that step are here. ``changed``: the servers whose step has changed gradients; ``ask`` gives what has
        become of these there: ``None``, or (whether it is the same tensor still, its value)."""
        for server in changed:
            here = [(at, p, grad, seen) for at, p, sent, seen in self._sent.get(server, ()) if (grad := sent()) is p.grad]
            found = ask(server) if here else {}
            for at, parameter, grad, seen in here:
                if at in found and grad is not None:
                    self._change(parameter, grad, seen, found[at])
        self._sent.clear()

    def _change(self, parameter: nn.Parameter, grad: torch.Tensor, seen: int, found: Any) -> None:
        if grad._version != seen or not (found is None or self._alone):
            self._stale[id(parameter)] = weakref.ref(grad)
        elif found is None:
            parameter.grad = None
        elif found[0]:
            with torch.no_grad():
                grad.copy_(found[1])
        else:
            parameter.grad = found[1]

    def zeroed(self, parameters: Iterable[nn.Parameter]) -> None:
        """Their gradients are ``None`` or zero."""
        for parameter in parameters if self._stale else ():
            self._stale.pop(id(parameter), None)

    def check(self, parameters: Iterable[nn.Parameter], kind: str) -> None:
        """``NotSupported`` where a gradient goes on that is not what one process would have."""
        for parameter in parameters if self._stale else ():
            stale = self._stale.pop(id(parameter), None)
            if stale is not None and parameter.grad is not None and stale() is parameter.grad:
                why = f"a step of {kind} has changed gradients, which are sums over all workers, and this step adds to them"
                raise NotSupported(why, hint="call zero_grad() in every step")
