"""Futures of values: failing them, reading them in the order of streams, and deriving one from another."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Generator, Sequence
from threading import Event, Lock
from typing import Any

import torch

from ..transport import bare, fresh
from .streams import Mark


def fail(future: torch.futures.Future[Any], error: Exception) -> None:
    """Complete ``future`` with an error, usually a ``bare`` one, of which every waiter gets a copy of its own.

    An exception that is raised holds the frames it passes, and these may hold the future: a circle that Python's collector
    cannot see, because it goes through C++. Whatever else those frames hold, references above all, would live for ever."""
    torch._C.Future._set_unwrap_func(future, _raise_copy)
    torch._C.Future.set_result(future, error)


class Awaitable(torch.futures.Future[Any]):
    """A future that ``await`` takes, in any event loop of any thread. A cancelled task ends its wait; the call goes on. A child
    that ``then`` makes is torch's own, which ``await`` does not take."""

    def __await__(self) -> Generator[Any, None, Any]:
        if not self.done():
            loop = asyncio.get_running_loop()
            arrived: asyncio.Future[None] = loop.create_future()

            def tell(done: Any) -> None:
                with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                    loop.call_soon_threadsafe(_arrive, arrived)

            # The callback runs no code of users, so who completes this future need not care.
            torch._C.Future.add_done_callback(self, tell)
            yield from arrived
        return self.wait()

    def wait(self) -> Any:
        """As torch's, which lets no signal handler run meanwhile."""
        self.comes()
        return super().wait()

    def comes(self, timeout: float | None = None) -> bool:
        """Sleep until it is done, for at most ``timeout`` seconds. Returns whether it is."""
        if self.done():
            return True
        arrived = Event()
        torch._C.Future.add_done_callback(self, lambda done: arrived.set())
        return arrived.wait(timeout)


def _arrive(arrived: asyncio.Future[None]) -> None:
    if not arrived.done():  # else cancelled
        arrived.set_result(None)


_theirs: Any = torch._C._collect_all


def collect_all(futures: Sequence[Any]) -> torch.futures.Future[Any]:
    """What ``torch.futures.collect_all`` and ``wait_all`` are made of, in every program: the futures, when all are done, or the
    first error, for which no other future is waited for. Torch's own does not see the errors of ours, which C++ takes for
    values (``fail``)."""
    if not any(isinstance(future, Awaitable) for future in futures):
        return _theirs(futures)
    ended = Awaitable()
    lock, left, over = Lock(), len(futures), False

    def tell(future: Any) -> None:
        nonlocal left, over
        error = None
        try:
            torch._C.Future.value(future)
        except Exception as found:
            error = bare(found)
        with lock:
            left -= 1
            if over or (left and error is None):
                return
            over = True
        # Callbacks run in here, which may wait for the others.
        if error is not None:
            fail(ended, error)
        else:
            ended.set_result(list(futures))

    for future in futures:
        future.add_done_callback(tell)
    return ended


torch._C._collect_all = collect_all


class Value(Awaitable):
    """The future of a value that stays on this worker. ``mark`` is set before the result: a thread that takes the value makes
    its streams wait for those that made it. Callbacks are given another object, without the mark: see ``known``."""

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
    """The object that a callback has to ask instead of the future that it is given. Use it only for futures that are held
    elsewhere until they are done: a callback that holds its own future is a circle through C++."""
    return future if isinstance(future, Value) else None


def mapped(future: torch.futures.Future[Any], function: Callable[[Any], Any]) -> torch.futures.Future[Any]:
    """A future of ``function`` of the value of another; what either raises, ``bare``, is its error."""
    found = Awaitable()
    source = known(future)

    future.add_done_callback(lambda done: settle(found, lambda: function((source or done).value())))
    return found


def settle(future: torch.futures.Future[Any], value: Callable[[], Any]) -> None:
    """Complete ``future`` with what ``value`` returns, or raises."""
    try:
        future.set_result(value())
    except Exception as error:
        fail(future, bare(error))


def _raise_copy(error: Exception) -> None:
    raise fresh(error)
