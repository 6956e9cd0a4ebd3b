"""The handshakes of ``tls``: from a TCP stream to an encrypted one, and the relay by which a worker uses that.

A *relay* is a thread with a TCP stream on one side and one end of a socket pair on the other; the rest of the package has the
other end and uses it as it would the stream. So whatever is sent in kernels without the GIL (``Pulse``) is also encrypted
without it: a worker whose Python is busy for long still beats. One thread a stream is the only user of its ``SSL``, which
no two may use at once.

What holds, seen from the worker: bytes arrive in order, unaltered, or the stream ends; what was sent before the end of the
stream goes out before the end; a relay holds at most ``BUFFER_BYTES`` in each direction, and takes no more from a side until
the other one has room. It ends, and closes its sockets, when both directions have ended, or when the worker's end was closed
and the rest is out.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno as errors
import hashlib
import hmac
import os
import select
import signal
import socket
import threading
import time
import weakref
from typing import Any

import numpy as np

from ..errors import AuthenticationError, NotSupported, PeerLost, RdmaError, TransferTimeout
from ..words import kernels
from ..words.atomics import call, errno, load_acquire, store_release, word_of
from ..words.compiled import compiled
from ..words.symbols import CFunction, i32, i64
from . import openssl
from .openssl import ERROR_SSL, ERROR_SYSCALL, ERROR_WANT_READ, ERROR_WANT_WRITE, address, library, reason
from .options import TlsOptions

BUFFER_BYTES = 64 << 10
RENEW_BYTES = 64 << 30
"""Sent under one key; AES-GCM would bear six times that (RFC 8446, 5.5)."""
_LINGER_MS = 5000  # for a peer that takes nothing, once the worker is through
_SSL, _TCP, _LOCAL, _READ, _WRITE, _GET_ERROR, _CLEAR, _ERROR, _SHUTDOWN, _KEY_UPDATE = range(10)
_RENEW, _OUT, _IN, _CODE, _ERRNO, _FDS, _WORDS = range(10, 17)
_POLLIN, _POLLOUT, _POLLERR, _POLLHUP = 1, 4, 8, 16
_DONTWAIT = 0x40 | 0x4000  # MSG_DONTWAIT | MSG_NOSIGNAL
_SHUT_RD, _SHUT_WR, _SHUT_RDWR = 0, 1, 2
_EINTR, _EAGAIN = 4, 11
_OPEN, _GOODBYE, _ENDED = 0, 1, 2

_recv = CFunction("recv", i64(i32, i64, i64, i32))
_send = CFunction("send", i64(i32, i64, i64, i32))
_poll = CFunction("poll", i32(i64, i64, i32))
_shutdown = CFunction("shutdown", i32(i32, i32))


@compiled(i64(i64, i64, i64))
def _waits_for(at: int, result: int, heard: int) -> int:
    """What the stream has to be ready for after an operation on the ``SSL`` that did not complete, or minus the kind of error.
    ``heard``: 1 after a read, whose error is the reason for the stream's end."""
    code = errno()
    kind = call(word_of(at, _GET_ERROR), word_of(at, _SSL), result, 0, 0)
    if kind == ERROR_WANT_READ:
        return _POLLIN
    if kind == ERROR_WANT_WRITE:
        return _POLLOUT
    if kind == ERROR_SSL and word_of(at, _CODE) == 0:
        store_release(at + 8 * _CODE, call(word_of(at, _ERROR), 0, 0, 0, 0))
    if kind == ERROR_SYSCALL and heard and result < 0:
        store_release(at + 8 * _ERRNO, code)
    return -kind


@compiled(i64(i64, i64, i64, i64))
def _seal(at: int, function: int, buffer: int, nbytes: int) -> int:
    call(word_of(at, _CLEAR), 0, 0, 0, 0)
    return call(word_of(at, function), word_of(at, _SSL), buffer, nbytes, 0)


