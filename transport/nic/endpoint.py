"""The description of a port that a peer needs before it connects, and the test whether two ports fit together."""

from __future__ import annotations

import ipaddress
import struct
from dataclasses import dataclass

from ..errors import RdmaError
from .attributes import DeviceAttr, Gid, PortAttr, Route

_WIRE = struct.Struct("<BBBBBBH16s")
_VERSION = 1
_LINKS = ("INFINIBAND", "ETHERNET")
_KINDS = ("IB", "RoCEv1", "RoCEv2")
_MTUS = (256, 512, 1024, 2048, 4096)
_FABRIC_PREFIX = 8
_MOST_READS = 16
"""READs under way on a queue pair; more bring nothing on any adapter, and each holds memory of it."""


@dataclass(frozen=True, slots=True)
class Endpoint:
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

    SIZE = _WIRE.size

    def dump(self) -> bytes:
        """``SIZE`` bytes."""
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
