"""Bundles: all tensors of one kind that go from one worker to another, in one slot, by one write and one notification.

A slot is a header, a note (a few bytes that describe the write), then every tensor at a 64-byte aligned offset. Both ends work
the offsets out from the same list of edges. A bundle has one slot and no credits of its own: two bundles that answer each other
are each other's credit (see ``server``).

A header is the 64 bytes in front of a bundle: five little-endian int64 words, written together with the payload, and padding.
What crosses of a tensor is the storage as it lies, so channels-last stays channels-last.

What is sent is either a ``Room``, memory that is laid out as the slot is, of which neighbouring tensors go as one copy; or
loose tensors where somebody's operation left them, a copy each. Loose tensors are *traced*: the first time they are copied into
a room (``bytes_staged``) and a write from wherever they will lie is prepared, which every later time uses. One that turns up in
another memory order is copied again, and counted.

A ``Station`` has all bundles of one model at one worker: an inlet or an outlet each.
"""

from __future__ import annotations

import contextlib
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from math import prod
from typing import Any, NamedTuple

import torch

from ..message.layout import dense as row_major
from ..transport import SLOTS, Channel, Device, NotSupported, PeerLost, Poller, RdmaError, RemoteRegion, Transfer, Work

HEADER_BYTES = 64
_WIRE = struct.Struct("<5q")

STAGED = 1
"""Gradients: the sender copied all of it aside first, and asks for weights that are copied aside too (the ablation)."""
CHANGED = 2
"""Weights: the step that made them has dropped, replaced or written into gradients."""


class Header(NamedTuple):
    bundle: int
    """Its number, unique in the model. The receiver compares it: a stray write is an error, never data."""
    step: int
    flags: int = 0
    note_bytes: int = 0
    """Gradients: how long the note is."""
    optimizer: int = 0
    """Gradients: the number of the optimizer that is to step."""

    def write(self, memory: memoryview) -> None:
        _WIRE.pack_into(memory, 0, *self)

    @staticmethod
    def read(memory: memoryview) -> Header:
        return Header._make(_WIRE.unpack_from(memory))


def dense(tensor: torch.Tensor) -> torch.Tensor | None:
    """A contiguous view of all of the tensor's storage, or ``None`` if there are gaps or overlaps (then only a copy can be
    sent)."""
    if tensor.is_conj() or tensor.is_neg():
        return None
    if tensor.is_contiguous():
        return tensor
    stride = tensor.stride()
    view = tensor.permute(sorted(range(tensor.dim()), key=lambda dim: -stride[dim]))
    return view if view.is_contiguous() else None


def strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Its own strides, in elements, if it is dense; else those of a contiguous tensor of its shape. They decide which kernels
    torch chooses, also those of dimensions of size 1."""
    return tensor.stride() if dense(tensor) is not None else row_major(tensor.shape)


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
    strides: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class Bundle:
    """The tensors that one write takes from one worker to another. Plain data, picklable. ``edges`` have one source and one
    target; ``note`` bytes follow the header."""

    def __init__(self, edges: Sequence[Edge], note: int = 0) -> None:
        self.edges, self._note = tuple(edges), note
        self.source, self.target, self.number = edges[0].source, edges[0].target, edges[0].number
        self.offsets = []
        at = self.front = padded(HEADER_BYTES + note, _ALIGN)
        for edge in edges:
            self.offsets.append(at)
            at = padded(at + edge.nbytes, _ALIGN)
        self.nbytes = at

    def __reduce__(self) -> tuple[Any, ...]:
        return Bundle, (self.edges, self._note)  # where things lie each end works out for itself

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


def between(
    server: str, worker: str, parameters: Mapping[str, torch.Tensor], numbers: Iterator[int]
) -> tuple[Bundle, Bundle | None]:
    """The bundle of weights for a worker, and that of gradients for a server. Parameters that need gradients come first; where
    none does, there is no such bundle."""
    learns = sum(parameter.requires_grad for parameter in parameters.values())

    def edges(kind: str, source: str, target: str, count: int) -> list[Edge]:
        return [
            Edge(next(numbers), kind, name, source, target, tuple(p.shape), p.dtype, strides(p.detach()))
            for name, p in islice(parameters.items(), count)
        ]

    weights = Bundle(edges(WEIGHT, server, worker, len(parameters)))
    return weights, Bundle(edges(GRADIENT, worker, server, learns), gradient_note(learns)) if learns else None


def gradient_note(tensors: int) -> int:
    """Bytes of the note of a bundle with so many gradients."""
    return padded(tensors) + 8 * NUMBERS


def padded(nbytes: int, to: int = 8) -> int:
    """Rounded up: the marks in a note."""
    return -(-nbytes // to) * to


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
        for edge, offset in zip(bundle.edges, bundle.offsets):
            tensor = torch.empty(0, dtype=edge.dtype, device="cpu")
            if edge.nbytes:
                view = memoryview(array[offset : offset + edge.nbytes])
                flat = torch.frombuffer(view, dtype=edge.dtype, count=prod(edge.shape))
                tensor.set_(flat.untyped_storage(), 0, edge.shape, edge.strides)
            self.tensors.append(tensor if edge.nbytes else tensor.view(edge.shape))


_GRACE_S, _REASON_S, _LOOK_S = 0.5, 0.05, 0.002
_SLICE_S = 0.25
"""Between two looks at whether the peers still live (their loss is usually announced before)."""


class Station:
    """One worker's end of all bundles of one model: a poller, and who of its peers is lost. ``poll`` and everything that sends
    belong to one thread at a time; ``lost`` to any."""

    def __init__(self, name: str, device: Device, channels: Callable[[str], Channel], timeout: float) -> None:
        self.name, self.device, self.timeout = name, device, timeout
        self.channels = channels
        self.peers: dict[str, Channel] = {}
        self.poller: Poller = device.poller()
        self._handlers: dict[int, Callable[[int], None]] = {}
        self.expected: set[str] = set()
        """Workers that are to become peers: their loss is one already."""
        self._lost: dict[str, RdmaError] = {}
        self._lost_since = 0.0
        """When a loss was first seen (``time.monotonic``); 0: none is known."""
        self.closed = False

    def channel(self, worker: str) -> Channel:
        if worker not in self.peers:
            self.peers[worker] = self.channels(worker)
        return self.peers[worker]

    def take_number(self, channel: Channel, handler: Callable[[int], None]) -> int:
        """A number that the peer of this channel may notify from now on. ``handler`` runs on the thread that polls, with the
        count of new notifications."""
        number = channel.take_numbers(1)
        self._handlers[self.poller.add(channel, number)] = handler
        return number

    def poll(self, timeout: float) -> None:
        """Handle everything that has come, or what comes first within ``timeout`` seconds (at most a quarter of one). Raises
        ``PeerLost`` when a peer is."""
        news = self.poller.wait(min(timeout, _SLICE_S))
        if news is None:
            self.check()
        while news is not None:
            row, count = news
            if row == Poller.KICK:
                self.check()
            elif row in self._handlers:
                self._handlers[row](count)
            news = self.poller.take()

    # -- losses

    def check_open(self) -> None:
        """Raise ``RdmaError`` after ``rpc.shutdown``, and when the model was closed."""
        self.device.check()
        if self.closed:
            raise RdmaError("the model was closed")

    def check(self) -> None:
        """Raise ``PeerLost``, with the worker's name, if the connection to any peer broke."""
        first = self._first_lost()
        if first is None:
            return
        worker, error = first
        why = error.message.removeprefix(f"worker {worker} is lost: ").replace(f"worker {worker} cannot", "it cannot", 1)
        if error.given_up:
            why = why.replace("this worker", self.name)
        text, device = f"worker {worker!r} is lost: {why}", self.device.name
        raise PeerLost(text, peer=worker, device=device, status=error.status, hint=error.hint)

    @contextlib.contextmanager
    def naming(self) -> Iterator[None]:
        """In the block, a ``PeerLost`` names the worker that was lost first, not the address of a connection: the error of a
        post names its own peer, which may have left because another one died."""
        try:
            yield
        except PeerLost as error:
            # Channels know their peer by its address.
            named = next((worker for worker, channel in list(self.peers.items()) if channel.peer == error.peer), error.peer)
            if all(worker != named for worker, _ in self._lost_peers()):
                self.lost(named, error)  # a post finds the end of a connection before the device's thread has heard of it
            try:
                self.check()
            except PeerLost as lost:
                if lost.peer != error.peer:
                    raise lost from error
            raise

    def _first_lost(self) -> tuple[str, RdmaError] | None:
        """A worker that leaves because another one died may be heard first, and the reason of either a moment later."""
        while lost := self._lost_peers():
            self._lost_since = self._lost_since or time.monotonic()  # once for each loss, however often it is looked at
            worker, error = min(lost, key=lambda item: item[1].status == "CLOSED")
            waited = time.monotonic() - self._lost_since
            known = error.status != "CLOSED" and (worker in self._lost or waited > _REASON_S)
            if known or waited > _GRACE_S:
                return worker, error
            time.sleep(_LOOK_S)
        self._lost_since = 0.0
        return None

    def _lost_peers(self) -> list[tuple[str, RdmaError]]:
        broken = {worker: channel.error for worker, channel in list(self.peers.items()) if channel.error is not None}
        return list({**broken, **self._lost}.items()) if broken or self._lost else []

    def lost(self, worker: str, error: RdmaError) -> None:
        """Somebody noticed that a worker is gone. Any thread."""
        if (worker in self.peers or worker in self.expected) and not self.closed:
            self._lost[worker] = error
            self.poller.kick()

    def forget(self, worker: str) -> None:
        """A peer that has done its part: its loss is none any more."""
        self.expected.discard(worker)
        self.peers.pop(worker, None)
        self._lost.pop(worker, None)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.poller.close()


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
            why = f"a write that nobody allowed into bundle {bundle.number}: {count} at once, header of {header.bundle}"
            raise RdmaError(why, peer=bundle.source)
        self._arrived(header)


