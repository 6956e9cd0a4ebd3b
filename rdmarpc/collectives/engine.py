"""One exchange after another over the lanes of a group, and what ends them: a lost member, a call that does not fit, a timeout.

Each two members have a lane (``transport/exchange``): slots in memory of the one that the other alone may write, both ways. An
*exchange* is spans of memory to each of some ranks, and from each of some ranks, where what arrives is copied to its place or
added up. A call is a number in the group's sequence; number, operation, type and sizes stand in front of every piece, so ranks
that call different things find out with the first piece.

A group that failed once stays failed: its streams may stand anywhere. Every member is told the reason, so all of them raise
it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Mapping
from functools import partial

from ..transport import PeerLost, RdmaError, TransferTimeout, exchange, fresh, kept
from .meeting import ERROR, LEFT, Ranks, has_left
from .signature import Mismatch, Signature, code_of

_SLICE_NS, _END_S = 20_000_000, 5.0
_MEND = "every rank has to make the same calls in the same order, with the same types and sizes"
_PLANS = 512
"""So many signatures and exchanges are remembered; then all are forgotten."""
Spans = Mapping[int, exchange.Span]
"""By rank."""


class _Aside(threading.local):
    """Whether this thread runs calls for threads that compute meanwhile."""

    on = False


aside = _Aside()


class Engine:
    """Used by one thread at a time, but for ``fail`` and ``error``."""

    def __init__(self, members: Ranks, timeout: float) -> None:
        self.members, self.rank, self.size, self.timeout = members, members.rank, members.size, timeout
        self.ranks = members.ranks
        """What texts call the members."""
        self.streams = members.streams
        self.error: BaseException | None = None
        """Why this group is of no use any more."""
        self._moves = threading.Lock()
        """Held while the streams move."""
        self.sequence = 0
        self._plans: dict[Hashable, exchange.Plan] = {}
        """For the first call of a signature, or, of lists and uneven parts, of these addresses."""
        self.signature = Signature("barrier")
        self.since = 0.0
        """When the call under way began (``time.monotonic``); 0: there is none."""
        self.limit = timeout

    def begin(self, signature: Signature, timeout: float) -> None:
        """Begin the next call. Raises the error of a group that has failed."""
        self.check()
        self.sequence += 1
        self.signature, self.limit, self.since = signature, timeout or self.timeout, time.monotonic()
        self._code = code_of(signature)

    def move(self, outs: Spans, ins: Spans = exchange.NOTHING, fold: exchange.Fold | None = None) -> None:
        """Send and receive between these addresses until all is done; a plan is made for the first call that has them. Raises
        what ended it; then the group has failed."""
        code, elements = self._code, self.signature.elements
        key = code, elements, fold, tuple(outs.items()), tuple(ins.items())
        self.run(key, lambda streams: streams.plan(code, elements, outs, ins, fold))

    def run(self, key: Hashable, make: Callable[[exchange.Streams], exchange.Plan], source: int = 0, target: int = 0) -> None:
        """Exchange by a plan (``Streams.begin``), which the first call of its ``key`` has made, until all is done. ``key``: all
        that the plan is made from. Raises as ``move``. A rank that is alone has nothing to do."""
        if self.size == 1:
            return
        with self._moves:
            streams = self.streams
            if self.error is not None or streams is None:
                self.check()
            assert streams is not None
            plan = self._plans.get(key)
            if plan is None:
                if len(self._plans) >= _PLANS:
                    self._plans.clear()
                plan = self._plans[key] = make(streams)
            if plan.changes:
                self._naming(partial(streams.offer, plan))
            streams.begin(plan, self.sequence, source, target, patient=aside.on)
            while (status := streams.advance(_SLICE_NS)) != exchange.OK:
                if status == exchange.MISMATCH:
                    raise self._mismatch(streams)
                self._look(streams, status == exchange.CLOSED)
            if plan.changes:
                self._naming(partial(streams.grow, plan, self.limit, partial(self._look, streams, False)))
                self._plans.clear()

    def _naming(self, use: Callable[[], None]) -> None:
        """Use channels outside of the exchange. Raises the reason for which one has ended."""
        try:
            use()
        except PeerLost as error:
            raise self.members.cause(error, f" during {self.told(self.signature)}") from None

    def _look(self, streams: exchange.Streams, closed: bool) -> None:
        """The exchange has not moved for a while: raise the reason, if there is one."""
        self.check()
        self.members.look(partial(self._gone, streams), f" during {self.told(self.signature)}")
        if closed:
            time.sleep(0.001)  # the reason is on its way
        if time.monotonic() - self.since > self.limit:
            what = f"{self.told(self.signature)}, call {self.sequence} of the group"
            why = f"{what}, was not done within {self.limit:g} s: {self.missing()}"
            raise TransferTimeout(why, hint="the timeout of init_process_group or new_group sets this limit")

    def _gone(self, streams: exchange.Streams) -> PeerLost | None:
        """What to raise if a member has left that is needed."""
        for rank, lane in streams.lanes.items():
            if has_left(lane) and streams.needs(rank):
                what = self.told(self.signature)
                return PeerLost(f"rank {self.ranks[rank]} has left the group, and {what} needs it", peer=lane.channel.peer)
        return None

    def _mismatch(self, streams: exchange.Streams) -> Mismatch:
        found = streams.header(rank := streams.at_fault())
        assert found is not None
        head, nbytes = found
        ours, theirs = self.told(self.signature), self.told(Signature.of(head.code, head.elements))
        me, other = (f"rank {self.ranks[each]}" for each in (self.rank, rank))
        if (head.code, head.elements) != (self._code, self.signature.elements):
            what = (
                f"{me} calls {ours} (its call {self.sequence} of the group), and {other} calls {theirs} "
                f"(its call {head.sequence})"
            )
        elif head.sequence != self.sequence:
            what = f"{me} is at call {self.sequence} of the group, {other} at call {head.sequence}: {ours}"
        else:
            what = f"in {ours} {me} expects {streams.expected(rank)} bytes of {other}, which sends {nbytes}"
        return Mismatch(what, hint=_MEND)

    def told(self, signature: Signature) -> str:
        """A call, for people."""
        root = signature.root
        return str(signature._replace(root=self.ranks[root]) if 0 <= root < self.size else signature)

    def missing(self) -> str:
        """Who the call under way waits for, for people."""
        streams = self.streams
        if streams is None:
            return "nobody is missing"
        absent = [f"rank {self.ranks[rank]}" for rank in streams.lanes if streams.awaits(rank)]
        slow = [f"rank {self.ranks[rank]}" for rank in streams.lanes if streams.full(rank)]
        parts = [f"nothing has come from {', '.join(absent)}"] if absent else []
        parts += [f"{', '.join(slow)} does not take what was sent"] if slow else []
        return "; ".join(parts) or "nobody is missing"

    def unseen(self) -> list[str]:
        """What others have called, or told of a failure, that no call of this rank has come upon. For people."""
        streams, found = self.streams, list[str]()
        if self.error is not None or streams is None:
            return found
        for rank, lane in streams.lanes.items():
            notice, next_piece = lane.notice(), streams.header(rank)
            if notice.startswith(ERROR):
                kind, _, text = notice[1:].partition(":")
                found.append(f"the group had failed: {kind}: {text}")
            elif next_piece is not None:
                call = Signature.of(next_piece[0].code, next_piece[0].elements)
                found.append(f"rank {self.ranks[rank]} called {self.told(call)}, and this rank has not")
        return list(dict.fromkeys(found))

    # -- the end

    def check(self) -> None:
        if self.error is not None:
            raise fresh(self.error)

    def fail(self, error: BaseException) -> None:
        """The group is of no use any more. Tell the others, once."""
        if self.error is not None:
            return
        if isinstance(error, Exception):
            self.error = kept(error)
        else:  # Ctrl-C, say, which is nothing that a later call may raise
            hint = "destroy_process_group() at all of its ranks, and make another one"
            self.error = RdmaError(f"{type(error).__name__} has ended an earlier call of this group", hint=hint)
        self.since = 0.0
        self.members.tell_failure(error)

    def forked(self, error: BaseException) -> None:
        """In a forked child: the group is its parent's. The others are told nothing. Takes no lock."""
        self._moves = threading.Lock()
        self.since = 0.0
        if self.size > 1:
            self.error = error

    def close(self) -> None:
        """Leave the group. A call under way in another thread ends first: the loops use memory of the device."""
        if self.error is None:
            self.error = RdmaError("the process group was destroyed")
        if not self._moves.acquire(timeout=_END_S):
            return  # memory that is never given back is better than memory taken from under a loop
        self.streams = None
        self._moves.release()
        self.members.close(LEFT)
