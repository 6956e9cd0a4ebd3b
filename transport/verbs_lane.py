"""One queue pair of a channel as its posters see it: its words (``verbs_kernels``), and the waits on them."""

from __future__ import annotations

import numpy as np

from . import kernels, verbs_kernels
from .notify import wait_done
from .verbs_provider import QueuePair


class Lane:
    """Any thread. The channel that owns it closes the queue pair; the words stay for whoever still looks at them."""

    __slots__ = ("__weakref__", "_words", "address", "chain_max", "depth", "max_inline", "peer", "port", "qp")

    def __init__(self, qp: QueuePair, port: int, records: int, post_send: int, peer: str) -> None:
        self.qp, self.port, self.peer = qp, port, peer
        self.depth, self.max_inline = qp.depth, qp.max_inline
        self.chain_max = max(qp.depth // 2, 1)
        """Requests of a chain, at most: one may be posted while another is under way."""
        words = self._words = np.zeros(verbs_kernels.LANE_WORDS, np.int64)
        self.address = words.ctypes.data
        words[verbs_kernels.LANE_DEPTH] = qp.depth
        words[verbs_kernels.LANE_QP] = qp.address
        words[verbs_kernels.LANE_POST_SEND] = post_send
        words[verbs_kernels.LANE_RECORDS] = records

    @property
    def posted(self) -> int:
        """Work requests, ever."""
        return kernels.load(self.address + 8 * verbs_kernels.LANE_POSTED)

    @property
    def reached(self) -> int:
        """How many of them are done."""
        return kernels.load(self.address + 8 * verbs_kernels.LANE_REACHED)

    @property
    def status(self) -> tuple[int, int]:
        """Status and vendor code of the first completion that was an error; (0, 0): there was none."""
        vendor = kernels.load(self.address + 8 * verbs_kernels.LANE_VENDOR)
        return kernels.load(self.address + 8 * verbs_kernels.LANE_STATUS), vendor

    @property
    def stats(self) -> tuple[int, int]:
        """Posts and payload bytes."""
        return int(self._words[verbs_kernels.LANE_POSTS]), int(self._words[verbs_kernels.LANE_BYTES])

    def passed(self, seq: int) -> bool:
        """Whether ``seq`` is done, or the lane has ended."""
        return kernels.load(self.address) >= seq

    def wait(self, seq: int, timeout: float | None) -> None:
        """Until ``passed``. ``TransferTimeout``."""
        wait_done(self.address, seq, timeout, self.port, peer=self.peer, device="verbs")

    def wait_for_room(self, count: int, limit_ns: int = kernels.SLICE_NS) -> None:
        """Until ``count`` more requests fit, or a moment has passed."""
        kernels.wait_count(self.address, self.posted + count - self.depth, kernels.SPIN, limit_ns, self.port)

    def end(self) -> None:
        """No post any more, and every wait returns."""
        verbs_kernels.end_lane(self.address)

    def seen(self) -> bool:
        """Whether anything was completed since the last call."""
        word = self.address + 8 * verbs_kernels.LANE_SEEN
        if not kernels.load(word):
            return False
        kernels.store(word, 0)
        return True

    def count_not(self) -> None:
        """The last post was nobody's."""
        kernels.add(self.address + 8 * verbs_kernels.LANE_POSTS, -1)
