"""Devices whose peers come to a socket of theirs: how two of them meet.

Both ends prove themselves (``peers/auth``), then they exchange setups: first the one that connects. A bad peer costs only its
own connection. Later they ask each other what has to be answered (``Questions``).
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

from .channel import Channel
from .device import Device, DeviceOptions
from .errors import NotSupported, PeerLost, RdmaError, TransferTimeout, fresh
from .memory.arena import Pool
from .peers import auth
from .peers.guard import REFUSED, Guard, broken_by, hint_for
from .peers.heartbeat import BROKEN, SILENT, Heart
from .peers.service import Service
from .timeouts import of_socket
from .tls.options import TlsOptions

if TYPE_CHECKING:
    from .tls.handshake import Tls

_Proven = tuple[socket.socket, bytes]
"""A stream to go on with, and the peer's key."""
MAX_HELLO = 64 << 10
HANDSHAKE_S, SETUP_S = 5.0, 60.0
"""The seconds that an acceptor gives a peer to prove itself, and then for the rest of its handshake. A busy machine may take
the processor from a worker for as long as the first; how long a worker waits for us is up to that worker."""
_EXPECTED = (RdmaError, ConnectionError, TimeoutError)
"""Errors that a peer may cause as it connects. They are not reported here."""
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.01, 0.25
_HALVES_S = 2.9  # half of it is enough for a heart to hang up
_LATE_S = 1.0  # so much after its deadline an attempt ends only where this process did not run: the peer is not to blame
_TLS_LINGER_S = 1.0  # for peers to take what is sealed already


