"""What libibverbs tells of devices, ports, addresses and ways to a peer, in plain numbers and texts. Names are those of
libibverbs."""

from __future__ import annotations

from dataclasses import dataclass

LOCAL, REMOTE_READ, REMOTE_WRITE = range(3)
"""Rights on a memory region: only this process uses it; peers may READ it; peers may READ and WRITE it."""


@dataclass(frozen=True, slots=True)
class DeviceAttr:
    """The limits of a device (``ibv_query_device``)."""

    fw_ver: str
    max_mr: int
    max_mr_size: int
    max_qp_wr: int
    max_cqe: int
    max_srq_wr: int
    max_qp_rd_atom: int
    max_qp_init_rd_atom: int


@dataclass(frozen=True, slots=True)
class PortAttr:
    """``ibv_query_port``. ``state``: ``"ACTIVE"``, ``"DOWN"``, ...; ``link_layer``: ``"INFINIBAND"`` or ``"ETHERNET"``; MTUs in
    bytes; ``global_only``: every packet needs a global route header."""

    state: str
    link_layer: str
    lid: int
    max_mtu: int
    active_mtu: int
    max_msg_sz: int
    global_only: bool


@dataclass(frozen=True, slots=True)
class Gid:
    """An entry of a port's GID table. ``kind``: ``"IB"``, ``"RoCEv1"`` or ``"RoCEv2"``; ``netdev``: the network interface,
    or ``""``."""

    index: int
    raw: bytes
    kind: str
    netdev: str


@dataclass(frozen=True, slots=True)
class Route:
    """How a queue pair reaches its peer. ``mtu`` in bytes; ``sgid_index``: entry of our GID table; ``retry_cnt``: how often an
    unanswered packet is sent again, 4.096 us times 2 to the power ``timeout`` apart; ``reads``: how many READs are under way
    at once, each way."""

    port: int
    sgid_index: int
    dgid: bytes
    dlid: int
    dest_qp_num: int
    rq_psn: int
    sq_psn: int
    mtu: int
    global_route: bool
    timeout: int
    retry_cnt: int
    reads: int
