"""The server's side of ``serve``: the models whose parameters this process keeps."""

from __future__ import annotations

import threading
import weakref
from functools import partial
from typing import Any

from ..calls import agent as _agent
from ..calls.agent import Agent
from ..message import errors
from ..transport import RdmaError, fresh
from . import kept
from .bundle import Bundle
from .server import End, Server


class _Table(dict[str, Server]):
    """Servers by model."""

    def __init__(self) -> None:
        super().__init__()
        self.given_up: dict[str, End] = {}
        """Of models that all who had come have closed, or are lost, before the others came."""


_servers: weakref.WeakKeyDictionary[Agent, _Table] = weakref.WeakKeyDictionary()
_lock = threading.Lock()
_ASKED = kept.ASKED | {"connect", "counters", "forget"}
"""What workers ask a ``Server`` for."""


def _table(agent: Agent) -> _Table:
    with _lock:
        if agent in _servers:
            return _servers[agent]
        table = _Table()
        _servers[agent] = table

    def lost(worker: str, error: RdmaError) -> None:
        for model, server in list(table.items()):
            if worker in server.workers:
                server.station.lost(worker, error)
                _forget(table, model, worker)
        for model, end in list(table.given_up.items()):
            if worker in end.awaited:  # another one of its name may come, in another life of the model
                table.given_up.pop(model, None)

    agent.on_peer_lost(lost)
    agent.at_close.append(partial(_close_all, table))
    return table


def _close_all(table: _Table) -> None:
    """Servers refer to their agent: what would be kept by it would keep it."""
    with _lock:
        servers = list(table.values())
        table.clear()
    for server in servers:
        server.close()


def _forget(table: _Table, model: str, worker: str) -> Server | None:
    """The server, if that was the last worker: it is no longer kept then. Until all are gone the slots of one that has ended
    stay, because somebody may still write there. Who comes late is told why it ended."""
    with _lock:
        server = table.get(model)
        if server is not None:
            server.gone.add(worker)
            if server.gone | server.end.awaited >= set(server.workers):  # all that ever came: nobody writes here any more
                if server.end.awaited - server.gone:
                    table.given_up[model] = server.end
                return table.pop(model)
    return None


def _turn_away(table: _Table, model: str, worker: str, me: str) -> None:
    """Raises for a worker that comes when all who came before it have gone. If one of these comes again, it begins anew."""
    end = table.given_up.get(model)
    if end is None:
        return
    if worker not in end.awaited:
        del table.given_up[model]
        return
    _expect_no_more(table, model, worker)
    raise RdmaError("all others have closed this model", peer=me) if end.error is None else fresh(end.error)


def _expect_no_more(table: _Table, model: str, worker: str) -> None:
    """A worker knows that all others have given that model up."""
    end = table.given_up.get(model)
    if end is not None:
        end.awaited.discard(worker)
        if not end.awaited:
            del table.given_up[model]


def enter(
    model: str, workers: list[str], worker: str, weights: Bundle, gradients: Bundle | None, timeout: float
) -> tuple[bytes, int] | list[str] | None:
    """Called at a server by each worker of a model; the first one makes it. See ``Server.enter``. Who has left the model and
    comes again before all others have left gets the names of these, and has to come later."""
    agent = _agent.current()
    table = _table(agent)
    with _lock:
        agent.device.check()  # afterwards nobody would end it
        server = table.get(model)
        if server is not None and worker in server.gone:
            return sorted(set(server.workers) - server.gone)
        new = server is None
        if server is None:
            _turn_away(table, model, worker, agent.name)
            server = table[model] = Server(agent.name, agent.device, agent.channel, workers, timeout)
            server.start()
        server.end.awaited.discard(worker)
    if new:
        threading.Thread(target=server.meet, name=f"rdmarpc-meet-{agent.name}", daemon=True).start()
    return server.ask("enter", worker, weights, gradients)


def ask(model: str, method: str, args: tuple[Any, ...]) -> Any:
    """Called at a server: a method of its ``Server``."""
    if method not in _ASKED:
        raise RdmaError(f"a server is not asked to {method!r}")
    return _find(model).ask(method, *args)


def why(model: str) -> bytes:
    """Called at a server: the error that ended it, as ``message/errors`` has it; empty if there is none."""
    error = _find(model).error
    return b"" if error is None else errors.dump(error, _agent.current().me)


def leave(model: str, worker: str, why: str = "", lost: str = "", status: str = "") -> None:
    """Called at a server: this worker is done, nothing of it will be written here; the last one ends it. ``why``, ``lost``: as
    of ``Server.leave``. Idempotent."""
    table = _table(_agent.current())
    server = table.get(model)
    if server is None:
        with _lock:
            _expect_no_more(table, model, worker)
        return
    if server.error is None:
        try:
            server.ask("leave", worker, why, lost, status)
        except Exception:
            if server.error is None:
                raise
    last = _forget(table, model, worker)
    if last is not None:
        last.close()


def _find(model: str) -> Server:
    agent = _agent.current()
    server = _table(agent).get(model)
    if server is None:
        raise RdmaError("this model is not (or no longer) kept here", peer=agent.name)
    return server
