"""Futures of values: failing them, reading them in the order of streams, and deriving one from another."""

from __future__ import annotations

from collections.abc import Callable
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


class Value(torch.futures.Future[Any]):
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
