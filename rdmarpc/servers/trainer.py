"""A worker whose parameters are kept by servers: gradients go out, weights land. The other half of ``server``, whose invariants
hold here too."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from ..transport import RdmaError, RemoteRegion, TransferTimeout
from .bundle import ALWAYS, Bundle, BundleInlet, BundleOutlet, padded
from .layout import CHANGED, STAGED, Header
from .station import Station

if TYPE_CHECKING:
    from ..transport import Channel, Device


class Half:
    """This worker's half of the exchange with one server. ``weights`` and ``gradients`` (``None``: no tensor there needs any)
    list the same tensors in the same order; ``gradients`` may leave some out."""

    def __init__(self, station: Station, weights: Bundle, gradients: Bundle | None) -> None:
        self.server = weights.source
        self.weights, self.gradients = weights, gradients
        self._station = station
        self.inlet = BundleInlet(station, weights, self._landed)
        """Its room is the memory of the parameters."""
        self.alarm = station.take_number(station.channel(self.server), self._alarmed)
        self._outlet: BundleOutlet | None = None
        self.steps = -1
        """The step of the weights that landed last; -1 before those of the start, which are step 0."""
        self.wanted = 0
        """The step of the weights that are to land next, or have landed last."""
        self.alarmed = False
        self.changed = False
        """Whether the step of the weights that landed last has changed gradients."""

    def connect(self, slot: tuple[bytes, int] | None) -> None:
        """Connect the outlet of the gradients to their slot at the server."""
        if slot is not None and self.gradients is not None:
            channel, remote = self._station.channel(self.server), RemoteRegion.load(slot[0])
            self._outlet = BundleOutlet(self._station.device, channel, self.gradients, remote, slot[1])

    def send(
        self,
        optimizer: int,
        marks: bytes,
        present: tuple[int, ...],
        grads: Sequence[torch.Tensor],
        numbers: list[float],
        staging: str,
    ) -> None:
        """Gradients of the next step. They belong to the write until ``finish``. The note: marks, padded to 8 bytes, then the
        numbers of the optimizer's groups (float64)."""
        assert self._outlet is not None
        note = marks.ljust(padded(len(marks)), b"\0") + struct.pack(f"<{len(numbers)}d", *numbers)
        header = Header(0, self.steps + 1, STAGED * (staging == ALWAYS), len(note), optimizer)
        with self._station.naming():
            self._outlet.send_loose(header, note, present, grads, staging)
        self.wanted = self.steps + 1

    def finish(self, timeout: float) -> None:
        if self._outlet is not None:
            with self._station.naming():
                self._outlet.finish(timeout)

    def _landed(self, header: Header) -> None:
        if header.step != self.steps + 1 or header.step != self.wanted:
            raise RdmaError(f"weights {header.step} came when {self.wanted} were due", peer=self.server)
        self.steps, self.changed = header.step, bool(header.flags & CHANGED)

    def _alarmed(self, count: int) -> None:
        self.alarmed = True


class Trainer:
    """All servers of one model, seen from one worker. One thread at a time. ``explain(server)`` gives the error that ended a
    server; ``timeout`` (seconds) bounds every wait."""

    def __init__(
        self,
        name: str,
        device: Device,
        channels: Callable[[str], Channel],
        explain: Callable[[str], BaseException],
        timeout: float,
    ) -> None:
        self.station = Station(name, device, channels, timeout)
        self.timeout, self._explain = timeout, explain
        self.halves: dict[str, Half] = {}
        self.late = False
        """Whether the last wait, for weights or for an answer of a server, timed out."""
        self.waiting = True
        """Whether weights are on their way, or may be: set it before gradients are sent. While they are, the parameters are not
        to be read."""

    def add(self, weights: Bundle, gradients: Bundle | None) -> Half:
        half = self.halves[weights.source] = Half(self.station, weights, gradients)
        return half

    def pull(self) -> None:
        """Return when the weights of the last step have landed from every server. Raises ``PeerLost``, ``TransferTimeout``
        (they may still come: call it again), what ended a server."""
        if not self.waiting:
            return
        if self.station.closed:
            raise RdmaError("the model was closed")
        deadline = time.monotonic() + self.timeout
        while behind := [half for half in self.halves.values() if half.steps < half.wanted]:
            left = deadline - time.monotonic()
            if left <= 0:
                self.late = True
                names = ", ".join(repr(half.server) for half in behind)
                why = f"the weights of {names} did not come within {self.timeout} s"
                hint = "every worker of the model has to call serve() and make every step; timeout= sets the limit"
                raise TransferTimeout(why, device=self.station.device.name, hint=hint)
            self.station.poll(left)
            self._raise_alarm()
        self.waiting = self.late = False

    def ready(self) -> None:
        """Wait until the weights are here, and check that all servers are. Call it before sending."""
        if self.station.closed:
            raise RdmaError("the model was closed")
        self.pull()
        self._raise_alarm()
        self.station.check()
        for half in self.halves.values():  # a wait that timed out may have left something
            half.finish(self.timeout)

    def finish(self) -> None:
        """Wait until the memory of the sent gradients may be changed again."""
        self.waiting = True
        for half in self.halves.values():
            half.finish(self.timeout)

    def _raise_alarm(self) -> None:
        for half in self.halves.values():
            if half.alarmed:
                error = self._explain(half.server)
                self.late |= isinstance(error, TransferTimeout)
                raise error

    def close(self) -> None:
        self.station.close()
        for half in self.halves.values():
            half.inlet.room.tensors.clear()  # the parameters have their memory, and are all that shows it
