"""Transfers and windows of a ``tcp`` channel, and its posts, numbered in the order in which the stream goes out: how far the
peer has answered."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Sequence

import torch

from ..channel import DONE, NOTHING, Transfer, Window, Work, rebound
from ..errors import PeerLost, RdmaError, RemoteAccessError, fresh
from ..notify import wait_done
from ..region import RemoteRegion, local_bytes
from ..words import kernels
from ..words.signals import ENDED
from .outbox import HEADER, LAST, LATER, NOTIFY, READ, SILENT, WRITE, Buffers, Outbox, memory_at

Hear = Callable[[int, int, float | None], bool]
"""See ``TcpChannel.hear_until``."""
_UNANSWERED = 64  # posts that may wait for an answer that rides on another frame


def never(record: int, target: int, timeout: float | None) -> bool:
    return False


class Posts:
    """The posts of one channel. Any thread posts; whichever thread reads enters the answers. Posting holds the outbox's lock,
    so that frames go out in the order of their numbers."""

    def __init__(self, outbox: Outbox, records: mmap.mmap, answers: int, bells: int, peer: str) -> None:
        """``answers``: address of the record in ``records`` that counts the answered posts."""
        self.answers, self.peer = answers, peer
        self.answered = 0
        """The last post that was answered."""
        self.error: RdmaError | None = None
        self.hear: Hear = never
        self.count = self.nbytes = 0
        self.last = 0
        """The number of the last post."""
        self._urgent = 0  # the last post that the peer answers by a frame of its own
        self._outbox, self._records, self._bells = outbox, records, bells
        self._pending: dict[int, TcpWork] = {}

    @property
    def waiting(self) -> bool:
        """Whether a post waits for its answer."""
        return bool(self._pending)

    def check(self) -> None:
        """Raises what ended the channel."""
        if self.error is not None:
            raise fresh(self.error)

    # -- posting

    def _enlist(self, work: TcpWork) -> int:
        self.check()
        self.last += 1
        work.seq = self.last
        self._pending[work.seq] = work
        return work.seq

    def post(self, frames: Callable[[int, int], Buffers], nbytes: int, framed: int, work: TcpWork) -> None:
        """Send the frames of a transfer, ``framed`` bytes (0: with READs): ``frames(number, flags)`` makes them. The answer
        completes ``work``. That of a small post comes with a frame that the peer sends for another reason, or when somebody
        asks for it (``urge``)."""
        with self._outbox.lock:
            seq, flags = self._enlist(work), LAST
            if framed and len(self._pending) < _UNANSWERED and self._outbox.sends_at_once(framed):
                flags |= LATER
                work.keep = ()
            else:
                self._urgent = seq
            self.count += 1
            self.nbytes += nbytes
            self._outbox.send(frames(seq, flags))

    def urge(self, seq: int) -> None:
        """Have the peer answer the posts up to ``seq`` now."""
        with self._outbox.lock:
            if self._urgent < seq and self.answered < seq and self.error is None:
                self.ask(NOTIFY)

    def notify(self, imm: int | None) -> None:
        """Send a notification alone (``None``: an empty transfer, nothing to send)."""
        with self._outbox.lock:
            self.check()
            self.count += 1
            if imm is not None:
                self._outbox.send([HEADER.pack(NOTIFY, LAST | SILENT, 0, imm + 1, self.last, 0, 0, 0, 0)])

    def ask(self, op: int, place: tuple[int, int, int, int] = (0, 0, 0, 0)) -> TcpWork:
        """Send one frame without payload that the peer answers. Frames are taken in order, so the answer also says that all
        before it are there."""
        work = TcpWork(self, (), {}, None)
        with self._outbox.lock:
            seq = self._urgent = self._enlist(work)
            self._outbox.send([HEADER.pack(op, LAST, 0, 0, seq, *place)])
        return work

    def put(self, op: int, imm: int, place: tuple[int, int, int, int], view: memoryview) -> None:
        """One unacknowledged frame. When this returns, the bytes of ``view`` are with the kernel, or copied."""
        with self._outbox.lock:
            self.check()
            self.last += 1
            self.count += 1
            self.nbytes += place[3]
            self._outbox.send([HEADER.pack(op, LAST | SILENT, 0, imm, self.last, *place), view], keep=False)

    # -- answers

    def target(self, seq: int, index: int) -> memoryview | None:
        """The memory for the data of copy ``index`` of a post. ``None`` if that copy was not asked for, or has come before."""
        work = self._pending.get(seq)
        return None if work is None else work.reads.pop(index, None)

    def answer(self, seq: int) -> None:
        """Complete all posts up to ``seq`` (I/O thread). Raises ``PeerLost`` if the peer has not sent the data of a READ."""
        callbacks = []
        with self._outbox.lock:
            while self._pending:
                first = next(iter(self._pending))
                if first > seq:
                    break
                work = self._pending[first]
                if work.error is None and work.reads:
                    why = "the peer sent an answer without the data"
                    raise PeerLost(why, peer=self.peer, device="tcp", status="PROTOCOL")
                del self._pending[first]
                work.keep = ()
                if work.callback is not None:
                    callbacks.append(work.callback)
                if work.error is None and work.imm is not None:
                    self.notify(work.imm)
            self._advance(seq)
        for callback in callbacks:
            callback()

    def settle(self, seq: int) -> bool:
        """As ``answer``, on a thread that waits: only where nothing else is to be done for these posts, else ``False``. Should
        a signal handler interrupt it, it is done again later."""
        with self._outbox.lock:
            if self.error is not None:
                return False
            for number, work in self._pending.items():
                if number > seq:
                    break
                if work.reads or work.imm is not None or work.error is not None or work.callback is not None:
                    return False
            while self._pending and (first := next(iter(self._pending))) <= seq:
                self._pending[first].keep = ()
                del self._pending[first]
            self._advance(seq)
        return True

    def _advance(self, seq: int) -> None:
        """Count the posts up to ``seq`` as answered. With the lock: what is not pending any more is done."""
        if seq > self.answered and self.error is None:
            kernels.store(self.answers, seq - 1)
            kernels.signal(self.answers, self._bells)
            self.answered = seq

    def refuse(self, seq: int, error: RemoteAccessError) -> None:
        """As ``answer``, but the post ``seq`` itself failed with ``error``."""
        work = self._pending.get(seq)
        if work is None:
            raise error
        work.error = error
        self.answer(seq)

    def call_when_answered(self, work: TcpWork, callback: Callable[[], None]) -> bool:
        """Have ``callback()`` run (on the I/O thread, or the thread that ends the channel) when ``work`` is answered. Returns
        ``False`` if it is answered already."""
        with self._outbox.lock:
            if self._pending.get(work.seq) is not work:
                return False
            work.callback = callback
            return True

    def end(self, error: RdmaError) -> list[Callable[[], None]]:
        """End all posts: those without an answer fail with ``error``, and every wait returns, now and later. Call it with the
        outbox's lock held. Returns the callbacks to call without it."""
        self.error, self.hear = error, never
        callbacks = [work.callback for work in self._pending.values() if work.callback is not None]
        self._pending.clear()
        kernels.add(self.answers, ENDED - 1)
        kernels.signal(self.answers, self._bells)
        return callbacks


