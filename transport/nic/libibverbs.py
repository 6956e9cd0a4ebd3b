"""The libibverbs of this process: what it tells of devices, ports and ways to a peer, in plain numbers and texts (names are
those of libibverbs); the meaning of its numbers (completion statuses, asynchronous events and errnos), with the likely cause
and a hint; and what the Python packages do not make.

Causes after the InfiniBand Architecture Specification, volume 1, 10.10 and 11.6.2 (completion return status), read for what
this project does: reliable connected queue pairs, one-sided WRITE and READ, notifications through a shared receive queue.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
from ctypes import c_int, c_size_t, c_uint32, c_uint64, c_void_p
from typing import NamedTuple

from ..errors import NotSupported, PeerLost, RdmaError, RegistrationError, RemoteAccessError
from ..words import layout as at

LOCAL, REMOTE_READ, REMOTE_WRITE = range(3)
"""Rights on a memory region: only this process uses it; peers may READ it; peers may READ and WRITE it."""


class DeviceAttr(NamedTuple):
    """The limits of a device (``ibv_query_device``)."""

    fw_ver: str
    max_mr: int
    max_mr_size: int
    max_qp_wr: int
    max_cqe: int
    max_srq_wr: int
    max_qp_rd_atom: int
    max_qp_init_rd_atom: int


class PortAttr(NamedTuple):
    """``ibv_query_port``. ``state``: ``"ACTIVE"``, ``"DOWN"``, ...; ``link_layer``: ``"INFINIBAND"`` or ``"ETHERNET"``; MTUs in
    bytes; ``global_only``: every packet needs a global route header."""

    state: str
    link_layer: str
    lid: int
    max_mtu: int
    active_mtu: int
    max_msg_sz: int
    global_only: bool


class Route(NamedTuple):
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


_BUG = "this is a fault of rdmarpc: please report it with the output of rdmarpc doctor"


class Meaning(NamedTuple):
    """The meaning of a status: its name, the class of the error to raise, the likely cause, and what to do."""

    name: str
    error: type[RdmaError]
    cause: str
    hint: str = _BUG


_NETWORK = "is the peer's process alive, its port ACTIVE, and the MTU the same along the way? rdmarpc doctor says"

MEANINGS = {
    1: Meaning(
        "LOC_LEN_ERR", RdmaError, "a message was longer than the port's max_msg_sz, or than the place posted to receive it"
    ),
    2: Meaning("LOC_QP_OP_ERR", RdmaError, "the queue pair refused the work request: wrong state, length or number of parts"),
    4: Meaning(
        "LOC_PROT_ERR",
        RegistrationError,
        "the local memory of the copy is not registered with this device, or no longer",
        "keep the tensor and its Region open until the copy is done, and free nothing of the arena before",
    ),
    5: Meaning(
        "WR_FLUSH_ERR",
        PeerLost,
        "the connection had failed or was closed before this copy began; nothing of it was done",
        "the first error of this connection is the one that tells why",
    ),
    7: Meaning("BAD_RESP_ERR", PeerLost, "the peer's adapter answered with something unexpected", _NETWORK),
    8: Meaning(
        "LOC_ACCESS_ERR", RegistrationError, "the local memory of the copy is registered without the right to write into it"
    ),
    9: Meaning(
        "REM_INV_REQ_ERR",
        RemoteAccessError,
        "the peer's adapter refused the request: too long, or not allowed on its queue pair",
        "are both ends the same version of rdmarpc?",
    ),
    10: Meaning(
        "REM_ACCESS_ERR",
        RemoteAccessError,
        "the peer does not give access to those bytes: wrong key, out of range, or its region was closed",
        "descriptors are good for as long as the Region they came from is open",
    ),
    11: Meaning(
        "REM_OP_ERR",
        PeerLost,
        "the peer's adapter failed to carry the request out: its own memory or queue is broken",
        _NETWORK,
    ),
    12: Meaning("RETRY_EXC_ERR", PeerLost, "the peer's adapter did not answer any more", _NETWORK),
    13: Meaning(
        "RNR_RETRY_EXC_ERR",
        PeerLost,
        "the peer has no place to receive a notification, and had none for all retries",
        "the peer is stuck or stopped (a debugger, SIGSTOP, swapping)",
    ),
    16: Meaning("REM_ABORT_ERR", PeerLost, "the peer's adapter gave the request up", _NETWORK),
    19: Meaning(
        "FATAL_ERR",
        PeerLost,
        "the local adapter failed",
        "look at dmesg: the driver resets the adapter or the link; open a new device then",
    ),
    20: Meaning("RESP_TIMEOUT_ERR", PeerLost, "the peer's adapter answered too late", _NETWORK),
    21: Meaning("GENERAL_ERR", RdmaError, "the local adapter reported an error without a name", "look at dmesg"),
}
"""By ``enum ibv_wc_status``: what a reliable connected queue pair can meet."""
_OTHER = Meaning("", RdmaError, "a kind of completion that rdmarpc never asks for")

EVENTS = (
    "CQ_ERR", "QP_FATAL", "QP_REQ_ERR", "QP_ACCESS_ERR", "COMM_EST", "SQ_DRAINED", "PATH_MIG", "PATH_MIG_ERR",
    "DEVICE_FATAL", "PORT_ACTIVE", "PORT_ERR", "LID_CHANGE", "PKEY_CHANGE", "SM_CHANGE", "SRQ_ERR", "SRQ_LIMIT_REACHED",
    "QP_LAST_WQE_REACHED", "CLIENT_REREGISTER", "GID_CHANGE", "WQ_FATAL",
)  # fmt: skip
"""Names of ``enum ibv_event_type``, by number."""

LOSES_ALL = {
    "CQ_ERR": "the completion queue overflowed or broke: no completion can be trusted any more",
    "SRQ_ERR": "the shared receive queue broke: no notification arrives any more",
    "DEVICE_FATAL": "the adapter failed; the driver resets it",
}
"""The events that end all connections of a device, and what happened. Others are only counted: those of one connection show in
its completions, too."""


def event_name(event: int) -> str:
    """The name of an asynchronous event: ``"QP_FATAL"`` for 1, ``"EVENT_99"`` for an unknown one."""
    return EVENTS[event] if 0 <= event < len(EVENTS) else f"EVENT_{event}"


def error_of(status: int, *, peer: str, vendor_err: int = 0) -> RdmaError:
    """The error for a completion whose status is not ``SUCCESS``; ``vendor_err`` is the adapter's own code."""
    meaning = MEANINGS.get(status, _OTHER)
    name, code = meaning.name or f"STATUS_{status}", f" (the adapter's code: {vendor_err:#x})" if vendor_err else ""
    return meaning.error(f"the copy failed: {meaning.cause}{code}", peer=peer, device="verbs", status=name, hint=meaning.hint)


