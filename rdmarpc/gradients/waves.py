"""How a backward pass goes from worker to worker.

The gradients of received tensors go to the worker that sent the tensors, in a frame of their own kind (``deliver``): into
landing places granted ahead, as arguments do. It is answered, as a call is, when everything that it set off is done, there and
on further workers. Gradients for the asker itself ride in the answer. So the worker that began the pass knows when it is over,
and no thread waits for a gradient: the work that one ``deliver`` sets off is a ``Wave``, which goes on when an answer comes.

Nodes wait (``gradients/local``) for messages that may never get a gradient. If all waves are over and some worker still holds
gradients, the worker that began the pass asks (``_survey``) which messages can be reached from the held gradients, on all
workers, until no new ones are found. It tells the holders (``_settle``), and no node then waits for a message that will not get
a gradient. As the whole graph has no cycles, some node can run. If nodes bring undefined gradients to a message nothing is
sent, and the next survey finds that out. In most programs nothing is held when the waves are over, and no worker is asked.

Invariants: (1) a message's gradients are delivered at most once a pass; (2) a wave is answered once, when nothing that it
started is under way, or at its first error; (3) work left to another thread that runs the pass belongs to that thread's wave,
which is answered in its turn.

Rights: the gradients of a message must come from the worker that the message went to (``Pass.arrive``), as the link shows
(``functions.TOLD_WHO``). Only the worker that began a pass may call ``_survey`` and ``_settle``. Within a context its workers
trust each other's account of which passes are over.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from ..base import here
from ..functions import TOLD_WHO
from ..links.frames import CONTROL
from ..message import errors
from .behind import inner_edges
from .context import Context, Name
from .graph import RECEIVED, reach
from .local import Emitted, ForeignGradients, Gradients, Pass

# What stands where a call has its function: of a GRADIENTS frame (_PASS, then as _GRADIENTS says) and of its answer (_ANSWER,
# an error, _HOLDER for each, then as _GRADIENTS says: _ENTRY for each message, then _PLACE for each gradient).
_PASS, _ANSWER, _GRADIENTS, _ENTRY, _PLACE = map(struct.Struct, ("<QQQQ?", "<II", "<I", "<QI", "<I"))
_UNDEFINED = 0xFFFFFFFF
_HOLDER = struct.Struct("<Q")
_REACHED = struct.Struct("<QQ")  # worker, message
_SMALL = 1_024  # elements
_MAX_SURVEYS = 1_000  # each makes at least one node run


class Reply(NamedTuple):
    arrivals: list[tuple[int, Gradients]]
    """Gradients for the asker: the numbers of messages that it sent, and their gradients."""
    holders: set[int]
    """The numbers of the workers that may hold gradients."""


def _pack(entries: Sequence[tuple[int, Gradients]]) -> tuple[bytes, tuple[torch.Tensor, ...]]:
    """The messages and the gradients of them, each once (it may be that of both inputs of an addition), and where it stands."""
    heads, places = [_GRADIENTS.pack(len(entries))], []
    gradients: list[torch.Tensor] = []
    known: dict[int, int] = {}
    for message, some in entries:
        heads.append(_ENTRY.pack(message, len(some)))
        for gradient in some:
            if gradient is None:
                places.append(_PLACE.pack(_UNDEFINED))
                continue
            place = known.setdefault(id(gradient), len(gradients))
            places.append(_PLACE.pack(place))
            if place == len(gradients):
                # A small gradient is sent dense: for one that is expanded, sending only its memory would save nothing.
                small = gradient.layout is torch.strided and gradient.numel() <= _SMALL
                gradients.append(gradient.contiguous() if small else gradient)
    return b"".join(heads + places), tuple(gradients)


def _unpack(packed: bytes, gradients: Sequence[torch.Tensor]) -> list[tuple[int, Gradients]]:
    """Raises ``IndexError`` and ``struct.error`` for what ``_pack`` has not made."""
    (count,) = _GRADIENTS.unpack_from(packed)
    start = _GRADIENTS.size + count * _ENTRY.size
    places, entries = _PLACE.iter_unpack(packed[start:]), []
    for message, count in _ENTRY.iter_unpack(packed[_GRADIENTS.size : start]):
        some: list[torch.Tensor | None] = []
        for (place,) in islice(places, count):
            some.append(None if place == _UNDEFINED else gradients[place])
        entries.append((message, tuple(some)))
    return entries


class Wave:
    """The work that one call sets off. ``asker``: the number of the worker that waits for it. It runs on the thread that starts
    it, and on threads of the pool as answers come. Subclasses say how calls are made and what happens at the end."""

    def __init__(self, agent: Any, name: Name, run: Pass, asker: int | None) -> None:
        self.agent, self.name, self.run_, self.asker = agent, name, run, asker
        self.header = _PASS.pack(*name)
        self.holders: set[int] = set()
        self._back: list[tuple[int, Gradients]] = []
        self._open = 1
        self._lock = threading.Lock()

    # -- how it goes on

    def go_on(self, calls: Calls = ()) -> None:
        """Make these calls, run what can run here, and send on what comes out."""
        for call in calls:
            with self._lock:
                self._open += 1
            self.call(*call)
        back: list[tuple[int, Gradients]] = []
        self.run_.run(partial(self._leave, back))
        if not back:
            return
        with self._lock:
            last = self._open == 1
            if last:
                self._back += back
        if not last:
            assert self.asker is not None
            self._send(self.asker, back)  # it need not wait for others

    def _leave(self, back: list[tuple[int, Gradients]], emitted: list[Emitted]) -> None:
        groups: dict[int, list[tuple[int, Gradients]]] = {}
        for worker, message, gradients in emitted:
            groups.setdefault(worker, []).append((message, gradients))
        for worker, entries in groups.items():
            if worker == self.agent.number:
                for message, gradients in entries:
                    self.run_.arrive(worker, message, gradients)
            elif worker == self.asker:
                back += entries
            else:
                self._send(worker, entries)

    def _send(self, worker: int, entries: list[tuple[int, Gradients]]) -> None:
        with self._lock:
            self._open += 1
        heads, gradients = _pack(entries)
        self.call(worker, deliver, (self.header + heads, gradients))

    def heard(self, worker: int, answer: tuple[bytes, Any]) -> None:
        """An answer to one of our calls (``_answered``) came from ``worker``: several gradients as a tuple. Raises what ended
        the pass."""
        packed, gradients = answer
        error, holders = _ANSWER.unpack_from(packed)
        if error:
            raise errors.load_located(packed[_ANSWER.size :])
        end = _ANSWER.size + holders * _HOLDER.size
        if holders:
            self.holders |= _unpacked(packed[_ANSWER.size : end])
        for message, some in _unpack(packed[end:], (gradients,) if isinstance(gradients, torch.Tensor) else gradients or ()):
            self.run_.arrive(worker, message, some)
        if self.run_.held or self.run_.static:
            self.go_on()

    def reply(self) -> Reply:
        """The answer to the asker. Raises if the context has ended meanwhile, because gradients may have been lost."""
        self.run_.context.check()
        if self.run_.held or self.run_.static:  # something of the pass may still run here
            self.holders.add(self.agent.number)
        return Reply(self._back, self.holders)

    def call(self, worker: int, function: Any, args: tuple[Any, ...]) -> None:
        """Start a call. The code that gets its answer calls ``heard``."""
        raise NotImplementedError


class Sprung(Wave):
    """A wave that no thread waits for: ``future`` is completed at its end, with a ``Reply`` or by its first error."""

    result: Reply | Exception | None = None
    future: torch.futures.Future[Reply | Exception] | None = None

    def start(self) -> Reply | Exception | torch.futures.Future[Reply | Exception]:
        """Begin with what the pass holds already. The result, or a future of it; errors are ``located``."""
        try:
            self.go_on()
        except BaseException as error:
            self._fail(error)
        else:
            self._close()
        with self._lock:
            if self.result is not None:
                return self.result
            self.future = torch.futures.Future()
            return self.future

    def call(self, worker: int, function: Any, args: tuple[Any, ...]) -> None:
        to = self.agent.group.worker(worker)
        self.agent.call_async(to, function, args, None, -1.0, control=True).add_done_callback(partial(self._answered, worker))

    def _answered(self, worker: int, future: torch.futures.Future[Any]) -> None:
        try:
            self.heard(worker, future.value())
        except BaseException as error:
            self._fail(error)
        self._close()

    def _close(self) -> None:
        """One call less is under way, or its beginning is over."""
        with self._lock:
            self._open -= 1
            if self._open:
                return
        try:
            self._end(self.reply())
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        # As it crosses: what was raised holds frames, and these hold us.
        self._end(_located(self.agent, error))

    def _end(self, result: Reply | Exception) -> None:
        with self._lock:
            if self.result is not None:
                return
            self.result = result
            future = self.future
        if isinstance(result, Exception):
            self.run_.end()
        if future is not None:
            future.set_result(result)


class Driven(Wave):
    """The wave of the thread that calls ``backward``, which makes it go on."""

    _calls: list[here.Call]
    """Those under way."""

    @property
    def done(self) -> bool:
        """Whether one of its calls is."""
        return any(call.done for call in self._calls)

    def call(self, worker: int, function: Any, args: tuple[Any, ...]) -> None:
        self._calls.append(self.agent.start(self.agent.group.worker(worker), function, args, None, -1.0, CONTROL))

    def drive(self, calls: Calls) -> Reply:
        """Run the wave until all is done, beginning with ``calls``. Raises the first error."""
        self._calls = []
        try:
            self.go_on(calls)
            while self._calls:
                call = self._calls[0]
                if len(self._calls) > 1:
                    deadlines = [call.deadline for call in self._calls if call.deadline is not None]
                    self.agent.progress.wait_for(self, min(deadlines, default=None))
                    call = next((each for each in self._calls if each.done), call)
                self._calls.remove(call)
                answer = call.result()
                assert call.link is not None  # what was never sent has no result
                self.heard(call.link.worker, answer)
            return self.reply()
        finally:
            for call in self._calls:
                call.caller.abandon(call)


# -- one pass, as a whole

Calls = Sequence[tuple[int, Callable[..., Any], tuple[Any, ...]]]


def _located(agent: Any, error: BaseException) -> Exception:
    """The error as it crosses. Counts gradients that were not their sender's to bring, where that was found out."""
    agent.contexts.refused_gradients += type(error) is ForeignGradients
    return errors.located(error, agent.me.id, agent.name)