@compiled(i64(i64))
def run(at: int) -> int:
    """Relay until both directions have ended. ``at``: the words of a ``Relay``.

    Longer than a screen: one loop over a dozen local variables, which compiled functions could share only through memory."""
    tcp, local = i32(word_of(at, _TCP)), i32(word_of(at, _LOCAL))
    sending, hearing, gone = _OPEN, _OPEN, False
    out_at, out_left, in_at, in_left = 0, 0, 0, 0
    write_waits, read_waits, sealed = 0, 0, 0
    while sending != _ENDED or hearing != _ENDED:
        moved = False
        # From the worker to the peer.
        if sending == _OPEN and out_left == 0:
            got = _recv(local, word_of(at, _OUT), BUFFER_BYTES, i32(_DONTWAIT))
            if got > 0:
                out_at, out_left, moved = 0, got, True
            elif got == 0 or (errno() != _EAGAIN and errno() != _EINTR):
                sending, moved = _GOODBYE, True
        write_waits = 0
        if out_left:
            done = _seal(at, _WRITE, word_of(at, _OUT) + out_at, out_left)
            if done > 0:
                out_at, out_left, sealed, moved = out_at + done, out_left - done, sealed + done, True
                if sealed >= word_of(at, _RENEW):
                    sealed = 0
                    call(word_of(at, _KEY_UPDATE), word_of(at, _SSL), 0, 0, 0)
            else:
                write_waits = _waits_for(at, done, 0)
        elif sending == _GOODBYE:
            done = _seal(at, _SHUTDOWN, 0, 0)
            write_waits = _waits_for(at, done, 0) if done < 0 else 0
            if write_waits <= 0:
                _shutdown(tcp, i32(_SHUT_WR))
                sending, write_waits, moved = _ENDED, 0, True
        if write_waits < 0:
            # The peer may have said something before: go on hearing.
            _shutdown(local, i32(_SHUT_RD))
            sending, out_left, write_waits, moved = _ENDED, 0, 0, True
        # From the peer to the worker.
        if in_left:
            done = _send(local, word_of(at, _IN) + in_at, in_left, i32(_DONTWAIT))
            if done > 0:
                in_at, in_left, moved = in_at + done, in_left - done, True
            elif errno() != _EAGAIN and errno() != _EINTR:
                hearing, in_left, moved = _ENDED, 0, True
        read_waits = 0
        if hearing == _OPEN and in_left == 0:
            done = _seal(at, _READ, word_of(at, _IN), BUFFER_BYTES)
            if done > 0:
                in_at, in_left, moved = 0, done, True
            else:
                read_waits = _waits_for(at, done, 1)
            if read_waits < 0:
                broken = read_waits == -ERROR_SSL or read_waits == -ERROR_SYSCALL
                if broken:
                    sending, out_left = _ENDED, 0
                _shutdown(local, i32(_SHUT_RDWR if broken else _SHUT_WR))
                hearing, read_waits, moved = _ENDED, 0, True
        if moved:
            continue
        # Nothing goes on: until one side is ready.
        wanted = write_waits | read_waits
        offered = (_POLLIN if sending == _OPEN and out_left == 0 else 0) | (_POLLOUT if in_left else 0)
        watched = hearing == _OPEN or offered != 0
        store_release(word_of(at, _FDS), (word_of(at, _TCP) if wanted else 0xFFFFFFFF) | wanted << 32)
        store_release(word_of(at, _FDS) + 8, (word_of(at, _LOCAL) if watched else 0xFFFFFFFF) | offered << 32)
        ready = _poll(word_of(at, _FDS), 2, i32(_LINGER_MS if gone else -1))
        if gone and ready == 0:
            return 0
        if (load_acquire(word_of(at, _FDS) + 8) >> 48) & (_POLLHUP | _POLLERR):
            # The worker has closed its end: what it sent is still there, nobody hears any more.
            gone, hearing, in_left = True, _ENDED, 0
    return 0


