"""Contexts of distributed autograd: what a worker knows of one forward and backward computation that spans workers.

The worker that enters a context makes it; on every other worker the first call that carries its number makes it. It holds the
gradient edges of the tensors that left (``Sent``) and the gradients of leaves; it does not keep the tensors themselves. It ends
where it was entered, and each worker passes the end on to every worker to which it brought the context, once, without waiting.
When a worker is lost, the contexts that it entered end, and so do those that no other worker brought, because their end would
have come from it.

The end may overtake calls that carry the context and wait for a thread. So numbers that ended are remembered, and a late call
finds no context; neither does a call of a worker that was lost. A thread that was about to send while the context ended tells
the end itself (``send``). Numbers are never used twice.

Two workers may end a context here: the one that entered it, and the first one that brought it here (``Context.by``). The first
bringers form a tree with the entering worker as its root, so the end reaches all workers. The end from any other worker counts
for that worker's own calls only: those that come late find no context. If it counted for all calls, any member could end any
context by its number, even one that is still to be entered.
"""

from __future__ import annotations

import itertools
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import torch

from ..base import here, streams
from ..base.streams import Joint, use_here
from ..links.polling.modes import dispatch_modes, function_modes, unseen
from ..transport import nobody, sole
from .graph import ANCHOR, Sent, Source, received, sent
from .local import Pass

WORKER_SHIFT = 48
_REMEMBERED = 4096
_MAX_BROUGHT = 1 << 16
"""How many contexts one worker may have brought here and not ended."""
MAX_PASSES = 4096
"""How many backward passes of one context may be under way here."""
_serials = itertools.count(1)
# References to a gradient while a prehook has it: of the engine's buffer and of the Python object.
_UNSHARED = 2
T = TypeVar("T")
_native: Any = torch._C


class Name(NamedTuple):
    """The name of a backward pass, which is the same on all workers."""

    context: int
    worker: int
    serial: int
    oldest: int
    """Passes of this context that the same worker began before are over."""
    retain_graph: bool


