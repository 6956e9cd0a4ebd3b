"""What libibverbs tells of devices, ports, addresses and ways to a peer, in plain numbers and texts. Names are those of
libibverbs."""

from __future__ import annotations

import ctypes
from ctypes import c_char, c_int, c_uint8, c_uint16, c_uint64
from dataclasses import dataclass
from typing import Any

LOCAL, REMOTE_READ, REMOTE_WRITE = range(3)
"""Rights on a memory region: only this process uses it; peers may READ it; peers may READ and WRITE it."""


def fields(kind: type[Any], names: str) -> list[tuple[str, type[Any]]]:
    """Fields of a structure, all of one type."""
    return [(name, kind) for name in names.split()]


class DeviceAttr(ctypes.Structure):
    """The limits of a device (``ibv_device_attr``)."""

    _fields_ = (
        ("fw_ver", c_char * 64),
        *fields(c_uint64, "node_guid sys_image_guid max_mr_size page_size_cap"),
        *fields(c_int, "vendor_id vendor_part_id hw_ver max_qp max_qp_wr device_cap_flags max_sge max_sge_rd max_cq max_cqe"),
        *fields(c_int, "max_mr max_pd max_qp_rd_atom max_ee_rd_atom max_res_rd_atom max_qp_init_rd_atom"),
        *fields(c_int, "max_ee_init_rd_atom atomic_cap max_ee max_rdd max_mw max_raw_ipv6_qp max_raw_ethy_qp max_mcast_grp"),
        *fields(c_int, "max_mcast_qp_attach max_total_mcast_qp_attach max_ah max_fmr max_map_per_fmr max_srq max_srq_wr"),
        ("max_srq_sge", c_int),
        ("max_pkeys", c_uint16),
        *fields(c_uint8, "local_ca_ack_delay phys_port_cnt"),
    )


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
