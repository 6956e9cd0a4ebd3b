"""``wrap``: parts of a model lie at workers, and the program goes on as if they were here."""

from __future__ import annotations

import gc
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from ..calls import agent as _agent
from ..graph import Transfers
from ..transport import NotSupported, RdmaError
from . import observing
from .batches import checked, forward_backward
from .checkpoint import Beside, check_models, fill, load_checkpoint, named_tensors, restore
from .geometry import geometry
from .placement import Where, home, resolve
from .recording import FirstSteps, unseen
from .runners import counters_here
from .stream import Stream, meta_of, stream_to, streams
from .tensor import OWN, RemoteTensor, at_place, bring_home, brought, make_empty, place_of, running_at, storage_of, wrapper


def wrap(
    net: nn.Module, placement: Mapping[str, str | Sequence[str]], *, outputs: str = "there", chunks: int = 1
) -> WrappedModel:
    """Move the parameters and buffers of parts of ``net`` to workers. Returns ``net`` itself, which has the methods of
    ``WrappedModel`` from now on and trains as before: PyTorch runs the same program here, in every step, and each operation
    runs where its tensors lie (``RemoteTensor``).

    ``placement`` maps paths of modules, at any depth, to workers (``worker``, ``worker/cuda:1``, ``rank:1``);
    ``"layers.0-5"`` stands for ``layers.0`` to ``layers.5``, ``""`` for the whole model. Modules below a path go with it,
    unless they have an entry of their own. What no entry covers stays here. Tensors that share memory move together, to
    where the first of them goes. Parameters stay the objects that they are, with their gradients, hooks and attributes, so
    an optimizer that has them keeps them.

    A list of workers gives a part *replicas*: its batch is split among them like ``torch.chunk``, the parameters lie at the
    first and are copied to the others when they have changed, and the results are joined. It computes
    ``torch.cat([part(shard) for shard in x.chunk(k)])``.

    What was placed before is placed anew.

    * ``outputs``: ``"there"`` leaves results where they were computed, so nothing waits until a value is needed (``item``,
      ``cpu``); ``"here"`` copies them to this process.
    * ``chunks``: micro-batches of ``forward_backward``, unless that is given another number.

    Raises ``ValueError`` for an unknown worker, path or option, ``NotSupported`` for a parameter that cannot move, before
    anything has moved.
    """
    if outputs not in ("there", "here"):
        raise ValueError(f'outputs={outputs!r} is not known; use "there" or "here"')
    if isinstance(net, torch.jit.ScriptModule):
        why = "a scripted module keeps its parameters where Python cannot move them"
        raise NotSupported(why, hint="wrap the module that it was made from")
    for name, parameter in net.named_parameters():
        if hasattr(type(parameter), "_watch"):  # a ``servers.parameter.ServedParameter``
            raise NotSupported(f"{name!r} is a parameter of a served model", hint="wrap a model, or serve it")
    own_names(net, WrappedModel)
    agent = _agent.current()
    places = resolve(net, placement, agent.worker_names(), lambda rank: agent.resolve(rank).name)
    _displace(net, places)
    net = net if isinstance(net, WrappedModel) else extend(net, type(net), WrappedModel)
    move(net, places)
    placed = Placed(places, checked(chunks), outputs, FirstSteps(net))
    placed.saved, net._placement = net._placement.saved, placed
    for path, each in places.items():
        if len(each) > 1:
            part = net.get_submodule(path)
            part.forward = Replicas(part.forward, each)
    return net


class Extension(nn.Module):
    """Methods that a model has besides those of its class. A program that asks for its class finds the original one, and files
    have nothing of ours."""

    _original: type[nn.Module]

    # It is set by a parametrization.
    __class__ = property(lambda self: self._original, lambda self, kind: extend(self, kind, type(self).__bases__[-2]))


Extended = TypeVar("Extended", bound=Extension)


