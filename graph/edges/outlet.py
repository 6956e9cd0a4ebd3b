"""The sender's half of an edge: one prepared write a slot, and the credits to use it.

What makes the payload may write it where it has to be (``reserve``, see ``work/production``): into the slot itself where that
is mapped here (shm), then ``send`` only announces it; into registered memory of ours where the device wants that (verbs), then
``send`` writes it from there. What lies on an accelerator is written from there where the channel can (``gpu_slot``), else by
way of host memory. ``staging`` is the ablation of the paper (Xue et al., RDMA.cp): every payload is copied into a registered
buffer first, and counted."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ...transport import NotSupported, RdmaError, RemoteRegion
from ...transport.memory.sole import STORAGE_USES, storage_uses
from ..plan.place import Edge
from ..trace.devices import find
from ..wire.header import HEADER_BYTES, NONE, SHARED, Header
from ..wire.layout import dense
from . import observer, staging

if TYPE_CHECKING:
    from ...transport import Channel, Device, Transfer, Work
    from .berth import Berth


class Target:
    """One slot at the consumer, as the sender sees it: two prepared writes, with and without payload.

    A source is let go as soon as it has been written: it may lie in a slot itself, whose credit somebody waits for. ``free``
    takes two things: the consumer's credit, and that no tensor here lies in the slot any more (``reserve``).
    """

    __slots__ = (
        "_address",
        "_bare",
        "_bound",
        "_credit",
        "_fetched",
        "_full",
        "_gpu",
        "_head",
        "_header",
        "_lease",
        "_mapped",
        "_place",
        "_ranges",
        "_registers",
        "_stage",
        "_work",
        "_writing",
        "outlet",
        "source",
    )

    def __init__(
        self, outlet: Outlet, station: Berth, channel: Channel, head: RemoteRegion, payload: RemoteRegion, number: int
    ) -> None:
        self.outlet = outlet
        edge = outlet.edge
        self._header = station.device.empty(HEADER_BYTES, dtype=torch.uint8)
        self._head = memoryview(self._header.numpy())
        pair = (head, self._header)
        self._ranges = (pair, payload, number)
        self._bare = channel.prepare([pair], notify=number)
        self._full: Transfer = self._bare
        self._bound: Transfer | None = None
        """The transfer that has a source."""
        self._gpu: dict[torch.device, Transfer] = {}
        self._stage: torch.Tensor | None = None
        self._fetched: torch.Tensor | None = None
        self._mapped = None
        self._place: torch.Tensor | None = None
        self._registers = False
        if edge.nbytes:
            # Has the right size, is never sent and never touched, so it takes no memory.
            idle = torch.empty(edge.nbytes, dtype=torch.uint8)
            self._full = channel.prepare([pair, (payload, idle)], notify=number)
            self._full.unbind(1)
            if edge.origin and outlet.direct:
                self._from_gpu(find(edge.origin))
            if outlet.staging:
                self._stage = station.device.empty(edge.nbytes, dtype=torch.uint8)
            else:
                self._mapped = channel.map(payload)
                self._registers = self._mapped is None and channel.registered_only
        self._work: Work | None = None
        self.source: torch.Tensor | None = None
        """What is being written."""
        self._credit, self._writing = True, False
        self._lease: weakref.ref[memoryview] | None = None
        self._address = 0

    @property
    def free(self) -> bool:
        return self._credit and self._lease is None

    @property
    def leased(self) -> bool:
        """Whether a tensor here lies in the slot, or has and the station does not know of its end yet."""
        return self._lease is not None

    @property
    def occupied(self) -> bool:
        return self._lease is not None and self._lease() is not None

    @property
    def producible(self) -> bool:
        return self._mapped is not None or self._registers

    def write(self, header: Header, payload: torch.Tensor | None, timeout: float) -> None:
        if self._work is not None:
            self._work.wait(timeout)
        header.write(self._head)
        self._credit = False
        if payload is None or payload.numel() == 0:
            self._work = self._bare.post()
            return
        full, here = self._full, payload.is_cpu
        if self._stage is not None or not (here or self.outlet.direct):
            payload = self._staged(payload)
        elif not here:
            full = self._from_gpu(payload.device)
        full.rebind(1, payload)
        self._bound, self.source = full, payload
        seen = observer.current if self.outlet.direct else None
        self._work = full.post() if seen is None else self._observed(seen, full, header, here)
        self.release()

    def _observed(self, seen: observer.Observer, full: Transfer, header: Header, here: bool) -> Work:
        """Post the write; a copy of an accelerator's, if it is one, is observed. ``here``: the payload lies on the CPU."""
        edge = self.outlet.edge
        gpu = edge.device if here else edge.origin
        if not gpu:
            return full.post()
        with seen.copy(edge, gpu, header.sequence) as copy:
            copy.work = full.post()
        return copy.work

    def _from_gpu(self, gpu: torch.device) -> Transfer:
        """The write from an accelerator: the first one prepares it."""
        found = self._gpu.get(gpu)
        if found is None:
            pair, payload, number = self._ranges
            idle = torch.empty(payload.nbytes, dtype=torch.uint8, device=gpu)
            found = self._gpu[gpu] = self.outlet.channel.prepare([pair, (payload, idle)], notify=number)
            found.unbind(1)
        return found

    def _staged(self, payload: torch.Tensor) -> torch.Tensor:
        """A copy in registered memory of ours; until the next one."""
        outlet = self.outlet
        stage = self._fetched if self._stage is None else self._stage
        if stage is None:
            stage = self._fetched = outlet.device.empty(outlet.edge.nbytes, dtype=torch.uint8)
        if not outlet.staging:
            outlet.device.count_staged(outlet.edge.nbytes)
        staging.to_host(payload, memoryview(stage.numpy()))
        return stage

    def release(self) -> None:
        """Let go of the source, if the write is over."""
        if self._work is not None and self._work.done():
            self._over()

    def _over(self) -> None:
        if self._bound is not None:
            self._bound.unbind(1)
        self._bound = self._work = self.source = None

    def credited(self) -> bool:
        """The consumer lets us use it again. ``False`` if it had never been used."""
        if self._credit:
            return False
        self._credit = True
        # The consumer has had it, so the write is over; on tcp its answer may come later than the credit, and nobody would
        # look again.
        self._over()
        return True

    # -- production in place

    def reserve(
        self, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int], died: Callable[[Target], None]
    ) -> torch.Tensor:
        """The slot's payload as a tensor over a storage of its own, to be written from now on. ``died`` hears of the end of
        that storage: on any thread, also from finalizers."""
        if self._mapped is not None:
            self._mapped.begin()
            view = memoryview(self._mapped.memory)
        else:
            if self._place is None:
                self._place = self.outlet.device.empty(self.outlet.edge.nbytes, dtype=torch.uint8)
            view = memoryview(self._place.numpy())
        self._writing = True
        self._lease = weakref.ref(view, lambda _: died(self))
        flat = torch.frombuffer(view, dtype=dtype)
        self._address = flat.data_ptr()
        return torch.empty(0, dtype=dtype).set_(flat.untyped_storage(), 0, shape, strides)

    def holds(self, payload: torch.Tensor) -> bool:
        """Whether the payload was written here already."""
        return self._writing and payload.untyped_storage().data_ptr() == self._address

    def announce(self, header: Header) -> None:
        """The payload is in place: say so, or write it from there."""
        self.cancel()
        self._credit = False
        if self._mapped is not None:
            header._replace(flags=header.flags | SHARED).write(self._head)
            self._work = self._bare.post()
            return
        if self._work is not None:
            self._work.wait(self.outlet.timeout)
        header.write(self._head)
        assert self._place is not None
        self._full.rebind(1, self._place)
        self._bound, self.source = self._full, self._place
        self._work = self._full.post()

    def cancel(self) -> None:
        """Nothing is written here any more."""
        if self._writing:
            self._writing = False
            if self._mapped is not None:
                self._mapped.end()

    def vacate(self) -> None:
        """The last tensor over the slot has died."""
        self._lease = None


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
            payload = RemoteRegion.load(there) if there else remote[HEADER_BYTES:]
            self._targets.append(Target(self, self._station, self.channel, remote[:HEADER_BYTES], payload, number))

    def send(self, header: Header, payload: torch.Tensor | None = None) -> None:
        """Write header and payload into a free slot, now or as soon as there is one. The payload must stay unchanged until
        then. Without a payload the consumer gets ``None``."""
        _, sequence, flags, mode, commands, order, backward, argument = header
        if payload is None:
            flags |= NONE
        else:
            # Detached: the prepared write keeps its source, and must not keep an autograd graph with it.
            payload, order = self._prepare(payload.detach())
        header = Header(self.edge.number, sequence, flags, mode, commands, order, backward, argument)
        if payload is not None and self._reserved is not None and self._reserved.holds(payload):
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
        edge = self.edge
        if payload.shape != edge.shape or payload.dtype != edge.dtype:
            raise NotSupported(
                f"{edge.value} is {tuple(payload.shape)} {payload.dtype}, but {edge.shape} {edge.dtype} was captured",
                hint="the shape of what crosses between workers must not depend on data",
            )
        found = dense(payload)
        if self.staging or found is None:
            self.device.count_staged(edge.nbytes)
        if found is None:
            return payload.resolve_conj().resolve_neg().contiguous(), 0
        return found

    def _credited(self, at: int) -> Callable[[int], None]:
        def credited(count: int) -> None:
            target = self._targets[at]
            if count != 1 or not target.credited():
                raise RdmaError(f"a credit for a slot of edge {self.edge.number} that is free", peer=self.edge.target)
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
            if parameter.grad is not None and parameter.grad.untyped_storage().data_ptr() in addresses:
                parameter.grad = parameter.grad.clone()