class BundleOutlet:
    """The sender's half. One thread at a time. A source belongs to the write until ``finish``."""

    def __init__(self, device: Device, channel: Channel, bundle: Bundle, remote: RemoteRegion, number: int) -> None:
        self.bundle = bundle
        self._device, self._channel, self._remote, self._number = device, channel, remote, number
        self._front = device.empty(bundle.front, dtype=torch.uint8)
        self._memory = memoryview(self._front.numpy())
        self._transfers: dict[tuple[Room, tuple[int, ...], int], Transfer] = {}
        self._loose: dict[tuple[tuple[int, ...], int], _Loose] = {}
        self._staging: Room | None = None
        self._work: Work | None = None
        self._let_go: _Loose | None = None

    def send_room(self, header: Header, room: Room, present: tuple[int, ...], note: bytes = b"") -> None:
        """Write these tensors of a room. They stay unchanged until ``finish``."""
        self._write_front(header, note)
        key = room, present, len(note)
        if key not in self._transfers:
            if len(self._transfers) >= _TRANSFERS:
                self._transfers.clear()
            places = self.bundle.runs(present)
            self._transfers[key] = self.prepare(len(note), places, [room.memory[start:end] for start, end in places])
        self._work = self._transfers[key].post()

    def send_copies(self, header: Header, room: Room, present: tuple[int, ...]) -> None:
        """The same, by way of a staging copy."""
        self.send_room(header, self.copied(present, [room.tensors[at] for at in present]), present)

    def send_loose(
        self, header: Header, note: bytes, present: tuple[int, ...], tensors: Sequence[torch.Tensor], staging: str
    ) -> None:
        """Write loose tensors (of the shapes and dtypes of the edges ``present``, in their order) and a note. They stay
        unchanged until ``finish``. Raises ``NotSupported`` for one that is not dense."""
        loose = self._loose.get((present, len(note))) if staging == TRACED else None
        if loose is not None:
            self._write_front(header, note)
            loose.bind(tensors)
            self._work, self._let_go = loose.transfer.post(), loose
            return
        self.send_room(header, self.copied(present, tensors), present, note)
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
            if not missed and self._staging is not None:
                # Tracing has seen everything, so the memory of the copies is of use to others.
                self._transfers = {key: each for key, each in self._transfers.items() if key[0] is not self._staging}
                self._staging = None

    def _write_front(self, header: Header, note: bytes) -> None:
        header._replace(bundle=self.bundle.number).write(self._memory)
        self._memory[HEADER_BYTES : HEADER_BYTES + len(note)] = note

    def prepare(self, note: int, places: Sequence[tuple[int, int]], sources: Sequence[torch.Tensor]) -> Transfer:
        """A transfer of the front, with so many bytes of note, and of ``sources`` into these byte ranges of the slot."""
        end = HEADER_BYTES + note
        pairs = [(self._remote[start:stop], source) for (start, stop), source in zip(places, sources)]
        return self._channel.prepare([(self._remote[:end], self._front[:end]), *pairs], notify=self._number)

    def copied(self, present: Sequence[int], tensors: Sequence[torch.Tensor]) -> Room:
        """A room of our own with copies of these tensors, counted."""
        if self._staging is None:
            self._staging = Room(self._device, self.bundle)
        for at, tensor in zip(present, tensors):
            _check(self.bundle.edges[at], tensor)
            self._staging.tensors[at].copy_(tensor.detach())
        self._device.count_staged(sum(self.bundle.edges[at].nbytes for at in present))
        return self._staging


