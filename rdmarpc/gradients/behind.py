"""What stands behind the accumulator of a leaf, besides a context: hooks of other libraries, the reducers of DDP, and ours of
fetched tensors (``Fetched``).

A context keeps gradients to itself, and ``.grad`` as it is: most leaves' gradients are taken in front of their accumulators.
What stands behind one works on ``.grad`` (DDP averages that), and wants a gradient that is complete. Such a leaf is *watched*:
it waits for all that a pass brings to it, and lends its ``.grad`` to the call of the engine that runs it (``lending``).
Meanwhile ``.grad`` holds what the context has: the accumulator adds to it, hooks behind the accumulator see it, and DDP
averages it, before the call returns. Afterwards it is the context's, and ``.grad`` what it was. One context at a time has a
leaf; other threads must not use its ``.grad`` (a ``DistributedOptimizer`` waits). Of a DDP module, all parameters are lent: its
reducer writes to those that other workers' passes reached.

DDP does not tell anybody which parameters it has, and a reducer writes to those too that a pass does not reach here. So its
modules are noted when they are made, copied or unpickled; those from before this import are looked for once.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
import torch.distributed
from torch.autograd.graph import GradientEdge
from torch.autograd.variable import Variable
from torch.nn.parallel import DistributedDataParallel, distributed
from torch.utils.hooks import unserializable_hook

from ..base.streams import use_here
from ..transport import NotSupported, nobody, sole
from .graph import Node, Sent, edge, engaged

ACCUMULATE: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
SINK: Any = getattr(getattr(distributed, "_DDPSink", None), "_backward_cls", None)
"""Behind the outputs of DDP modules that have a static graph, or look for unused parameters."""
_DIVERTED, _SEEN = "rdmarpc.diverted", "rdmarpc.seen"
_diverting = threading.Lock()


class Mark:
    """Of an accumulator: the hooks before and behind it that Python knows, ours (one, before) among them."""

    __slots__ = ("before", "behind", "lock")

    def __init__(self, accumulator: Node) -> None:
        handle = accumulator.register_prehook(partial(_diverted, accumulator.variable))
        self.before: OrderedDict[int, Any] = handle.hooks_dict_ref()
        handle = accumulator.register_hook(nobody)  # the only way to the hooks behind it
        self.behind: OrderedDict[int, Any] = handle.hooks_dict_ref()
        handle.remove()
        self.lock = threading.Lock()
        """Of who has the leaf's ``.grad`` lent."""


def divert(accumulator: Node) -> Mark:
    """Have what a pass brings to a leaf go to the pass, and nothing to ``.grad``, unless that is lent to the pass: the leaf's
    hooks run before, and those behind its accumulator after. Other backward passes over the same leaf are not concerned."""
    marks = accumulator.metadata
    mark: Mark | None = marks.get(_DIVERTED)
    if mark is None:
        with _diverting:
            mark = marks.get(_DIVERTED)
            if mark is None:
                mark = marks[_DIVERTED] = Mark(accumulator)
    return mark


def _diverted(leaf: torch.Tensor, gradients: tuple[torch.Tensor | None, ...]) -> tuple[None] | None:
    run = engaged.run
    if run is None or id(leaf) in run.lent:
        return None
    if gradients[0] is not None:
        run.accumulate(leaf, gradients[0])
    return (None,)


def watched(accumulator: Node) -> bool:
    """Whether something stands behind the accumulator, or (hooks that users put there) in front of it."""
    mark = divert(accumulator)
    return bool(mark.behind) or len(mark.before) > 1 or bool(replicas.of(accumulator.variable))


def adds_up(target: torch.Tensor | GradientEdge) -> bool:
    """Whether all there is to do with a gradient is to add it to others: of a leaf that has no hooks and is not watched."""
    if not isinstance(target, torch.Tensor) or target._backward_hooks or target._post_accumulate_grad_hooks:
        return False
    if target.layout is not torch.strided:
        return not watched(edge(target).node)
    accumulator = _held_elsewhere(target)
    return not (replicas.known and replicas.of(target)) if accumulator is None else not watched(accumulator)