def own_names(net: nn.Module, methods: type[Extension], attributes: Sequence[str] = ()) -> dict[str, Any]:
    """What the class of a model has under the names of these methods, and keeps. ``NotSupported`` for its parts, and for
    ``attributes``, which methods would hide."""
    offered = [name for name in vars(methods) if not name.startswith("_") and not hasattr(nn.Module, name)]
    hidden = {*net._parameters, *net._buffers, *net._modules, *(vars(net).keys() & set(attributes))}
    if taken := [name for name in offered if name in hidden]:
        why = f"{type(net).__name__} has {taken} of its own, which {methods.__name__} has, too"
        raise NotSupported(why, hint="rename them")
    original = getattr(type(net), "_original", type(net))
    return {name: inspect.getattr_static(original, name) for name in offered if hasattr(original, name)}


def extend(net: nn.Module, kind: type[nn.Module], methods: type[Extended]) -> Extended:
    """Make a model one of class ``kind`` that has these methods besides. Models of one class stay of one class: torch asks."""
    found = next((each for each in kind.__subclasses__() if each.__bases__[-2:] == (methods, kind)), None)
    if found is None:
        names = {"_original": getattr(kind, "_original", kind), "__module__": kind.__module__, **own_names(net, methods)}
        found = type(kind.__name__, (*_layout(kind), methods, kind), names)
    object.__dict__["__class__"].__set__(net, found)
    return cast(Extended, net)


def _layout(kind: type) -> tuple[type, ...]:
    """What stands first among the bases of a subclass, so that instances can change to it. Python compares the first base of
    each class that has a ``__dict__``, and what that one is made from: of ``class Net(ABC, nn.Module)`` not ``object``, but
    ``ABC``."""
    while kind.__base__ is not None and kind.__base__.__dictoffset__:
        kind = kind.__base__
    without = kind.__base__
    if without is None or without is object:
        return ()
    return (type(without)("Layout", (without,), {"__orig_bases__": ()}),)  # ``Generic`` refuses a subclass that says nothing


def as_original(reduced: Any, kind: type[nn.Module], without: str) -> Any:
    """What ``__reduce_ex__`` of such a model has given, as that of a model of class ``kind`` without one attribute."""
    made, args, state, *rest = reduced
    return made, (kind, *args[1:]), {name: value for name, value in state.items() if name != without}, *rest


