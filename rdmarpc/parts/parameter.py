"""A parameter that lives at another worker, and its gradient: shapes without data.

Anything that would compute with them raises ``NotSupported`` and names the worker; nothing is silently wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..graph.work.command import TO_NONE, TO_ZERO, Command
from ..transport import NotSupported


class EagerForward(Protocol):
    """The model's own forward, as it runs here in Python at the moment (``eager.Eager``)."""

    def call(self, path: str, args: Any, kwargs: Any, /) -> Any:
        """A remote part is called."""

    def fetch(self, path: str, /) -> torch.Tensor:
        """A remote parameter or buffer is computed with."""


class Owners(Protocol):
    """The workers that own the parts of one model, as its stand-ins and optimizers see them (``session.Session``)."""

    @property
    def backwards(self) -> int:
        """How many backwards have begun."""

    eager: EagerForward | None

    @property
    def outside(self) -> EagerForward:
        """Runs a part that is called outside of any forward."""

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

    def share(self, worker: str, path: str, name: str, value: Any, /) -> None:
        """An attribute of a module went with it, and is here too: what is changed inside of it here is to be changed there."""

    def read(self, worker: str, path: str, name: str, /) -> Any:
        """An attribute of a module, as its owner has it now."""

    def write(self, worker: str, path: str, name: str, value: Any, gentle: bool, /) -> None:
        """Set an attribute of a module. ``gentle``: this changes no operation's kind or shape."""

    def delete(self, worker: str, path: str, name: str, /) -> None:
        """Delete an attribute of a module."""

    def fetch_parts(self, memo: dict[int, Any], /) -> None:
        """Fetch all parts into this process: what stands for them goes into the memo of a ``deepcopy``."""


class RemoteParameter(nn.Parameter):
    """In ``model.parameters()`` it stands for parameter ``position`` of ``worker``. ``grad`` is ``None`` or a ``RemoteGrad``;
    setting it to ``None`` clears the real gradient before the next backward."""

    worker: str
    path: str

    def __new__(cls, like: torch.Tensor, owner: Owners, worker: str, path: str, position: int) -> RemoteParameter:
        meta = torch.empty_like(like, device="meta").detach()
        self = torch.Tensor._make_subclass(cls, meta, like.requires_grad)
        self.worker, self.path = worker, path
        self._owner, self._position, self._cleared = owner, position, owner.backwards
        self._home = like.device
        self._stub = None
        self._left = False
        return self

    def __init__(self, like: torch.Tensor, owner: Owners, worker: str, path: str, position: int) -> None:
        """Made in ``__new__``."""

    _owner: Owners
    _position: int
    _home: torch.device
    """Where it would be in one process: what people move their inputs to."""
    _cleared: int
    _stub: RemoteGrad | None
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
        if owner.in_step or self._cleared == owner.backwards:
            return None
        with torch._C.DisableTorchFunctionSubclass():
            if not self.requires_grad and not self._left:
                return None
            if self._stub is None:
                self._stub = RemoteGrad(self)
        return self._stub

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if value is not None:
            raise self._refuse("its gradient cannot be set from here")
        self._left = False
        if self._cleared != self._owner.backwards:
            self._cleared = self._owner.backwards
            self._owner.zero(self.worker, self._position, TO_NONE)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def fill_grad_with_zeros(self) -> None:
        self._owner.zero(self.worker, self._position, TO_ZERO)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with torch._C.DisableTorchFunctionSubclass():
            return f"RemoteParameter({self.path!r} on {self.worker!r}, {tuple(self.shape)}, {self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise self._refuse("it cannot be copied")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise self._refuse("it cannot be pickled")

    def _refuse(self, why: str) -> NotSupported:
        return NotSupported(
            f"parameter {self.path!r} lives on worker {self.worker!r}: {why}",
            peer=self.worker,
            hint="model.state_dict() fetches the values, model.load_state_dict() sets them",
        )

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None) -> Any:
        if func == DEVICE:
            return args[0]._home
        if func in HARMLESS:
            with torch._C.DisableTorchFunctionSubclass():
                if func in _FREEZING and args[0].requires_grad:
                    args[0]._left = args[0]._cleared != args[0]._owner.backwards
                return func(*args, **(kwargs or {}))
        found = _find(RemoteParameter, (args, kwargs))
        if func in _HOOKING:
            raise found._refuse("a hook on it would not run")
        if found.owner.eager is not None:
            # The forward of a cut module computes with it.
            given = pytree.tree_map(_value, (args, kwargs or {}))
            return func(*given[0], **given[1])
        raise found._refuse(f"{getattr(func, '__name__', func)} cannot run on it here")


class RemoteGrad(torch.Tensor):
    """The gradient of a remote parameter, as far as it is known here: that there is one. It can be set to zero."""

    parameter: RemoteParameter

    @staticmethod
    def __new__(cls, parameter: RemoteParameter) -> RemoteGrad:
        self = torch.Tensor._make_wrapper_subclass(
            cls, tuple(parameter.shape), dtype=parameter.dtype, device=torch.device("meta")
        )
        self.parameter = parameter
        return self

    def __init__(self, parameter: RemoteParameter) -> None:
        """Made in ``__new__``."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.zero_.default:
            args[0].parameter.fill_grad_with_zeros()
            return args[0]
        if func in (torch.ops.aten._foreach_zero_.default,):
            for grad in args[0]:
                grad.parameter.fill_grad_with_zeros() if isinstance(grad, RemoteGrad) else grad.zero_()
            return None
        parameter = _find(RemoteGrad, (args, kwargs)).parameter
        raise NotSupported(
            f"the gradient of {parameter.path!r} lives on worker {parameter.worker!r}: {func} cannot run on it here",
            peer=parameter.worker,
            hint="what needs the values of gradients (clipping, logging their norms) has to run at their worker",
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"RemoteGrad({self.parameter.path!r} on {self.parameter.worker!r})"


def _find(kind: type[Any], arguments: Any) -> Any:
    leaves = pytree.tree_leaves(arguments)
    return next(leaf for leaf in leaves if isinstance(leaf, kind))


def _value(leaf: Any) -> Any:
    if not isinstance(leaf, RemoteParameter):
        return leaf
    if leaf.owner.eager is None:
        raise leaf._refuse("the forward of another model cannot compute with it")
    return leaf.owner.eager.fetch(leaf.path)


def _harmless() -> frozenset[Any]:
    tensor = torch.Tensor
    read = "requires_grad shape dtype device layout is_leaf grad_fn ndim is_sparse is_quantized is_meta retains_grad names "
    read += "is_cuda is_cpu is_mkldnn is_xpu is_mps is_nested is_sparse_csr itemsize nbytes output_nr _version _backward_hooks"
    methods = "size dim numel nelement stride element_size is_floating_point is_complex requires_grad_ ndimension is_shared "
    methods += "is_contiguous is_signed is_inference __len__ __hash__ __dir__"
    found = [getattr(getattr(tensor, name), "__get__", None) for name in read.split() if hasattr(tensor, name)]
    found += [getattr(tensor, name) for name in methods.split() if hasattr(tensor, name)]
    found += [tensor.requires_grad.__set__, torch.is_floating_point, torch.is_complex, torch.numel]  # type: ignore[attr-defined]
    return frozenset(item for item in found if item is not None)


HARMLESS = _harmless()
DEVICE = torch.Tensor.device.__get__
_HOOKING = (torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook)
_FREEZING = (torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__)  # type: ignore[attr-defined]