def backward(agent: Any, context: Context, roots: list[torch.Tensor], retain_graph: bool) -> None:
    """Returns when all gradients are in the context, on all workers. Raises ``BackwardError``."""
    name, run = context.begin_pass(agent.number, roots, retain_graph)
    try:
        calls: Calls = []
        for _ in range(_MAX_SURVEYS):
            holders = Driven(agent, name, run, None).drive(calls).holders
            if not holders:
                return
            calls = _settlement(agent, name, run, holders)
        raise RuntimeError(
            f"gradients are held on {[agent.group.name_of(worker) for worker in holders]} that nothing waits for"
        )
    except Exception as error:
        raise _located(agent, error) from error
    finally:
        context.end_pass(name.worker, name.serial)


# -- what is held for messages that will get no gradient


def _settlement(agent: Any, name: Name, run: Pass, holders: set[int]) -> Calls:
    """Find out which messages can still get a gradient. Tells our own part; returns the calls that tell the other holders, and
    set off what can run there."""
    agent.contexts.surveys += 1
    header = _PASS.pack(*name)
    expected: dict[int, set[int]] = {}
    asking = [(worker, b"", True) for worker in holders]
    while asking:
        found: dict[int, set[int]] = {}
        for answer in [_ask(agent, worker, (header, messages, held)) for worker, messages, held in asking]:
            for worker, message in _REACHED.iter_unpack(answer.wait() if isinstance(answer, torch.futures.Future) else answer):
                found.setdefault(worker, set()).add(message)
        asking = []
        for worker, messages in found.items():
            fresh = messages - expected.setdefault(worker, set())
            if fresh:
                expected[worker] |= fresh
                asking.append((worker, _packed(fresh), False))
    if agent.number in holders:
        run.expect(expected.get(agent.number, set()))
    told = [worker for worker in holders if worker != agent.number]
    return [(worker, _settle, (header, _packed(expected.get(worker, set())))) for worker in told]


