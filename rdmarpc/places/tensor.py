"""``RemoteTensor``: a tensor whose memory lies at a worker, and where its operations run.

PyTorch runs the program: autograd, views, versions and modules are its own. Only what comes below autograd comes here
(``__torch_dispatch__``), and is posted to the stream of a place. The rules of where an operation runs:

1. where its tensors lie, if that is one place;
2. else where what it writes lies;
3. else, in a backward, where its forward ran (found by the sequence number of the node, and its thread);
4. else where the first parameter among its operands lies, or a view of one (``Storage.anchor``);
5. else where that remote operand lies which was made last.

Where an operand, or a result, cannot lie at a worker (``StaysHere``: most layouts, quantized tensors, objects of this process),
the operation runs here. With an operand of a class that has a dispatch of its own it is left to that class.

An operand that lies elsewhere is copied there below autograd: no node is added. A copy keeps strides and the address modulo 64,
because kernels choose by both in which order they add up. A copy of a remote operand is used again until that is written; a
plain tensor of this process is copied at each use, since numpy and others write it unseen.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from ..base import here
from ..transport import NotSupported
from . import observing, ring
from .flags import inside, precisions, run_plain
from .geometry import Geometry, geometry, room
from .geometry import view as view_of
from .names import DEVICE, place_named
from .operators import RESIZED, TURNED, Operator, aten, operator, with_autograd
from .ring import FLOAT, INT, decode, encode
from .stream import Known, Meta, Storage, Stream, cross, meta_of, names, ran
from .worker import kinds, raw

_make = torch.Tensor._make_wrapper_subclass
_CPU, _STRIDED = torch.device("cpu"), torch.strided
_BELOW = torch._C._ExcludeDispatchKeyGuard
_PYTHON = torch._C.DispatchKeySet(torch._C.DispatchKey.Python)
_KERNELS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_inference = torch.is_inference_mode_enabled
_creation, _DEFAULT = torch._C._autograd._get_creation_meta, torch._C._autograd.CreationMeta.DEFAULT
_grad, _node, _sequence = torch.is_grad_enabled, torch._C._current_autograd_node, torch._C._autograd._get_sequence_nr
_modes, _mode, _TRACING = torch._C._len_torch_dispatch_stack, torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.PROXY
_REMEMBERED, _FORMS = 1 << 18, 1 << 15
"""Places of forward operations, and forms of calls, that are kept: a program whose shapes or constants are ever new forgets."""
_TOGETHER = 1 << 11
"""Elements of lists that are posted in one message."""
_NOTHING: dict[str, Any] = {}
_ELSEWHERE = object()
_ASKED, _WRITTEN, _ONE, _SEVERAL = range(4)
"""How results of a known form are made: they are asked for each time; operands that were written; one new tensor; else."""
_clone = operator(aten.clone.default)
OWN = ("_handle", "_meta", "_offset", "_words")
"""Attributes that a remote tensor has of us."""


_data: Any = torch.Tensor.data


def _refused(why: str) -> Any:
    def refuse(tensor: RemoteTensor, *args: Any, **options: Any) -> Any:
        raise NotSupported(f"a tensor that lies at a worker {why}", hint=".cpu() brings a copy home")

    return refuse


class RemoteTensor(torch.Tensor):
    """A tensor at a worker (``place``). Shape, dtype, strides, versions and gradients are here."""

    _handle: Storage
    _meta: Meta
    _offset: int
    _words: tuple[int, int]
    """The storage's name, and -1 for all of it as it was made, else the offset of a view (``_at``)."""
    __module__ = "torch"  # by this of an operand, opt_einsum and others choose what they call
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if len(types) > 1 and not any(each.__name__ == "FakeTensor" for each in types):  # those would know no answer
            return NotImplemented
        if _modes() and _mode(_TRACING) and RemoteTensor not in (fx := torch.fx.experimental.proxy_tensor).HANDLED_TYPES:
            # ``make_fx`` takes what classes that it does not know compute for constants.
            fx.HANDLED_TYPES += (RemoteTensor,)  # type: ignore[attr-defined]
            return func(*args, **(kwargs or _NOTHING))
        return (_ways.get(id(func)) or _way(func))(args, kwargs or _NOTHING)

    @property
    def _at(self) -> int:
        return self._words[1]

    @property
    def place(self) -> str:
        """The worker, and the device there if it is not the CPU: ``"worker1"``, ``"worker1/cuda:0"``."""
        return repr(self._handle.stream)

    # -- bringing it home

    def cpu(self, memory_format: torch.memory_format = torch.preserve_format) -> torch.Tensor:
        """A copy in this process. Gradients flow through it."""
        found = _Home.apply(self)
        return found if memory_format is torch.preserve_format else found.contiguous(memory_format=memory_format)

    def numpy(self, *, force: bool = False) -> Any:
        """A copy, read-only: writing into it would not reach the worker."""
        if self.requires_grad and torch.is_grad_enabled() and not force:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
        found = at_place(self.detach(), None).resolve_conj().resolve_neg().clone().numpy()
        found.flags.writeable = False
        return found

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        found = self.numpy()
        return found if dtype is None else found.astype(dtype)

    def tolist(self) -> Any:
        return at_place(self.detach(), None).tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with torch.no_grad():
            text = repr(at_place(self.detach(), None).requires_grad_(self.requires_grad and self.is_leaf))
        if self.grad_fn is not None:
            text = text[:-1] + f", grad_fn=<{type(self.grad_fn).__name__}>)"
        head = "Parameter containing:\n" if isinstance(self, torch.nn.Parameter) else ""
        return f"{head}{text[:-1]}, place={self.place!r})"

    def __format__(self, spec: str) -> str:
        return self.item().__format__(spec) if self.dim() == 0 else object.__format__(self, spec)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as a tensor of the CPU: a file knows no workers. Tensors over one storage have one there, too."""
        found = self._like(_with_storage(self))
        found.__dict__.update({name: value for name, value in self.__dict__.items() if name not in (*OWN, "_is_param")})
        return found.__reduce_ex__(protocol)

    def _like(self, made: torch.Tensor) -> torch.Tensor:
        """A parameter, if this is one, which requires grad if this does."""
        if getattr(self, "_is_param", False):
            return torch.nn.Parameter(made, self.requires_grad)
        return made.requires_grad_(self.requires_grad)

    def __copy__(self) -> Any:
        """Another tensor over the same memory."""
        parameter = getattr(self, "_is_param", False)
        # What is no parameter torch makes anew: within inference mode that gives an inference tensor.
        made = self._like(self.data if parameter else wrapper(self._handle, self._meta, self._offset, self._at))
        made.__dict__.update({name: value for name, value in self.__dict__.items() if name not in made.__dict__})
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            return super().__deepcopy__(memo)  # torch's error
        if getattr(self, "_is_param", False):  # as ``nn.Parameter`` does: memory of its own, neither gradient nor attributes
            memo[id(self)] = made = cast(RemoteTensor, self._like(self.data.clone()))
            made._handle.anchor = self._handle.anchor
            return made
        storage, whole = _cloned(self, memo)
        copied = wrapper(storage, self._meta, self._offset, -1 if whole and self._at == -1 else self._offset)
        made = cast(RemoteTensor, copied.resolve_conj().resolve_neg())
        made.requires_grad_(self.requires_grad)
        memo[id(self)] = made
        kept = {name: value for name, value in self.__dict__.items() if name not in made.__dict__}
        made.__dict__.update(copy.deepcopy(kept, memo))
        if self.grad is not None:
            made.grad = copy.deepcopy(self.grad, memo)
        return made

    # -- what a place of memory elsewhere cannot do as memory here does

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """As ``torch.Tensor.to``. "cpu" is what ``device`` says, and changes nothing: ``cpu()`` brings a tensor home."""
        device = next((each for each in (*args, kwargs.get("device")) if isinstance(each, torch.device)), None)
        if device is not None and device.type == DEVICE and place_named(device) is self._handle.stream:
            args = tuple(_CPU if each is device else each for each in args)
            kwargs = {name: _CPU if each is device else each for name, each in kwargs.items()}
        return super().to(*args, **kwargs)

    @property
    def data(self) -> torch.Tensor:
        """The same memory, apart from autograd and with a version of its own."""
        with torch.inference_mode(self.is_inference()):
            return wrapper(self._handle, self._meta, self._offset, self._at)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        value = at_place(value.detach(), self._handle.stream) if type(value) is not RemoteTensor else value
        assert type(value) is RemoteTensor
        anchor = self._handle.anchor
        if value._meta is not self._meta or value._offset != self._offset:
            base = self._base
            # Until what it is a view of is written, it has the history of what it was.
            if not _loosened(self) or (base is not None and (base.requires_grad or not _exchanged(self, value))):
                raise NotSupported(f".data = ...: {TURNED}", hint="make a new tensor of it")
        _data.__set__(self, value)
        self._handle, self._meta, self._offset, self._words = value._handle, value._meta, value._offset, value._words
        self._handle.anchor = anchor

    def untyped_storage(self) -> Any:
        """What tells storages apart (``RemoteStorage``); it has no memory here."""
        return RemoteStorage(self._handle)

    def data_ptr(self) -> int:
        """The address of a copy here, for libraries that read a tensor's bytes so: as after the writes that were posted when it
        was asked for. It is valid as long as the storage, and read-only, so that nothing is written through it unseen."""
        handle, itemsize = self._handle, self.dtype.itemsize
        mirror, start = handle.mirror, max(self._offset, 0) * itemsize
        used = self._meta.geometry.span * itemsize
        if used:
            memory = meta_of(Geometry((used,), (1,), torch.uint8))
            with _unseen():
                mirror.fill(start, raw(handle.stream.fetch(handle.name, start, memory, 0)))
        return mirror.address + start

    def __coerce_same_metadata_as_tangent__(self, metadata: Any, kind: type = torch.Tensor) -> torch.Tensor | None:
        """A gradient for what torch has compiled to run here is a copy here."""
        return at_place(self.detach(), None) if kind is torch.Tensor else None

    __dlpack__ = _refused("is not shared with other libraries")
    share_memory_ = _refused("is not shared with processes here")
    pin_memory = storage = _typed_storage = _refused("has no memory here")

    def as_subclass(self, cls: Any) -> Any:
        raise NotSupported(f"a tensor that lies at a worker cannot be a {cls.__name__}", hint=".cpu() brings a copy home")

    def is_pinned(self, device: Any = None) -> bool:
        return False

    is_shared = is_pinned


here.remote_classes.append(RemoteTensor)
torch.RemoteTensor = RemoteTensor  # type: ignore[attr-defined]  # where pickle looks for it then


class RemoteStorage:
    """In the place of a storage: its size, and an address that no other storage here has. Libraries find by these which tensors
    share memory."""

    device = _CPU

    def __init__(self, handle: Storage) -> None:
        self._handle = handle

    @property
    def _cdata(self) -> int:
        return self._handle.name

    def data_ptr(self) -> int:
        return self._handle.mirror.address

    def nbytes(self) -> int:
        return self._handle.nbytes

    size = __len__ = nbytes

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemoteStorage) and other._handle is self._handle

    def __hash__(self) -> int:
        return hash(self._handle.name)


class _Home(torch.autograd.Function):
    """A copy here. Its gradient is moved where it is used."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        if _modes() and _mode(_TRACING):
            why = "a copy of a tensor at a worker would be a constant of what make_fx or torch.func.linearize traces"
            raise NotSupported(why, hint='.cpu() what the traced function gives; outputs="here" of wrap is such a copy, too')
        found = at_place(tensor, None)
        return _own(found) if found.layout is _STRIDED else found

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor) -> torch.Tensor:
        return tangent.cpu()  # with a graph, since a loss may be made of tangents; one of vmap's stays where it is