class TcpWork(Work):
    """One post under way. It keeps the local tensors alive until the peer has answered."""

    __slots__ = ("_looked", "_posts", "callback", "error", "imm", "keep", "reads", "seq")

    def __init__(self, posts: Posts, keep: Sequence[torch.Tensor], reads: dict[int, memoryview], imm: int | None) -> None:
        self._posts, self.keep, self.reads = posts, keep, reads
        self.imm = imm  # to be sent when the reads have come
        self.seq = 0  # given by ``Posts``
        self.error: RdmaError | None = None
        self.callback: Callable[[], None] | None = None  # given by ``Posts``
        self._looked = False

    def done(self) -> bool:
        if kernels.load(self._posts.answers) >= self.seq:
            return True
        if self._looked:  # not at the first look: many look once, to let go of memory, and not again before they use it
            self._posts.urge(self.seq)
        self._looked = True
        return False

    def wait(self, timeout: float | None = None) -> None:
        posts, begin = self._posts, time.monotonic()
        posts.urge(self.seq)
        if not posts.hear(posts.answers, self.seq, timeout):
            wait_done(posts.answers, self.seq, timeout, 0, peer=posts.peer, device="tcp", begin=begin)
        if (error := self.exception()) is not None:
            raise fresh(error)

    def exception(self) -> RdmaError | None:
        if self.error is not None:
            return self.error
        ended = self._posts.error  # read first: once it is set, ``answered`` changes no more
        return ended if self.done() and self.seq > self._posts.answered else None

    def then(self, callback: Callable[[], None]) -> None:
        if not self._posts.call_when_answered(self, callback):
            callback()
            return
        self._posts.urge(self.seq)


