"""How faults come about: signals and cables from outside (``strike``), the rest inside a worker (``Saboteur``)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import socket
import subprocess
import threading
import time
from typing import Any

import limits

from .board import Board
from .trial import Fault

_CONNECTED_S = 3.0
INSIDE = ("gil", "socket", "delay", "callbacks", "descriptors", "exit")
GO, BEGAN, OVER = 0, 1, 2
"""Words of a fault on the board: to begin, began, is over."""


def strike(fault: Fault, at: int, pid: int, board: Board, namespaces: list[int]) -> None:
    """Bring it about, or have it brought about; called by the supervisor on a thread of its own. Kinds of ``INSIDE`` are left
    to a worker, who writes down when."""
    if fault.kind in INSIDE:
        board.put(at + GO, 1)
        return
    board.put(at + BEGAN, time.monotonic_ns())
    with contextlib.suppress(ProcessLookupError):
        if fault.kind == "kill":
            os.kill(pid, signal.SIGKILL)
        elif fault.kind in ("raise", "interrupt"):
            os.kill(pid, signal.SIGINT)
        elif fault.kind == "stop":
            os.kill(pid, signal.SIGSTOP)
        elif fault.kind in ("pause", "sleeper"):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(fault.seconds)
            os.kill(pid, signal.SIGCONT)
        elif fault.kind == "cut":
            command = ["nsenter", "-t", str(namespaces[1]), "-n", "ip", "link", "set", "cable", "down"]
            subprocess.run(command, check=True, timeout=20)
    board.put(at + OVER, time.monotonic_ns())


class Saboteur(threading.Thread):
    """The faults of a trial that happen in, or are brought about by, this worker."""

    def __init__(self, scene: Any) -> None:
        super().__init__(name="saboteur", daemon=True)
        self._scene = scene
        self._board: Board = scene.diary.board
        self._mine = []
        for index, fault in enumerate(scene.trial.faults):
            if scene.rank == (fault.by if fault.kind in ("exit", "callbacks") else fault.victim) and fault.kind in INSIDE:
                self._mine.append((self._board.fault(index), fault))

    def run(self) -> None:
        for at, fault in self._mine:
            while not self._board.get(at + GO):
                if self._board.stopping:
                    return
                time.sleep(0.003)
            self._scene.diary.write("fault", kind=fault.kind)
            self._board.put(at + BEGAN, time.monotonic_ns())
            try:
                getattr(self, "_" + fault.kind)(fault)
            except Exception as error:
                self._scene.diary.write("fault failed", text=f"{type(error).__name__}: {error}")
            self._board.put(at + OVER, time.monotonic_ns())

    def _gil(self, fault: Fault) -> None:
        """C code that does not release the GIL."""
        ctypes.PyDLL(None).usleep(int(fault.seconds * 1e6))

    def _exit(self, fault: Fault) -> None:
        """A function that we call there ends the process."""
        import rdmarpc as rpc

        rpc.rpc_async(f"worker{fault.victim}", os._exit, (3,))

    def _callbacks(self, fault: Fault) -> None:
        """Answers whose callbacks take long."""
        import rdmarpc as rpc

        with self._scene.diary.doing("callbacks", self._scene.rank, fault.victim):
            futures = [rpc.rpc_async(f"worker{fault.victim}", abs, (-number,)) for number in range(20)]
            for future in [future.then(lambda done: (time.sleep(0.05), done.value())[1]) for future in futures]:
                future.wait()

    def _socket(self, fault: Fault) -> None:
        """One connection of the package is shut down under it."""
        limit = time.monotonic() + _CONNECTED_S
        while not (sockets := list(_connections())) and time.monotonic() < limit:
            time.sleep(0.003)  # a worker connects when it first has something to say
        assert sockets, "no connection found"
        chosen = random.Random(self._scene.trial.number).choice(sockets)
        chosen.shutdown(socket.SHUT_RDWR)
        for sock in sockets:
            sock.close()

    def _descriptors(self, fault: Fault) -> None:
        """No new descriptor, for a while."""
        with limits.no_descriptors():
            time.sleep(fault.seconds)

    def _delay(self, fault: Fault) -> None:
        """Frames are sent and read late."""
        from rdmarpc.links.ring import Link

        chance = random.Random(self._scene.trial.number)
        until = time.monotonic() + fault.seconds
        send, read = Link.try_send, Link.read

        def slowly(function: Any) -> Any:
            def run(*args: Any, **kwargs: Any) -> Any:
                if chance.random() < 0.1 and time.monotonic() < until:
                    time.sleep(chance.uniform(0, 0.02))
                return function(*args, **kwargs)

            return run

        Link.try_send, Link.read = slowly(send), slowly(read)  # type: ignore[method-assign]
        time.sleep(fault.seconds)
        Link.try_send, Link.read = send, read  # type: ignore[method-assign]


def _connections() -> Any:
    """Connected sockets of devices: SEQPACKET ones (shm) and TCP ones."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            sock = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        kind = (sock.family, sock.type)
        if kind in ((socket.AF_UNIX, socket.SOCK_SEQPACKET), (socket.AF_INET, socket.SOCK_STREAM)):
            try:
                sock.getpeername()
                yield sock
                continue
            except OSError:
                pass
        sock.close()