class ListeningDevice(Device):
    """A device with a ``Service`` that hears its peers."""

    _service: Service
    _tls: Tls | None = None
    _heart: Heart
    _others = ""
    """What to use for peers that cannot be reached."""
    linger_s = 0.0
    """How long (s) the end waits for the peers to hang up, too."""

    def __init__(self, name: str, options: DeviceOptions, *, shared: bool = False) -> None:
        super().__init__(name, options, shared=shared)
        self.guard = Guard(f"rdmarpc-{name}")

    # -- on the thread of the service (``Service``)

    def _hear(self, channel: Any) -> None:
        raise NotImplementedError

    def _look(self, channel: Any, seconds: float) -> None:
        """Give the peer up if it has not been seen running for too long. Should it ever run again, it finds our goodbye."""
        if channel.error is None and self._looks.too_long(channel.look(seconds)):
            self.lost(channel, PeerLost(self._looks.text(), peer=channel.peer, device=self.name, status="SILENT"), SILENT)

    def _flush(self, channel: Any) -> None:
        """There is room to send, which this channel has waited for."""

    def _admits(self, sock: socket.socket) -> bool:
        """Whether a peer may connect at all, as far as the system shows that at once."""
        return True

    # -- by a device, for two ends that meet

    def _offer(self, sock: socket.socket) -> AbstractContextManager[Any]:
        """What of ours goes into a setup, until both are exchanged."""
        return contextlib.nullcontext()

    def _send_setup(self, sock: socket.socket, ours: Any, hello: bytes) -> None:
        raise NotImplementedError

    def _receive_setup(self, sock: socket.socket, ours: Any) -> Any:
        """A channel to the peer."""
        raise NotImplementedError

    def _answer(self, sock: socket.socket, ours: Any, channel: Any) -> None:
        """Send our setup to one that connected. ``greet`` may publish the channel: what others post on it comes after."""
        self._send_setup(sock, ours, checked(self.door.greet(channel)))

    def _adopt(self, channel: Any) -> None:
        """Serve a channel from now on. ``PeerLost`` if the device was closed meanwhile."""
        raise NotImplementedError

    def lost(self, channel: Any, error: RdmaError, why: int = BROKEN) -> None:
        """End a channel because serving it failed, or making it. The peer is told (``why``), and the listener here. Any
        thread."""
        raise NotImplementedError

    def break_off(self, channel: Any, error: BaseException, doing: str) -> None:
        """Something that nobody expected went wrong with this channel: it ends, with a named error, and nothing else does."""
        if not isinstance(error, RdmaError):
            self.guard.note(error, doing)
        self.lost(channel, broken_by(error, doing, peer=channel.peer, device=self.name))

    # -- the one that connects

    def _where(self, peer: str) -> tuple[str, str]:
        """Where a peer with this address listens, and its uid."""
        raise NotImplementedError

    def _dial(self, where: str, timeout: float) -> socket.socket:
        """Connect to ``HOST:PORT`` within ``timeout`` seconds. Raises ``PeerLost`` if nobody listens there, ``TimeoutError``,
        and ``OSError`` if this process lacks something, such as file descriptors."""
        host, _, port = where.rpartition(":")
        try:
            return socket.create_connection((host.strip("[]"), int(port)), timeout)
        except OSError as error:
            if isinstance(error, TimeoutError) or hint_for(error):
                raise
            status = "NOBODY" if isinstance(error, ConnectionRefusedError) else ""
            why = "nobody listens there" if status else "there is no way there"
            why = "this system forbids the connection" if error.errno in REFUSED else why
            raise PeerLost(f"{why}: {error}", peer=where, device=self.name, status=status) from None

    def connect(self, peer: bytes, *, hello: bytes = b"", timeout: float = 5.0, pool: Pool | None = None) -> Channel:
        self.check()
        text = peer.decode("ascii", "replace")
        if why := self.why_not(peer):
            alike = peer.partition(b":")[0] == self.address.partition(b":")[0]
            hint = self._others if alike else "the same transport at every worker"
            raise NotSupported(f"{self.name} cannot reach {text!r}: {why}", device=self.name, hint=hint)
        where, uid = self._where(text)
        deadline = time.monotonic() + of_socket(timeout)
        try:
            prove = partial(self._prove, initiator=True, expect=uid)
            sock, key = reach(partial(self._dial, where), prove, deadline)
            try:
                return self._meet(sock, key, hello, deadline, pool)
            except BaseException:
                sock.close()
                raise
        except (OSError, RdmaError, ValueError) as error:
            if self.closed:
                raise self._closed(where) from None
            late = time.monotonic() >= deadline and not isinstance(error, NotSupported)
            if late or isinstance(error, TimeoutError):
                we_slept = time.monotonic() > deadline + _LATE_S
                status = "BUSY" if we_slept else error.status if isinstance(error, TransferTimeout) else ""
                why = f"the peer did not answer within {timeout} s"
                raise TransferTimeout(why, peer=where, device=self.name, status=status) from None
            if isinstance(error, ConnectionError):
                raise PeerLost(f"the peer broke off the handshake: {error}", peer=where, device=self.name) from None
            if isinstance(error, OSError):
                raise broken_by(error, "connecting", peer=where, device=self.name) from error
            raise

    def _meet(self, sock: socket.socket, key: bytes, hello: bytes, deadline: float, pool: Pool | None) -> Channel:
        """All after the proof, on the side that connects."""
        if time.monotonic() >= deadline:  # a fast peer would still answer, sometimes
            raise TimeoutError
        with contextlib.ExitStack() as stack:
            with self._service.handshakes.limited(sock, deadline):
                ours = stack.enter_context(self._offer(sock))
                self._send_setup(sock, ours, checked(hello))
                channel = self._receive_setup(sock, ours)
            self.door.know(channel, channel.peer_uid, key)
            channel.own_pool = pool
            self._adopt(channel)
        return channel

    def _prove(self, came: socket.socket, *, initiator: bool, deadline: float, expect: str = "") -> _Proven:
        """The stream is encrypted where TLS is on: ``came`` has been closed then. After an error ``came`` is the caller's to
        close."""
        stream, binding, handshakes = came, b"", self._service.handshakes
        try:
            with handshakes.limited(came, deadline):
                if self._tls is not None:
                    stream, binding = self._tls.seal(came, initiator=initiator, deadline=deadline)
                key = auth.authenticate(
                    stream,
                    self.secret,
                    self.memory.identity,
                    initiator=initiator,
                    expect=expect,
                    binding=binding,
                    proven=partial(handshakes.proven, came),
                )
        except BaseException as error:
            broken = failure(stream) if isinstance(error, PeerLost) and not error.gone else None
            if stream is not came:
                stream.close()
            if broken is not None:
                raise broken from None
            raise
        if stream is not came:
            came.close()
        return stream, key

    def _closed(self, peer: str) -> PeerLost:
        return PeerLost("the device was closed meanwhile", peer=peer, device=self.name, status="CLOSED")

    # -- the one that was connected to, on a thread for each connection

    def _welcome(self, came: socket.socket) -> None:
        sock, channel = came, None
        try:
            sock, key = self._prove(came, initiator=False, deadline=time.monotonic() + HANDSHAKE_S)
            with contextlib.ExitStack() as stack:
                with self._service.handshakes.limited(sock, time.monotonic() + SETUP_S):
                    ours = stack.enter_context(self._offer(sock))
                    channel = self._receive_setup(sock, ours)
                self.door.know(channel, channel.peer_uid, key)
                self._answer(sock, ours, channel)
            self._adopt(channel)
            self.door.welcomed(channel)
        except BaseException as error:
            self.door.refused(sock, error)
            if channel is not None:  # which on_connect may have published
                why = f"the connection broke as it was made: {error}"
                self.lost(channel, PeerLost(why, peer=channel.peer, device=self.name))
            sock.close()
            if not isinstance(error, _EXPECTED):
                raise

    # -- the end

    def _forked(self) -> None:
        for channel in list(self._channels):
            channel.sock.close()
        self._service.drop()

    def _shut(self) -> None:
        self._heart.stop()
        self._service.stop()
        if self._tls is not None:
            self._tls.close(_TLS_LINGER_S)


