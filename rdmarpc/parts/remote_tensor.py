"""A tensor that lives at another worker: a gradient, a parameter's value, or a view of one. It has no data here.

Each operation with it is one of three, by what it writes:

* It writes tensors of one worker and takes nothing else but those and ordinary tensors: it runs there, before whatever is sent
  next.
* It writes nothing and is a reduction over tensors of one worker: it runs there, and its result is an ordinary tensor.
* Anything else runs here, on values that are fetched. What it writes goes back.

So the result of an operation is an ordinary tensor unless it shares memory with a remote one; then it is a remote tensor too.
Random numbers are drawn here, as in a model of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from ..graph.work.remote_values import GRAD, NONFINITE, Operation, Place, View, seen_through
from ..transport import NotSupported
from .remote_values import RemoteValues, Target

aten = torch.ops.aten


class Home:
    """Where a parameter lives, and how its worker is reached. ``zero`` sets its gradient to zeros before whatever is next;
    ``device``: where an ordinary tensor of this model would lie here."""

    def __init__(
        self,
        values: Callable[[], RemoteValues],
        worker: str,
        path: str,
        position: int,
        device: torch.device,
        zero: Callable[[], None],
    ) -> None:
        self.values, self.worker, self.path, self.position = values, worker, path, position
        self.device, self.zero = device, zero

    def refuse(self, what: str, why: str, hint: str = "") -> NotSupported:
        return NotSupported(f"{what} of {self.path!r} lives on worker {self.worker!r}: {why}", peer=self.worker, hint=hint)


class RemoteTensor(torch.Tensor):
    """``kind``: see ``Place``; seen through ``views``."""

    home: Home
    kind: int
    views: tuple[View, ...]

    @staticmethod
    def __new__(cls, home: Home, like: torch.Tensor, kind: int, views: tuple[View, ...] = ()) -> RemoteTensor:
        """``like`` has its dtype, shape and strides."""
        self = torch.Tensor._make_wrapper_subclass(
            cls, tuple(like.shape), strides=like.stride(), dtype=like.dtype, device=home.device
        )
        self.home, self.kind, self.views = home, kind, views
        return self

    def __init__(self, home: Home, like: torch.Tensor, kind: int, views: tuple[View, ...] = ()) -> None:
        """Made in ``__new__``."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        return operate(func, args, kwargs or {})

    @property
    def place(self) -> Place:
        return Place(self.home.position, self.kind, self.views)

    @property
    def target(self) -> Target:
        """What a write to it changes."""
        return self.home.worker, self.home.position, self.kind == GRAD

    @property
    def name_of(self) -> str:
        return "the gradient" if self.kind == GRAD else "the value"

    def values(self) -> torch.Tensor:
        """Fetched; not to be written."""
        home = self.home
        base = home.values().whole(home.worker, home.position, self.kind == GRAD)
        return seen_through(base if base.device == home.device else base.to(home.device), self.views)

    def tolist(self) -> Any:
        return self.values().tolist()

    def numpy(self, *, force: bool = False) -> np.ndarray[Any, Any]:
        """Read only: writes to it would not reach the worker."""
        array = self.values().numpy(force=force)
        array = array.view()
        array.flags.writeable = False
        return array

    def __array__(self, dtype: Any = None) -> np.ndarray[Any, Any]:
        array = self.numpy()
        return array if dtype is None else array.astype(dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return memo.setdefault(id(self), self.values().clone())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.values().clone().__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"RemoteTensor({self.name_of} of {self.home.path!r} on {self.home.worker!r}, {tuple(self.shape)}, {self.dtype})"


# -- operations

_REDUCTIONS = {
    *("linalg_vector_norm", "linalg_matrix_norm", "norm", "_foreach_norm", "dist", "dot", "vdot", "trace", "logsumexp"),
    *("sum", "mean", "std", "var", "prod", "count_nonzero", "any", "all", "max", "min", "amax", "amin", "argmax", "argmin"),
    *("equal", "is_nonzero", "_local_scalar_dense"),
}
_LIKE = {
    *("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like"),
    *("new_zeros", "new_ones", "new_empty", "new_full", "new_empty_strided"),
}
"""They look at a tensor's shape only."""


def operate(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation of ``torch.ops.aten`` that has remote tensors among its arguments."""
    packet = func.overloadpacket.__name__
    if func.is_view and isinstance(args[0], RemoteTensor):
        return _view(func, args, kwargs)
    if torch.Tag.inplace_view in func.tags:
        [first, *_] = _remote(args)
        raise first.home.refuse(first.name_of, f"{func} cannot change its shape from here")
    if packet.startswith("_foreach_") and len(args[0]) > 1:
        return _one_by_one(func, args, kwargs)
    if packet == "_amp_foreach_non_finite_check_and_unscale_":
        return _unscale(func, *args)
    if packet in ("zero_", "_foreach_zero_"):
        for tensor in _tensors(args[0]):
            _zero(tensor)
        return args[0] if packet == "zero_" else None
    written = [tensor for tensor in _written(func, args, kwargs) if isinstance(tensor, RemoteTensor)]
    remote = list(_remote((args, kwargs)))
    alone = len({tensor.home.worker for tensor in remote}) == 1 and torch.Tag.nondeterministic_seeded not in func.tags
    if written and alone and len(written) == len(list(_tensors(_written(func, args, kwargs)))):
        return _there(func, args, kwargs, written)
    if not written and alone and packet in _REDUCTIONS and len(remote) == len(list(_tensors((args, kwargs)))):
        return _reduced(func, args, kwargs, remote[0])
    return _here(func, args, kwargs, remote, written)


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source = args[0]
    made = func(_without_data(source, "meta"), *args[1:], **kwargs)
    step = View(_name(func), _encoded(args[1:]), _encoded_names(kwargs), -1)
    if isinstance(made, torch.Tensor):
        return RemoteTensor(source.home, made, source.kind, (*source.views, step))
    return [RemoteTensor(source.home, part, source.kind, (*source.views, step._replace(at=at))) for at, part in enumerate(made)]


def _zero(tensor: torch.Tensor) -> None:
    if not isinstance(tensor, RemoteTensor):
        tensor.zero_()
    elif tensor.kind == GRAD and not tensor.views:
        tensor.home.zero()
    else:
        _there(aten.zero_.default, (tensor,), {}, [tensor])


def _one_by_one(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operation on lists, for each of their elements: so it is defined, and so the CPU carries it out."""
    count = len(args[0])

    def part(value: Any, at: int) -> Any:
        if isinstance(value, (list, tuple)) and len(value) == count:
            return [value[at]]
        if isinstance(value, torch.Tensor) and value.dim() == 1 and value.numel() == count:
            return value[at : at + 1]
        return value

    made = [
        func(*(part(value, at) for value in args), **{key: part(value, at) for key, value in kwargs.items()})
        for at in range(count)
    ]
    return None if made[0] is None else [item for items in made for item in items]


def _unscale(func: Any, grads: Sequence[torch.Tensor], found: torch.Tensor, scale: torch.Tensor) -> None:
    """``GradScaler.unscale_``."""
    for grad in grads:
        if not isinstance(grad, RemoteTensor):
            func([grad], found, scale)
            continue
        home = grad.home
        if home.values().read(home.worker, Operation(NONFINITE, (grad.place,), wanted=True)):
            found.fill_(1.0)
        _there(func, ([grad], torch.zeros(()), scale.detach()), {}, [grad])


def _there(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: Sequence[RemoteTensor]) -> Any:
    """Have the worker run it, in order with all that is sent."""
    home = written[0].home
    others = [tensor for tensor in _tensors((args, kwargs)) if tensor is not written[0]]
    if any(tensor.dim() for tensor in others):
        # What does not fit is to be seen now, not when the worker does it.
        func(*_mapped(args, _shape_only), **_mapped(kwargs, _shape_only))
    nbytes = sum(t.nbytes for t in _tensors((args, kwargs)) if not isinstance(t, RemoteTensor))
    operation = Operation(_name(func), _encoded(args), _encoded_names(kwargs))
    home.values().write(home.worker, operation, [tensor.target for tensor in written], nbytes)
    returned = [result for result in func._schema.returns if result.alias_info is not None]
    return written[0] if len(returned) == 1 else tuple(written) if returned else None


def _reduced(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensor: RemoteTensor) -> Any:
    home = tensor.home
    made = home.values().read(home.worker, Operation(_name(func), _encoded(args), _encoded_names(kwargs), wanted=True))
    return _mapped(made, lambda part: part.to(home.device, copy=True))


def _here(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], remote: Sequence[RemoteTensor], written: Sequence[RemoteTensor]
) -> Any:
    """On values that are fetched; what was written goes back."""
    copies: dict[Target, torch.Tensor] = {}
    for tensor in written:
        if tensor.target not in copies:
            home = tensor.home
            copies[tensor.target] = home.values().whole(home.worker, home.position, tensor.kind == GRAD).clone().to(home.device)
    like = func.overloadpacket.__name__ in _LIKE
    real: dict[int, torch.Tensor] = {}
    for tensor in remote:
        if tensor.target in copies:
            real[id(tensor)] = seen_through(copies[tensor.target], tensor.views)
        else:
            real[id(tensor)] = _without_data(tensor, tensor.home.device) if like else tensor.values()
    back = {id(value): tensor for tensor in written for value in [real[id(tensor)]]}

    def take(part: torch.Tensor) -> torch.Tensor:
        return real.get(id(part), part)

    made = func(*_mapped(args, take), **_mapped(kwargs, take))
    for tensor in {tensor.target: tensor for tensor in written}.values():
        place = Place(tensor.home.position, tensor.kind)
        copied = Operation("copy_.default", (place, copies[tensor.target]))
        tensor.home.values().write(tensor.home.worker, copied, [tensor.target], copies[tensor.target].nbytes)
    return _mapped(made, lambda part: back.get(id(part), part))


# -- what goes with them


def _name(func: Any) -> str:
    if func.namespace != "aten":
        raise NotSupported(f"{func} cannot run at another worker")
    return f"{func.overloadpacket.__name__}.{func._overloadname}"


def _encoded(value: Any) -> Any:
    """As it travels, and can be looked up: places for remote tensors, copies of the others, tuples for lists."""
    if isinstance(value, RemoteTensor):
        return value.place
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, (list, tuple)):
        return tuple([_encoded(item) for item in value])
    return value


def _encoded_names(kwargs: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple([(key, _encoded(value)) for key, value in kwargs.items()])


def _shape_only(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device="meta")


def _without_data(tensor: RemoteTensor, device: Any) -> torch.Tensor:
    return torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device=device)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))


def _remote(value: Any) -> Iterator[RemoteTensor]:
    return (tensor for tensor in _tensors(value) if isinstance(tensor, RemoteTensor))


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The arguments that it writes, by its schema."""
    found = []
    for at, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[at] if at < len(args) and not argument.kwarg_only else kwargs.get(argument.name)
            found += list(_tensors(given))
    return found


def _mapped(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)([_mapped(item, change) for item in value])
    if isinstance(value, dict):
        return {key: _mapped(item, change) for key, item in value.items()}
    return value
