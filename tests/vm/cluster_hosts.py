"""Two guests on one link are two hosts, each with an address, a Soft-RoCE device on its network card, and a folder of this
machine that both have mounted, as hosts of a cluster share a home.

Orders and answers come and go through folders, never by the link: so a host can be asked while its link is down.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from guest import BOX_INSIDE, GENERIC, Command, Guest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
HOME = "/run/home"
"""Where the shared folder is in the guests."""
READY_S = 900.0
"""Until a host has imported torch, beside another that does the same on emulated processors."""


class Failed(Exception):
    """An order ended with an exception there. ``kind`` is its type."""

    def __init__(self, kind: str, text: str, trace: str, status: str, hint: str, peer: str) -> None:
        super().__init__(f"{kind}: {text}\n{trace}")
        self.kind, self.text, self.status, self.hint, self.peer = kind, text, status, hint, peer


class Peer:
    """A process on a host of the cluster, which takes its orders (``cluster_peer``) from the folder ``place``."""

    def __init__(self, place: Path) -> None:
        self.name = place.name
        self._place = place
        self._next = 0

    def start(self, function: str, *arguments: Any) -> None:
        """Give an order (of ``cluster_actions``); ``finish`` waits for what comes of it."""
        new = self._place / "new"
        new.write_text(json.dumps([function, arguments]))
        new.rename(self._place / f"{self._next}.order")
        self._next += 1

    def finish(self, timeout: float = 60.0) -> Any:
        """The result of the last order. Raises ``Failed``."""
        answer = self._place / f"{self._next - 1}.answer"
        deadline = time.monotonic() + timeout
        while not answer.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.name} has not answered within {timeout:g} s")
            time.sleep(0.01)
        good, result = json.loads(answer.read_text())
        if not good:
            raise Failed(result["kind"], result["text"], result["trace"], result["status"], result["hint"], result["peer"])
        return result

    def call(self, function: str, *arguments: Any, timeout: float = 60.0) -> Any:
        self.start(function, *arguments)
        return self.finish(timeout)

    def end(self) -> None:
        self.start("end")


class Host:
    """A guest of the cluster. ``boot`` may be called again after ``kill``."""

    def __init__(self, number: int, folder: Path, memory: str, ports: tuple[int, int]) -> None:
        self.name, self.address = f"n{number}", f"10.77.0.{number}"
        self._number, self._folder, self._memory, self._ports = number, folder, memory, ports
        self._peers: list[Command] = []
        self._boots = 0

    def boot(self) -> None:
        """Returns when commands are accepted."""
        self._boots += 1
        self._monitor = self._folder / f"monitor{self._number}"
        here, there = (f"type=inet,{{end}}.host=127.0.0.1,{{end}}.port={port}" for port in self._ports)
        # A frame is a datagram, so it is lost where nobody takes it, as on a switch. A stream, and a Unix socket, would make a
        # stopped host stop its peer's network card.
        net = f"dgram,id=net0,local.{here.format(end='local')},remote.{there.format(end='remote')}"
        self.guest = Guest(
            self._folder / f"box{self._number}-{self._boots}",
            hostname=self.name,
            link="eth0",
            address=f"{self.address}/24",
            memory=self._memory,
            qemu=(
                *("-netdev", net, "-device", f"virtio-net-pci,netdev=net0,mac=52:54:00:77:00:0{self._number}"),
                *("-monitor", f"unix:{self._monitor},server=on,wait=off"),
                *("-virtfs", f"local,path={self._folder / 'home'},mount_tag=home,security_model=none,multidevs=remap"),
            ),
        )
        self.guest.start()
        self.sh(
            f"mkdir -p {HOME} && mount -t 9p -o trans=virtio,version=9p2000.L,msize=1048576,rw,cache=none home {HOME}"
            " && ip route add default dev eth0"
            " && printf '127.0.0.1 localhost\\n10.77.0.1 n1\\n10.77.0.2 n2\\n' > /etc/hosts"
        )

    def peer(self, name: str) -> Peer:
        """A new process here, forked from the one that has imported everything."""
        place = self.guest.box / f"{name}{len(self._peers)}"
        place.mkdir()
        command = [str(HERE / "cluster_peer.py"), f"{BOX_INSIDE}/{place.name}"]
        self._peers.append(self.guest.command(command, python=True, timeout=7200))
        return Peer(place)

    def end_peers(self) -> None:
        """Those that a failed case has left."""
        for command in self._peers:
            if self.guest.alive() and command.poll() is None:
                command.kill()

    def start(self, command: str, timeout: float = 60.0, **environment: str) -> Command:
        return self.guest.command(["bash", "-c", command], cwd=ROOT, env=environment, timeout=timeout)

    def sh(self, command: str, timeout: float = 60.0, **environment: str) -> str:
        """What it prints; ``AssertionError`` with that if it fails."""
        running = self.start(command, timeout, **environment)
        status = running.wait()
        output = running.output().decode(errors="replace")
        assert status == 0, f"{self.name}: `{command}` ended with {status}:\n{output}"
        return output

    def rdma_counters(self) -> dict[str, int]:
        """Of the device itself."""
        words = self.sh("rdma statistic show link rxe0/1").split()[2:]
        return {name: int(value) for name, value in zip(words[::2], words[1::2])}

    def plug(self, *, link: bool) -> None:
        """The cable of this host in or out; its network card notices."""
        self._order(f"set_link net0 {'on' if link else 'off'}")

    def shape(self, rules: str) -> None:
        """What netem does to everything that this host sends; empty: nothing any more."""
        self.sh(f"tc qdisc replace dev eth0 root netem {rules} limit 10000" if rules else "tc qdisc del dev eth0 root")

    def pause(self) -> None:
        os.kill(self.guest.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.guest.pid, signal.SIGCONT)

    def kill(self) -> None:
        """Loss of power."""
        self.guest.close_qemu()

    def _order(self, line: str) -> None:
        with socket.socket(socket.AF_UNIX) as monitor:
            monitor.settimeout(10.0)
            monitor.connect(str(self._monitor))
            seen = b""
            for order in ("", line):
                monitor.sendall(f"{order}\n".encode() if order else b"")
                while not re.search(rb"\(qemu\) $", seen):
                    seen += monitor.recv(4096)
                assert b"rror" not in seen, seen.decode(errors="replace")
                seen = b""


class ThisMachine:
    """No guest: processes here that take the same orders. To compile the kernels before the guests need them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: list[subprocess.Popen[bytes]] = []

    def peer(self, name: str) -> Peer:
        place = self._folder / f"{name}{len(self._running)}"
        place.mkdir()
        command = [sys.executable, str(HERE / "cluster_peer.py"), str(place)]
        self._running.append(subprocess.Popen(command, cwd=ROOT, env={**os.environ, **GENERIC}))
        return Peer(place)

    def close(self) -> None:
        for process in self._running:
            process.kill()
            process.wait()


class Cluster:
    """Both hosts, ready for ``peer``; and their shared folder, ``home`` here and ``HOME`` there. Nothing is left of it."""

    def __init__(self, memory: str = "3G") -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="rdmarpc-cluster-")
        self.folder = Path(self._temporary.name)
        self.home = self.folder / "home"
        self.home.mkdir()
        first, second = free_ports()
        self.hosts = [Host(1, self.folder, memory, (first, second)), Host(2, self.folder, memory, (second, first))]
        self.trio: Any = None
        """Processes that cases share (``cluster_faults.Trio``)."""

    def __enter__(self) -> Cluster:
        try:
            for host in self.hosts:
                host.boot()
            for host in self.hosts:
                host.guest.preload(("torch", "rdmarpc", "rdmarpc.transport.verbs.device"))
            for host in self.hosts:
                host.guest.wait_preloaded(READY_S)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for host in self.hosts:
            if hasattr(host, "guest"):
                host.guest.close()
        self._temporary.cleanup()


def free_ports() -> tuple[int, int]:
    """Two UDP ports of loopback."""
    with socket.socket(type=socket.SOCK_DGRAM) as one, socket.socket(type=socket.SOCK_DGRAM) as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        return one.getsockname()[1], other.getsockname()[1]