class Relay:
    """Owns ``tcp``, its ``SSL`` (a pointer) and ``local``, the end of a socket pair, from ``start`` on."""

    def __init__(self, tcp: socket.socket, ssl: int, local: socket.socket) -> None:
        self.tcp, self._ssl, self._local = tcp, ssl, local
        self._lib: Any = library()
        self._buffers = np.zeros((2, BUFFER_BYTES), np.uint8)
        self._fds = np.zeros(2, np.int64)
        words = self._words = np.zeros(_WORDS, np.int64)
        words[_SSL], words[_TCP], words[_LOCAL] = ssl, tcp.fileno(), local.fileno()
        words[_READ], words[_WRITE] = address(self._lib.SSL_read), address(self._lib.SSL_write)
        words[_GET_ERROR], words[_CLEAR] = address(self._lib.SSL_get_error), address(self._lib.ERR_clear_error)
        words[_ERROR] = address(self._lib.ERR_peek_error)
        words[_SHUTDOWN], words[_KEY_UPDATE] = address(self._lib.SSL_shutdown), address(self._lib.SSL_key_update)
        words[_RENEW] = RENEW_BYTES
        words[_OUT], words[_IN] = self._buffers[0].ctypes.data, self._buffers[1].ctypes.data
        words[_FDS] = self._fds.ctypes.data
        self._thread = threading.Thread(target=self._run, name="rdmarpc-tls", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPIPE})  # OpenSSL writes without MSG_NOSIGNAL
            run(self._words.ctypes.data)
        finally:
            self._lib.SSL_free(self._ssl)
            self.tcp.close()
            self._local.close()

    def join(self, timeout: float) -> None:
        """Wait until all that the worker sent is out, for at most ``timeout`` seconds. Call it after its end was closed."""
        self._thread.join(max(timeout, 0.0))
        if self._thread.is_alive():
            try:
                self.tcp.shutdown(socket.SHUT_RDWR)
            except OSError:
                return  # it has just ended
            self._thread.join(1.0)

    def drop(self) -> None:
        """In a forked child, which does not have the thread, close our copies of the sockets."""
        self.tcp.close()
        self._local.close()

    def failure(self, peer: str) -> PeerLost | None:
        """Why the stream ended, where it was not the peer's end."""
        words = self._words.ctypes.data
        if code := kernels.load(words + 8 * _CODE):
            why = reason(code & 0xFFFFFFFF) or f"error {code:#x}"
            text = f"the encrypted stream was broken on the way, or by a stranger: {why}"
            return PeerLost(text, peer=peer, status="TLS")
        if code := kernels.load(words + 8 * _ERRNO):
            why = f"the connection broke: [{errors.errorcode.get(code, code)}] {os.strerror(code)}"
            return PeerLost(why, peer=peer, status="BROKEN")
        return None


_CIPHERS = b"TLS_AES_128_GCM_SHA256:TLS_CHACHA20_POLY1305_SHA256"  # a pre-shared key needs SHA-256
_IDENTITY = b"rdmarpc"
_PURPOSE = b"rdmarpc tls 1"
_KEY_BYTES = 32
_LABEL = b"EXPORTER-Channel-Binding"  # RFC 9266
_READ_AHEAD_BYTES = 64 << 10
_CALLS, _ANSWERS = b"\x16", b"\x16\x15"  # a record's kind: handshake; that, or an alert
# What an end that speaks no TLS is answered: an alert, long enough to be whatever it waits for.
_PLEASE_TLS = b"\x15\x03\x03\x00\x02\x02\x28".ljust(256, b"\0")
_HINT = "tls at every worker, or at none"
_FAREWELL_S = 0.5


class SealedStream(socket.socket):
    """The near end of a relay, to be used as the stream itself."""

    def __init__(self, near: socket.socket, relay: Relay) -> None:
        super().__init__(fileno=near.detach())
        self._relay = relay
        self._peer_name = relay.tcp.getpeername()

    def getpeername(self) -> object:
        return self._peer_name

    def setsockopt(self, *args: Any) -> None:
        """Set an option of the TCP socket: all options that are set here concern the network."""
        self._relay.tcp.setsockopt(*args)

    def failure(self, peer: str) -> PeerLost | None:
        """Why the stream ended, where it was not the peer's end. Known when the end has come. ``peer``: as the error names it,
        by default its address."""
        return self._relay.failure(peer or "{}:{}".format(*self._peer_name))


