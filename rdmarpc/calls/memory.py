"""Memory of the arena for messages: waiting for it, and handing it over to callers.

A full arena is an error only when nothing frees enough of it in time (``Patience``). Memory comes back late: when peers release
what they have read, when answers under way end, when Python's collector runs. A thread that needs memory for a message waits
until its call's deadline at most, or for ``DEFAULT_S`` where this side knows no deadline (the callee is not told). If nothing
is under way that could free memory, it waits for ``_GRACE_S`` only. The thread that reads the rings never waits here: the
memory that it would wait for comes back through them.

A result that lies in our arena where the caller may write (what came from it), and that nobody here can see any more
(``transport/memory/sole``), is not copied (``Handovers``): it becomes the caller's where it lies. The answer names the memory
and a *release word* of a board there. The caller uses the memory in place (``Channel.adopt``), for ever if it likes, and the
death of its last tensor over it clears the word, one-sidedly.

Invariants of that: (1) a block is kept out of use here from before the answer is sent until its word was seen cleared
(acquire), or the caller's process has ended; a caller that was merely lost may still look at it; (2) a word is 1 from before
the answer is sent, is cleared by the caller only, and is used again only after that was seen; a board is kept while one of its
words is 1, so a late clearing never lands in memory of another use; (3) what is handed over and not yet released is at most a
quarter of the arena's limit: beyond that results are copied.
"""

from __future__ import annotations

import gc
import threading
import time
import weakref
from typing import Any

import torch

from ..transport import Arena, ArenaFull, Block, Channel, Device, Pool, RemoteRegion, kernels, size_class

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


_WORDS, _WORD_BYTES = 256, 8


class _Board:
    """The release words of one channel."""

    def __init__(self, channel: Channel) -> None:
        words = channel.empty(_WORDS, dtype=torch.int64).zero_()
        self.words = words
        self.address = words.data_ptr()
        remote = RemoteRegion.load(channel.device.export(words))
        self.places = [remote[at : at + _WORD_BYTES].dump() for at in range(0, _WORDS * _WORD_BYTES, _WORD_BYTES)]
        """The descriptor of each word."""
        self.free = list(range(_WORDS - 1, -1, -1))
        self.given: dict[int, tuple[torch.Tensor, int]] = {}


class Handovers:
    """Everything this worker has handed over. Thread-safe."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._boards: dict[Channel, _Board] = {}
        self._limit = device.arena.limit // 4
        self.outstanding = 0
        """Bytes handed over and not released yet."""
        self._lock = threading.Lock()
        self.nbytes = 0
        """Bytes handed over, ever."""

    def give(self, channel: Channel, pool: Pool, run: torch.Tensor, block: Block) -> bytes | None:
        """Hand the memory of ``run``, in ``block``, over to the peer: the descriptors to send, of the memory and of its release
        word. ``None`` where it has to be copied after all: it does not lie as it travels, or where this peer may write
        (``pool``), enough has been handed over, or there is no memory for the words."""
        if run.is_conj() or run.is_neg() or not run.is_contiguous() or block.segment.pool is not pool:
            return None
        run = run.detach()
        with self._lock:
            board = self._boards.get(channel)
            if board is None:
                try:
                    board = self._boards[channel] = _Board(channel)
                except ArenaFull:  # the result is copied, from where it lies
                    return None
            self._sweep(board)
            if not board.free or self.outstanding + block.nbytes > self._limit:
                return None
            word = board.free.pop()
            board.given[word] = run, block.nbytes
            self.outstanding += block.nbytes
            self.nbytes += run.nbytes
            kernels.store(board.address + _WORD_BYTES * word, 1)
        device, segment = self._device, block.segment
        offset = run.data_ptr() - segment.address
        place = RemoteRegion.packed(device.uid, device.epoch, segment.number, segment.key, offset, run.nbytes)
        return place + board.places[word]

    def sweep(self) -> None:
        """Take back what was released."""
        with self._lock:
            for channel, board in list(self._boards.items()):
                self._sweep(board)
                if channel.error is not None and (not board.given or channel.peer_ended()):
                    self.outstanding -= sum(nbytes for _, nbytes in board.given.values())
                    del self._boards[channel]

    def _sweep(self, board: _Board) -> None:
        for word in tuple(board.given):
            if kernels.load(board.address + _WORD_BYTES * word) == 0:
                self.outstanding -= board.given.pop(word)[1]
                board.free.append(word)
