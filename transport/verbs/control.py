"""The control stream beside a queue pair: the peer's setup, the memory that it has registered, goodbyes, signs of life.

One TCP connection a channel, authenticated before anything else is parsed (``peers/auth``). First the handshake: a *setup* from
each end (the acceptor's may be a refusal instead), with which both connect their queue pairs, the acceptor before it answers;
then the initiator proves with a WRITE that RDMA packets go there and back; only then a *hello* from each end. Then messages of
one size:

    SEGMENT           number, key, address, nbytes, rkey: this memory may be read from now on
    LANDING, REGION   the same: and written
    GONE, GONE_ACK    number: no longer; nothing of the receiver is under way there
    SYNC, SYNC_ACK    number: all that was announced before has been heard
    BYE               the channel ended (number: why, ``peers/heartbeat``)
    BEAT              nothing: a sign of life (``peers/heartbeat``)

Its end is how the death of a process is noticed at once; the death of a host is noticed by the queue pair (``verbs``).
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from typing import NamedTuple

from ..errors import NotSupported, PeerLost
from ..listening import MAX_HELLO, failure
from ..nic.ports import ENDPOINT_BYTES
from ..peers import auth
from ..peers.heartbeat import Pulse

SEGMENT, REGION, GONE, GONE_ACK, SYNC, SYNC_ACK, BYE, LANDING, BEAT = range(1, 10)
MESSAGE = struct.Struct("<BQQQQI")
"""kind, number, key, address, nbytes, rkey"""
_SETUP = struct.Struct(f"<QIII{ENDPOINT_BYTES}sII")
_LENGTH = struct.Struct("<I")
_SEND_TIMEOUT_S = 5.0


class Setup(NamedTuple):
    """The setup of one end of a connection. ``patience_ms``: its ``peer_timeout``; ``max_msg_sz``: the bytes that its port
    takes in one message; ``endpoint``: a dumped ``Endpoint``."""

    uid: int
    epoch: int
    patience_ms: int
    max_msg_sz: int
    endpoint: bytes
    qp_num: int
    """0, which no connection has, in a refusal."""
    psn: int
    """First packet sequence number."""


REFUSAL = Setup(0, 0, 0, 0, b"", 0, 0)
"""Instead of a setup: this end cannot. The reason follows, as a hello."""


def send_setup(sock: socket.socket, setup: Setup) -> None:
    sock.sendall(_SETUP.pack(*setup))


def receive_setup(sock: socket.socket) -> Setup:
    """Raises ``NotSupported`` for a refusal."""
    setup = Setup._make(_SETUP.unpack(auth.receive_exactly(sock, _SETUP.size)))
    if not setup.qp_num:
        why = receive_hello(sock).decode("utf-8", "replace")
        raise NotSupported(f"the peer refused: {why}", device="verbs", status="REFUSED")
    return setup


def send_hello(sock: socket.socket, hello: bytes) -> None:
    sock.sendall(_LENGTH.pack(len(hello)) + hello)


def receive_hello(sock: socket.socket) -> bytes:
    (length,) = _LENGTH.unpack(auth.receive_exactly(sock, _LENGTH.size))
    if length > MAX_HELLO:
        raise PeerLost("the peer sent an overlong hello", device="verbs", status="PROTOCOL")
    return auth.receive_exactly(sock, length)


class Message(NamedTuple):
    kind: int
    number: int = 0
    key: int = 0
    address: int = 0
    nbytes: int = 0
    rkey: int = 0


class ControlStream:
    """The stream of control messages with one peer. Any thread sends; the device's service thread receives. ``peer``: the
    peer's name, for people."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        self.sock, self.peer = sock, peer
        self.pulse: Pulse | None = None
        self.heard = True
        """Whether bytes have come since this was last set to false."""
        self.lock = threading.RLock()
        """Held while a message is sent. The handshake holds it until its own part is out."""
        self._rest = b""
        self.closed = False

    def send(self, *message: int, patience: float = _SEND_TIMEOUT_S) -> None:
        """Send a ``Message``. Raises ``PeerLost`` if the peer is gone or has not read for ``patience`` seconds."""
        data = MESSAGE.pack(*Message(*message))
        with self.lock:
            if self.closed:
                raise PeerLost("the connection has ended", peer=self.peer, device="verbs", status="CLOSED")
            try:
                self._send_all(data, patience)
            except OSError as error:
                raise PeerLost(f"the connection broke: {error}", peer=self.peer, device="verbs", status="BROKEN") from None

    def goodbye(self, why: int, patience: float = _SEND_TIMEOUT_S) -> None:
        """The channel ended (``peers/heartbeat``: why). Where nobody hears it, the peer finds the end of the stream."""
        with contextlib.suppress(PeerLost):
            self.send(BYE, why, patience=patience)

    def _send_all(self, data: bytes, patience: float) -> None:
        deadline = time.monotonic() + patience
        left = len(data)
        try:
            left -= self._some(data, True)
            while left:
                if not select.select([], [self.sock], [], max(deadline - time.monotonic(), 0.0))[1]:
                    raise PeerLost("the peer does not read its control messages", peer=self.peer, device="verbs")
                left -= self._some(data[len(data) - left :], False)
        finally:
            if left and self.pulse is not None:
                self.pulse.withdraw()

    def _some(self, data: bytes, first: bool) -> int:
        if self.pulse is not None:
            return self.pulse.send([data], True, len(data)) if first else self.pulse.resume(len(data))
        try:
            return self.sock.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return 0

    def receive(self) -> list[Message]:
        """The messages that have come. Raises ``PeerLost`` at the end of the stream."""
        try:
            data = self.sock.recv(64 << 10, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        except OSError as error:
            broken = PeerLost(f"the connection broke: {error}", peer=self.peer, device="verbs", status="BROKEN")
            raise failure(self.sock, self.peer) or broken from None
        if not data:
            ended = PeerLost("the peer's process ended, or it aborted", peer=self.peer, device="verbs", status="EOF")
            raise failure(self.sock, self.peer) or ended
        self.heard = True
        data = self._rest + data
        whole = len(data) // MESSAGE.size * MESSAGE.size
        self._rest = data[whole:]
        messages = [Message._make(fields) for fields in MESSAGE.iter_unpack(data[:whole])]
        for message in messages:
            if not SEGMENT <= message.kind <= BEAT:
                raise PeerLost("the peer sent what is no message", peer=self.peer, device="verbs", status="PROTOCOL")
        return messages

    def close(self) -> None:
        with self.lock:
            if self.closed:
                return
            self.closed = True
            if self.pulse is not None:
                self.pulse.close()
                self.pulse.end()
            with contextlib.suppress(OSError):  # broken already
                self.sock.shutdown(socket.SHUT_RDWR)
            self.sock.close()