class Context:
    """The state of one context at this worker. Thread-safe."""

    def __init__(self, number: int, brought_by: int, messages: itertools.count[int], tell: Callable[[int, int], None]) -> None:
        self.number = number
        self.brought_by = {brought_by}
        """The numbers of the workers whose calls carried it here (our own, if it was entered here). Workers that are lost, or
        have said that it is over, are taken out."""
        self.by: int | None = brought_by
        """The first of these: it may end the context here. ``None`` once it is lost; then any of them may."""
        self.sent: dict[int, Sent] = {}
        """The tensors that left here, by the number of their message."""
        self.received: dict[tuple[int, int], Any] = {}
        """Nodes of the local graph, by the worker and the number of the message that brought their tensors. Only for
        inspection (``autograd.DistAutogradContext``)."""
        self.workers: set[int] = set()
        """Numbers of the workers that were told of it by us."""
        self.gradients: dict[torch.Tensor, torch.Tensor] = {}
        self.passes: dict[tuple[int, int], Pass] = {}
        """The backward passes here, by the number of the worker that began each, and its count there."""
        self.oldest: dict[int, int] = {}
        """For each worker the count of its oldest pass that may not be over: all passes that it began before are."""
        self.ended = False
        self.lock = threading.Lock()
        self.joint = self.lock if streams.current is None else Joint(self.lock)
        """The lock for ``gradients``, also for the streams of the threads that add to them."""
        self._messages, self._tell = messages, tell

    def send(self, to: int, tensors: Iterable[torch.Tensor], parts: Sequence[torch.Tensor] = ()) -> int:
        """Note the tensors of a message to worker number ``to``; ``parts``: those that travel in parts. Returns the message's
        number, which is even, and that of its parts is one more; 0 if none of them needs a gradient."""
        self.workers.add(to)
        if self.ended:
            self._tell(to, self.number)  # it ended a moment ago, perhaps before ``to`` was entered: so ``to`` is told here
            return 0
        whole, apart = sent(to, tensors), sent(to, parts) if parts else None
        if whole is None and apart is None:
            return 0
        message = next(self._messages)
        for number, left in ((message, whole), (message + 1, apart)):
            if left is not None:
                self.sent[number] = left
        return message

    def attach(self, worker: int, message: int, tensors: Iterable[torch.Tensor]) -> None:
        """Connect the tensors of a message that arrived, which are leaves so far, to a node of the local graph."""
        leaves = list(dict.fromkeys(filter(attrgetter("requires_grad"), tensors)))  # each once
        if not leaves or not torch.is_grad_enabled():
            return
        received(ANCHOR, leaves, Source(self.number, worker, message))
        self.received[worker, message] = leaves[0].grad_fn

    def accumulate(self, leaf: torch.Tensor, gradient: torch.Tensor, ours: bool = False) -> None:
        """Add to the gradient of a leaf. ``gradient`` is taken over if it is ``ours``, or, from a prehook of the leaf's
        accumulator, if nothing else refers to it; it is copied otherwise."""
        with self.joint:
            before = self.gradients.get(leaf)
            if streams.current is not None:
                use_here((before, gradient))
            if before is None:
                self.gradients[leaf] = gradient if ours or _unshared(gradient) else _copy(gradient)
            elif before.is_sparse and not gradient.is_sparse:
                self.gradients[leaf] = gradient + before
            elif not gradient.is_sparse and sole.references(before) <= sole.KEPT:
                before.add_(gradient)
            else:
                self.gradients[leaf] = before + gradient

    def begin_pass(self, me: int, roots: Iterable[torch.Tensor], retain_graph: bool) -> tuple[Name, Pass]:
        """The name of a backward pass that begins here, at worker number ``me``, and our part of it."""
        run = Pass(self, retain_graph, roots)
        with self.lock:
            self.check()
            serial = next(_serials)  # under the lock: a pass that is counted, and not yet known, would be taken as over
            self.passes[me, serial] = run
            oldest = min([count for worker, count in self.passes if worker == me])
        return Name(self.number, me, serial, oldest, retain_graph), run

    def join_pass(self, me: int, worker: int, serial: int, oldest: int, retain_graph: bool) -> Pass:
        """Our part of a pass that ``worker`` began, made by the first message of it. What that worker began before ``oldest``
        is over. ``RuntimeError`` where the pass, or the context, is over, and where too many are under way."""
        with self.lock:
            self.check()
            if len(self.oldest) >= MAX_PASSES and worker not in self.oldest:
                raise RuntimeError(f"{MAX_PASSES} workers have begun backward passes in autograd context {self.number}")
            oldest = self.oldest[worker] = max(oldest, self.oldest.get(worker, 0))
            for other in tuple(self.passes):
                if other[0] == worker and other[1] < oldest:
                    self.passes.pop(other).end()
            found = self.passes.get((worker, serial))
            if found is None:
                if worker == me or serial < oldest:
                    raise RuntimeError("this backward pass is over")
                if len(self.passes) >= MAX_PASSES:
                    raise RuntimeError(f"{MAX_PASSES} backward passes of autograd context {self.number} are under way")
                found = self.passes[worker, serial] = Pass(self, retain_graph)
        return found

    def end_pass(self, worker: int, serial: int) -> None:
        """End a pass that is over: nothing more of it runs here."""
        with self.lock:
            run = self.passes.pop((worker, serial), None)
        if run is not None:
            run.end()

    def check(self) -> None:
        """Raise ``RuntimeError`` if it has ended."""
        if self.ended:
            raise RuntimeError(f"autograd context {self.number} has ended during a backward pass")

    def close(self, heard_from: int | None = None) -> None:
        """End the context: take nothing more in, stop the passes that run here, let the graph go, and tell the workers to which
        we brought it, but for the one that we heard it from. The gradients go with the context itself, as another thread may
        just be adding one."""
        with self.lock:
            self.ended = True
            passes = list(self.passes.values())
            self.passes.clear()
        for each in passes:
            each.end()
        self.sent.clear()
        self.received.clear()
        for worker in list(self.workers):
            if worker != heard_from:
                self._tell(worker, self.number)

    def __repr__(self) -> str:
        return f"Context({self.number})"


def _unshared(gradient: torch.Tensor) -> bool:
    if gradient._use_count() > _UNSHARED:  # type: ignore[attr-defined]
        return False
    if gradient.layout is torch.sparse_coo:
        return gradient._indices().is_contiguous() and gradient._values().is_contiguous()
    return gradient.layout is torch.strided and gradient.is_contiguous()


def _copy(gradient: torch.Tensor) -> torch.Tensor:
    if gradient.layout is torch.strided:
        return gradient.clone(memory_format=torch.contiguous_format)
    return gradient.clone()


class _Current(threading.local):
    context: Context | None = None


current = _Current()
"""The context that this thread is in."""


def plainly(run: Callable[[], T], context: Context | None = None) -> T:
    """``run()``, which completes a future, as on a thread of our own, in that autograd context: any thread may do it (whoever
    waits, under ``no_grad``, say), and users' callbacks must not find out which one did."""
    outer, recorded = current.context, torch.is_grad_enabled()
    current.context = None if context is None or context.ended else context
    try:
        moded = function_modes() or dispatch_modes() or torch.is_inference_mode_enabled()
        if moded or _native._is_any_autocast_enabled():
            with torch.inference_mode(False), _native._DisableAutocast(), unseen(), torch.enable_grad():
                return run()
        if not recorded:
            with torch.enable_grad():
                return run()
        return run()
    finally:
        current.context = outer


