"""The queues that all queue pairs of a ``verbs`` device share, and its port block: the words from which the loops of
``words/completions`` know the device, laid out as ``PORT_*`` there."""

from __future__ import annotations

import contextlib
import ctypes
import os

import numpy as np

from ..sandboxed import naming
from ..words import completions, kernels
from ..words import layout as at
from .attributes import DeviceAttr
from .native import CompletionQueue, Context, QueuePair, SharedReceiveQueue

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
            self._block = PortBlock(context, self._cq, self._srq, bells=bells, woken=self._woken)
            undo.pop_all()
        self.sends, self.receives = min(_SENDS, limits.max_qp_wr), self._srq.depth
        """Work requests that a queue pair holds, and receive requests that all of them have together."""
        self.room = min((self._cq.depth - self._srq.depth) // self.sends, LANES)
        """Queue pairs whose completions there is room for."""
        self.port, self.post_send = self._block.address, self._block.post_send
        kernels.progress(self.port)

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


class PortBlock:
    """The port block of one device, with the chain of receive requests that is posted again and again. The owner keeps it for
    as long as any thread may poll ``address``."""

    def __init__(self, context: Context, cq: CompletionQueue, srq: SharedReceiveQueue, *, bells: int, woken: int) -> None:
        """``woken``: an eventfd that wakes the thread which sleeps on the completion channel."""
        self._wc = np.zeros(completions.WC_BATCH * at.WC_BYTES, np.uint8)
        self._table = np.zeros((2 * LANES, 2), np.int64)
        self._receives = np.zeros((_RECEIVE_CHAIN, at.RECV_WR_BYTES // 8), np.int64)
        first = self._receives.ctypes.data
        self._receives[:-1, at.RECV_WR_NEXT // 8] = first + np.arange(1, _RECEIVE_CHAIN) * at.RECV_WR_BYTES
        fds = (cq.channel_fd, context.async_fd, woken)
        self._fds = np.array([fd | 1 << 32 for fd in fds], np.int64)  # struct pollfd: fd, POLLIN, what happened
        self._words = words = np.zeros(completions.PORT_WORDS, np.int64)
        self.address: int = words.ctypes.data
        self.post_send = operation(context, at.OPS_POST_SEND)
        """Address of ``ibv_post_send``."""
        library = ctypes.CDLL("libibverbs.so.1")
        words[completions.PORT_CQ] = cq.address
        words[completions.PORT_POLL_CQ] = operation(context, at.OPS_POLL_CQ)
        words[completions.PORT_REQ_NOTIFY] = operation(context, at.OPS_REQ_NOTIFY_CQ)
        words[completions.PORT_SRQ] = srq.address
        words[completions.PORT_POST_RECV] = operation(context, at.OPS_POST_SRQ_RECV)
        words[completions.PORT_RECV_CHAIN] = first
        words[completions.PORT_RECV_COUNT] = _RECEIVE_CHAIN
        # Nothing is posted yet: the first look posts them all.
        words[completions.PORT_RECV_USED] = srq.depth // _RECEIVE_CHAIN * _RECEIVE_CHAIN
        words[completions.PORT_WC] = self._wc.ctypes.data
        words[completions.PORT_TABLE] = self._table.ctypes.data
        words[completions.PORT_TABLE_MASK] = len(self._table) - 1
        words[completions.PORT_BELLS] = bells
        words[completions.PORT_GET_EVENT] = ctypes.cast(library.ibv_get_cq_event, ctypes.c_void_p).value or 0
        words[completions.PORT_ACK_EVENTS] = ctypes.cast(library.ibv_ack_cq_events, ctypes.c_void_p).value or 0
        words[completions.PORT_CHANNEL] = ctypes.c_uint64.from_address(cq.address + at.CQ_CHANNEL).value
        words[completions.PORT_FDS] = self._fds.ctypes.data
        words[completions.PORT_WAKE] = woken


def operation(context: Context, offset: int) -> int:
    """Address of one of a context's operations."""
    return int(ctypes.c_uint64.from_address(context.address + offset).value)
