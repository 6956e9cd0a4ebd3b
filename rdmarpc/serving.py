"""The server's side of ``serve``: which models this process keeps parameters of."""

from __future__ import annotations

import threading
import weakref
from typing import Any

from . import agent as _agent
from .agent import Agent
from .graph.bundle import Bundle
from .graph.server import Server
from .transport import RdmaError

_servers: weakref.WeakKeyDictionary[Agent, dict[str, Server]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def _table(agent: Agent) -> dict[str, Server]:
    if agent not in _servers:
        table = _servers[agent] = {}

        def lost(worker: str, error: RdmaError) -> None:
            for server in list(table.values()):
                server.lost(worker, error)

        agent.on_peer_lost(lost)
    return _servers[agent]


def enter(
    model: str, workers: list[str], worker: str, weights: Bundle, gradients: Bundle | None, timeout: float
) -> tuple[bytes, int] | None:
    """Called at a server by each worker of a model; the first one makes it. See ``Server.enter``."""
    agent = _agent.current()
    with _lock:
        table = _table(agent)
        if model not in table or table[model].error is not None:
            table[model] = Server(agent.name, agent.device, agent.channel, workers, timeout)
            table[model].start()
        server = table[model]
    return server.ask("enter", worker, weights, gradients)


def ask(model: str, method: str, args: tuple[Any, ...]) -> Any:
    """Called at a server: a method of its ``Server``."""
    return _find(model).ask(method, *args)


def why(model: str) -> tuple[Any, ...] | None:
    """Called at a server: see ``Server.why``."""
    return _find(model).why()


def leave(model: str, worker: str) -> None:
    """Called at a server: this worker is done; the last one ends it. Idempotent."""
    table = _table(_agent.current())
    server = table.get(model)
    if server is not None and (server.error is not None or server.ask("leave", worker)):
        table.pop(model, None)
        server.close()


def _find(model: str) -> Server:
    agent = _agent.current()
    server = _table(agent).get(model)
    if server is None:
        raise RdmaError("this model is not (or no longer) kept here", peer=agent.name)
    return server
