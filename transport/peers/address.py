"""The address on which a ``tcp`` device listens."""

from __future__ import annotations

import ctypes
import fcntl
import ipaddress
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ..errors import NotSupported
from ..sandboxed import REFUSED, naming

_IFF_UP, _IFF_LOOPBACK = 0x1, 0x8
_SOMEWHERE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}  # reserved for documentation
_AF_PACKET = 17
_FIELDS = {socket.AF_INET: slice(4, 8), socket.AF_INET6: slice(8, 24), _AF_PACKET: slice(12, 18)}
"""Where the address lies in a ``sockaddr`` of each family."""
_FLAGS, _ADDRESS, _HARDWARE = 0x8913, 0x8915, 0x8927
"""Of ``ioctl``."""
_LOOPBACK = "127.0.0.1", "::1"
_VARIABLES = "TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


class _Record(ctypes.Structure):
    """``struct ifaddrs``."""


_Record._fields_ = [
    ("next", ctypes.POINTER(_Record)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.POINTER(ctypes.c_uint8 * 28)),
]
_libc = ctypes.CDLL(None, use_errno=True)


def _records() -> Iterator[tuple[str, int, str]]:
    """Name, flags and IP address of each interface, once for each address."""
    for name, flags, family, raw in _raw_records():
        if family in _SOMEWHERE:
            yield name, flags, socket.inet_ntop(family, raw)


def _raw_records() -> Iterator[tuple[str, int, int, bytes]]:
    """As ``_records``, with the family of the address, and of all that there are."""
    first = ctypes.POINTER(_Record)()
    if _libc.getifaddrs(ctypes.byref(first)):
        if ctypes.get_errno() not in REFUSED:
            raise OSError(ctypes.get_errno(), "getifaddrs")
        with naming("netlink sockets, nor ioctl in their place", device="tcp"):
            yield from _asked_one_by_one()
        return
    at = first
    try:
        while at:
            record, at = at.contents, at.contents.next
            raw = bytes(record.address.contents) if record.address else b"\0\0"
            family = int.from_bytes(raw[:2], sys.byteorder)
            if family in _FIELDS:
                yield record.name.decode(), record.flags, family, raw[_FIELDS[family]]
    finally:
        _libc.freeifaddrs(first)


def _asked_one_by_one() -> Iterator[tuple[str, int, int, bytes]]:
    """As ``_raw_records``, where a sandbox forbids netlink, which getifaddrs asks. Of each interface one IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:

        def asked(name: str, what: int) -> bytes:
            return fcntl.ioctl(sock, what, name.encode().ljust(40, b"\0"))[16:]

        flags = {}
        for name in _lines("/proc/net/dev")[2:]:
            name = name.partition(":")[0].strip()
            flags[name] = int.from_bytes(asked(name, _FLAGS)[:2], sys.byteorder)
            yield name, flags[name], _AF_PACKET, asked(name, _HARDWARE)[2:8]
            with suppress(OSError):  # it may have none
                yield name, flags[name], socket.AF_INET, asked(name, _ADDRESS)[4:8]
    for line in _lines("/proc/net/if_inet6"):
        address, *_, name = line.split()
        yield name, flags.get(name, 0), socket.AF_INET6, bytes.fromhex(address)


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _rank(address: str) -> tuple[bool, bool]:
    """Sorts first what others reach more likely: an IPv4 address before an IPv6 one, and both before a link-local one."""
    found = ipaddress.ip_address(address)
    return found.is_link_local, found.version == 6


def interfaces() -> dict[str, str]:
    """The address of each interface that is up and leads to other hosts. Without those that have only a link-local IPv6
    address, which has a meaning for the hosts of one cable alone."""
    found: dict[str, list[str]] = {}
    for name, flags, address in _records():
        if flags & (_IFF_UP | _IFF_LOOPBACK) == _IFF_UP and not address.startswith("fe80:"):
            found.setdefault(name, []).append(address)
    return {name: min(addresses, key=_rank) for name, addresses in found.items()}


def interface_address(name: str) -> str | None:
    """The address of a network interface, IPv4 if it has one. ``None`` if there is no such interface, or it has no address."""
    found = [address for other, _, address in _records() if other == name and not address.startswith("fe80:")]
    return min(found, key=_rank, default=None)


def _toward(host: str, family: int = socket.AF_UNSPEC) -> str:
    """Our address on the way to a host, by the routing table; nothing is sent. Empty if there is no way, or none that leaves
    this host."""
    with suppress(OSError):
        for kind, _, _, _, where in socket.getaddrinfo(host, 9, family, socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(kind, socket.SOCK_DGRAM) as probe:
                probe.connect(where)
                found = str(probe.getsockname()[0])
                if not ipaddress.ip_address(found).is_loopback and not ipaddress.ip_address(found).is_link_local:
                    return found
    return ""


def where_to_listen(family: int = socket.AF_UNSPEC) -> tuple[str, str]:
    """The address at which other hosts reach this one, and how it was found; that text begins with ``?`` if it was a guess.

    It is that of the interface named by a variable by which programs choose one for torch's other backends (``NotSupported`` if
    there is no such interface); else the one on the way to the job's first host (``MASTER_ADDR``); else that of the default
    route, IPv4 before IPv6. Without such a route, as in the network of a cluster that leads nowhere else, that of an interface
    that has one and is up; else loopback."""
    return _chosen_by_variable() or _routed(family)


def _chosen_by_variable() -> tuple[str, str] | None:
    for variable in _VARIABLES:
        if not (text := os.environ.get(variable, "")):
            continue
        names = [name for name in dict.fromkeys(name for name, _, _ in _records()) if _named(text, name, variable)]
        found = next(filter(None, map(interface_address, names)), None)
        if found is None:
            there = ", ".join(f"{name} ({address})" for name, address in interfaces().items()) or "none"
            raise NotSupported(
                f"{variable}={text} names no interface of this host that has an address",
                device="tcp",
                hint=f"there are: {there}; or say where to listen: transport='tcp://INTERFACE'",
            )
        return found, variable
    return None


def _named(text: str, name: str, variable: str) -> bool:
    """Whether a variable names an interface. NCCL's has beginnings of names, ``=`` for whole ones, ``^`` for all others."""
    if not variable.startswith("NCCL"):
        return name in text.split(",")
    others, text = text.startswith("^"), text.removeprefix("^")
    names = text.removeprefix("=").split(",")
    same = name in names if text.startswith("=") else name.startswith(tuple(filter(None, names)))
    return same != others and (not others or name in interfaces())