class _Recent(OrderedDict[int, None]):
    """The numbers that were added last. Guarded by its owner's lock."""

    def add(self, number: int) -> None:
        self[number] = None
        if len(self) > _REMEMBERED:
            self.popitem(last=False)


class Contexts:
    """The contexts that this worker knows. Thread-safe. ``tell(worker, number)`` passes the end of one on; it must not
    raise."""

    def __init__(self, me: int, tell: Callable[[int, int], None]) -> None:
        self._me, self._tell = me, tell
        self.live: dict[int, Context] = {}
        self._gone: set[int] = set()
        """Numbers of the workers that are lost."""
        # Not from 0: a tensor of an earlier life, of this process or of another one under this number, may still be here.
        self._count = itertools.count((me << WORKER_SHIFT) + secrets.randbits(WORKER_SHIFT - 1))
        self._messages = itertools.count(2, 2)
        self._past = _Recent()
        self._said: dict[int, _Recent] = {}
        """For each worker the contexts that it said are over, but has no right to end for others."""
        self._lock = threading.Lock()
        self.refused = 0
        """The number of ends that did not count for others, and (``refused_gradients``) of gradients that did not come from the
        worker that had the tensors."""
        self.refused_gradients = 0
        self.surveys = 0
        """The number of backward passes that had to survey the workers (``gradients/waves``)."""

    def new(self) -> Context:
        number = next(self._count)
        made = self.live[number] = Context(number, self._me, self._messages, self._tell)
        return made

    def join(self, number: int, worker: int) -> Context | None:
        """The context that a call of a worker carries, made if need be; ``None`` if it has ended, or the worker has.
        ``RuntimeError`` where that worker has brought too many."""
        found = self.live.get(number)
        if found is not None and worker in found.brought_by:
            return found
        with self._lock:
            if number in self._past or worker in self._gone or number in self._said.get(worker, ()):
                return None
            found = self.live.get(number)
            if found is None:
                if len(self.live) >= _MAX_BROUGHT and sum(each.by == worker for each in self.live.values()) >= _MAX_BROUGHT:
                    raise RuntimeError(f"worker number {worker} has {_MAX_BROUGHT} autograd contexts here that have not ended")
                found = self.live[number] = Context(number, worker, self._messages, self._tell)
            found.brought_by.add(worker)
            return found

    def find(self, number: int) -> Context:
        """The context of that number. Raises ``RuntimeError`` if there is none."""
        if here.refusals:
            here.refuse("it uses a context of distributed autograd")
        found = self.live.get(number)
        if found is None:
            raise RuntimeError(f"Could not find autograd context with id: {number}")
        return found

    def end(self, number: int, heard_from: int | None = None) -> None:
        """End a context here, and at all workers to which we brought it. ``heard_from``: the worker that said that it is over,
        if it was not our own decision."""
        with self._lock:
            if number in self._past or (heard_from is not None and not self._believed(number, heard_from)):
                return
            self._past.add(number)
            context = self.live.pop(number, None)
        if context is not None:
            context.close(heard_from)

    def _believed(self, number: int, worker: int) -> bool:
        """Whether a worker that says that a context is over, which it was not, ends it for all. If not, only its own calls that
        come late will not find the context. Call it with the lock held."""
        if worker in self._gone:
            return False
        found = self.live.get(number)
        if number >> WORKER_SHIFT == worker or (found is not None and found.by == worker):
            return True
        if found is not None and worker in found.brought_by:
            if found.by is None:
                return True
            found.brought_by.discard(worker)
        else:
            self.refused += 1
        self._said.setdefault(worker, _Recent()).add(number)
        return False

    def lost(self, worker: int) -> None:
        """A worker is gone, and with it the contexts that it had entered, and those that only it had brought."""
        ended = []
        with self._lock:
            self._gone.add(worker)
            self._said.pop(worker, None)
            for context in list(self.live.values()):
                context.brought_by.discard(worker)
                if context.by == worker:
                    context.by = None
                if context.number >> WORKER_SHIFT == worker or not context.brought_by:
                    self._past.add(context.number)
                    ended.append(self.live.pop(context.number))
        for context in ended:
            context.close(worker)

    def clear(self) -> None:
        """The end of this worker: nobody is told of anything any more."""
        self._tell = nobody
        with self._lock:
            left = list(self.live.values())
            self.live.clear()
        for context in left:
            context.workers.clear()
            context.close()

    @property
    def largest(self) -> int:
        """The largest number that we may draw."""
        return (self._me << WORKER_SHIFT) + (1 << WORKER_SHIFT) - 1
