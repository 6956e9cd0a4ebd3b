"""A parameter that lives at another worker: a shape without data.

Outside of the forward its value and its gradient are remote tensors (``remote_tensor``): operations that autograd need not
know of run on them. Anything else raises ``NotSupported`` and names the worker; nothing is silently wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..graph.caller.caller import Caller
from ..graph.work.command import TO_NONE, TO_ZERO, Command
from ..graph.work.remote_values import ASSIGN, DATA, GRAD, VALUE, Operation, Place
from ..graph.work.stored import Piece
from ..transport import NotSupported
from .remote_tensor import Home, RemoteTensor
from .remote_values import RemoteValues, StateCopies


class EagerForward(Protocol):
    """The model's own forward, as it runs here in Python at the moment (``eager.Eager``)."""

    def call(self, path: str, args: Any, kwargs: Any, /) -> Any:
        """A remote part is called."""

    def fetch(self, path: str, /) -> torch.Tensor:
        """A remote parameter or buffer is computed with."""


Where = tuple[str, str, str]
"""Worker, path of a module, name of an attribute."""


class Attributes(Protocol):
    """Attributes of modules at their owners (``settings.Settings``)."""

    def share(self, where: Where, value: Any, /) -> None:
        """One that went with its module is here too: what is changed inside of it here is to be changed there."""

    def push(self) -> None:
        """Tell the owners what was changed here inside of values that they have too."""

    def read(self, where: Where, /) -> Any:
        """As its owner has it now."""

    def write(self, where: Where, value: Any, gentle: bool, /) -> None:
        """Set it. ``gentle``: this changes no operation's kind or shape."""

    def give(self, worker: str, values: dict[tuple[str, str], Any], /) -> None:
        """What a forward that ran here has changed, by path and name."""

    def give_common(self, parts: Mapping[str, nn.Module], /) -> None:
        """Have copies of parts, by path, hold the very values that modules here and they have in common."""

    def is_common(self, worker: str, path: str, name: str, /) -> bool:
        """Whether that attribute holds such a value, which ``push`` brings to the owner."""

    def delete(self, where: Where, /) -> None:
        """Delete it."""


class Owners(Protocol):
    """The workers that own the parts of one model, as its stand-ins and optimizers see them (``session.Session``)."""

    values: RemoteValues

    @property
    def settings(self) -> Attributes:
        """Attributes of the modules."""

    @property
    def caller(self) -> Caller:
        """The caller's end: it knows what backwards have done."""

    eager: EagerForward | None

    @property
    def outside(self) -> EagerForward:
        """Runs a part that is called outside of any forward."""

    apart: list[tuple[str, Piece]] | None
    """While it is a list, ``state_dict`` adds to it what lies at which worker, instead of the values."""

    state_copies: StateCopies
    """What ``state_dict`` has given out."""

    frozen: bool
    """Whether a parameter may have been frozen since the last forward."""

    in_step: bool
    """Whether an optimizer is stepping: its local half must not see the remote gradients."""

    def new_parameter(self, like: nn.Parameter, worker: str, name: str, /) -> nn.Parameter:
        """What stands here for the next parameter of a worker."""

    def zero(self, worker: str, position: int, how: int, /) -> None:
        """A parameter's gradient, before the next backward or step (``graph.work.command.TO_NONE``, ``TO_ZERO``)."""

    def step(self, commands: Mapping[str, Command], /) -> None:
        """An optimizer steps at these workers."""

    def ask_owner(self, worker: str, method: str, /, *args: Any) -> Any:
        """A method of one owner's ``graph.work.host.Host``, after everything that was asked for before."""

    def leaf(self, parameter: RemoteParameter, /) -> torch.Tensor | None:
        """What stands for a parameter in graphs, of a model whose forward always runs here (``fetched``)."""

    def fetch_parts(self, memo: dict[int, Any], hooks: bool = False, /) -> None:
        """Fetch all parts into this process: what stands for them goes into the memo of a ``deepcopy``. ``hooks``: with copies
        of those that are on the stand-ins."""


