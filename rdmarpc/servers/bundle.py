"""Bundles: all tensors of one kind that go from one worker to another, in one slot, by one write and one notification.

A slot is a header (``layout``), a note (a few bytes that describe the write), then every tensor at a 64-byte aligned
offset. Both ends work the offsets out from the same list of edges. A bundle has one slot and no credits of its own: two bundles
that answer each other are each other's credit (see ``server``).

What is sent is either a ``Room``, memory that is laid out as the slot is, of which neighbouring tensors go as one copy; or
loose tensors where somebody's operation left them, a copy each. Loose tensors are *traced*: the first time they are copied into
a room (``bytes_staged``) and a write from wherever they will lie is prepared, which every later time uses. One that turns up in
another memory order is copied again, and counted.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..transport import Device, NotSupported, RdmaError, RemoteRegion
from ..transport.memory.arena import SLOTS
from .layout import HEADER_BYTES, Header, dense, strides

if TYPE_CHECKING:
    from ..transport import Channel, Transfer, Work
    from .station import Station

WEIGHT, GRADIENT = "weight", "gradient"
ALWAYS, TRACED = "always", "traced"
"""How loose tensors travel: copied aside every time, or only until they are traced."""
PRESENT, ABSENT = 1, 0
"""Marks of a gradient bundle, one byte for each tensor: whether it has a gradient. A parameter without one is left alone."""
NUMBERS = 2048
"""How many float64 the note of a gradient bundle has room for: the hyperparameters of an optimizer's groups."""
_ALIGN = 64
_TRANSFERS = 16


class Edge(NamedTuple):
    """A tensor that crosses from ``source`` to ``target`` in every step. ``number`` is unique in the model."""

    number: int
    kind: str
    name: str
    source: str
    target: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class Bundle:
    """The tensors that one write takes from one worker to another. Plain data, picklable. ``edges`` have one source and one
    target; ``orders`` are the memory orders of their tensors (``layout``); ``note`` bytes follow the header."""

    def __init__(self, edges: Sequence[Edge], orders: Sequence[int], note: int = 0) -> None:
        self.edges, self.orders, self._note = tuple(edges), tuple(orders), note
        self.source, self.target, self.number = edges[0].source, edges[0].target, edges[0].number
        self.offsets = []
        at = self.front = _aligned(HEADER_BYTES + note)
        for edge in edges:
            self.offsets.append(at)
            at = _aligned(at + edge.nbytes)
        self.nbytes = at

    def __reduce__(self) -> tuple[Any, ...]:
        return Bundle, (self.edges, self.orders, self._note)  # where things lie each end works out for itself

    def __len__(self) -> int:
        return len(self.edges)

    def runs(self, present: Sequence[int]) -> list[tuple[int, int]]:
        """The byte ranges of these tensors (ascending positions), neighbours joined."""
        runs: list[tuple[int, int]] = []
        last = -2
        for at in present:
            start, end = self.offsets[at], self.offsets[at] + self.edges[at].nbytes
            if at == last + 1:
                start = runs.pop()[0]
            runs.append((start, end))
            last = at
        return [(start, end) for start, end in runs if end > start]


def note_of(marks: bytes, numbers: list[float]) -> bytes:
    """The note of a gradient bundle: marks, padded to 8 bytes, then the numbers of the optimizer's groups (float64)."""
    return marks.ljust(padded(len(marks)), b"\0") + struct.pack(f"<{len(numbers)}d", *numbers)


def note_bytes(tensors: int, numbers: int) -> int:
    return padded(tensors) + 8 * numbers


