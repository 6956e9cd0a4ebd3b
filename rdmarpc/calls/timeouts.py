"""The thread that ends calls at their deadlines when no thread waits for them, and frees what ended calls have left."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from ..transport import Guard, nobody
from .pending import Pending

_TICK_S, _IDLE_TICK_S = 0.05, 1.0
_STOP_S = 1.0


class Timeouts:
    """``pending``: the calls under way. ``give_up(call)`` is called for each that is overdue and has a future: where a thread
    waits for a call, it looks at the clock itself. Sleeps while nothing is pending."""

    def __init__(self, pending: Mapping[int, Pending], give_up: Callable[[Pending], None]) -> None:
        self._pending, self.give_up = pending, give_up
        self.ticking = threading.Event()
        """Set it when a call has begun."""
        self.on_tick: Callable[[], None] = nobody
        """Called every second or so, more often while calls are under way."""
        self._stopped = threading.Event()
        self._guard = Guard("rdmarpc-timeouts")
        self._thread = threading.Thread(target=self._run, name="rdmarpc-timeouts", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.is_set():
            if self.ticking.wait(_IDLE_TICK_S):
                self._stopped.wait(_TICK_S)
            try:
                self.on_tick()
            except BaseException as error:  # no timeout would come any more
                self._guard.note(error, "looking after what calls have left")
            self._give_up_overdue()
            if not self._pending:
                self.ticking.clear()
                if self._pending:
                    self.ticking.set()

    def _give_up_overdue(self) -> None:
        # Apart from the loop above: its variable would keep the last call, and its result, until there is another.
        now = time.monotonic()
        for pending in list(self._pending.values()):
            if pending.deadline is not None and now >= pending.deadline and pending.future is not None:
                try:
                    self.give_up(pending)
                except BaseException as error:
                    self._guard.note(error, "giving a call up")

    def stop(self) -> None:
        """End the thread, waiting at most a second for it: were a tensor to die there while the interpreter ends, torch would
        abort the process."""
        self._stopped.set()
        self.ticking.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_STOP_S)
        self.on_tick = self.give_up = nobody
