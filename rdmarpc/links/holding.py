"""Requests that are not begun yet: those whose data is still to be READ, and those whose sender takes no answers at the moment.

Requests of a peer are begun in the order in which they came, so later requests of that peer wait too; those of other peers do
not. At most ``_AT_ONCE`` READs from one peer are under way, and only these take memory here. The number of held requests is
bounded by what their sender may have outstanding (``link``).
"""

from __future__ import annotations

from functools import partial
from typing import Protocol

from ..message.tensors import Memory
from .fetches import Fetch
from .frames import Frame
from .polling.pool import Pool
from .ring import Link


class Server(Protocol):
    """The side of a worker that serves requests. The functions here run on threads of its pool, except for ``resume``."""

    pool: Pool
    memory: Memory

    def begin(self, link: Link, request: Fetch) -> None:
        """Serve a request that is held no longer."""


def hold(server: Server, link: Link, frame: Frame) -> None:
    """Begin this request when its data is here, and those before it have begun."""
    link.held.add(Fetch(link, frame))
    _go_on(server, link)  # it may be its turn


def resume(server: Server, link: Link) -> None:
    """Go on with the requests of a peer, which may have taken its answers. Never blocks. The thread that reads the rings calls
    it, and then gives the new job to the pool."""
    if link.held.any and not link.crowded:
        server.pool.jobs.append(partial(_go_on, server, link))


def _go_on(server: Server, link: Link) -> None:
    while (request := link.held.next_to_read()) is not None:
        _advance(server, link, request)
    if link.crowded:
        return
    request = link.held.take()
    if request is None:
        return
    if link.held.any:
        server.pool.submit(partial(_go_on, server, link))
    server.begin(link, request)


def _advance(server: Server, link: Link, request: Fetch) -> None:
    work = request.advance(server.memory)
    if work is None:
        link.held.over()
    else:
        link.held.reads(1)
        work.then(lambda: server.pool.submit(partial(_came, server, link, request)))


def _came(server: Server, link: Link, request: Fetch) -> None:
    link.held.reads(-1)
    _advance(server, link, request)
    _go_on(server, link)
