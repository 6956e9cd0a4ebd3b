"""The second package, PyPI's ``ibverbs``: one wheel for every CPython from 3.9 on, which opens the system's libibverbs when
it is imported. It exports no addresses either; they are found as with pyverbs."""

from __future__ import annotations

import importlib
from typing import Any, ClassVar

from ..errors import NotSupported
from ..words import layout as at
from .attributes import Route
from .libibverbs import HOP_LIMIT, LINK_LAYERS, DmaBufMR, fork_init, library, release


class Ibverbs:
    """As ``pyverbs.Pyverbs``. Raises ``NotSupported`` where ibverbs cannot be imported, with the reason."""

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
        try:
            return {device.name: device for device in self.package.get_device_list()}
        except OSError:  # no uverbs driver: no RDMA here, which is no error
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
