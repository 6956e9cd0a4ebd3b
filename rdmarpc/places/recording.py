"""What this process posts, recorded as data (``graph``): on demand, and the first steps of every wrapped model."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..calls import agent as _agent
from ..graph import Event, Flow, Kind, Move, Operand, Operation, Phase, Recorded, Transfers, described, steps
from ..message.layout import span
from . import observing
from .flags import inside, run_plain
from .operators import Operator, operator
from .stream import Meta, Storage, Stream
from .tensor import RemoteTensor

_node, _sequence = torch._C._current_autograd_node, torch._C._autograd._get_sequence_nr
_MOST = 1 << 18
_FORMS, _TIMES = 8, 2
_FEW, _BEHIND = 1 << 12, 64
"""Of a step no more is recorded than so many events, and so many times those of the model's call: a model that is not called
any more (a teacher, once) is no reason to record for ever."""


class Origin(NamedTuple):
    """Of an operation with a node in autograd's graph: the module in which it ran, and what its result is called."""

    path: str
    name: str


def unseen(hook: Callable[..., Any], *args: Any) -> Any:
    """Neither the program's modes nor classes of tensors see how a hook looks at tensors."""
    with torch._C.DisableTorchFunction():
        return hook(*args)


class Recorder:
    """Records what the thread that made it posts, from ``start`` to ``end`` or until it has ``_MOST`` events. While it is on,
    all modules and optimizers of the process have a hook (torch's global ones), which tells where the program is."""

    def __init__(self, net: nn.Module | None = None, inputs: dict[str, torch.Tensor] | None = None) -> None:
        self.thread, self._here = threading.get_ident(), _agent.current().name
        self.first = net is not None
        """Whether it is of ``FirstSteps``."""
        self._most = _MOST
        self._events: list[Event] = []
        self._kept: Counter[str] = Counter()
        self._sizes: dict[int, int] = {}
        self._kinds: dict[int, Kind] = {}
        self._called: dict[int, str] = {}
        """What storages are called: parameters by path, inputs by name, results of modules by that module's path."""
        self._fresh = itertools.count(1)
        self._made: dict[int, str] = {}
        """The phase in which storages were made."""
        self._local: dict[int, tuple[StorageWeakRef, int]] = {}
        self._nodes: dict[int, Origin] = {}
        """By the number of their node in autograd's graph, and one."""
        self._paths: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._running: list[str] = []
        self._phase, self._stepping = Phase.FORWARD, 0
        self._hooks = ExitStack()
        if net is not None:
            self._know(net)
        for name, tensor in (inputs or {}).items():
            self._called[self._storage(tensor)] = name

    def start(self) -> None:
        observing.begin(self)
        for hook in (
            modules.register_module_forward_pre_hook(partial(unseen, self._enter)),
            modules.register_module_forward_hook(partial(unseen, self._leave), always_call=True),
            optimizers.register_optimizer_step_pre_hook(partial(unseen, self._step_begins)),
            optimizers.register_optimizer_step_post_hook(self._step_ends),
        ):
            self._hooks.callback(hook.remove)

    def end(self) -> None:
        """Idempotent."""
        observing.end(self)
        self._hooks.close()

    def called(self) -> None:
        """The model whose step it is has returned."""
        self._most = min(_MOST, max(_FEW, _BEHIND * len(self._events)))

    def recorded(self) -> Recorded:
        """What was recorded so far."""
        return Recorded(self._here, tuple(self._events), self._sizes, self._kinds)

    def parameter_bytes(self) -> dict[str, int]:
        """Of the modules that were met, by place."""
        return dict(self._kept)

    # -- where the program is

    def _know(self, net: nn.Module) -> None:
        for path, module in net.named_modules():
            self._paths.setdefault(module, path)
        for parameter in net.parameters():
            if self._storage(parameter) not in self._kinds:
                place = parameter.place if type(parameter) is RemoteTensor else self._here
                self._kept[place] += parameter.nbytes
        for name, tensor in (*net.named_parameters(), *net.named_buffers()):
            self._called[storage := self._storage(tensor)] = name
            self._kinds[storage] = Kind.PARAMETER

    def _enter(self, module: nn.Module, args: Any) -> None:
        if threading.get_ident() != self.thread or _node() is not None:
            return
        if not self._running and module not in self._paths:
            self._know(module)
        if not torch.compiler.is_compiling():
            self._running.append(self._paths.get(module, self._running[-1] if self._running else ""))
            self._phase, self._stepping = Phase.FORWARD, 0

    def _leave(self, module: nn.Module, args: Any, out: Any) -> None:
        if threading.get_ident() != self.thread or _node() is not None or not self._running:
            return
        path = self._running.pop()
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and path:
                self._called[self._storage(tensor)] = path
                if tensor.grad_fn is not None:
                    key = tensor.grad_fn._sequence_nr() + 1
                    known = self._nodes.get(key)
                    self._nodes[key] = Origin(path if known is None else known.path, path)

    def _step_begins(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if threading.get_ident() != self.thread:
            return
        self._stepping += 1
        for parameter in [each for group in optimizer.param_groups for each in group["params"]]:
            gradient = getattr(parameter, "grad", None)  # references, of a distributed optimizer, have none
            if gradient is not None:
                storage = self._storage(gradient)
                self._called.setdefault(storage, self._called.get(self._storage(parameter), ""))
                if storage not in self._made:
                    self._kinds[storage] = Kind.GRADIENT

    def _step_ends(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if threading.get_ident() == self.thread:
            self._stepping = max(0, self._stepping - 1)

    def _now(self) -> Phase:
        """The phase."""
        if _node() is not None:
            self._phase = Phase.BACKWARD
        elif torch.is_grad_enabled():
            self._phase = Phase.FORWARD
        elif self._stepping or self._phase == Phase.BACKWARD:
            self._phase = Phase.STEP
        return self._phase

    def _path(self) -> str:
        node = _node()
        if node is None:
            return self._running[-1] if self._running else ""
        known = self._nodes.get(node._sequence_nr() + 1)
        return known.path if known is not None else ""

    # -- what is posted

    def _elsewhere(self) -> bool:
        """Whether what happens is not recorded: in another thread, or too much has been."""
        if len(self._events) >= self._most:
            self.end()
        return threading.get_ident() != self.thread or len(self._events) >= self._most

    def operation(self, op: Operator, args: Any, kwargs: Any, out: Any, place: Stream | None) -> None:
        """See ``Observer``."""
        if self._elsewhere():
            return
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        written = op.operands_written(args, kwargs)
        positions = tuple(at for at, each in enumerate(tensors) if any(each is other for other in written))
        operands = tuple(map(self._operand, tensors))
        for tensor, operand in zip(tensors, operands):
            self._meet(tensor, operand.storage)
        results = tuple(self._operand(each) for each in tree_leaves(out) if isinstance(each, torch.Tensor))
        if not operands and not results:
            return  # it has to do with profilers, as a rule
        path, phase = self._path(), self._now()
        for result in results:
            self._made.setdefault(result.storage, phase)
        if phase == Phase.BACKWARD and op.name == "aten::add.Tensor":
            self._name_sum({operand.storage for operand in operands})
        event = Operation(self._here if place is None else repr(place), op.name, operands, positions, results, phase, path)
        self._events.append(event)
        if phase == Phase.FORWARD and torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            self._nodes[_sequence()] = Origin(path, str(event))

    def brought(self, target: Stream, tensor: torch.Tensor, made: Storage) -> None:
        """See ``Observer``."""
        operand = self._operand(tensor)
        maker = ""
        if operand.storage not in self._made:
            self._meet(tensor, operand.storage)
            maker = self._maker(tensor)
        self._sizes[made.name] = made.nbytes
        self._moved(self._here, repr(target), operand, made.name, tensor.dtype.itemsize, maker)

    def crossed(self, source: Storage, at: int, meta: Meta, shift: int, made: Storage) -> None:
        """See ``Observer``."""
        self._sizes[source.name], self._sizes[made.name] = source.nbytes, made.nbytes
        self._moved(
            repr(source.stream), repr(made.stream), _over(source.name, at, meta), made.name, meta.geometry.dtype.itemsize
        )

    def fetched(self, source: Stream, name: int, at: int, meta: Meta, found: torch.Tensor) -> None:
        """See ``Observer``."""
        self._moved(repr(source), self._here, _over(name, at, meta), self._storage(found), meta.geometry.dtype.itemsize)

    def _moved(self, source: str, target: str, operand: Operand, made: int, itemsize: int, maker: str = "") -> None:
        if self._elsewhere():
            return
        phase, storage = self._now(), operand.storage
        name = self._called.get(storage, "")
        if not name and (self._made.get(storage) == Phase.BACKWARD or self._kinds.get(storage) == Kind.GRADIENT):
            name = self._called[storage] = self._gradient_of()
        self._made[made] = self._made.get(storage, "")
        self._events.append(
            Move(source, target, operand, made, span(operand.shape, operand.strides) * itemsize, phase, name, maker)
        )

    def _gradient_of(self) -> str:
        """What the result of the forward is called whose backward runs: a gradient that it takes is that one's."""
        node = _node()
        variable = getattr(node, "variable", None)
        if variable is not None:
            return self._called.get(self._storage(variable), "")
        known = None if node is None else self._nodes.get(node._sequence_nr() + 1)
        return "" if known is None else known.name

    def _name_sum(self, summed: set[int]) -> None:
        """Autograd adds up gradients of one tensor behind the backward that gave the latest: they are those of its operand."""
        node = _node()
        behind = [] if node is None else [each for each, _ in node.next_functions if each is not None]
        names = {self._nodes[at].name for each in behind if (at := each._sequence_nr() + 1) in self._nodes}
        for at in range(len(self._events) - 1, -1, -1):
            move = self._events[at]
            if not isinstance(move, Move):
                break
            if move.made in summed and self._made.get(move.operand.storage) == Phase.BACKWARD:
                self._called[move.operand.storage] = name = names.pop() if len(names) == 1 else ""
                self._events[at] = dataclasses.replace(move, name=name)

    def _meet(self, tensor: torch.Tensor, storage: int) -> None:
        """A tensor is read; what is it, if nobody has recorded how it was made?"""
        if storage in self._made or storage in self._kinds:
            return
        parameter = isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
        if parameter or (type(tensor) is RemoteTensor and tensor._handle.anchor):
            self._kinds[storage] = Kind.PARAMETER
        elif tensor.grad_fn is not None:
            self._kinds[storage] = Kind.ACTIVATION
        elif _node() is not None and tensor.is_floating_point() and storage not in self._called:
            self._kinds[storage] = Kind.GRADIENT
        else:
            self._kinds[storage] = Kind.INPUT

    def _maker(self, tensor: torch.Tensor) -> str:
        """In words, the operation that made a plain tensor, as far as autograd knows."""
        base = tensor if tensor._base is None else tensor._base
        node, backward = base.grad_fn, _node()
        if node is None:
            made_here = backward is not None and self._kinds[self._storage(tensor)] == Kind.GRADIENT
            return "a backward here" if made_here else ""
        operation = type(node).__name__.partition("Backward")[0].lower()
        known = self._nodes.get(node._sequence_nr() + 1)
        return f"{known.path}: {operation}" if known is not None and known.path else f"{operation}()"

    def _operand(self, tensor: torch.Tensor) -> Operand:
        strided = tensor.layout is torch.strided and not tensor.is_nested
        strides, offset = (tensor.stride(), int(tensor.storage_offset())) if strided else ((), 0)
        return Operand(self._storage(tensor), _shape(tensor), strides, str(tensor.dtype)[6:], offset)

    def _storage(self, tensor: torch.Tensor) -> int:
        """The number of a tensor's storage."""
        if type(tensor) is RemoteTensor:
            self._sizes[tensor._handle.name] = tensor._handle.nbytes
            return tensor._handle.name
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # it has none
            return -(1 << 62) - id(tensor)
        known = self._local.get(storage._cdata)
        if known is None or known[0].expired():
            number = -next(self._fresh)
            known = self._local[storage._cdata] = StorageWeakRef(storage), number
            self._sizes[number] = storage.nbytes()
        return known[1]


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """Of a nested one the number of its rows, which have shapes of their own."""
    return (tensor.size(0),) if tensor.is_nested else tuple(tensor.shape)


def _over(name: int, at: int, meta: Meta) -> Operand:
    geometry = meta.geometry
    return Operand(name, geometry.shape, geometry.strides, str(geometry.dtype)[6:], max(at, 0))


class _Here(TorchDispatchMode):
    """Tells a recorder of operations on plain tensors."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not {RemoteTensor, torch.Tensor}.issuperset(types):  # torch names Tensor where autograd saves a result
            return NotImplemented  # a class with a dispatch of its own: what it makes of this comes here again
        out = run_plain(func, args, kwargs or {}, inside.dtype)
        if not any(isinstance(each, RemoteTensor) for each in tree_leaves((args, kwargs, out))):
            operator(func).raise_versions(args)
            self._recorder.operation(operator(func), args, kwargs or {}, out, None)
        return out


class Recording:
    """What was posted in a ``with recording():``. Complete when that has ended."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    @property
    def recorded(self) -> Recorded:
        """All of it, in order."""
        return self._recorder.recorded()

    def steps(self) -> list[Recorded]:
        """See ``graph.steps``."""
        return steps(self.recorded)

    def flow(self) -> Flow:
        """The data-flow graph of all of it."""
        return Flow(self.recorded)

    def transfers(self) -> Transfers:
        """What crosses in the last whole step. Those before it say what varies. ``RuntimeError`` if nothing was recorded."""
        found = self.steps()
        if not found:
            raise RuntimeError("nothing was posted while the recording was on")
        phases = [{event.phase for event in step.events} for step in found]
        whole = max(phases, key=len)
        return described([step for step, had in zip(found, phases) if had == whole], self._recorder.parameter_bytes())

    def placement_table(self) -> str:
        """A line for each tensor that crosses in the last step, and their sum."""
        return self.transfers().table()


@contextmanager
def recording() -> Iterator[Recording]:
    """Record what this thread posts to workers and what it computes here, until the end of the ``with``."""
    recorder = Recorder()
    recorder.start()
    try:
        with _Here(recorder):
            yield Recording(recorder)
    finally:
        recorder.end()


class FirstSteps:
    """The first ``_TIMES`` steps of a wrapped model with each form of inputs, of the first ``_FORMS`` forms, recorded. A step
    goes from one call of the model to the next."""

    def __init__(self, net: nn.Module) -> None:
        self._net = weakref.ref(net)
        try:
            self._signature: inspect.Signature | None = inspect.signature(net.forward)
        except (TypeError, ValueError):
            self._signature = None
        self._found: dict[Any, list[Recorder]] = {}
        self._current: Recorder | None = None
        self._whole = threading.local()

    def begin(self, args: Any, kwargs: Any) -> None:
        """The model is called."""
        if getattr(self._whole, "inside", False):
            return
        if self._current is not None:
            if self._current.thread != threading.get_ident():
                return
            self.end()
        net = self._net()
        inputs = self._inputs(args, kwargs)
        form = torch.is_grad_enabled(), *[(_shape(leaf), leaf.dtype) for leaf in inputs.values()]
        if form not in self._found and len(self._found) == _FORMS:
            return
        found = self._found[form] = self._found.pop(form, [])  # the last used is the last
        if len(found) < _TIMES:
            self._current = recorder = Recorder(net, inputs)
            recorder.start()
            weakref.finalize(self, recorder.end)
            found.append(recorder)

    def _inputs(self, args: Any, kwargs: Any) -> dict[str, torch.Tensor]:
        """The tensors that the model is given, by the names of its forward's parameters."""
        given: dict[str, Any] = {"input": (args, kwargs)}
        if self._signature is not None:
            with suppress(TypeError):
                given = dict(self._signature.bind(*args, **kwargs).arguments)
        found = {}
        for name, value in given.items():
            leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
            found.update({name if len(leaves) == 1 else f"{name}.{at}": leaf for at, leaf in enumerate(leaves)})
        return found

    @contextmanager
    def whole(self, args: Any, kwargs: Any) -> Iterator[None]:
        """One step with all that the model is called in it."""
        unseen(self.begin, args, kwargs)
        self._whole.inside = True
        try:
            yield
        finally:
            self._whole.inside = False
            self.called()

    def called(self) -> None:
        """The model has returned."""
        recorder = self._current
        if recorder is not None and recorder.thread == threading.get_ident() and not getattr(self._whole, "inside", False):
            recorder.called()

    def end(self) -> None:
        """The step that is recorded ends here. Idempotent."""
        recorder, self._current = self._current, None
        if recorder is not None:
            recorder.end()

    def transfers(self) -> list[Transfers]:
        """One entry for each form of inputs, the last used one last. Ends the step that is being recorded."""
        self.end()
        found = [each for each in self._found.values() if each]
        return [described([each.recorded() for each in same], same[-1].parameter_bytes()) for same in found]


def end_first_steps() -> None:
    """End the recordings of first steps in this thread."""
    for each in observing.observers:
        if isinstance(each, Recorder) and each.first and each.thread == threading.get_ident():
            each.end()
