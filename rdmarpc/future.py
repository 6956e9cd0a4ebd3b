"""What a caller holds while its call is under way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from . import gpu_streams
from .fetches import Fetch
from .frames import Frame
from .grants import Signature
from .link import Link
from .tensors import Landing
from .transport import TransferTimeout, bare, fresh

Answer = Frame | Fetch | Exception
"""What came; with a ``Fetch`` all of it, unless there was no memory (``Caller``)."""

if TYPE_CHECKING:
    from .caller import Caller
    from .gpu_streams import Mark
    from .grad_context import Context


def timed_out(timeout: float, worker: str) -> TransferTimeout:
    """What ends a call to a worker that took longer than so many seconds."""
    text = f"RPC ran for more than set timeout ({int(timeout * 1000)} ms) and will now be marked with an error"
    return TransferTimeout(f"RPCErr:1:{text}", peer=worker)


class Pending:
    """One outstanding call. Written by the thread that reads the response, or by the one that gives it up."""

    # Class attributes are the defaults: an instance only carries what differs, and is quickly made.
    deadline: float | None = None
    event: Any = None
    """The profiler's, of a call that somebody waits for at once (``profiling``)."""
    since = 0.0
    """When it was sent, where no deadline tells."""
    control = False
    done = False
    """The answer is there (not yet decoded)."""
    waited = False
    """Some thread waits in ``Future.wait`` and will decode the answer itself."""
    future: Future | None = None
    key: Signature = (b"", ())
    """The signature: function and sizes of the large arguments."""
    keep: Any = None
    """What the callee may still read."""
    landing: Landing | None = None
    """Where the callee may still write the result."""
    context: Context | None = None
    """The autograd context that it carries."""
    rref: int | None = None
    """The reference whose value the call creates (``remote``). 0 is one."""
    expired = False
    """Given up: the answer may still come."""
    arriving = False
    """Something of the answer is being READ."""

    def __init__(self, link: Link, call: int, timeout: float) -> None:
        self.link, self.call, self.timeout = link, call, timeout
        self.answers: list[Answer] = []
        """At most one; whoever pops it decodes it."""

    def age(self, now: float) -> float:
        """Seconds since it was sent (``time.monotonic``)."""
        return now - (self.since if self.deadline is None else self.deadline - self.timeout)

    def timed_out(self) -> TransferTimeout:
        """What ends it at its deadline."""
        return timed_out(self.timeout, self.link.name)

    @property
    def refused(self) -> bool:
        """Of a call with a future: answered by an error, not merely given up."""
        future = self.future
        if self.expired or future is None or not future.done():
            return False
        try:
            future.value()
        except Exception:
            return True
        return False


def fail(future: torch.futures.Future[Any], error: Exception) -> None:
    """Complete ``future`` with an error, usually a ``bare`` one, of which every waiter gets a copy of its own.

    An exception that is raised holds the frames it passes, and these may hold the future: a circle that Python's collector
    cannot see, because it goes through C++. Whatever else those frames hold, references above all, would live for ever."""
    torch._C.Future._set_unwrap_func(future, _raise_copy)
    torch._C.Future.set_result(future, error)


class Value(torch.futures.Future[Any]):
    """Of a value that stays here. ``mark``, set before the result: whoever takes the value has its streams wait for those that
    made it. Callbacks are given another object, which knows nothing of that: see ``known``."""

    mark: Mark | None = None

    def wait(self) -> Any:
        found = super().wait()
        self._follow()
        return found

    def value(self) -> Any:
        found = super().value()
        self._follow()
        return found

    def _follow(self) -> None:
        mark = self.mark
        if mark is None:
            return
        if mark.passed():
            self.mark = None
        else:
            mark.wait()


def known(future: Any) -> Value | None:
    """The object for a callback to ask instead of the one that it is given. Only of futures that somebody else holds until they
    are done: with any other it would be a circle through C++."""
    return future if isinstance(future, Value) else None


def mapped(future: torch.futures.Future[Any], function: Callable[[Any], Any]) -> torch.futures.Future[Any]:
    """A future of ``function`` of the value of another; what either raises, ``bare``, is its error."""
    found: torch.futures.Future[Any] = torch.futures.Future()
    source = known(future)

    def tell(done: torch.futures.Future[Any]) -> None:
        try:
            found.set_result(function((source or done).value()))
        except Exception as error:
            fail(found, bare(error))

    future.add_done_callback(tell)
    return found


def _raise_copy(error: Exception) -> None:
    raise fresh(error)


class Future(torch.futures.Future[Any]):
    """A ``torch.futures.Future`` whose ``wait`` makes progress itself instead of sleeping."""

    _has_callbacks = False
    unforeseen = False
    """The result has tensors on GPUs, which this object does not know of. They are there."""

    def __init__(self, caller: Caller, pending: Pending, devices: Sequence[torch.device] = ()) -> None:
        """``devices``: those that the result may have tensors on. What is done in the order of their streams is then usable by
        whoever waits, without waiting for the devices; it costs a pickling of the result."""
        # The C++ class directly, here and below: torch's Python layer in between costs as much as all of the rest.
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
                pending.waited = True
                if not pending.answers:
                    # Else it is left to a thread of the pool already, and all of these may be busy, with us for one.
                    self._caller.progress.wait_for(pending)
                self._caller.finish(pending)
        found = torch._C.Future.wait(self)
        if self.unforeseen:
            gpu_streams.use_here(tree_leaves(found))
        return found

    def done(self) -> bool:
        return torch._C.Future.done(self)

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
        self._has_callbacks = True
        return super().then(callback)

    def add_done_callback(self, callback: Callable[..., Any]) -> None:
        self._has_callbacks = True
        super().add_done_callback(callback)