_ERRNO_HINTS = {
    errno.EPERM: "may this user open /dev/infiniband/uverbs*? In a container: --device=/dev/infiniband --ulimit memlock=-1",
    errno.EACCES: "may this user open /dev/infiniband/uverbs*? In a container: --device=/dev/infiniband --ulimit memlock=-1",
    errno.ENOMEM: "queues are pinned memory: raise the memlock limit (ulimit -l unlimited), or ask for shallower ones",
    errno.EAGAIN: "the RDMA cgroup may limit this process: see rdma.max of its cgroup",
    errno.ENOSPC: "the adapter has no more of these: other processes of this host hold them",
    errno.EINVAL: "the adapter does not take these sizes or this address; rdmarpc doctor lists its limits",
    errno.ETIMEDOUT: "the peer's address was not resolved: is its IP reachable over this interface?",
    errno.ENETUNREACH: "there is no route to the peer's GID: are both ends in one network, and is the GID still there?",
    errno.EHOSTUNREACH: "the peer's address was not resolved: is its IP reachable over this interface?",
    errno.ENODEV: "the adapter or its interface is gone; look at dmesg",
    errno.EIO: "the adapter failed; look at dmesg",
    errno.EBUSY: "something made from it is still open",
}


def failure(device: str, verb: str, code: int, *, hint: str = "") -> RdmaError:
    """The error for a verb that failed with this errno; its name is the ``status``."""
    kind = NotSupported if code in (errno.ENOSYS, errno.EOPNOTSUPP, errno.EPROTONOSUPPORT) else RdmaError
    # Linux has one number for two names, and Python knows the other one.
    status = "EOPNOTSUPP" if code == errno.EOPNOTSUPP else errno.errorcode.get(code, str(code))
    text = f"{verb} failed: {os.strerror(code)}"
    return kind(text, device=device, status=status, hint=hint or _ERRNO_HINTS.get(code, ""))