def _routed(family: int) -> tuple[str, str]:
    if (first := os.environ.get("MASTER_ADDR")) and (found := _toward(first, family)):
        return found, "on the way to MASTER_ADDR"
    for kind in (socket.AF_INET, socket.AF_INET6):
        if family in (kind, socket.AF_UNSPEC) and (found := _toward(_SOMEWHERE[kind], kind)):
            return found, "address of the default route"
    there = {name: address for name, address in interfaces().items() if family in (_family(address), socket.AF_UNSPEC)}
    if not there:
        return loopback(), "loopback, because no interface leads to other hosts"
    if len(there) == 1:
        return next(iter(there.values())), "address of the only interface"
    name, address = next(iter(there.items()))
    others = ", ".join(f"{name} ({address})" for name, address in there.items())
    return (
        address,
        f"?{name} of {others}: there is no default route; transport='tcp://INTERFACE', or TP_SOCKET_IFNAME, says which",
    )


def _family(address: str) -> int:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def loopback() -> str:
    """The loopback address that this host has: IPv4's, unless it has IPv6 alone."""
    there = {address for _, _, address in _records()}
    return next((address for address in _LOOPBACK if address in there), _LOOPBACK[0])


def kernel_and_network() -> str:
    """A text that two processes have in common if they share a kernel and a network namespace, and no others. Where a sandbox
    hides the files that say so, it is made of the name of the host and of the hardware addresses of the namespace: processes
    that see these files, and such that do not, count as two hosts then."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        cards = sorted(raw.hex() for name, _, family, raw in _raw_records() if family == _AF_PACKET and any(raw))
        return f"{socket.gethostname()}/{cards[0] if cards else ''}"


def split_place(place: str) -> tuple[str, int]:
    """``ADDRESS``, ``ADDRESS:PORT``, ``[v6]:PORT`` or an interface's name -> (address or name, port or 0)."""
    host, colon, port = place.rpartition(":")
    if place.startswith("[") and place.endswith("]"):
        host, port = place, ""
    elif not colon or (":" in host and not host.startswith("[")):
        host, port = place, ""  # no port; or a bare IPv6 address
    if port and not port.isdigit():
        raise ValueError(f"tcp://{place}: {port!r} is not a port")
    return host.strip("[]"), int(port or 0)
