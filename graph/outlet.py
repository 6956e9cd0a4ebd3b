"""The sender's half of an edge: one prepared write a slot, and the credits to use it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..transport import NotSupported, RdmaError, RemoteRegion
from .header import HEADER_BYTES, NONE, Header
from .layout import dense
from .place import Edge

if TYPE_CHECKING:
    from ..transport import Channel, Transfer, Work
    from .station import Station


class Target:
    """One slot at the consumer, as the sender sees it: two prepared writes, with and without payload.

    A source is let go as soon as it has been written: it may lie in a slot itself, whose credit somebody waits for.
    """

    __slots__ = ("_bare", "_full", "_head", "_header", "_idle", "_work", "free")

    def __init__(self, station: Station, channel: Channel, edge: Edge, remote: RemoteRegion, number: int) -> None:
        self._header = station.device.empty(HEADER_BYTES, dtype=torch.uint8)
        self._head = memoryview(self._header.numpy())
        head = (remote[:HEADER_BYTES], self._header)
        self._bare = channel.prepare([head], notify=number)
        self._full: Transfer = self._bare
        self._idle: torch.Tensor | None = None
        if edge.nbytes:
            # Has the right size, is never sent and never touched, so it takes no memory.
            self._idle = torch.empty(edge.nbytes, dtype=torch.uint8)
            self._full = channel.prepare([head, (remote[HEADER_BYTES:], self._idle)], notify=number)
        self._work: Work | None = None
        self.free = True

    def write(self, header: Header, payload: torch.Tensor | None, timeout: float) -> None:
        if self._work is not None:
            self._work.wait(timeout)
        header.write(self._head)
        self.free = False
        if payload is None or payload.numel() == 0:
            self._work = self._bare.post()
        else:
            self._full.rebind(1, payload)
            self._work = self._full.post()
            self.release()

    def release(self) -> None:
        """Let go of the source, if the write is over."""
        if self._idle is not None and self._work is not None and self._work.done():
            self._full.rebind(1, self._idle)
            self._work = None


class Outlet:
    """Belongs to the thread of its station. Messages wait here, in order, when all slots are in use."""

    def __init__(self, station: Station, edge: Edge) -> None:
        self.edge = edge
        self._station = station
        self._channel: Channel = station.channel(edge.target)
        self._targets: list[Any] = []  # of one kind, see ``connect``
        self._waiting: deque[tuple[Header, torch.Tensor | None]] = deque()
        self.numbers = [station.ports.take(self._channel, self._credited(at)) for at in range(edge.depth)]

    def connect(self, slots: list[tuple[bytes, int]]) -> None:
        """The consumer's offer: descriptor and notification number of every slot."""
        for blob, number in slots:
            remote = RemoteRegion.load(blob)
            self._targets.append(Target(self._station, self._channel, self.edge, remote, number))

    def send(self, header: Header, payload: torch.Tensor | None = None) -> None:
        """Write header and payload into a free slot, now or as soon as there is one. The payload must stay unchanged until
        then. Without a payload the consumer gets ``None``."""
        if payload is None:
            header = header._replace(edge=self.edge.number, flags=header.flags | NONE)
        else:
            # Detached: the prepared write keeps its source, and must not keep an autograd graph with it. A gradient needs no
            # graph and stays the same object, or autograd could take it for nobody's and accumulate into it.
            payload, order = self._prepare(payload.detach() if payload.requires_grad else payload)
            header = header._replace(edge=self.edge.number, order=order)
        self._waiting.append((header, payload))
        self.flush()

    def flush(self) -> None:
        while self._waiting:
            target = next((target for target in self._targets if target.free), None)
            if target is None:
                return
            header, payload = self._waiting.popleft()
            target.write(header, payload, self._station.timeout)

    def forget(self, sequence: int) -> None:
        """Drop what waits for a slot and belongs to this forward."""
        self._waiting = deque(item for item in self._waiting if item[0].sequence != sequence)

    @property
    def idle(self) -> bool:
        """Whether nothing waits for a slot."""
        return not self._waiting

    def _prepare(self, payload: torch.Tensor) -> tuple[torch.Tensor, int]:
        edge = self.edge
        if tuple(payload.shape) != edge.shape or payload.dtype != edge.dtype:
            raise NotSupported(
                f"{edge.value} is {tuple(payload.shape)} {payload.dtype}, but {edge.shape} {edge.dtype} was captured",
                hint="the shape of what crosses between workers must not depend on data",
            )
        found = dense(payload)
        if found is None:
            self._station.device.count_staged(edge.nbytes)
            return payload.resolve_conj().resolve_neg().contiguous(), 0
        return found

    def _credited(self, at: int) -> Callable[[int], None]:
        def credited(count: int) -> None:
            target = self._targets[at]
            if count != 1 or target.free:
                raise RdmaError(f"a credit for a slot of edge {self.edge.number} that is free", peer=self.edge.target)
            target.free = True
            target.release()
            self.flush()

        return credited
