"""The connection between two processes over a reliable connected queue pair and a control stream.

What the hardware refuses, past the checks of ``Places``, ends the channel, as every work completion error does (the queue pair
is in the error state then).

No late write: the end of a channel puts its queue pair into the error state and destroys it. From then on the adapter drops all
packets for it, however long they were on their way."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..channel import Channel, Local, Pair, Window, Work, check_notify, sort_pair
from ..errors import PeerLost, RdmaError, fresh, kept
from ..listening import Questions
from ..memory.mapping import anonymous
from ..nic.native import QueuePair
from ..nic.queues import Lane
from ..notify import Expectation
from ..peers.heartbeat import CLOSED, goodbye
from ..region import RemoteRegion
from ..words import completions, kernels
from ..words.signals import MAX_NOTIFY, RECORD_BYTES
from . import control
from .control import ControlStream, Message, Setup
from .registrations import Places, Registrations
from .transfer import Leftovers, VerbsTransfer, VerbsWindow

if TYPE_CHECKING:
    from ..gpu.behind import Later  # it compiles a kernel, which only a process with a GPU needs

_DRAIN_TIMEOUT_S = 5.0  # the adapter has its answers, or gives up, long before


def _call_peer(channel: VerbsChannel, name: str) -> None:
    channel.stream.peer = channel.lane.peer = channel.places.peer = name


class VerbsChannel(Channel):
    device: Any
    """The ``VerbsDevice``."""
    peer = property(lambda channel: channel.stream.peer, _call_peer)
    registered_only = True

    def __init__(self, device: Any, stream: ControlStream, qp: QueuePair, peer: Setup) -> None:
        super().__init__(device)
        self.local: Registrations = device.local
        self.stream, self.sock = stream, stream.sock
        self.peer_hello, self.peer_uid, self.peer_epoch = b"", peer.uid, peer.epoch
        self.patience_ms = peer.patience_ms
        self.max_msg_sz = min(device.max_msg_sz, peer.max_msg_sz)
        self.known = False
        """Whether the user of the device knows this channel, and so has to be told when it is lost."""
        self.port = device.port
        self._inbox = anonymous(MAX_NOTIFY * RECORD_BYTES)
        self.records = torch.frombuffer(self._inbox, dtype=torch.uint8, count=1).data_ptr()
        self.lane = Lane(qp, device.port, self.records, device.post_send, stream.peer)
        self._questions = Questions()
        self.places = Places(stream.peer, (peer.uid, peer.epoch), self._questions, stream.send)
        self.leftovers = Leftovers(self.lane, self.local.arena)
        self.gpus = bool(self.local.gpu_kind)
        self.later: set[Later] = set()
        """The posts that wait for a GPU (``gpu/behind``)."""
        self._end_lock = threading.Lock()
        self._released = False
        self._silence, self.heard = 0.0, 0
        """How many looks have found that something came (``look``)."""

    # -- copies

    def memcpy(self, dst: Local | RemoteRegion, src: Local | RemoteRegion, *, notify: int | None = None) -> Work:
        return self.prepare([(dst, src)], notify=notify, once=True).post()

    def prepare(self, pairs: Sequence[Pair], *, notify: int | None = None, once: bool = False) -> VerbsTransfer:
        """As ``Channel.prepare``. ``once``: the transfer is posted only once, so unregistered memory is staged, not
        registered."""
        self.check()
        check_notify(notify)
        sides = []
        for dst, src in pairs:
            remote, tensor, write = sort_pair(dst, src, self.local.gpu_kind)
            sides.append((remote, self.places.resolve(remote, self, write=write), tensor, write))
        self.leftovers.sweep()
        transfer = VerbsTransfer(self, sides, notify, once=once)
        self.places.use(transfer, (remote for remote, *_ in sides))
        return transfer

    def _window(self, remote: RemoteRegion, local: torch.Tensor, notify: int) -> Window | None:
        place = self.places.resolve(remote, self, write=True)
        return VerbsWindow(self, remote, place, local, notify) if self.places.stays(remote) else None

    def expect(self, imm: int, count: int = 1) -> Expectation:
        return Expectation(self, imm, count, self.count(imm), self.local.arrived)

    def make_room(self, why: int, count: int) -> None:
        """Handle a post that was not taken for the reason ``why``: return when it may be tried again, or raise."""
        if why == completions.FULL:
            self.device.count("send_queue_full")
            self.lane.wait_for_room(count)
            if self.error is not None:
                raise fresh(self.error)
        elif why == completions.REFUSED:
            refusal = "the queue pair did not take a work request"
            self.lost(RdmaError(refusal, peer=self.peer, device="verbs", status="POST_SEND"))
            raise self.ended()
        else:
            raise self.ended()

    def notify_after(self, imm: int, device: torch.device | str) -> Work:
        self.check()
        check_notify(imm)
        index = self._index_of(device, self.local.gpu_kind)
        post = self.notifier(imm).post
        return self.local.gpu.behind(self, (index,), post) or post()

    def fence(self, timeout: float | None = None) -> None:
        self.check()
        deadline = None if timeout is None else time.monotonic() + timeout
        for later in list(self.later):
            later.leave(None if deadline is None else max(deadline - time.monotonic(), 0.0))
        if deadline is not None:
            timeout = max(deadline - time.monotonic(), 0.0)
        seq = self.lane.posted
        self.lane.wait(seq, timeout)
        if self.lane.reached < seq:
            raise self.ended()

    def totals(self) -> tuple[int, int]:
        return self.lane.stats

    # -- for the device

    def tend(self) -> None:
        """Twice a second, from the thread that watches completions."""
        self.leftovers.sweep()
        self.lane.keep_alive()

    def look(self, seconds: float) -> float:
        """How long (s) nothing came, as far as looks tell; this one counts for ``seconds`` (service thread)."""
        self.heard += self.stream.heard
        self._silence = 0.0 if self.stream.heard else self._silence + seconds
        self.stream.heard = False
        return self._silence

    # -- control messages

    def withdraw(self, number: int) -> None:
        """Tell the peer that a region is gone; returns when no copy of theirs on it is under way."""
        self._questions.ask(self, self.stream.send, control.GONE, number)

    def hear(self, message: Message) -> None:
        """Handle one control message (device's service thread). Raises ``PeerLost`` for a goodbye."""
        kind, number = message.kind, message.number
        if kind in (control.SEGMENT, control.LANDING, control.REGION):
            self.places.announce(message)
        elif kind == control.GONE:
            # Waits for what is under way there: not on the thread that serves all channels.
            threading.Thread(target=self._give_up_region, args=(number,), name="rdmarpc-revoke", daemon=True).start()
        elif kind == control.SYNC:
            self.stream.send(control.SYNC_ACK, number)
        elif kind in (control.GONE_ACK, control.SYNC_ACK):
            self._questions.answer(kind, number)
        elif kind == control.BYE:
            raise goodbye(number, self.peer, "verbs")

    def _give_up_region(self, number: int) -> None:
        seq = self.places.withdraw(number)
        try:
            self.lane.wait(seq, _DRAIN_TIMEOUT_S)
            self.stream.send(control.GONE_ACK, number)
        except RdmaError:
            pass  # no answer: the owner's wait says so, and deregisters all the same
        except BaseException as error:
            self.device.break_off(self, error, "letting go of a peer's memory")

    # -- the end

    def ended(self) -> RdmaError:
        """Why nothing is posted any more, to be raised. The device's thread finds out a moment after the kernels did."""
        limit = time.monotonic() + 1.0
        while self.error is None and time.monotonic() < limit:
            self.device.watch.wake()
            time.sleep(0.001)
        if self.error is not None:
            return fresh(self.error)
        return PeerLost("the connection broke", peer=self.peer, device="verbs", status="BROKEN")

    def end(self, error: RdmaError, goodbye: int | None = None) -> bool:
        """Make every use of this channel fail with ``error`` from now on, and destroy its queue pair: nothing of the peer lands
        after the return. ``goodbye``: what the peer is told. ``False`` if it had ended before."""
        with self._end_lock:
            ends = self.error is None
            if ends:
                self.error = kept(error)
        if ends:
            self.lane.end()
            self._questions.news()
            if goodbye is not None:
                self.stream.goodbye(goodbye)
        self._release()
        return ends

    def _release(self) -> None:
        with self._end_lock:
            if self._released:
                return
            self._released = self.leftovers.ended = True
        self.device.forget(self)
        self.lane.qp.error()
        self.device.watch.drop(self.lane.qp.qp_num)
        self.lane.qp.close()
        self.stream.close()
        self.leftovers.sweep()

    def forked(self, error: RdmaError) -> None:
        super().forked(error)
        self.lane.shut()

    def lost(self, error: RdmaError) -> None:
        """End the channel because it broke, and tell the listener once."""
        self.device.lost(self, error)

    def _abort(self, timeout: float) -> None:
        self.end(PeerLost("the channel was aborted", peer=self.peer, device="verbs", status="ABORTED"))

    def _close(self) -> None:
        deadline = self.device.close_deadline()
        while self.error is None and time.monotonic() < deadline:
            if not self.later and self.lane.posted <= self.lane.reached:
                break
            kernels.progress(self.port)
            time.sleep(0.0005)
        self.end(PeerLost("the channel was closed here", peer=self.peer, device="verbs", status="CLOSED"), CLOSED)
