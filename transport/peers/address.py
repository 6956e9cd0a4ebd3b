"""The address on which a ``tcp`` device listens."""

from __future__ import annotations

import ctypes
import fcntl
import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import NotSupported
from .guard import naming

_IFF_UP, _IFF_LOOPBACK = 0x1, 0x8
_SOMEWHERE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}  # reserved for documentation
_ADDRESSES, _FLAGS, _HARDWARE = 0x8912, 0x8913, 0x8927
"""Of ``ioctl``."""
_CONFIGURED, _RECORD = struct.Struct("@iP"), struct.Struct("16s4x4s16x")
"""A ``struct ifconf``; a ``struct ifreq`` with an IPv4 address."""
_MOST_BYTES = 1 << 16
_LOOPBACK = "127.0.0.1", "::1"
_VARIABLES = "TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


def _records() -> Iterator[tuple[str, int, str]]:
    """Name, flags and IP address of each interface, once for each address. By ioctl, as sandboxes forbid netlink, which
    libc's getifaddrs asks."""
    with _asking() as sock:
        there = ctypes.create_string_buffer(_MOST_BYTES)
        nbytes, _ = _CONFIGURED.unpack(fcntl.ioctl(sock, _ADDRESSES, _CONFIGURED.pack(_MOST_BYTES, ctypes.addressof(there))))
        for name, raw in _RECORD.iter_unpack(there.raw[:nbytes]):
            yield name.rstrip(b"\0").decode(), _flags(sock, name), socket.inet_ntop(socket.AF_INET, raw)
        for address, *_, last in sorted(map(str.split, lines("/proc/net/if_inet6")), key=lambda fields: fields[1]):
            with suppress(OSError):  # it has just gone
                yield last, _flags(sock, last.encode()), socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address))


@contextmanager
def _asking() -> Iterator[socket.socket]:
    with naming("ioctl of a socket (SIOCGIFCONF)", device="tcp"), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        yield sock


def _asked(sock: socket.socket, what: int, name: bytes) -> bytes:
    """What the system says of an interface."""
    return fcntl.ioctl(sock, what, name.ljust(_RECORD.size, b"\0"))[16:]


def _flags(sock: socket.socket, name: bytes) -> int:
    return int.from_bytes(_asked(sock, _FLAGS, name)[:2], sys.byteorder)


def _hardware_addresses() -> list[bytes]:
    """Of all interfaces that have one."""
    with _asking() as sock:
        names = [line.partition(":")[0].strip().encode() for line in lines("/proc/net/dev")[2:]]
        return [raw for name in names if any(raw := _asked(sock, _HARDWARE, name)[2:8])]


def lines(path: str) -> list[str]:
    """Those of a file; none where it cannot be read."""
    with suppress(OSError):
        return Path(path).read_text().splitlines()
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
            why = f"{variable}={text} names no interface of this host that has an address"
            hint = f"there are: {there}; or say where to listen: transport='tcp://INTERFACE'"
            raise NotSupported(why, device="tcp", hint=hint)
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
    any_kind, six = family == socket.AF_UNSPEC, family == socket.AF_INET6
    there = {name: address for name, address in interfaces().items() if any_kind or six == (":" in address)}
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
        cards = sorted(raw.hex() for raw in _hardware_addresses())
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
