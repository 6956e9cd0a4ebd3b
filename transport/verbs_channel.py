"""The connection between two processes over a reliable connected queue pair and a control stream.

What the peer has registered is announced on the stream, so descriptors are checked here, before anything is posted: a wrong
key, range or life is an error of one call. What the hardware refuses nevertheless ends the channel, as every work completion
error does (the queue pair is in the error state then).

There is one queue pair, or several (*lanes*, option ``qps``). What has no notification of its own, and what is small, goes to
the first, in the order in which it is posted: layers above announce such writes by a later message. Large copies that
announce themselves take the others in turn, and nothing small waits behind them.

No late write: whoever ends the channel puts its queue pair into the error state and destroys it. Packets for it are dropped
by the device from then on, whoever sends them and however long they were on their way."""

from __future__ import annotations

import itertools
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from . import kernels, verbs_control, verbs_kernels
from . import verbs_layout as at
from .channel import Channel, Local, Pair, Transfer, Window, Work, check_notify, sort_pair
from .device import Device
from .errors import NotSupported, PeerLost, RdmaError, RemoteAccessError, fresh, kept
from .heartbeat import goodbye
from .mapping import anonymous
from .notify import Expectation
from .questions import Questions
from .records import MAX_NOTIFY, RECORD_BYTES
from .region import RemoteRegion
from .verbs_control import ControlStream, Message, Setup
from .verbs_gpu import FlushedExpectation
from .verbs_lane import Lane
from .verbs_provider import QueuePair
from .verbs_status import error_of
from .verbs_transfer import Chain, Held, Place, VerbsTransfer, VerbsWindow
from .verbs_transfer import Local as LocalMemory

if TYPE_CHECKING:
    from .verbs_behind import Later  # a kernel stands behind it, which only who has a GPU needs

_NO_PATH = "is UDP port 4791 open between the hosts, are both in one routed RoCE or InfiniBand network? try ib_write_bw"
_LARGE = 256 << 10
_DRAIN_TIMEOUT_S = 5.0  # the adapter has its answers, or gives up, long before


class Owner(Protocol):
    """The device, as its channels need it."""

    max_msg_sz: int
    post_send: int

    def lost(self, channel: VerbsChannel, error: RdmaError) -> None: ...

    def break_off(self, channel: VerbsChannel, error: BaseException, doing: str) -> None: ...

    def wake(self) -> None: ...

    def forget(self, channel: VerbsChannel) -> None: ...

    def drop_lane(self, qp_num: int) -> None: ...


