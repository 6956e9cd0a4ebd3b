"""Words in shared memory by which the streams of two processes wait for each other, without a thread of either.

The lender of GPU memory takes a *slot* of two words in its own arena, which the peer has mapped, for a *generation* (a number
that grows by one each time the slot is used, modulo 2^32):

* ``ready``: written by a stream of the lender, after what made the memory (``cuStreamWriteValue32``: behind a fence of the
  system). A stream of the peer waits for it before it copies (``cuStreamWaitValue32``, cyclic >=).
* ``done``: written by a stream of the peer, after the copy. The lender looks at it with a processor, and lets the memory go.

Each word has one writer, but for one case: when a peer is lost, we set its ``ready`` words far ahead ourselves, so that no
stream of ours waits for ever. What those streams copied then is garbage. Where its call had ended already, because nobody waits
for a GPU, that can only be counted and logged (``gpu_messages_lost``).

No deadlock: a wait is enqueued after the message that names the slot has come, and that is sent after the write was
enqueued; so whatever a write is queued behind was there before the wait, on both GPUs.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any

import torch

from ..channel import Channel, Mapped
from ..errors import NotSupported, PeerLost, TransferTimeout
from ..listening import ANSWER_TIMEOUT_S
from ..region import RemoteRegion
from ..words import kernels
from .driver import CU_STREAM_WAIT_VALUE_GEQ, CU_STREAM_WRITE_VALUE_DEFAULT, current_stream, driver
from .pins import Pin, pin_segment

SLOTS = 1024
SLOT_BYTES, READY, DONE = 16, 0, 8  # 32 bits each, the rest of their 8 bytes is 0
_POLL_S = 0.001
_TABLE_BYTES = SLOTS * SLOT_BYTES
_WORD = 0xFFFFFFFF
_FAR = 1 << 30
"""Ahead of every generation that a stream can wait for, in the cyclic order."""


def reached(address: int, generation: int) -> bool:
    """Whether a word has come to that generation."""
    return (kernels.load(address) - generation) & _WORD < 1 << 31


class _Words:
    """A table in shared memory whose words streams of this process wait for and write."""

    def __init__(self, address: int, pin: Pin, index: int) -> None:
        self._address, self._pin = address, pin
        pin.pointer(address, index)

    def write(self, offset: int, value: int, index: int) -> None:
        """Have the current stream of a device, whose context is current, write a word after all that it has been given."""
        at = self._pin.pointer(self._address + offset, index)
        driver().call("cuStreamWriteValue32_v2", current_stream(index), at, value, CU_STREAM_WRITE_VALUE_DEFAULT)

    def wait(self, offset: int, value: int, index: int) -> None:
        """Have the current stream of a device, whose context is current, wait for a word before all that it will be given."""
        at = self._pin.pointer(self._address + offset, index)
        driver().call("cuStreamWaitValue32_v2", current_stream(index), at, value, CU_STREAM_WAIT_VALUE_GEQ)


class Lent:
    """Our half: the slots by which one peer reads our GPU memory. Thread-safe."""

    def __init__(self, channel: Channel, index: int) -> None:
        """``channel``: to that peer; ``index``: any device that this process uses. Raises ``ArenaFull``, ``RdmaError``."""
        device = channel.device
        self._memory = channel.empty(_TABLE_BYTES, dtype=torch.uint8).zero_()
        self.remote = RemoteRegion.load(device.export(self._memory))
        self._address = self._memory.data_ptr()
        found = device.arena.find(self._address, _TABLE_BYTES)
        assert found is not None
        self._words = _Words(self._address, pin_segment(found[0], index), index)
        self._free = deque(range(SLOTS))
        self._generations = [0] * SLOTS
        self._held: deque[tuple[int, Any]] = deque()
        self._lock = threading.Lock()

    def lend(self, keep: Any, index: int) -> tuple[int, int]:
        """Slot and generation for memory (``keep``) that the current stream of device ``index`` has made, or will have. It is
        held until the peer is done. Where the peer has still to read from all slots it waits: ``TransferTimeout``."""
        limit = time.monotonic() + ANSWER_TIMEOUT_S
        while True:
            self.sweep(oldest_only=bool(self._free))
            with self._lock:
                slot = self._free.popleft() if self._free else -1
            if slot >= 0:
                generation = (self._generations[slot] + 1) & _WORD
                try:  # without the lock: where a stream has been given very much, the driver has the caller wait
                    with driver().on(index):
                        self._words.write(slot * SLOT_BYTES + READY, generation, index)
                except BaseException:
                    self._free.append(slot)
                    raise
                self._generations[slot] = generation
                with self._lock:
                    self._held.append((slot, keep))
                return slot, generation
            if time.monotonic() > limit:
                raise TransferTimeout(f"the peer does not read the GPU memory of {SLOTS} messages", device="cuda")
            time.sleep(_POLL_S)

    def sweep(self, *, oldest_only: bool = False) -> int:
        """Let go of what the peer has read; how many loans are left. ``oldest_only``: up to the first that is not read."""
        if not self._held:
            return 0
        dead = []  # let go of without the lock
        with self._lock:
            for _ in range(len(self._held)):
                slot, keep = self._held[0]
                at, generation = self._address + slot * SLOT_BYTES, self._generations[slot]
                # Both: what was not fetched may be done before our stream has written that it is ready.
                if reached(at + DONE, generation) and reached(at + READY, generation):
                    dead.append(keep)
                    self._free.append(slot)
                    self._held.popleft()
                elif oldest_only:
                    break
                else:
                    self._held.rotate(-1)
            return len(self._held)

    def take_back(self, slot: int, generation: int) -> None:
        """The message that names this loan was not sent."""
        kernels.store(self._address + slot * SLOT_BYTES + DONE, generation)


class Borrowed:
    """A peer's half, mapped here: our streams wait for its memory and say when they have read it. Thread-safe."""

    def __init__(self, channel: Channel, remote: RemoteRegion, index: int) -> None:
        """Raises ``NotSupported`` where the peer's arena is not mapped here, ``RemoteAccessError``, ``RdmaError``."""
        mapped = channel.map(remote)
        if mapped is None:
            raise NotSupported("the peer's memory is not mapped here", peer=channel.peer, device="cuda", hint="use shm")
        self._mapped: Mapped = mapped
        self._address = torch.frombuffer(mapped.memory, dtype=torch.uint8).data_ptr()
        whole = torch.frombuffer(mapped.whole, dtype=torch.uint8)
        self._words = _Words(self._address, Pin(whole.data_ptr(), whole.numel(), index, mapped.whole), index)
        self._waiting: dict[int, int] = {}
        self._released = False

    def wait(self, slot: int, generation: int, index: int) -> None:
        """Make the current stream of device ``index``, whose context is current, wait for a slot. Call it before the copies are
        enqueued. Raises ``PeerLost`` if the peer has ended and the word will not come."""
        self._waiting[slot] = generation
        if self._released and not reached(self._address + slot * SLOT_BYTES + READY, generation):
            del self._waiting[slot]
            raise PeerLost("it ended before its GPU had made what it sent", device="cuda")
        self._words.wait(slot * SLOT_BYTES + READY, generation, index)

    def done(self, slot: int, generation: int, index: int) -> None:
        """Have the same stream write that the copies are done. Call it after they are enqueued."""
        self._words.write(slot * SLOT_BYTES + DONE, generation, index)

    def decline(self, slot: int, generation: int) -> None:
        """Mark a slot done without a copy. No stream of ours waits for it, or only streams of a GPU that has failed."""
        self._waiting.pop(slot, None)
        kernels.store(self._address + slot * SLOT_BYTES + DONE, generation)

    def is_done(self, slot: int, generation: int) -> bool:
        return reached(self._address + slot * SLOT_BYTES + DONE, generation)

    def release(self) -> int:
        """The peer is lost: let our streams go on. How many messages they had still to wait for. Asks nothing of a GPU, and
        waits for nobody."""
        self._released = True
        count = 0
        for slot, generation in list(self._waiting.items()):
            word = self._address + slot * SLOT_BYTES + READY
            count += not reached(word, generation)
            kernels.store(word, (generation + _FAR) & _WORD)
        return count

    @property
    def idle(self) -> bool:
        """Whether no stream of ours has still to use the words."""
        return all(self.is_done(slot, generation) for slot, generation in list(self._waiting.items()))