class Placed:
    """Of a wrapped model: where its modules are, and options. ``saved``: the state and folder of its last checkpoint, and what
    is not in the folder."""

    saved: tuple[dict[str, Any], str, Beside] | None = None

    def __init__(self, places: dict[str, list[Where]], chunks: int, outputs: str, first: FirstSteps | None = None) -> None:
        self.places, self.chunks, self.outputs, self.first = places, chunks, outputs, first
        self.steps = 0
        self.unfinished: dict[str, set[str]] = {}
        """Of lost workers whose ``replace`` has not ended: the successors to which tensors may have gone."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Placed:
        return self

    @property
    def workers(self) -> list[str]:
        """Those that have parts, each once."""
        return list(dict.fromkeys(worker for each in self.places.values() for worker, _ in each))


class WrappedModel(Extension):
    """What ``wrap`` makes of a model's class: a subclass with these methods besides."""

    _placement = Placed({}, 1, "there")
    """What another model of this class has (``type(net)(...)``)."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.jit.is_tracing():
            raise NotSupported("torch.jit.trace cannot follow a model whose parts lie at workers", hint="trace a copy: close()")
        placed = self._placement
        placed.steps += 1
        if placed.first is None:
            found = super().__call__(*args, **kwargs)
        else:
            unseen(placed.first.begin, args, kwargs)
            try:
                found = super().__call__(*args, **kwargs)
            finally:
                placed.first.called()
        return bring_home(found) if placed.outputs == "here" else found

    def forward_backward(
        self,
        loss_fn: Callable[..., torch.Tensor],
        *args: Any,
        target: Any = None,
        chunks: int | None = None,
        schedule: str = "gpipe",
        **kwargs: Any,
    ) -> torch.Tensor:
        """Forward and backward of one batch in ``chunks`` micro-batches; see ``batches.forward_backward``."""
        placed = self._placement
        with nullcontext() if placed.first is None else placed.first.whole(args, kwargs):
            count = placed.chunks if chunks is None else chunks
            return forward_backward(self, loss_fn, args, kwargs, target, count, schedule, len(placed.workers))

    def transfers(self) -> list[Transfers]:
        """The tensors that cross in a step, as data: one entry for each form of inputs (their shapes and dtypes, with or
        without grad), the last used one last. What is seen are the first two steps with each of the first eight forms
        (``recording`` shows any other); a step ends with the next call of the model, before a graphed one is replayed, or when
        far more has happened than in the call. Entries have ``save`` and ``draw``, and print as tables."""
        return [] if self._placement.first is None else self._placement.first.transfers()

    def placement_table(self) -> str:
        """The tables of ``transfers`` alone, an empty line between two."""
        return "\n\n".join(found.table() for found in WrappedModel.transfers(self))

    def replace(self, lost: str, successor: str) -> dict[str, Any]:
        """Give what lies at worker ``lost`` to ``successor``, and go back to the last checkpoint that was saved or loaded:
        models (without gradients; also buffers that are not persistent), optimizers and generators, so that training goes on
        as after that checkpoint. Returns the state of that call, with its plain data as they were saved. ``ValueError`` for
        workers that are not in the group or have no part, and optimizers with other groups than in the checkpoint,
        ``NotSupported`` where there was no checkpoint, ``RuntimeError`` where a model has what it had not then: before anything
        has moved. After any other error (Ctrl-C, another lost worker) call it again, with this successor or another one: what
        lies at a successor then is as in the checkpoint."""
        placed, agent = self._placement, _agent.current()
        if placed.saved is None:
            why = "there is no checkpoint of this model"
            raise NotSupported(why, hint="call rdmarpc.save_checkpoint() in the training loop")
        left = {lost, *placed.unfinished.get(lost, ())}
        if left.isdisjoint(placed.workers) or (successor not in left and successor in placed.workers):
            raise ValueError(f"{lost!r} must be a worker with parts of this model, and {successor!r} one without")
        if successor not in agent.worker_names():
            raise ValueError(f"worker {successor!r} is not in this group")
        state, folder, beside = placed.saved
        for stream in streams():
            with suppress(RdmaError):  # what was to come from the lost worker: others still have to tell
                stream.synchronize()
        with suppress(RdmaError):  # hooks of ``state_dict`` may ask the lost worker
            check_models(state, folder, beside)
        key = next((key for key, value in state.items() if value is self), None)
        if key is None:
            raise RuntimeError("the state of the last checkpoint does not have this model any more")
        placed.unfinished.setdefault(lost, set()).add(successor)
        tensors = {id(tensor): (name, tensor) for name, tensor in named_tensors(self)}
        moves = [
            (name, tensor, stream_to(successor, tensor._handle.stream.device))
            for name, tensor in tensors.values()
            if type(tensor) is RemoteTensor and tensor._handle.stream.worker in left
        ]
        rooms = {name: make_empty(place, each.shape, each.stride(), each.dtype) for name, each, place in moves}
        fill(rooms, key, folder, beside)
        for stream in streams():
            if stream.worker == successor:
                stream.synchronize()  # what it could not do is told before anything has moved
        for value in state.values():
            if isinstance(value, nn.Module):
                value.zero_grad()  # of the step that is given up, whose other gradients are lost
        for name, tensor, place in moves:
            if place is None:
                exchange(tensor, rooms[name])
            else:  # also while a graph of an earlier forward has the tensor
                tensor.data = rooms[name]
        for each in placed.places.values():
            each[:] = [(successor if worker in left else worker, device) for worker, device in each]
        placed.first = placed.first and FirstSteps(self)  # other things cross
        restore(state, beside)
        load_checkpoint(state, folder)
        placed.unfinished.clear()
        return state

    def counters(self, everywhere: bool = True) -> dict[str, int]:
        """Counters of this process, of its streams, and, with ``everywhere``, of the workers that have parts."""
        agent = _agent.current()
        found = Counter(agent.counters())
        for stream in streams():
            found.update(stream.counts)
        for worker in self._placement.workers if everywhere else ():
            if worker != agent.name:
                found.update(agent.call(agent.resolve(worker), counters_here, (), {}, agent.rpc_timeout, control=True))
        return {**found, "steps": self._placement.steps}

    def close(self) -> None:
        """Bring all parameters and buffers home: the model is one of this process again, but for what lay at a
        worker that is lost. Idempotent."""
        _unite(self.modules())
        if self._placement.first is not None:
            self._placement.first.end()
        come_home(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles are of the original class: tensors keep their places in a copy, and lie on the CPU in a file."""
        return as_original(super().__reduce_ex__(protocol), self._original, "_placement")


