"""Results that are handed over instead of copied: the callee's half.

A result that lies in our arena where the caller may write (what came from it), and that nobody here can see any more
(``transport/memory/sole``), becomes the caller's where it lies: the answer names the memory and a *release word* of a board
there. The caller uses the memory in place (``Channel.adopt``), for ever if it likes, and the death of its last tensor over it
clears the word, one-sidedly. So the payload of such a result is not copied at all.

Invariants: (1) a block is kept out of use here from before the answer is sent until its word was seen cleared (acquire), or the
caller's process has ended; a caller that was merely lost may still look at it; (2) a word is 1 from before the answer is sent,
is cleared by the caller only, and is used again only after that was seen; a board is kept while one of its words is 1, so a
late clearing never lands in memory of another use; (3) what is handed over and not yet released is at
most a quarter of the arena's limit: beyond that results are copied.
"""

from __future__ import annotations

import threading

import torch

from ..transport import Arena, ArenaFull, Block, Channel, Device, Pool, RemoteRegion, kernels, sole

_WORDS = 256
_WORD_BYTES = 8


def sole_block(tensor: torch.Tensor, arena: Arena) -> Block | None:
    """The block of the arena that this tensor, which ``travels``, lies in, if the caller's one variable is all that refers to
    the tensor and to its storage: no view, no graph, no user."""
    if sole.references(tensor) != sole.PASSED or tensor.requires_grad or tensor._use_count() != 1:  # type: ignore[attr-defined]
        return None
    storage = tensor.untyped_storage()
    if sole.storage_uses(storage) != sole.STORAGE_USES or sole.references(storage) != sole.STORAGE:
        return None
    return arena.leased(storage)


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
