"""A command stream's ring: 64-bit words in the worker's registered memory, written one-sidedly by the caller; and what of its
messages is no number, as bytes.

The caller composes words in a local mirror and writes each batch through (``transport.Window``), with one notification a batch.

::

    batch   = [number of words, this one included] message...       one put, contiguous; -1: go on at the ring's beginning
    message = [number of words << 8 | kind] word...

A batch that is longer than half of the ring (operators have lists of any length) is written in parts, which are batches whose
first word says so (``_MORE``, ``_GOES_ON``), and is run when its last part is here.

Two words come back, in memory of the caller that the worker writes: ``DONE``, how many words of the ring have been run and
given back, ever; the worker puts it before it sleeps, when an eighth of the ring was run, and every ``TOLD_S`` in between.
Where messages run in another order than that of the posts (``scoreboard.py``), it counts up to the first that has not been run.

Invariants: (1) words ``[written, written + n)`` are free at the worker before they are written: ``written + n - done <=
RING_WORDS``; (2) one thread at a time writes (the stream's lock), one reads (the stream's thread); (3) the words of a batch are
visible to the reader once it has seen the batch's notification (the put releases, the look at the count acquires); (4) the
reader has run a message, and holds nothing of it, before its words count in ``DONE``.
"""

from __future__ import annotations

import importlib
import io
import pickle
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from ..transport import Channel, RdmaError, RemoteRegion, TransferTimeout, Window, kernels

RING_WORDS = 1 << 16
TOLD_S = 0.1
KINDS = "operation ask free meta signature inline land send fetch check reset state forget last program replay rename"
KINDS += " ahead turn"
"""Kinds of messages, by number; ``worker.py`` says what each is made of."""
OPERATION, ASK, FREE, META, SIGNATURE, INLINE, LAND, SEND, FETCH, CHECK, RESET, STATE, FORGET, LAST, *_REST = range(19)
PROGRAM, REPLAY, RENAME, AHEAD, TURN = _REST
WORD = 8
FLOAT, INT = struct.Struct("<d"), struct.Struct("<q")
"""A word as what it stands for."""
_PART = RING_WORDS // 4
_GOES_ON, _MORE = 1 << 32, 1 << 33
"""With the number of words of a batch: the batch before goes on here, and it goes on in the next one."""
_packers = [struct.Struct(f"<{count}q") for count in range(256)]


def packer(count: int) -> struct.Struct:
    return _packers[count] if count < 256 else struct.Struct(f"<{count}q")


def as_words(blob: bytes) -> list[int]:
    """Bytes as words: their number, then themselves."""
    padded = blob + b"\0" * (-len(blob) % WORD)
    return [len(blob), *struct.unpack(f"<{len(padded) // WORD}q", padded)]