class Replicas:
    """The forward of a part with replicas, which splits its batch among them."""

    def __init__(self, forward: Callable[..., Any], where: list[Where]) -> None:
        self.forward, self.where = forward, where

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.dim() > 0]
        if not tensors:
            return self.forward(*args, **kwargs)
        batch = len(tensors[0])
        sizes = [len(piece) for piece in torch.empty(batch, device="meta").chunk(len(self.where))]
        pieces = {id(t): t.split(sizes) for t in tensors if len(t) == batch}
        results = []
        for at, place in zip(range(len(sizes)), self.where):
            given, more = tree_map(lambda leaf, at=at: pieces[id(leaf)][at] if id(leaf) in pieces else leaf, (args, kwargs))
            with running_at(stream_to(*place)):
                results.append(self.forward(*given, **more))
        return _joined(results, sizes)


def _joined(results: list[Any], sizes: list[int]) -> Any:
    """Results of shards as that of the batch."""
    columns = [tree_flatten(result)[0] for result in results]
    leaves = []
    for shards in zip(*columns):
        if not any(isinstance(each, torch.Tensor) for each in shards):
            leaves.append(shards[0])
        elif [getattr(each, "shape", ())[:1] for each in shards] == [(size,) for size in sizes]:
            leaves.append(torch.cat(shards))
        else:
            why = "a part with replicas gave a result that is no batch: its first dimension differs"
            raise NotSupported(why, hint="give that part one worker")
    return tree_unflatten(leaves, tree_flatten(results[0])[1])


def _unite(modules: Iterable[nn.Module]) -> None:
    """They have no replicas any more."""
    for module in modules:
        if isinstance(module.__dict__.get("forward"), Replicas):
            del module.__dict__["forward"]


def _displace(net: nn.Module, places: Mapping[str, list[Where]]) -> None:
    """Bring home what was placed before: all of a wrapped model; of another one (a copy of one, say) what has a new place."""
    if isinstance(net, WrappedModel):
        WrappedModel.close(net)
        return
    storages: dict[int, torch.Tensor] = {}
    for path, module in net.named_modules():
        if (where := home(places, path)) is not None:
            _unite([module])
            for tensor in _remote(module):
                if tensor._handle.stream is not stream_to(*where):
                    exchange(tensor, brought(tensor, storages))


def _attributes(module: nn.Module) -> list[torch.Tensor]:
    """Tensors of a module that are neither parameters nor buffers, as far as they are no views and have no graph."""
    found = [each for each in module.__dict__.values() if type(each) in (torch.Tensor, RemoteTensor)]
    return [each for each in found if each.layout is torch.strided and each.grad_fn is None and not each._is_view()]