def _held_elsewhere(leaf: torch.Tensor) -> Node | None:
    """The accumulator of a leaf; ``None`` if there was none a moment ago, so that nothing can stand behind it. An accumulator
    that nothing else holds dies with our look at it, and the next look finds another one, without our note."""
    with torch.enable_grad():
        for _ in range(2):
            view: Node = leaf.view_as(leaf).grad_fn
            accumulator = view.next_functions[0][0]
            notes = accumulator.metadata
            if _SEEN in notes:
                return accumulator
            notes[_SEEN] = True
            del view, accumulator, notes
    return None


def inner_edges(sent: Sent) -> list[GradientEdge]:
    """Of what left: the edges in front of which something may wait, all but leaves whose gradients are only added up."""
    return [edge(target) if isinstance(target, torch.Tensor) else target for target in sent.targets if not adds_up(target)]


def refuse_late_hooks(leaf: torch.Tensor) -> None:
    """``NotSupported`` for a leaf with hooks that want its ``.grad`` (torch passes them over without a word, or misleads
    them)."""
    hooks: Any = leaf._post_accumulate_grad_hooks
    if hooks and any(not isinstance(getattr(hook, "__self__", None), Fetched) for hook in hooks.values()):
        raise NotSupported(
            f"a leaf of shape {tuple(leaf.shape)} has a hook by register_post_accumulate_grad_hook: such hooks work on .grad, "
            "which a backward pass in a context leaves alone",
            hint="Tensor.register_hook, or a loss.backward() without a context",
        )
    hooks = leaf._backward_hooks
    if hooks and any(isinstance(getattr(hook, "__self__", None), DistributedDataParallel) for hook in hooks.values()):
        raise _not_averaged("delay_all_reduce_named_params=")


def _not_averaged(what: str) -> NotSupported:
    return NotSupported(
        f"DistributedDataParallel with {what} works on .grad outside of its reducer: a backward pass in a context would not "
        "average",
        hint="DistributedDataParallel without it, and DistributedOptimizer",
    )


# -- DDP


class Replica:
    """One DDP module. ``lock``: of who has its parameters' ``.grad`` lent."""

    def __init__(self, module: DistributedDataParallel) -> None:
        self.module: Callable[[], Any] = weakref.ref(module)
        """``None`` once it is gone."""
        self.lock = threading.Lock()

    def parameters(self) -> list[torch.Tensor]:
        """Those that its reducer has."""
        module = self.module()
        return [] if module is None else [each for each in module._module_parameters if each.requires_grad]

    def check(self) -> None:
        """``NotSupported`` for what cannot be right in a context."""
        module = self.module()
        if module is None:
            return
        what = ""
        if module.mixed_precision is not None:
            what = "mixed_precision="
        elif module._delay_all_reduce_params:
            what = "delay_all_reduce_named_params="
        elif module._use_python_reducer:
            what = 'torch._dynamo.config.optimize_ddp = "python_reducer"'
        elif any(hasattr(each, "_in_backward_optimizers") for each in self.parameters()):
            what = "an optimizer in its backward pass"
        if what:
            raise _not_averaged(what)

    def finished(self) -> bool:
        """Whether nothing is being reduced."""
        module = self.module()
        if module is None:
            return True
        try:
            module.reducer._check_reducer_finalized()
        except RuntimeError:
            return False
        return True