def _own(found: torch.Tensor) -> torch.Tensor:
    """Of a copy here that may be used again for other reads: a copy at the same address modulo 64."""
    made = found.clone()
    shift = room(shape := geometry(made), found.data_ptr())[1] // shape.dtype.itemsize
    if shift == 0:
        return made
    return made.new_zeros(shift + shape.span).as_strided(shape.shape, shape.strides, shift).copy_(made).data


def _bytes_of(storage: Storage) -> RemoteTensor:
    return wrapper(storage, meta_of(Geometry((storage.nbytes,), (1,), torch.uint8)), 0, 0)


def _with_storage(tensor: RemoteTensor) -> torch.Tensor:
    """A copy here, over a copy of all of its storage, which is the same for all tensors over that."""
    if not tensor._meta.strided:
        return at_place(tensor.detach(), None).detach()
    handle = tensor._handle
    found = at_place(_bytes_of(handle), None)
    if handle.shift:  # the view counts from the beginning of a storage
        found = found.__dict__.setdefault("aligned", found.clone())
    return view_of(found, tensor._meta.geometry, tensor._offset)


def brought(tensor: RemoteTensor, storages: dict[int, torch.Tensor]) -> torch.Tensor:
    """A copy here that nobody else has; those of tensors over one storage lie over one in ``storages``."""
    if not tensor._meta.strided:
        return at_place(tensor.detach(), None).clone()
    handle = tensor._handle
    if handle.name not in storages:
        storages[handle.name] = _own(at_place(_bytes_of(handle), None))
    whole = storages[handle.name]
    return view_of(whole, tensor._meta.geometry, tensor._offset + int(whole.storage_offset()) // tensor.dtype.itemsize).data


def _cloned(tensor: RemoteTensor, memo: dict[int, Any]) -> tuple[Storage, bool]:
    """A copy of a tensor's storage, once for all tensors over it, and whether it was made as the tensor lies."""
    key = ("storage at a worker", id(tensor._handle))
    found = memo.get(key)  # type: ignore[call-overload]
    if found is None:
        handle = tensor._handle
        lies = tensor._meta.geometry
        fills = tensor._offset == 0 and lies.span == lies.numel and lies.numel * lies.dtype.itemsize == handle.nbytes
        whole = tensor._at == -1 and (fills or not tensor._meta.strided)
        source = wrapper(handle, tensor._meta, 0, -1) if whole else _bytes_of(handle)
        copied = post(handle.stream, _clone, (source,), {})
        found = memo[key] = copied._handle, whole  # type: ignore[index]
        copied._handle.anchor = handle.anchor
    return found


def wrapper(storage: Storage, meta: Meta, offset: int, at: int) -> RemoteTensor:
    """A tensor over memory at a worker."""
    if meta.plain:
        if offset == 0 and at == -1:
            made = _make(RemoteTensor, meta.shape, meta.strides, 0, None, meta.dtype, _STRIDED, _CPU)
        else:
            made = _make(
                RemoteTensor, meta.shape, meta.strides, offset, None, meta.dtype, _STRIDED, _CPU, False, False, None,
                False, False, None, storage.nbytes,
            )  # fmt: skip
    else:
        made = _unusual(storage, meta, offset)
    made._handle, made._meta, made._offset, made._words = storage, meta, offset, (storage.name, at)
    return made


def _unusual(storage: Storage, meta: Meta, offset: int) -> Any:
    """One that is sparse, conjugated or negated."""
    shape, strides, dtype, layout, conj, neg = meta.geometry
    if layout is torch.sparse_coo:
        return _make(RemoteTensor, shape, strides=(1,) * len(shape), dtype=dtype, layout=layout, device=_CPU)
    if layout is not _STRIDED:
        raise _no_layout(layout)  # autograd ends the process for want of such a wrapper's layout
    made = _make(RemoteTensor, shape, strides, storage_offset=offset, dtype=dtype, device=_CPU, storage_size=storage.nbytes)
    with _BELOW(_PYTHON):
        made = aten._conj.default(made) if conj else made
        made = aten._neg_view.default(made) if neg else made
        return torch.Tensor._make_subclass(RemoteTensor, made)


def address_of(tensor: RemoteTensor) -> int:
    """The address at the worker of a strided tensor's first element, modulo 64."""
    return (tensor._handle.shift + tensor._offset * tensor._meta.dtype.itemsize) % 64


def place_of(tensor: torch.Tensor) -> Stream | None:
    """Where a tensor lies; ``None``: here."""
    return tensor._handle.stream if type(tensor) is RemoteTensor else None


def storage_of(tensor: torch.Tensor) -> Any:
    """What is the same for tensors that share memory."""
    if type(tensor) is RemoteTensor:
        return tensor._handle
    return tensor.untyped_storage()._cdata if tensor.layout is _STRIDED else id(tensor)


def gradients_of(tensors: Iterable[torch.Tensor]) -> set[Any]:
    """The storages of the gradients of those that are leaves."""
    return {storage_of(each.grad) for each in tensors if each.is_leaf and each.grad is not None}


# -- moving, below autograd


def at_place(tensor: torch.Tensor, place: Stream | None) -> torch.Tensor:
    """The tensor at a place: itself, or a copy of its bytes (not of its graph)."""
    if type(tensor) is not RemoteTensor:
        if place is None:
            return tensor
        with _unseen():
            return _bring(tensor, place)
    handle = tensor._handle
    if handle.stream is place:
        return tensor
    capture = observing.capture.number
    key = place, tensor._meta, tensor._offset, capture
    copies = handle.copies
    if copies is None:
        copies = handle.copies = {}
    found = copies.get(key)
    if found is None:
        with _unseen():
            found = _moved(tensor, place)
        if capture:
            observing.copied.append(handle)
        copies[key] = found  # which nobody looks into any more if another thread has written the tensor meanwhile
    return found


def _unseen() -> Any:
    """What a copy computes here is nothing that the program computes: modes, its own or one that captures a step, see the copy
    alone."""
    return _disable_current_modes() if _modes() else contextlib.nullcontext()


def _bring(tensor: torch.Tensor, place: Stream) -> torch.Tensor:
    if tensor.layout is not _STRIDED:
        return _rebuilt(tensor, lambda part: _bring(part, place))
    _check_kind(tensor)
    return wrapper(*place.bring(tensor), 0, -1)


def _moved(tensor: RemoteTensor, place: Stream | None) -> torch.Tensor:
    handle, meta = tensor._handle, tensor._meta
    if not meta.strided:
        return _rebuilt(tensor, lambda part: at_place(part, place))
    if place is None:
        return handle.stream.fetch(handle.name, tensor._at, meta, address_of(tensor))
    if handle.stream.worker == place.worker:
        return _bring(at_place(tensor, None), place)
    return wrapper(cross(handle.stream, place, handle, tensor._at, meta, address_of(tensor)), meta, 0, -1)


def _rebuilt(tensor: torch.Tensor, move: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """A sparse tensor, made again of its moved parts."""
    if tensor.layout is not torch.sparse_coo:
        raise _no_layout(tensor.layout)
    indices, values = move(aten._indices.default(tensor)), move(aten._values.default(tensor))
    return aten._sparse_coo_tensor_with_dims_and_tensors.default(
        tensor.sparse_dim(), tensor.dense_dim(), list(tensor.shape), indices, values, dtype=tensor.dtype,
        layout=torch.sparse_coo, device=_CPU, is_coalesced=aten.is_coalesced.default(tensor),
    )  # fmt: skip


class StaysHere(NotSupported):
    """A tensor is of a kind that cannot lie at a worker."""


def _no_layout(layout: torch.layout) -> NotSupported:
    return StaysHere(f"tensors of layout {layout} cannot lie at a worker", hint="those of torch.sparse_coo can")


def _check_kind(tensor: torch.Tensor) -> None:
    if is_lazy(tensor):
        raise NotSupported("a parameter has no shape yet", hint="run the model once before it is moved")
    if tensor.is_quantized or tensor.is_nested:
        raise StaysHere(f"{'quantized' if tensor.is_quantized else 'nested'} tensors cannot lie at a worker")
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise NotSupported(f"a {type(tensor).__name__}, which has its own dispatch, cannot lie at a worker")


def bring_home(value: Any) -> Any:
    """A value of lists, tuples and dictionaries, with its remote tensors copied here."""
    return tree_map_only(RemoteTensor, lambda tensor: tensor.cpu(), value)


# -- where an operation runs

_OF_SEVERAL = torch.autograd.function.BackwardCFunction, torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
"""Nodes that stand for no operation of their own. Any other one that is not in ``ran`` stands for one that saw plain tensors
only: it ran here."""


class _Running(threading.local):
    """``at``: a place that this thread has asked for: operations whose tensors lie at several places run there. ``first``: to
    this the sequence numbers of its nodes are added in ``ran``, since each thread counts its own. ``turns``: what turns a
    view in place exchanges it (``_turned``)."""

    at: tuple[Stream | None] | None = None
    turns = False

    def __init__(self) -> None:
        self.first = next(_firsts) << 65
        _lately.append(self.first)


_firsts = itertools.count()
_lately: deque[int] = deque(maxlen=1 << 6)
"""``first`` of threads that came last."""


_running = _Running()


@contextlib.contextmanager
def running_at(place: Stream | None) -> Iterator[None]:
    """Have operations on tensors of several places run at ``place``, unless they write elsewhere."""
    before, _running.at = _running.at, (place,)
    try:
        yield
    finally:
        _running.at = before


def _remember(place: Stream | None) -> None:
    if _grad():
        if len(ran) > _REMEMBERED:
            for old in list(ran)[: _REMEMBERED // 2]:
                ran.pop(old, None)
        # An operation without a node is seen behind the node of the one before it.
        ran.setdefault(_running.first + _sequence(), place)


def is_parameter(plain: torch.Tensor) -> bool:
    """Or a view of one."""
    return isinstance(plain, torch.nn.Parameter) or isinstance(plain._base, torch.nn.Parameter)


def _choose(tensors: list[torch.Tensor], written: list[torch.Tensor]) -> Stream | None:
    if written:
        return place_of(written[0])
    node = _node()
    if node is not None:
        number = node._sequence_nr() + 1
        # Beyond what this thread has counted it is a node of another one: of the main one, as a rule.
        threads = [_running.first] if number <= _sequence() else [0, *reversed(list(_lately))]
        for first in threads:
            if first + number in ran:
                return ran[first + number]
        if not isinstance(node, _OF_SEVERAL):
            return None
    if _running.at is not None:
        return _running.at[0]
    latest: RemoteTensor | None = None
    for each in tensors:
        if type(each) is RemoteTensor:
            if each._handle.anchor:
                return each._handle.stream
            if latest is None or each._handle.name > latest._handle.name:
                latest = each
        elif is_parameter(each):
            return None
    assert latest is not None
    return latest._handle.stream


_ways: dict[int, Callable[..., Any]] = {}
"""What runs an operator, given its arguments; by ``id`` of its function, as ``known_operators``."""


def _way(func: Any) -> Callable[..., Any]:
    op = operator(func)
    found = _ways[id(func)] = functools.partial(post_here if op.plain else view if op.plain_view else run, op)
    return found


def run(op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator some of whose operands are remote."""
    if op.func is aten.set_.source_Tensor and type(args[0]) is RemoteTensor:
        return _set(*args)
    if op.refused is not None:
        raise NotSupported(f"{op.name}: {op.refused}")
    if op.composite:
        return _composite(op, args, kwargs)
    if op.in_python:
        return op.func.redispatch(_KERNELS, *args, **kwargs)
    if op.geometry:
        return _in_place_geometry(op, args, kwargs)
    if op.foreach:
        return _foreach(op, args, kwargs)
    if op.collective:
        return _collective(op, args, kwargs)
    if op.random and op.draws(args):
        return _draw(op, args, kwargs)
    device = kwargs.get("device")
    if device is not None and device.type != "cpu":
        return _to(args[0], device, kwargs) if op.func is aten._to_copy.default else _made_at(device, op, args, kwargs)
    found = post_here(op, args, kwargs)
    if op.read_here is None:
        return found
    return tuple(at_place(each, None) if index == op.read_here else each for index, each in enumerate(found))


def _composite(op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run what an operator is made of, with views of parameters that say that they require grad: matmul asks them. Not by
    ``OpOverload.decompose``, which prefers Python's decompositions: their matmul is another. For nested tensors such
    operators have kernels of their own."""
    tensors = _tensors((args, kwargs))
    if any(each.is_nested for each in tensors):
        return _mixed(op, args, kwargs, tensors, here=True)
    key = torch._C.DispatchKey
    exclude = torch._C._dispatch_tls_local_exclude_set()
    exclude = exclude if op.tracked else exclude.remove(key.ADInplaceOrView)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), exclude):
        return op.func._op_dk(key.CompositeImplicitAutograd, *args, **kwargs)


def _tensors(value: Any) -> list[Any]:
    found: list[Any] = []
    _collect(value, found)
    return found


def _collect(value: Any, found: list[Any]) -> None:
    """No function inside of another, which would refer to itself, and keep the tensors until Python looks for cycles."""
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif type(value) is list or type(value) is tuple:
        for each in value:
            _collect(each, found)
    elif type(value) is dict:
        for each in value.values():
            _collect(each, found)


def _mapped(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """An operator's arguments with their tensors replaced, as ``_collect`` finds them. Ten times as fast as pytree."""
    if isinstance(value, torch.Tensor):
        return function(value)
    kind = type(value)
    if kind is list or kind is tuple:
        return kind([_mapped(each, function) for each in value])
    if kind is dict:
        return {name: _mapped(each, function) for name, each in value.items()}
    return value


def _mixed(op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor], here: bool = False) -> Any:
    """Operands lie at several places: choose one (``here``: this process), and copy the others there. What the operator writes
    elsewhere is copied back."""
    written = op.operands_written(args, kwargs)
    changes = set(map(id, written))
    place = None if here else _choose(tensors, written)
    _remember(place)
    back: list[tuple[torch.Tensor, torch.Tensor]] = []

    copies: dict[int, torch.Tensor] = {}

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        found = copies.get(id(tensor))
        if found is None:
            found = at_place(tensor, place)
            if found is not tensor and id(tensor) in changes:
                found = run_here(_clone, (found,), {}) if place is None else found.clone()
                back.append((tensor, found))
            copies[id(tensor)] = found
        return found

    try:
        with torch.no_grad():
            there = _mapped((args, kwargs), moved)
    except StaysHere:
        return _mixed(op, args, kwargs, tensors, here=True)
    out = run_here(op, *there) if place is None else post(place, op, *there)
    with torch.no_grad():
        for original, changed in back:
            _copy_back(op, original, changed)
    return _originals(op, out, args, kwargs)


def _copy_back(op: Operator, original: torch.Tensor, changed: torch.Tensor) -> None:
    if original.shape != changed.shape:
        raise NotSupported(f"{op.name}: {RESIZED}")
    original.copy_(changed)


def _collective(op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of ``torch.distributed``: this process's part in it, on copies. Schemas do not say what is written, and it is over when
    it returns: what has arrived is copied to the worker."""
    functional = op.name.startswith("_")
    if op.mutable or op.name.startswith("c10d::recv"):
        raise NotSupported(f"{op.name} cannot write a tensor that lies at a worker", hint="give it a plain tensor")
    copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def home(tensor: torch.Tensor) -> torch.Tensor:
        if type(tensor) is not RemoteTensor:
            return tensor
        return copies.setdefault(id(tensor), (tensor, at_place(tensor, None).clone()))[1]

    with torch.no_grad():
        out = op.func(*_mapped(args, home), **_mapped(kwargs, home))
        if functional or op.name == "c10d::send":
            return out
        (out[-1] if isinstance(out, list | tuple) else out).wait()
        written = [value for value, told in zip(args, op.func._schema.arguments) if not told.name.startswith("input")]
        for tensor in _tensors(written):
            if id(tensor) in copies:
                tensor.copy_(copies[id(tensor)][1])
    originals = {id(here): tensor for tensor, here in copies.values()}
    return tree_map_only(torch.Tensor, lambda each: originals.get(id(each), each), out)


def run_here(op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on plain tensors, as a part of one on remote ones."""
    out = run_plain(op.func, args, kwargs, inside.dtype)
    for each in observing.observers:
        each.operation(op, args, kwargs, out, None)
    return out


def _originals(op: Operator, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Results that are operands written in place, as the operands that were given."""
    if not any(where is not None for where in op.returned):
        return out
    given = [op.argument(where, args, kwargs) if where is not None else None for where in op.returned]
    if len(given) == 1:
        return given[0]
    return tuple(given) if out is None else tuple(each if own is None else own for each, own in zip(out, given))


# -- posting


def post_here(op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Post an operator where its tensors lie. Those that do not lie at one place are moved first (``_mixed``)."""
    form, words, place = _form(op, args, kwargs, None)
    if place is _ELSEWHERE:
        return _mixed(op, args, kwargs, _tensors((args, kwargs)))
    _remember(place)
    return _send(place, op, form, words, args, kwargs)


def post(place: Stream, op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Post an operator whose tensors all lie at ``place``, if it has any."""
    form, words, _ = _form(op, args, kwargs, place)
    return _send(place, op, form, words, args, kwargs)


def _form(op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], place: Any) -> tuple[list[Any], list[int], Any]:
    """The form of a call; the words of a post of it, of which three are not known yet; the place of its tensors (``_scan``)."""
    form: list[Any] = [op, precisions()] if op.precise else [op]
    words: list[int] = [0, 0, 0]
    for value, number in zip(args, op.numbers):
        if type(value) is RemoteTensor:  # as ``_scan``, for most operands without that call
            stream = value._handle.stream
            if stream is not place:
                if place is not None:
                    return form, words, _ELSEWHERE
                place = stream
            form.append(value._meta)
            words += value._words
        elif (place := _scan(value, form, words, number, place)) is _ELSEWHERE:
            return form, words, place
    for name, value in kwargs.items():
        form.append(name)
        if (place := _scan(value, form, words, name in op.named_numbers, place)) is _ELSEWHERE:
            return form, words, place
    # A number that is by chance the name of what is written only has it looked at.
    if op.identity and (not op.named_at or words.count(words[op.named_at]) > 1):
        form += _sharing(op, args, kwargs)
    return form, words, place


def _sharing(op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Of operands that share memory with what the operator writes, what its kernel asks for: whether two are one object, and
    how each overlaps with what is written. Empty if none does."""
    tensors = _tensors((args, kwargs))
    found = [_overlap(each, other) for each in op.operands_written(args, kwargs) for other in tensors if each is not other]
    one = _one_object(args, kwargs)
    return [one, *found] if one or any(found) else []


def _overlap(tensor: RemoteTensor, other: RemoteTensor) -> int:
    """As torch's kernels see it: 2 if both have the same elements, 1 if they have some in common, 0 if none, or if one has
    gaps: there they do not look."""
    mine, theirs = tensor._meta.geometry, other._meta.geometry
    if tensor._handle is not other._handle or mine.span != mine.numel or theirs.span != theirs.numel:
        return 0
    begin, their_begin = tensor._offset * mine.dtype.itemsize, other._offset * theirs.dtype.itemsize
    end, their_end = begin + mine.span * mine.dtype.itemsize, their_begin + theirs.span * theirs.dtype.itemsize
    if (begin, end) == (their_begin, their_end) and mine.strides == theirs.strides:
        return 2
    return int(max(begin, their_begin) < min(end, their_end))


def _one_object(args: Any, kwargs: Any) -> bool:
    """Whether two operands are one object."""
    tensors = _tensors((args, kwargs))
    return len(set(map(id, tensors))) < len(tensors)


def known_form(place: Stream, op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Known | None, list[int]]:
    """What is known of a call that was just posted (``None``: it is asked for what comes out each time), and its words."""
    form, words, _ = _form(op, args, kwargs, place)
    known = place.known.get(_key(form, place.flags()))
    return None if known is None or known.kind == _ASKED else known, words[3:]


def _key(form: list[Any], state: tuple[Any, ...]) -> tuple[Any, ...]:
    """A form with what kernels ask for besides: the grad mode, autocast's dtype and the default dtype."""
    return (_grad(), *state[-2:], *form)


def _send(place: Stream, op: Operator, form: list[Any], words: list[int], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Post an operator, of this form and with these words, and make what stands for its results."""
    place.operations += 1
    state = place.flags()
    key = _key(form, state)
    with place.lock:
        if state != place.state:
            place.tell_state(state)
        place.note(op.name)
        known = place.known.get(key)
        if known is None or known.kind == _ASKED:
            out = _ask(place, op, key, known, words, args, kwargs)
        else:
            words[0], words[1] = ring.OPERATION, known.number
            kind = known.kind
            if kind == _WRITTEN:
                place.put(words)
                out = None
            else:
                words[2] = base = next(names) << 20
                place.put(words)
                if kind == _ONE:
                    nbytes, meta, offset = known.result
                    out = wrapper(Storage(place, base, nbytes), meta, offset, -1)
                else:
                    out = _results(place, known, base, args, kwargs)
    for each in observing.observers:
        each.operation(op, args, kwargs, out, place)
    if not op.written:
        return out
    if op.first_written:
        args[0]._handle.copies = None
        return args[0]
    for each in op.operands_written(args, kwargs):
        each._handle.copies = None
    return _originals(op, out, args, kwargs) if op.mutable else out


def _scan(value: Any, form: list[Any], words: list[int], number: bool, place: Any) -> Any:
    """Add an argument to the form of a call and to the words of this one. Returns the place of all tensors so far, of which
    ``place`` is the one before (``None``: there was none yet), or ``_ELSEWHERE``."""
    kind = type(value)
    if kind is RemoteTensor:
        form.append(value._meta)
        words += value._words
        stream = value._handle.stream
        return stream if place is None or place is stream else _ELSEWHERE
    if kind is float:
        if number:
            form.append(float)
            words += INT.unpack(FLOAT.pack(value))
        else:
            form += (kind, FLOAT.pack(value))
    elif kind is int and number and -(1 << 63) <= value < 1 << 63:
        form.append(int)
        words.append(value)
    elif kind is list or kind is tuple:
        form += (list, len(value))
        for each in value:
            if (place := _scan(each, form, words, number, place)) is _ELSEWHERE:
                return place
    elif kind is complex:
        form += (kind, repr(value))
    elif isinstance(value, torch.Tensor):
        return _ELSEWHERE
    elif kind is torch.Generator:
        raise NotSupported("an operator at a worker cannot draw from a generator of this process")
    else:
        form += (kind, value)
    return place


def _takes(value: Any, place: Stream, number: bool) -> Any:
    """As the worker is told an argument of a form."""
    kind = type(value)
    if kind is RemoteTensor:
        return ("w", place.tell_meta(value._meta))
    if kind is float and number:
        return ("f", None)
    if kind is int and number and -(1 << 63) <= value < 1 << 63:
        return ("i", None)
    if kind is list or kind is tuple:
        return ("l", [_takes(each, place, number) for each in value])
    return ("c", encode(value))


def _ask(
    place: Stream, op: Operator, form: tuple[Any, ...], known: Known | None, words: list[int], args: Any, kwargs: Any
) -> Any:
    """A form that is new, or whose results depend on values: the worker says what came out."""
    tensors, is_new = _tensors((args, kwargs)), known is None
    if known is None:
        try:
            takes = [_takes(value, place, number) for value, number in zip(args, op.numbers)]
            takes += [_takes(value, place, name in op.named_numbers) for name, value in kwargs.items()]
        except TypeError:  # an object of this process, such as weights that were packed
            return _mixed(op, args, kwargs, tensors, here=True)
        if len(place.known) >= _FORMS:
            place.forget_forms()
        one = op.identity and _one_object(args, kwargs)
        known = Known(place.tell_signature(op, takes, kwargs, one), _ASKED, list(kinds(takes)))
    base = next(names) << 20
    try:
        known.single, described = place.question([ring.ASK, 0, known.number, base, *words[3:]], 1)
    except BaseException:
        if is_new:
            place.owe([ring.FORGET, known.number])
        for each in op.operands_written(args, kwargs):  # it may have written a part
            each._handle.copies = None
        raise
    place.known[form] = known
    if ("s",) in described:
        return _stays_here(place, op, described, tensors, args, kwargs)
    if any(kind == "v" for kind, *_ in described):
        values = [decode(value) for _, value in described]
        return values[0] if known.single else values
    known.results = _recipes(op, tensors, described, args, kwargs)
    if is_new:
        known.kind = _kind(op, known, tensors, args, kwargs)
    return _results(place, known, base, args, kwargs)


def _stays_here(place: Stream, op: Operator, described: list[Any], tensors: list[Any], args: Any, kwargs: Any) -> Any:
    """One of the results cannot lie at the worker: the operator runs here, if nothing was written there."""
    if op.mutable:
        raise StaysHere(f"{op.name}: what it gives cannot lie at a worker")
    operands = {tensor._handle.name for tensor in tensors}
    for each in described:
        if each[0] == "t" and each[3] not in operands:
            Storage(place, each[3], 0)  # freed there: no tensor here stands for it
    return _mixed(op, args, kwargs, tensors, here=True)


def _recipes(op: Operator, tensors: list[Any], described: list[Any], args: Any, kwargs: Any) -> list[Any]:
    """How each result is made: ("new", bytes, geometry, offset), or over the memory of an operand or of an earlier result
    ("operand" or "result", which one, geometry, offset); ``None`` for none."""
    operands = {t._handle.name: i for i, t in reversed(list(enumerate(tensors)))}
    made: dict[int, int] = {}
    found: list[Any] = []
    for index, told in enumerate(described):
        if told[0] == "n":
            found.append(None)
            continue
        _, plain, offset, name, nbytes = told
        meta = meta_of(Geometry.of_plain(plain))
        if name in operands:
            if op.mutable and (where := op.returned[index]) is not None:
                operand = op.argument(where, args, kwargs)
                if meta.geometry != operand._meta.geometry:
                    raise NotSupported(f"{op.name}: {RESIZED}")
            found.append(("operand", operands[name], meta, offset - tensors[operands[name]]._offset))
        elif name in made:
            found.append(("result", made[name], meta, offset))
        else:
            made[name] = index
            found.append(("new", nbytes, meta, offset))
    return found


def _kind(op: Operator, known: Known, tensors: list[Any], args: Any, kwargs: Any) -> int:
    """How the results of a form are made from now on."""
    results = [each for each in known.results if each is not None]
    sparse = any(not meta.strided for meta in (*(each._meta for each in tensors), *(each[2] for each in results)))
    if sparse or (op.dynamic and op.sized_by_values(args)) or not _sized_by_shapes(op, args, kwargs):
        return _ASKED
    if op.mutable and all(where is not None for where in op.returned):
        return _WRITTEN
    if known.single and results and results[0][0] == "new":
        known.result = results[0][1:]
        return _ONE
    return _SEVERAL


def _sized_by_shapes(op: Operator, args: Any, kwargs: Any) -> bool:
    """Whether shapes of operands give those of results. Tags of operators that are not torch's do not tell, but a kernel for
    tensors without values does, if it gives anything."""
    with contextlib.suppress(Exception):
        if op.foreign:
            like_args, like_kwargs = _without_memory((args, kwargs))
            op.func(*like_args, **like_kwargs)
        return True
    return False


def _without_memory(value: Any) -> Any:
    """The same arguments, with tensors of device "meta"."""
    return _mapped(value, lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta"))


def _results(place: Stream, known: Known, base: int, args: Any, kwargs: Any) -> Any:
    values: list[Any] = []
    for index, told in enumerate(known.results):
        if told is None:
            values.append(None)
            continue
        kind, value, meta, offset = told
        if kind == "new":
            values.append(wrapper(Storage(place, base + index, value), meta, offset, -1))
        elif kind == "operand":
            operand = _tensors((args, kwargs))[value]
            values.append(wrapper(operand._handle, meta, operand._offset + offset, operand._offset + offset))
        else:
            values.append(wrapper(values[value]._handle, meta, offset, offset))
    return values[0] if known.single else values


# -- views: a storage and a geometry, nothing is posted

_views: dict[tuple[Any, ...], Any] = {}


def view(op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A view, or several, of a remote tensor."""
    base = args[0]
    if not base._meta.strided:
        return run(op, args, kwargs)
    if kwargs or not op.kept:
        known = _new_view(op, args, kwargs)
    else:
        form: tuple[Any, ...] = (op, base._meta)
        if len(args) > 1:
            form += tuple([tuple(each) if type(each) is list else each for each in args[1:]])
        known = _views.get(form)
        if known is None:
            if len(_views) >= _FORMS:
                _views.clear()
            known = _views[form] = _new_view(op, args, kwargs)
    if _inference() != base.is_inference() and op.func is not aten.view.dtype:
        with torch.inference_mode(base.is_inference()):  # as what it is a view of
            return _viewed(op, base, known)
    return _viewed(op, base, known)


def _viewed(op: Operator, base: RemoteTensor, known: Any) -> Any:
    if type(known) is list:
        return [_viewed(op, base, each) for each in known]
    meta, ahead = known
    offset = base._offset + ahead
    whole = ahead == 0 and meta is base._meta and base._words[1] == -1
    made = wrapper(base._handle, meta, offset, -1 if whole else offset)
    # What detach() makes is no view to torch. Parameters are made so, and torch swaps none that has a weak reference.
    if op.func is not aten.detach.default:
        base._handle.add_view(made)
    return made


def _new_view(op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    base = args[0]
    with _BELOW(_PYTHON):
        found = op.func(*args, **kwargs)
    return tree_map_only(torch.Tensor, lambda each: (meta_of(geometry(each)), each.storage_offset() - base._offset), found)


def _loosened(base: RemoteTensor) -> bool:
    """Exchange the views of a tensor whose geometry is about to change. Once it is written, torch would run them again over its
    new shape; one process takes them for what ``as_strided`` gives. Whether that could be."""
    found: list[Any] = [each for each in base._handle.views() if each._base is base]
    return all(_exchanged(view, view) for view in found)


def _exchanged(view: RemoteTensor, like: RemoteTensor) -> bool:
    """Exchange a view for one that torch runs again as ``as_strided``, to lie as ``like`` does. Whether that could be: not if
    its gradient is retained, or a profiler has references to it, or what it is a view of has no such part."""
    base, meta, offset = cast(RemoteTensor, view._base), like._meta, like._offset
    # What torch would raise for it, once the base is written, it raises anyway. Of another dtype, it runs it again, too.
    if _creation(view) != _DEFAULT or not meta.plain or view.dtype is not base.dtype:
        return True
    try:
        # With autograd also to look at it: it may have to be run again because its base was written.
        with _unseen(), torch.inference_mode(False), with_autograd("ADInplaceOrView"):
            if view.is_leaf and view.requires_grad:
                return True
            if view.retains_grad:
                return False
            made = base.as_strided(meta.shape, meta.strides, offset)
            torch._C._swap_tensor_impl(view, made)
            if view._backward_hooks and view.grad_fn is not None:
                view.grad_fn._register_hook_dict(view)
    except RuntimeError:
        return False
    return True


def _in_place_geometry(op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The tensor's geometry changes here. A view cannot be made to have another history from here; ``_turned`` exchanges it."""
    tensor, base = args[0], args[0]._base
    if op.func is aten.detach_.default:
        lost = False
    elif base is None:
        lost = not _loosened(tensor)
    else:
        lost = not _running.turns
    if lost:
        name = op.func.__name__.partition("_.")[0]
        raise NotSupported(f"{op.name}: {TURNED}", hint=f"make a new tensor of it: x = x.{name}(...)")
    with _BELOW(_PYTHON):
        op.func(*args, **kwargs)
    meta, offset = meta_of(geometry(tensor)), int(tensor.storage_offset())
    if meta is not tensor._meta or offset != tensor._offset:
        tensor._meta, tensor._offset, tensor._words = meta, offset, (tensor._handle.name, offset)
    return tensor


def _set(tensor: RemoteTensor, source: torch.Tensor) -> RemoteTensor:
    """The tensor lies over the source's memory from now on; a plain source is moved first."""
    found: Any = at_place(source, tensor._handle.stream) if type(source) is not RemoteTensor else source
    turns = found._meta is not tensor._meta or found._offset != tensor._offset
    if turns and (tensor._base is not None or not _loosened(tensor)):
        raise NotSupported(f"set_: {TURNED}", hint="make a new tensor of it")
    with _BELOW(_PYTHON):
        aten.set_.source_Tensor(tensor, found)
    found._handle.anchor |= tensor._handle.anchor
    tensor._handle, tensor._meta, tensor._offset, tensor._words = found._handle, found._meta, found._offset, found._words
    return tensor


# -- lists of tensors, random numbers, other places


def _foreach(op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operator on lists, whose elements may lie at several places: by the places of its first list, and in parts that one
    message has room for."""
    first = args[0]
    length = len(first)
    found: dict[Stream | None, list[int]] = {}
    for index, each in enumerate(first):
        found.setdefault(place_of(each), []).append(index)
    if len(found) == 1 and length <= _TOGETHER:
        return _foreach_at(next(iter(found)), op, args, kwargs)
    gathered: list[Any] = [None] * length
    out: Any = None
    for place, there in found.items():
        for start in range(0, len(there), _TOGETHER):
            chosen = there[start : start + _TOGETHER]

            def part(value: Any, chosen: list[int] = chosen) -> Any:
                each = type(value) in (list, tuple) and len(value) == length
                return [value[index] for index in chosen] if each else value

            out = _foreach_at(place, op, tuple(map(part, args)), {name: part(value) for name, value in kwargs.items()})
            for index, each in zip(chosen, out or ()):
                gathered[index] = each
    return gathered if out else None


def _foreach_at(place: Stream | None, op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors = _tensors((args, kwargs))
    if any(place_of(each) is not place for each in tensors):
        out = _mixed(op, args, kwargs, tensors)
    else:
        out = run_here(op, args, kwargs) if place is None else post(place, op, args, kwargs)
    op.raise_versions(args)
    return out


def _draw(op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Random numbers come from this process's generator, so that they are those of one process."""
    tensors = _tensors((args, kwargs))
    written = op.operands_written(args, kwargs)
    place = _choose(tensors, written)
    _remember(place)

    def here(tensor: torch.Tensor) -> torch.Tensor:
        if type(tensor) is not RemoteTensor:
            return tensor
        if not any(tensor is each for each in written):
            return at_place(tensor, None)
        like = list(tensor.shape), list(tensor.stride())  # by which kernels choose the order of what they draw
        made = run_here(operator(aten.empty_strided.default), like, {"dtype": tensor.dtype})
        return made if op.fills else run_here(operator(aten.copy_.default), (made, at_place(tensor, None)), {})

    with torch.no_grad():
        home_args, home_kwargs = _mapped((args, kwargs), here)
        out = run_here(op, home_args, home_kwargs)
        if written:
            for original, filled in zip(written, op.operands_written(home_args, home_kwargs)):
                if original is not filled:
                    _copy_back(op, original, filled)
            return _originals(op, out, args, kwargs)
        return tree_map_only(torch.Tensor, lambda each: at_place(each, place), out)


def _to(tensor: torch.Tensor, device: torch.device, kwargs: dict[str, Any]) -> Any:
    if device.type == "meta":
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=kwargs.get("dtype") or tensor.dtype, device=device)
    moved = at_place(tensor, place_named(device))
    moved = moved.clone() if moved is tensor or type(tensor) is RemoteTensor else moved
    rest = {name: value for name, value in kwargs.items() if name != "device"}
    if (kwargs.get("dtype") or tensor.dtype) is not tensor.dtype or kwargs.get("memory_format") is not None:
        return aten._to_copy.default(moved, **rest)
    return moved


def _made_at(device: torch.device, op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What is made like a tensor, on another device."""
    if device.type == DEVICE:
        return at_place(run(op, args, {**kwargs, "device": _CPU}), place_named(device))
    return op.func(*_without_memory(args), **kwargs)


def make_empty(place: Stream | None, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor at a place."""
    if place is None:
        return torch.empty_strided(shape, strides, dtype=dtype, device="cpu")
    return post(place, operator(aten.empty_strided.default), (list(shape), list(strides)), {"dtype": dtype, "device": _CPU})


def _number(name: str) -> Callable[[RemoteTensor], Any]:
    """``torch.tensor`` asks elements of a list for their numbers with Python's dispatch excluded."""
    method = getattr(torch.Tensor, name)

    @functools.wraps(method)
    def number(tensor: RemoteTensor) -> Any:
        excluded = torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.Python)
        return method(at_place(tensor, None) if excluded else tensor)

    return number


for _name in ("__bool__", "__int__", "__index__", "__float__", "__complex__"):
    setattr(RemoteTensor, _name, _number(_name))


def _turned(name: str) -> Callable[..., RemoteTensor]:
    """A view that gets another shape in place. Once its base is written, torch would run it again without that: it is exchanged
    for a view of its new shape."""
    method, like = getattr(torch.Tensor, f"{name}_"), getattr(torch.Tensor, name)

    @functools.wraps(method)
    def turned(tensor: RemoteTensor, *args: Any, **kwargs: Any) -> RemoteTensor:
        if tensor._base is None or tensor.is_inference():
            return method(tensor, *args, **kwargs)
        made: Any = None
        with contextlib.suppress(Exception), torch.inference_mode(False), torch.enable_grad():
            made = None if tensor.is_leaf and tensor.requires_grad else like(tensor, *args, **kwargs)
        turns = made is not None and (made._meta, made._offset) != (tensor._meta, tensor._offset)
        if turns and (tensor._backward_hooks or tensor.retains_grad):
            hint = f"make a new tensor of it: x = x.{name}(...)"
            raise NotSupported(f"a view at a worker that has hooks: {name}_()", hint=hint)
        _running.turns = True
        try:
            method(tensor, *args, **kwargs)  # raises what torch does not allow, in its order, and the version
        finally:
            _running.turns = False
        if turns:
            torch._C._swap_tensor_impl(tensor, made)
        return tensor

    return turned


for _name in ("t", "transpose", "swapaxes", "swapdims", "squeeze", "unsqueeze"):
    setattr(RemoteTensor, f"{_name}_", _turned(_name))
