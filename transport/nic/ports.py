"""The choice of an RDMA device, port and address, with the reason against each other one.

Everything is decided from what the kernel shows (``sysfs.Found``), by pure functions, before any device is opened. A port
that then fails to open is refused with that reason, and the next one is tried. Order of the usable ports: those with an address
that reaches beyond the wire before those without, then the nearest to the memory of this process (NUMA), then the fastest, then
by name.

An ``Endpoint`` describes a port to a peer before it connects; ``why_not`` tells whether two fit together.
"""

from __future__ import annotations

import ipaddress
import re
import struct
from typing import NamedTuple

from ..errors import NotSupported, RdmaError
from ..peers.address import where_to_listen
from . import sysfs
from .libibverbs import DeviceAttr, PortAttr, Route
from .native import Context
from .packages import Package
from .sysfs import Found, Gid

_WIRE = struct.Struct("<BBBBBBH16s")
ENDPOINT_BYTES = _WIRE.size
_VERSION = 1
_LINKS = ("INFINIBAND", "ETHERNET")
_KINDS = ("IB", "RoCEv1", "RoCEv2")
_MTUS = (256, 512, 1024, 2048, 4096)
_FABRIC_PREFIX = 8
_MOST_READS = 16
"""READs under way on a queue pair; more bring nothing on any adapter, and each holds memory of it."""


