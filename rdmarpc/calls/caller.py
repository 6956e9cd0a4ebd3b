"""The calling side: requests out, answers in, and the landing places granted ahead for both.

Grant-ahead: the answer to a call carries the landing place for the arguments of the *next* call of the same size
classes, whatever its function, so that from the second call on they are WRITTEN and the frame only announces them. The request
likewise carries a place for the result once the function's sizes are known. A place is always fresh arena memory,
used once: the receiver may keep what it got for ever.

A call that times out leaves its memory (arguments that may still be read, places that may still be written) in ``expired``
until the late answer comes or the peer is lost.
"""

from __future__ import annotations

import itertools
import logging
import struct
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from ..base import streams as gpu_streams
from ..gradients.context import Context, plainly
from ..gradients.graph import unbound
from ..gradients.waves import deliver
from ..links import frames
from ..links.frames import Frame, NotTheirs, request_head, response_body
from ..links.messages import AWAY, Fetch, Post, tell
from ..links.polling.modes import dispatch_modes, function_modes, unseen
from ..links.polling.pool import Pool
from ..links.polling.progress import Progress
from ..links.ring import QUEUE_BYTES, Distrust, Link, Room
from ..message import errors, reducers, serialize
from ..message.layout import as_it_lies, travels
from ..message.reducers import Arrived
from ..message.tensors import (
    HANDED,
    INLINE_BYTES,
    NOTHING,
    WORD_BYTES,
    Landing,
    Memory,
    Outgoing,
    pack,
    string_at,
    unpack,
    unpack_lone,
)
from ..references.context import RRefContext
from ..references.mail import drained
from ..transport import ArenaFull, Device, PeerLost, RdmaError, RemoteRegion, TransferTimeout, fresh, nobody
from .pending import Answer, Future, Pending, Timeouts

_CALL = ("function", "args", "kwargs")
_GRADIENTS = b"gradients"
_WITH_LONE = frames.LONE | frames.HEAD | frames.BULK

_Pickled = tuple[int, bytes, bytes | str, bytes, int, Sequence[torch.Tensor], list[torch.Tensor], tuple[bytes, bytes] | None]
"""A call as it is sent: kind of frame; function by reference, if it travels so; what the call is in signatures (``grants``);
payload; flags; tensors beside the payload, and those that require grad and travel in it; with ``LONE``: table and data."""


def _pickle(to: int, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, flags: int, waits: bool) -> _Pickled:
    """Raises what pickling raises. ``waits``: see ``serialize.dumps``."""
    label: bytes | str
    if function is deliver:
        kind, label, (name, args) = frames.GRADIENTS, _GRADIENTS, args
    else:
        kind, name = frames.REQUEST, serialize.reference(function) or b""
        label = name
    parts: list[torch.Tensor] = []
    only: Any = args[0] if name and len(args) == 1 and not kwargs else None
    if type(only) is torch.Tensor and travels(only):
        flags |= frames.FLAT | frames.REFERENCE
        lone = as_it_lies(only) if only.nbytes <= INLINE_BYTES else None
        if lone is not None and lone.nbytes <= INLINE_BYTES:  # the short way for the commonest message
            data = lone.text, string_at(only.data_ptr(), lone.nbytes)
            return kind, name, label, b"", flags | frames.LONE, args, parts, data
        return kind, name, label, serialize.ONE_TENSOR, flags, args, parts, None
    if hasattr(function, "_names_callee") or not name:
        label = serialize.label(function, args)
    tensors: list[torch.Tensor] | None
    if not name:
        if isinstance(function, torch.jit.ScriptFunction):
            reducers.check_arguments(function, args)
        payload, tensors = serialize.dumps((function, args, kwargs or {}), to, _CALL, parts, waits=waits)
    elif kind == frames.GRADIENTS:
        payload, tensors = b"", serialize.flat(args)
        if tensors is None:
            payload, tensors = serialize.dumps(args, to, parts=parts)
        else:
            flags |= frames.FLAT
    elif not kwargs and (tensors := serialize.flat(args)) is not None:
        payload = serialize.dump_flat(args)
        flags |= frames.FLAT | frames.REFERENCE
    else:
        payload, tensors = serialize.dumps((args, kwargs or {}), to, _CALL[1:], parts, waits=waits)
        flags |= frames.REFERENCE
    return kind, name, label, payload, flags, tensors, parts, None