def _remote(module: nn.Module) -> list[RemoteTensor]:
    """The tensors of a module that lie at workers."""
    every = (*module._parameters.values(), *module._buffers.values(), *_attributes(module))
    return [each for each in every if type(each) is RemoteTensor]


@torch.inference_mode(False)  # what was usable in autograd before is so afterwards
def come_home(net: nn.Module) -> None:
    """Have all tensors of a model lie in this process, in place. What lay over each other does so here."""
    storages: dict[int, torch.Tensor] = {}
    for tensor in {id(tensor): tensor for module in net.modules() for tensor in _remote(module)}.values():
        with suppress(RdmaError):  # what lay at a worker that is lost is lost: its next use says so
            exchange(tensor, brought(tensor, storages))


@torch.inference_mode(False)
def move(net: nn.Module, places: Mapping[str, list[Where]]) -> None:
    """Move tensors to their places, in place: who holds a parameter holds it afterwards. Tensors that overlap in memory move as
    one, to where the first of them goes; other attributes of modules move with what they overlap. Nothing has moved when an
    error is raised."""
    found: dict[int, tuple[torch.Tensor, Where | None]] = {}
    for path, module in net.named_modules(remove_duplicate=False):
        where = home(places, path)
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None or type(tensor) is RemoteTensor:
                continue
            if where is not None or is_lazy(tensor):
                check_movable(tensor, f"{path}.{name}" if path else name)
            found[id(tensor)] = tensor, found.get(id(tensor), (tensor, None))[1] or where
    storages: dict[int, Sharing] = {}
    for tensor, where in found.values():
        storages.setdefault(storage_of(tensor), []).append((tensor, where))
    others = {id(each): each for module in net.modules() for each in _attributes(module) if id(each) not in found}
    for tensor in others.values():
        if type(tensor) is not RemoteTensor and (key := tensor.untyped_storage()._cdata) in storages:
            storages[key].append((tensor, None))
    groups = [group for sharing in storages.values() for group in _overlapping(sharing)]
    done: list[tuple[torch.Tensor, torch.Tensor]] = []
    try:
        for group in groups:
            where = next((where for _, where in group if where is not None), None)
            place = None if where is None else stream_to(*where)
            if place is not None:
                move_tensors([tensor for tensor, _ in group], place, done)
    except BaseException:
        for tensor, original in done:
            exchange(tensor, original)
        raise


def check_movable(tensor: torch.Tensor, name: str) -> None:
    """``NotSupported`` for a parameter or buffer that would not be the same elsewhere."""
    if is_lazy(tensor):
        raise NotSupported(f"{name} has no shape yet", hint="run the model once before it is wrapped")
    if type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer):
        raise NotSupported(f"{name} is a {type(tensor).__name__}: a class of its own would be lost at a worker")


Sharing = list[tuple[torch.Tensor, "Where | None"]]


def _overlapping(sharing: Sharing) -> list[Sharing]:
    """Tensors over one storage in groups that overlap. ``NotSupported`` if one of them moves, and tensors outside of the model
    lie over the same memory: they would keep the old one."""
    first = sharing[0][0]
    if first.layout is not torch.strided:
        return [sharing]
    storage = first.untyped_storage()
    moves = any(where is not None for _, where in sharing)
    for tensor, _ in sharing if moves else ():
        if tensor._is_view() and not tensor.requires_grad:  # a buffer keeps the tensor that it is a view of
            _swap(tensor, tensor.data)
    ours = len(sharing) + 1
    if moves and torch._C._storage_Use_Count(storage._cdata) > ours:
        for graph in list(observing.graphs):
            graph.forget()
        gc.collect()  # a graph of an earlier forward may be in a reference cycle
    others = torch._C._storage_Use_Count(storage._cdata) - ours
    if others > 0 and moves:
        why = f"the memory of a tensor of shape {tuple(first.shape)} is used by {others} tensors outside of the model"
        hint = "drop views of parameters, and graphs of earlier forwards, before wrap; or clone() what stays"
        raise NotSupported(why, hint=hint)
    groups: list[Sharing] = []
    end = -1
    for tensor, where in sorted(sharing, key=lambda each: each[0].storage_offset() * each[0].itemsize):
        start = tensor.storage_offset() * tensor.itemsize
        if start < end:
            groups[-1].append((tensor, where))
        else:
            groups.append([(tensor, where)])
        end = max(end, int(start) + geometry(tensor).span * tensor.itemsize)
    return groups


