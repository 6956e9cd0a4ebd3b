"""Connections of those who do not hold the secret, to every socket at which a group listens, while the group goes on working.

The host's own abstract sockets and loopback only. Where this process is root, half of them come as another user.
"""

from __future__ import annotations

import contextlib
import ctypes
import encodings.idna  # noqa: F401 (of addresses; another user may not be able to import it)
import json
import os
import random
import socket
import threading
import time
from pathlib import Path

KINDS = ("garbage", "http", "silence", "slow", "partial", "wrong proof", "reflection", "replay", "large", "hang up")
_MAGIC = b"rdmarpc\x02"
_HELLO = 72
_HELD = 40
"""Connections that one attacker keeps open at once."""
_LATE_S = 10.0
_SETRESUID, _NOBODY = 117, 65534


class Siege:
    """Attacks the addresses that workers have written into their diaries, from several threads."""

    def __init__(self, number: int, seconds: float) -> None:
        self.number, self.seconds = number, seconds
        self.connections = 0
        self._addresses: list[str] = []
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []
        self._recorded: list[bytes] = []

    def start(self, folder: Path) -> None:
        self._threads = [threading.Thread(target=self._scout, args=(folder,), daemon=True)]
        self._threads += [threading.Thread(target=self._attack, args=(index,), daemon=True) for index in range(4)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Not before one has come, if that is possible."""
        limit = time.monotonic() + _LATE_S
        while not self.connections and time.monotonic() < limit:
            time.sleep(0.01)
        self._over.set()
        for thread in self._threads:
            thread.join(10.0)

    def _scout(self, folder: Path) -> None:
        while not self._over.wait(0.1):
            found = []
            for path in folder.glob("*.diary"):
                for line in path.read_text().splitlines():
                    with contextlib.suppress(ValueError):
                        entry = json.loads(line)
                        if entry["event"] == "address":
                            found.append(entry["text"])
            self._addresses = found[-6:]

    def _attack(self, index: int) -> None:
        chance = random.Random(10 * self.number + index)
        if index % 2 and os.geteuid() == 0:
            ctypes.CDLL(None).syscall(_SETRESUID, _NOBODY, _NOBODY, _NOBODY)  # of this thread alone
        held: list[socket.socket] = []
        while not self._over.is_set():
            addresses = [part for address in self._addresses for part in address.removeprefix("auto:").split(",")]
            if not addresses:
                time.sleep(0.02)
                continue
            with contextlib.suppress(OSError, ValueError):
                sock = _connect(chance.choice(addresses))
                self.connections += 1
                if self._one(sock, chance.choice(KINDS), chance):
                    held.append(sock)
                else:
                    sock.close()
            while len(held) > _HELD:
                held.pop(0).close()
            for sock in held[:3]:  # the slow ones
                with contextlib.suppress(OSError):
                    sock.send(b"r")
            time.sleep(chance.uniform(0, 0.01))
        for sock in held:
            sock.close()

    def _one(self, sock: socket.socket, kind: str, chance: random.Random) -> bool:
        """One attack. Whether to keep the connection open."""
        if kind == "garbage":
            sock.sendall(chance.randbytes(chance.choice((1, 7, 72, 500, 5000))))
        elif kind == "http":
            sock.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        elif kind == "silence":
            return True
        elif kind == "slow":
            sock.sendall(_MAGIC[:3])
            return True
        elif kind == "partial":
            sock.sendall((_MAGIC + chance.randbytes(64))[: chance.randrange(_HELLO)])
            return bool(chance.randrange(2))
        elif kind in ("wrong proof", "large"):
            sock.sendall(_MAGIC + chance.randbytes(64))
            self._recorded[:] = [sock.recv(_HELLO)]
            sock.sendall(chance.randbytes(64))
            sock.sendall(chance.randbytes(1 << 16) if kind == "large" else b"")
        elif kind == "reflection":
            hello = sock.recv(_HELLO)
            sock.sendall(hello)
            sock.sendall(sock.recv(64) or b"\0" * 64)
        elif kind == "replay":
            sock.sendall((self._recorded or [b"\0" * _HELLO])[0])
            sock.sendall(chance.randbytes(64))
        return False


def _connect(address: str) -> socket.socket:
    kind, *rest = address.split(":")
    if kind == "shm":
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.settimeout(0.3)
        sock.connect(f"\0rdmarpc-{rest[1]}")
        return sock
    if kind != "tcp":
        raise ValueError(f"no socket of ours at {address}")
    sock = socket.create_connection((rest[0], int(rest[1])), 0.3)
    sock.settimeout(0.3)
    return sock
