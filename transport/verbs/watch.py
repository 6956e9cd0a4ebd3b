"""The thread that sleeps on a device's completion channel when every waiter does.

It finds what failed, heeds asynchronous events, and twice a second has idle connections prove that their peer's adapter is
still there.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from ..errors import PeerLost, RdmaError, RemoteAccessError
from ..nic.libibverbs import LOSES_ALL
from ..nic.native import Context
from ..nic.queues import Queues
from ..peers.guard import Guard
from ..words import completions, kernels
from .channel import VerbsChannel

_TICK_NS = 500_000_000
_SETTLE_S, _RETRY_S, _JOIN_S = 15.0, 0.05, 5.0


class Watch:
    """The thread that takes completions while every waiter sleeps, and looks for failures. It runs from ``start`` to ``stop``.
    Any thread enters and drops queue pairs."""

    def __init__(self, device: Any, context: Context, queues: Queues) -> None:
        """``device``: the ``VerbsDevice``."""
        self._device, self._context, self._queues = device, context, queues
        self._guard: Guard = device.guard
        self._by_qp: dict[int, VerbsChannel] = {}
        self._lock = threading.Lock()
        self._stopping = False
        self._thread = threading.Thread(target=self._complete, name="rdmarpc-completions", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def full(self) -> bool:
        """Whether there is no room for the completions of another queue pair."""
        return len(self._by_qp) >= self._queues.room

    def enter(self, channel: VerbsChannel) -> None:
        """Count the completions of a channel's queue pair from now on."""
        lane = channel.lane
        with self._lock:
            self._by_qp[lane.qp.qp_num] = channel
            completions.enter_lane(self._queues.port, lane.qp.qp_num, lane.address)

    def drop(self, qp_num: int) -> None:
        """Ignore the completions of a queue pair from now on."""
        with self._lock:
            completions.drop_lane(self._queues.port, qp_num)
            self._by_qp.pop(qp_num, None)

    def channels(self) -> set[VerbsChannel]:
        """The entered channels, also those that are still in their handshake."""
        with self._lock:
            return set(self._by_qp.values())

    def wake(self) -> None:
        """Have the thread look for failures now."""
        if not self._stopping:
            self._queues.wake()

    def _complete(self) -> None:
        while not self._stopping:
            try:
                self._tick()
            except BaseException as error:
                self._guard.note(error, "looking at completions")
                time.sleep(_RETRY_S)

    def _tick(self) -> None:
        device = self._device
        if self._queues.wait(_TICK_NS):
            self._look_for_failures()
            while (event := self._context.async_event()) is not None:
                self._heed(device, event)
        for channel in device.opened():
            try:
                channel.tend()
            except BaseException as error:
                device.break_off(channel, error, "keeping a connection alive")
        kernels.progress(self._queues.port)

    def _look_for_failures(self) -> None:
        for channel in self.channels():
            if channel.error is not None or (error := channel.lane.failure()) is None:
                continue
            if not isinstance(error, RemoteAccessError):
                channel.lost(error)
                continue
            try:
                threading.Thread(target=self._settle, args=(channel, error), name="rdmarpc-refused", daemon=True).start()
            except RuntimeError:  # no more threads
                channel.lost(error)

    def _settle(self, channel: VerbsChannel, error: RdmaError) -> None:
        """A process that ends takes its memory from the adapter before its end is heard, on a busy host long before: that is no
        refusal. So wait for the control stream to tell the two apart: it ends, or beats go on. What one look finds may be older
        than the refusal."""
        limit, alive = time.monotonic() + _SETTLE_S, channel.heard + 2
        while channel.error is None and channel.heard < alive and time.monotonic() < limit:
            time.sleep(0.005)
        channel.lost(error)

    def _heed(self, device: Any, event: str) -> None:
        """Asynchronous events are counted; a device that is gone takes all with it."""
        device.count(f"async_{event.lower()}")
        for channel in device.opened() if event in LOSES_ALL else ():
            channel.lost(PeerLost(LOSES_ALL[event], peer=channel.peer, device="verbs", status=event))

    def stop(self) -> None:
        """End the thread; nobody polls the completion queue any more."""
        self._stopping = True
        kernels.store(self._queues.port + 8 * completions.PORT_STOP, 1)
        self._queues.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=_JOIN_S)
        completions.shut(self._queues.port)
        self._device = None