def move_tensors(tensors: list[torch.Tensor], place: Stream, done: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Move tensors that overlap to a place; these very objects lie there then. Each goes into ``done``, with what it was."""
    if len(tensors) == 1 or tensors[0].layout is not torch.strided:
        copies: list[Any] = [at_place(tensor.detach(), place) for tensor in tensors]
    else:
        whole: Any = at_place(torch.empty(0, dtype=torch.uint8, device="cpu").set_(tensors[0].untyped_storage()), place)
        offsets = [int(tensor.storage_offset()) for tensor in tensors]
        copies = [wrapper(whole._handle, meta_of(geometry(t)), at, at) for t, at in zip(tensors, offsets)]
    for tensor, copy in zip(tensors, copies):
        copy._handle.anchor = True
        done.append((tensor, exchange(tensor, copy)))


def _of_an_earlier_place(grads: Any) -> None:
    why = "a backward of a forward that ran before its parameters were moved: they are not there any more"
    raise NotSupported(why, hint="call wrap, replace and close between a backward and the next forward")


def exchange(tensor: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """Make ``tensor`` the found one, where that lies, with its own attributes, hooks and gradient. Returns what it was."""
    if isinstance(tensor, nn.Parameter):
        made: torch.Tensor = nn.Parameter(found, tensor.requires_grad)
    else:
        made = found.requires_grad_(tensor.requires_grad)
    made.__dict__.update({name: value for name, value in tensor.__dict__.items() if name not in OWN})
    made.__dict__.update({name: value for name, value in found.__dict__.items() if name in OWN})
    before = None
    if tensor.requires_grad and tensor._use_count() > 1:  # type: ignore[attr-defined]
        before = torch.autograd.graph.get_gradient_edge(tensor).node
    gradient, hooks, after = tensor.grad, tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    moved = None if gradient is None else at_place(gradient, place_of(found))  # before anything changes: this may fail
    tensor.grad = tensor._backward_hooks = tensor._post_accumulate_grad_hooks = None  # type: ignore[assignment]
    try:
        _swap(tensor, made)
        tensor.__class__, made.__class__ = made.__class__, tensor.__class__
        tensor.__dict__, made.__dict__ = made.__dict__, tensor.__dict__
    finally:
        if gradient is not None and moved is not None:
            if gradient.dtype is not tensor.dtype:  # as after ``p.data = ...`` of another dtype
                tensor.grad_dtype = None
            tensor.grad = moved if place_of(moved) == place_of(tensor) else gradient
        tensor._backward_hooks, tensor._post_accumulate_grad_hooks = hooks, after
    if before is not None:
        # A backward through a graph from before would add its gradient to what is no longer there. It ends in an error, as
        # after ``torch.utils.swap_tensors``.
        before.register_prehook(_of_an_earlier_place)
    return made


def _swap(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """``torch._C._swap_tensor_impl``, which is refused while torch has weak references, as a profiler's results have."""
    try:
        torch._C._swap_tensor_impl(tensor, other)
    except RuntimeError:
        gc.collect()  # a profiler that is over is in a reference cycle
        try:
            torch._C._swap_tensor_impl(tensor, other)
        except RuntimeError as error:
            why = f"a tensor of shape {tuple(tensor.shape)} cannot move while torch has weak references to it"
            raise NotSupported(why, hint="drop the results of torch.profiler, and leave torch.autocast, first") from error
