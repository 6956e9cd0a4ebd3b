"""The calling side: requests out, answers in, and the landing places granted ahead for both.

Grant-ahead: the answer to a call carries the landing place for the arguments of the *next* call of the same size
classes, whatever its function, so that from the second call on they are WRITTEN and the frame only announces them. The request
likewise carries a place for the result once the function's sizes are known. A place is always fresh arena memory,
used once: the receiver may keep what it got for ever.

A call that times out leaves its memory (arguments that may still be read, places that may still be written) in ``_expired``
until the late answer comes or the peer is lost.
"""

from __future__ import annotations

import itertools
import struct
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from . import bulks, gpu_streams, remote_error, serialize
from .bulks import Kept
from .fetches import AWAY, Fetch
from .frames import (
    BULK,
    CONTROL,
    ERROR,
    FLAT,
    FORGO,
    HEAD,
    LONE,
    NO_CONTEXT,
    READS,
    REFERENCE,
    RELEASE,
    REMOTE,
    REQUEST,
    REQUEST_HEAD,
    RESPONSE_HEAD,
    Frame,
)
from .future import Answer, Future, Pending
from .grad_context import Context
from .grad_record import unbound
from .link import MAX_BODY, Link, Room
from .progress import Progress
from .rref_context import RRefContext
from .rref_mail import NotTheirs
from .tensors import (
    HANDED,
    NOTHING,
    Landing,
    Memory,
    Outgoing,
    describe_all,
    load_places,
    pack,
    pack_lone,
    size_classes,
    unpack,
    unpack_lone,
)
from .timeouts import Timeouts
from .transport import ArenaFull, Device, PeerLost, RdmaError, RemoteRegion, TransferTimeout, fresh
from .transport.ended import nobody

_CALL = ("function", "args", "kwargs")