def registration_failure(device: str, nbytes: int, status: str, limits: DeviceAttr, *, mapped: bool) -> RegistrationError:
    """The error for memory that a device did not take: names the limit that was met, and what raises it. ``status``: the name
    of the errno."""
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    text, hint = f"{nbytes} bytes could not be registered", ""
    if not mapped:
        text += ": there is no memory at its address"
        hint = "was the tensor freed, or is it a tensor without storage of its own (meta, sparse)?"
    elif nbytes > limits.max_mr_size:
        text += f": the adapter takes at most {limits.max_mr_size} bytes at once (max_mr_size)"
        hint = "register it in parts"
    elif status in ("ENOMEM", "EPERM", "EAGAIN") and locked != resource.RLIM_INFINITY:
        text += f": this process may lock {locked} bytes of memory (memlock)"
        hint = (
            "ulimit -l unlimited; LimitMEMLOCK=infinity in the unit of slurmd or of a service, --ulimit memlock=-1 for a "
            "container, limits.conf for logins"
        )
    elif status in ("ENOMEM", "ENOSPC"):
        text += f": no memory, or all {limits.max_mr} registrations of the adapter are in use (max_mr)"
        hint = "register few large regions: tensors of the arena share one"
    elif status in ("EFAULT", "EACCES", "EOPNOTSUPP"):
        text += ": that memory is not mapped, read-only, or of a kind that cannot be pinned"
        hint = "files on some file systems, and device memory, cannot be registered: copy it into an arena tensor"
    return RegistrationError(text, device=device, status=status, hint=hint)


HOP_LIMIT = 64
"""How many routers a packet on a global route may pass. IP packets usually start with as many."""
LINK_LAYERS = ("UNSPECIFIED", "INFINIBAND", "ETHERNET")
_FORK_UNNEEDED = 2


def library() -> ctypes.CDLL:
    """The libibverbs that the packages use as well: a process has one of that name."""
    lib = ctypes.CDLL("libibverbs.so.1", use_errno=True)
    lib.ibv_get_async_event.argtypes = (c_void_p, c_void_p)
    lib.ibv_ack_async_event.argtypes = (c_void_p,)
    lib.ibv_ack_async_event.restype = None
    if hasattr(lib, "ibv_reg_dmabuf_mr"):
        lib.ibv_reg_dmabuf_mr.argtypes = (c_void_p, c_uint64, c_size_t, c_uint64, c_int, c_int)
        lib.ibv_reg_dmabuf_mr.restype = c_void_p
    lib.ibv_dereg_mr.argtypes = (c_void_p,)
    return lib


def fork_init() -> None:
    """Keep registered memory the parent's in a fork. Call it before the first device is opened. Kernels from 5.12 on do this by
    themselves (a fork copies pinned pages), and so do some older ones of distributions; libibverbs knows. On other kernels
    libibverbs keeps registered pages out of children (``madvise(MADV_DONTFORK)``): a child that touches anything in such a page
    dies. So this asks for that only where it is needed."""
    lib = library()
    if hasattr(lib, "ibv_is_fork_initialized") and lib.ibv_is_fork_initialized() == _FORK_UNNEEDED:
        return
    if code := lib.ibv_fork_init():
        raise failure("", "ibv_fork_init", code, hint="call rdmarpc before anything else registers memory")


def release() -> str:
    """The file name of the loaded libibverbs, for people: ``"libibverbs.so.1.14.44.0"``."""
    with open("/proc/self/maps") as maps:
        names = {line.rsplit("/", 1)[1].strip() for line in maps if "/libibverbs.so" in line}
    return ", ".join(sorted(names))


class DmaBufMR:
    """An ``ibv_mr`` over a dma-buf, for packages that make none. Named after that of pyverbs, and as there the first byte is
    called by its offset in the buffer. Raises ``OSError``."""

    def __init__(self, lib: ctypes.CDLL, pd: int, length: int, access: int, fd: int, offset: int) -> None:
        if not hasattr(lib, "ibv_reg_dmabuf_mr"):
            raise OSError(errno.ENOSYS, "this libibverbs has no ibv_reg_dmabuf_mr")
        self._lib = lib
        ctypes.set_errno(0)
        self._mr = lib.ibv_reg_dmabuf_mr(pd, offset, length, offset, fd, access)
        if not self._mr:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        self.lkey = c_uint32.from_address(self._mr + at.MR_LKEY).value
        self.rkey = c_uint32.from_address(self._mr + at.MR_RKEY).value

    def close(self) -> None:
        if code := self._lib.ibv_dereg_mr(self._mr):
            raise OSError(code, os.strerror(code))
