"""What the kernel says about RDMA devices in ``/sys/class/infiniband``: it needs no package, no open device and no rights."""

from __future__ import annotations

import os
import socket

from .verbs_provider import Gid

ROOT = "/sys/class/infiniband"
_KINDS = {"IB/RoCE v1": "RoCEv1", "RoCE v2": "RoCEv2"}


def _read(*parts: str) -> str:
    """The text of a file below ``ROOT``, empty if there is none (or the entry of a table is not in use: EINVAL)."""
    try:
        with open(os.path.join(ROOT, *parts)) as file:
            return file.read().strip()
    except OSError:
        return ""


def _list(*parts: str) -> list[str]:
    try:
        return os.listdir(os.path.join(ROOT, *parts))
    except OSError:
        return []


def devices() -> list[str]:
    """Names of the RDMA devices that the kernel has, sorted."""
    return sorted(_list())


def ports(device: str) -> list[int]:
    """The port numbers of a device."""
    return sorted(int(name) for name in _list(device, "ports") if name.isdigit())


def gids(device: str, port: int) -> list[Gid]:
    """The entries in use of a port's GID table."""
    table = os.path.join(device, "ports", str(port))
    ethernet = _read(table, "link_layer") == "Ethernet"
    found = []
    for index in sorted(int(name) for name in _list(table, "gids") if name.isdigit()):
        text = _read(table, "gids", str(index))
        if not text or not text.strip("0:"):
            continue
        kind = _KINDS.get(_read(table, "gid_attrs", "types", str(index)), "") if ethernet else "IB"
        netdev = _read(table, "gid_attrs", "ndevs", str(index))
        found.append(Gid(index, socket.inet_pton(socket.AF_INET6, text), kind, netdev))
    return found


def numa_node(device: str) -> int:
    """The NUMA node of the adapter, -1 where there is none (one node, or no hardware behind it)."""
    text = _read(device, "device", "numa_node")
    return int(text) if text else -1


def cpus_of_node(node: int) -> set[int]:
    """The processors of a NUMA node, empty if there is no such node."""
    try:
        with open(f"/sys/devices/system/node/node{node}/cpulist") as file:
            text = file.read().strip()
    except OSError:
        return set()
    spans = [part.split("-") for part in text.split(",") if part]
    return {cpu for span in spans for cpu in range(int(span[0]), int(span[-1]) + 1)}