class _Loose:
    """The prepared write of one set of loose tensors. Between writes it holds none of them: their memory is warm, and the next
    backward should get it."""

    def __init__(self, outlet: BundleOutlet, present: tuple[int, ...], note: int) -> None:
        bundle = outlet.bundle
        self._outlet, self._present = outlet, present
        edges = [bundle.edges[at] for at in present]
        self._plain = [not edge.dtype.is_complex and row_major(edge.shape) == edge.strides for edge in edges]
        """Whether what is sent in the place of each needs no look beyond the flags."""
        self._missed = False
        # Never sent and never touched, so they take no memory.
        self._idle = [torch.empty(edge.nbytes, dtype=torch.uint8, device="cpu") for edge in edges]
        places = [(bundle.offsets[at], bundle.offsets[at] + edge.nbytes) for at, edge in zip(present, edges)]
        self.transfer = outlet.prepare(note, places, self._idle)

    def bind(self, tensors: Sequence[torch.Tensor]) -> None:
        rebind = self.transfer.rebind
        for index, (tensor, plain) in enumerate(zip(tensors, self._plain), 1):
            if not plain or tensor.layout is not torch.strided or tensor.is_neg() or not tensor.is_contiguous():
                tensor = self._source(self._present[index - 1], tensor)
            rebind(index, tensor)

    def _source(self, at: int, tensor: torch.Tensor) -> torch.Tensor:
        edge = self._outlet.bundle.edges[at]
        _check(edge, tensor)
        found = dense(tensor.detach())
        if found is None or tensor.stride() != edge.strides:
            self._missed = True
            found = dense(self._outlet.copied([at], [tensor]).tensors[at])
            assert found is not None
        return found

    def release(self) -> bool:
        """Let go of the sources. Whether one of them had to be copied."""
        for index, idle in enumerate(self._idle, 1):
            self.transfer.rebind(index, idle)
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