def checked(hello: bytes) -> bytes:
    """Raises ``ValueError`` for one that is too long."""
    if len(hello) > MAX_HELLO:
        raise ValueError(f"a hello has at most {MAX_HELLO} bytes, got {len(hello)}")
    return hello


def reach(dial: Callable[[float], socket.socket], prove: Callable[..., _Proven], deadline: float) -> _Proven:
    """Connect until both ends have proven themselves, and return the stream that ``prove`` returns. ``dial(seconds)`` connects,
    ``prove(sock, deadline=)`` does the handshake. If the peer hangs up meanwhile, to make way for others or because its Python
    is held up, both are tried again until the ``deadline`` (``time.monotonic``); then ``TransferTimeout`` has the status
    ``BUSY``. So they are after half of the time: one that was accepted before Python was held up is not hung up on."""
    pause, hung_up = _FIRST_PAUSE_S, False
    while True:
        left = max(deadline - time.monotonic(), 0.001)
        sock, limit = dial(left), time.monotonic() + (left / 2 if left > _HALVES_S else left)
        try:
            return prove(sock, deadline=limit)
        except BaseException as error:
            sock.close()
            again = isinstance(error, (ConnectionError, PeerLost, TransferTimeout)) and not getattr(error, "gone", False)
            late = time.monotonic() + pause > deadline
            if late and hung_up and again:
                raise TransferTimeout("the peer hangs up again and again", status="BUSY") from None
            if late or not again:
                raise
        hung_up = hung_up or time.monotonic() < limit
        time.sleep(pause)
        pause = min(2 * pause, _LAST_PAUSE_S)


def failure(sock: socket.socket, peer: str = "") -> PeerLost | None:
    """Why an encrypted stream ended, where it was not the peer's end. ``None`` also for any other stream. ``peer``: its name,
    where it is known."""
    found = getattr(sock, "failure", None)
    return found(peer) if found is not None else None


def prepare(tls: bool | TlsOptions, secret: bytes, device: str) -> Tls | None:
    """The ``Tls`` for a device's argument ``tls``; ``None`` if it is off."""
    if not tls:
        return None
    from .tls.handshake import Tls  # compiles more kernels

    return Tls(tls if isinstance(tls, TlsOptions) else TlsOptions(), secret, device)


ANSWER_TIMEOUT_S = 60.0
"""Seconds that a living peer has for its answer. The answer needs a Python thread there, and another one may hold the GIL. A
process that does not run at all is lost after ``peer_timeout``."""


class Questions:
    """The unanswered questions of one channel. An answer has the question's kind plus one, and the same number. Thread-safe. It
    does not refer to the channel, which would else stay alive."""

    def __init__(self) -> None:
        self._news = threading.Condition()
        self._asked: dict[tuple[int, int], threading.Event] = {}
        self._numbers = itertools.count(1)

    def number(self) -> int:
        """A fresh number, for a question that is not about a numbered thing such as a region."""
        return next(self._numbers)

    def ask(
        self, channel: Any, send: Callable[[int, int], None], kind: int, number: int, known: Callable[[], bool] = lambda: False
    ) -> None:
        """Call ``send(kind, number)`` over our ``Channel``, and wait until the answer has come or ``known()`` is true without
        it. Never call this on the thread that hears the peer. Raises the error that ended the channel, and
        ``TransferTimeout``."""
        answer = kind + 1, number
        answered = self._asked.setdefault(answer, threading.Event())

        def over() -> bool:
            return answered.is_set() or channel.error is not None or known()

        try:
            send(kind, number)
            with self._news:
                self._news.wait_for(over, ANSWER_TIMEOUT_S)
        finally:
            self._asked.pop(answer, None)
        if answered.is_set() or known():  # whatever has become of the peer since
            return
        if channel.error is not None:
            raise fresh(channel.error)
        why = "the peer did not acknowledge a control message"
        raise TransferTimeout(why, peer=channel.peer, device=channel.device.name)

    def answer(self, kind: int, number: int) -> None:
        """Enter an answer that came."""
        with self._news:
            if event := self._asked.get((kind, number)):
                event.set()
            self._news.notify_all()

    def news(self) -> None:
        """Have the waiting threads look again: ``known()`` may have changed, or the channel has ended."""
        with self._news:
            self._news.notify_all()
