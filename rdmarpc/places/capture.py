"""One call of a step, captured for ``graphed``: what was posted, what ran here, and what the call left behind.

Tensors are told by their storage: one at a worker by its name, a plain one by the number of its storage and how it lies over
it. A storage is *made* by the call, or an *argument*'s; or it was there before: *left* by the call before, or *kept*.
``difference`` compares two calls that followed each other.
"""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from ..base import here
from . import observing
from .flags import inside, run_plain
from .geometry import Geometry, geometry
from .operators import Operator, operator
from .stream import Known, Meta, Storage, Stream
from .tensor import RemoteTensor, address_of, gradients_of, known_form, storage_of

_CONSTANT_BYTES = 1 << 16
_RESIZING = ("aten::resize_", "aten::resize_as_", "aten::set_")
_SETS = "it sets the state of random numbers"
_ASKING = ("aten::_local_scalar_dense", "aten::equal")


class Ref(NamedTuple):
    """A tensor at a worker: its storage's name, and ``at`` as messages have it (-1: as it was made)."""

    name: int
    at: int


@dataclass(frozen=True)
class Plain:
    """A plain tensor: the number of its storage, and how it lies over it. ``offset``: bytes; over an argument's storage they
    count from that argument."""

    key: int
    offset: int
    geometry: Geometry


class Posted(NamedTuple):
    """An operator at a worker. ``first``: the number of the first of its ``results``, if it has any of its own. ``operands``:
    tensors, and numbers as words."""

    stream: Stream
    name: str
    signature: int
    first: int
    results: int
    operands: list[Ref | int]
    state: tuple[Any, ...]


class Ran(NamedTuple):
    """An operator on plain tensors. ``results``: one for each tensor that came out. ``written``: numbers of storages."""

    op: Operator
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[Plain]
    written: list[int]
    autocast: torch.dtype | None


class Brought(NamedTuple):
    """A plain tensor was copied to a worker."""

    stream: Stream
    source: Plain
    made: int


class Crossed(NamedTuple):
    """A tensor was copied from worker to worker. ``shift``: its address modulo 64; over an argument's storage it counts from
    that argument."""

    source: Stream
    ref: Ref
    meta: Meta
    shift: int
    stream: Stream
    made: int


class Fetched(NamedTuple):
    """A tensor was copied here."""

    stream: Stream
    ref: Ref
    meta: Meta
    made: Plain


Event = Posted | Ran | Brought | Crossed | Fetched


class Result(NamedTuple):
    """A tensor at a worker that the step returned."""

    ref: Ref
    stream: Stream
    meta: Meta
    offset: int
    nbytes: int
    shift: int


class Local:
    """A storage of plain tensors. ``argument``: which one's it is; ``left``: its number in the call before. ``storage`` and
    ``blob`` are a kept one's, and its bytes when it was met, if they are few."""

    def __init__(self, storage: Any) -> None:
        self.weak, self.cdata = StorageWeakRef(storage), storage._cdata
        self.made = False
        self.argument: int | None = None
        self.left: int | None = None
        self.storage: Any = None
        self.blob: bytes | None = None

    def keep(self, storage: Any) -> None:
        self.storage = storage
        if storage.nbytes() <= _CONSTANT_BYTES:
            self.blob = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).numpy().tobytes()


