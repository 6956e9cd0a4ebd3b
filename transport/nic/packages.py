"""The Python package that reaches libibverbs in this process: pyverbs of rdma-core, the distribution's, since it must match the
system's libibverbs; or PyPI's ``ibverbs``, one wheel for every CPython from 3.9 on, which opens the system's libibverbs when it
is imported. Neither exports addresses of its objects (``native``)."""

from __future__ import annotations

import functools
import glob
import importlib
import importlib.machinery
import importlib.util
import logging
import os
import sys
from contextlib import suppress
from typing import Any, ClassVar

from ..errors import NotSupported, RdmaError
from ..words import layout as at
from .libibverbs import HOP_LIMIT, LINK_LAYERS, DmaBufMR, Route, fork_init, library, release

_FOLDERS = ("/usr/lib/python3/dist-packages", "/usr/lib64/python3*/site-packages", "/usr/lib/python3*/site-packages")
"""The folders where Debian, Fedora and SUSE install pyverbs."""
_GRH_REQUIRED = 1
"""``IBV_QPF_GRH_REQUIRED``, of a port's flags: virtual InfiniBand ports."""
_MODULES = ("addr", "cq", "device", "mr", "pd", "qp", "srq")


def _import_all() -> str:
    """Import the parts of pyverbs that are needed; the reason if that fails."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        for name in _MODULES:
            importlib.import_module(f"pyverbs.{name}")
    except ImportError as error:
        for name in [name for name in sys.modules if name.split(".")[0] == "pyverbs"]:
            del sys.modules[name]
        return str(error)
    finally:
        # pyverbs calls logging.basicConfig, which would decide about the logging of the whole program.
        root.setLevel(level)
        for handler in [handler for handler in root.handlers if handler not in handlers]:
            root.removeHandler(handler)
    return ""


def _load_from(folder: str) -> str:
    """Import pyverbs from ``folder`` alone, nothing else beside it; the reason if that fails."""
    if not any(os.path.exists(f"{folder}/device{suffix}") for suffix in importlib.machinery.EXTENSION_SUFFIXES):
        built = (
            ", ".join(sorted(os.path.basename(path) for path in glob.glob(f"{folder}/device*.so"))) or "no extension modules"
        )
        return f"not for this Python ({importlib.machinery.EXTENSION_SUFFIXES[0]}): it has {built}"
    spec = importlib.util.spec_from_file_location("pyverbs", f"{folder}/__init__.py", submodule_search_locations=[folder])
    if spec is None or spec.loader is None:
        return "not a package"
    package = importlib.util.module_from_spec(spec)
    sys.modules["pyverbs"] = package
    spec.loader.exec_module(package)
    return _import_all()


def _load() -> str:
    """Import pyverbs from where it can be had: the folder. ``NotSupported`` says what was tried."""
    refused = []
    if importlib.util.find_spec("pyverbs") is not None:
        reason = _import_all()
        if not reason:
            return os.path.dirname(str(sys.modules["pyverbs"].__file__))
        refused.append(f"the importable pyverbs: {reason}")
    for folder in [path for pattern in _FOLDERS for path in sorted(glob.glob(f"{pattern}/pyverbs"))]:
        reason = _load_from(folder)
        if not reason:
            return folder
        refused.append(f"{folder}: {reason}")
    raise NotSupported(
        "; ".join(refused) or "pyverbs is not installed",
        device="verbs",
        hint="Debian, Ubuntu: apt install python3-pyverbs; Fedora, RHEL: dnf install python3-pyverbs; or pip install ibverbs",
    )


class Pyverbs:
    """What makes and changes native objects. Raises ``NotSupported`` where pyverbs cannot be imported, with the reason.

    ``native`` is the package's context, ``pd`` its protection domain. Exceptions of the package pass through."""

    renamed: ClassVar = {"fw_ver": "fw_version"}
    """Attributes of a device whose names in the package differ from those of libibverbs."""

    def __init__(self) -> None:
        folder = _load()
        self.name = f"pyverbs in {folder} ({release()})"
        """The package and its version, for people."""
        self.addr, self.cq, self.dev, self.mr, self.pds, self.qp, self.srq = (
            importlib.import_module(f"pyverbs.{module}") for module in _MODULES
        )
        fork_init()

    def devices(self) -> list[str]:
        """Names of the RDMA devices of this host; empty where there is none, or no driver."""
        with suppress(Exception):  # no uverbs driver: no RDMA here, which is no error
            return sorted(device.name.decode() for device in self.dev.get_device_list())
        return []

    def new_context(self, name: str) -> Any:
        return self.dev.Context(name=name)

    def global_only(self, attr: Any) -> bool:
        """``PortAttr.global_only``, of the package's attributes of a port."""
        return bool(attr.flags & _GRH_REQUIRED)

    def errno_of(self, error: Exception) -> int | None:
        """The errno behind an exception of the package; ``None`` if the exception does not come from a verb."""
        code = getattr(error, "error_code", None)
        return code if isinstance(code, int) else None

    def modify(self, native: Any, fields: dict[str, int], route: Route | None) -> None:
        """``ibv_modify_qp`` with exactly these fields, and with an address vector made of ``route``."""
        attr, mask = self.qp.QPAttr(), 0
        for field, value in fields.items():
            setattr(attr, field, value)
            mask |= at.QP_ATTR_MASK[field]
        if route is not None:
            attr.ah_attr = self._address(route)
            mask |= at.QP_ATTR_MASK["ah_attr"]
        native.modify(attr, mask)

    def _address(self, route: Route) -> Any:
        if not route.global_route:
            return self.addr.AHAttr(dlid=route.dlid, port_num=route.port, is_global=0)
        dgid = self.addr.GID(route.dgid.hex(":", 2))
        path = self.addr.GlobalRoute(dgid=dgid, sgid_index=route.sgid_index, hop_limit=HOP_LIMIT)
        return self.addr.AHAttr(dlid=route.dlid, port_num=route.port, is_global=1, gr=path)

    def new_domain(self, native: Any) -> Any:
        return self.pds.PD(native)

    def new_region(self, pd: Any, address: int, nbytes: int, access: int) -> Any:
        return self.mr.MR(pd, nbytes, access, address=address)

    def new_dma_buf_region(self, pd: Any, pd_address: int, fd: int, offset: int, nbytes: int, access: int) -> Any:
        """``pd_address``: the address of the ``ibv_pd``, for a package that has no class for it."""
        if not hasattr(self.mr, "DmaBufMR"):
            raise NotSupported("this pyverbs has no DmaBufMR", device="verbs", status="ENOSYS", hint="rdma-core 34 or newer")
        return self.mr.DmaBufMR(pd, nbytes, access, dmabuf=fd, offset=offset)

    def new_channel(self, native: Any) -> Any:
        return self.cq.CompChannel(native)

    def new_queue(self, native: Any, depth: int, channel: Any) -> Any:
        return self.cq.CQ(native, depth, None, channel, 0)

    def new_shared_queue(self, pd: Any, depth: int) -> Any:
        return self.srq.SRQ(pd, self.srq.SrqInitAttr(self.srq.SrqAttr(max_wr=depth, max_sge=1)))

    def new_queue_pair(self, pd: Any, cq: Any, srq: Any, depth: int, max_inline: int) -> tuple[Any, int, int]:
        """The object, and the depth and bytes inline that were granted."""
        cap = self.qp.QPCap(max_send_wr=depth, max_recv_wr=0, max_send_sge=1, max_recv_sge=0, max_inline_data=max_inline)
        wanted = self.qp.QPInitAttr(qp_type=at.QPT_RC, scq=cq, rcq=cq, srq=srq, cap=cap, sq_sig_all=0)
        pair = self.qp.QP(pd, wanted)
        return pair, wanted.max_send_wr, wanted.max_inline_data


