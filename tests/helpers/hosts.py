"""Two hosts on one: network namespaces, joined by a cable. What tells hosts apart for us is the namespace."""

from __future__ import annotations

import ctypes
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

_CLONE_NEWNET = 0x40000000
ADDRESSES = ("10.83.0.1", "10.83.0.2")


def why_not() -> str:
    """Why this cannot be had here, or empty."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    tried = subprocess.run(["unshare", "-n", "ip", "link", "add", "type", "veth"], capture_output=True, text=True)
    return "" if tried.returncode == 0 else f"no network namespaces here: {tried.stderr.strip()}"


@contextmanager
def two_hosts() -> Iterator[list[int]]:
    """Process numbers whose namespaces are the hosts; for ``enter``."""
    holders = [subprocess.Popen(["unshare", "-n", "sleep", "600"]) for _ in ADDRESSES]
    try:
        ours, deadline = os.stat("/proc/self/ns/net").st_ino, time.monotonic() + 10.0
        while any(os.stat(f"/proc/{holder.pid}/ns/net").st_ino == ours for holder in holders):
            assert time.monotonic() < deadline, "unshare does not start"
            time.sleep(0.01)
        _inside(holders[0].pid, f"link add cable type veth peer name cable netns {holders[1].pid}")
        for holder, address in zip(holders, ADDRESSES, strict=True):
            for command in ("link set lo up", f"addr add {address}/24 dev cable", "link set cable up"):
                _inside(holder.pid, command)
            _inside(holder.pid, "route add default dev cable")
        yield [holder.pid for holder in holders]
    finally:
        for holder in holders:
            holder.kill()
            holder.wait(10.0)


def _inside(pid: int, command: str) -> None:
    subprocess.run(["nsenter", "-t", str(pid), "-n", "ip", *command.split()], check=True, timeout=30.0)


def enter(pid: int) -> None:
    """This thread, and those that it starts, are at that host from now on. By the main thread, before it starts others."""
    fd = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    failed = ctypes.CDLL(None, use_errno=True).setns(fd, _CLONE_NEWNET)
    os.close(fd)
    if failed:
        raise OSError(ctypes.get_errno(), "setns")