class Tls:
    """TLS for the streams of one device: ``seal`` encrypts one, ``close`` is called after all have ended. Thread-safe."""

    def __init__(self, given: TlsOptions, secret: bytes, device: str) -> None:
        self._lib, self._device = openssl.library(), device
        self.given = given
        self._relays: weakref.WeakSet[Relay] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._key = b"" if given.certificate else hmac.digest(secret, _PURPOSE, hashlib.sha256)
        # OpenSSL calls these: they live as long as the context.
        self._client = openssl.PskClient(self._tell_key)
        self._server = openssl.PskServer(self._find_key)
        self._context = self._lib.SSL_CTX_new(self._lib.TLS_method())
        weakref.finalize(self, self._lib.SSL_CTX_free, self._context)
        self._configure()

    def explain(self) -> str:
        how = f"certificates of {self.given.authority}" if self.given.certificate else "the job secret"
        return f"TLS 1.3, proven by {how} ({openssl.version(self._lib)})"

    def _configure(self) -> None:
        lib, context = self._lib, self._context
        for what, value in (
            (openssl.CTRL_MIN_PROTO, openssl.TLS1_3),
            (openssl.CTRL_MAX_PROTO, openssl.TLS1_3),
            (openssl.CTRL_MODE, openssl.PARTIAL_WRITE_AND_MOVING_BUFFER),
            (openssl.CTRL_READ_AHEAD, 1),
            (openssl.CTRL_SESSION_CACHE, 0),
        ):
            lib.SSL_CTX_ctrl(context, what, value, None)
        lib.SSL_CTX_set_options(context, openssl.IGNORE_UNEXPECTED_EOF)  # the end of a process looks like that
        lib.SSL_CTX_set_num_tickets(context, 0)
        lib.SSL_CTX_set_default_read_buffer_len(context, _READ_AHEAD_BYTES)
        if lib.SSL_CTX_set_ciphersuites(context, _CIPHERS) != 1:
            raise self._unusable("the ciphers")
        # With a key, too: nothing has been signed by no authority, so a peer that shows a certificate instead fails.
        lib.SSL_CTX_set_verify(context, openssl.VERIFY_PEER | openssl.FAIL_IF_NO_PEER_CERT, None)
        if self._key:
            lib.SSL_CTX_set_psk_client_callback(context, self._client)
            lib.SSL_CTX_set_psk_server_callback(context, self._server)
            return
        files = self.given.certificate, self.given.key, self.given.authority
        certificate, key, authority = map(os.fsencode, files)
        lib.ERR_clear_error()
        if lib.SSL_CTX_use_certificate_chain_file(context, certificate) != 1:
            raise self._unusable(f"the certificate {self.given.certificate}")
        if lib.SSL_CTX_use_PrivateKey_file(context, key, openssl.FILETYPE_PEM) != 1:
            raise self._unusable(f"the key {self.given.key}")
        if lib.SSL_CTX_check_private_key(context) != 1:
            raise self._unusable(f"the key {self.given.key} for {self.given.certificate}")
        if lib.SSL_CTX_load_verify_locations(context, authority, None) != 1:
            raise self._unusable(f"the authority {self.given.authority}")

    def _unusable(self, what: str) -> NotSupported:
        why = openssl.reason(self._lib.ERR_get_error()) or "unknown reason"
        return NotSupported(f"OpenSSL does not take {what}: {why}", device=self._device, hint="these are files in PEM format")

    def _tell_key(self, ssl: int, hint: bytes, identity: int, identity_size: int, key: int, size: int) -> int:
        if identity_size <= len(_IDENTITY) or size < len(self._key):
            return 0
        ctypes.memmove(identity, _IDENTITY + b"\0", len(_IDENTITY) + 1)
        ctypes.memmove(key, self._key, len(self._key))
        return len(self._key)

    def _find_key(self, ssl: int, identity: bytes, key: int, size: int) -> int:
        if identity != _IDENTITY or size < len(self._key):
            return 0
        ctypes.memmove(key, self._key, len(self._key))
        return len(self._key)

    # -- streams

    def seal(self, sock: socket.socket, *, initiator: bool, deadline: float) -> tuple[SealedStream, bytes]:
        """The handshake, until ``deadline`` (``time.monotonic``): a stream to go on with, and the channel binding. The caller
        closes ``sock`` in any case. Raises ``AuthenticationError``, ``PeerLost``, ``TransferTimeout``, ``OSError``."""
        sock.setblocking(False)
        own = sock.dup()  # nobody else closes it while OpenSSL may use the number
        ssl = self._lib.SSL_new(self._context)
        try:
            if not ssl or self._lib.SSL_set_fd(ssl, own.fileno()) != 1:
                raise RdmaError("OpenSSL has no memory for a stream", device=self._device)
            if initiator:
                self._lib.SSL_set_connect_state(ssl)
            else:
                self._lib.SSL_set_accept_state(ssl)
                self._lib.SSL_set_session_id_context(ssl, _IDENTITY, len(_IDENTITY))  # it wants one, as it verifies
                _check_first(sock, deadline, _CALLS)
            self._repeat(ssl, sock, deadline, self._lib.SSL_do_handshake, answers=initiator)
            if self._key and self._lib.SSL_session_reused(ssl) != 1:
                raise AuthenticationError("the peer did not use the job's key", device=self._device, status="TLS")
            # The acceptor has the last word of the handshake: an initiator that it refuses hears so here.
            word = ctypes.create_string_buffer(1)
            self._repeat(ssl, sock, deadline, self._lib.SSL_read if initiator else self._lib.SSL_write, word, 1)
            binding = ctypes.create_string_buffer(_KEY_BYTES)
            if self._lib.SSL_export_keying_material(ssl, binding, _KEY_BYTES, _LABEL, len(_LABEL), None, 0, 0) != 1:
                raise RdmaError("OpenSSL exports no keying material", device=self._device)
            near, far = socket.socketpair()
            relay = Relay(own, ssl, far)
            stream = SealedStream(near, relay)
            stream.settimeout(max(deadline - time.monotonic(), 0.001))
            with self._lock:
                self._relays.add(relay)
                _relays.add(relay)
            relay.start()
        except BaseException:
            self._lib.SSL_free(ssl)
            own.close()
            _farewell(sock, deadline)
            raise
        return stream, binding.raw

    def _repeat(
        self, ssl: int, sock: socket.socket, deadline: float, step: object, *args: object, answers: bool = False
    ) -> None:
        """Repeat a step of the handshake until it succeeds. ``answers``: look first at what the peer answers."""
        while True:
            self._lib.ERR_clear_error()
            result = step(ssl, *args)  # type: ignore[operator]
            if result > 0:
                return
            kind = self._lib.SSL_get_error(ssl, result)
            if kind not in (openssl.ERROR_WANT_READ, openssl.ERROR_WANT_WRITE):
                raise self._failed(ssl, kind)
            _await(sock, select.POLLIN if kind == openssl.ERROR_WANT_READ else select.POLLOUT, deadline)
            if answers and kind == openssl.ERROR_WANT_READ:
                _check_first(sock, deadline, _ANSWERS)
                answers = False

    def _failed(self, ssl: int, kind: int) -> RdmaError:
        code = self._lib.ERR_get_error()
        if kind != openssl.ERROR_SSL or not code:
            text = "the peer hung up in the TLS handshake"
            return PeerLost(text, device=self._device, status="TLS", hint=f"does it have TLS on? {_HINT}")
        if code & openssl.REASON_MASK == openssl.WRONG_VERSION_NUMBER:  # what came is no record of TLS
            return AuthenticationError("the peer does not speak TLS", device=self._device, status="TLS", hint=_HINT)
        verified = self._lib.SSL_get_verify_result(ssl)
        if self._key:
            why, hint = openssl.reason(code), "give every worker the same secret, and tls the same way"
        elif verified != openssl.X509_V_OK:
            why = self._lib.X509_verify_cert_error_string(verified).decode()
            hint = f"its certificate has to be signed by {self.given.authority}, and be valid now"
        else:
            why, hint = openssl.reason(code), "does every worker have a certificate that all others' authority has signed?"
        return AuthenticationError(f"the TLS handshake failed: {why}", device=self._device, status="TLS", hint=hint)

    def close(self, timeout: float) -> None:
        """Wait until all that was sent on the closed streams is out, for at most ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        with self._lock:
            relays = list(self._relays)
        for relay in relays:
            relay.join(deadline - time.monotonic())


def _await(sock: socket.socket, events: int, deadline: float) -> None:
    poll = select.poll()
    poll.register(sock, events)
    if not poll.poll(max(deadline - time.monotonic(), 0.0) * 1000):
        raise TransferTimeout("the peer did not answer in time")


def _check_first(sock: socket.socket, deadline: float, kinds: bytes) -> None:
    """Whether the peer speaks TLS at all: one of these kinds of records."""
    _await(sock, select.POLLIN, deadline)
    if sock.recv(1, socket.MSG_PEEK) in kinds:  # or it hung up, which OpenSSL sees too
        return
    with contextlib.suppress(OSError):
        sock.send(_PLEASE_TLS)
    raise AuthenticationError("the peer does not speak TLS", status="TLS", hint=_HINT)


def _farewell(sock: socket.socket, deadline: float) -> None:
    """Let the peer read why we hang up, before that resets the connection."""
    end = min(deadline, time.monotonic() + _FAREWELL_S)
    with contextlib.suppress(OSError, TransferTimeout):
        sock.shutdown(socket.SHUT_WR)
        _await(sock, select.POLLIN, end)
        while sock.recv(4096):
            _await(sock, select.POLLIN, end)


_relays: weakref.WeakSet[Relay] = weakref.WeakSet()


def _after_fork() -> None:
    for relay in list(_relays):
        relay.drop()


os.register_at_fork(after_in_child=_after_fork)
