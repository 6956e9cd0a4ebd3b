"""Messages between two ranks: ``send``, ``recv``, ``recv_anysource``, with tags.

Each two ranks have a lane of their own for them. A message that nobody here has asked for stays in the lane, and its sender
waits, unless a later one behind it is asked for: then it is kept apart. Whoever waits for a message moves its lane on; a
thread does so for messages that nobody waits for."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import lru_cache

import torch

from ..transport import NotSupported, PeerLost, RdmaError, TransferTimeout, exchange, fresh, kept, kernels, nobody
from .engine import aside
from .meeting import Ranks, has_left
from .queue import Order, Work
from .signature import Mismatch, Signature, code_of
from .staging import writing

_SLICE_NS, _LOOK_S = 20_000_000, 0.0005
_PLANS, _ORDERS = 256, 1024
_REST_S, _LINGER = 0.002, 25
_SEND, _RECEIVE, _APART = "send to", "receive from", "receive apart from"


@lru_cache(64)
def _code(dtype: torch.dtype) -> int:
    return code_of(Signature("send", dtype))


def _called(ranks: Sequence[int], peer: int) -> str:
    return f"rank {ranks[peer]}" if peer >= 0 else "any rank"


class Message(Work):
    """A message to be sent, or to come. ``peer`` is -1 for one from anybody."""

    put: Callable[[], None] | None = None
    """Brings what came to where it belongs, if that is not ``data`` itself."""

    def __init__(self, pairs: Pairs, data: torch.Tensor, outputs: list[torch.Tensor], peer: int, tag: int, kind: str) -> None:
        """``kind``: ``_SEND``, ``_RECEIVE``, or ``_APART`` for one that came before it was asked for."""
        super().__init__(nobody, outputs, kind)
        self.pairs, self.peer, self.tag, self.kind = pairs, peer, tag, kind
        self.data: torch.Tensor | None = data
        """What is sent, or where it comes; ``None`` once that is over: nobody may ever wait."""
        self.source = peer
        self.code, self.nbytes = _code(data.dtype), data.nbytes
        self.count, self.dtype = data.numel(), data.dtype

    @property
    def describe(self) -> str:
        kind_of = f"{self.count} elements, {self.dtype}, tag {self.tag}"
        return f"{self.kind} {_called(self.pairs.ranks, self.peer)}({kind_of})"

    def finish(self, error: BaseException | None, give: Callable[[], object] | None = None) -> None:
        if error is None:  # else another thread may be moving it
            self.let_go()
        super().finish(error, give)

    def let_go(self) -> None:
        """Hold no memory. Nobody moves this message any more."""
        self.data = self.put = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self.over:
            self.pairs.wait_for(self, timeout.total_seconds() if timeout else 0.0)
        return super().wait(timeout)


class _Way:
    """One direction of one lane: the streams of a group of two."""

    def __init__(self, moves: exchange.Streams, peer: int, *, out: bool) -> None:
        self.streams, self.peer, self.out = moves, peer, out
        self.lock = threading.Lock()
        """Held by the thread that moves it on, for as long as something moves, and by nobody for long."""
        self.count = 0
        self.current: Message | None = None
        self.arriving = exchange.Head(0, 0, 0)
        self.queue: deque[Message] = deque()
        self._plans: dict[tuple[int, int, int], exchange.Plan] = {}
        self._plan: exchange.Plan | None = None
        """Of the message under way, if it ``changes`` the lane."""

    def begin(self, sequence: int, code: int, tag: int, message: Message) -> None:
        """Send a message, or take one. The first of its size, type and tag makes a plan."""
        assert message.data is not None
        address, nbytes = message.data.data_ptr(), message.nbytes
        plan = self._plans.get((code, tag, nbytes))
        if plan is None:
            if len(self._plans) >= _PLANS:
                self._plans.clear()
            sides = {self.peer: (0, nbytes)}, dict[int, tuple[int, int]]()
            plan = self._plans[code, tag, nbytes] = self.streams.plan(code, tag, *(sides if self.out else sides[::-1]))
        if plan.changes:
            self.streams.offer(plan)
            self._plan = plan
        self.streams.begin(plan, sequence, address, address, patient=aside.on)

    def end(self, limit: float, check: Callable[[], None]) -> None:
        """The message under way has moved."""
        plan, self._plan = self._plan, None
        if plan is not None:
            self.streams.grow(plan, limit, check)
            self._plans.clear()


class Pairs:
    """Thread-safe."""

    def __init__(self, members: Ranks, timeout: float) -> None:
        self.rank, self.ranks, self.timeout, self.members = members.rank, members.ranks, timeout, members
        self.error: BaseException | None = None
        self._lock = threading.Lock()
        self._outs: dict[int, _Way] = {}
        self._ins: dict[int, _Way] = {}
        if members.domain is not None:
            device, bell = members.domain.device, members.domain.bell
            for peer, lane in members.lanes[1].items():
                self._outs[peer] = _Way(exchange.streams(device, members.rank, {peer: lane}, bell), peer, out=True)
                self._ins[peer] = _Way(exchange.streams(device, members.rank, {peer: lane}, bell), peer, out=False)
        self._wanted: list[Message] = []
        """Messages to come, in the order in which they were asked for."""
        self._apart: deque[tuple[int, int, exchange.Head, torch.Tensor]] = deque()
        """Messages that came before they were asked for: rank, tag, head, bytes."""
        self._order = lru_cache(_ORDERS)(lambda kind, peer, tag: (Order(), f"{kind} {_called(self.ranks, peer)} (tag {tag})"))
        """That of messages which can take each other's places, and what they are called."""
        self._thread: threading.Thread | None = None
        self._news = threading.Event()
        self._dozes = False
        """Whether the thread has to be woken for a message. Most are waited for at once, and need it not."""
        self._closed = False
        self._broken: list[Message] = []
        """Messages that were under way when the group failed: a thread may be moving them still."""

    def send(self, data: torch.Tensor, peer: int, tag: int, outputs: list[torch.Tensor]) -> Message:
        message = Message(self, data, outputs, peer, tag, _SEND)
        way = self._outs[peer]
        self._check(message)
        with self._lock:
            way.queue.append(message)
        self._move((way,))
        return self._posted(message)

    def receive(
        self, data: torch.Tensor, peer: int, tag: int, put: Callable[[], None] | None, outputs: list[torch.Tensor]
    ) -> Message:
        """``peer``: -1 for any. ``put``: see ``Message``."""
        message = Message(self, data, outputs, peer, tag, _RECEIVE)
        message.put = put
        self._check(message)
        found = None
        with self._lock:
            if self._apart:
                found = next((each for each in self._apart if peer in (each[0], -1) and each[1] == tag), None)
            if found is None:
                self._wanted.append(message)
            else:
                self._apart.remove(found)
        if found is not None:
            self._hand_over(message, *found)
        else:
            self._move(self._ways_of(message))
        return self._posted(message)

    def _posted(self, message: Message) -> Message:
        if not message.over:
            with self._lock:
                if self._thread is None and not self._closed:
                    self._thread = threading.Thread(target=self._serve, name="rdmarpc-pairs", daemon=True)
                    self._thread.start()
            if self._dozes:
                self._news.set()
        return message

    def _check(self, message: Message) -> None:
        """Raise if the group has failed, or if a callback asks for this one and its order among the like of it depends on
        timing."""
        if self.error is not None:
            raise fresh(self.error)
        try:
            with self._lock:
                order, what = self._order(message.kind, message.peer, message.tag)
                order.add(what)
        except NotSupported as error:
            self.fail(error)
            raise

    def _ways(self) -> list[_Way]:
        return [*self._outs.values(), *self._ins.values()]

    def _ways_of(self, message: Message) -> Sequence[_Way]:
        if message.kind == _SEND:
            return (self._outs[message.peer],)
        return (self._ins[message.peer],) if message.peer >= 0 else tuple(self._ins.values())

    # -- moving

    def wait_for(self, message: Message, timeout: float) -> None:
        """Move the lanes of a message on until it is over. Raises ``TransferTimeout`` after ``timeout`` seconds; the message
        goes on. With 0, after those of the group: then the group has failed, because a message that still came would go to a
        tensor that nobody waits for, and the next one of its tag to whom it was not meant for."""
        limit = timeout or self.timeout
        start = time.monotonic()
        ways = self._ways_of(message)
        while not message.over:
            if len(ways) == 1 and ways[0].lock.acquire(blocking=False):
                try:
                    self._advance(ways[0], _SLICE_NS, message)
                finally:
                    ways[0].lock.release()
            elif not self._move(ways) and not message.over:
                time.sleep(_LOOK_S / 10)
            if not message.over and time.monotonic() - start > limit:
                error = TransferTimeout(f"{message.describe} was not done within {limit:g} s")
                if not timeout:
                    self.fail(error)
                raise error

    def _move(self, ways: Sequence[_Way], *, look: bool = False) -> bool:
        """Move these on as far as they go at once, unless another thread does. ``look``: also as ``_look``."""
        moved = False
        for way in ways:
            if way.lock.acquire(blocking=False):
                try:
                    moved |= self._advance(way, 0, None)
                    if look:
                        self._look(way)
                finally:
                    way.lock.release()
        return moved

    def _advance(self, way: _Way, slice_ns: int, until: Message | None) -> bool:
        """With the way's lock: go on until nothing moves for ``slice_ns``, or ``until`` is over. Whether something moved."""
        moved = False
        while not self._closed and (until is None or not until.over):
            try:
                if way.current is None and not (self._begin_send(way) if way.out else self._begin_receive(way, slice_ns)):
                    if slice_ns:
                        self._look(way)
                    return moved
                message = way.current  # a failure lets go of it: its memory stays for as long as it moves
                if message is None:
                    return moved
                status = way.streams.advance(slice_ns)
                if status == exchange.OK:
                    way.end(self.timeout, lambda: self._look(way))
                    self._done(way, message)
                    moved = True
                    continue
                if status == exchange.MISMATCH:
                    raise RdmaError("a message came in pieces that are not its own")
                self._look(way, status == exchange.CLOSED)
                return moved
            except BaseException as error:
                self.fail(self.members.cause(error))
                return True
        return moved

    def _begin_send(self, way: _Way) -> bool:
        if not way.queue:
            return False
        with self._lock:
            if not way.queue:
                return False
            message = way.current = way.queue.popleft()
        way.count += 1
        way.begin(way.count, message.code, message.tag, message)
        return True

    def _begin_receive(self, way: _Way, slice_ns: int) -> bool:
        """Find out whom the next message of a lane is for. ``False`` if none has come that is wanted."""
        found = way.streams.header(way.peer)
        if found is None and slice_ns:
            way.streams.rest(slice_ns)
            found = way.streams.header(way.peer)
        if found is None:
            return False
        head, nbytes = found
        with self._lock:
            message, others = None, False
            for number, each in enumerate(self._wanted):
                if each.peer in (way.peer, -1):
                    others = True
                    if each.tag == head.elements:
                        message = self._wanted.pop(number)
                        break
        if not others:
            return False
        if message is None:
            apart = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            message = Message(self, apart, [], way.peer, head.elements, _APART)
        way.current = message
        if message.kind != _APART and (problem := self._misfit(message, way.peer, head, nbytes)) is not None:
            raise problem  # whoever waits for the message gets it, too: it is the current one
        message.source = way.peer
        way.arriving = head
        way.begin(head.sequence, head.code, head.elements, message)
        return True

    def _misfit(self, message: Message, peer: int, head: exchange.Head, nbytes: int) -> Mismatch | None:
        here = message.nbytes
        if nbytes == here and head.code == message.code:
            return None
        theirs = Signature.of(head.code, 0)
        if nbytes == here and theirs.dtype is None:
            return None
        me, other = self.ranks[self.rank], self.ranks[peer]
        return Mismatch(
            f"rank {me} receives {here} bytes of {message.dtype} from rank {other}, which sends {nbytes} of "
            f"{theirs.dtype} (tag {head.elements})"
        )

    def _done(self, way: _Way, message: Message) -> None:
        with self._lock:
            if way.current is not message:
                return  # a failure has ended it meanwhile
            way.current = None
        if message.kind == _APART:
            head = way.arriving
            assert message.data is not None
            with self._lock:
                asked = next((m for m in self._wanted if m.peer in (way.peer, -1) and m.tag == message.tag), None)
                if asked is None:
                    self._apart.append((way.peer, message.tag, head, message.data))
                else:
                    self._wanted.remove(asked)
            if asked is not None:
                self._hand_over(asked, way.peer, message.tag, head, message.data)
            return
        self._finish(message)

    def _hand_over(self, message: Message, peer: int, tag: int, head: exchange.Head, data: torch.Tensor) -> None:
        problem = self._misfit(message, peer, head, data.numel())
        if problem is not None:
            self.fail(problem)
            message.finish(problem)
            return
        message.source = peer
        assert message.data is not None
        kernels.copy(message.data.data_ptr(), data.data_ptr(), data.numel())
        self._finish(message)

    def _finish(self, message: Message) -> None:
        if message.put is not None:
            try:
                with writing(message.outputs):
                    message.put()
            except BaseException as error:
                message.finish(error)
                message.let_go()
                raise
        message.finish(None)

    # -- what ends it

    def _look(self, way: _Way, closed: bool = False) -> None:
        """Raise the reason why this way will not move any more, if there is one."""
        self.members.look(lambda: self._gone(way))
        if closed:
            time.sleep(_LOOK_S)

    def _gone(self, way: _Way) -> PeerLost | None:
        """What to raise if the peer has left and is needed."""
        lane = self.members.lanes[0][way.peer]
        if not has_left(lane):
            return None
        waits = way.current is not None or (
            way is self._ins.get(way.peer) and any(each.peer == way.peer for each in self._wanted)
        )
        taken = way.current is not None and not way.streams.needs(way.peer)
        if not waits or way.streams.header(way.peer) is not None or taken:
            return None
        what = way.current.describe if way.current is not None else "a message"
        return PeerLost(f"rank {self.ranks[way.peer]} has left the group, and {what} needs it", peer=lane.channel.peer)

    def fail(self, error: BaseException) -> None:
        with self._lock:
            first = self.error is None
            if first:
                self.error = kept(error)
            over, begun = [*self._wanted], []
            self._wanted.clear()
            self._apart.clear()
            for way in self._ways():
                over += way.queue
                way.queue.clear()
                if way.current is not None:
                    begun.append(way.current)
                    way.current = None
            self._broken += begun
        if first and not self._closed:
            self.members.tell_failure(error)
        for message in [*over, *begun]:
            if not message.over:
                message.finish(self.error)
        for message in over:
            message.let_go()

    def _serve(self) -> None:
        """Move on what nobody waits for."""
        aside.on = True
        ways = self._ways()
        idle = 0
        while not self._closed:
            if not self._pending(ways):
                idle += 1
                if idle < _LINGER:
                    time.sleep(_REST_S)
                    continue
                self._doze(ways)
            idle = 0
            try:
                if self._move(ways, look=True):
                    continue
            except BaseException as error:
                self.fail(error)
            time.sleep(_REST_S)

    def _pending(self, ways: list[_Way]) -> bool:
        return bool(self._wanted) or any(way.queue or way.current for way in ways)

    def _doze(self, ways: list[_Way]) -> None:
        """Wait for a message. One that came before ``_dozes`` was set is seen here, a later one sets ``_news``."""
        self._news.clear()
        self._dozes = True
        if not self._closed and not self._pending(ways):
            self._news.wait(1.0)
        self._dozes = False

    def forked(self, error: BaseException) -> None:
        """In a forked child: end what was under way in the parent. Takes no lock."""
        self._lock, self._news, self._thread, self._dozes = threading.Lock(), threading.Event(), None, False
        self.error = error
        for message in self._under_way():
            message.forked(error)
        self._wanted.clear()
        for way in self._ways():
            way.lock, way.current = threading.Lock(), None
            way.queue.clear()

    def waiting(self) -> list[str]:
        """What is under way, for people."""
        with self._lock:
            return [each.describe for each in self._under_way()]

    def _under_way(self) -> list[Message]:
        """The messages that are not over. Call it with the lock held."""
        ways = self._ways()
        queued = [each for way in ways for each in way.queue]
        return [*self._wanted, *queued, *(way.current for way in ways if way.current is not None)]

    def unseen(self) -> list[str]:
        """Messages that nobody here has asked for. For people."""
        if self.error is not None:
            return []
        with self._lock:
            apart = [(peer, tag, data.numel()) for peer, tag, _, data in self._apart]
        for peer, way in self._ins.items():
            if way.current is None and (found := way.streams.header(peer)) is not None:
                apart.append((peer, found[0].elements, found[1]))
        return [f"a message of rank {self.ranks[peer]} ({size} bytes, tag {tag}) was not received" for peer, tag, size in apart]

    def close(self) -> None:
        self._closed = True
        self.fail(RdmaError("the process group was destroyed"))
        self._news.set()
        stopped = True
        for way in self._ways():
            if way.lock.acquire(timeout=1.0):  # whoever moves it stops, and nobody begins again
                way.lock.release()
            else:
                stopped = False
        for message in self._broken if stopped else ():
            message.let_go()
        self._broken.clear()
        self._outs, self._ins = {}, {}
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(1.0)
