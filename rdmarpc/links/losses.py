"""Ends of connections: whatever depended on one fails, once, when all that came over it was read. And the reason why this
process ends, told to the workers that will lose it: their ``PeerLost`` names it."""

from __future__ import annotations

import functools
import inspect
import multiprocessing
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing import util
from typing import Any

from ..transport import Channel, Device, Guard, PeerLost, RdmaError, nobody
from .group.group import Group, listens
from .polling.pool import Pool
from .polling.progress import Progress
from .ring import Link
from .table import Links

_READ_OUT_S = 1.0
_READ_OUT_POLL_S = 0.0005
_ABORT_TIMEOUT_S = 1.0
_STOP_S = 1.0
_NOT_ITS_OWN_END = ("SILENT", "GIVEN_UP", "ABORTED")
ITS_OUTPUT = "that worker's own output has the reason"
_OF_ITS_PROCESS = ("SILENT", "RETRY_EXC_ERR")
"""Ends of a connection that tell of the process, or the host, behind it. Others may be of this connection alone: one of us had
enough of the other."""


def lost_by(link: Link, error: RdmaError, me: str) -> PeerLost:
    """The error for all that need the lost worker. ``me``: our name."""
    why, status, (kind, text) = error.message, error.status, link.goodbye
    if error.given_up:  # the text is read elsewhere too, so it has to name the worker that was stopped
        why = why.replace("this worker", me)
    if kind:
        why, status = f"it ended by {text}", "INTERRUPTED" if kind == INTERRUPTED else "RAISED"
    ours = error.__cause__ is not None  # it is this process that could not go on (``guard.broken_by``)
    hint = error.hint if ours else "" if status in _NOT_ITS_OWN_END else ITS_OUTPUT
    lost = PeerLost(f"worker {link.name} is lost: {why}", peer=link.name, device=error.device, status=status, hint=hint)
    lost.__cause__ = error.__cause__
    return lost


Ended = Callable[[Link, RdmaError], list[Any]]
"""Is called once for each link that ended, when all that came over it was read. It returns the memory that the peer may still
touch if it stopped in the middle of a copy."""


class Losses:
    """Deals with connections that end. Thread-safe."""

    def __init__(self, device: Device, progress: Progress, group: Group, pool: Pool, links: Links, ended: Ended) -> None:
        self._device, self._progress, self._group, self._pool = device, progress, group, pool
        self._links, self._ended = links, ended
        self.kept: list[tuple[Channel, list[Any]]] = []
        """The memory that a peer may still touch because it stopped in the middle of a copy, with its channel."""
        self._apart_now: set[threading.Thread] = set()
        self._guard = Guard("rdmarpc-loss")
        self.at_once: Callable[[int], None] = nobody
        """Called with the number of a worker whose connection has ended, before anything else is done about that. The device's
        thread calls it, so it must wait for nothing."""
        device.on_lost = self._on_lost

    def _on_lost(self, channel: Channel) -> None:
        """A connection ended (device's thread)."""
        link = self._links.of(channel)
        if link is not None:
            self.at_once(link.worker)
            self._apart(partial(self._settle, link))

    def refuse(self, link: Link, error: RdmaError) -> None:
        """End a link whose data cannot be trusted (holder of the polling role)."""
        self._links.forget_row(link)
        self.distrust(link, error)

    def distrust(self, link: Link, error: RdmaError) -> None:
        """As ``refuse``, from any thread."""
        self._apart(partial(self.cut_off, link, error))

    def _apart(self, job: Callable[[], None]) -> None:
        """Deal with a loss on a thread of its own: those of the pool may all be inside functions of users, for as long as they
        like, and one loss need not wait for the callbacks of another."""
        if not self.spawn(job, "rdmarpc-loss"):
            self._pool.submit(job)

    def spawn(self, job: Callable[[], None], name: str) -> bool:
        """Run it on a thread of its own. ``False``: this process may have no more threads."""
        try:
            threading.Thread(target=self._run_apart, args=(job,), name=name, daemon=True).start()
        except RuntimeError:
            return False
        return True

    def _run_apart(self, job: Callable[[], None]) -> None:
        self._apart_now.add(threading.current_thread())
        try:
            job()
        except BaseException as error:
            self._guard.note(error, "dealing with a loss")
        finally:
            self._apart_now.discard(threading.current_thread())

    def cut_off(self, link: Link, error: RdmaError) -> None:
        """End a connection whose other end does not keep to the protocol."""
        try:
            link.channel.abort(_ABORT_TIMEOUT_S)
        except RdmaError as reason:
            error = RdmaError(f"{error.message}; and {reason.message}", peer=link.name)
        self._settle(link, error)

    def _settle(self, link: Link, error: RdmaError | None = None) -> None:
        """Whatever depended on a connection that ended fails now; what the peer may still touch is kept until it cannot."""
        error = error or link.channel.error
        assert error is not None
        with self._links.changed:
            if link.settled:
                return
            link.settled = True
        self._read_out(link)
        left = self._group.dynamic and error.status == "CLOSED" and not link.goodbye[0]
        named = link.lost = self._group.departed(link.worker) if left else lost_by(link, error, self._group.me.name)
        link.explained.set()
        self._links.lose(link, named)
        touched = self._ended(link, named)
        link.pool.close()
        if link.channel.peer_copies:
            self.kept.append((link.channel, [link, *touched]))
        self._links.gone_rows.append(link)
        self._progress.poller.kick()
        record = self._group.workers.records.get(link.worker)
        if self._group.dynamic and record is not None:
            known = bool(link.goodbye[0]) or error.status in _OF_ITS_PROCESS
            if not left and (known or not listens(self._device, record)):  # else it is a member, for all others
                self._group.take_out(record)
            self._group.refresh()

    def _read_out(self, link: Link) -> None:
        """Have the frames read that came before the connection ended: answers, mostly."""
        limit, poller = time.monotonic() + _READ_OUT_S, self._progress.poller
        # In this order: what is read no more is being handled until the thread that took it holds nothing.
        while (poller.unread(link.row) or self._progress.holding) and time.monotonic() < limit:
            poller.kick()
            time.sleep(_READ_OUT_POLL_S)

    def sweep(self) -> None:
        """Let go what no peer can touch any more."""
        if self.kept:
            self.kept = [entry for entry in self.kept if entry[0].peer_copies]

    def stop(self) -> None:
        """Let losses that are being dealt with be told, for a second at most."""
        limit = time.monotonic() + _STOP_S
        for thread in list(self._apart_now):
            if thread is not threading.current_thread():
                thread.join(max(0.0, limit - time.monotonic()))

    def close(self) -> None:
        """At the end of this worker, forget all callbacks."""
        self._ended, self.at_once = lambda link, error: [], nobody


