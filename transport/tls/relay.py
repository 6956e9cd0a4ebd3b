"""The relay between a worker and an encrypted stream; it runs without the interpreter's lock.

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

import errno as errors
import os
import signal
import socket
import threading
from typing import Any

import numpy as np

from ..words import kernels
from ..words.compiled import compiled
from ..words.symbols import CFunction, call, errno, i32, i64, load_acquire, store_release
from .openssl import ERROR_SSL, ERROR_SYSCALL, ERROR_WANT_READ, ERROR_WANT_WRITE, address, library, reason

BUFFER_BYTES = 64 << 10
RENEW_BYTES = 64 << 30
"""Sent under one key; AES-GCM would bear six times that (RFC 8446, 5.5)."""
_LINGER_MS = 5000  # for a peer that takes nothing, once the worker is through
_SSL, _TCP, _LOCAL, _READ, _WRITE, _GET_ERROR, _CLEAR, _LAST_ERROR, _SHUTDOWN, _KEY_UPDATE = range(10)
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


@compiled(i64(i64, i64))
def _word(at: int, number: int) -> int:
    return load_acquire(at + 8 * number)


@compiled(i64(i64, i64, i64))
def _waits_for(at: int, result: int, heard: int) -> int:
    """What the stream has to be ready for after an operation on the ``SSL`` that did not complete, or minus the kind of error.
    ``heard``: 1 after a read, whose error is the reason for the stream's end."""
    code = errno()
    kind = call(_word(at, _GET_ERROR), _word(at, _SSL), result, 0, 0)
    if kind == ERROR_WANT_READ:
        return _POLLIN
    if kind == ERROR_WANT_WRITE:
        return _POLLOUT
    if kind == ERROR_SSL and _word(at, _CODE) == 0:
        store_release(at + 8 * _CODE, call(_word(at, _LAST_ERROR), 0, 0, 0, 0))
    if kind == ERROR_SYSCALL and heard and result < 0:
        store_release(at + 8 * _ERRNO, code)
    return -kind


@compiled(i64(i64, i64, i64, i64))
def _seal(at: int, function: int, buffer: int, nbytes: int) -> int:
    call(_word(at, _CLEAR), 0, 0, 0, 0)
    return call(_word(at, function), _word(at, _SSL), buffer, nbytes, 0)


@compiled(i64(i64))
def relay(at: int) -> int:
    """Relay until both directions have ended. ``at``: the words of a ``Relay``.

    Longer than a screen: one loop over a dozen local variables, which compiled functions could share only through memory."""
    tcp, local = i32(_word(at, _TCP)), i32(_word(at, _LOCAL))
    sending, hearing, gone = _OPEN, _OPEN, False
    out_at, out_left, in_at, in_left = 0, 0, 0, 0
    write_waits, read_waits, sealed = 0, 0, 0
    while sending != _ENDED or hearing != _ENDED:
        moved = False
        # From the worker to the peer.
        if sending == _OPEN and out_left == 0:
            got = _recv(local, _word(at, _OUT), BUFFER_BYTES, i32(_DONTWAIT))
            if got > 0:
                out_at, out_left, moved = 0, got, True
            elif got == 0 or (errno() != _EAGAIN and errno() != _EINTR):
                sending, moved = _GOODBYE, True
        write_waits = 0
        if out_left:
            done = _seal(at, _WRITE, _word(at, _OUT) + out_at, out_left)
            if done > 0:
                out_at, out_left, sealed, moved = out_at + done, out_left - done, sealed + done, True
                if sealed >= _word(at, _RENEW):
                    sealed = 0
                    call(_word(at, _KEY_UPDATE), _word(at, _SSL), 0, 0, 0)
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
            done = _send(local, _word(at, _IN) + in_at, in_left, i32(_DONTWAIT))
            if done > 0:
                in_at, in_left, moved = in_at + done, in_left - done, True
            elif errno() != _EAGAIN and errno() != _EINTR:
                hearing, in_left, moved = _ENDED, 0, True
        read_waits = 0
        if hearing == _OPEN and in_left == 0:
            done = _seal(at, _READ, _word(at, _IN), BUFFER_BYTES)
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
        store_release(_word(at, _FDS), (_word(at, _TCP) if wanted else 0xFFFFFFFF) | wanted << 32)
        store_release(_word(at, _FDS) + 8, (_word(at, _LOCAL) if watched else 0xFFFFFFFF) | offered << 32)
        ready = _poll(_word(at, _FDS), 2, i32(_LINGER_MS if gone else -1))
        if gone and ready == 0:
            return 0
        if (load_acquire(_word(at, _FDS) + 8) >> 48) & (_POLLHUP | _POLLERR):
            # The worker has closed its end: what it sent is still there, nobody hears any more.
            gone, hearing, in_left = True, _ENDED, 0
    return 0


class Relay:
    """Owns ``tcp``, its ``SSL`` (a pointer) and ``local``, the end of a socket pair, from ``start`` on."""

    def __init__(self, tcp: socket.socket, ssl: int, local: socket.socket, renew_bytes: int) -> None:
        self.tcp, self._ssl, self._local = tcp, ssl, local
        self._lib: Any = library()
        self._buffers = np.zeros((2, BUFFER_BYTES), np.uint8)
        self._fds = np.zeros(2, np.int64)
        words = self._words = np.zeros(_WORDS, np.int64)
        words[_SSL], words[_TCP], words[_LOCAL] = ssl, tcp.fileno(), local.fileno()
        words[_READ], words[_WRITE] = address(self._lib.SSL_read), address(self._lib.SSL_write)
        words[_GET_ERROR], words[_CLEAR] = address(self._lib.SSL_get_error), address(self._lib.ERR_clear_error)
        words[_LAST_ERROR] = address(self._lib.ERR_peek_last_error)
        words[_SHUTDOWN], words[_KEY_UPDATE] = address(self._lib.SSL_shutdown), address(self._lib.SSL_key_update)
        words[_RENEW] = renew_bytes
        words[_OUT], words[_IN] = self._buffers[0].ctypes.data, self._buffers[1].ctypes.data
        words[_FDS] = self._fds.ctypes.data
        self._thread = threading.Thread(target=self._run, name="rdmarpc-tls", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPIPE})  # OpenSSL writes without MSG_NOSIGNAL
            relay(self._words.ctypes.data)
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

    @property
    def failure(self) -> tuple[str, str]:
        """Why the stream ended, where it was not the peer's end: status and text; else both empty."""
        words = self._words.ctypes.data
        if code := kernels.load(words + 8 * _CODE):
            return "TLS", reason(code & 0xFFFFFFFF) or f"error {code:#x}"
        if code := kernels.load(words + 8 * _ERRNO):
            return "BROKEN", f"the connection broke: [{errors.errorcode.get(code, code)}] {os.strerror(code)}"
        return "", ""
