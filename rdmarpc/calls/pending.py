"""A call under way, as its caller holds it, the future of its result, and the thread that ends calls at their deadlines when no
thread waits for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from ..base import streams
from ..base.futures import Awaitable, fail
from ..links.frames import Frame
from ..links.grants import Signature
from ..links.messages import Fetch
from ..links.polling.modes import check_real, dispatch_modes, tracing
from ..links.ring import Link
from ..message.reducers import Arrived, use_here
from ..message.tensors import Landing
from ..transport import Guard, TransferTimeout, bare, nobody

Answer = Frame | Fetch | Exception
"""An answer: its frame, or a ``Fetch`` that has READ all of it (unless there was no memory: ``Caller``), or an error."""

if TYPE_CHECKING:
    from ..gradients.context import Context


def timed_out(timeout: float, worker: str) -> TransferTimeout:
    """The error of a call to ``worker`` that took longer than ``timeout`` seconds."""
    text = f"RPC ran for more than set timeout ({int(timeout * 1000)} ms) and will now be marked with an error"
    return TransferTimeout(f"RPCErr:1:{text}", peer=worker)


class Pending:
    """One outstanding call. Written by the thread that reads the response, or by the one that gives it up."""

    # Class attributes are the defaults: an instance only carries what differs, and is quickly made.
    deadline: float | None = None
    event: Any = None
    """The profiler's event, of a call whose caller waits at once (``profiling``)."""
    since = 0.0
    """When it was sent (``time.monotonic``), if it has no deadline."""
    control = False
    done = False
    """Whether the answer is there. It may not be decoded yet."""
    waited = False
    """Whether a thread waits in ``Future.wait``, which will decode the answer itself."""
    future: Future | None = None
    key: Signature = (b"", ())
    """The signature: function and sizes of the large arguments."""
    keep: Any = None
    """Memory that the callee may still read."""
    word: torch.Tensor | None = None
    """Not 0 once the call is given up: what the callee READs from then on of ``keep`` may have changed."""
    landing: Landing | None = None
    """The landing places where the callee may still write the result."""
    context: Context | None = None
    """The autograd context that the call carries."""
    recorded = True
    """Whether the call was made in grad mode: only then its result is connected to the context."""
    rref: int | None = None
    """The reference whose value the call creates (``remote``). 0 is one."""
    created = False
    """Whether the owner has made that value."""
    fork: Callable[[], Any] | None = None
    """A weak reference to that reference (``forks.Fork``), once there is one."""
    expired = False
    """Whether it was given up. The answer may still come."""
    arriving = False
    """Whether data of the answer is being READ."""

    def __init__(self, caller: Any, link: Link, call: int, timeout: float) -> None:
        """``caller``: the ``Caller`` that has sent it."""
        self.caller, self.link, self.call, self.timeout = caller, link, call, timeout
        self.answers: list[Answer] = []
        """The answer, once it is here, until it is taken: the thread that pops it decodes it."""

    def age(self, now: float) -> float:
        """Seconds since it was sent (``time.monotonic``)."""
        return now - (self.since if self.deadline is None else self.deadline - self.timeout)

    def result(self) -> Any:
        """Wait for the answer of a call without a future, once, and decode it. Raises the error of the call."""
        caller = self.caller
        try:
            try:
                answered = caller.progress.wait_for(self, self.deadline)
            except BaseException:
                caller.abandon(self)
                raise
            if not answered:
                caller.give_up(self)
            return caller.read(self, self.answers.pop())
        finally:
            if self.event is not None:
                self.event.__exit__(None, None, None)

    def hold(self, memory: Any) -> None:
        """Keep alive what the callee will read."""
        self.keep = (self.keep, memory)

    def recall(self) -> None:
        """Have the callee not use what it has not READ so far, as the memory may be written to from now on."""
        if self.word is not None:
            self.word.fill_(1)

    def timed_out(self) -> TransferTimeout:
        """The error that ends the call at its deadline."""
        return timed_out(self.timeout, self.link.name)

    @property
    def refused(self) -> bool:
        """Whether a call with a future was answered by an error, not merely given up."""
        future = self.future
        if self.expired or future is None or not future.done():
            return False
        try:
            future.value()
        except Exception:
            return True
        return False


class Future(Awaitable):
    """A ``torch.futures.Future`` whose ``wait`` makes progress itself instead of sleeping."""

    done: Any = torch._C.Future.done
    has_callbacks = False
    unforeseen = False
    """The result has tensors on GPUs, which this object does not know of. They are there."""
    arrays: Sequence[Arrived] = ()
    """The arrays of cupy in the result."""

    def __init__(self, caller: Any, pending: Pending, devices: Sequence[torch.device] = ()) -> None:
        """``devices``: the devices on which the result may have tensors. A waiter can then use the result in the order of its
        streams, without waiting for the devices. This costs a pickling of the result."""
        # The C++ class directly, here and elsewhere: torch's Python layer in between costs as much as all of the rest.
        torch._C.Future.__init__(self, list(devices))
        self.on_gpu = bool(devices)
        self._caller = caller
        self._pending: Pending | None = pending
        """``None`` once the result is there."""

    def wait(self) -> Any:
        """The result of the call, or its exception."""
        if not self.done():
            pending = self._pending
            if pending is not None:
                if not pending.control and (tracing() or dispatch_modes()):
                    check_real()
                observer = self._caller.post.observer
                if observer is None:
                    self._wait(pending)
                else:
                    observer.waiting(partial(self._wait, pending), pending)
        found = torch._C.Future.wait(self)
        if self.unforeseen:
            streams.use_here(tree_leaves(found))
        if self.arrays:
            use_here(self.arrays)
        return found

    def _wait(self, pending: Pending) -> None:
        pending.waited = True
        if not pending.answers:
            # Else it is left to a thread of the pool already, and all of these may be busy, with us for one.
            self._caller.progress.wait_for(pending)
        self._caller.finish(pending)

    def set_exception(self, result: Any) -> None:
        fail(self, bare(result))

    def fail(self, error: Exception) -> None:
        """Complete it with an error, unless the user has completed it."""
        if self.done():  # ``set_exception`` would spoil what is there before it finds out
            return
        try:
            self.set_exception(error)
        except RuntimeError:
            if not self.done():
                raise

    def then(self, callback: Callable[..., Any]) -> torch.futures.Future[Any]:
        """See ``torch.futures.Future.then``. Callbacks run in threads that may block and call RPC."""
        self.has_callbacks = True
        return super().then(callback)

    def add_done_callback(self, callback: Callable[..., Any]) -> None:
        self.has_callbacks = True
        super().add_done_callback(callback)


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
