"""The caller's commands to the workers of a model (optimizer steps, zeroing, forwards to drop), and the wait for their reports.

Invariants:
1. Every worker gets every command, so all workers count commands alike.
2. Gradients are zeroed before the next backward or step. Marks that ride in the gradients of that backward do this where they
   are all that its workers train; else a command comes first.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from ...transport import PeerLost, RdmaError, TransferTimeout
from ..edges.station import Fittings, Station
from ..outlets.outlet import Outlet
from ..wire.header import Header
from ..work.command import DISCARD, NOTHING, Command
from .ledger import Ledger
from .stage import Plan
from .zeroing import Zeroing


class Control:
    """``fittings`` has the edges of commands, ``parameters`` counts the parameters of each worker; ``timeout``: seconds that
    one wait may take. ``zero``, ``step`` and ``sync`` are for any thread, the rest for the holder of the caller's ``lock``."""

    def __init__(
        self,
        station: Station,
        ledger: Ledger,
        fittings: Fittings,
        parameters: Mapping[str, int],
        timeout: float,
        lock: threading.RLock,
    ) -> None:
        self.begun = dict.fromkeys(parameters, 0)
        """Of each worker: how many backwards have begun in which it takes part."""
        self.asked = 0
        """How often an owner was asked for something that may have changed its parts."""
        self.changed = 0
        """How often that was more than to read."""
        self.deferred: Callable[[], None] | None = None
        """What is called before anything new: it sends what was put off until then (``parts.remote_values``)."""
        self.kept: Callable[[], None] = lambda: None
        """What is called before anything new, and before a read: it sends what was written into memory that parts keep."""
        self.watching: Callable[[Plan, int], None] | None = None
        """What is called when a backward begins: with its plan and mode."""
        self.reordered: Callable[[Sequence[str]], None] = lambda names: None
        """What is called with tensors whose gradients a backward does not sum in the order of one process."""
        self.drew: Callable[[Sequence[str]], None] = lambda names: None
        """What is called with parts that have drawn random numbers at other workers."""
        self.zeroing = Zeroing(parameters, ledger.present)
        self._station, self._ledger, self._timeout, self._lock = station, ledger, timeout, lock
        self._outlets: dict[str, Outlet] = {outlet.edge.target: outlet for outlet in fittings.outlets.values()}

    def zero(self, worker: str, position: int, how: int) -> None:
        """Set a remote parameter's gradient to ``None`` or to zeros, before the next backward or step."""
        self.zeroing.mark(worker, position, how)

    def step(self, steps: Mapping[str, Command]) -> None:
        """Send an optimizer step, after the zeroing that was asked for before."""
        with self._lock:
            self.ready()
            self._flush_zero()
            self._send(steps)

    def sync(self) -> int:
        """How many commands come before whatever is asked for by another way now."""
        with self._lock:
            self.ready(drain=True)
            self._flush_zero()
            return self._ledger.commands

    def epoch(self) -> tuple[int, ...]:
        """Equal as long as nothing was sent by which parameters or gradients may have changed."""
        return self._ledger.commands, self._ledger.sequence, self.asked, *self.begun.values()

    def moment(self) -> tuple[int, ...]:
        """Equal as long as nothing was sent by which attributes or buffers may have changed."""
        return self._ledger.sequence, self.changed, *self.begun.values()

    def has_gradient(self, worker: str, position: int) -> bool | None:
        """Whether a parameter had a gradient after the last backward; ``None``: that one did not come to its end."""
        present = self._ledger.present[worker]
        return None if present is None else bool(present[position])

    def settle(self) -> None:
        """Zeroing that was asked for before goes out now."""
        self.kept()
        if self.zeroing.due:
            self.sync()

    def begin_backward(self, plan: Plan, mode: int) -> dict[str, bytes]:
        """Before the first gradient goes out: see to the zeroing that is due, by the marks that are to ride in the gradients,
        which are returned, or by a command."""
        if self.watching is not None:
            self.watching(plan, mode)
        marks = self.zeroing.ride(plan, mode) if self.zeroing.due else {}
        if not marks:
            self._flush_zero()
        for worker in plan.participants:
            self.begun[worker] += 1
            self._ledger.present[worker] = None
            self.zeroing.assigned.discard(worker)
        return marks

    def ready(self, drain: bool = False) -> None:
        """Before anything new. What came in the meantime is seen by the next wait, or now (``drain``: tens of microseconds,
        an empty look ends in a system call)."""
        if self._station.closed:
            raise RdmaError("the model was closed")
        self.kept()
        if self.deferred is not None:
            self.deferred()
        self._station.check()
        while drain and self._station.poll(0.0):
            pass
        self._ledger.raise_errors()
        self.discard_abandoned()

    def discard_abandoned(self) -> None:
        """Tell the workers of the forwards that ended without their backward."""
        for plan, sequence, zeroed in self._ledger.drop_abandoned():
            self.zeroing.again(zeroed)
            for outlet in plan.fittings.outlets.values():
                outlet.forget(sequence)
            self._send(dict.fromkeys(self._outlets, Command(DISCARD, sequence)))

    def wait(self, sequence: int, ready: Callable[[], bool], missing: Callable[[], str]) -> None:
        """Poll until it is so. Raises ``TransferTimeout`` with what is ``missing``, ``PeerLost``, and what workers report about
        this forward (0: about none)."""
        deadline = time.monotonic() + self._timeout
        while not ready():
            left = deadline - time.monotonic()
            if left <= 0:
                raise TransferTimeout(
                    f"{missing()} did not come within {self._timeout} s",
                    device=self._station.device.name,
                    hint="a part may be slow or stuck; wrap(..., timeout=) sets the limit",
                )
            self._station.poll(left)
            self._ledger.raise_errors((sequence,))
        self._station.settle()

    def _flush_zero(self) -> None:
        if self.zeroing.due:
            self._send(self.zeroing.commands())

    def _send(self, commands: Mapping[str, Command]) -> None:
        """Tell these workers; the others get a command that does nothing, so that all count alike."""
        ledger = self._ledger
        ledger.commands += 1
        for worker, outlet in self._outlets.items():
            command = commands.get(worker, Command(NOTHING))
            payload = command.padded(outlet.edge.nbytes) if command.payload else None
            header = Header.command(ledger.commands, command.kind, command.argument, ledger.last_backward[worker])
            try:
                outlet.send(header, payload)
            except PeerLost as error:
                self._station.blame(error)
                raise
        outlets = self._outlets.values()
        self.wait(0, lambda: all(o.idle for o in outlets), lambda: "room for a command at " + names(self._outlets))


def names(workers: Iterable[str]) -> str:
    return ", ".join(repr(worker) for worker in sorted(workers))