def padded(count: int) -> int:
    """Bytes of so many marks in a note."""
    return -(-count // 8) * 8


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


class Room:
    """Memory laid out as a bundle. ``tensors`` lie in it, each with a storage of its own, in the order of the edges; they
    keep it alive. Their content is undefined at first. ``home``: of a device (every peer may read it), or of a channel (its
    peer may write it, nobody else touch it)."""

    def __init__(self, home: Device | Channel, bundle: Bundle) -> None:
        self.bundle = bundle
        self.memory = home.empty(bundle.nbytes, dtype=torch.uint8)
        device = home if isinstance(home, Device) else home.device
        device.arena.note(self.memory, SLOTS)
        array = self.memory.numpy()
        self.head = memoryview(array[:HEADER_BYTES])
        self.note = memoryview(array[HEADER_BYTES : bundle.front])
        self.tensors = []
        for edge, order, offset in zip(bundle.edges, bundle.orders, bundle.offsets):
            tensor = torch.empty(0, dtype=edge.dtype, device="cpu")
            if edge.nbytes:
                view = memoryview(array[offset : offset + edge.nbytes])
                flat = torch.frombuffer(view, dtype=edge.dtype, count=prod(edge.shape))
                tensor.set_(flat.untyped_storage(), 0, edge.shape, strides(edge.shape, order))
            self.tensors.append(tensor if edge.nbytes else tensor.view(edge.shape))


class BundleInlet:
    """The consumer's half: a room, and the notification that says it was written. ``arrived(header)`` runs on the thread that
    polls ``station``. It has to check, by the step in the header, that the write was due; nothing here does."""

    def __init__(self, station: Station, bundle: Bundle, arrived: Callable[[Header], None]) -> None:
        channel = station.channel(bundle.source)
        self.room = Room(channel, bundle)
        self._region = station.device.register(self.room.memory)
        self._arrived = arrived
        self.number = station.take_number(channel, self._landed)

    def offer(self) -> tuple[bytes, int]:
        """The descriptor of the slot and the notification number, for the sender."""
        return self._region.export(), self.number

    def _landed(self, count: int) -> None:
        header = Header.read(self.room.head)
        bundle = self.room.bundle
        if count != 1 or header.bundle != bundle.number:
            raise RdmaError(
                f"a write that nobody allowed into bundle {bundle.number}: {count} at once, header of {header.bundle}",
                peer=bundle.source,
            )
        self._arrived(header)


class BundleOutlet:
    """The sender's half. One thread at a time. A source belongs to the write until ``finish``."""

    def __init__(self, device: Device, channel: Channel, bundle: Bundle, remote: RemoteRegion, number: int) -> None:
        self.bundle = bundle
        self._device, self._channel, self._remote, self._number = device, channel, remote, number
        self._front = device.empty(bundle.front, dtype=torch.uint8)
        front = self._front.numpy()
        self._head, self._note = memoryview(front[:HEADER_BYTES]), memoryview(front[HEADER_BYTES:])
        self._written = b""
        self._transfers: dict[tuple[int, tuple[int, ...], int], Transfer] = {}
        self._rooms: dict[int, Room] = {}
        self._loose: dict[tuple[tuple[int, ...], int], _Loose] = {}
        self._staging: Room | None = None
        self._work: Work | None = None
        self._let_go: _Loose | None = None

    def send_room(self, header: Header, room: Room, present: tuple[int, ...]) -> None:
        """Write these tensors of a room. They stay unchanged until ``finish``."""
        self._head_of(header, b"")
        self._work = self._room_transfer(room, present, 0).post()

    def send_copies(self, header: Header, room: Room, present: tuple[int, ...]) -> None:
        """The same, by way of a staging copy."""
        staging = self._stage()
        nbytes = 0
        for at in present:
            staging.tensors[at].copy_(room.tensors[at])
            nbytes += self.bundle.edges[at].nbytes
        self._device.count_staged(nbytes)
        self.send_room(header, staging, present)

    def send_loose(
        self, header: Header, note: bytes, present: tuple[int, ...], tensors: Sequence[torch.Tensor], staging: str
    ) -> None:
        """Write loose tensors (of the shapes and dtypes of the edges ``present``, in their order) and a note. They stay
        unchanged until ``finish``. Raises ``NotSupported`` for one that is not dense."""
        self._head_of(header, note)
        loose = self._loose.get((present, len(note))) if staging == TRACED else None
        if loose is not None:
            loose.bind(tensors)
            self._work, self._let_go = loose.transfer.post(), loose
            return
        room = self._stage()
        nbytes = 0
        for at, tensor in zip(present, tensors):
            _check(self.bundle.edges[at], tensor)
            room.tensors[at].copy_(tensor.detach())
            nbytes += self.bundle.edges[at].nbytes
        self._device.count_staged(nbytes)
        self._work = self._room_transfer(room, present, len(note)).post()
        if staging == TRACED:
            if len(self._loose) >= _TRANSFERS:
                self._loose.clear()
            self._loose[present, len(note)] = _Loose(self, present, len(note))

    def finish(self, timeout: float) -> None:
        """Return when the sources of the last write are the caller's again. Raises ``TransferTimeout``, ``PeerLost``."""
        if self._work is not None:
            self._work.wait(timeout)
            self._work = None
        if self._let_go is not None:
            missed = self._let_go.release()
            self._let_go = None
            room = self._staging
            if not missed and room is not None:
                # Tracing has seen everything, so the memory of the copies is of use to others.
                self._staging = None
                self._rooms.pop(id(room), None)
                self._transfers = {key: each for key, each in self._transfers.items() if key[0] != id(room)}

    # -- what is prepared

    def _head_of(self, header: Header, note: bytes) -> None:
        header._replace(bundle=self.bundle.number).write(self._head)
        if note != self._written:
            self._note[: len(note)] = note
            self._written = note

    def _used_front(self, note: int) -> tuple[RemoteRegion, torch.Tensor]:
        end = HEADER_BYTES + note
        return self._remote[:end], self._front[:end]

    def _room_transfer(self, room: Room, present: tuple[int, ...], note: int) -> Transfer:
        key = (id(room), present, note)
        if key not in self._transfers:
            if len(self._transfers) >= _TRANSFERS:
                self._transfers.clear()
                self._rooms.clear()
            runs = self.bundle.runs(present)
            pairs = [(self._remote[start:end], room.memory[start:end]) for start, end in runs]
            self._transfers[key] = self._channel.prepare([self._used_front(note), *pairs], notify=self._number)
            self._rooms[id(room)] = room  # or its id might be another's
        return self._transfers[key]

    def prepare_loose(self, present: tuple[int, ...], idle: Sequence[torch.Tensor], note: int) -> Transfer:
        """A transfer with a copy a tensor, after the one of the front."""
        pairs = []
        for at, tensor in zip(present, idle):
            start = self.bundle.offsets[at]
            pairs.append((self._remote[start : start + self.bundle.edges[at].nbytes], tensor))
        return self._channel.prepare([self._used_front(note), *pairs], notify=self._number)

    def staged(self, at: int, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a loose tensor in a room, counted."""
        room = self._stage()
        room.tensors[at].copy_(tensor.detach())
        self._device.count_staged(self.bundle.edges[at].nbytes)
        found = dense(room.tensors[at])
        assert found is not None
        return found[0]

    def _stage(self) -> Room:
        if self._staging is None:
            self._staging = Room(self._device, self.bundle)
        return self._staging


class _Loose:
    """The prepared write of one set of loose tensors. Between writes it holds none of them: their memory is warm, and the next
    backward should get it."""

    def __init__(self, outlet: BundleOutlet, present: tuple[int, ...], note: int) -> None:
        bundle = outlet.bundle
        self._outlet, self._present = outlet, present
        self._orders = [bundle.orders[at] for at in present]
        self._plain = [
            not order and not bundle.edges[at].dtype.is_complex for at, order in zip(present, self._orders)
        ]  # need no look beyond the flags
        self._missed = False
        # Never sent and never touched, so they take no memory.
        self._idle = [torch.empty(bundle.edges[at].nbytes, dtype=torch.uint8, device="cpu") for at in present]
        self.transfer = outlet.prepare_loose(present, self._idle, note)

    def bind(self, tensors: Sequence[torch.Tensor]) -> None:
        rebind = self.transfer.rebind
        for index, (tensor, plain) in enumerate(zip(tensors, self._plain)):
            if not plain or tensor.layout is not torch.strided or tensor.is_neg() or not tensor.is_contiguous():
                tensor = self._source(index, tensor)
            rebind(index + 1, tensor)

    def _source(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        at = self._present[index]
        _check(self._outlet.bundle.edges[at], tensor)
        found = dense(tensor.detach())
        if found is not None and found[1] == self._orders[index]:
            return found[0]
        self._missed = True
        return self._outlet.staged(at, tensor)

    def release(self) -> bool:
        """Let go of the sources. Whether one of them had to be copied."""
        for index, idle in enumerate(self._idle):
            self.transfer.rebind(index + 1, idle)
        missed, self._missed = self._missed, False
        return missed


def _check(edge: Edge, tensor: torch.Tensor) -> None:
    if tensor.layout is not torch.strided or tuple(tensor.shape) != edge.shape or tensor.dtype != edge.dtype:
        raise NotSupported(
            f"{edge.kind} {edge.name!r} is {tensor.layout} {tuple(tensor.shape)} {tensor.dtype}, "
            f"but dense {edge.shape} {edge.dtype} has its place at {edge.target!r}",
            peer=edge.target,
            hint="sparse gradients (nn.Embedding(sparse=True)) cannot be served",
        )