class _Piece:
    __slots__ = ("index", "remote", "tensor", "view", "write")

    def __init__(self, index: int, remote: RemoteRegion, tensor: torch.Tensor, write: bool) -> None:
        self.index, self.remote, self.tensor, self.write = index, remote, tensor, write
        self.view = memory_at(*local_bytes(tensor))


class TcpTransfer(Transfer):
    """One WRITE frame a copy, sent from where the tensor lies; one READ frame a copy, answered into where it lies."""

    __slots__ = ("__weakref__", "_framed", "_imm", "_live", "_pieces", "_posts", "nbytes")

    def __init__(self, posts: Posts, sides: Sequence[tuple[RemoteRegion, torch.Tensor, bool]], imm: int | None) -> None:
        self._posts, self._imm = posts, imm
        self._pieces = [_Piece(index, *side) for index, side in enumerate(sides)]
        self._live = [piece for piece in self._pieces if piece.remote.nbytes]
        self.nbytes = sum(piece.remote.nbytes for piece in self._live)
        writes = all(piece.write for piece in self._live)
        self._framed = self.nbytes + HEADER.size * len(self._live) if writes else 0

    def post(self) -> Work:
        if not self._live:
            self._posts.notify(self._imm)
            return DONE
        reads = {piece.index: piece.view for piece in self._live if not piece.write}
        # With READs the peer is told when their data is here, so by a frame of its own.
        work = TcpWork(self._posts, [piece.tensor for piece in self._live], reads, self._imm if reads else None)
        self._posts.post(self._frames, self.nbytes, self._framed, work)
        return work

    def _frames(self, seq: int, last_flags: int) -> Buffers:
        parts: Buffers = []
        last = self._live[-1]
        for piece in self._live:
            op, flags, imm = WRITE if piece.write else READ, 0, 0
            if piece is last:
                flags, imm = last_flags, self._imm + 1 if self._framed and self._imm is not None else 0
            remote = piece.remote
            parts.append(HEADER.pack(op, flags, piece.index, imm, seq, remote.region, remote.key, remote.offset, remote.nbytes))
            if piece.write:
                parts.append(piece.view)
        return parts

    def rebind(self, index: int, tensor: torch.Tensor) -> None:
        piece = self._pieces[index]
        address = rebound(index, piece.remote.nbytes, tensor)
        piece.tensor, piece.view = tensor, memory_at(address, piece.remote.nbytes)

    def unbind(self, index: int) -> None:
        piece = self._pieces[index]
        piece.tensor, piece.view = NOTHING, memoryview(b"")


class TcpWindow(Window):
    """Unacknowledged WRITEs. The range was checked when the window was made; should the peer refuse a ``put`` nevertheless,
    the channel ends with ``RemoteAccessError``, because nobody else would hear of it."""

    __slots__ = ("_imm", "_posts", "_remote", "_tensor", "_view")

    def __init__(self, posts: Posts, remote: RemoteRegion, local: torch.Tensor, imm: int) -> None:
        self._posts, self._remote, self._imm, self._tensor = posts, remote, imm + 1, local
        self._view = memory_at(*local_bytes(local))

    def put(self, offset: int, nbytes: int) -> None:
        remote, view = self._remote, self._view[offset : offset + nbytes]
        place = remote.region, remote.key, remote.offset + offset, nbytes
        self._posts.put(WRITE if nbytes else NOTIFY, self._imm, place, view)

    put_now = put  # what the socket does not take is left to the I/O thread
