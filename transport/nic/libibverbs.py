"""libibverbs, as far as we need it: its own functions under their own names, and the structures that they take.

Names and layouts are those of ``<infiniband/verbs.h>``. They are libibverbs' stable interface to compiled programs (symbol
version ``IBVERBS_1.1``): a later version appends fields, and never moves one.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
from collections.abc import Iterator
from ctypes import POINTER, c_char, c_char_p, c_int, c_size_t, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p
from typing import Any, ClassVar

from ..errors import NotSupported
from .status import failure

LINK_LAYERS = ("UNSPECIFIED", "INFINIBAND", "ETHERNET")
_FORK_UNNEEDED = 2


def _fields(kind: type[Any], names: str) -> list[tuple[str, type[Any]]]:
    return [(name, kind) for name in names.split()]


class DeviceAttr(ctypes.Structure):
    """``ibv_device_attr``."""

    _fields_ = (
        ("fw_ver", c_char * 64),
        *_fields(c_uint64, "node_guid sys_image_guid max_mr_size page_size_cap"),
        *_fields(c_int, "vendor_id vendor_part_id hw_ver max_qp max_qp_wr device_cap_flags max_sge max_sge_rd max_cq max_cqe"),
        *_fields(c_int, "max_mr max_pd max_qp_rd_atom max_ee_rd_atom max_res_rd_atom max_qp_init_rd_atom"),
        *_fields(c_int, "max_ee_init_rd_atom atomic_cap max_ee max_rdd max_mw max_raw_ipv6_qp max_raw_ethy_qp max_mcast_grp"),
        *_fields(c_int, "max_mcast_qp_attach max_total_mcast_qp_attach max_ah max_fmr max_map_per_fmr max_srq max_srq_wr"),
        ("max_srq_sge", c_int),
        ("max_pkeys", c_uint16),
        *_fields(c_uint8, "local_ca_ack_delay phys_port_cnt"),
    )


class PortAttr(ctypes.Structure):
    """``ibv_port_attr``, as far as ``ibv_query_port`` fills it."""

    _fields_ = (
        *_fields(c_int, "state max_mtu active_mtu gid_tbl_len"),
        *_fields(c_uint32, "port_cap_flags max_msg_sz bad_pkey_cntr qkey_viol_cntr"),
        *_fields(c_uint16, "pkey_tbl_len lid sm_lid"),
        *_fields(c_uint8, "lmc max_vl_num sm_sl subnet_timeout init_type_reply active_width active_speed phys_state"),
        *_fields(c_uint8, "link_layer flags"),
        ("later", c_uint8 * 16),
    )


class QpCap(ctypes.Structure):
    """``ibv_qp_cap``."""

    _fields_ = _fields(c_uint32, "max_send_wr max_recv_wr max_send_sge max_recv_sge max_inline_data")


class QpInitAttr(ctypes.Structure):
    """``ibv_qp_init_attr``."""

    _fields_ = (
        *_fields(c_void_p, "qp_context send_cq recv_cq srq"),
        ("cap", QpCap),
        *_fields(c_int, "qp_type sq_sig_all"),
    )


class SrqInitAttr(ctypes.Structure):
    """``ibv_srq_init_attr``, with its ``ibv_srq_attr``."""

    _fields_ = (("srq_context", c_void_p), *_fields(c_uint32, "max_wr max_sge srq_limit"))


class AhAttr(ctypes.Structure):
    """``ibv_ah_attr``, with its ``ibv_global_route``."""

    _fields_ = (
        ("dgid", c_uint64 * 2),
        ("flow_label", c_uint32),
        *_fields(c_uint8, "sgid_index hop_limit traffic_class"),
        ("grh_end", c_uint8),
        ("dlid", c_uint16),
        *_fields(c_uint8, "sl src_path_bits static_rate is_global port_num"),
        ("end", c_uint8),
    )


class QpAttr(ctypes.Structure):
    """``ibv_qp_attr``."""

    _fields_ = (
        *_fields(c_int, "qp_state cur_qp_state path_mtu path_mig_state"),
        *_fields(c_uint32, "qkey rq_psn sq_psn dest_qp_num qp_access_flags"),
        ("cap", QpCap),
        *_fields(AhAttr, "ah_attr alt_ah_attr"),
        *_fields(c_uint16, "pkey_index alt_pkey_index"),
        *_fields(c_uint8, "en_sqd_async_notify sq_draining max_rd_atomic max_dest_rd_atomic min_rnr_timer port_num timeout"),
        *_fields(c_uint8, "retry_cnt rnr_retry alt_port_num alt_timeout"),
        ("rate_limit", c_uint32),
    )
    MASK: ClassVar = {
        "qp_state": 1 << 0,
        "qp_access_flags": 1 << 3,
        "pkey_index": 1 << 4,
        "port_num": 1 << 5,
        "ah_attr": 1 << 7,
        "path_mtu": 1 << 8,
        "timeout": 1 << 9,
        "retry_cnt": 1 << 10,
        "rnr_retry": 1 << 11,
        "rq_psn": 1 << 12,
        "max_rd_atomic": 1 << 13,
        "min_rnr_timer": 1 << 15,
        "sq_psn": 1 << 16,
        "max_dest_rd_atomic": 1 << 17,
        "dest_qp_num": 1 << 20,
    }
    """``enum ibv_qp_attr_mask``: the bit that says that a field is set."""


_MAKERS: dict[str, tuple[Any, ...]] = {
    "ibv_open_device": (c_void_p,),
    "ibv_alloc_pd": (c_void_p,),
    "ibv_reg_mr": (c_void_p, c_void_p, c_size_t, c_int),
    "ibv_reg_dmabuf_mr": (c_void_p, c_uint64, c_size_t, c_uint64, c_int, c_int),
    "ibv_create_comp_channel": (c_void_p,),
    "ibv_create_cq": (c_void_p, c_int, c_void_p, c_void_p, c_int),
    "ibv_create_srq": (c_void_p, POINTER(SrqInitAttr)),
    "ibv_create_qp": (c_void_p, POINTER(QpInitAttr)),
}
"""Functions that make an object: its address, or 0 and ``errno``."""
_DOERS: dict[str, tuple[Any, ...]] = {
    "ibv_query_device": (c_void_p, POINTER(DeviceAttr)),
    "ibv_query_port": (c_void_p, c_uint8, POINTER(PortAttr)),
    "ibv_modify_qp": (c_void_p, POINTER(QpAttr), c_int),
    "ibv_get_async_event": (c_void_p, c_void_p),
    **dict.fromkeys(("ibv_destroy_qp", "ibv_destroy_srq", "ibv_destroy_cq", "ibv_destroy_comp_channel"), (c_void_p,)),
    **dict.fromkeys(("ibv_dereg_mr", "ibv_dealloc_pd", "ibv_close_device"), (c_void_p,)),
}
"""Functions that give 0; else the errno, or -1 and ``errno``."""


@functools.cache
def library() -> ctypes.CDLL:
    """This process's libibverbs. ``NotSupported`` where there is none."""
    try:
        lib = ctypes.CDLL("libibverbs.so.1", use_errno=True)
    except OSError as error:
        hint = "Debian, Ubuntu: apt install ibverbs-providers; Fedora, RHEL: dnf install libibverbs"
        raise NotSupported(f"no libibverbs: {error}", device="verbs", hint=hint) from None
    for result, table in ((c_void_p, _MAKERS), (c_int, _DOERS)):
        for name, arguments in table.items():
            if (function := getattr(lib, name, None)) is not None:
                function.restype, function.argtypes = result, arguments
    lib.ibv_get_device_list.restype, lib.ibv_get_device_list.argtypes = POINTER(c_void_p), (c_void_p,)
    lib.ibv_free_device_list.restype, lib.ibv_free_device_list.argtypes = None, (c_void_p,)
    lib.ibv_get_device_name.restype, lib.ibv_get_device_name.argtypes = c_char_p, (c_void_p,)
    lib.ibv_ack_async_event.restype, lib.ibv_ack_async_event.argtypes = None, (c_void_p,)
    _fork_init(lib)
    return lib


