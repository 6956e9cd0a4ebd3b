"""Messages of both sides of calling, however large they are: sending them, taking those of which something is not here yet, and
holding requests whose sender does not take the answers that it has.

A body too large for a frame, and large tensors without a landing place, stay in the sender's memory and are READ. Where that
takes a thread of the sender's (``Channel.reads_take_peer``), which may hold the GIL for long, no thread of ours waits for it:
the READ is started, and the request begins, or its call is answered (``Caller.answer``), when the data is here.

Requests of a peer are begun in the order in which they came, so later requests of that peer wait too; those of other peers do
not. Few READs from one peer are under way at once (``ring.Held``), and only these take memory here. The number of held requests
is bounded by what their sender may have outstanding (``ring``).
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from ..message.tensors import WORD_BYTES, Memory, Outgoing, check_wanted, to_read
from ..transport import PeerLost, RdmaError, RemoteRegion, TransferTimeout, Work, bare, fresh
from .frames import BULK, NO_PARTS, READS, Frame, Parts, alone
from .ring import MAX_BODY, Dropped, Link

AWAY = BULK | READS
"""Flags of messages of which not everything came with the frame."""
_LENGTHS = struct.Struct("<QQQQQ")
"""Bytes of function, payload, table and data, and the number of tensors: a frame's own count has 16 bits."""