# -- why this process ends

_HEAD, _TAIL = 300, 500
"""Characters of a text that is too long. A loss that was caused by another loss has the first cause at its end."""
INTERRUPTED = KeyboardInterrupt.__name__
_ENDINGS = {("multiprocessing.process", "_bootstrap"), ("torch.multiprocessing.spawn", "_wrap")}
"""Functions that print or keep the exception that ends a process of ``multiprocessing``."""


def own_end() -> tuple[str, str]:
    """The type and the text of the exception that ends this process, as far as it can be seen: one that is being handled, or
    the one that reached the top of the main thread. Two empty texts if there is none."""
    error = sys.exc_info()[1]
    if error is None and not hasattr(sys, "ps1"):  # at a prompt, errors end nothing
        error = getattr(sys, "last_value", None)
    if isinstance(error, SystemExit):
        if error.code in (None, 0):
            return "", ""
        # ``except ...: sys.exit(1)``, as in torch.multiprocessing.spawn.
        error = error.__context__ or error
    return ("", "") if error is None else (type(error).__name__, _text(error))


def _text(error: BaseException) -> str:
    try:
        if isinstance(error, RdmaError):
            text = f"{type(error).__name__}: {error.message}"
        else:
            text = "".join(traceback.format_exception_only(error)).strip()
    except Exception:
        return type(error).__name__  # its own methods fail
    text = text.split("\nTraceback", 1)[0]  # that of another worker, where the error came from
    return text if len(text) <= _HEAD + _TAIL else f"{text[:_HEAD]} ... {text[-_TAIL:]}"


def when_a_child_ends(tell: Callable[[], object], agent: object) -> None:
    """Have ``tell`` called when the function of this ``multiprocessing`` process has returned or raised. ``own_end`` sees the
    exception then, and not later, as it ends there. In any other process nothing happens. ``agent``: when that is gone,
    ``tell`` is called for the last time, and forgotten."""
    if multiprocessing.parent_process() is None:
        return
    if sys.version_info >= (3, 13):  # finalizers run when the exception has been dealt with, and is not to be seen any more
        for name in ("print_exc", "format_exc"):
            setattr(traceback, name, _telling(inspect.unwrap(getattr(traceback, name)), tell))
    util.Finalize(agent, tell, exitpriority=0)


def _telling(function: Callable[..., Any], tell: Callable[[], object]) -> Callable[..., Any]:
    """A function of ``traceback``, which calls ``tell`` first where it is called for the exception that ends this process."""

    @functools.wraps(function)
    def told(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1)
        if (caller.f_globals.get("__name__"), caller.f_code.co_name) in _ENDINGS:
            tell()
        return function(*args, **kwargs)

    return told