def _packed(numbers: Iterable[int]) -> bytes:
    return b"".join(map(_HOLDER.pack, numbers))


def _unpacked(packed: bytes) -> set[int]:
    return set(map(itemgetter(0), _HOLDER.iter_unpack(packed)))


def _ask(agent: Any, worker: int, args: tuple[bytes, bytes, bool]) -> Any:
    if worker == agent.number:
        return _survey(worker, *args)
    return agent.call_async(agent.group.worker(worker), _survey, args, None, -1.0, control=True)


# The functions that other workers call here. The first argument is the number of the caller.


def _load(sender: int, header: bytes) -> tuple[Any, Context, Name]:
    """Raises ``ForeignGradients`` if the sender has not begun the pass."""
    name = Name(*_PASS.unpack(header))
    agent = here.current()
    if name.worker != sender:
        raise ForeignGradients(f"worker number {sender} speaks for a backward pass that worker number {name.worker} began")
    return agent, agent.contexts.find(name.context), name


def deliver(sender: int, packed: bytes, gradients: Sequence[torch.Tensor]) -> Any:
    """Take gradients of messages that this worker sent. Answers when all that they set off is done. A call of it is no request:
    both sides of calling know it as what a ``GRADIENTS`` frame stands for."""
    try:
        name, agent = Name(*_PASS.unpack_from(packed)), here.current()
        context = agent.contexts.find(name.context)
        if sender not in context.workers:
            raise ForeignGradients(f"worker number {sender} brings gradients in a context that it did not get from here")
        run = context.join_pass(agent.number, *name[1:])
        for message, some in _unpack(packed[_PASS.size :], gradients):
            run.arrive(sender, message, some)
        return _answered(Sprung(agent, name, run, sender).start())
    except Exception as error:
        return _answered(_located(here.current(), error))