class Post:
    """Sends the messages of one worker. Thread-safe. ``memory``: the source of memory for bodies that are too large for a
    frame."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.observer: Any = None
        """Told of every call, on both sides (``tools/events``), while a timeline is recorded."""

    def send(
        self,
        link: Link,
        kind: int,
        call: int,
        flags: int,
        out: Outgoing,
        function: bytes,
        payload: bytes,
        keeper: Any,
        dropped: Dropped = None,
    ) -> None:
        """Send a frame; it is queued where the peer's ring is full (``Link.post``, also for ``dropped``). A body too large for
        a frame (``MAX_BODY``) is left in our memory for the peer to READ: ``keeper`` (the call, or ``Kept``) keeps it
        alive, and says until when memory may be waited for."""
        if self.observer is not None:
            self.observer.packed(kind, flags, out, len(payload))
        parts, tensors = (function, payload, out.table, out.data), out.tensors
        if sum(map(len, parts)) > MAX_BODY:
            deadline = None if keeper is None else keeper.deadline
            bulk = self.memory.empty(link.channel, sum(map(len, parts)), deadline)
            memoryview(bulk.numpy())[:] = b"".join(parts)
            place = _LENGTHS.pack(*map(len, parts), tensors) + link.channel.device.lend(bulk, link.channel).dump()
            parts, tensors, flags = alone(place), 0, flags | BULK
            if keeper is not None:
                keeper.hold(bulk)
        if not link.try_send(kind, call, flags, tensors, parts):
            link.post(kind, call, flags, tensors, parts, dropped)


def tell(link: Link, kind: int, call: int, parts: Parts = NO_PARTS) -> None:
    """A frame that means nothing to a peer that is lost."""
    with suppress(PeerLost):
        if not link.try_send(kind, call, 0, 0, parts):
            link.post(kind, call, 0, 0, parts)


class Kept:
    """The memory of an answer that a peer may still READ. ``lend`` is told of its bytes, and of their end."""

    __slots__ = ("_keep", "_lend", "nbytes")
    deadline: float | None = None

    def __init__(self, runs: list[torch.Tensor], lend: Callable[[int], None]) -> None:
        self._keep, self._lend = [*runs], lend
        self.nbytes = sum([run.nbytes for run in runs])
        lend(self.nbytes)

    def hold(self, bulk: torch.Tensor) -> None:
        self._keep.append(bulk)
        self.nbytes += bulk.nbytes
        self._lend(bulk.nbytes)

    def end(self) -> None:
        """Count the memory no longer, because it was READ."""
        self._lend(-self.nbytes)


_WITHOUT_WAITING = SimpleNamespace(empty=lambda channel, nbytes, deadline: channel.pool.run(nbytes))
"""Memory for messages (``tensors.Memory``), for threads that must not wait for it: ``ArenaFull`` if there is none."""


class Fetch:
    """The READs of one message. ``ready``: all of it is here, or never will be, or it is to be READ at once (``read``).
    ``runs``: the large tensors, once they are READ. ``error``: why something could not be READ.

    A READ owns its memory until it has ended, even if nobody wants the message any more."""

    __slots__ = ("_body", "_link", "_memory", "_steps", "_work", "error", "frame", "ready", "runs")
    _memory: tuple[Memory, float | None]

    def __init__(self, link: Link, frame: Frame) -> None:
        self._link, self.frame = link, frame
        self.ready = not (frame.flags & AWAY and link.channel.reads_take_peer)
        self.runs: list[torch.Tensor] | None = None
        self.error: BaseException | None = None
        self._body: torch.Tensor | None = None
        self._steps: Iterator[Work] | None = None
        self._work: Work | None = None

    def advance(self, memory: Memory, deadline: float | None = None) -> Work | None:
        """Start the next READ, when the one before has ended; ``None`` if nothing is left to READ, or nothing can be (after
        ``ArenaFull`` it may be tried again). Waits as ``memory`` does, which gets ``deadline``. One thread at a time."""
        try:
            if self._work is not None:
                self._work.wait()
            self.error, self._memory = None, (memory, deadline)
            self._steps = self._steps or self._reads()
            self._work = next(self._steps, None)
        except BaseException as error:
            self._work, self._steps, self.error = None, None, bare(error)  # kept, so without frames
        self.ready = self._work is None
        return self._work

    def run(self, over: Callable[[], None]) -> None:
        """Do all READs, one after the other, without ever waiting, and call ``over()`` at the end (see ``Work.then``)."""
        if self.advance(_WITHOUT_WAITING) is None:
            over()
        else:
            self.run_on(over)

    def run_on(self, over: Callable[[], None]) -> None:
        """Go on with ``run`` when the READ that is under way has ended."""
        assert self._work is not None
        self._work.then(partial(self.run, over))

    def read(self, memory: Memory, deadline: float | None) -> None:
        """Do all READs, and wait for them, unless that was tried before. Waits for memory as ``memory`` does."""
        if self.runs is None and self.error is None:
            self.finish(memory, deadline, None)

    def finish(self, memory: Memory, deadline: float | None, until: float | None) -> None:
        """Do the READs that are left. Waits for memory as ``memory`` does, and for the data until then (``time.monotonic``;
        ``None``: without limit). Raises ``TransferTimeout`` if a READ is still under way."""
        while (work := self.advance(memory, deadline)) is not None:
            try:
                work.wait(None if until is None else max(0.0, until - time.monotonic()))
            except TransferTimeout:
                raise
            except RdmaError:
                pass  # it is kept, by ``advance``

    def whole(self) -> Frame:
        """The frame with its body. Raises why that did not come."""
        frame, body = self.frame, self._body
        if not frame.flags & BULK:
            return frame
        if body is None:
            self.check()
            raise RdmaError("a message was used before its body was READ")
        function, payload, table, _, tensors = _LENGTHS.unpack_from(frame.body)
        self._link.count_read()
        content, data = body.numpy(), function + payload + table
        parts = {"function": function, "payload": payload, "table": table, "body": content[:data].tobytes()}
        self.frame = frame._replace(flags=frame.flags & ~BULK, tensors=tensors, data=bytearray(content[data:]), **parts)
        self._body = None
        return self.frame

    def take(self) -> list[torch.Tensor]:
        """The runs, once. Raises why they could not be READ."""
        self.check()
        runs, self.runs = self.runs or [], []
        if runs:
            self._link.count_read()
        return runs

    def check(self) -> None:
        """Raises why something could not be READ."""
        if self.error is not None:
            raise fresh(self.error)

    def _reads(self) -> Iterator[Work]:
        """The body, unless it is here, then the runs, then the word of a recallable request, which is looked at when it is
        here."""
        channel, frame, lengths = self._link.channel, self.frame, None
        if frame.flags & BULK:
            lengths = _LENGTHS.unpack_from(frame.body)
            if self._body is None:
                body = self._empty(sum(lengths[:4]))
                yield channel.memcpy(body, RemoteRegion.load(frame.body[_LENGTHS.size :]))
                self._body = body
        runs: list[torch.Tensor] = []
        if frame.flags & READS:
            table, tensors = frame.body[frame.function + frame.payload :], frame.tensors
            if lengths is not None and self._body is not None:
                function, payload, size, _, tensors = lengths
                table = self._body[function + payload : function + payload + size].numpy().tobytes()
            places, word_place = to_read(table, tensors)
            runs = [self._empty(nbytes) for nbytes, _ in places]
            yield channel.prepare([(run, place) for run, (_, place) in zip(runs, places)]).post()
            if word_place is not None:
                word = self._empty(WORD_BYTES)
                yield channel.memcpy(word, word_place)
                check_wanted(word)
        self.runs = runs

    def _empty(self, nbytes: int) -> torch.Tensor:
        memory, deadline = self._memory
        return memory.empty(self._link.channel, nbytes, deadline)


def hold(server: Any, link: Link, frame: Frame) -> None:
    """Begin this request when its data is here, and those before it have begun. ``server``: the side of a worker that serves
    requests (``calls/callee``). Its ``begin(link, request)`` is called on a thread of its pool."""
    link.held.add(Fetch(link, frame))
    _go_on(server, link)  # it may be its turn


def resume(server: Any, link: Link) -> None:
    """Go on with the requests of a peer, which may have taken its answers. Never blocks. The thread that reads the rings calls
    it, and then gives the new job to the pool."""
    if link.held.any and not link.crowded:
        server.pool.jobs.append(partial(_go_on, server, link))


def _go_on(server: Any, link: Link) -> None:
    while (request := link.held.next_to_read()) is not None:
        _advance(server, link, request)
    if link.crowded:
        return
    request = link.held.take()
    if request is None:
        return
    if link.held.any:
        server.pool.submit(partial(_go_on, server, link))
    server.begin(link, request)


def _advance(server: Any, link: Link, request: Fetch) -> None:
    work = request.advance(server.memory)
    if work is None:
        link.held.over()
    else:
        link.held.reads(1)
        work.then(lambda: server.pool.submit(partial(_came, server, link, request)))


def _came(server: Any, link: Link, request: Fetch) -> None:
    link.held.reads(-1)
    _advance(server, link, request)
    _go_on(server, link)