class Capture(TorchDispatchMode):
    """Captures what the thread that enters it posts and computes. ``arguments``: the step's tensors; ``before``: the call
    before this one."""

    _number = 0

    def __init__(self, arguments: list[Any], before: Capture | None) -> None:
        super().__init__()
        self.why = ""
        """Why the call cannot be posted again."""
        self.before = before
        self.made_before = {} if before is None else before.made
        self.arguments = arguments
        self.offsets = [each._offset if type(each) is RemoteTensor else 0 for each in arguments]
        """Where remote arguments begin, in elements."""
        self.given = [weakref.ref(each) for each in arguments]
        self.events: list[Event] = []
        self.made: dict[int, int] = {}
        """The numbers of what was made at workers, by name; ``names`` is the inverse."""
        self.names: list[int] = []
        self.moved: set[int] = set()
        """Of them, what came from elsewhere."""
        self.storages: dict[int, weakref.ref[Storage]] = {}
        """What was met at workers, by name."""
        self.written: set[int] = set()
        self.locals: list[Local] = []
        self.written_here: set[int] = set()
        self.objects: dict[int, weakref.ref[torch.Tensor]] = {}
        """Tensors that were operands or results."""
        self.leaves: list[weakref.ref[torch.Tensor]] = []
        """Of them, the leaves of autograd's graph, and parameters that are frozen."""
        self.gradients: list[tuple[int, weakref.ref[torch.Tensor]]] = []
        self.gradients_here: list[tuple[int, weakref.ref[torch.Tensor]]] = []
        """Gradients that the call has made, by the number of their storage, and their leaves."""
        self.modules: dict[int, weakref.ref[Any]] = {}
        self.optimizers: dict[int, weakref.ref[Any]] = {}
        self.drawn: dict[torch.Generator, torch.Tensor] = {}
        """Generators, with their states as the step should find them: at its beginning, and behind the latest draw."""
        self.grows = False
        """Whether something is still there that the call before has left."""
        self.results: list[Any] = []
        self.spec: Any = None
        self.thread, self._hooks = threading.get_ident(), ExitStack()
        self._known: dict[int, int] = {}
        self.remote_arguments: dict[int, int] = {}
        for index, tensor in enumerate(arguments):
            if type(tensor) is RemoteTensor:
                self.remote_arguments.setdefault(tensor._handle.name, index)
            elif tensor.untyped_storage()._cdata not in self._known:
                self._add(tensor.untyped_storage()).argument = index

    # -- watching

    def __enter__(self) -> Any:
        Capture._number += 1
        observing.capture.number = Capture._number
        observing.begin(self)
        here.refusals.append(self.refuse)
        for hook in (
            modules.register_module_forward_pre_hook(self._enters),
            optimizers.register_optimizer_step_pre_hook(self._steps),
        ):
            self._hooks.callback(hook.remove)
        known = () if self.before is None else self.before.drawn
        self.drawn = {generator: generator.get_state() for generator in (torch.default_generator, *known)}
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._check_drawn(torch.default_generator, torch.get_rng_state())
        self._hooks.close()
        observing.end(self)
        here.refusals.remove(self.refuse)
        observing.capture.number = 0
        for storage in observing.copied:
            storage.copies = None
        observing.copied.clear()

    def _enters(self, module: Any, args: Any) -> None:
        if id(module) not in self.modules:  # containers inside of it are not called
            self.modules.update((id(each), weakref.ref(each)) for each in module.modules())

    def _steps(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.optimizers.setdefault(id(optimizer), weakref.ref(optimizer))

    def refuse(self, why: str) -> None:
        self.why = self.why or why

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        generator = kwargs.get("generator") or torch.default_generator
        before = generator.get_state()
        out = self._seen(func, args, kwargs)
        if not torch.equal(drawn := generator.get_state(), before):
            self._check_drawn(generator, before)
            self.drawn[generator] = drawn
        return out

    def _check_drawn(self, generator: torch.Generator, state: torch.Tensor) -> None:
        """Refuse a step that sets what it draws from, as a checkpoint does to draw the same again."""
        if not torch.equal(self.drawn.get(generator, state), state):
            self.refuse(_SETS)

    def _seen(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        remote = [each for each in tree_leaves((args, kwargs)) if type(each) is RemoteTensor]
        if remote:
            for each in remote:
                self._meet(each)
            return func(*args, **kwargs)
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        told = self._told(args, kwargs) if not _shapes_only(tensors) else None
        out = run_plain(func, args, kwargs, inside.dtype)
        operator(func).raise_versions(args)
        if told is not None and not isinstance(out, RemoteTensor) and not _shapes_only(tree_leaves(out)):
            self._ran(operator(func), args, kwargs, told, out, inside.dtype)
        return out

    def operation(self, op: Operator, args: Any, kwargs: Any, out: Any, place: Stream | None) -> None:
        """See ``Observer``."""
        if threading.get_ident() != self.thread:
            return
        if place is None:
            self._ran(op, args, kwargs, self._told(args, kwargs), out, inside.dtype)
            return
        known, words = known_form(place, op, args, kwargs)
        if known is None:
            self.refuse(_asks(op))
            return
        for each in tree_leaves((args, kwargs)):
            if type(each) is RemoteTensor:
                self._meet(each)
        self.written.update(each._handle.name for each in op.operands_written(args, kwargs))
        first = self._number_results(known, out)
        count = 0 if first < 0 else len(known.results)
        self.events.append(Posted(place, op.name, known.number, first, count, _operands(known, words), place.flags()))

    def _number_results(self, known: Known, out: Any) -> int:
        new = [index for index, told in enumerate(known.results) if told is not None and told[0] == "new"]
        if not new or out is None:
            return -1
        values = [out] if known.single else out
        first, base = len(self.names), values[new[0]]._handle.name - new[0]
        self.names += range(base, base + len(known.results))
        for index in new:
            self.made[base + index] = first + index
            self.storages[base + index] = weakref.ref(values[index]._handle)
        return first

    def brought(self, target: Stream, tensor: torch.Tensor, made: Storage) -> None:
        """See ``Observer``."""
        if threading.get_ident() == self.thread:
            self.events.append(Brought(target, self.plain(tensor), self._number_moved(made)))

    def crossed(self, source: Storage, at: int, meta: Meta, shift: int, made: Storage) -> None:
        """See ``Observer``."""
        if threading.get_ident() == self.thread:
            self.storages[source.name] = weakref.ref(source)
            ref, number = Ref(source.name, at), self._number_moved(made)
            index = self.remote_arguments.get(source.name)
            if index is not None:
                shift = (shift - address_of(self.arguments[index])) % 64
            self.events.append(Crossed(source.stream, ref, meta, shift, made.stream, number))

    def fetched(self, source: Stream, name: int, at: int, meta: Meta, found: torch.Tensor) -> None:
        """See ``Observer``."""
        if threading.get_ident() == self.thread:
            if not meta.plain:
                self.refuse("a conjugated or negated tensor is copied here")
            self.events.append(Fetched(source, Ref(name, at), meta, self._made(found)))

    def _number_moved(self, made: Storage) -> int:
        number = self.made[made.name] = len(self.names)
        self.names.append(made.name)
        self.storages[made.name] = weakref.ref(made)
        self.moved.add(number)
        return number

    def _meet(self, tensor: RemoteTensor) -> None:
        handle = tensor._handle
        self.storages.setdefault(handle.name, weakref.ref(handle))
        self.objects[id(tensor)] = weakref.ref(tensor)
        index = self.remote_arguments.get(handle.name)
        if index is not None and tensor.dtype.itemsize != self.arguments[index].dtype.itemsize:
            self.refuse("an argument is read as another dtype")

    # -- what runs here

    def _told(self, args: Any, kwargs: Any) -> Any:
        return tree_map_only(torch.Tensor, self.plain, (args, kwargs))

    def _ran(self, op: Operator, args: Any, kwargs: Any, told: Any, out: Any, dtype: torch.dtype | None) -> None:
        if op.name.partition(".")[0] in _RESIZING:
            self.refuse(f"{op.name} changes what a tensor lies over")
        if op.name.startswith(_ASKING) or (op.dynamic and op.sized_by_values(args)):
            self.refuse(_asks(op))
        if op.view or op.geometry:
            return
        written = [self.plain(each).key for each in op.operands_written(args, kwargs)]
        tensors = [each for each in tree_leaves(out) if isinstance(each, torch.Tensor)]
        results = [self._made(each) if self.find(each) is None else self.plain(each) for each in tensors]
        if results or written:
            self.written_here.update(written)
            told_args, told_kwargs = told
            self.events.append(Ran(op, told_args, told_kwargs, results, written, dtype))

    def find(self, tensor: torch.Tensor) -> int | None:
        key = self._known.get(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else None
        return None if key is None or self.locals[key].weak.expired() else key

    def _add(self, storage: Any) -> Local:
        self._known[storage._cdata] = len(self.locals)
        self.locals.append(local := Local(storage))
        return local

    def _made(self, tensor: torch.Tensor) -> Plain:
        if tensor.layout is torch.strided:
            self._add(tensor.untyped_storage()).made = True
        return self.plain(tensor)

    def plain(self, tensor: torch.Tensor) -> Plain:
        if (strange := _strange(tensor)) is not None:
            self.refuse(f"a plain tensor takes part that {strange}")
            return Plain(-1, 0, Geometry((), (), torch.uint8))
        storage, key = tensor.untyped_storage(), self.find(tensor)
        if key is None:
            local, key = self._add(storage), len(self.locals) - 1
            local.left = None if self.before is None else self.before.still(storage)
            if local.left is None:
                local.keep(storage)
        self.objects[id(tensor)] = weakref.ref(tensor)
        local, offset = self.locals[key], int(tensor.storage_offset()) * tensor.dtype.itemsize
        if local.argument is not None:
            given = self.arguments[local.argument]
            offset -= int(given.storage_offset()) * given.dtype.itemsize
        return Plain(key, offset, geometry(tensor))

    def lies_over(self, key: int, storage: Any) -> None:
        """What this call has left lies over another storage now."""
        self.locals[key].weak, self.locals[key].cdata = StorageWeakRef(storage), storage._cdata
        self._known[storage._cdata] = key

    def still(self, storage: Any) -> int | None:
        """The number of a plain storage that this call made and that is still there."""
        key = self._known.get(storage._cdata)
        return key if key is not None and self.locals[key].made and not self.locals[key].weak.expired() else None

    def where(self, ref: Ref) -> tuple[str, int, int]:
        """Where a tensor at a worker comes from: ("made", number), ("argument", index), ("left", number) or ("kept", name), and
        ``at``, of an argument from where that begins."""
        if (number := self.made.get(ref.name)) is not None:
            return "made", number, ref.at
        if (index := self.remote_arguments.get(ref.name)) is not None:
            return "argument", index, ref.at if ref.at == -1 else ref.at - self.offsets[index]
        if (number := self.made_before.get(ref.name)) is not None:
            return "left", number, ref.at
        return "kept", ref.name, ref.at

    # -- the end

    def returned(self, out: Any) -> Any:
        """Note what the step has returned. What the caller gets of it are copies without a graph."""
        leaves, self.spec = tree_flatten(out)
        for leaf in leaves:
            if type(leaf) is RemoteTensor:
                handle = leaf._handle
                ref = Ref(handle.name, leaf._at)
                self.results.append(Result(ref, handle.stream, leaf._meta, leaf._offset, handle.nbytes, handle.shift))
                self.storages.setdefault(handle.name, weakref.ref(handle))
            else:
                self.results.append(self.plain(leaf) if isinstance(leaf, torch.Tensor) else leaf)
        memo: dict[int, Any] = {}

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            """What the step made, so that nobody but the step keeps it. What lies over one memory still does."""
            tensor = tensor.detach()
            return tensor if self._number_of(tensor) is None else copy.deepcopy(tensor, memo)

        return tree_map_only(torch.Tensor, copied, out)

    def apart(self, out: Any) -> Any:
        """What the step returns, with copies of gradients, and of what the call before has left elsewhere: results are new."""
        before = self.before
        gradients = gradients_of(alive(self.objects.values()))

        def new(tensor: torch.Tensor) -> torch.Tensor:
            left = () if before is None else before.left if type(tensor) is RemoteTensor else before.left_here
            return tensor.detach().clone() if storage_of(tensor) in gradients or self._number_of(tensor) in left else tensor

        return tree_map_only(torch.Tensor, new, out)

    def _number_of(self, tensor: torch.Tensor) -> int | None:
        """Of its storage, if the call has made that."""
        if type(tensor) is RemoteTensor:
            return self.made.get(tensor._handle.name)
        return self.still(tensor.untyped_storage()) if tensor.layout is torch.strided else None

    def settle(self, ours: set[int]) -> None:
        """Find out what the call has left. Nothing of the program has its results any more. ``ours``: names, and addresses of
        plain storages, that are kept for other reasons than the program's."""
        gc.collect()
        self.arguments = []
        self.left = {number for name, number in self.made.items() if self.storages[name]() is not None}
        self.left_here = {key for key, local in enumerate(self.locals) if local.made and not local.weak.expired()}
        self.objects = {key: ref for key, ref in self.objects.items() if ref() is not None}
        if self.left & self.moved:
            self.refuse("it keeps a tensor as it was moved to another place")
        self._find_gradients()
        if self.before is not None:
            former, self.before.before = self.before, None
            names = (former.names[number] for number in former.left)
            there = any(name not in ours and former.storages[name]() is not None for name in names)
            here = (former.locals[key] for key in former.left_here)
            self.grows = there or any(local.cdata not in ours and not local.weak.expired() for local in here)

    def _find_gradients(self) -> None:
        """Of what the call has left: gradients, whose tensors can be put where they belong."""
        for ref in self.objects.values():
            tensor = ref()
            if tensor is None or not (tensor.is_leaf and (tensor.requires_grad or isinstance(tensor, torch.nn.Parameter))):
                continue
            self.leaves.append(ref)
            if tensor.grad is not None and (number := self._number_of(tensor.grad)) is not None:
                (self.gradients if type(tensor.grad) is RemoteTensor else self.gradients_here).append((number, ref))


def _asks(op: Operator) -> str:
    """Why a step is refused that goes on by the values that an operator gives."""
    where = (
        "item(), a branch, or an optimizer's count of steps: use fused=True" if op.name.startswith(_ASKING) else "a branch, say"
    )
    return f"it asks what {op.name} gives ({where})"


def _shapes_only(values: list[Any]) -> bool:
    return any(isinstance(each, torch.Tensor) and each.device.type == "meta" for each in values)


def _strange(tensor: torch.Tensor) -> str | None:
    """What makes a plain tensor one that is not looked into."""
    if tensor.layout is not torch.strided:
        return f"has the layout {tensor.layout}"
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return f"is a {type(tensor).__name__}"
    if tensor.device.type != "cpu":
        return f"lies at {tensor.device}"
    strange = tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg()
    return "is quantized, nested, conjugated or negated" if strange else None


def _operands(known: Known, words: list[int]) -> list[Ref | int]:
    """The tensors and numbers of a post."""
    left = iter(words)
    return [Ref(next(left), next(left)) if kind == "w" else next(left) for kind in known.words]


def alive(refs: Iterable[weakref.ref[Any]]) -> list[Any]:
    return [each for ref in refs if (each := ref()) is not None]


def plains(value: Any) -> list[Plain]:
    """The plain tensors of a value of lists, tuples and dictionaries."""
    if isinstance(value, Plain):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [plain for each in value for plain in plains(each)] if isinstance(value, list | tuple) else []


# -- two calls


class _Names:
    """What a capture calls tensors, so that another one calls them the same."""

    def __init__(self, capture: Capture, other: Capture) -> None:
        self.capture = capture
        self.common = {local.cdata for local in other.locals if local.storage is not None}

    def value(self, value: Any) -> Any:
        if isinstance(value, Plain):
            local = self.capture.locals[value.key]
            what: tuple[Any, ...] = ("made", value.key)
            if local.argument is not None:
                what = "argument", local.argument
            elif local.left is not None:
                what = "left", local.left
            elif not local.made:
                what = ("kept", local.cdata) if local.cdata in self.common else ("bytes", local.blob or self)
            return what, value.offset, value.geometry
        if isinstance(value, Ref):
            return self.capture.where(value)
        if isinstance(value, list | tuple):
            return [self.value(each) for each in value]
        if isinstance(value, dict):
            return {key: self.value(each) for key, each in value.items()}
        return value if isinstance(value, Stream | Meta | Operator) else (type(value), repr(value))

    def event(self, event: Event) -> Any:
        return self.value(event._replace(written=[]) if isinstance(event, Ran) else tuple(event))

    def tensors(self, event: Event) -> Any:
        """The operands of an operator."""
        if isinstance(event, Posted):
            return [self.capture.where(each) for each in event.operands if isinstance(each, Ref)]
        return self.value(plains([event.args, event.kwargs])) if isinstance(event, Ran) else None


def _name(event: Event) -> str:
    return event.name if isinstance(event, Posted) else event.op.name if isinstance(event, Ran) else "a copy"


def difference(first: Capture, second: Capture) -> str:
    """What is another thing in a call than in the one before it; "": nothing."""
    if first.why or second.why:
        return second.why or first.why
    if second.grows:
        return "it keeps a tensor of each call"
    ours, theirs = _Names(first, second), _Names(second, first)
    for one, two in zip(first.events, second.events):
        if type(one) is type(two) and ours.event(one) == theirs.event(two):
            continue
        name = _name(two)
        if _name(one) == name and ours.tensors(one) == theirs.tensors(two):
            return f"{name} has another number than in the call before (of an optimizer: fused=True, or a tensor as lr)"
        return f"{name} is not what the call before had there, or has other operands"
    if len(first.events) != len(second.events):
        return f"it has {len(second.events)} operations and copies, {len(first.events)} in the call before"
    if first.spec != second.spec or ours.value(first.results) != theirs.value(second.results):
        return "it returns something else that is no result of an operation"
    return ""
