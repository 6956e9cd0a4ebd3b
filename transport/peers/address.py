"""The address on which a ``tcp`` device listens."""

from __future__ import annotations

import fcntl
import socket
import struct

_SIOCGIFADDR, _SIOCGIFFLAGS = 0x8915, 0x8913
_IFF_UP, _IFF_LOOPBACK = 0x1, 0x8


def routed_address() -> str:
    """The local address of the default route: where other hosts reach this one. Without such a route, as in the network of a
    cluster that leads nowhere else, the address of the only interface that has one and is up; else loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: asks the routing table (address reserved for documentation)
        except OSError:
            addresses = [address for _, name in socket.if_nameindex() if (address := _outward(name))]
            return addresses[0] if len(addresses) == 1 else "127.0.0.1"
        return str(probe.getsockname()[0])


def _outward(name: str) -> str | None:
    """The address of an interface that is up and leads to other hosts."""
    if (answer := _asked(name, _SIOCGIFFLAGS)) is None:
        return None
    (flags,) = struct.unpack_from("H", answer, 16)
    return interface_address(name) if flags & (_IFF_UP | _IFF_LOOPBACK) == _IFF_UP else None


def interface_address(name: str) -> str | None:
    """The IPv4 address of a network interface, ``None`` if there is no such interface."""
    answer = _asked(name, _SIOCGIFADDR)
    return None if answer is None else socket.inet_ntoa(answer[20:24])


def _asked(name: str, request: int) -> bytes | None:
    """What the kernel says of a network interface: its ``struct ifreq``. ``None`` if it has no such thing to say."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            return fcntl.ioctl(probe, request, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return None


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
