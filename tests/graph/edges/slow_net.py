"""Stations of ``graph/`` over a network that does nothing by itself: every piece of every write lands, every notification
counts, every poller wakes and every tensor dies only when it is told so. So the real classes go through any order of events.

``World.actions`` are what may happen next; ``World.step`` lets one happen and then looks at all tensors that anybody holds.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from rdmarpc.graph.edges.slot import Inlet, Slot, take
from rdmarpc.graph.edges.station import Arrived, Fittings, Offer, Station
from rdmarpc.graph.plan.place import Edge, Placement
from rdmarpc.graph.trace.sizes import FREE
from rdmarpc.graph.wire.header import SHARED, Header
from rdmarpc.transport import RemoteRegion
from rdmarpc.transport.channel import Work
from rdmarpc.transport.memory.arena import Arena, Pool, Segment

SHAPE = (4,)


def make_edge(number: int, static: bool, source: int, target: int, depth: int) -> Edge:
    shape = SHAPE if static else (FREE,)
    return Edge(number, "activation", f"value{number}", f"w{source}", f"w{target}", shape, torch.int64, depth)


class Post:
    """A write under way: copies that have not landed, then a notification; and the answer, by which the sender knows that it
    is over, after anything that the notification may have led to."""

    def __init__(self, net: Net, pieces: list[tuple[torch.Tensor, torch.Tensor]], record: tuple[str, str, int]) -> None:
        self.pieces: list[tuple[torch.Tensor, torch.Tensor] | None] = list(pieces)
        self.record, self._net = record, net
        self.counted = False
        self.sequence = Header.read(memoryview(pieces[0][1].numpy())).sequence if pieces else 0

    def land(self, at: int) -> None:
        piece = self.pieces[at]
        assert piece is not None
        destination, source = piece
        destination.copy_(source.view(torch.uint8).view(-1) if source.numel() else source)
        self.pieces[at] = None

    def count(self) -> None:
        self._net.records[self.record] = self._net.records.get(self.record, 0) + 1
        self.counted = True
        if not self.pieces:
            self.answer()

    def answer(self) -> None:
        self._net.posts.remove(self)

    # -- as a ``Work``

    def done(self) -> bool:
        return self not in self._net.posts

    def wait(self, timeout: float | None = None) -> None:
        assert self.counted, "a header is written again while its last write is under way"
        if not self.done():
            self.answer()


class Prepared:
    def __init__(self, channel: SlowChannel, pairs: list[Any], notify: int) -> None:
        self._channel, self._notify = channel, notify
        self._pairs = [(channel.net.at(remote), local) for remote, local in pairs]

    def rebind(self, index: int, tensor: torch.Tensor) -> None:
        self._pairs[index] = (self._pairs[index][0], tensor)

    def unbind(self, index: int) -> None:
        self.rebind(index, torch.empty(0, dtype=torch.uint8))

    def post(self) -> Post:
        net, channel = self._channel.net, self._channel
        post = Post(net, self._pairs, (channel.there, channel.here, self._notify))
        net.posts.append(post)
        return post


class Mapping:
    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memoryview(memory.numpy())

    def begin(self) -> None:
        pass

    def end(self) -> None:
        pass


class SlowChannel:
    """One end. Numbers are given out by the end where they arrive."""

    registered_only = gpus = False

    error = None

    def __init__(self, net: Net, here: str, there: str) -> None:
        self.net, self.here, self.there = net, here, there
        self._next = 16

    def empty(self, count: int, *, dtype: torch.dtype) -> torch.Tensor:
        return SlowDevice(self.net).empty(count, dtype=dtype)

    def take_numbers(self, count: int) -> int:
        self._next += count
        return self._next - count

    def prepare(self, pairs: list[Any], *, notify: int) -> Prepared:
        return Prepared(self, pairs, notify)

    def map(self, remote: RemoteRegion) -> Mapping | None:
        return Mapping(self.net.at(remote)) if self.net.mapped else None

    def memcpy(self, destination: torch.Tensor, source: RemoteRegion) -> Work:
        """A READ, at once: the sender is asked for nothing."""
        destination.view(torch.uint8).copy_(self.net.at(source))
        return Work()

    def fence(self, timeout: float | None = None) -> None:
        """What is under way from here arrives now."""
        for post in [post for post in self.net.posts if post.record[:2] == (self.there, self.here)]:
            for at, piece in enumerate(post.pieces):
                if piece is not None:
                    post.land(at)
            if not post.counted:
                post.count()
            if not post.done():
                post.answer()


class SlowPoller:
    """``wait`` gives the row that was chosen; whatever else has come is another choice."""

    def __init__(self, net: Net) -> None:
        self._net = net
        self.rows: list[tuple[str, str, int]] = [("", "", 0)]
        self.seen = [0]
        self.chosen = 0

    def add(self, channel: SlowChannel, imm: int) -> int:
        self.rows.append((channel.here, channel.there, imm))
        self.seen.append(self._net.records.get(self.rows[-1], 0))
        return len(self.rows) - 1

    def skip(self, row: int) -> None:
        self.seen[row] = self._net.records.get(self.rows[row], 0)

    def news(self) -> list[int]:
        return [row for row, record in enumerate(self.rows) if self._net.records.get(record, 0) > self.seen[row]]

    def wait(self, timeout: float) -> tuple[int, int]:
        row = self.chosen
        count = self._net.records[self.rows[row]] - self.seen[row]
        self.seen[row] += count
        return row, count

    def take(self) -> None:
        return None

    def kick(self) -> None:
        pass


class _Registered(NamedTuple):
    remote: RemoteRegion

    def export(self) -> bytes:
        return self.remote.dump()


def _no_segment(nbytes: int, pool: Pool) -> Segment:
    raise AssertionError("memory here is of the network")


class SlowDevice:
    name = "slow"

    def __init__(self, net: Net) -> None:
        self._net = net
        self.arena = Arena(_no_segment)  # which knows nothing of our memory

    def empty(self, count: int, *, dtype: torch.dtype) -> torch.Tensor:
        """Memory that is used for something else the moment that nobody *here* holds it any more."""
        array = np.full(count * dtype.itemsize, 0x55, np.uint8)
        view = memoryview(array)
        tensor = torch.frombuffer(view, dtype=dtype)
        self._net.arrays[tensor.data_ptr()] = array, weakref.ref(view)
        weakref.finalize(view, array.fill, 0x99)
        return tensor

    def register(self, tensor: torch.Tensor) -> _Registered:
        array, _ = self._net.arrays[tensor.data_ptr()]
        self._net.memory.append(torch.from_numpy(array))
        return _Registered(RemoteRegion(0, 0, len(self._net.memory) - 1, 0, 0, array.nbytes))

    def lend(self, tensor: torch.Tensor, channel: SlowChannel) -> RemoteRegion:
        return self.register(tensor).remote

    def can_lend(self, tensor: torch.Tensor, channel: SlowChannel) -> bool:
        return True

    def poller(self) -> SlowPoller:
        return SlowPoller(self._net)

    def count(self, name: str, amount: int = 1) -> None:
        pass

    def count_staged(self, nbytes: int) -> None:
        raise AssertionError("nothing here needs a staging copy")


class Net:
    def __init__(self, mapped: bool) -> None:
        self.mapped = mapped
        self.posts: list[Post] = []
        self.records: dict[tuple[str, str, int], int] = {}
        self.memory: list[torch.Tensor] = []
        self.arrays: dict[int, tuple[np.ndarray, weakref.ref[memoryview]]] = {}

    def at(self, remote: RemoteRegion) -> torch.Tensor:
        return self.memory[remote.region][remote.offset : remote.offset + remote.nbytes]


class Held(NamedTuple):
    """A tensor that somebody uses, and what must be in it."""

    tensor: torch.Tensor
    value: int
    shared: bool = False


Action = tuple[Any, ...]


class World:
    """``edges`` as (source, target, depth), each with ``messages`` to send in each of ``plans`` plans; or dynamic ones (not
    ``static``), with payloads of several sizes. ``mapped``: slots can be produced in. ``drops``: messages (edge, sequence) that
    may be discarded at any moment."""

    def __init__(
        self,
        edges: list[tuple[int, int, int]],
        messages: int,
        *,
        static: bool = True,
        mapped: bool = False,
        plans: int = 1,
        drops: tuple[tuple[int, int], ...] = (),
    ) -> None:
        self.net = Net(mapped)
        self.messages, self.plans, self.drops, self.static = messages, plans, drops, static
        self._shape = edges
        names = sorted({f"w{end}" for edge in edges for end in edge[:2]})
        channels = {(a, b): SlowChannel(self.net, a, b) for a in names for b in names if a != b}
        self.stations: dict[str, Any] = {
            name: Station(name, SlowDevice(self.net), self._channels_of(channels, name), 1.0)  # type: ignore[arg-type]
            for name in names
        }
        self.plan = 0
        self.opened: dict[tuple[int, int], Held] = {}
        self.own: dict[tuple[int, int], Held] = {}
        self.sources: dict[tuple[int, int], weakref.ref[memoryview]] = {}
        self._new_plan()

    @staticmethod
    def _channels_of(channels: dict[tuple[str, str], SlowChannel], name: str) -> Callable[[str], Any]:
        return lambda peer: channels[name, peer]

    def _new_plan(self) -> None:
        self.plan += 1
        base = 100 * self.plan
        self.edges = [make_edge(base + at, self.static, *edge) for at, edge in enumerate(self._shape)]
        placement = Placement(self.plan, "w0", self.edges, None, list(self.stations))
        self.fittings: dict[str, Fittings] = {}
        offers = Offer()
        for name, station in self.stations.items():
            self.fittings[name], offer = station.fit(placement, self._arrived)
            offers.add(offer)
        for name, station in self.stations.items():
            station.connect(self.fittings[name], offers)
        self.sent = dict.fromkeys((edge.number for edge in self.edges), 0)
        self.got: set[tuple[int, int]] = set()
        self.dropped: set[tuple[int, int]] = set()
        self.retired: set[str] = set()
        self.removed: set[str] = set()
        self.leased: dict[int, list[int]] = {}

    def _arrived(self, edge: Edge) -> Arrived:
        return self._landed

    def _landed(self, inlet: Inlet, slot: Slot, header: Header) -> None:
        key = (header.edge, header.sequence)
        assert key not in self.got, f"{key} came twice"
        self.got.add(key)
        if key in self.dropped:
            slot.close()
            return
        tensor = take(slot, header)
        assert tensor is not None
        self.opened[key] = Held(tensor, value_of(*key), bool(header.flags & SHARED))

    # -- what may happen

    def actions(self) -> list[Action]:
        found: list[Action] = []
        for edge in self.edges:
            number = self.sent[edge.number] + 1
            if number <= self.messages and edge.source not in self.retired:
                found.append(("send", edge.number, number))
                if self.net.mapped:
                    found.append(("produce", edge.number, number))
        for at, post in enumerate(self.net.posts):
            found.extend(("land", at, piece) for piece, left in enumerate(post.pieces) if left is not None)
            if not any(post.pieces):
                found.append(("answer" if post.counted else "count", at))
        for name, station in self.stations.items():
            found.extend(("poll", name, row) for row in station.poller.news())
            if station._freed:
                found.append(("settle", name))
        found.extend(("die", *key) for key in self.opened)
        found.extend(("own dies", *key) for key in self.own)
        found.extend(("scribble", *key) for key, held in self.opened.items() if held.value > 0 and not held.shared)
        for at, sequence in self.drops:
            number = self.edges[at].number
            if sequence <= self.sent[number] and (number, sequence) not in self.dropped:
                found.append(("drop", number, sequence))
        if self.plan < self.plans and self._all_settled():
            found.extend(("retire", name) for name in self.stations if name not in self.retired)
            if len(self.retired) == len(self.stations):
                found.extend(("remove", name) for name in self.stations if name not in self.removed)
        return found

    def _all_settled(self) -> bool:
        wanted = {(edge.number, sequence) for edge in self.edges for sequence in range(1, self.messages + 1)}
        return wanted <= self.got | self.dropped

    def step(self, action: Action) -> None:
        kind, *rest = action
        getattr(self, "_" + kind.replace(" ", "_"))(*rest)
        for key, held in (*self.opened.items(), *self.own.items()):
            found = held.tensor.tolist()
            assert found == [held.value] * len(found), f"after {action} {key} reads {found} instead of {held.value}"

    def _send(self, number: int, sequence: int) -> None:
        count = SHAPE[0] if self.static else sequence
        payload = self._outlet(number).device.empty(count, dtype=torch.int64).fill_(value_of(number, sequence))
        self.sources[number, sequence] = self.net.arrays[payload.data_ptr()][1]
        self._outlet(number).send(Header(0, sequence), payload)
        self.sent[number] = sequence

    def _produce(self, number: int, sequence: int) -> None:
        outlet, value = self._outlet(number), value_of(number, sequence)
        tensor = outlet.reserve(SHAPE, (1,))
        if tensor is None:
            self._send(number, sequence)
            return
        outlet.send(Header(0, sequence), tensor.fill_(value))
        self.own[number, sequence] = Held(tensor, value)
        self.sent[number] = sequence

    def _land(self, at: int, piece: int) -> None:
        self.net.posts[at].land(piece)

    def _count(self, at: int) -> None:
        self.net.posts[at].count()

    def _answer(self, at: int) -> None:
        self.net.posts[at].answer()

    def _poll(self, name: str, row: int) -> None:
        self.stations[name].poller.chosen = row
        self.stations[name].poll(0.0)

    def _settle(self, name: str) -> None:
        self.stations[name].settle()

    def _die(self, number: int, sequence: int) -> None:
        del self.opened[number, sequence]

    def _own_dies(self, number: int, sequence: int) -> None:
        del self.own[number, sequence]

    def _scribble(self, number: int, sequence: int) -> None:
        held = self.opened[number, sequence]
        held.tensor.neg_()
        self.opened[number, sequence] = held._replace(value=-held.value)

    def _drop(self, number: int, sequence: int) -> None:
        self.dropped.add((number, sequence))
        self._outlet(number).forget(sequence)
        self.opened.pop((number, sequence), None)

    def _retire(self, name: str) -> None:
        self.leased.update(self.stations[name].retire(self.fittings[name]))
        self.retired.add(name)

    def _remove(self, name: str) -> None:
        self.stations[name].remove(self.fittings[name], self.leased)
        self.removed.add(name)
        if len(self.removed) == len(self.stations):
            self._new_plan()
            gc.collect()  # the halves of an edge are circles; their slots' memory is used again now

    def _outlet(self, number: int) -> Any:
        edge = next(edge for edge in self.edges if edge.number == number)
        return self.fittings[edge.source].outlets[number]

    # -- the end

    def check_end(self) -> None:
        """Nothing can happen any more: everything has come, and every slot is free for its sender."""
        assert self.plan == self.plans
        assert not self.net.posts and self._all_settled()
        kept = [key for key, source in self.sources.items() if source() is not None]
        assert not kept, f"the sources of {kept} are not let go"
        for edge in self.edges:
            outlet = self._outlet(edge.number)
            assert outlet.idle and all(target.free for target in outlet._targets), f"slots of edge {edge.number} are lost"
            assert not any(slot.busy for slot in self.fittings[edge.target].inlets[edge.number].slots)

    def key(self) -> Any:
        """What tells two states apart, as far as anything that may happen goes."""
        news = tuple(
            (name, row, self.net.records[station.poller.rows[row]] - station.poller.seen[row])
            for name, station in self.stations.items()
            for row in station.poller.news()
        )
        posts = sorted(
            (post.record, post.sequence, post.counted, tuple(piece is not None for piece in post.pieces))
            for post in self.net.posts
        )
        ends = (self.plan, tuple(sorted(self.retired)), tuple(sorted(self.removed)))
        slots = tuple(
            (slot.busy, Header.read(slot.head).sequence)
            for name in self.stations
            for inlet in self.fittings[name].inlets.values()
            for slot in inlet.slots
        )
        freed = tuple(len(station._freed) for station in self.stations.values())
        free = tuple(
            (target.free, target.leased, getattr(target, "_credit", None))
            for name in self.stations
            for outlet in self.fittings[name].outlets.values()
            for target in outlet._targets
        )
        held = tuple(sorted((key, held.value) for key, held in self.opened.items()))
        sources = tuple(sorted(key for key, source in self.sources.items() if source() is not None))
        sets = (
            sources,
            tuple(sorted(self.got)),
            tuple(sorted(self.dropped)),
            tuple(sorted(self.own)),
            tuple(self.sent.values()),
        )
        return news, tuple(posts), ends, slots, freed, free, held, sets


def value_of(number: int, sequence: int) -> int:
    return 1000 * number + sequence
