"""A wire on loopback between one end and another, on which a test listens, or changes what passes."""

from __future__ import annotations

import contextlib
import socket
import threading


class Wire:
    """Dial ``port`` to reach ``target``; ``close`` it. ``heard``: all that passed, in both directions, 0 is towards the target.
    ``flip``: (direction, how many bytes of a connection passed before): one bit of the next one is changed."""

    def __init__(self, target: tuple[str, int], flip: tuple[int, int] | None = None) -> None:
        self._target, self._flip = target, flip
        self.heard = [bytearray(), bytearray()]
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.socket()  # not by ``create_connection``, in whose place a test may have put a wire
            far.connect(self._target)
            self._sockets += [near, far]
            for direction, (source, sink) in enumerate(((near, far), (far, near))):
                thread = threading.Thread(target=self._pass_on, args=(direction, source, sink), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _pass_on(self, direction: int, source: socket.socket, sink: socket.socket) -> None:
        source.settimeout(None)
        flip = self._flip[1] if self._flip and self._flip[0] == direction else -1
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(1 << 16)):
                self.heard[direction] += data
                if 0 <= flip < len(data):
                    data[flip] ^= 0x10
                flip -= len(data)
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for sock in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        for thread in self._threads:
            thread.join(10.0)
            assert not thread.is_alive()