class Caller:
    """Thread-safe. ``timeout`` of a call: seconds, 0 = for ever."""

    def __init__(self, device: Device, progress: Progress, memory: Memory, rrefs: RRefContext) -> None:
        self.device, self.progress, self.memory, self.rrefs = device, progress, memory, rrefs
        self.pending: dict[int, Pending] = {}
        self.futures: dict[int, object] = {}
        """Those of ``pending`` that users hold futures of."""
        self._expired: dict[int, Pending] = {}
        self.refused = 0
        """Answers to calls that were made to another worker, and (``refused_grants``) landing places for no call of ours."""
        self.refused_grants = 0
        self.distrust: Callable[[Link, RdmaError], None] = nobody
        """Ends a link (from any thread, without waiting) by which something came that its peer had no right to say."""
        self._calls = itertools.count(1)
        progress.finish = self._finish_all
        self.timeouts = Timeouts(self.pending, self._give_up)
        self._ticking = self.timeouts.ticking

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
        name = serialize.reference(function) or b""
        label: bytes | str = name
        tensors: list[torch.Tensor] | None = None
        parts: list[torch.Tensor] = []
        if context is not None:
            views: dict[int, torch.Tensor] = {}
            args, kwargs = unbound(args, views), unbound(kwargs, views)
        out, lone = NOTHING, None
        if not name:
            label = serialize.label(function, args)
            payload, tensors = serialize.dumps((function, args, kwargs or {}), link.worker, _CALL, parts)
        elif kwargs:
            payload, tensors = serialize.dumps((args, kwargs), link.worker, _CALL[1:], parts)
            flags |= REFERENCE
        elif len(args) == 1 and type(args[0]) is torch.Tensor and (lone := pack_lone(args[0])):
            payload = b""
            flags |= LONE | FLAT | REFERENCE
        elif (tensors := serialize.flat(args)) is not None:
            payload = serialize.dump_flat(args)
            flags |= FLAT | REFERENCE
        else:
            payload, tensors = serialize.dumps((args, {}), link.worker, _CALL[1:], parts)
            flags |= REFERENCE
        if lone is None and hasattr(function, "_names_callee"):
            label = serialize.label(function, args)
        lends = not flags & FLAT and serialize.lends(payload)
        call = next(self._calls)
        pending = Pending(self, link, call, timeout)
        now = time.monotonic()
        if timeout > 0:
            pending.deadline = now + timeout
        else:
            pending.since = now
        if flags & CONTROL:
            pending.control = True
        places = b""
        try:
            sizes: tuple[int, ...] = ()
            grant = 0
            if tensors:
                described = describe_all(tensors, self.device)
                sizes = described.sizes
                granted = link.grants.take(size_classes(sizes)) if sizes else None
                places_there = granted[1] if granted else None
                out = pack(described, self.device, link.channel, places_there, self.memory, pending.deadline)
                grant = granted[0] if granted else 0
                pending.keep = out.lent
                if out.lent:
                    flags |= READS
            pending.key = (label, sizes)
            if result_sizes := link.grants.result_sizes.get(pending.key):
                try:
                    pending.landing = Landing(link.channel, result_sizes)
                    places = pending.landing.places
                except ArenaFull:
                    pass  # the result finds a place when it is here
            if grant or places or flags & REMOTE or context is not None:
                if flags & REMOTE:
                    pending.rref = rref
                number, message = NO_CONTEXT, 0
                if context is not None:
                    pending.context, number = context, context.number
                    message = context.send(link.worker, args if lone is not None else [*(tensors or ()), *parts])
                flags |= HEAD
                payload = REQUEST_HEAD.pack(grant, rref, fork, len(places), number, message) + places + payload
            if future:
                streams = gpu_streams.current
                on_gpu = streams is not None and (lends or label in streams.expected)
                pending.future = Future(self, pending, streams.devices if streams is not None and on_gpu else ())
                if timeout > 0 and not self._ticking.is_set():
                    self._ticking.set()
                if not flags & CONTROL:
                    self.futures[call] = pending
                    self.progress.linger(now)
            self.pending[call] = pending
            if lone is not None:
                if link.try_send(REQUEST, call, flags, 1, name, payload, lone[0], lone[1]):
                    return pending
                out = Outgoing(lone[0], lone[1], 1, [])
            if link.full and not flags & CONTROL:
                self._await_room(pending)
            taken_back = None
            if not flags & FLAT:
                taken_back = partial(self._take_back, link, flags, payload, REQUEST_HEAD.size + len(places))
            self.send(link, REQUEST, call, flags, out, name, payload, pending, taken_back)
        except (PeerLost, TransferTimeout) as error:
            if future and pending.future is None:
                pending.future = Future(self, pending)
            self.pending.pop(call, None)
            self._expired.pop(call, None)
            self._take_back(link, flags, payload, REQUEST_HEAD.size + len(places))
            if not (pending.answers or pending.done):
                self._answer(pending, link.why(error) if isinstance(error, PeerLost) else error)
        except BaseException:
            self.pending.pop(call, None)
            self.futures.pop(call, None)
            self._take_back(link, flags, payload, REQUEST_HEAD.size + len(places))
            raise
        return pending

    def _await_room(self, pending: Pending) -> None:
        """The peer has not read for a while, and as many requests are queued for it as may be."""
        room = self.progress.wait_for(Room(pending.link), pending.deadline)
        if not room or pending.call not in self.pending:  # the thread of timeouts was faster, or the loss was told
            raise pending.timed_out()

    def _take_back(self, link: Link, flags: int, payload: bytes, head: int) -> None:
        """The references in a request that was not sent, and the GPU memory that it lends."""
        if not flags & FLAT:
            payload = payload[head:] if flags & HEAD else payload
            self.rrefs.undo(link.worker, payload)
            serialize.undo(link.worker, payload)

    def send(
        self,
        link: Link,
        kind: int,
        call: int,
        flags: int,
        out: Outgoing,
        function: bytes,
        payload: bytes,
        keep: Pending | Kept | None,
        dropped: Callable[[], None] | None = None,
    ) -> None:
        """Send a frame; it is queued where the peer's ring is full (``Link.post``, also for ``dropped``). A body too large for
        a frame (``MAX_BODY``) is left in our memory for the peer to READ: ``keep`` keeps it alive."""
        table, data = out.table, out.data
        if len(function) + len(payload) + len(table) + len(data) > MAX_BODY:
            deadline = keep.deadline if isinstance(keep, Pending) else None
            payload, bulk = bulks.leave((function, payload, table, data), self.memory, link, deadline)
            function, table, data = b"", b"", b""
            flags |= BULK
            if keep is not None:
                keep.keep = (keep.keep, bulk)
            if isinstance(keep, Kept):
                keep.nbytes += bulk.nbytes
                link.lend(bulk.nbytes)
        if not link.try_send(kind, call, flags, out.tensors, function, payload, table, data):
            link.post(kind, call, flags, out.tensors, function, payload, table, data, dropped)

    # -- in

    def answer(self, link: Link, frame: Frame) -> None:
        """A response arrived (called by the holder of the polling role). ``NotTheirs`` if that call was made to another worker:
        answers count by the link that they come by. What nobody waits for any more has no effect.

        Where a READ takes a thread of the peer's, an answer that has to be READ leaves its call where it is till it is here."""
        pending = self.pending.get(frame.call)
        if pending is not None:
            if pending.link is not link:
                self._refuse_answer()
            if frame.flags & AWAY and link.channel.reads_take_peer:
                self._begin_reading(pending, frame)
                return
            if self.pending.pop(frame.call, None) is not None:
                self._answer(pending, frame)
                return
        late = self._expired.get(frame.call)
        if late is not None:
            if late.link is not link:
                self._refuse_answer()
            if frame.flags & AWAY and link.channel.reads_take_peer:
                self._begin_reading(late, frame)
            elif self._expired.pop(frame.call, None) is not None:
                self.progress.jobs.append(partial(self._bury, late, frame))

    def _begin_reading(self, pending: Pending, frame: Frame) -> None:
        if not pending.arriving:  # a call is answered once
            pending.arriving = True
            fetch = Fetch(pending.link, frame)
            fetch.run(partial(self._arrived, pending, fetch))

    def _arrived(self, pending: Pending, fetch: Fetch) -> None:
        """All of an answer is here, or never will be (mostly by the thread that hears the peers)."""
        lost = pending.link.channel.error is not None  # whoever deals with the loss answers the call
        if not lost and self.pending.pop(pending.call, None) is not None:
            self._answer(pending, fetch)
            self.progress.interrupt()
        elif self._expired.pop(pending.call, None) is not None and not lost:
            self.progress.submit(partial(self._bury, pending, fetch))

    def _read_rest(self, pending: Pending, fetch: Fetch) -> None:
        """There was no memory for an answer when it came. Wait for that, and for the data, until the call's deadline (of an
        answer that nobody wants any more for memory only): then it is taken when it is here."""
        try:
            fetch.finish(self.memory, None if pending.expired else pending.deadline, patient=not pending.expired)
        except TransferTimeout:
            pending.expired = True
            self._expired[pending.call] = pending
            fetch.run_on(partial(self._arrived, pending, fetch))
            raise pending.timed_out() from None

    def _refuse_answer(self) -> None:
        self.refused += 1
        raise NotTheirs("it answered a call that was made to another worker")

    def _answer(self, pending: Pending, answer: Answer) -> None:
        future = pending.future
        if future is not None:
            self.futures.pop(pending.call, None)
            if answer.__class__ is Frame and not (future.has_callbacks or pending.waited):
                if pending.rref is not None and answer.flags & (FLAT | BULK) == FLAT and not answer.tensors:
                    # A value was created. Nobody but us has this future (else ``RRef._get_future`` says so), and the next call
                    # may want the landing places that the answer brings.
                    self._complete(future, pending, answer)
                    pending.done = True
                    self.progress.completed()
                    return
                # This thread reads the rings. Completing a future may run code of users (callbacks of ``collect_all`` are
                # not seen by us), so whoever comes first does it: the thread that waits for it, or the pool, many at once.
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
        self.progress.owe(partial(self._finish_elsewhere, pending))

    def _forget_finished(self) -> None:
        """Of the answers that nobody had come for, those at the front that somebody came for since."""
        unfinished = self.progress.unfinished
        while unfinished:
            try:
                head = unfinished.popleft()
            except IndexError:  # the pool was faster
                return
            if head.answers:
                unfinished.appendleft(head)
                return

    def _finish_elsewhere(self, pending: Pending) -> None:
        pending.done = True
        self.finish(pending)
        self.progress.completed()

    def _finish_all(self) -> None:
        unfinished = self.progress.unfinished
        while unfinished:
            try:
                pending = unfinished.popleft()
            except IndexError:  # another thread was faster
                break
            self.finish(pending)
        self.progress.completed()

    def finish(self, pending: Pending) -> None:
        """Decode the answer of a call with a future, once, and complete the future."""
        try:
            answer = pending.answers.pop()
        except IndexError:
            return
        assert pending.future is not None
        self._complete(pending.future, pending, answer)

    def _complete(self, future: Future, pending: Pending, answer: Answer) -> None:
        streams = gpu_streams.current
        try:
            if streams is not None:
                streams.touched()
            value = self.decode(pending, answer)
            if streams is not None and streams.touched() and not future.on_gpu:
                # Nobody expected that, so the future does not know of streams. Once for each function.
                streams.expected.add(pending.key[0])
                streams.synchronize()
                future.unforeseen = True
                self.device.count("gpu_host_waits")
        except BaseException as error:
            # Unpickling runs code of users, which may raise anything; but an interrupt of the main thread is for that.
            if not pending.expired:
                pending.keep = None
            future._pending = None
            future.fail(remote_error.ordinary(error))
            if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
                raise
            return
        try:
            torch._C.Future.set_result(future, value)
        except RuntimeError:
            if not future.done():
                raise
            # The user has completed it: what came is not wanted.
        finally:
            # The two know each other: without this, results would live until the garbage collector comes.
            future._pending = None

    def result(self, pending: Pending) -> Any:
        """Wait for the answer of a call without a future, and decode it."""
        try:
            try:
                answered = self.progress.wait_for(pending, pending.deadline)
            except BaseException:
                self.abandon(pending)
                raise
            if not answered:
                self._give_up(pending)
            return self.decode(pending, pending.answers.pop())
        finally:
            if pending.event is not None:
                pending.event.__exit__(None, None, None)

    def decode(self, pending: Pending, answer: Answer) -> Any:
        """The result, or raise the exception. Runs user code (unpickling)."""
        fetch = None
        if not isinstance(answer, Frame):
            if isinstance(answer, Exception):
                raise fresh(answer)
            if isinstance(answer.error, ArenaFull):
                self._read_rest(pending, answer)
            fetch, answer = answer, answer.frame
        link = pending.link
        if answer.flags & (LONE | HEAD | BULK) == LONE and not pending.key[1]:
            return unpack_lone(answer.body[: answer.table], answer.body[answer.table :])
        lent = answer.flags & (READS | BULK)
        deadline = None if pending.expired else pending.deadline
        try:
            if fetch is None:
                frame = bulks.fetch(answer, self.memory, link, deadline)
            else:
                frame = fetch.whole(self.memory) if lent & BULK else answer
        except BaseException:
            self._release(pending)
            raise
        head = frame.function
        if frame.kind == ERROR:
            if lent:
                self._release(pending)
            raise remote_error.rebuild(frame.body[head : head + frame.payload])
        grant, places_bytes, message, start = 0, 0, 0, head
        if frame.flags & HEAD:
            grant, places_bytes, message = RESPONSE_HEAD.unpack_from(frame.body, head)
            start += RESPONSE_HEAD.size
        places = frame.body[start : start + places_bytes]
        payload_end = head + frame.payload
        table_end = payload_end + frame.table
        payload = frame.body[start + places_bytes : payload_end]
        references = None
        if not frame.flags & FLAT and payload[0] == serialize.MARK:
            try:
                references = self.rrefs.adopt(link.worker, payload)
            except NotTheirs as error:
                self.distrust(link, error)
                raise
        if grant and not 0 < places_bytes == RemoteRegion.WIRE_SIZE * len(pending.key[1]):
            self.refused_grants += 1
            grant = 0
        if grant:
            forgone = link.grants.put(size_classes(pending.key[1]), grant, load_places(places, link.places))
        else:
            # Large arguments, and no place for those of the next call: the callee has promised as much as it may.
            forgone = link.grants.make_room(size_classes(pending.key[1])) if pending.key[1] else []
        if forgone:
            self._tell(link, FORGO, 0, struct.pack(f"<{len(forgone)}Q", *forgone))
        if frame.flags & LONE:
            value = unpack_lone(frame.body[payload_end:table_end], frame.body[table_end:])
            if message:
                self._attach(pending, message, [value])
            return value
        tensors: list[torch.Tensor] = []
        sizes: tuple[int, ...] = ()
        was_read = False
        try:
            if frame.tensors:
                table, data = frame.body[payload_end:table_end], frame.body[table_end:]
                landing, known = pending.landing, link.places
                ahead: list[torch.Tensor] | None = [] if link.channel.reads_take_peer else None  # nothing is READ here then
                if fetch is not None:
                    ahead = fetch.take()
                tensors, sizes, was_read = unpack(
                    table, data, frame.tensors, self.memory, link.channel, landing, known, deadline, ahead
                )
        finally:
            if lent:
                self._release(pending)
        if was_read:
            link.count_read()
        if not frame.tensors or frame.body[payload_end] != HANDED:  # that says nothing of calls to come
            link.grants.expect_result(pending.key, sizes)
        parts: list[torch.Tensor] = []
        if frame.flags & FLAT:
            value = serialize.load_flat_one(payload, tensors)
        else:
            try:
                value = serialize.loads(payload, tensors, references, parts)
            except (AttributeError, ImportError) as error:
                raise remote_error.unknown_name(error) from error
        if message:
            self._attach(pending, message, [*tensors, *parts])
        return value

    def _attach(self, pending: Pending, message: int, tensors: list[torch.Tensor]) -> None:
        """Connect what an answer brought to the local graph."""
        context = pending.context
        if context is not None and not context.ended:
            context.attach(pending.link.worker, message, tensors)

    def _release(self, pending: Pending) -> None:
        """What the callee left in its memory for us has been read, or is not wanted."""
        self._tell(pending.link, RELEASE, pending.call)

    def _tell(self, link: Link, kind: int, call: int, payload: bytes = b"") -> None:
        """A frame that means nothing to a peer that is lost."""
        try:
            link.post(kind, call, 0, payload=payload)
        except PeerLost:
            pass

    # -- giving up

    def _expect_late(self, pending: Pending) -> bool:
        """Move a call to those whose answers nobody wants. ``False`` if its answer came at the last moment."""
        # In one table or the other at every moment: ``creates`` must find it.
        self._expired[pending.call] = pending
        if self.pending.pop(pending.call, None) is None:
            # It is being entered: where somebody has a future, soon, by the pool.
            self._expired.pop(pending.call, None)
            if pending.future is None:
                self.progress.wait_for(pending)
            return False
        pending.expired = True
        return True

    def abandon(self, pending: Pending) -> None:
        """Nobody wants the answer any more: an interrupt, or what else a handler of a signal raises, has taken the waiting
        thread away, or another call of several has failed."""
        if not self._expect_late(pending):
            self.progress.submit(partial(self._bury, pending, pending.answers.pop()))

    def _give_up(self, pending: Pending) -> None:
        if not self._expect_late(pending):
            return
        self._answer(pending, pending.timed_out())

    def _bury(self, pending: Pending, answer: Answer) -> None:
        """A late answer: nobody wants it, but what it brings (memory handed over, grants, references) has to be taken."""
        try:
            self.decode(pending, answer)
        except Exception:
            # Whatever was to be told to the caller: it has given up.
            return
        finally:
            self.rrefs.collect()

    def creates(self, rref: int, worker: int) -> bool:
        """Whether a call that creates this reference at ``worker`` is unanswered, given up or not."""
        calls = list(self.pending.values()) + list(self._expired.values())
        return any(pending.rref == rref and pending.link.worker == worker for pending in calls)

    def forked(self, error: RdmaError) -> None:
        """In a forked child: no answer ever comes to a call of the parent."""
        for pending in list(self.pending.values()):
            pending.answers.append(error)
            pending.done = True

    def lost(self, link: Link, error: RdmaError) -> list[Pending]:
        """Fail every call that waits for this peer, and forget what is queued for it. Returns the calls, which hold the memory
        that the peer may touch. Futures are completed here and now, but for those whose callbacks may block."""
        link.drop()
        found = []
        for calls in (self.pending, self._expired):
            for call in [call for call, pending in list(calls.items()) if pending.link is link]:
                pending = calls.pop(call, None)
                if pending is None:
                    continue
                found.append(pending)
                if calls is self._expired:
                    continue
                self._answer(pending, error)
                if pending.future is not None and not pending.future.has_callbacks:
                    self.finish(pending)
        self.progress.interrupt()
        return found

    def stop(self) -> None:
        self.timeouts.stop()
        self.distrust = nobody
