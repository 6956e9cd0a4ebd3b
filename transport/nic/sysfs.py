"""RDMA devices as the kernel describes them in ``/sys/class/infiniband``: it needs no package, no open device and no rights."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from dataclasses import dataclass, field

from ..peers.address import interface_address
from ..peers.guard import processors

ROOT = "/sys/class/infiniband"
NETWORK = "/sys/class/net"
NODES = "/sys/devices/system/node"
_EMPTY = (b"", b"0000:0000:0000:0000:0000:0000:0000:0000\n")
_KINDS = {"IB/RoCE v1": "RoCEv1", "RoCE v2": "RoCEv2"}


@dataclass(frozen=True, slots=True)
class Gid:
    """An entry of a port's GID table. ``kind``: ``"IB"``, ``"RoCEv1"`` or ``"RoCEv2"``; ``netdev``: the network interface,
    or ``""``."""

    index: int
    raw: bytes
    kind: str
    netdev: str


@dataclass(frozen=True, slots=True)
class Found:
    """A port of an RDMA device as the kernel shows it."""

    device: str
    number: int
    node_type: str
    """``"CA"`` (InfiniBand, RoCE), ``"RNIC"`` (iWARP), ..."""
    state: str
    """``"ACTIVE"``, ``"DOWN"``, ``"INIT"``, ..."""
    link_layer: str
    """``"INFINIBAND"`` or ``"ETHERNET"``"""
    lid: int
    gbit_per_s: float
    gids: tuple[Gid, ...]
    distance: int | None
    """NUMA distance from the memory of this process to the adapter (10: the same node); ``None`` where the kernel has none."""
    interfaces: dict[str, str] = field(default_factory=dict)
    """Network interfaces of the port, each with its IPv4 address or ``""``."""

    @property
    def name(self) -> str:
        return f"{self.device}:{self.number}"


def survey() -> list[Found]:
    """All ports of all devices, in the order of their names. Empty where there is no RDMA."""
    return [_port(device, number) for device in sorted(_list(ROOT)) for number in ports(device)]


def ports(device: str) -> list[int]:
    """The port numbers of a device."""
    return sorted(int(name) for name in _list(ROOT, device, "ports") if name.isdigit())


def gids(device: str, port: int) -> list[Gid]:
    """The entries in use of a port's GID table. (A table may have a thousand entries, nearly all of them empty, and each
    is a file: no more is done for one than must be.)"""
    try:
        folder = os.open(os.path.join(ROOT, device, "ports", str(port), "gids"), os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return []
    try:
        used = sorted(int(name) for name in os.listdir(folder) if _read_entry(name, folder) not in _EMPTY)
    finally:
        os.close(folder)
    return [found for index in used if (found := gid(device, port, index)) is not None]


def gid(device: str, port: int, index: int) -> Gid | None:
    """One entry of a port's GID table, ``None`` if it is not in use."""
    table = os.path.join(ROOT, device, "ports", str(port))
    text = _read(table, "gids", str(index))
    if not text.strip("0:"):
        return None
    ethernet = _read(table, "link_layer") == "Ethernet"
    kind = _KINDS.get(_read(table, "gid_attrs", "types", str(index)), "") if ethernet else "IB"
    return Gid(index, socket.inet_pton(socket.AF_INET6, text), kind, _read(table, "gid_attrs", "ndevs", str(index)))


def distance(device: str) -> int | None:
    """NUMA distance from the processors that this process may run on to the adapter, the least one; ``None`` if unknown."""
    text = _read(ROOT, device, "device", "numa_node")
    node = int(text) if text else -1
    mine = processors()
    found = []
    for name in _list(NODES) if node >= 0 else []:
        if not (name.startswith("node") and name[4:].isdigit() and mine & _span(_read(NODES, name, "cpulist"))):
            continue
        row = _read(NODES, name, "distance").split()
        if node < len(row):
            found.append(int(row[node]))
    return min(found, default=None)


def _port(device: str, number: int) -> Found:
    table = os.path.join(ROOT, device, "ports", str(number))
    entries = tuple(gids(device, number))
    names = {gid.netdev for gid in entries if gid.netdev} | set(_interfaces(device, number))
    return Found(
        device=device,
        number=number,
        node_type=_after_colon(_read(ROOT, device, "node_type")),
        state=_after_colon(_read(table, "state")),
        link_layer=_read(table, "link_layer").upper(),
        lid=int(_read(table, "lid") or "0", 0),
        gbit_per_s=float((_read(table, "rate").split() or ["0"])[0]),
        gids=entries,
        distance=distance(device),
        interfaces={name: interface_address(name) or "" for name in sorted(names)},
    )


def _interfaces(device: str, number: int) -> list[str]:
    """The network interfaces that the GID table does not name: those of an InfiniBand port (IPoIB), and the one below a
    software device."""
    names = _list(ROOT, device, "device", "net")
    found = [name for name in names if _read(NETWORK, name, "dev_port") == str(number - 1)]
    return [name for name in (_read(ROOT, device, "parent"), *found) if name]


def _read_entry(name: str, folder: int) -> bytes:
    """The first bytes of a file in an open folder, none if it cannot be read."""
    with suppress(OSError), open(os.open(name, os.O_RDONLY, dir_fd=folder), "rb", buffering=0) as entry:
        return entry.read(64)
    return b""


def _after_colon(text: str) -> str:
    return text.rpartition(":")[2].strip()


def _span(text: str) -> set[int]:
    """``"0-3,8"`` as a set."""
    pairs = [part.split("-") for part in text.split(",") if part]
    return {cpu for pair in pairs for cpu in range(int(pair[0]), int(pair[-1]) + 1)}


def _read(*parts: str) -> str:
    """The text of a file, empty if there is none (or the entry of a table is not in use: EINVAL)."""
    with suppress(OSError), open(os.path.join(*parts)) as file:
        return file.read().strip()
    return ""


def _list(*parts: str) -> list[str]:
    with suppress(OSError):
        return os.listdir(os.path.join(*parts))
    return []