def _recallable(pending: Pending, out: Outgoing, device: Device, memory: Memory) -> Outgoing:
    """A request that lends the program's own memory: its receiver hears of it if the call is given up."""
    channel = pending.link.channel
    word = torch.zeros(WORD_BYTES, dtype=torch.uint8, device="cpu")
    if not device.can_lend(word, channel):
        word = memory.empty(channel, WORD_BYTES, pending.deadline).zero_()
    pending.word = word
    return out._replace(table=out.table + device.lend(word, channel).dump())


def _expect(pending: Pending) -> bytes:
    """The landing places for the result of a call, if the sizes of its function's results are known."""
    link = pending.link
    sizes = link.grants.result_sizes.get(pending.key)
    if not sizes:  # another thread was faster
        return b""
    try:
        pending.landing = Landing(link.channel, sizes)
    except ArenaFull:
        return b""  # the result finds a place when it is here
    return pending.landing.places


class Caller:
    """The calling side of one worker. Thread-safe. ``timeout`` of a call: seconds, 0 = for ever."""

    def __init__(
        self, device: Device, progress: Progress, pool: Pool, post: Post, rrefs: RRefContext, distrust: Distrust
    ) -> None:
        """``distrust``: from any thread."""
        self.device, self.progress, self.pool, self.post, self.rrefs = device, progress, pool, post, rrefs
        self.pending: dict[int, Pending] = {}
        """The calls under way by number, and (``expired``) those given up, whose answers still have to be taken: each call that
        is not answered is in one of the two at every moment."""
        self.expired: dict[int, Pending] = {}
        self.futures: dict[int, object] = progress.outstanding
        """The calls of ``pending`` for which users hold futures."""
        self.refused = 0
        """The number of answers to calls that were made to another worker."""
        self._distrust = distrust
        self._calls = itertools.count(1)
        progress.finish = self._finish_all
        self.timeouts = Timeouts(self.pending, self.give_up)
        self._ticking = self.timeouts.ticking

    def creates(self, rref: int, worker: int) -> bool:
        """Whether a call that creates this reference at ``worker`` is unanswered, given up or not."""
        calls = list(self.pending.values()) + list(self.expired.values())
        return any(pending.rref == rref and pending.link.worker == worker for pending in calls)

    @property
    def idle(self) -> bool:
        """Whether no user's call is under way."""
        return all(pending.control for pending in list(self.pending.values()))

    # -- out

    def failed(self, error: RdmaError, timeout: float, *, future: bool) -> Pending:
        """A call that could not even be sent: its error is raised where the answer is awaited."""
        # No link is ever looked at: the answer is an error.
        pending = Pending(self, None, 0, timeout)  # type: ignore[arg-type]
        if future:
            pending.future = Future(self, pending)
        self._answer(pending, error)
        return pending

    def request(
        self,
        link: Link,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        timeout: float,
        flags: int,
        future: bool,
        rref: int,
        fork: int,
        context: Context | None,
    ) -> Pending:
        """Send a call. Raises what pickling raises, and ``ArenaFull``; a broken link is the answer's error, and so is a
        deadline that passes before the request could even be queued. ``context``: the autograd context that it carries."""
        if context is not None:
            args, kwargs = unbound((args, kwargs))
        kind, name, label, payload, flags, tensors, parts, lone = _pickle(
            link.worker, function, args, kwargs, flags, waits=not (future or flags & frames.REMOTE)
        )
        call = next(self._calls)
        pending = Pending(self, link, call, timeout)
        now = time.monotonic()
        if timeout > 0:
            pending.deadline = now + timeout
        else:
            pending.since = now
        pending.control, pending.key, pending.keep = bool(flags & frames.CONTROL), (label, ()), parts
        try:
            out = NOTHING
            if tensors and lone is None:
                memory = self.post.memory
                out = pack(tensors, self.device, link.channel, link.grants.take, memory, pending.deadline)
                pending.key = label, out.sizes
                if out.lent:
                    flags, pending.keep = flags | frames.READS, (parts, out.lent)
                    out = _recallable(pending, out, self.device, memory) if out.own else out
            places = _expect(pending) if pending.key in link.grants.result_sizes else b""
            if out.grant or places or flags & frames.REMOTE or context is not None:
                if flags & frames.REMOTE:
                    pending.rref = rref
                number, message = frames.NO_CONTEXT, 0
                if context is not None:
                    pending.context, number, pending.recorded = context, context.number, torch.is_grad_enabled()
                    message = context.send(link.worker, tensors, parts)
                payload = request_head(out.grant, rref, fork, len(places), number, message) + places + payload
                flags |= frames.HEAD
            if future:
                self._promise(pending, not flags & frames.FLAT and serialize.lends(payload), now)
            self.pending[call] = pending
            if lone is not None:
                if link.try_send(kind, call, flags, 1, (name, payload, *lone)):
                    return pending
                out = Outgoing(*lone, 1, [])
            if link.waiting > QUEUE_BYTES and not flags & frames.CONTROL:
                # The peer has not read for a while, and as many requests are queued for it as may be.
                room = self.progress.wait_for(Room(link), pending.deadline)
                if not room or call not in self.pending:  # the thread of timeouts was faster, or the loss was told
                    raise pending.timed_out()
            dropped = None if flags & frames.FLAT else partial(self.rrefs.take_back, link.worker, kind, flags, payload)
            self.post.send(link, kind, call, flags, out, name, payload, pending, dropped)
        except (PeerLost, TransferTimeout) as error:
            self._not_sent(pending, flags, payload)
            if future and pending.future is None:
                pending.future = Future(self, pending)
            if not (pending.answers or pending.done):
                self._answer(pending, link.why(error) if isinstance(error, PeerLost) else error)
        except BaseException:
            self._not_sent(pending, flags, payload)
            self.futures.pop(call, None)
            raise
        return pending

    def _promise(self, pending: Pending, lends: bool, now: float) -> None:
        """A future of the call, which begins ``now``. ``lends``: it lends memory of GPUs."""
        streams = gpu_streams.current
        on_gpu = streams is not None and (lends or pending.key[0] in streams.expected)
        pending.future = Future(self, pending, streams.devices if streams is not None and on_gpu else ())
        if pending.deadline is not None and not self._ticking.is_set():
            self._ticking.set()
        if not pending.control:
            self.futures[pending.call] = pending
            self.progress.linger(now)

    def _not_sent(self, pending: Pending, flags: int, payload: bytes) -> None:
        self.pending.pop(pending.call, None)
        self.expired.pop(pending.call, None)
        self.rrefs.take_back(pending.link.worker, frames.REQUEST, flags, payload)

    # -- in

    def answer(self, link: Link, frame: Frame) -> None:
        """Take a response that arrived (called by the holder of the polling role). Raises ``NotTheirs`` if the call was made to
        another worker than the one at the link's other end. An answer to an unknown call has no effect.

        If a READ needs a thread of the peer, a call whose answer has to be READ stays in its table until the data is here."""
        pending = self.pending.get(frame.call) or self.expired.get(frame.call)
        if pending is None:
            return
        if pending.link is not link:
            self.refused += 1
            raise NotTheirs("it answered a call that was made to another worker")
        if pending.deadline is not None and not pending.expired and time.monotonic() >= pending.deadline:
            self.give_up(pending)  # nobody has looked at the clock since
        if frame.flags & AWAY and link.channel.reads_take_peer:
            if not pending.arriving:  # a call is answered once
                pending.arriving = True
                fetch = Fetch(link, frame)
                fetch.run(partial(self._arrived, pending, fetch))
        elif self.pending.pop(frame.call, None) is not None:
            if pending.future is not None:
                self._answer(pending, frame)
                return
            pending.answers.append(frame)
            pending.done = True
            if self.progress.followers:
                self.progress.completed()
        elif self.expired.pop(frame.call, None) is not None:
            self.pool.jobs.append(partial(self._bury, pending, frame))

    def _arrived(self, pending: Pending, fetch: Fetch) -> None:
        """Take an answer of which all has been READ, or never will be (mostly called by the thread that hears the peers)."""
        # What is here counts, whatever has become of the peer since. Else the handling of the loss answers the call.
        lost = fetch.error is not None and pending.link.channel.error is not None
        if not lost and self.pending.pop(pending.call, None) is not None:
            self._answer(pending, fetch)
            self.progress.interrupt()
        elif self.expired.pop(pending.call, None) is not None and not lost:
            self.pool.submit(partial(self._bury, pending, fetch))

    def _answer(self, pending: Pending, answer: Answer) -> None:
        future = pending.future
        if future is not None:
            self.futures.pop(pending.call, None)
            if answer.__class__ is Frame and not (future.has_callbacks or pending.waited):
                flat = answer.flags & (frames.FLAT | frames.BULK) == frames.FLAT
                if pending.rref is not None and flat and not answer.tensors:
                    # A value was created. Nobody but us has this future (else ``RRef._get_future`` says so), and the next call
                    # may want the landing places that the answer brings.
                    if self._complete(future, pending, answer):
                        self.rrefs.forks.made(pending)
                    pending.done = True
                    self.progress.completed()
                    return
                # This thread reads the rings, so it must not complete a future: that may run users' code (we do not see the
                # callbacks of ``collect_all``). The thread that waits for it does, or the pool, many at once.
                pending.answers.append(answer)
                pending.done = True
                self._forget_finished()
                self.progress.unfinished.append(pending)
                self.progress.completed()
                return
        pending.answers.append(answer)
        if future is None or pending.waited:
            pending.done = True
            self.progress.completed()
            return
        self.pool.owe(partial(self._finish_elsewhere, pending))

    def _forget_finished(self) -> None:
        """Drop the answers at the front of ``unfinished`` that a thread has come for meanwhile."""
        for head in drained(self.progress.unfinished):
            if head.answers:
                self.progress.unfinished.appendleft(head)
                return

    def _finish_elsewhere(self, pending: Pending) -> None:
        pending.done = True
        self.finish(pending)
        self.progress.completed()

    def _finish_all(self) -> None:
        for pending in drained(self.progress.unfinished):
            self.finish(pending)
        self.progress.completed()

    def finish(self, pending: Pending) -> None:
        """Decode the answer of a call with a future, once, and complete the future."""
        try:
            answer = pending.answers.pop()
        except IndexError:
            return
        assert pending.future is not None
        plainly(partial(self._complete, pending.future, pending, answer), pending.context)

    def _complete(self, future: Future, pending: Pending, answer: Answer) -> bool:
        """Complete a future with an answer. Returns whether that is a result, and no error."""
        streams = gpu_streams.current
        try:
            if streams is not None:
                streams.touched()
            value = self.read(pending, answer)
            if streams is not None and streams.touched() and not future.on_gpu:
                # Nobody expected that, so the future does not know of streams. Once for each function.
                streams.expected.add(pending.key[0])
                streams.synchronize()
                future.unforeseen = True
                self.device.count("gpu_host_waits")
            elif streams is not None and future.on_gpu:
                streams.pass_captures()
        except BaseException as error:
            # Unpickling runs code of users, which may raise anything; but an interrupt of the main thread is for that.
            if not pending.expired:
                pending.keep = None
            future._pending = None
            future.fail(errors.ordinary(error))
            if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
                raise
            return False
        try:
            torch._C.Future.set_result(future, value)
        except RuntimeError as error:
            if not future.done():
                raise
            if isinstance(error, torch.AcceleratorError):  # out of torch, which ran no callback after the one that failed
                logging.getLogger("rdmarpc").error("callbacks of a future are lost, because its GPU failed: %s", error)
            # Else the user has completed it: what came is not wanted.
        finally:
            # The two know each other: without this, results would live until the garbage collector comes.
            future._pending = None
        return True

    # -- reading an answer: the tensors, the value, and the landing places for later calls

    def read(self, pending: Pending, answer: Answer) -> Any:
        """The result, or raise the exception. Runs user code (unpickling)."""
        if torch.is_inference_mode_enabled() or function_modes() or dispatch_modes():
            # As elsewhere: who waits in that mode may train with what came later.
            with torch.inference_mode(False), unseen():
                return self.read(pending, answer)
        observer = self.post.observer
        if observer is not None:
            return observer.reading(self._decode, pending, answer)
        if answer.__class__ is Frame and answer.flags & _WITH_LONE == frames.LONE and not (pending.key[1] or answer.function):
            return unpack_lone(answer.body, answer.data)
        return self._decode(pending, answer)

    def _decode(self, pending: Pending, answer: Answer) -> Any:
        if isinstance(answer, Exception):
            raise fresh(answer)
        runs: list[torch.Tensor] = []
        if isinstance(answer, Fetch) or answer.flags & AWAY:
            frame, runs = self._read(pending, answer if isinstance(answer, Fetch) else Fetch(pending.link, answer))
        else:
            frame = answer
        flags = frame.flags
        if frame.kind == frames.ERROR:
            raise errors.rebuild(response_body(frame)[1])
        head, payload, table, data = response_body(frame)
        references = None
        if not flags & frames.FLAT and payload[0] == serialize.MARK:
            try:
                references = self.rrefs.adopt(pending.link.worker, payload)
            except NotTheirs as error:
                self._distrust(pending.link, error)
                raise
        link, sizes = pending.link, pending.key[1]
        if head.grant or sizes:  # landing places for later calls
            fit = head.grant and len(head.places) == RemoteRegion.WIRE_SIZE * len(sizes)
            forgone = link.grants.put(sizes, head.grant, link.places[head.places] if fit else [])
            if forgone:
                tell(link, frames.FORGO, 0, frames.alone(struct.pack(f"<{len(forgone)}Q", *forgone)))
        context = pending.context if head.message and pending.recorded else None
        if context is not None and context.ended:
            context = None
        value: Any
        tensors: list[torch.Tensor] = []
        if flags & frames.LONE:
            tensors = [unpack_lone(table, data)]
        elif frame.tensors:
            tensors, came = unpack(table, data, frame.tensors, link.channel, pending.landing, link.places, runs)
            if table[0] != HANDED:  # that says nothing of calls to come
                link.grants.expect_result(pending.key, came)
        else:
            link.grants.expect_result(pending.key, ())
        if context is not None:
            context.attach(link.worker, head.message, tensors)  # before it is unpickled, which may compute with them
        parts: list[torch.Tensor] = []
        if flags & frames.FLAT:
            if tensors and (flags & frames.LONE or payload == serialize.ONE_TENSOR):
                value = tensors[0]
            else:
                value = serialize.load_flat_one(payload, tensors) if payload else tuple(tensors)
        else:
            try:
                arrived: list[Arrived] = []
                value = serialize.loads(payload, tensors, references, parts, arrived)
                if arrived and pending.future is not None:
                    pending.future.arrays = arrived
            except (AttributeError, ImportError) as error:
                raise errors.unknown_name(error) from error
        if context is not None and not context.ended:  # unpickling may take long
            context.attach(link.worker, head.message + 1, parts)
        return (frame.body[: frame.function], value) if frame.function else value

    def _read(self, pending: Pending, fetch: Fetch) -> tuple[Frame, list[torch.Tensor]]:
        """An answer of which not everything came with its frame, and its runs. The callee is told when all that it left for us
        in its memory has been READ, or will not be."""
        if isinstance(fetch.error, ArenaFull):
            self._read_rest(pending, fetch)
        try:
            fetch.read(self.post.memory, _deadline(pending))
            return fetch.whole(), fetch.take()
        finally:
            tell(pending.link, frames.RELEASE, pending.call)

    def _read_rest(self, pending: Pending, fetch: Fetch) -> None:
        """There was no memory for an answer when it came. Wait for that, and for the data, until the call's deadline (of an
        answer that nobody wants any more for memory only): then it is taken when it is here."""
        try:
            fetch.finish(self.post.memory, _deadline(pending), 0.0 if pending.expired else pending.deadline)
        except TransferTimeout:
            pending.expired = True
            self.expired[pending.call] = pending
            fetch.run_on(partial(self._arrived, pending, fetch))
            raise pending.timed_out() from None

    # -- giving up

    def _expect_late(self, pending: Pending) -> bool:
        """Move a call to ``expired``, as nobody wants its answer any more. ``False`` if its answer came at the last moment."""
        # In one table or the other at every moment: ``creates`` must find it.
        self.expired[pending.call] = pending
        pending.recall()
        if self.pending.pop(pending.call, None) is None:
            # It is being entered: where somebody has a future, soon, by the pool.
            self.expired.pop(pending.call, None)
            if pending.future is None:
                self.progress.wait_for(pending)
            return False
        pending.expired = True
        return True

    def abandon(self, pending: Pending) -> None:
        """Give up a call whose answer nobody wants any more: an exception of a signal handler has interrupted the waiting
        thread, or another one of several calls has failed."""
        if not self._expect_late(pending):
            self.pool.submit(partial(self._bury, pending, pending.answers.pop()))

    def give_up(self, pending: Pending) -> None:
        if not self._expect_late(pending):
            return
        self._answer(pending, pending.timed_out())

    def _bury(self, pending: Pending, answer: Answer) -> None:
        """Read a late answer that nobody wants, to take what it brings: memory handed over, grants, references."""
        try:
            self.read(pending, answer)
        except Exception:
            # Whatever was to be told to the caller: it has given up.
            return
        finally:
            self.rrefs.collect()

    def forked(self, error: RdmaError) -> None:
        """Fail all calls in a forked child, where no answer to a call of the parent ever comes."""
        for pending in list(self.pending.values()):
            pending.answers.append(error)
            pending.done = True

    def lost(self, link: Link, error: RdmaError) -> list[Pending]:
        """Fail every call that waits for this peer, and forget what is queued for it. Returns the calls, which hold the memory
        that the peer may touch. Futures are completed here and now, but for those whose callbacks may block."""
        link.drop()
        found = []
        for calls in (self.pending, self.expired):
            for call in [call for call, pending in list(calls.items()) if pending.link is link]:
                pending = calls.pop(call, None)
                if pending is None:
                    continue
                found.append(pending)
                pending.recall()  # a peer that was stopped may read on
                if calls is self.expired:
                    continue
                self._answer(pending, error)
                if pending.future is not None and not pending.future.has_callbacks:
                    self.finish(pending)
        self.progress.interrupt()
        return found

    def stop(self) -> None:
        self.timeouts.stop()
        self._distrust = nobody


def _deadline(pending: Pending) -> float | None:
    """The time until which memory for an answer may be waited for. ``None``, without limit, if the call was given up."""
    return None if pending.expired else pending.deadline
