"""The port block: what the compiled loops (``verbs_kernels``) know of a ``verbs`` device, laid out as ``PORT_*`` there."""

from __future__ import annotations

import ctypes

import numpy as np

from . import verbs_kernels
from . import verbs_layout as at
from .verbs_provider import CompletionQueue, Context, SharedReceiveQueue

LANES = 1 << 13
"""Queue pairs that a device can have."""
_RECEIVE_CHAIN = 64


class PortBlock:
    """Of one device's queues, with the chain of receive requests that is posted again and again. To be kept for as long as
    anybody may poll ``address``."""

    def __init__(self, context: Context, cq: CompletionQueue, srq: SharedReceiveQueue, *, bells: int, woken: int) -> None:
        """``woken``: an eventfd that wakes the thread which sleeps on the completion channel."""
        self._wc = np.zeros(verbs_kernels.WC_BATCH * at.WC_BYTES, np.uint8)
        self._table = np.zeros((2 * LANES, 2), np.int64)
        self._receives = np.zeros((_RECEIVE_CHAIN, at.RECV_WR_BYTES // 8), np.int64)
        first = self._receives.ctypes.data
        self._receives[:-1, at.RECV_WR_NEXT // 8] = first + np.arange(1, _RECEIVE_CHAIN) * at.RECV_WR_BYTES
        fds = (cq.channel_fd, context.async_fd, woken)
        self._fds = np.array([fd | 1 << 32 for fd in fds], np.int64)  # struct pollfd: fd, POLLIN, what happened
        self._words = words = np.zeros(verbs_kernels.PORT_WORDS, np.int64)
        self.address: int = words.ctypes.data
        self.post_send = operation(context, at.OPS_POST_SEND)
        """Address of ``ibv_post_send``."""
        library = ctypes.CDLL("libibverbs.so.1")
        words[verbs_kernels.PORT_CQ] = cq.address
        words[verbs_kernels.PORT_POLL_CQ] = operation(context, at.OPS_POLL_CQ)
        words[verbs_kernels.PORT_REQ_NOTIFY] = operation(context, at.OPS_REQ_NOTIFY_CQ)
        words[verbs_kernels.PORT_SRQ] = srq.address
        words[verbs_kernels.PORT_POST_RECV] = operation(context, at.OPS_POST_SRQ_RECV)
        words[verbs_kernels.PORT_RECV_CHAIN] = first
        words[verbs_kernels.PORT_RECV_COUNT] = _RECEIVE_CHAIN
        # Nothing is posted yet: the first look posts them all.
        words[verbs_kernels.PORT_RECV_USED] = srq.depth // _RECEIVE_CHAIN * _RECEIVE_CHAIN
        words[verbs_kernels.PORT_WC] = self._wc.ctypes.data
        words[verbs_kernels.PORT_TABLE] = self._table.ctypes.data
        words[verbs_kernels.PORT_TABLE_MASK] = len(self._table) - 1
        words[verbs_kernels.PORT_BELLS] = bells
        words[verbs_kernels.PORT_GET_EVENT] = ctypes.cast(library.ibv_get_cq_event, ctypes.c_void_p).value or 0
        words[verbs_kernels.PORT_ACK_EVENTS] = ctypes.cast(library.ibv_ack_cq_events, ctypes.c_void_p).value or 0
        words[verbs_kernels.PORT_CHANNEL] = ctypes.c_uint64.from_address(cq.address + at.CQ_CHANNEL).value
        words[verbs_kernels.PORT_FDS] = self._fds.ctypes.data
        words[verbs_kernels.PORT_WAKE] = woken


def operation(context: Context, offset: int) -> int:
    """Address of one of a context's operations."""
    return int(ctypes.c_uint64.from_address(context.address + offset).value)
