"""The sender's half of an edge: one prepared write a slot, and the credits to use it.

What makes the payload may write it where it has to be (``reserve``, see ``work/production``): into the slot itself where that
is mapped here (shm), then ``send`` only announces it; into registered memory of ours where the device wants that (verbs), then
``send`` writes it from there. What lies on an accelerator is written from there where the channel can (``gpu_slot``), else by
way of host memory. ``staging`` is the ablation of the paper (Xue et al., RDMA.cp): every payload is copied into a registered
buffer first, and counted."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ...transport import NotSupported, RdmaError, RemoteRegion
from ...transport.memory.sole import STORAGE_USES, storage_uses
from ..plan.place import Edge
from ..trace.values import cannot_cross, sparse
from ..wire.header import HEADER_BYTES, NONE, STRIDED, Header
from ..wire.layout import dense, strides
from .target import Target

if TYPE_CHECKING:
    from ...transport import Channel, Device
    from .berth import Berth


class Outlet:
    """Belongs to the thread of its station. Messages wait here, in order, when all slots are in use."""

    def __init__(self, station: Berth, edge: Edge, staging: bool) -> None:
        self.edge = edge
        self.device: Device = station.device
        self._station, self.staging = station, staging
        self.timeout = station.timeout
        self.channel: Channel = station.channel(edge.target)
        self.direct = self.channel.gpus
        """Whether what lies on an accelerator is written from there."""
        self._targets: list[Any] = []  # of one kind, see ``connect``
        self._waiting: deque[tuple[Header, torch.Tensor | None]] = deque()
        self._reserved: Target | None = None
        self.numbers = [station.ports.take(self.channel, self._credited(at)) for at in range(edge.depth)]

    def connect(self, slots: list[tuple[bytes, int]]) -> None:
        """The consumer's offer: descriptor and notification number of every slot."""
        for blob, number in slots:
            remote = RemoteRegion.load(blob[: RemoteRegion.WIRE_SIZE])
            there = blob[RemoteRegion.WIRE_SIZE :]  # of a payload that lies elsewhere
            room = RemoteRegion.load(there) if there else remote[HEADER_BYTES:]
            self._targets.append(Target(self, remote[:HEADER_BYTES], room, number))

    def count_staged(self, why: str) -> None:
        """A payload was copied besides its transfer."""
        self._station.count_staged(self.edge, self.edge.nbytes, why)

    def send(self, header: Header, payload: torch.Tensor | None = None) -> None:
        """Write header and payload into a free slot, now or as soon as there is one. The payload must stay unchanged until
        then. Without a payload the consumer gets ``None``."""
        _, sequence, flags, mode, commands, order, backward, argument = header
        if payload is None:
            flags |= NONE
        else:
            if payload.layout is not torch.strided:
                raise cannot_cross(f"{self.edge.kind} {self.edge.value} is", sparse(payload))
            # Detached: the prepared write keeps its source, and must not keep an autograd graph with it.
            payload, order = self._prepare(payload.detach())
            if order < 0:
                flags, order = flags | STRIDED, 0
        header = Header(self.edge.number, sequence, flags, mode, commands, order, backward, argument)
        if payload is not None and self._reserved is not None and not flags & STRIDED and self._reserved.holds(payload):
            self._reserved.announce(header)
            self._reserved = None
            self.device.count("bytes_produced", self.edge.nbytes)
            return
        self._waiting.append((header, payload))
        self.flush()

    def reserve(self, shape: Sequence[int], strides: Sequence[int]) -> torch.Tensor | None:
        """Memory for the next payload, of a free slot or registered for one, to be written and then given to ``send``.
        ``None`` where the device cannot, or while slots are short: one is always left for payloads that are copied, so a
        producer that keeps its tensors for ever cannot block the edge."""
        taken = sum(target.leased for target in self._targets)
        if self._waiting or self._reserved is not None or taken + 1 >= len(self._targets):
            return None
        target = next((target for target in self._targets if target.free and target.producible), None)
        if target is None:
            return None
        self._reserved = target
        if target.next is not None:
            target.move()
        return target.reserve(self.edge.dtype, shape, strides, self._station.freed)

    def cancel(self) -> None:
        """What was reserved is not sent."""
        if self._reserved is not None:
            self._reserved.cancel()
            self._reserved = None

    def vacated(self, target: Target) -> None:
        """A tensor in one of our slots has died."""
        target.vacate()
        self.flush()

    def leased(self) -> list[int]:
        """Positions of the slots that tensors here lie in at this moment."""
        return [at for at, target in enumerate(self._targets) if target.occupied]

    @property
    def producible(self) -> bool:
        """Whether payloads can be produced in place."""
        return any(target.producible for target in self._targets)

    def flush(self) -> None:
        while self._waiting:
            for target in self._targets:
                if target.free:
                    break
            else:
                return
            header, payload = self._waiting.popleft()
            if target.next is not None:
                target.move()
            target.write(header, payload, self._station.timeout)

    def sources(self) -> list[torch.Tensor]:
        """What has not been read yet: it must stay as it is."""
        if self.direct:  # what was posted may be over by now
            for target in self._targets:
                target.release()
        read = [target.source for target in self._targets] + [payload for _, payload in self._waiting]
        return [source for source in read if source is not None]

    def forget(self, sequence: int) -> None:
        """Drop what waits for a slot and belongs to this forward."""
        self._waiting = deque(item for item in self._waiting if item[0].sequence != sequence)

    @property
    def idle(self) -> bool:
        """Whether nothing waits for a slot."""
        return not self._waiting

    def _prepare(self, payload: torch.Tensor) -> tuple[torch.Tensor, int]:
        """What is to be written, and its memory order; -1 for what none describes (``wire/strided``)."""
        edge = self.edge
        if payload.shape != edge.shape or payload.dtype != edge.dtype:
            raise NotSupported(
                f"{edge.value} is {tuple(payload.shape)} {payload.dtype}, but {edge.shape} {edge.dtype} was captured",
                hint="the shape of what crosses between workers must not depend on data",
            )
        found = dense(payload)
        if self.staging:
            self.count_staged('staging="always"')
        if found is not None and (found[1] == 0 or strides(edge.shape, found[1]) == payload.stride()):
            return found
        if payload.numel() == 0:
            return payload, 0  # nothing crosses, no strides either
        if payload.is_cpu and not edge.device and not payload.is_conj() and not payload.is_neg():
            return payload, -1
        if found is not None:
            return found
        if not self.staging:
            self.count_staged("its strides, on an accelerator" if edge.device or not payload.is_cpu else "a conjugate")
        return payload.resolve_conj().resolve_neg().contiguous(), 0

    def _follow(self, target: Target) -> None:
        """The slots have moved to larger memory, if the consumer says so in this one, which it gives back."""
        for other, remote in zip(self._targets, target.moved()):
            other.next = remote[:HEADER_BYTES], remote[HEADER_BYTES:]

    def _credited(self, at: int) -> Callable[[int], None]:
        def credited(count: int) -> None:
            target = self._targets[at]
            if count != 1 or not target.credited():
                raise RdmaError(f"a credit for a slot of edge {self.edge.number} that is free", peer=self.edge.target)
            if self.edge.static:
                self._follow(target)
            if self._waiting:
                self.flush()

        return credited


def keep_apart(outlets: Sequence[Outlet], parameters: Sequence[torch.Tensor]) -> None:
    """After a backward: give a parameter a gradient of its own where the one that it has is still to be read by a peer."""
    addresses = set()
    for outlet in outlets:
        for source in outlet.sources():
            storage = source.untyped_storage()
            if storage_uses(storage) > STORAGE_USES:
                addresses.add(storage.data_ptr())
    if addresses:
        for parameter in parameters:
            grad = parameter.grad
            if grad is not None and grad.layout is torch.strided and grad.untyped_storage().data_ptr() in addresses:
                parameter.grad = grad.clone()
