"""Waiting for arena memory: a full arena is an error only when nothing frees enough of it in time.

Memory comes back late: when peers release what they have read, when answers under way end, when Python's collector runs. A
thread that needs memory for a message waits until its call's deadline at most, or for ``DEFAULT_S`` where this side knows no
deadline (the callee is not told). If nothing is under way that could free memory, it waits for ``_GRACE_S`` only. The thread
that reads the rings never waits here: the memory that it would wait for comes back through them.
"""

from __future__ import annotations

import gc
import time
import weakref
from typing import Any

import torch

from ..transport import Arena, ArenaFull, Channel, size_class

DEFAULT_S = 10.0
_GRACE_S = 1.0
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.001, 0.05


class Patience:
    """Allocates memory for the messages of one worker, and waits if the arena is full. Thread-safe."""

    def __init__(self, agent: Any) -> None:
        """``agent``: the ``Agent``, whose parts hold memory of the arena, or wait for it."""
        self._agent = weakref.proxy(agent)
        self._arena: Arena = agent.device.arena
        self._waiting: set[int] = set()
        """The threads of the pool that wait here, by ``Pool.slot``: none of them frees anything meanwhile."""
        self.waits = 0
        """How many allocations have had to wait so far."""

    def empty(self, channel: Channel, nbytes: int, deadline: float | None) -> torch.Tensor:
        """``nbytes`` > 0 of memory that only the channel's peer may touch. ``deadline``: that of the call that needs it
        (``time.monotonic``), if there is one. Raises ``ArenaFull``."""
        try:
            return channel.pool.run(nbytes)
        except ArenaFull as full:
            if self._agent.progress.reading:
                raise
            slot = self._agent.pool.slot
            self._waiting.add(slot)
            try:
                return self._retry(channel, nbytes, deadline, full)
            finally:
                self._waiting.discard(slot)

    def _retry(self, channel: Channel, nbytes: int, deadline: float | None, full: ArenaFull) -> torch.Tensor:
        self.waits += 1
        begin = time.monotonic()
        limit = begin + DEFAULT_S if deadline is None else deadline
        fits = size_class(nbytes) <= self._arena.limit
        if fits:
            gc.collect()
        pause, hope = _FIRST_PAUSE_S, begin
        while fits:
            self._agent.tidy()
            try:
                return channel.pool.run(nbytes)
            except ArenaFull as again:
                full = again
            now = time.monotonic()
            if self._under_way():
                hope = now
            if now >= limit or now - hope >= _GRACE_S:
                break
            self._agent.progress.pause(min(pause, limit - now))
            pause = min(2 * pause, _LAST_PAUSE_S)
        waited = time.monotonic() - begin
        held = [f"{what} {nbytes} bytes" for what, nbytes in self.holders().items() if nbytes]
        raise ArenaFull(
            f"{full.message}, after {waited:.1f} s of waiting for memory; in use: {', '.join(held)}", hint=full.hint
        ) from None

    def _under_way(self) -> bool:
        """Whether something runs, or is lent, that may free memory when it ends."""
        agent = self._agent
        return bool(
            agent.pool.running - self._waiting
            or not agent.callee.settled
            or any(link.held.reading for link in list(agent.links.rows.values()))
            or agent.callee.handovers.outstanding
            or not agent.caller.idle
        )

    def holders(self) -> dict[str, int]:
        """The bytes of the arena by what holds them, as far as this worker knows."""
        agent = self._agent
        held: dict[str, int] = {}
        for link, nbytes in agent.callee.promises.held().items():
            held[f"granted to {link.name} for calls to come"] = nbytes
        for link in list(agent.links.rows.values()):
            held[f"lent to {link.name}, which has not read its results"] = link.lent
        held["handed over to callers"] = agent.callee.handovers.outstanding
        return held | self._arena.held()