def _settle(sender: int, header: bytes, messages: bytes) -> Any:
    """Note that, of the messages that this worker sent and that had no gradient yet, only ``messages`` will get one. Then run
    what can run, as ``deliver`` does."""
    try:
        agent, context, name = _load(sender, header)
        run = context.join_pass(agent.number, *name[1:])
        run.expect(_unpacked(messages))
        return _answered(Sprung(agent, name, run, sender).start())
    except Exception as error:
        return _answered(_located(here.current(), error))


def _survey(sender: int, header: bytes, messages: bytes, held: bool) -> bytes:
    """The messages to this worker that backward reaches from ``messages``, which it sent, and, if ``held``, from the gradients
    that are held here. Packed as pairs (sender, message)."""
    try:
        agent, context, name = _load(sender, header)
    except ForeignGradients:
        here.current().contexts.refused_gradients += 1
        raise
    starts = context.join_pass(agent.number, *name[1:]).starts() if held else []
    for message in _unpacked(messages):
        sent = context.sent.get(message)
        if sent is not None:
            starts += [each.node for each in inner_edges(sent)]
    sources = [node.source for node in reach(starts) if type(node) is RECEIVED]
    return b"".join(_REACHED.pack(source.worker, source.message) for source in sources)


deliver._wrapped_async_rpc_function = _settle._wrapped_async_rpc_function = TOLD_WHO  # type: ignore[attr-defined]
_survey._wrapped_async_rpc_function = TOLD_WHO  # type: ignore[attr-defined]


def _answered(result: Reply | Exception | torch.futures.Future[Any]) -> Any:
    """The answer as it crosses (bytes and gradients), or a future of it."""
    if isinstance(result, torch.futures.Future):
        return result.then(lambda future: _answered(future.value()))
    if isinstance(result, Exception):
        error = errors.dump_located(result)
        return _ANSWER.pack(len(error), 0) + error, ()
    heads, gradients = _pack(result.arrivals)
    holders = _packed(result.holders) if result.holders else b""
    return _ANSWER.pack(0, len(result.holders)) + holders + heads, gradients


# -- the arguments of a backward pass, checked: the roots that users name, and the context


def check_types(context_id: Any, roots: Any) -> None:
    """Raise ``TypeError``, with torch's text, if these are not a context's id and a list of roots."""
    if not isinstance(context_id, int) or isinstance(context_id, bool) or not isinstance(roots, list | tuple):
        raise TypeError(
            "backward(): incompatible function arguments. Expected: (context_id: int, roots: list[torch.Tensor], "
            f"retain_graph: bool = False), got ({type(context_id).__name__}, {type(roots).__name__})"
        )


def scalars(roots: Any) -> list[torch.Tensor]:
    """The roots. Raises what torch raises for those that are no scalars with a graph."""
    if not roots:
        raise RuntimeError("No tensors provided for gradient computation.")
    for root in roots:
        if not isinstance(root, torch.Tensor):
            raise TypeError(f"backward(): incompatible function arguments: a root is a tensor, got {type(root).__name__}")
        if not root.requires_grad:
            raise RuntimeError("requires_grad not set on root")
        if root.numel() != 1:
            raise RuntimeError(f"Tensor of shape {tuple(root.shape)} is not a scalar, all roots need to be scalar")
        if root.grad_fn is None:
            raise RuntimeError("root does not have a valid gradient function.")
    return list(roots)


def referenced_scalar(value: Any) -> torch.Tensor:
    """The value of a reference as a root. Raises what torch raises for those that are none."""
    if not isinstance(value, torch.Tensor):
        raise RuntimeError("RRef should contain a tensor for .backward()")
    if not value.requires_grad:
        raise RuntimeError("tensors does not require grad and does not have a grad_fn")
    if value.numel() != 1:
        raise RuntimeError("grad can be implicitly created only for scalar outputs")
    return value