def as_bytes(words: list[int], at: int) -> bytes:
    """The inverse, of the words from ``at`` on."""
    nbytes = words[at]
    count = -(-nbytes // WORD)
    return packer(count).pack(*words[at + 1 : at + 1 + count])[:nbytes]


class RingWriter:
    """The caller's end. One thread at a time. ``local``: ``RING_WORDS`` words of the channel's pool."""

    def __init__(self, channel: Channel, remote: bytes, notify: int, local: torch.Tensor, done: int, timeout: float) -> None:
        """``done``: address of the word ``DONE``."""
        self._window: Window = channel.window(RemoteRegion.load(remote), local, notify=notify)
        self._channel, self._done_at, self._timeout = channel, done, timeout
        self._mirror, self._local = memoryview(local.numpy()).cast("B"), local
        self.written = 0
        """Words written so far; ``_free_until``: up to where the ring is known to be free."""
        self._free_until = RING_WORDS

    @property
    def done(self) -> int:
        """How many words have been run, ever."""
        return kernels.load(self._done_at)

    def write(self, words: list[int]) -> None:
        """Write one batch of messages. Waits while the ring is full. ``PeerLost``."""
        count = len(words) + 1
        at = self.written % RING_WORDS
        if count > RING_WORDS - at:
            if count > RING_WORDS // 2:
                self._write_parts(words)
                return
            self._put(at, (-1,), RING_WORDS - at)
            at = 0
        if self.written + count > self._free_until or count >= 256:
            self._put(at, (count, *words), count)
            return
        _packers[count].pack_into(self._mirror, at << 3, count, *words)
        if self._window.put_now(at << 3, count << 3):
            self._window.put(at << 3, count << 3)
        self.written += count

    def _write_parts(self, words: list[int]) -> None:
        """Where a wait for room ends in an error, the reader forgets the parts that it has when others begin."""
        for start in range(0, len(words), _PART):
            part = words[start : start + _PART]
            count, at = len(part) + 1, self.written % RING_WORDS
            if count > RING_WORDS - at:
                self._put(at, (-1,), RING_WORDS - at)
                at = 0
            mark = (_GOES_ON if start else 0) | (_MORE if start + _PART < len(words) else 0)
            self._put(at, (count | mark, *part), count)

    def _put(self, at: int, words: Sequence[int], taken: int) -> None:
        if self.written + taken > self._free_until:
            self._wait_for_room(taken)
        packer(len(words)).pack_into(self._mirror, at * WORD, *words)
        if self._window.put_now(at * WORD, len(words) * WORD):
            self._window.put(at * WORD, len(words) * WORD)
        self.written += taken

    def _wait_for_room(self, taken: int) -> None:
        seen, since = self.done, time.monotonic()
        while self.written + taken > seen + RING_WORDS:
            self._channel.check()
            time.sleep(2e-5)
            now = self.done
            if now != seen:
                seen, since = now, time.monotonic()
            elif self._timeout and time.monotonic() - since > self._timeout:
                raise stuck(self._channel, self._timeout)
        self._free_until = seen + RING_WORDS


def stuck(channel: Channel, timeout: float) -> TransferTimeout:
    return TransferTimeout(
        f"the stream at worker {channel.peer} has not run anything for {timeout:g} s",
        peer=channel.peer,
        device=channel.device.name,
        hint="an operation takes longer than rpc_timeout; RpcBackendOptions(rpc_timeout=0) waits as long as the worker lives",
    )


class RingReader:
    """The worker's end. One thread."""

    def __init__(self, channel: Channel, local: torch.Tensor, notify: int) -> None:
        self._channel, self._record = channel, channel.count(notify).record
        self.words = memoryview(local.numpy()).cast("B").cast("q")
        self._local, self._batches = local, 0
        self._parts: list[int] = []
        self.read = 0
        """Words that were read, ever."""

    def look(self) -> bool:
        """Whether a batch is here."""
        if self._channel.port:
            kernels.progress(self._channel.port)
        return kernels.load(self._record) > self._batches

    def wait(self) -> bool:
        """Wait for a batch, a tenth of a second at most; whether there is one."""
        target = self._batches + 1
        return kernels.wait_count(self._record, target, kernels.SPIN, kernels.SLICE_NS, self._channel.port) == kernels.OK

    def take(self) -> list[int]:
        """The messages of the next batch, which is here. Its words may be written again once ``read`` was told."""
        self._batches += 1
        at = self.read % RING_WORDS
        count = self.words[at]
        if count == -1:
            self.read += RING_WORDS - at
            return []
        if count > RING_WORDS:
            return self._take_part(at, count)
        self.read += count
        return self.words[at + 1 : at + count].tolist()

    def _take_part(self, at: int, marked: int) -> list[int]:
        """The whole batch, if this is its last part."""
        count = marked & (_GOES_ON - 1)
        self.read += count
        if not marked & _GOES_ON:
            self._parts = []
        self._parts += self.words[at + 1 : at + count]
        if marked & _MORE:
            return []
        whole, self._parts = self._parts, []
        return whole


# -- signatures, constants and errors as bytes: numbers, texts and tuples of them, so that reading them runs nothing

_PLAIN = (bool, int, float, str, type(None))


class _NoNames(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} in a signature")


def dump(value: Any) -> bytes:
    return pickle.dumps(value, 5)


def loads(blob: bytes) -> Any:
    return _NoNames(io.BytesIO(blob)).load()


def encode(value: Any) -> Any:
    """A constant argument of an operator. ``TypeError`` for what is none."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, list | tuple):
        return ("list", [encode(each) for each in value])
    if isinstance(value, complex):
        return ("complex", value.real, value.imag)
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return ("torch", str(value)[6:])
    if isinstance(value, torch.device):
        return ("device", str(value))
    if isinstance(value, bool | int | float):
        return type(value).__mro__[1](value)
    raise TypeError(f"a {type(value).__name__} is no constant that an operator at a worker can take")


def decode(told: Any) -> Any:
    if type(told) is not tuple:
        return told
    kind, *rest = told
    if kind == "list":
        return [decode(each) for each in rest[0]]
    if kind == "complex":
        return complex(*rest)
    return torch.device(rest[0]) if kind == "device" else getattr(torch, rest[0])


def dump_error(error: BaseException, position: int) -> bytes:
    """An error with the words' position at which it happened."""
    kind = type(error)
    about: dict[str, Any]
    if isinstance(error, RdmaError):
        text, about = error.message, {"peer": error.peer, "device": error.device, "status": error.status, "hint": error.hint}
    else:
        text, about = str(error), {"errno": error.errno} if isinstance(error, OSError) else {}
    return dump((kind.__module__, kind.__qualname__, text, about, position))


def load_error(blob: bytes) -> tuple[BaseException, int]:
    """The error again: of its class where that is one of Python's or torch's, else a ``RuntimeError`` with its text."""
    module, name, text, about, position = loads(blob)
    if module == "builtins" or module.partition(".")[0] in ("torch", "rdmarpc"):
        with suppress(ImportError, AttributeError, TypeError):
            kind = getattr(importlib.import_module(module), name)
            if issubclass(kind, Exception):
                number = about.pop("errno", None)
                found = kind(text, **about)
                if number is not None:
                    found.errno = number
                return found, position
    return RuntimeError(f"{name}: {text}"), position
