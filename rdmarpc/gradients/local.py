"""The part of a backward pass that runs on one worker: gradients come in at messages, the local engine runs, gradients leave.

A worker does not know which of the messages that it sent will get gradients, nor when. So that each node runs once, with all
that flows into it, a node *waits* while an unanswered message that it took part in might still bring a gradient to it; what has
arrived on its edges is *held*. Leaves do not wait: adding up is all they do. But the hooks of a leaf see the whole sum, once,
and so does what stands behind it (``behind``: DDP).

Usually nothing waits, and one call of the engine runs everything that the arrived gradients reach. Else only the nodes in front
of those that wait run. The engine cannot stop at an edge: it runs at least the tensor hooks behind it. So gradients for waiting
nodes are taken off by hooks behind the nodes in front of them, raw, and the engine is halted before it comes to the waiting
ones: of the nodes that are ready it takes the one with the largest sequence number, and so, as all run on one thread, a
node that raises comes after those that are to run, and before those that are not.

Invariants: (1) a node runs in at most one call of the engine, after everything in ``held`` for it is complete; (2) one thread
at a time runs a pass here (``_running``); who brings gradients meanwhile leaves them to it; (3) what is in ``held`` belongs to
the pass alone, and is summed in order of arrival.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.autograd.variable import Variable

from ..base import streams
from ..base.streams import Joint, use_here
from ..transport import NotSupported
from .behind import ACCUMULATE, SINK, Replica, adds_up, lending, refuse_late_hooks, replicas, watched
from .graph import (
    ANCHOR,
    BEHIND,
    NOTHING_MORE,
    RECEIVED,
    REENTRANT,
    Halted,
    Node,
    Sent,
    Source,
    engaged,
    halting,
    label,
    quieten,
    reach,
)
from .graph import edge as edge_of

_engine = Variable._execution_engine
_AFTER, _HALT, _BEFORE = range(3)
_NONE: set[int] = set()
Gradients = tuple[torch.Tensor | None, ...]
_FREED = (
    "Trying to backward through the graph a second time (or directly access saved tensors after they have already been freed): "
    "what was sent has had its gradient. Specify retain_graph=True if you need to backward through the graph a second time."
)


@functools.cache
def first_call() -> None:
    """Prepare the engine. One thread calls this before anything else of this module. It is not done on import, because the
    engine starts a thread for each GPU and cannot be used in forked children afterwards."""
    # With the first edge that it is given torch (2.13) makes a type, behind the guard of a C++ static; making it can start the
    # garbage collector, and that can let go of the GIL. Two first calls at once could so wait for each other for ever.
    with torch.enable_grad():
        edge = get_gradient_edge(ANCHOR.clone())
    _engine.run_backward((edge,), (NOTHING_MORE.new_zeros(ANCHOR.shape),), False, False, (BEHIND,), True, True)


_ordering = threading.Condition()
_ordered: set[Node] = set()
"""Nodes whose sequence numbers are set for a run. Passes over one graph (``retain_graph``) that share some take turns."""


class ForeignGradients(RuntimeError):
    """Gradients came from a worker that never had the tensors."""


Emitted = tuple[int, int, Gradients]
"""Gradients of received tensors, to be sent to the worker that sent the tensors, and the number of its message."""


class Pass:
    """A backward pass at one worker. Thread-safe."""

    def __init__(self, context: Any, retain_graph: bool, roots: Iterable[torch.Tensor] = ()) -> None:
        """``context``: the ``Context`` that it belongs to. ``roots``: where it begins, if it does here."""
        self.context, self.retain_graph = context, retain_graph
        self.held: dict[tuple[Node, int], torch.Tensor] = {}
        """Gradients that have arrived on edges into nodes that have not run: (node, number of its output)."""
        self.collected: set[int] = set()
        """Leaves (by id) whose gradients are being held, while the engine runs."""
        self.lent: set[int] = _NONE
        """Leaves (by id) whose ``.grad`` is lent to the context, while the engine runs."""
        self.static: list[Replica] = []
        """DDP modules whose reducers wait for the whole pass: the first of a static graph."""
        self._collecting: dict[int, Node] = {}
        self._owners: list[list[GradientEdge]] = []
        """The edges that keep alive the nodes (``graph.edge``) for which gradients are held."""
        self._arrived: set[int] = set()
        self._expected: set[int] | None = None
        self._labels: dict[Node, int] = {}
        """For each node the unanswered messages that may bring gradients to it; ``_leaves``: for each leaf those that took it
        along itself. One bit a message (``_labelled``)."""
        self._leaves: dict[torch.Tensor, int] = {}
        self._labelled: dict[int, int] = {}
        self._emitted: list[Emitted] = []
        self._running = False
        self._over = False
        self._lock = threading.Lock()
        self._joint = self._lock if streams.current is None else Joint(self._lock)
        """The lock, also for the streams of the threads that bring gradients, run nodes, and take what the nodes emit."""
        for root in roots:
            edge = edge_of(root)
            self._owners.append([edge])
            self._hold(edge.node, edge.output_nr, torch.ones_like(root))

    # -- gradients in

    def arrive(self, worker: int, message: int, gradients: Gradients) -> None:
        """Put in the gradients of the tensors of a message that left here; ``None`` for tensors that the roots do not depend
        on. Raises ``ForeignGradients`` if they come from another ``worker`` than the one that the message went to,
        ``RuntimeError`` if the message's part of the graph was freed."""
        with self._joint:
            if self._over:
                return
            known = self.context.sent.get(message)
            if known is not None and known.to != worker:
                text = f"worker number {worker} brings gradients of tensors that went to worker number {known.to}"
                raise ForeignGradients(text)
            sent = self.context.sent.get(message) if self.retain_graph else self.context.sent.pop(message, None)
            if sent is None:
                self.context.check()
                raise RuntimeError(_FREED)
            self._arrived.add(message)
            owners: list[GradientEdge] = []
            memory: set[int] = set()
            for target, gradient in zip(sent.targets, gradients, strict=True):
                if gradient is None:
                    continue
                if isinstance(target, torch.Tensor):
                    if adds_up(target):
                        self.context.accumulate(target, gradient, ours=_new(gradient, memory))
                        continue
                    target = edge_of(target)
                owners.append(target)
                self._hold(target.node, target.output_nr, gradient)
            if owners:
                self._owners.append(owners)

    def expect(self, messages: set[int]) -> None:
        """Note that, of the messages that have had no gradient yet, only these will get one."""
        with self._lock:
            self._expected = messages

    def _hold(self, node: Node, output: int, gradient: torch.Tensor) -> None:
        before = self.held.get((node, output))
        if streams.current is not None:
            use_here((before, gradient))
        self.held[node, output] = gradient if before is None else before + gradient

    def starts(self) -> list[Node]:
        """The nodes for which gradients are held."""
        with self._lock:
            return [node for node, _ in self.held]

    def end(self) -> None:
        """End the pass, because it failed or a later one takes its place. Nothing more runs."""
        with self._lock:
            self._over = True
            self.held.clear()
            self.static.clear()
            self._labels.clear()
            self._leaves.clear()
            self._owners.clear()

    # -- running

    def run(self, leave: Callable[[list[Emitted]], None]) -> None:
        """Run the nodes that can run. ``leave`` is given the gradients that each call of the engine brought to received
        tensors. Returns at once if another thread is running nodes; that thread then runs these too. Raises what nodes and
        hooks raise."""
        while True:
            with self._joint:
                if self._running or self._over:
                    return
                if not self.held:
                    self._owners.clear()
                    if not self.static:
                        return
                work = self._next() if self.held else self._next_static()
                if work is None:
                    return
                self._running = True
            outer, engaged.run = engaged.run, self
            # The engine would run nodes of GPU tensors on threads of its own, which know nothing of this pass, and in an order
            # of their own.
            threads = torch._C._is_multithreading_enabled()
            torch._C._set_multithreading_enabled(False)
            try:
                work()
            finally:
                torch._C._set_multithreading_enabled(threads)
                engaged.run = outer
                self.collected.clear()
                self._collecting.clear()
                self.lent = _NONE
                with self._joint:
                    self._running = False
                    emitted, self._emitted = self._emitted, []
            leave(emitted)

    def _next(self) -> Callable[[], None] | None:
        """Take out of ``held`` the gradients whose nodes can run, and return the call that runs them; ``None`` if there are
        none. Call it with the lock held."""
        waits = self._waiting()
        ready = {edge for edge in self.held if not waits(edge[0])} if waits else set(self.held)
        if not ready:
            return None
        starts = set(map(itemgetter(0), ready))
        reached = reach(starts)
        held_up = list(filter(waits, reached - starts)) if waits else []
        behind: list[Node] = []
        for node in reached:
            if type(node) is ACCUMULATE:
                refuse_late_hooks(node.variable)
                if watched(node):
                    behind.append(node)
            elif type(node) is SINK:
                self._note_static(node)
            elif type(node) is REENTRANT:
                raise NotSupported(
                    "a reentrant checkpoint runs a backward pass of its own, into .grad",
                    hint="torch.utils.checkpoint.checkpoint(..., use_reentrant=False) works",
                )
        if held_up and any(type(node) is not ACCUMULATE or node in behind for node in held_up):
            blocked = set(held_up)
            part = reach({node for node in starts if not _ends(node)}, stop=blocked)
            part = {node for node in part if node not in blocked and not _ends(node)}
            if part:
                taken = [(edge, self.held.pop(edge)) for edge in ready if edge[0] in part]
                return partial(self._run_part, taken, part)
            ready = {edge for edge in ready if _ends(edge[0])}
            behind = [node for node in behind if any(node is edge[0] for edge in ready)]
            held_up = []
        for node in held_up:
            leaf = node.variable
            quieten(leaf)
            self.collected.add(id(leaf))
            self._collecting[id(leaf)] = node
        taken = list(zip(ready, map(self.held.pop, ready)))
        return partial(self._run_all, taken, behind)

    def _note_static(self, sink: Node) -> None:
        """In the first pass of a static graph, DDP would reduce at the end of the call of the engine that comes to its sink. It
        has to be the end of the pass here."""
        module = sink.ddp_weakref()
        if module is None or not module.static_graph or module._static_graph_delay_allreduce_enqueued:
            return
        module._static_graph_delay_allreduce_enqueued = True
        self.static += [each for each in replicas.of(next(iter(module._module_parameters))) if each.module() is module]

    def _next_static(self) -> Callable[[], None] | None:
        """With the lock held: the reduction of a DDP module that nothing more can come to."""
        waits = self._waiting()
        labelled = [*self._labels, *[edge_of(leaf).node for leaf in self._leaves]] if waits else []
        held_up = {id(node.variable) for node in labelled if type(node) is ACCUMULATE and waits and waits(node)}
        for each in self.static:
            if held_up.isdisjoint(map(id, each.parameters())):
                self.static.remove(each)
                return partial(self._reduce, each)
        return None

    def _reduce(self, replica: Replica) -> None:
        with torch.no_grad(), lending(self.context, (), [replica]):
            replica.module().reducer._delay_all_reduce()

    def _waiting(self) -> Callable[[Node], bool] | None:
        """Whether a node waits for a message; ``None`` if none can."""
        sent = self.context.sent.copy()  # others change it
        unanswered = sent.keys() - self._arrived
        if self._expected is not None:
            unanswered &= self._expected
        if not unanswered:
            return None
        if not self._labelled.keys() >= unanswered:
            # New ones: they were sent since, by a forward pass that goes on.
            self._labelled = dict(zip(unanswered, itertools.count()))
            self._label(sent)
        mask = 0
        for message in unanswered:
            mask |= 1 << self._labelled[message]
        labels, leaves = self._labels, self._leaves

        def waits(node: Node) -> bool:
            bits = labels.get(node, 0)
            if type(node) is not ACCUMULATE:
                return bits & mask != 0
            leaf = node.variable
            return (bits | leaves.get(leaf, 0)) & mask != 0 and (bool(leaf._backward_hooks) or watched(node))

        return waits

    def _label(self, sent: dict[int, Sent]) -> None:
        """Look up what gets gradients of the targets of each message of ``_labelled``. Looking up the accumulator of a leaf is
        dear, and most passes never come to one of these."""
        nodes: list[list[Node]] = []
        self._leaves = {}
        for message, bit in self._labelled.items():
            nodes.append([])
            for target in sent[message].targets:
                if isinstance(target, GradientEdge):
                    nodes[-1].append(target.node)
                else:
                    self._leaves[target] = self._leaves.get(target, 0) | 1 << bit
        self._labels = label(nodes) if any(nodes) else {}

    def _run_all(self, taken: list[tuple[tuple[Node, int], torch.Tensor]], behind: list[Node]) -> None:
        """``behind``: accumulators that are watched."""
        edges, gradients = zip(*taken)
        edges = tuple(itertools.starmap(GradientEdge, edges))
        if streams.current is not None:
            use_here(gradients)
        taken.clear()
        with lending(self.context, behind) if behind else nullcontext(_NONE) as self.lent:
            _engine.run_backward(edges, gradients, self.retain_graph, False, (), True, True)

    def _run_part(self, taken: list[tuple[tuple[Node, int], torch.Tensor]], part: set[Node]) -> None:
        """Run the nodes of ``part``, and hold what they bring to others."""
        use_here(gradient for _, gradient in taken)
        exits: dict[Node, list[int]] = {}
        beyond: dict[tuple[Node, int], None] = {}
        for node in part:
            for index, edge in enumerate(node.next_functions):
                if edge[0] is not None and edge[0] not in part:
                    exits.setdefault(node, []).append(index)
                    beyond[edge] = None
        nodes = part | {node for node, _ in beyond}
        with _ordering:
            _ordering.wait_for(lambda: _ordered.isdisjoint(nodes))
            _ordered.update(nodes)
        hooks: list[Any] = []
        order = {node: node._sequence_nr() for node, _ in beyond if type(node) is not ACCUMULATE}
        try:
            for node, indices in exits.items():
                hooks.append(node.register_hook(self._taker(node.next_functions, indices)))
            for node in order:
                node._set_sequence_nr(_AFTER)
            for node, _ in beyond:
                if type(node) is ACCUMULATE:  # goes first whatever its number; it is not run, but the hooks of its leaf are
                    quieten(node.variable)
            for node in part:
                node._set_sequence_nr(max(node._sequence_nr(), _BEFORE))
            with suppress(Halted):
                _engine.run_backward(
                    (*[GradientEdge(*edge) for edge, _ in taken], halting(_HALT)),
                    (*[gradient for _, gradient in taken], NOTHING_MORE),
                    self.retain_graph,
                    False,
                    (*[GradientEdge(*edge) for edge in beyond], BEHIND),
                    True,
                    False,
                )
        finally:
            for hook in hooks:
                hook.remove()
            for node, number in order.items():
                node._set_sequence_nr(number)
            with _ordering:
                _ordered.difference_update(nodes)
                _ordering.notify_all()

    def _taker(self, following: tuple[tuple[Node, int], ...], indices: list[int]) -> Callable[..., Any]:
        """A hook behind a node that takes what it brings to some of the nodes that follow."""

        def take(brought: Gradients, _: Gradients) -> Gradients | None:
            if engaged.run is not self:
                return None
            with self._joint:
                for index in indices:
                    gradient = brought[index]
                    if gradient is not None:
                        self._hold(*following[index], gradient)
            return tuple([None if index in indices else gradient for index, gradient in enumerate(brought)])

        return take

    # -- called while the engine runs

    def emit(self, source: Source, gradients: Gradients) -> None:
        if source.context != self.context.number:
            raise RuntimeError(
                f"a tensor that was received in autograd context {source.context} takes part in a backward pass of context "
                f"{self.context.number}: call backward in the context of the forward pass, or detach() the tensor"
            )
        with self._joint:
            self._emitted.append((source.worker, source.message, gradients))

    def accumulate(self, leaf: torch.Tensor, gradient: torch.Tensor) -> None:
        if id(leaf) in self.collected:
            with self._joint:
                self._hold(self._collecting[id(leaf)], 0, gradient)
        else:
            self.context.accumulate(leaf, gradient)


def _new(gradient: torch.Tensor, memory: set[int]) -> bool:
    """Whether a gradient that arrived can be kept as it is: it is dense, and no other of its message lies in that memory."""
    if gradient.layout is not torch.strided or not gradient.is_contiguous():
        return False
    storage = gradient.untyped_storage()._cdata
    if storage in memory:
        return False
    memory.add(storage)
    return True


def _ends(node: Node) -> bool:
    return type(node) is ACCUMULATE or type(node) is RECEIVED
