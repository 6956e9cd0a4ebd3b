"""What a call of a group reads and writes, as flat contiguous memory of the host."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..transport.gpu.events import Event
from .staging import Staging, come, staged
from .tensors import Flat, check_places, literal, values


class Ends:
    """Of one call. ``source`` and ``target`` are called when it is made; ``begin`` and ``end`` by the thread that runs it."""

    def __init__(self, staging: Staging) -> None:
        self._staging = staging
        self._read: list[Event] = []
        self._writes: list[Callable[[], Event]] = []
        self._back: list[Callable[[], object]] = []
        self._kept: list[torch.Tensor] = []
        """Tensors that copies of a GPU may still read."""

    def source(self, tensor: torch.Tensor) -> Flat:
        """The values of a tensor, in its memory if they lie there. ``begin`` waits for them."""
        return self._fetched(tensor) if staged(tensor) else values(tensor)

    def target(self, tensor: torch.Tensor, *, read: bool = False) -> Flat:
        """Where a tensor's new values go: its memory if they may lie there, else a buffer that ``end`` copies into the tensor.
        ``read``: the values are read before."""
        plain = tensor.detach()
        if staged(plain):
            check_places([plain], "a collective")
            host = self._fetched(plain) if read else self._staging.host(plain)
            self._writes.append(self._staging.write(plain, host))
            return host
        if literal(plain):
            return plain.view(-1)
        check_places([plain], "a collective")
        buffer = values(plain).view(plain.shape) if read else torch.empty(plain.shape, dtype=plain.dtype, device="cpu")
        self._back.append(lambda: plain.copy_(buffer))
        return buffer.view(-1)

    def _fetched(self, tensor: torch.Tensor) -> Flat:
        host = self._staging.host(tensor)
        self._read.append(self._staging.read(tensor, host))
        self._kept.append(tensor)
        return host

    def begin(self, limit: float) -> None:
        """What the call reads is there. ``limit``: seconds. Raises ``TransferTimeout``, ``RdmaError``."""
        come(self._read, limit)
        self._kept.clear()

    def end(self, limit: float) -> None:
        """The exchange is over: what came goes to where it belongs, and is there when this returns. Raises as ``begin``."""
        for back in self._back:
            back()
        come([write() for write in self._writes], limit)
