"""One exchange after another over the lanes of a group, and what ends them: a lost member, a call that does not fit, a timeout.

A group that failed once stays failed: its streams may stand anywhere. Every member is told the reason, so all of them raise
it."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

from ..transport import PeerLost, RdmaError, TransferTimeout, fresh, kept
from ..transport.exchange.kernels import CLOSED, MISMATCH, OK
from ..transport.exchange.streams import NOTHING, Fold, Head, Span
from .meeting import Members
from .signature import Signature

_SLICE_NS, _END_S = 20_000_000, 5.0
ERROR, LEFT = "E", "L"
"""The first letter of a notice: the group has failed, or its sender has left it."""
GRACE_S = 0.05
"""A member may leave because another was lost, and be the first to know: the news of a loss goes before that of a leaving."""
_MEND = "every rank has to make the same calls in the same order, with the same types and sizes"


class Mismatch(RdmaError):
    """Two ranks call different things."""


class Engine:
    """Used by one thread at a time, but for ``fail`` and ``error``."""

    def __init__(self, members: Members, timeout: float) -> None:
        self.members, self.rank, self.size, self.timeout = members, members.rank, members.size, timeout
        self.streams = members.streams
        self.error: BaseException | None = None
        """Why this group is of no use any more."""
        self._moves = threading.Lock()
        """Held while the streams move."""
        self.sequence = 0
        self.signature = Signature("barrier")
        self.since = 0.0
        """When the call under way began (``time.monotonic``); 0: there is none."""
        self.limit = timeout

    def begin(self, signature: Signature, timeout: float) -> None:
        """Begin the next call. Raises the error of a group that has failed."""
        self.check()
        self.sequence += 1
        self.signature, self.limit, self.since = signature, timeout or self.timeout, time.monotonic()
        self._code = signature.code

    def end(self) -> None:
        self.since = 0.0

    def exchange(self, outs: Mapping[int, Span], ins: Mapping[int, Span] = NOTHING, fold: Fold | None = None) -> None:
        """Send and receive, as ``Streams.begin`` has it, until all is done. Raises what ended it; then the group has failed."""
        with self._moves:
            self.check()
            streams = self.streams
            assert streams is not None
            streams.begin(Head(self.sequence, self._code, self.signature.elements), outs, ins, fold)
            while (status := streams.advance(_SLICE_NS)) != OK:
                if status == MISMATCH:
                    raise self._mismatch(streams.at_fault())
                self._look(status == CLOSED)

    def _look(self, closed: bool) -> None:
        """The exchange has not moved for a while: raise the reason, if there is one."""
        self.check()
        if self._gone() is not None:
            time.sleep(GRACE_S)
            if (gone := self._gone()) is not None:
                raise gone
        if closed:
            time.sleep(0.001)  # the reason is on its way
        if time.monotonic() - self.since > self.limit:
            raise TransferTimeout(
                f"{self.signature}, call {self.sequence} of the group, was not done within {self.limit:g} s: {self.missing()}",
                hint="the timeout of init_process_group or new_group sets this limit",
            )

    def _gone(self) -> PeerLost | None:
        """Raise that a member was lost, or what it says went wrong. What to raise if a member has left that is needed."""
        streams = self.streams
        assert streams is not None
        gone: PeerLost | None = None
        for rank, lane in streams.lanes.items():
            notice, lost = lane.notice(), lane.channel.error
            if notice.startswith(ERROR):
                raise RdmaError(notice[1:])
            if notice.startswith(LEFT) or (lost is not None and lost.status == "CLOSED"):
                if gone is None and streams.needs(rank):
                    gone = PeerLost(f"rank {rank} has left the group, and {self.signature} needs it", peer=lane.channel.peer)
            elif lost is not None:
                raise PeerLost(f"rank {rank} was lost during {self.signature}: {lost.message}", peer=lane.channel.peer)
        return gone

    def _mismatch(self, rank: int) -> Mismatch:
        streams = self.streams
        assert streams is not None
        found = streams.header(rank)
        assert found is not None
        head, nbytes = found
        theirs, ours = Signature.of(head.code, head.elements), self.signature
        if (head.code, head.elements) == (self._code, ours.elements):
            if head.sequence != self.sequence:
                what = f"rank {self.rank} is at call {self.sequence} of the group, rank {rank} at call {head.sequence}: {ours}"
            else:
                what = f"in {ours} rank {self.rank} expects {streams.expected(rank)} bytes of rank {rank}, which sends {nbytes}"
        else:
            what = (
                f"rank {self.rank} calls {ours} (its call {self.sequence} of the group), "
                f"and rank {rank} calls {theirs} (its call {head.sequence})"
            )
        return Mismatch(what, hint=_MEND)

    def missing(self) -> str:
        """Who the call under way waits for, for people."""
        streams = self.streams
        if streams is None:
            return "nobody is missing"
        absent = [f"rank {rank}" for rank in streams.lanes if streams.awaits(rank)]
        slow = [f"rank {rank}" for rank in streams.lanes if streams.full(rank)]
        parts = [f"nothing has come from {', '.join(absent)}"] if absent else []
        parts += [f"{', '.join(slow)} does not take what was sent"] if slow else []
        return "; ".join(parts) or "nobody is missing"

    # -- the end

    def check(self) -> None:
        if self.error is not None:
            raise fresh(self.error)

    def fail(self, error: BaseException) -> None:
        """The group is of no use any more. Tell the others, once."""
        if self.error is not None:
            return
        self.error = kept(error)
        self.since = 0.0
        message = error.message if isinstance(error, RdmaError) else f"{type(error).__name__}: {error}"
        if not message.startswith("rank "):
            message = f"rank {self.rank}: {message}"
        self.members.tell(f"{ERROR}{message}")

    def close(self) -> None:
        """Leave the group. A call under way in another thread ends first: the loops use memory of the device."""
        if self.error is None:
            self.error = RdmaError("the process group was destroyed")
        if not self._moves.acquire(timeout=_END_S):
            return  # memory that is never given back is better than memory taken from under a loop
        self.streams = None
        self._moves.release()
        self.members.close(LEFT)