def _fork_init(lib: ctypes.CDLL) -> None:
    """Keep registered memory the parent's in a fork, before the first device is opened. Kernels from 5.12 on do this by
    themselves (a fork copies pinned pages), and so do some older ones of distributions; libibverbs knows. On other kernels
    libibverbs keeps registered pages out of children (``madvise(MADV_DONTFORK)``): a child that touches anything in such a page
    dies. So this asks for that only where it is needed."""
    if hasattr(lib, "ibv_is_fork_initialized") and lib.ibv_is_fork_initialized() == _FORK_UNNEEDED:
        return
    if code := lib.ibv_fork_init():
        raise failure("", "ibv_fork_init", code, hint="call rdmarpc before anything else registers memory")


def made(device: str, verb: str, *arguments: Any) -> int:
    """The address of the object that a verb makes. Raises ``RdmaError`` with the errno's name as ``status``."""
    if (function := getattr(library(), verb, None)) is None:
        raise failure(device, verb, errno.ENOSYS)
    ctypes.set_errno(0)
    found: int | None = function(*arguments)
    if not found:
        raise failure(device, verb, ctypes.get_errno())
    return found


def done(device: str, verb: str, *arguments: Any, what: str = "") -> None:
    """Have a verb done. Raises as ``made``; the text names ``what``."""
    if code := getattr(library(), verb)(*arguments):
        raise failure(device, what or verb, code if code > 0 else ctypes.get_errno())


@contextlib.contextmanager
def _devices() -> Iterator[dict[str, int]]:
    """The RDMA devices of this host, by name, to be opened inside of the block."""
    lib, count = library(), c_int()
    listed = lib.ibv_get_device_list(ctypes.byref(count))
    if not listed:  # no uverbs driver: no RDMA here, which is no error
        yield {}
        return
    try:
        yield {lib.ibv_get_device_name(device).decode("ascii", "replace"): device for device in listed[: count.value]}
    finally:
        lib.ibv_free_device_list(listed)


def devices() -> list[str]:
    """Names of the RDMA devices of this host; empty where there is none, or no driver."""
    with _devices() as found:
        return sorted(found)


def opened(name: str) -> int:
    """The address of the ``ibv_context`` of a device. Raises as ``made``."""
    with _devices() as found:
        if name not in found:
            raise NotSupported("libibverbs has no such device", device=name)
        return made(name, "ibv_open_device", found[name])


def release() -> str:
    """The file name of the loaded libibverbs, for people: ``"libibverbs.so.1.14.44.0"``."""
    with open("/proc/self/maps") as maps:
        names = {line.rsplit("/", 1)[1].strip() for line in maps if "/libibverbs.so" in line}
    return ", ".join(sorted(names))