class Replicas:
    """The DDP modules of this process, by their parameters. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.known: dict[int, list[Replica]] = {}

    def add(self, module: DistributedDataParallel) -> None:
        """A module that has just got its reducer."""
        made = Replica(module)
        with self._lock:
            known = {id(each): each for found in self.known.values() for each in found}
            of: dict[int, list[Replica]] = {}
            for replica in [*known.values(), made]:
                if replica is made or replica.module() not in (None, module):
                    for parameter in replica.parameters():
                        of.setdefault(id(parameter), []).append(replica)
            self.known = of

    def of(self, leaf: torch.Tensor) -> list[Replica]:
        """Those that ``leaf`` is a parameter of."""
        known = self.known.get(id(leaf))
        return [each for each in known if each.module() is not None] if known else []


replicas = Replicas()


def _noted(method: Any) -> Any:
    """The method of DDP modules, after which they have a reducer."""

    @wraps(method)
    def noted(module: DistributedDataParallel, *args: Any, **named: Any) -> None:
        method(module, *args, **named)
        replicas.add(module)

    return noted


def _note_modules() -> None:
    """Those that are made, copied or unpickled from now on, and those that there are: none without a group."""
    for name in ("__init__", "__setstate__"):
        setattr(DistributedDataParallel, name, _noted(getattr(DistributedDataParallel, name)))
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        frozen = gc.get_freeze_count() > 0
        if frozen:
            gc.unfreeze()  # get_objects passes over what is
        for each in gc.get_objects():
            if issubclass(type(each), DistributedDataParallel) and "reducer" in each.__dict__:
                replicas.add(each)
        if frozen:
            gc.freeze()


_note_modules()


# -- lending


class _Leaf(NamedTuple):
    leaf: torch.Tensor
    own: torch.Tensor | None
    """What its ``.grad`` was."""
    views: bool
    """Gradients of it may be views of a bucket of DDP, which the next backward pass writes to."""


@contextmanager
def lending(context: Any, accumulators: Iterable[Node], more: Iterable[Replica] = ()) -> Iterator[set[int]]:
    """Lend the ``.grad`` of these leaves, and of all parameters of their DDP modules and of ``more``. The ids of the leaves."""
    nodes = list(accumulators)
    found = dict.fromkeys(more)
    for node in nodes:
        found.update(dict.fromkeys(replicas.of(node.variable)))
    for replica in found:
        replica.check()
    leaves = {id(node.variable): (node.variable, False) for node in nodes}
    for replica in found:
        views = bool(getattr(replica.module(), "gradient_as_bucket_view", False))
        leaves.update({id(each): (each, views) for each in replica.parameters()})
    with ExitStack() as stack:
        _lock(stack, [*(divert(node).lock for node in nodes), *(replica.lock for replica in found)])
        lent: list[_Leaf] = []
        try:
            for leaf, views in leaves.values():
                lent.append(_lend(context, leaf, views))
            yield set(leaves)
        finally:
            over = all(replica.finished() for replica in found if any(each.views for each in lent))
            for each in lent:
                _take_back(context, each, over)


def _lock(stack: ExitStack, locks: list[threading.Lock]) -> None:
    # In one order, whoever takes them.
    for lock in sorted({id(lock): lock for lock in locks}.items()):
        stack.enter_context(lock[1])


def _lend(context: Any, leaf: torch.Tensor, views: bool) -> _Leaf:
    own = leaf.grad
    if views and own is not None:
        own = own.clone()
    with context.joint:
        gradient = context.gradients.get(leaf)
        if gradient is not None and not views and sole.references(gradient) > sole.KEPT:
            gradient = gradient.clone()  # somebody looks at it: it will be written to
    use_here((gradient,))
    leaf.grad = gradient
    return _Leaf(leaf, own, views)


def _take_back(context: Any, lent: _Leaf, over: bool) -> None:
    leaf = lent.leaf
    gradient = leaf.grad
    leaf.grad = lent.own
    if gradient is not None and lent.views and over:
        gradient = gradient.clone()
    with context.joint:
        if gradient is None:
            context.gradients.pop(leaf, None)
        else:
            context.gradients[leaf] = gradient


@contextmanager
def undisturbed(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """For somebody else who uses their ``.grad``: nothing of DDP is lent meanwhile."""
    with ExitStack() as stack:
        _lock(stack, [replica.lock for each in parameters for replica in replicas.of(each)])
        yield


# -- backward passes without a context

_engine = Variable._execution_engine
Bring = Callable[[list[Any], bool, list[torch.Tensor]], None]
"""``(references, retain_graph, gradients)``: have their owners run backward; returns when they have."""


class _Batch:
    """What one call of the engine adds to fetched leaves."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.noted: dict[int, torch.Tensor | None] = {}
        """By the id of the hooks: the gradient, where it will be added to another one."""
        self.sums: dict[int, tuple[Fetched, torch.Tensor]] = {}
        """By the reference's number."""
        self.retain_graph: bool = torch._C._autograd._get_current_graph_task_keep_graph()
        _engine.queue_callback(self._leave)

    def add(self, hooks: Fetched, gradient: torch.Tensor) -> None:
        found = self.sums.get(hooks.number)
        self.sums[hooks.number] = (hooks, gradient if found is None else found[1] + gradient)

    def _leave(self) -> None:
        with _batching:
            _batches.pop(self.number, None)
        by_owner: dict[Bring, list[tuple[Any, torch.Tensor]]] = {}
        for hooks, gradient in self.sums.values():
            by_owner.setdefault(hooks.bring, []).append((hooks.reference, gradient))
        for bring, entries in by_owner.items():
            bring([reference for reference, _ in entries], self.retain_graph, [gradient for _, gradient in entries])


