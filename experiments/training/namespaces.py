"""A network for one turn: the launcher and the clients in one network namespace, the server in another, a link of a chosen rate
between them. Nothing outside sees it, and the kernel removes all of it when the processes have ended. Needs the rights of root.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import time
from pathlib import Path

from ..harness import notes

CLONE_NEWNET = 0x40000000
CLIENTS, SERVER = ("va", "10.77.0.2"), ("vb", "10.77.0.1")
"""Interface and address of each side."""
BURST_BYTES_PER_GBIT = 1 << 20
"""Of the token bucket: a millisecond at full rate must fit into it, or the kernel's timer limits the rate."""


def leave() -> str:
    """Take this thread, and processes that it starts from now on, into a new namespace, and see that a link can be laid there.
    Returns nothing, or why that cannot be."""
    if not (shutil.which("ip") and shutil.which("tc")):
        return "the programs ip and tc (iproute2) are missing"
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):
        return f"no network namespaces: {os.strerror(ctypes.get_errno())} (they need the rights of root)"
    try:
        _run("ip link set lo up")
        _run("ip link add probe0 type veth peer name probe1")
        _run("tc qdisc add dev probe0 root tbf rate 1000mbit burst 1048576 latency 50ms")
        _run("ip link del probe0")
    except RuntimeError as error:
        return f"no link of a chosen rate: {error}"
    return ""


def link(server: bool, first: bool, place: Path, gbits: float, timeout_s: float) -> tuple[str, str]:
    """The network as a process of a turn sets it up: the server goes into a namespace of its own, the first client lays the
    link, and everybody returns when it is up. Interface and address of this side."""
    if server:
        if reason := leave():
            raise RuntimeError(reason)
        notes.write(place / "namespace", str(os.getpid()))
        _wait(place, "laid", timeout_s)
        _up(*SERVER, gbits)
        notes.write(place / "up", "")
    elif first:
        pid = _wait(place, "namespace", timeout_s)
        _run(f"ip link add {CLIENTS[0]} type veth peer name {SERVER[0]} netns {pid}")
        _up(*CLIENTS, gbits)
        notes.write(place / "laid", "")
    _wait(place, "up", timeout_s)
    return SERVER if server else CLIENTS


def _up(interface: str, address: str, gbits: float) -> None:
    _run(f"ip addr add {address}/24 dev {interface}")
    _run(f"ip link set {interface} up")
    burst = str(int(max(1.0, gbits) * BURST_BYTES_PER_GBIT))
    _run(f"tc qdisc add dev {interface} root tbf rate {gbits * 1000:.0f}mbit burst {burst} latency 50ms")


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command}: {done.stderr.strip()}")


def _wait(place: Path, name: str, timeout_s: float) -> str:
    deadline = time.monotonic() + timeout_s
    return notes.wait_for(place / name, deadline, f"the other side of the link did not say {name}").read_text()
