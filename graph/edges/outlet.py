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

from ...transport import NotSupported, RdmaError, RemoteRegion, TransferTimeout
from ...transport.memory.sole import STORAGE_USES, storage_uses
from ..plan.place import Edge
from ..trace.devices import find
from ..wire.header import GATHERED, HEADER_BYTES, NONE, SEEN, SHARED, STRIDED, Header
from ..wire.layout import dense, strides
from ..wire.tail import Tail, tail_bytes
from . import observer, staging
from .gaps import Copies, runs
from .strided import MOST, flat, landing, lay_out, span

if TYPE_CHECKING:
    from ...transport import Channel, Device, Transfer, Work
    from .berth import Berth

_ASKS = 4
"""How often a slot that is not mapped is READ for a move that has not come."""
_LAYOUTS = 16
"""Prepared writes of payloads with gaps that a slot keeps."""
_STAGED_MOST = 64 << 20
"""Bytes up to which memory is copied rather than registered for one write (as ``verbs`` does)."""
_UNKNOWN = "memory that the adapter does not know"


class Target:
    """One slot at the consumer, as the sender sees it: two prepared writes, with and without payload.

    A source is let go as soon as it has been written: it may lie in a slot itself, whose credit somebody waits for. ``free``
    takes two things: the consumer's credit, and that no tensor here lies in the slot any more (``reserve``).
    """

    __slots__ = (
        "_address",
        "_asks",
        "_bare",
        "_bound",
        "_capacity",
        "_credit",
        "_fetched",
        "_full",
        "_gaps",
        "_gpu",
        "_head",
        "_header",
        "_lease",
        "_mapped",
        "_number",
        "_place",
        "_ranges",
        "_registers",
        "_room",
        "_seen",
        "_spread",
        "_stage",
        "_tail",
        "_work",
        "_writing",
        "next",
        "outlet",
        "source",
    )

    def __init__(self, outlet: Outlet, head: RemoteRegion, room: RemoteRegion, number: int) -> None:
        """``room``: what is behind the header, or the payload elsewhere."""
        self.outlet = outlet
        device, edge = outlet.device, outlet.edge
        self._header = device.empty(HEADER_BYTES, dtype=torch.uint8)
        self._head = memoryview(self._header.numpy())
        self._number = number
        self._bound: Transfer | Copies | None = None
        """The transfer that has a source."""
        self._stage: torch.Tensor | None = None
        self._fetched: torch.Tensor | None = None
        self._spread: torch.Tensor | None = None
        """Registered memory in which a payload with gaps is laid out as it is to land."""
        self._asks = _ASKS
        self._seen = False
        """Whether the consumer may offer larger slots with the next credit: what was written said so (``header.SEEN``)."""
        self._place: torch.Tensor | None = None
        if edge.nbytes and outlet.staging:
            self._stage = device.empty(edge.nbytes, dtype=torch.uint8)
        self.next: tuple[RemoteRegion, RemoteRegion] | None = None
        """Where the slot is from the next write on, if it has moved: head and room."""
        self._reach(head, room)
        if edge.nbytes and edge.origin and outlet.direct:
            self._from_gpu(find(edge.origin))
        self._work: Work | None = None
        self.source: torch.Tensor | None = None
        """What is being written."""
        self._credit, self._writing = True, False
        self._lease: weakref.ref[memoryview] | None = None
        self._address = 0

    def _reach(self, head: RemoteRegion, room: RemoteRegion) -> None:
        """Prepare the writes into a slot that lies there."""
        edge, channel = self.outlet.edge, self.outlet.channel
        pair, payload = (head, self._header), room[: edge.nbytes]
        self._ranges, self._room = (pair, payload, self._number), room
        self._bare = channel.prepare([pair], notify=self._number)
        self._full: Transfer = self._bare
        self._gpu: dict[torch.device, Transfer] = {}
        self._gaps: dict[tuple[tuple[int, ...], tuple[int, ...]], Copies] = {}
        """By the strides of the payload here, and there."""
        self._mapped = None
        self._tail: Tail | None = None
        self._registers = False
        self._capacity = max(0, room.nbytes - tail_bytes(len(edge.shape), edge.depth))
        if not edge.nbytes:
            return
        # Has the right size, is never sent and never touched, so it takes no memory.
        idle = torch.empty(edge.nbytes, dtype=torch.uint8)
        self._full = channel.prepare([pair, (payload, idle)], notify=self._number)
        self._full.unbind(1)
        if self.outlet.staging:
            return
        self._mapped = channel.map(room)
        self._registers = self._mapped is None and channel.registered_only
        if self._mapped is not None:
            self._tail = Tail(self._mapped.memory[self._capacity :], len(edge.shape))

    def move(self) -> None:
        """The slot is free: use it where it is now."""
        assert self.next is not None
        where, self.next = self.next, None
        self._reach(*where)

    def moved(self) -> list[RemoteRegion]:
        """Where all slots of the edge are, if the consumer has said so here, after a payload that lacked room. A slot that is
        not mapped is READ for that."""
        if not self._seen:
            return []
        edge, self._seen = self.outlet.edge, False
        if self._tail is not None:
            return self._tail.moved(edge.depth)
        self._asks -= 1
        channel = self.outlet.channel
        try:
            memory = channel.empty(self._room.nbytes - self._capacity, dtype=torch.uint8)
            channel.memcpy(memory, self._room[self._capacity :]).wait(self.outlet.timeout)
        except TransferTimeout:
            raise
        except RdmaError:
            return []  # a connection that has ended is noticed elsewhere
        return Tail(memoryview(memory.numpy()), len(edge.shape)).moved(edge.depth)

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
        if header.flags & STRIDED:
            self._write_strided(header, payload)
            return
        full, here = self._full, payload.is_cpu
        if self._stage is not None or not (here or self.outlet.direct):
            payload = self._staged(payload, "it lies on an accelerator")
        elif here and self._unknown(payload) and payload.nbytes <= _STAGED_MOST:
            payload = self._staged(payload, _UNKNOWN)
        elif not here:
            full = self._from_gpu(payload.device)
        full.rebind(1, payload)
        self._bound, self.source = full, payload
        seen = observer.current if self.outlet.direct else None
        self._work = full.post() if seen is None else self._observed(seen, full, header, here)
        self.release()

    def _write_strided(self, header: Header, payload: torch.Tensor) -> None:
        """A payload with gaps, or with elements that are read more than once: one copy into the mapped slot. Elsewhere gaps are
        left out by a copy."""
        edge = self.outlet.edge
        if self._mapped is None or self._tail is None:
            self._send_strided(header, payload)
            return
        whole, given = flat(payload), landing(edge.shape, payload.stride())
        fits = whole is not None or span(edge.shape, given) * edge.dtype.itemsize <= self._capacity
        self._mapped.begin()
        try:
            count = (self._capacity if fits else edge.nbytes) // edge.dtype.itemsize
            room = torch.frombuffer(self._mapped.memory, dtype=edge.dtype, count=count)
            if whole is not None:
                room[: len(whole)].copy_(whole)
            elif fits:
                lay_out(payload, room, given)
            else:
                room.view(edge.shape).copy_(payload)
            self._tail.write_strides(given)
        finally:
            self._mapped.end()
        if not fits:
            self._seen = True
            header = header._replace(flags=header.flags | GATHERED | SEEN)
        header.write(self._head)
        self._work = self._bare.post()

    def _send_strided(self, header: Header, payload: torch.Tensor) -> None:
        """The slot is not mapped: a payload with gaps is written from where it lies (``gaps``), or from a copy that is laid out
        as it is to land. Where the slot has no room for the gaps, the copy leaves them out."""
        outlet, edge, size = self.outlet, self.outlet.edge, payload.element_size()
        given = landing(edge.shape, payload.stride())
        count = span(edge.shape, given)
        if self._stage is not None and (whole := flat(payload)) is not None:
            staged = self._stage[: whole.numel() * size].view(payload.dtype).copy_(whole)
            payload = staged.as_strided(payload.shape, payload.stride())
        elif self._stage is not None or count * size > self._capacity:
            grows = self._stage is None and self._asks > 0 and count * size <= MOST * edge.nbytes
            payload, flags = self._gathered(payload), GATHERED | (SEEN if grows else 0)
            header, self._seen = header._replace(flags=header.flags | flags), grows
        elif self._unknown(payload) or runs(edge.shape, payload.stride(), given, size) is None:
            outlet.count_staged(_UNKNOWN if self._unknown(payload) else "short runs between wide gaps")
            if self._spread is None or self._spread.numel() < count * size:
                self._spread = outlet.device.empty(count * size, dtype=torch.uint8)
            room = self._spread[: count * size].view(payload.dtype)
            lay_out(payload, room, given)
            payload = room.as_strided(edge.shape, given)
        header.write(self._head)
        copies = self._copies(payload, given)
        self._bound, self.source = copies, payload
        self._work = copies.post(payload)
        self.release()

    def _unknown(self, payload: torch.Tensor) -> bool:
        """Whether the adapter would have to be told of this memory first."""
        if not self.outlet.channel.registered_only:
            return False
        nbytes = span(payload.shape, payload.stride()) * payload.element_size()
        return self.outlet.device.arena.find(payload.data_ptr(), nbytes) is None

    def _gathered(self, payload: torch.Tensor) -> torch.Tensor:
        """A copy in registered memory of ours, in row-major order; until the next one."""
        outlet = self.outlet
        stage = self._fetched if self._stage is None else self._stage
        if stage is None:
            stage = self._fetched = outlet.device.empty(outlet.edge.nbytes, dtype=torch.uint8)
        if self._stage is None:  # else it was counted when it was given to us
            outlet.count_staged("no room for its gaps in the slot")
        return stage.view(payload.dtype).view(payload.shape).copy_(payload)

    def _copies(self, payload: torch.Tensor, given: tuple[int, ...]) -> Copies:
        """The write of a payload that lies so, and lands with the strides ``given`` behind it."""
        edge, key = self.outlet.edge, (payload.stride(), given)
        if key not in self._gaps:
            if len(self._gaps) >= _LAYOUTS:
                self._gaps.clear()
            there = payload.stride() if payload.is_contiguous() else given
            found = runs(edge.shape, payload.stride(), there, payload.element_size())
            assert found is not None
            pair, _, number = self._ranges
            self._gaps[key] = Copies(
                self.outlet.channel, self.outlet.device, pair, self._room, self._capacity, given, found, number
            )
        return self._gaps[key]

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

    def _staged(self, payload: torch.Tensor, why: str) -> torch.Tensor:
        """A copy in registered memory of ours; until the next one."""
        outlet = self.outlet
        stage = self._fetched if self._stage is None else self._stage
        if stage is None:
            stage = self._fetched = outlet.device.empty(outlet.edge.nbytes, dtype=torch.uint8)
        if not outlet.staging:
            outlet.count_staged(why)
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
        if self._work is not None:
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
            view = memoryview(self._mapped.memory)[: self.outlet.edge.nbytes]
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
        """What is to be written, and its memory order; -1 for what none describes (``strided``)."""
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
            if parameter.grad is not None and parameter.grad.untyped_storage().data_ptr() in addresses:
                parameter.grad = parameter.grad.clone()