_batching = threading.Lock()
_batches: dict[int, _Batch] = {}
"""By the number of the engine's call."""


def _batch() -> _Batch:
    number = torch._C._current_graph_task_id()
    with _batching:
        found = _batches.get(number)
        if found is None:
            found = _batches[number] = _Batch(number)
    return found


class Fetched:
    """The hooks of a leaf that was fetched outside of contexts (``rref.to_here().sum().backward()``). ``reference`` is kept
    while the leaf lives.

    A pass over such a leaf adds to its ``.grad`` here, as in torch. The same goes to the owner of the value: when torch's
    engine has done all of the pass here, each owner is called once, with the sum for each of its values, and runs its own
    backward pass from them into ``.grad``. That may reach what the owner had fetched itself. The pass here returns when all of
    them are over. Owners keep nothing for it: the leaf keeps the reference, and that the value with its graph.

    In a context such a leaf is a leaf like others, and its gradient is the context's."""

    def __init__(self, leaf: torch.Tensor, number: int, reference: Any, bring: Bring) -> None:
        self.number, self.reference, self.bring = number, reference, bring
        self._leaf = weakref.ref(leaf)
        leaf.register_hook(self.before)
        leaf.register_post_accumulate_grad_hook(self.behind)

    @unserializable_hook
    def before(self, gradient: torch.Tensor) -> None:
        """In front of ``.grad``, also for ``torch.autograd.grad``, which adds nothing to it."""
        leaf = self._leaf()
        if engaged.run is None and leaf is not None and leaf.grad is not None:
            _batch().noted[id(self)] = gradient

    def behind(self, leaf: torch.Tensor) -> None:
        """``.grad`` has it."""
        if engaged.run is not None:
            return
        if torch.is_grad_enabled():
            raise NotSupported(
                "create_graph=True through a tensor that was fetched by to_here() outside of a context",
                hint="torch.autograd.grad of a detached copy",
            )
        batch = _batch()
        gradient = batch.noted.pop(id(self), None)
        if gradient is None:
            gradient = leaf.grad
        elif len(leaf._backward_hooks or ()) > 1:
            raise NotSupported(
                "a tensor that was fetched by to_here() outside of a context has a hook, and a .grad already: what the hook "
                "made of the gradient cannot be told",
                hint="set its .grad to None before, or use a context (rdmarpc.autograd.context)",
            )
        assert gradient is not None  # it was just added
        batch.add(self, gradient)
