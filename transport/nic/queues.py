"""The queues that all queue pairs of a ``verbs`` device share, and its port block: the words from which the loops of
``words/completions`` know the device, laid out as ``PORT_*`` there; and a queue pair as its posters see it (``Lane``): its
words, the work requests posted on it, and the waits."""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
from collections.abc import Callable, Sequence

import numpy as np

from ..errors import NotSupported, RdmaError
from ..notify import wait_done
from ..peers.guard import naming
from ..words import completions, kernels
from ..words import layout as at
from .libibverbs import DeviceAttr, error_of
from .native import Context, QueuePair

LANES = 1 << 13
"""Queue pairs that a device can have."""
_RECEIVE_CHAIN = 64
_RECEIVES, _SENDS, _COMPLETIONS, _INLINE = 4096, 256, 1 << 16, 220


class Queues:
    """One completion queue and one shared receive queue. Queue pairs must be closed before the queues."""

    def __init__(self, context: Context, limits: DeviceAttr, bells: int) -> None:
        self._context = context
        with contextlib.ExitStack() as undo:
            self._cq = context.completion_queue(min(_COMPLETIONS, limits.max_cqe))
            undo.callback(self._cq.close)
            self._srq = context.shared_receive_queue(min(_RECEIVES, limits.max_srq_wr))
            undo.callback(self._srq.close)
            with naming("eventfd", device="verbs"):
                self._woken = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            undo.callback(os.close, self._woken)
            self._lay_out(context, bells)
            undo.pop_all()
        self.sends, self.receives = min(_SENDS, limits.max_qp_wr), self._srq.depth
        """Work requests that a queue pair holds, and receive requests that all of them have together."""
        self.room = min((self._cq.depth - self._srq.depth) // self.sends, LANES)
        """Queue pairs whose completions there is room for."""
        kernels.progress(self.port)

    def _lay_out(self, context: Context, bells: int) -> None:
        """The port block, with the chain of receive requests that is posted again and again."""
        self._wc = np.zeros(completions.WC_BATCH * at.WC_BYTES, np.uint8)
        self._table = np.zeros((2 * LANES, 2), np.int64)
        self._receives = np.zeros((_RECEIVE_CHAIN, at.RECV_WR_BYTES // 8), np.int64)
        first = self._receives.ctypes.data
        self._receives[:-1, at.RECV_WR_NEXT // 8] = first + np.arange(1, _RECEIVE_CHAIN) * at.RECV_WR_BYTES
        fds = (self._cq.channel_fd, context.async_fd, self._woken)
        self._fds = np.array([fd | 1 << 32 for fd in fds], np.int64)  # struct pollfd: fd, POLLIN, what happened
        self._words = words = np.zeros(completions.PORT_WORDS, np.int64)
        self.port: int = words.ctypes.data
        """The address of the port block, which lives as long as this object."""
        self.post_send = operation(context, at.OPS_POST_SEND)
        """Address of ``ibv_post_send``."""
        library = ctypes.CDLL("libibverbs.so.1")
        words[completions.PORT_CQ] = self._cq.address
        words[completions.PORT_POLL_CQ] = operation(context, at.OPS_POLL_CQ)
        words[completions.PORT_REQ_NOTIFY] = operation(context, at.OPS_REQ_NOTIFY_CQ)
        words[completions.PORT_SRQ] = self._srq.address
        words[completions.PORT_POST_RECV] = operation(context, at.OPS_POST_SRQ_RECV)
        words[completions.PORT_RECV_CHAIN] = first
        words[completions.PORT_RECV_COUNT] = _RECEIVE_CHAIN
        # Nothing is posted yet: the first look posts them all.
        words[completions.PORT_RECV_USED] = self._srq.depth // _RECEIVE_CHAIN * _RECEIVE_CHAIN
        words[completions.PORT_WC] = self._wc.ctypes.data
        words[completions.PORT_TABLE] = self._table.ctypes.data
        words[completions.PORT_TABLE_MASK] = len(self._table) - 1
        words[completions.PORT_BELLS] = bells
        words[completions.PORT_GET_EVENT] = ctypes.cast(library.ibv_get_cq_event, ctypes.c_void_p).value or 0
        words[completions.PORT_ACK_EVENTS] = ctypes.cast(library.ibv_ack_cq_events, ctypes.c_void_p).value or 0
        words[completions.PORT_CHANNEL] = ctypes.c_uint64.from_address(self._cq.address + at.CQ_CHANNEL).value
        words[completions.PORT_FDS] = self._fds.ctypes.data
        words[completions.PORT_WAKE] = self._woken

    def pair(self, port: int) -> QueuePair:
        """A new queue pair on that port."""
        return self._context.queue_pair(self._cq, self._srq, port=port, depth=self.sends, max_inline=_INLINE)

    def wait(self, limit_ns: int) -> bool:
        """Serve the completion channel for ``limit_ns``. Returns whether ``wake`` was called or something failed."""
        if not completions.serve(self.port, limit_ns):
            return False
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._woken)
        return True

    def wake(self) -> None:
        """Have ``wait`` return."""
        os.eventfd_write(self._woken, 1)

    def close(self) -> None:
        self._srq.close()
        self._cq.close()
        os.close(self._woken)


def operation(context: Context, offset: int) -> int:
    """Address of one of a context's operations."""
    return int(ctypes.c_uint64.from_address(context.address + offset).value)


_REQUEST = struct.Struct("<QQQiIIIQI")
_ELEMENT = struct.Struct("<QII")
_NO_PATH = "is UDP port 4791 open between the hosts, are both in one routed RoCE or InfiniBand network? try ib_write_bw"


class Lane:
    """The sending side of one queue pair, and its words. Any thread. The channel that owns it closes the queue pair; the words
    stay for as long as a thread may look at them."""

    __slots__ = ("__weakref__", "_probe", "_words", "address", "chain_max", "depth", "max_inline", "peer", "port", "qp")

    def __init__(self, qp: QueuePair, port: int, records: int, post_send: int, peer: str) -> None:
        self.qp, self.port, self.peer = qp, port, peer
        self._probe = Chain([(at.WR_RDMA_WRITE, 0, 0, 0, 0, 0, 0, 0)])
        self.depth, self.max_inline = qp.depth, qp.max_inline
        self.chain_max = max(qp.depth // 2, 1)
        """Requests of a chain, at most: one may be posted while another is under way."""
        words = self._words = np.zeros(completions.LANE_WORDS, np.int64)
        self.address = words.ctypes.data
        words[completions.LANE_DEPTH] = qp.depth
        words[completions.LANE_QP] = qp.address
        words[completions.LANE_POST_SEND] = post_send
        words[completions.LANE_RECORDS] = records

    @property
    def posted(self) -> int:
        """Work requests, ever."""
        return kernels.load(self.address + 8 * completions.LANE_POSTED)

    @property
    def reached(self) -> int:
        """How many of them are done."""
        return kernels.load(self.address + 8 * completions.LANE_REACHED)

    @property
    def stats(self) -> tuple[int, int]:
        """Posts and payload bytes."""
        return int(self._words[completions.LANE_POSTS]), int(self._words[completions.LANE_BYTES])

    def failure(self) -> RdmaError | None:
        """The first completion that was an error, by name; ``None`` if there was none."""
        vendor = kernels.load(self.address + 8 * completions.LANE_VENDOR)
        status = kernels.load(self.address + 8 * completions.LANE_STATUS)
        return error_of(status, peer=self.peer, vendor_err=vendor) if status else None

    def passed(self, seq: int) -> bool:
        """Whether ``seq`` is done, or the lane has ended."""
        return kernels.load(self.address) >= seq

    def wait(self, seq: int, timeout: float | None) -> None:
        """Wait until ``passed(seq)``. Raises ``TransferTimeout``."""
        wait_done(self.address, seq, timeout, self.port, peer=self.peer, device="verbs")

    def wait_for_room(self, count: int, limit_ns: int = kernels.SLICE_NS) -> None:
        """Wait until ``count`` more requests fit, or ``limit_ns`` have passed."""
        kernels.wait_count(self.address, self.posted + count - self.depth, kernels.SPIN, limit_ns, self.port)

    def end(self) -> None:
        """Refuse all later posts, and let every wait return."""
        completions.end_lane(self.address)

    def shut(self) -> None:
        """In a forked child, refuse all later posts."""
        kernels.store(self.address + 8 * completions.LANE_CLOSED, completions.SHUT)

    def seen(self) -> bool:
        """Whether anything was completed since the last call."""
        word = self.address + 8 * completions.LANE_SEEN
        if not kernels.load(word):
            return False
        kernels.store(word, 0)
        return True

    def _post_probe(self) -> int:
        seq = completions.post(self.address, self._probe.address)
        if seq > 0:
            kernels.add(self.address + 8 * completions.LANE_POSTS, -1)  # it was nobody's
        return seq

    def prove(self, timeout: float, ended: Callable[[], RdmaError]) -> None:
        """Check that RDMA packets go to the peer and back, by a WRITE of no bytes, which only the peer's adapter has to
        acknowledge. Raises ``NotSupported`` if they do not, after about two seconds,
        ``TransferTimeout``, and ``ended()`` if nothing can be posted any more."""
        seq = self._post_probe()
        if seq <= 0:
            raise ended()
        self.wait(seq, timeout)
        if self.reached < seq:
            error = self.failure() or ended()
            why = f"no RDMA packet comes back from {self.peer}: {error.message}"
            raise NotSupported(why, peer=self.peer, device="verbs", status=error.status, hint=_NO_PATH)

    def keep_alive(self) -> None:
        """Make the peer's adapter acknowledge a WRITE of no bytes if the lane is idle. If it does not, the retries run out."""
        if not self.seen() and self.posted == self.reached:
            self._post_probe()


class Chain:
    """Work requests in memory, linked, the last one signalled. ``requests``: (opcode, flags, address, lkey, remote address,
    rkey, bytes, imm)."""

    __slots__ = ("_elements", "_memory", "address", "count", "nbytes", "words")

    def __init__(self, requests: Sequence[tuple[int, int, int, int, int, int, int, int]]) -> None:
        self.count = len(requests)
        self._memory = np.zeros(self.count * at.SEND_WR_BYTES, np.uint8)
        self._elements = np.zeros(max(self.count, 1) * at.SGE_BYTES, np.uint8)
        first, first_element = self._memory.ctypes.data, self._elements.ctypes.data
        memory, elements = memoryview(self._memory), memoryview(self._elements)
        self.nbytes = 0
        for index, (opcode, flags, address, lkey, remote, rkey, nbytes, imm) in enumerate(requests):
            last = index == self.count - 1
            here = index * at.SEND_WR_BYTES
            following = 0 if last else first + here + at.SEND_WR_BYTES
            element = first_element + index * at.SGE_BYTES
            flags |= at.SEND_SIGNALED if last else 0
            order = int.from_bytes(imm.to_bytes(4, "little"), "big")
            _REQUEST.pack_into(memory, here, 0, following, element, int(nbytes > 0), opcode, flags, order, remote, rkey)
            _ELEMENT.pack_into(elements, index * at.SGE_BYTES, address, nbytes, lkey)
            self.nbytes += nbytes
        self.words = np.zeros(completions.CHAIN_WORDS, np.int64)
        self.words[:] = first, first + (self.count - 1) * at.SEND_WR_BYTES, self.count, self.nbytes
        self.address = self.words.ctypes.data

    def point(self, index: int, address: int, lkey: int) -> None:
        """Have request ``index`` take its local bytes from there."""
        here = index * at.SGE_BYTES
        self._elements[here : here + 8].view(np.uint64)[0] = address
        self._elements[here + at.SGE_LKEY : here + at.SGE_LKEY + 4].view(np.uint32)[0] = lkey
