"""The handshakes of ``tls``: from a TCP stream to an encrypted one."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import hmac
import os
import select
import socket
import threading
import time
import weakref
from typing import Any

from ..errors import AuthenticationError, NotSupported, PeerLost, RdmaError, TransferTimeout
from . import openssl
from .options import TlsOptions
from .relay import RENEW_BYTES, Relay

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

    @property
    def failure(self) -> PeerLost | None:
        """Why the stream ended, where it was not the peer's end. Known when the end has come."""
        status, text = self._relay.failure
        if status == "TLS":
            text = f"the encrypted stream was broken on the way, or by a stranger: {text}"
        return PeerLost(text, peer="{}:{}".format(*self._peer_name), status=status) if status else None


class Tls:
    """TLS for the streams of one device: ``seal`` encrypts one, ``close`` is called after all have ended. Thread-safe.
    ``renew_bytes``: how many bytes are sent under one key."""

    def __init__(self, given: TlsOptions, secret: bytes, device: str, renew_bytes: int = RENEW_BYTES) -> None:
        self._lib, self._device, self._renew = openssl.library(), device, renew_bytes
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
            relay = Relay(own, ssl, far, self._renew)
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