class RemoteParameter(nn.Parameter):
    """In ``model.parameters()`` it stands for parameter ``position`` of ``worker``. ``grad`` is ``None`` or a ``RemoteTensor``;
    setting it to ``None`` clears the real gradient before the next backward."""

    worker: str
    path: str

    def __new__(cls, like: torch.Tensor, owner: Owners, worker: str, path: str, position: int) -> RemoteParameter:
        meta = torch.empty_like(like, device="meta").detach()
        self = torch.Tensor._make_subclass(cls, meta, like.requires_grad)
        self.worker, self.path = worker, path
        self._owner, self._position, self._cleared = owner, position, 0
        self._home = Home(lambda: owner.values, worker, path, position, like.device, self.fill_grad_with_zeros)
        self._stub, self._given = None, False
        self._left = False
        return self

    def __init__(self, like: torch.Tensor, owner: Owners, worker: str, path: str, position: int) -> None:
        """Made in ``__new__``."""

    _owner: Owners
    _position: int
    _cleared: int
    _home: Home
    _stub: RemoteTensor | None
    _given: bool
    """Whether ``grad`` was set to a tensor."""
    _left: bool
    """Whether it may have had a gradient when it was frozen: that one stays until it is cleared."""

    @property
    def position(self) -> int:
        """Which of the worker's parameters of this model it is."""
        return self._position

    @property
    def owner(self) -> Owners:
        """The model it belongs to."""
        return self._owner

    @property
    def grad(self) -> torch.Tensor | None:
        owner = self._owner
        if owner.in_step:
            return None
        if not self._given:
            if self._cleared == owner.caller.control.begun[self.worker]:
                return None
            present = owner.caller.control.has_gradient(self.worker, self._position)
            if present is None:
                with torch._C.DisableTorchFunctionSubclass():
                    present = self.requires_grad or self._left
            if not present:
                return None
        if self._stub is None:
            with torch._C.DisableTorchFunctionSubclass():
                self._stub = RemoteTensor(self._home, self, GRAD)
        return self._stub

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if value is not None:
            self._assign_grad(value)
            return
        given, self._given, self._stub, self._left = self._given, False, None, False
        begun = self._owner.caller.control.begun[self.worker]
        if given:
            self._owner.values.take_back((self.worker, self._position, True))
        if given or self._cleared != begun:
            self._cleared = begun
            self._owner.zero(self.worker, self._position, TO_NONE)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def _assign_grad(self, value: torch.Tensor) -> None:
        if value is not self._stub:
            self._assign(value, GRAD, "grad")
            self._given, self._stub = True, RemoteTensor(self._home, value, GRAD)
            self._owner.caller.control.zeroing.assigned.add(self.worker)

    def _assign(self, value: torch.Tensor, kind: int, what: str) -> None:
        if (
            kind != GRAD
            and isinstance(value, RemoteTensor)
            and value.home is self._home
            and value.place == Place(self._position, kind)
        ):
            return  # p.data *= 2 assigns what it has written into
        with torch._C.DisableTorchFunctionSubclass():
            alike = value.shape == self.shape and value.dtype == self.dtype and value.layout is self.layout
        if not alike or value.device != self._home.device:
            raise RuntimeError(
                f"assigned {what} has shape {tuple(value.shape)}, {value.dtype}, {value.device}; "
                f"{self!r} stands for one on {self._home.device}"
            )
        if (kind == GRAD and value.requires_grad) or isinstance(value, (RemoteTensor, RemoteParameter)):
            raise self._refuse(f"its {what} cannot be part of a graph, or another worker's", "assign a clone")
        target, values = (self.worker, self._position, kind == GRAD), self._owner.values
        values.take_back(target)
        values.write(
            self.worker, Operation(ASSIGN, (Place(self._position, kind), value.detach().clone())), [target], value.nbytes
        )
        values.lend(target, value.detach() if value.requires_grad else value)

    def fill_grad_with_zeros(self) -> None:
        self._owner.values.changed((self.worker, self._position, True))
        self._owner.zero(self.worker, self._position, TO_ZERO)

    def _seen(self, kind: int) -> RemoteTensor:
        with torch._C.DisableTorchFunctionSubclass():
            return RemoteTensor(self._home, self, kind)

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        raise self._refuse("set_() cannot run on it here, where it has no memory", "use p.data.copy_(value)")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with torch._C.DisableTorchFunctionSubclass():
            return f"RemoteParameter({self.path!r} on {self.worker!r}, {tuple(self.shape)}, {self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise self._refuse("it cannot be copied")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise self._refuse("it cannot be pickled")

    def _refuse(self, why: str, hint: str = "") -> NotSupported:
        hint = hint or "model.state_dict() fetches the values, model.load_state_dict() sets them"
        return NotSupported(f"parameter {self.path!r} lives on worker {self.worker!r}: {why}", peer=self.worker, hint=hint)

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None) -> Any:
        if func in HARMLESS:
            with torch._C.DisableTorchFunctionSubclass():
                if func in _FREEZING and args[0].requires_grad:
                    args[0]._owner.frozen = True
                    args[0]._left = args[0]._cleared != args[0]._owner.caller.control.begun[args[0].worker]
                return func(*args, **(kwargs or {}))
        found = next(leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, RemoteParameter))
        if func in _HOOKING:
            raise found._refuse("a hook on it would not run")
        if func in _PLACED:
            return _PLACED[func](found._home.device)
        if found.owner.eager is not None:
            # The forward of a cut module computes with it.
            if func == _DATA.__set__:
                raise found._refuse("an assignment of its 'data' in the forward would be lost", _WRITING)
            func = torch.Tensor.detach if func == _DATA.__get__ else func  # of which writes are seen
            given = pytree.tree_map(_value, (args, kwargs or {}))
            return func(*given[0], **given[1])
        return _outside(found, func, args, kwargs or {})


