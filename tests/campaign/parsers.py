"""Everything that reads bytes of another process, with samples that are right, and the errors that wrong ones may raise."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from rdmarpc.base.here import WorkerInfo
from rdmarpc.links.group.members import Record
from rdmarpc.links.ring import RING_BYTES, Link
from rdmarpc.message import errors, layout, serialize, tensors
from rdmarpc.message.tensors import Places
from rdmarpc.places.ring import dump, loads
from rdmarpc.references.mail import DELETE, FORK, Mail
from rdmarpc.servers.bundle import Header
from rdmarpc.transport import ArenaFull, RdmaError, RemoteAccessError, RemoteRegion, Window, open_device
from rdmarpc.transport.verbs import control

LIMIT_BYTES = 64 << 20
"""What a parser may allocate: ``_Memory`` has no more."""


class Escaped(Exception):
    """Something that was made of a frame reaches past the bytes that came."""


class Parser(NamedTuple):
    """``parse`` takes what came. ``allowed``: what it may raise, as whoever calls it in the package expects."""

    name: str
    samples: list[bytes]
    parse: Callable[[bytes], Any]
    allowed: tuple[type[BaseException], ...]


class _Device:
    """Lends what it is asked for, and has nothing to READ."""

    def can_lend(self, *_: Any) -> bool:
        return True

    def lend(self, tensor: torch.Tensor, *_: Any) -> RemoteRegion:
        return RemoteRegion(1, 2, 3, 4, tensor.data_ptr(), tensor.numel())

    def count_staged(self, nbytes: int) -> None:
        """Nobody counts."""


class _Memory:
    def empty(self, channel: Any, nbytes: int, deadline: float | None) -> torch.Tensor:
        if nbytes > LIMIT_BYTES:
            raise ArenaFull("more than there is")
        return torch.empty(nbytes, dtype=torch.uint8)


class _Channel:
    peer = "worker1"
    can_adopt = False

    def memcpy(self, dst: Any, src: Any) -> Any:
        raise RemoteAccessError("nothing is registered here")

    def prepare(self, pairs: Any) -> Any:
        return self.memcpy(*pairs[0])

    def adopt(self, *_: Any) -> torch.Tensor:
        raise RemoteAccessError("nothing is registered here")


def inside(value: Any, depth: int = 0) -> None:
    """Read all of every tensor in ``value``, which has to lie in its storage."""
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided and value.numel():
            last = value.storage_offset() + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride()))
            if value.storage_offset() < 0 or (last + 1) * value.element_size() > value.untyped_storage().nbytes():
                raise Escaped(f"a tensor of shape {tuple(value.shape)} and strides {value.stride()} past its storage")
            if value.numel() > LIMIT_BYTES:
                return  # an expanded one: its storage was looked at
            value.clone()
    elif isinstance(value, (list, tuple)) and depth < 4:
        for item in value:
            inside(item, depth + 1)


def _link() -> Parser:
    """Frames in a ring, as another link wrote them."""
    device = open_device("shm")
    sender, receiver = (Link(device, None, number, device.pool()) for number in (1, 0))
    caught: list[bytes] = []

    class Catch(Window):
        def put(self, offset: int, nbytes: int) -> None:
            caught.append(bytes(sender._out[offset : offset + nbytes]))

        put_now = put

    sender._window = Catch()
    for kind in range(1, 8):
        sender.try_send(kind, kind * 1000, 3, 1, (b"function", b"payload" * kind, b"table", b"data" * 100))
    device.close()

    def parse(data: bytes) -> Any:
        receiver._in[: len(data)] = data
        receiver.taken = 0
        receiver.read()
        # Near the end of the ring, where a length may reach past it.
        at = RING_BYTES - 256
        receiver._in[at:] = data[:256].ljust(256, b"\0")
        receiver.taken = at
        return receiver.read()

    return Parser("Link.read", [item[:4096] for item in caught], parse, (RdmaError,))


def _layouts() -> list[bytes]:
    base = torch.arange(600.0).reshape(20, 30)
    kinds = [
        base,
        base.t(),
        base[::2, ::3],
        base.to(torch.int8),
        torch.empty(0, 3),
        torch.randn(3, dtype=torch.complex64).conj(),
    ]
    return [tensors.describe_all([kind], _Device())[0][0][2] for kind in kinds]


def _messages() -> list[tuple[bytes, bytes, int]]:
    base = torch.arange(600.0)
    large = torch.zeros(100_000)
    found = []
    for group in ([base], [base, base], [base, base[:50]], [large], [large, base, torch.ones(3, 4).t()]):
        out = tensors.pack(group, _Device(), _Channel(), lambda classes: None, _Memory())
        found.append((out.table, out.data, out.tensors))
    return found


def _unpack(data: bytes) -> Any:
    count, length = data[0], int.from_bytes(data[1:3], "little")
    table, rest = data[3 : 3 + length], data[3 + length :]
    found = tensors.unpack(table, rest, count, _Memory(), _Channel(), None, {})
    inside(found[0])
    return found


def _rebuild(data: bytes) -> Any:
    what = layout.decode(data)
    if not 0 <= what.nbytes <= LIMIT_BYTES:
        return
    value = layout.rebuilt(torch.zeros(what.nbytes, dtype=torch.uint8), what)
    inside(value)


class _State:
    """What a user sends."""

    def __init__(self) -> None:
        self.values = {"a": [1, 2.5, "three"], "b": (None, b"bytes")}


def _over_a_socket(read: Callable[[socket.socket], Any]) -> Callable[[bytes], Any]:
    def parse(data: bytes) -> Any:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.settimeout(1.0), theirs.settimeout(1.0)
            theirs.sendall(data)
            theirs.shutdown(socket.SHUT_WR)
            return read(ours)

    return parse


def _setup() -> bytes:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        control.send_setup(ours, control.Setup(1, 2, 3000, 1 << 20, b"e" * 8, 1, 2))
        return theirs.recv(4096)


def _errors() -> list[bytes]:
    found = []
    for error in (ValueError("text"), KeyError(1, 2), RemoteAccessError("no", peer="worker1"), ZeroDivisionError()):
        try:
            raise error
        except Exception as raised:
            found.append(errors.dump(raised, WorkerInfo("worker1", 1)))
    return found


def parsers() -> list[Parser]:
    """To be called once a process, before anything is mutated."""
    torch.set_num_threads(1)  # its threads would not be there in a forked child
    region = RemoteRegion(1, 2, 3, 4, 5, 600).dump()
    mail = b"".join(struct.pack("<BQQ", kind, 1 << 40, 5) for kind in range(FORK, DELETE + 1))
    header = bytearray(64)
    Header(5, 1, 3, 16, 2).write(memoryview(header))
    signature = dump(("aten::add.Tensor", [("w", 1), ("w", 1)], [("alpha", ("c", 1))], True))
    records = [Record("worker0", 0, "host", "shm:host:00ff", 0).dump(b"0123456789abcdef").encode()]
    dumped = [
        serialize.dumps((torch.add, (torch.ones(3), 4), {"alpha": 2}), 1)[0],
        serialize.dumps(_State(), 1)[0],
        serialize.dumps([b"x" * 50_000, {"k": range(5)}], 1)[0],
    ]
    messages = [bytes([n]) + len(table).to_bytes(2, "little") + table + data for table, data, n in _messages()]
    anything = (Exception,)
    return [
        _link(),
        Parser("RemoteRegion.load", [region], RemoteRegion.load, (RemoteAccessError,)),
        Parser("places", [region, region * 3], lambda data: Places()[data], (RemoteAccessError,)),
        Parser("Mail.open", [mail], lambda data: list(Mail().open(1, data)), (struct.error,)),
        Parser("layout.decode", _layouts(), _rebuild, anything),
        Parser("tensors.unpack", messages, _unpack, anything),
        Parser("serialize.loads", dumped, lambda data: serialize.loads(data, [torch.ones(3)], [], []), anything),
        Parser("remote_error.rebuild", _errors(), errors.rebuild, anything),
        Parser("Record.load", records, _record, (RdmaError, ValueError, TypeError)),
        Parser("Header.read", [bytes(header)], lambda data: Header.read(memoryview(data.ljust(64, b"\0"))), ()),
        Parser("plain.loads", [signature], loads, anything),
        Parser("verbs_control.receive_setup", [_setup()], _over_a_socket(control.receive_setup), (RdmaError,)),
        Parser("verbs_control.receive_hello", [b"\5\0\0\0hello"], _over_a_socket(control.receive_hello), (RdmaError,)),
    ]


def _record(data: bytes) -> Any:
    record, proof = Record.load(data)
    return record.proven(proof, b"0123456789abcdef")
