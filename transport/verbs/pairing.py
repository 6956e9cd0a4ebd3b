"""Connecting the queue pairs of two peers: each offers one in its setup, and connects it to the other's."""

from __future__ import annotations

import secrets

from ..errors import NotSupported
from ..nic import endpoint
from ..nic.endpoint import Endpoint
from ..nic.native import QueuePair
from ..nic.ports import Port
from ..nic.queues import Queues
from .control import Setup
from .watch import Watch

# A packet is sent 4.096 us * 2 ** 16 = 0.27 s apart, seven times. Not 7 retries: Soft-RoCE takes that for endless ones.
_TIMEOUT, _RETRY_CNT = 16, 6


class Pairing:
    """Makes and connects the queue pairs of one device."""

    def __init__(self, at: Port, queues: Queues, watch: Watch) -> None:
        self._at, self._queues, self._watch = at, queues, watch

    def offer(self, uid: int, epoch: int, patience_s: float) -> tuple[QueuePair, Setup]:
        """Make a queue pair, which the caller closes. Returns it with the setup to send to the peer. Raises ``NotSupported`` if
        the completion queue has no room for another one."""
        if self._watch.full:
            why = f"the completion queue of {self._at.name} has room for {self._queues.room} queue pairs"
            raise NotSupported(why, device="verbs")
        qp = self._queues.pair(self._at.number)
        there, psn = self._at.endpoint.dump(), secrets.randbits(24)
        return qp, Setup(uid, epoch, int(patience_s * 1000), self._at.port.max_msg_sz, there, qp.qp_num, psn)

    def connect(self, qp: QueuePair, ours: Setup, theirs: Setup) -> None:
        """Connect a queue pair to the peer's, by the setups of both ends."""
        route = endpoint.route(
            self._at.endpoint,
            Endpoint.load(theirs.endpoint),
            port=self._at.number,
            sgid_index=self._at.gid.index,
            dest_qp_num=theirs.qp_num,
            rq_psn=theirs.psn,
            sq_psn=ours.psn,
            timeout=_TIMEOUT,
            retry_cnt=_RETRY_CNT,
        )
        qp.connect(route)