def _outside(found: RemoteParameter, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An operation outside of the forward."""
    if func is torch.Tensor.detach:
        return found._seen(VALUE)
    if func == _DATA.__get__:
        return found._seen(DATA)
    if func == _DATA.__set__:
        return found._assign(args[1], DATA, "data")
    name = getattr(func, "__name__", str(func))
    with torch._C.DisableTorchFunctionSubclass():
        leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, RemoteParameter)]
        graph = torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves)
    if func in _MEMORY:
        raise found._refuse(f"{name} cannot run on it here, where it has no memory", "use p.data.copy_(value)")
    if func in _REFUSED or (graph and func not in _WITHOUT_GRAPH):
        if found.owner.leaf(found) is not None:
            return func(*pytree.tree_map(_leaf, args), **pytree.tree_map(_leaf, kwargs))
        raise found._refuse(
            f"{name} cannot run on it here, as autograd would not know of it",
            'wrap(..., capture="here"), or compute with p.detach() or under torch.no_grad(), or in the forward of a module',
        )
    seen = {id(leaf): leaf._seen(VALUE) for leaf in leaves}
    back = {id(tensor): leaf for leaf in leaves for tensor in [seen[id(leaf)]]}
    args, kwargs = pytree.tree_map(lambda leaf: seen.get(id(leaf), leaf), (args, kwargs))
    made = func(*args, **kwargs)
    return pytree.tree_map(lambda leaf: back.get(id(leaf), leaf), made)


def _leaf(leaf: Any) -> Any:
    if not isinstance(leaf, RemoteParameter):
        return leaf
    found = leaf.owner.leaf(leaf)
    if found is None:
        raise leaf._refuse("autograd does not know of it here", 'wrap(..., capture="here")')
    return found


def _value(leaf: Any) -> Any:
    if not isinstance(leaf, RemoteParameter):
        return leaf
    if leaf.owner.eager is None:
        raise leaf._refuse("the forward of another model cannot compute with it")
    return leaf.owner.eager.fetch(leaf.path)


def _harmless() -> frozenset[Any]:
    tensor = torch.Tensor
    read = "requires_grad shape dtype layout is_leaf grad_fn ndim is_sparse is_quantized retains_grad names "
    read += "is_mkldnn is_nested is_sparse_csr itemsize nbytes output_nr _version _backward_hooks"
    methods = "size dim numel nelement stride element_size is_floating_point is_complex requires_grad_ ndimension is_shared "
    methods += "is_contiguous is_signed is_inference __len__ __hash__ __dir__ retain_grad"
    found = [getattr(getattr(tensor, name), "__get__", None) for name in read.split() if hasattr(tensor, name)]
    found += [getattr(tensor, name) for name in methods.split() if hasattr(tensor, name)]
    found += [tensor.requires_grad.__set__, torch.is_floating_point, torch.is_complex, torch.numel]  # type: ignore[attr-defined]
    return frozenset(item for item in found if item is not None)


HARMLESS = _harmless()
DEVICE = torch.Tensor.device.__get__
_HOOKING = (torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook)
_FREEZING = (torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__)  # type: ignore[attr-defined]
_DATA: Any = torch.Tensor.data
_WRITING = "do it in the loop, or place the module whose forward does it as a whole"
_PLACED: dict[Any, Callable[[torch.device], Any]] = {
    DEVICE: lambda device: device,
    torch.Tensor.is_cpu.__get__: lambda device: device.type == "cpu",  # type: ignore[attr-defined]
    torch.Tensor.is_cuda.__get__: lambda device: device.type == "cuda",  # type: ignore[attr-defined]
    torch.Tensor.is_meta.__get__: lambda device: False,  # type: ignore[attr-defined]
    torch.Tensor.is_mps.__get__: lambda device: device.type == "mps",  # type: ignore[attr-defined]
    torch.Tensor.is_xpu.__get__: lambda device: device.type == "xpu",  # type: ignore[attr-defined]
    torch.Tensor.get_device: lambda device: -1 if device.index is None else device.index,
}
"""What says where it is: where the same parameter of the original model was."""
_REFUSED = frozenset({torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward})
_MEMORY = frozenset(
    {
        *(torch.Tensor.resize_, torch.Tensor.resize_as_, torch.Tensor.share_memory_, torch.Tensor.data_ptr),
        *(torch.Tensor.untyped_storage, torch.Tensor.storage, torch.Tensor.pin_memory, torch.Tensor.storage_offset),
    }
)
_WITHOUT_GRAPH = frozenset(
    {
        *(torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like, torch.rand_like, torch.randn_like),
        *(torch.Tensor.new_zeros, torch.Tensor.new_ones, torch.Tensor.new_empty, torch.Tensor.new_full),
        torch.Tensor.new_tensor,
        *(torch.equal, torch.Tensor.equal, torch.allclose, torch.Tensor.allclose, torch.Tensor.item, torch.Tensor.tolist),
        *(torch.isnan, torch.Tensor.isnan, torch.isinf, torch.Tensor.isinf, torch.isfinite, torch.Tensor.isfinite),
        *(torch.Tensor.__eq__, torch.Tensor.__ne__, torch.Tensor.eq, torch.eq, torch.Tensor.__bool__, torch.Tensor.__float__),
    }
)
"""Their results never have a graph."""