class Ibverbs:
    """As ``Pyverbs``. Raises ``NotSupported`` where ibverbs cannot be imported, with the reason."""

    # The package does not say; adapters have as much in both directions.
    renamed: ClassVar = {"max_qp_init_rd_atom": "max_qp_rd_atom"}

    def __init__(self) -> None:
        try:
            self.package: Any = importlib.import_module("ibverbs")
        except ImportError as error:
            raise NotSupported(str(error), device="verbs", hint="pip install ibverbs (it needs libibverbs.so.1)") from None
        self.name = f"ibverbs {self.package.__version__} ({release()})"
        fork_init()

    def devices(self) -> list[str]:
        return sorted(self._found())

    def _found(self) -> dict[str, Any]:
        with suppress(OSError):  # no uverbs driver: no RDMA here, which is no error
            return {device.name: device for device in self.package.get_device_list()}
        return {}

    def new_context(self, name: str) -> Any:
        found = self._found().get(name)
        if found is None:
            raise NotSupported("libibverbs has no such device", device=name)
        return found.open()

    def global_only(self, attr: Any) -> bool:
        return LINK_LAYERS[attr.link_layer] == "INFINIBAND"  # the package does not say, and it never hurts

    def errno_of(self, error: Exception) -> int | None:
        return error.errno if isinstance(error, OSError) else None

    def modify(self, native: Any, fields: dict[str, int], route: Route | None) -> None:
        mask = sum(at.QP_ATTR_MASK[field] for field in fields)
        if route is None:
            native.modify(mask, **fields)
            return
        vector = self.package.AHAttr(
            dgid=route.dgid if route.global_route else None,
            sgid_index=route.sgid_index,
            dlid=route.dlid,
            is_global=int(route.global_route),
            port_num=route.port,
            hop_limit=HOP_LIMIT,
        )
        native.modify(mask | at.QP_ATTR_MASK["ah_attr"], ah_attr=vector, **fields)

    def new_domain(self, native: Any) -> Any:
        return native.alloc_pd()

    def new_region(self, pd: Any, address: int, nbytes: int, access: int) -> Any:
        return pd.reg_mr(address, nbytes, access)

    def new_dma_buf_region(self, pd: Any, pd_address: int, fd: int, offset: int, nbytes: int, access: int) -> Any:
        return DmaBufMR(library(), pd_address, nbytes, access, fd, offset)

    def new_channel(self, native: Any) -> Any:
        return native.create_comp_channel()

    def new_queue(self, native: Any, depth: int, channel: Any) -> Any:
        return native.create_cq(depth, channel)

    def new_shared_queue(self, pd: Any, depth: int) -> Any:
        return pd.create_srq(depth, 1)

    def new_queue_pair(self, pd: Any, cq: Any, srq: Any, depth: int, max_inline: int) -> tuple[Any, int, int]:
        sizes = {"max_send_wr": depth, "max_recv_wr": 0, "max_send_sge": 1, "max_recv_sge": 0, "max_inline_data": max_inline}
        pair = pd.create_qp(self.package.QPInitAttr(send_cq=cq, recv_cq=cq, srq=srq, **sizes))
        granted = pair.query()[1]
        return pair, granted.max_send_wr, granted.max_inline_data


Package = Pyverbs | Ibverbs


@functools.cache
def choose(wanted: str = "") -> Package:
    """pyverbs, else ibverbs; ``wanted``, or ``RDMARPC_VERBS=pyverbs`` or ``ibverbs``, names the one. ``NotSupported`` says for
    each why it cannot be used, and how to get it. One package a process: the first call that succeeds decides for the later
    ones."""
    wanted = wanted or os.environ.get("RDMARPC_VERBS", "")
    kinds: dict[str, type[Package]] = {"pyverbs": Pyverbs, "ibverbs": Ibverbs}
    if wanted and wanted not in kinds:
        raise NotSupported(f"RDMARPC_VERBS={wanted!r} names no provider", device="verbs", hint=f"one of {', '.join(kinds)}")
    refused = []
    for name in [wanted] if wanted else list(kinds):
        try:
            return kinds[name]()
        except RdmaError as error:
            refused.append(f"{name}: {error.message}" + (f" ({error.hint})" if error.hint else ""))
    raise NotSupported(
        "no Python package reaches libibverbs here: " + "; ".join(refused),
        device="verbs",
        hint="Debian, Ubuntu: apt install python3-pyverbs ibverbs-providers; anywhere: pip install ibverbs",
    )
