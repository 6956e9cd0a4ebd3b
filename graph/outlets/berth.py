"""``Berth``: the part of a ``Station`` that the halves of its edges use."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Protocol

from .ports import Ports

if TYPE_CHECKING:
    from ...transport import Channel, Device
    from ..plan.place import Edge


class Berth(Protocol):
    """``timeout``: seconds that a wait may take; the rest as at the ``Station``."""

    device: Device
    timeout: float
    ports: Ports
    staged: set[tuple[str, str]]
    counts: Counter[str]

    def channel(self, worker: str, /) -> Channel: ...
    def freed(self, place: Any, /) -> None: ...
    def settle(self) -> None: ...
    def count_staged(self, edge: Edge, nbytes: int, why: str, /) -> None: ...