class Endpoint(NamedTuple):
    """A port as its peers see it. ``mtu`` in bytes; ``reads``: how many READs it serves and issues at once."""

    link_layer: str
    kind: str
    mtu: int
    reads: int
    global_only: bool
    lid: int
    gid: bytes

    @staticmethod
    def of(port: PortAttr, gid: Gid, device: DeviceAttr) -> Endpoint:
        reads = max(1, min(_MOST_READS, device.max_qp_rd_atom, device.max_qp_init_rd_atom))
        return Endpoint(port.link_layer, gid.kind, port.active_mtu, reads, port.global_only, port.lid, gid.raw)

    def dump(self) -> bytes:
        """``ENDPOINT_BYTES`` bytes."""
        link, kind, mtu = _LINKS.index(self.link_layer), _KINDS.index(self.kind), _MTUS.index(self.mtu)
        return _WIRE.pack(_VERSION, link, kind, mtu, self.reads, self.global_only, self.lid, self.gid)

    @staticmethod
    def load(blob: bytes) -> Endpoint:
        """Raises ``RdmaError`` where ``dump`` of this version did not write this."""
        try:
            version, link, kind, mtu, reads, global_only, lid, gid = _WIRE.unpack(blob)
            if version != _VERSION:
                raise ValueError(f"version {version}, this is {_VERSION}")
            return Endpoint(_LINKS[link], _KINDS[kind], _MTUS[mtu], reads, bool(global_only), lid, gid)
        except (ValueError, IndexError, struct.error) as error:
            raise RdmaError(f"not the description of a port: {error}", device="verbs") from None

    def __str__(self) -> str:
        """``dump`` as hexadecimal digits, for addresses that are text."""
        return self.dump().hex()

    @staticmethod
    def parse(text: str) -> Endpoint:
        """The inverse of ``str``."""
        try:
            return Endpoint.load(bytes.fromhex(text))
        except ValueError:
            raise RdmaError(f"not the description of a port: {text!r}", device="verbs") from None

    @property
    def address(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
        """The GID as an IP address."""
        return as_address(self.gid)


def as_address(gid: bytes) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """A GID as the IP address that it is."""
    address = ipaddress.IPv6Address(gid)
    return address.ipv4_mapped or address


def why_not(a: Endpoint, b: Endpoint) -> str | None:
    """Why two ports cannot be connected, ``None`` if nothing speaks against it. Symmetric."""
    if a.link_layer != b.link_layer:
        return f"one end is {a.link_layer}, the other {b.link_layer}"
    if a.link_layer == "INFINIBAND":
        if a.gid[:_FABRIC_PREFIX] != b.gid[:_FABRIC_PREFIX]:
            prefixes = " and ".join(end.gid[:_FABRIC_PREFIX].hex() for end in (a, b))
            return f"the InfiniBand subnets differ ({prefixes}); the way through a router is not looked up"
        return None
    if a.kind != b.kind:
        return f"one end has {a.kind}, the other {b.kind}: both adapters must speak the same (ibv_devinfo -v lists the GIDs)"
    if a.address.version != b.address.version:
        return f"one end is at {a.address}, the other at {b.address}: give both an address of one family"
    if a.address.is_loopback != b.address.is_loopback:
        return f"one end is at {a.address}, the other at {b.address}: a loopback address is of its own host only"
    if a.address.is_link_local != b.address.is_link_local:
        return f"one end has only a link-local address ({a.address} and {b.address}): give that interface an IP address"
    return None


def route(mine: Endpoint, theirs: Endpoint, **ours: int) -> Route:
    """How a queue pair of ours at ``mine`` reaches one at ``theirs``: the smaller MTU, as many READs at once as both ends take,
    and a global route header on Ethernet always, on InfiniBand where an end cannot do without. ``ours``: the other fields of
    ``Route``."""
    return Route(
        **ours,
        dgid=theirs.gid,
        dlid=theirs.lid,
        mtu=min(mine.mtu, theirs.mtu),
        global_route=mine.link_layer == "ETHERNET" or mine.global_only or theirs.global_only,
        reads=min(mine.reads, theirs.reads),
    )


_GRADES = (
    "RoCEv2 over IPv4",
    "RoCEv2 over IPv6",
    "RoCEv2 on this wire only (a link-local or loopback address)",
    "RoCEv1 (no router passes it)",
    "RoCEv1 with a link-local address",
    "InfiniBand",
)
"""Kinds of addresses. On Ethernet the first kind of this list that the port has is taken."""
_POOR = _GRADES[2:5]
_STATES = {
    "DOWN": "is the cable plugged, the interface up (ip link set ... up)?",
    "INIT": "it waits for a subnet manager: is opensm running in this fabric?",
    "ARMED": "the subnet manager has not finished with it",
}
_OVERHEAD = 104
"""An interface's MTU must be larger than RoCE's by its headers (IP, UDP, transport), which need less than this."""


class Port(NamedTuple):
    """The chosen port, opened. The device that asked for it owns ``context`` and closes it."""

    name: str
    """``"mlx5_0:1"``"""
    context: Context
    number: int
    gid: Gid
    port: PortAttr
    device: DeviceAttr
    address: str
    """The IP address at which the control stream listens."""
    endpoint: Endpoint
    lines: tuple[str, ...]
    """Every decision, for people."""


def choose(package: Package, place: str = "") -> Port:
    """Open the best port: of the whole host, or of ``place``: a device (``mlx5_0``), a port (``mlx5_0:1``) or a network
    interface (``eth0``). Raises ``NotSupported`` with the reason for each port when there is none."""
    found = sysfs.survey()
    order, lines = rank(found, place)
    known = package.devices()
    for port in order:
        try:
            if port.device not in known:
                raise NotSupported("libibverbs has no driver for it", hint="apt install ibverbs-providers")
            return _open(package, port, place, lines)
        except RdmaError as error:
            lines.append(f"{port.name} left out: {error}".replace("\n", " "))
    raise NotSupported(
        "; ".join([f"no usable RDMA port at {place!r}" if place else "no usable RDMA port on this host", *lines]),
        device="verbs",
        hint="rdmarpc doctor lists the ports and what they lack",
    )


def _open(package: Package, found: Found, place: str, lines: list[str]) -> Port:
    gid, why = pick_gid(found, interface_of(found, place))
    assert gid is not None
    context = Context(package, found.device)
    try:
        device, port = context.device(), context.port(found.number)
        if port.state != "ACTIVE":
            raise NotSupported(f"its port is {port.state} now")
        if gid != sysfs.gid(found.device, found.number, gid.index):
            raise NotSupported("its GID table changed just now")
    except RdmaError:
        context.close()
        raise
    said = [f"{found.name} chosen: {describe(found)}", why, f"MTU {port.active_mtu} bytes" + _mtu_hint(port)]
    endpoint = Endpoint.of(port, gid, device)
    address = listening_address(found, gid)
    return Port(found.name, context, found.number, gid, port, device, address, endpoint, (*said, *lines))


def rank(found: list[Found], place: str = "") -> tuple[list[Found], list[str]]:
    """The usable ports at ``place``, best first, and a line for each that is not the first. Raises ``NotSupported`` where there
    is no such place."""
    judged = [(port, why_unusable(port, interface_of(port, place))) for port in at_place(found, place)]
    order = sorted((port for port, reason in judged if not reason), key=lambda port: _key(port, place))
    lines = [f"{port.name} left out: {reason}" for port, reason in judged if reason]
    lines += [f"{port.name} not needed: {describe(port)}; {_behind(port, order[0], place)}" for port in order[1:]]
    return order, lines


def at_place(found: list[Found], place: str) -> list[Found]:
    """The ports that a device name, a port or a network interface means; all for ``""``."""
    if not place:
        return list(found)
    device, colon, number = place.rpartition(":")
    if colon and number.isdigit() and any(port.device == device for port in found):
        here = [port for port in found if port.device == device and port.number == int(number)]
    else:
        here = [port for port in found if port.device == place] or [port for port in found if place in port.interfaces]
    if here:
        return here
    names = sorted({port.name for port in found} | {name for port in found for name in port.interfaces})
    raise NotSupported(
        f"no RDMA device, port or interface {place!r} on this host",
        device="verbs",
        hint=f"one of {', '.join(names)}" if names else "this host has no RDMA device at all (ls /sys/class/infiniband)",
    )


def interface_of(port: Found, place: str) -> str:
    """The interface that ``place`` names, ``""`` where it names something else."""
    return place if place in port.interfaces and place != port.device else ""


def why_unusable(port: Found, interface: str = "") -> str:
    """Empty if nothing speaks against the port, else the reason."""
    if port.node_type == "RNIC":
        return "an iWARP adapter cannot announce a write (WRITE_WITH_IMM)"
    if port.node_type != "CA":
        return f"an adapter of kind {port.node_type or 'unknown'} has no reliable connections"
    if port.state != "ACTIVE":
        hint = _STATES.get(port.state, "")
        return f"its port is {port.state or 'in an unknown state'}" + (f": {hint}" if hint else "")
    if port.link_layer == "INFINIBAND" and port.lid == 0:
        return "it has no LID: " + _STATES["INIT"]
    gid, why = pick_gid(port, interface)
    return "" if gid is not None else why


def pick_gid(port: Found, interface: str = "") -> tuple[Gid | None, str]:
    """The entry of the port's GID table to use, and why; ``None``, and what to do, where no entry can be used. ``interface``:
    consider only the entries of that network interface."""
    known = [gid for gid in port.gids if grade(gid) is not None]
    if interface and port.link_layer != "INFINIBAND":
        known = [gid for gid in known if gid.netdev == interface]
    if not known:
        where = interface or ", ".join(sorted(port.interfaces)) or "its interface"
        return None, f"no address: give {where} an IP address (ip addr add ...)"
    best = min(known, key=lambda gid: (_GRADES.index(str(grade(gid))), gid.index))
    others = len(known) - 1
    of = f", {best.netdev}" if best.netdev else ""
    also = f"; the best of {others + 1}" if others else ""
    return best, f"GID {best.index} {as_address(best.raw)}{of}: {grade(best)}{also}"


def grade(gid: Gid) -> str | None:
    """The kind of the address, one of ``_GRADES``; ``None`` if it cannot be used."""
    if gid.kind == "IB":
        return _GRADES[5]
    address = as_address(gid.raw)
    wire = address.is_link_local or address.is_loopback
    if gid.kind == "RoCEv2":
        return _GRADES[2] if wire else _GRADES[0] if address.version == 4 else _GRADES[1]
    if gid.kind == "RoCEv1":
        return _GRADES[4] if wire else _GRADES[3]
    return None


def listening_address(port: Found, gid: Gid) -> str:
    """The IP address that belongs to a port: of its GID, else of its interface (IPoIB), else of the default route."""
    if grade(gid) in (_GRADES[0], _GRADES[1]):
        return str(as_address(gid.raw))
    mine = [port.interfaces.get(gid.netdev, ""), *port.interfaces.values()]
    return next((address for address in mine if address), "") or where_to_listen()[0]


def describe(port: Found) -> str:
    """``"InfiniBand, 400 Gb/s, NUMA distance 10"``."""
    link = "InfiniBand" if port.link_layer == "INFINIBAND" else "Ethernet"
    near = "NUMA distance unknown" if port.distance is None else f"NUMA distance {port.distance}"
    return f"{link}, {port.gbit_per_s:g} Gb/s, {near}"


def _key(port: Found, place: str) -> tuple[bool, int, float, list[tuple[str, int]], int]:
    gid, _ = pick_gid(port, interface_of(port, place))
    assert gid is not None
    # A software device, or one that the firmware does not place, is taken for far: where all are, it decides nothing.
    distance = 255 if port.distance is None else port.distance
    natural = [(text, int(digits or 0)) for text, digits in re.findall(r"(\D*)(\d*)", port.device)]  # mlx5_2 before mlx5_10
    return grade(gid) in _POOR, distance, -port.gbit_per_s, natural, port.number


def _behind(port: Found, first: Found, place: str) -> str:
    """The first of the reasons why it comes after the chosen one."""
    reasons = (
        f"{first.name} has an address that reaches farther",
        f"{first.name} is nearer to the memory of this process",
        f"{first.name} is faster",
    )
    for reason, mine, best in zip(reasons, _key(port, place), _key(first, place)):
        if mine != best:
            return reason
    return f"as good as {first.name}"


def _mtu_hint(port: PortAttr) -> str:
    if port.link_layer != "ETHERNET" or port.active_mtu >= port.max_mtu:
        return ""
    larger = f"ip link set ... mtu {port.max_mtu + _OVERHEAD}, at both ends and in the switches, gives {port.max_mtu}"
    return f" (the MTU of the interface allows no more: {larger})"