class VerbsChannel(Channel):
    device: Device
    registered_only = True

    def __init__(
        self,
        device: Device,
        owner: Owner,
        local: LocalMemory,
        stream: ControlStream,
        qps: Sequence[QueuePair],
        peer: Setup,
    ) -> None:
        super().__init__(device)
        self._owner, self.local = owner, local
        self.stream = stream
        self.peer, self.peer_hello, self.peer_uid, self.peer_epoch = stream.peer, b"", peer.uid, peer.epoch
        self.max_msg_sz = min(owner.max_msg_sz, peer.max_msg_sz)
        self.known = False
        """To somebody above, who is told when it is lost."""
        self.port = device.port
        self._inbox = anonymous(MAX_NOTIFY * RECORD_BYTES)
        self._records = torch.frombuffer(self._inbox, dtype=torch.uint8, count=1).data_ptr()
        posting = owner.post_send
        self.lanes = [Lane(qp, device.port, self._records, posting, stream.peer) for qp in qps]
        self._turns = itertools.count()
        self._places: dict[int, tuple[int, int, int, int, bool]] = {}  # number -> (address, bytes, key, rkey, may be written)
        self._foreign: dict[int, weakref.WeakSet[VerbsTransfer]] = {}  # regions that may go, and what was prepared for them
        self._table_lock = threading.Lock()
        self._questions = Questions()
        self._left: deque[tuple[Lane, int, Held]] = deque()  # filled by finalizers: append only
        self.gpus = bool(local.gpu_kind)
        self.later: set[Later] = set()
        """What waits for a GPU (``verbs_behind``)."""
        self._keepalive = Chain([(at.WR_RDMA_WRITE, 0, 0, 0, 0, 0, 0, 0)])
        self._end_lock = threading.Lock()
        self._released = False
        self.silence = 0.0

    # -- copies

    def prepare(self, pairs: Sequence[Pair], *, notify: int | None = None) -> Transfer:
        return self._prepare(pairs, notify, once=False)

    def memcpy(self, dst: Local | RemoteRegion, src: Local | RemoteRegion, *, notify: int | None = None) -> Work:
        return self._prepare([(dst, src)], notify, once=True).post()

    def _prepare(self, pairs: Sequence[Pair], imm: int | None, *, once: bool) -> VerbsTransfer:
        self.check()
        check_notify(imm)
        sides = []
        for dst, src in pairs:
            remote, tensor, write = sort_pair(dst, src, self.local.gpu_kind)
            sides.append((remote, self.resolve(remote, write=write), tensor, write))
        self.sweep()
        transfer = VerbsTransfer(self, sides, imm, once=once)
        with self._table_lock:
            for remote, *_ in sides:
                if (users := self._foreign.get(remote.region)) is not None:
                    users.add(transfer)
                elif remote.nbytes and remote.region not in self._places:
                    raise self.refused(f"region {remote.region} is not registered (any more)")
        return transfer

    def window(self, remote: RemoteRegion, local: torch.Tensor, *, notify: int) -> Window:
        self.check()
        check_notify(notify)
        remote, local, _ = sort_pair(remote, local)
        place = self.resolve(remote, write=True)
        if remote.region in self._foreign:
            raise NotSupported("a window needs memory of the peer's arena", peer=self.peer, device="verbs")
        return VerbsWindow(self, remote, place, local, notify)

    def record(self, imm: int) -> int:
        check_notify(imm)
        return self._records + imm * RECORD_BYTES

    def expect(self, imm: int, count: int = 1) -> Expectation:
        return FlushedExpectation(self, imm, count, self.count(imm), self.local.arrived)

    def resolve(self, remote: RemoteRegion, *, write: bool) -> Place:
        """Where a remote range is. ``RemoteAccessError``."""
        if remote.nbytes == 0:
            return 0, 0
        known = remote.resolved
        if known is not None and known[0] is self and (known[2] or not write):
            return known[1]  # type: ignore[return-value]
        if remote.owner != self.peer_uid or remote.epoch != self.peer_epoch:
            raise self.refused("the descriptor was exported by another device, or in an earlier life of this one")
        entry = self._places.get(remote.region)
        if entry is None:
            # Announcements leave before any descriptor that names them, so one that is missing is on its way, and needs nothing
            # of the peer any more. They are ordered: after the answer we know all that the descriptor's owner knew.
            ask, number = self._questions.ask, self._questions.number()
            ask(self, self.stream.send, verbs_control.SYNC, number, lambda: remote.region in self._places)
            entry = self._places.get(remote.region)
        if entry is None:
            raise self.refused(f"region {remote.region} is not registered (any more)")
        address, nbytes, key, rkey, writable = entry
        if write and not writable:
            raise self.refused(f"region {remote.region} may only be read")
        if key != remote.key:
            raise self.refused(f"wrong key for region {remote.region}")
        if remote.offset + remote.nbytes > nbytes:
            raise self.refused(f"bytes {remote.offset}:{remote.offset + remote.nbytes} of a region of {nbytes} bytes")
        place = address + remote.offset, rkey
        if remote.region not in self._foreign:  # segments stay for the channel's life, so the answer holds as long
            remote.resolved = (self, place, write)  # type: ignore[assignment]
        return place

    def lane_for(self, imm: int | None, nbytes: int) -> Lane:
        """Where copies of so many bytes and that notification travel."""
        if imm is None or nbytes < _LARGE or len(self.lanes) == 1:
            return self.lanes[0]
        return self.lanes[1 + next(self._turns) % (len(self.lanes) - 1)]

    def make_room(self, lane: Lane, why: int, count: int) -> None:
        """After a post that was not taken: return when it may be tried again, or raise."""
        if why == verbs_kernels.FULL:
            self.device.count("send_queue_full")
            lane.wait_for_room(count)
            if self.error is not None:
                raise fresh(self.error)
        elif why == verbs_kernels.REFUSED:
            refusal = "the queue pair did not take a work request"
            self.lost(RdmaError(refusal, peer=self.peer, device="verbs", status="POST_SEND"))
            raise self.ended()
        else:
            raise self.ended()

    def notify_after(self, imm: int, device: torch.device | str) -> Work:
        self.check()
        check_notify(imm)
        place = torch.device(device)
        if not self.gpus or place.type != self.local.gpu_kind:
            raise NotSupported(f"{place} is no GPU of this process", peer=self.peer, device="verbs")
        index = torch.accelerator.current_device_index() if place.index is None else place.index
        post = self.notifier(imm).post
        return self.behind((index,), post) or post()

    def behind(self, indices: Collection[int], post: Callable[[], Work]) -> Work | None:
        """See ``GpuMemory.behind``."""
        return self.local.gpu.behind(self, indices, post)

    def fence(self, timeout: float | None = None) -> None:
        self.check()
        deadline = None if timeout is None else time.monotonic() + timeout
        for later in list(self.later):
            later.leave(None if deadline is None else max(deadline - time.monotonic(), 0.0))
        if deadline is not None:
            timeout = max(deadline - time.monotonic(), 0.0)
        for lane, seq in [(lane, lane.posted) for lane in self.lanes]:
            lane.wait(seq, timeout)
            if lane.reached < seq:
                raise self.ended()

    def leave(self, lane: Lane, held: Held) -> None:
        """A transfer died: what it held goes when nothing of it is under way. Runs in finalizers: takes no lock."""
        self._left.append((lane, lane.posted, held))

    def sweep(self) -> None:
        """Give back what transfers left behind and nothing reads any more. Any thread."""
        while self._left:
            try:
                lane, seq, held = self._left.popleft()
            except IndexError:
                return
            if not self._released and lane.reached < seq:
                self._left.appendleft((lane, seq, held))
                return
            for block in held.blocks:
                self.device.arena.free(block)
            for region in held.regions:
                region.close()

    def prove(self, timeout: float) -> None:
        """RDMA packets go to the peer and back on every queue pair: a WRITE of no bytes, which only its adapter has to
        acknowledge. ``NotSupported`` if they do not, after about two seconds; ``TransferTimeout``."""
        deadline = time.monotonic() + timeout
        for lane in self.lanes:
            seq = verbs_kernels.post(lane.address, self._keepalive.address)
            if seq <= 0:
                raise self.ended()
            lane.count_not()
            lane.wait(seq, max(deadline - time.monotonic(), 0.0))
            if lane.reached < seq:
                error = self.failure() or self.ended()
                why = f"no RDMA packet comes back from {self.peer}: {error.message}"
                raise NotSupported(why, peer=self.peer, device="verbs", status=error.status, hint=_NO_PATH)

    def keep_alive(self) -> None:
        """Nothing came for a while: have the peer's adapter acknowledge a WRITE of no bytes, or the retries run out."""
        lane = self.lanes[0]
        idle = not lane.seen() and lane.posted == lane.reached
        if idle and verbs_kernels.post(lane.address, self._keepalive.address) > 0:
            lane.count_not()

    def refused(self, why: str) -> RemoteAccessError:
        return RemoteAccessError(why, peer=self.peer, device="verbs", status="REM_ACCESS_ERR")

    def check(self) -> None:
        super().check()
        if os.getpid() != self.device.pid:
            raise RdmaError("a channel cannot be used in a forked child", device="verbs", hint="fork first, or use spawn")

    def totals(self) -> tuple[int, int]:
        posts, nbytes = zip(*(lane.stats for lane in self.lanes))
        return sum(posts), sum(nbytes)

    # -- control messages

    def withdraw(self, number: int) -> None:
        """Tell the peer that a region is gone; returns when no copy of theirs on it is under way."""
        self._questions.ask(self, self.stream.send, verbs_control.GONE, number)

    def hear(self, message: Message) -> None:
        """Handle one control message (device's service thread). Raises ``PeerLost`` for a goodbye."""
        kind, number = message.kind, message.number
        if kind in (verbs_control.SEGMENT, verbs_control.LANDING, verbs_control.REGION):
            writable = kind != verbs_control.SEGMENT
            with self._table_lock:
                self._places[number] = (message.address, message.nbytes, message.key, message.rkey, writable)
                if kind == verbs_control.REGION:
                    self._foreign[number] = weakref.WeakSet()
            self._questions.news()
        elif kind == verbs_control.GONE:
            # Waits for what is under way there: not on the thread that serves all channels.
            threading.Thread(target=self._give_up_region, args=(number,), name="rdmarpc-revoke", daemon=True).start()
        elif kind == verbs_control.SYNC:
            self.stream.send(verbs_control.SYNC_ACK, number)
        elif kind in (verbs_control.GONE_ACK, verbs_control.SYNC_ACK):
            self._questions.answer(kind, number)
        elif kind == verbs_control.BYE:
            status, why = goodbye(number)
            raise PeerLost(why, peer=self.peer, device="verbs", status=status)

    def _give_up_region(self, number: int) -> None:
        with self._table_lock:
            self._places.pop(number, None)
            users = list(self._foreign.pop(number, ()))
        under_way = [(user.lane, user.revoke(f"region {number} is not registered (any more)")) for user in users]
        try:
            for lane, seq in under_way:
                lane.wait(seq, _DRAIN_TIMEOUT_S)
            self.stream.send(verbs_control.GONE_ACK, number)
        except RdmaError:
            pass  # no answer: the owner's wait says so, and deregisters all the same
        except BaseException as error:
            self.break_off(error, "letting go of a peer's memory")

    # -- the end

    def ended(self) -> RdmaError:
        """Why nothing is posted any more, to be raised. The device's thread finds out a moment after the kernels did."""
        limit = time.monotonic() + 1.0
        while self.error is None and time.monotonic() < limit:
            self._owner.wake()
            time.sleep(0.001)
        if self.error is not None:
            return fresh(self.error)
        return PeerLost("the connection broke", peer=self.peer, device="verbs", status="BROKEN")

    def failure(self) -> RdmaError | None:
        """The first work completion error, by name; ``None`` if there was none."""
        for status, vendor in (lane.status for lane in self.lanes):
            if status:
                return error_of(status, peer=self.peer, vendor_err=vendor)
        return None

    def end(self, error: RdmaError) -> bool:
        """Make every use of this channel fail with ``error`` from now on. ``False`` if it had ended before."""
        with self._end_lock:
            if self.error is not None:
                return False
            self.error = kept(error)
        for lane in self.lanes:
            lane.end()
        self._questions.news()
        return True

    def forked(self, error: RdmaError) -> None:
        super().forked(error)
        for lane in self.lanes:
            kernels.store(lane.address + 8 * verbs_kernels.LANE_CLOSED, verbs_kernels.SHUT)

    def lost(self, error: RdmaError) -> None:
        """It broke: end it, and tell whoever listens, once."""
        self._owner.lost(self, error)

    def break_off(self, error: BaseException, doing: str) -> None:
        """Something that nobody expected went wrong with it: it ends, with a named error, and nothing else does."""
        self._owner.break_off(self, error, doing)

    def lose(self, error: RdmaError) -> bool:
        """``end`` and ``release``, not because somebody here wanted it. ``False`` if it had ended before."""
        ended = self.end(error)
        self.release()
        return ended

    def say_given_up(self) -> None:
        """A peer that does not run will be lost here. Should it ever run again, it finds our goodbye."""
        self._say_goodbye(verbs_control.SILENT, 0.0)

    def say_broken(self) -> None:
        """The queue pair failed, or the stream did: then nobody hears this."""
        self._say_goodbye(verbs_control.BROKEN, 0.0)

    def _say_goodbye(self, why: int, patience: float | None = None) -> None:
        try:
            self.stream.send(verbs_control.BYE, why, patience=patience)
        except PeerLost:
            pass  # it finds the end of the stream

    def release(self) -> None:
        """Destroy the queue pairs: from here on nothing of the peer lands. Idempotent."""
        with self._end_lock:
            if self._released:
                return
            self._released = True
        self._owner.forget(self)
        for lane in self.lanes:
            lane.qp.error()
            self._owner.drop_lane(lane.qp.qp_num)
            lane.qp.close()
        self.stream.close()
        self.sweep()

    def abort(self, timeout: float = 5.0) -> None:
        if os.getpid() != self.device.pid:
            return
        self.end(PeerLost("the channel was aborted", peer=self.peer, device="verbs", status="ABORTED"))
        self.release()

    def close(self) -> None:
        if os.getpid() != self.device.pid:
            return
        deadline = self.device.close_deadline()
        while self.error is None and time.monotonic() < deadline:
            if not self.later and all(lane.posted <= lane.reached for lane in self.lanes):
                break
            kernels.progress(self.port)
            time.sleep(0.0005)
        if self.end(PeerLost("the channel was closed here", peer=self.peer, device="verbs", status="CLOSED")):
            self._say_goodbye(verbs_control.CLOSED)
        self.release()
