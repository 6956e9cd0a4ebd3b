"""Edges between real processes for very many steps, without autograd and without RPC: stations, and nothing above them.

Every payload follows from edge and sequence. The consumer compares all of it when it lands and again before it lets go of it;
it writes into what it may write into, keeps tensors for random times, and both ends dawdle. Each message comes once, in
whatever order the slots are seen. Whoever finds anything else raises, and the others end with it.
"""

from __future__ import annotations

import os
import random
import signal
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch
from cluster import TIMEOUT, connect
from forks import forks

from rdmarpc.graph.edges.slot import Inlet, Slot, take
from rdmarpc.graph.edges.station import Arrived, Fittings, Offer, Station
from rdmarpc.graph.outlets.outlet import Outlet
from rdmarpc.graph.plan.place import Edge, Placement
from rdmarpc.graph.wire.header import GATHERED, SEEN, SHARED, STRIDED, Header
from rdmarpc.transport import RdmaError, open_device

_PERIOD = 1 << 16
_AHEAD = 4
"""Messages that may wait for a slot."""


@dataclass(frozen=True)
class Line:
    """An edge and how it is used. ``after``: the position of the line whose message k is passed on as message k of this one:
    the very tensor that landed."""

    source: int
    target: int
    depth: int
    nbytes: int
    steps: int
    after: int | None = None
    lazy: float = 0.02
    """How often either end sleeps for a moment."""


@dataclass
class _Sender:
    line: Line
    pattern: int
    outlet: Outlet
    sent: int = 0
    ended: bool = False
    passing: dict[int, tuple[torch.Tensor, bool]] = field(default_factory=dict)
    """What has come on the line before, and goes on; and whether it is the last."""


@dataclass
class _Receiver:
    line: Line
    pattern: int
    seen: set[int] = field(default_factory=set)
    """Beyond ``low``: everything up to that has come."""
    low: int = 0
    last: int = -1
    """The last message, as soon as that is known."""
    held: list[tuple[int, int, torch.Tensor]] = field(default_factory=list)
    """(turn when it is dropped, sequence, tensor), for as long as it must read as it came."""
    next: _Sender | None = None


class Worker:
    """One process's ends of all lines."""

    def __init__(self, rank: int, lines: Sequence[Line], kind: str, seed: int) -> None:
        self.rank, self.lines = rank, lines
        self.chance = random.Random(seed * 100 + rank)
        largest = max(line.nbytes for line in lines)
        self.pool = torch.randint(
            0, 256, (largest + _PERIOD,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
        )
        self.device = open_device(kind)
        self.turn = 0
        self.checked = 0
        self.own: list[tuple[int, int, int, torch.Tensor]] = []
        """(turn when it is dropped, pattern, sequence, tensor) of what was made where it landed."""

    def set_up(self, pipe: Connection, size: int) -> None:
        pipe.send(self.device.address)
        channels = connect(self.device, f"w{self.rank}", self.rank, pipe.recv(), size)
        self.station = Station(f"w{self.rank}", self.device, channels.__getitem__, TIMEOUT)
        edges = [
            Edge(at + 1, "activation", str(at), f"w{line.source}", f"w{line.target}", (line.nbytes,), torch.uint8, line.depth)
            for at, line in enumerate(self.lines)
        ]
        placement = Placement(0, "w0", edges, None, [f"w{rank}" for rank in range(size)])
        self.receivers: dict[int, _Receiver] = {}
        fittings, offer = self.station.fit(placement, self._arrived)
        pipe.send(offer)
        self.station.connect(fittings, pipe.recv())
        self._assign(fittings)

    def _assign(self, fittings: Fittings) -> None:
        self.senders: list[_Sender] = []
        first = {at: at if line.after is None else line.after for at, line in enumerate(self.lines)}
        patterns = {at: self._origin(first, at) for at in first}
        for at, line in enumerate(self.lines):
            if line.target == self.rank:
                self.receivers[at + 1] = _Receiver(line, patterns[at])
        for at, line in enumerate(self.lines):
            if line.source == self.rank:
                sender = _Sender(line, patterns[at], fittings.outlets[at + 1])
                self.senders.append(sender)
                if line.after is not None:
                    self.receivers[line.after + 1].next = sender

    @staticmethod
    def _origin(first: dict[int, int], at: int) -> int:
        while first[at] != at:
            at = first[at]
        return at

    def _arrived(self, edge: Edge) -> Arrived:
        return self._landed

    def expected(self, pattern: int, sequence: int, nbytes: int) -> torch.Tensor:
        start = (pattern * 7919 + sequence * 40503) % _PERIOD
        return self.pool[start : start + nbytes]

    # -- the run

    def run(self, seconds: float) -> tuple[int, int, int]:
        """Returns how many messages were sent and received, and payloads compared."""
        idle_since = time.monotonic()
        self.ends_at = idle_since + seconds
        while not self._finished():
            self.turn += 1
            busy = self._send()
            self._let_go()
            if self.station.poll(0.0 if busy else 0.01) or busy:
                idle_since = time.monotonic()
            assert time.monotonic() - idle_since < TIMEOUT, f"nothing happens any more: {self._missing()}"
        received = sum(receiver.low for receiver in self.receivers.values())
        return sum(sender.sent for sender in self.senders), received, self.checked

    def _finished(self) -> bool:
        if any(receiver.low != receiver.last or receiver.held for receiver in self.receivers.values()):
            return False
        self.station.settle()
        return all(sender.ended for sender in self.senders) and all(
            target.free for sender in self.senders for target in sender.outlet._targets
        )

    def _missing(self) -> str:
        came = [f"line {number - 1}: {receiver.low} came" for number, receiver in self.receivers.items()]
        sent = [f"line {sender.outlet.edge.number - 1}: {sender.sent} sent" for sender in self.senders]
        return "; ".join(came + sent)

    def _send(self) -> bool:
        sent = False
        for sender in self.senders:
            line, number = sender.line, sender.sent + 1
            if sender.ended or len(sender.outlet._waiting) >= _AHEAD:
                continue
            if line.after is not None:
                if number not in sender.passing:
                    continue
                payload, sender.ended = sender.passing.pop(number)
            else:
                payload = self._make(sender, number)
                sender.ended = number == line.steps or time.monotonic() > self.ends_at
            self._dawdle(line)
            sender.outlet.send(Header(0, number, argument=int(sender.ended)), payload)
            sender.sent = number
            sent = True
        return sent

    def _make(self, sender: _Sender, number: int) -> torch.Tensor:
        """Sometimes where it is to land, where that is possible; and then it is kept for a while. Sometimes with gaps."""
        line = sender.line
        expected = self.expected(sender.pattern, number, line.nbytes)
        if line.nbytes and sender.outlet.producible and self.chance.random() < 0.5:
            reserved = sender.outlet.reserve((line.nbytes,), (1,))
            if reserved is not None:
                self.own.append((self.turn + self.chance.randrange(20), sender.pattern, number, reserved.copy_(expected)))
                return reserved
        if line.nbytes > 1 and self.chance.random() < 0.2:
            return torch.zeros(line.nbytes, self.chance.choice([2, 2, 2, 3]), dtype=torch.uint8)[:, 0].copy_(expected)
        return expected.clone()

    def _let_go(self) -> None:
        for receiver in self.receivers.values():
            for item in [item for item in receiver.held if item[0] <= self.turn]:
                self._compare(receiver.pattern, item[1], item[2])
                receiver.held.remove(item)
        for item in [item for item in self.own if item[0] <= self.turn]:
            self._compare(*item[1:])
            self.own.remove(item)

    def _landed(self, inlet: Inlet, slot: Slot, header: Header) -> None:
        receiver, sequence = self.receivers[header.edge], header.sequence
        line = receiver.line
        plain = header._replace(flags=header.flags & ~(SHARED | STRIDED | GATHERED | SEEN), argument=header.argument & ~1)
        assert plain == Header(header.edge, sequence), f"a torn header: {header}"
        assert sequence > receiver.low and sequence not in receiver.seen, f"{sequence} came twice"
        receiver.seen.add(sequence)
        if header.argument:
            receiver.last = sequence
        while receiver.low + 1 in receiver.seen:
            receiver.low += 1
            receiver.seen.discard(receiver.low)
        tensor = take(slot, header)
        assert tensor is not None
        self._dawdle(line)
        self._compare(receiver.pattern, sequence, tensor)
        if receiver.next is not None:
            receiver.next.passing[sequence] = tensor, bool(header.argument)
        pick = self.chance.random()
        if pick < 0.3:
            receiver.held.append((self.turn + self.chance.randrange(30), sequence, tensor))
        elif pick < 0.6 and receiver.next is None and not header.flags & SHARED:
            tensor.fill_(255)

    def _compare(self, pattern: int, sequence: int, tensor: torch.Tensor) -> None:
        self.checked += 1
        if not torch.equal(tensor, self.expected(pattern, sequence, tensor.numel())):
            raise AssertionError(f"payload {sequence} of line {pattern} is torn or stale")

    def _dawdle(self, line: Line) -> None:
        pick = self.chance.random()
        if pick < line.lazy / 20:
            time.sleep(self.chance.random() * 5e-3)
        elif pick < line.lazy:
            time.sleep(self.chance.random() * 2e-4)


def _main(rank: int, size: int, lines: Sequence[Line], kind: str, seed: int, seconds: float, pipe: Connection) -> None:
    torch.set_num_threads(1)
    worker = Worker(rank, lines, kind, seed)
    try:
        worker.set_up(pipe, size)
        result = ("done", worker.run(seconds))
    except RdmaError as error:
        result = (type(error).__name__, str(error))
    except BaseException:
        result = ("failed", traceback.format_exc())
    pipe.send(result)
    pipe.poll(TIMEOUT)  # nobody leaves before all have said what became of them
    worker.device.close()


def run(
    lines: Sequence[Line],
    *,
    kind: str = "shm",
    seed: int = 1,
    seconds: float = 60.0,
    timeout: float = 100.0,
    stops: Sequence[tuple[float, int, float]] = (),
    kill: tuple[float, int] | None = None,
) -> list[tuple[str, Any]]:
    """What became of every worker: ("done", (messages sent, messages received, comparisons)) or the name and text of its error.

    ``stops``: (after so many seconds, this worker is stopped, for so many seconds). ``kill``: (after so many seconds, this
    worker). After ``seconds`` each line makes one more message, its last: where many share a core, every wait costs a time
    slice."""
    size = 1 + max(max(line.source, line.target) for line in lines)
    running, outcomes = [], []
    try:
        for rank in range(size):
            ours, theirs = forks().Pipe()
            process = forks().Process(target=_main, args=(rank, size, lines, kind, seed, seconds, theirs), daemon=True)
            process.start()
            theirs.close()
            running.append((process, ours))
        _exchange([pipe for _, pipe in running])
        for after, rank, seconds in stops:
            time.sleep(after)
            os.kill(running[rank][0].pid, signal.SIGSTOP)
            time.sleep(seconds)
            os.kill(running[rank][0].pid, signal.SIGCONT)
        if kill is not None:
            time.sleep(kill[0])
            running[kill[1]][0].kill()
        deadline = time.monotonic() + timeout
        for rank, (_, pipe) in enumerate(running):
            try:
                assert pipe.poll(max(0.0, deadline - time.monotonic())), f"worker {rank} hangs"
                outcomes.append(pipe.recv())
            except (EOFError, ConnectionResetError):
                outcomes.append(("killed", ""))
        for _, pipe in running:
            try:
                pipe.send("all have ended")
            except OSError:
                pass
        for process, _ in running:
            process.join(10.0)
    finally:
        for process, pipe in running:
            process.kill()
            process.join(5.0)
            pipe.close()
    return outcomes


def _exchange(pipes: list[Connection]) -> None:
    """Addresses, then the offers of all."""
    for merge in (lambda told: told, _merged):
        told = []
        for pipe in pipes:
            assert pipe.poll(TIMEOUT), "a worker does not start"
            told.append(pipe.recv())
        for pipe in pipes:
            pipe.send(merge(told))


def _merged(offers: list[Offer]) -> Offer:
    merged = Offer()
    for offer in offers:
        merged.add(offer)
    return merged


def straight(steps: int) -> list[Line]:
    """Two workers, every depth, either way, from nothing to 64 KiB and once a while megabytes; about ``steps`` in all."""
    unit = steps // 16
    return [
        Line(0, 1, 3, 100, 8 * unit),
        Line(1, 0, 3, 1000, 4 * unit),
        Line(0, 1, 2, 0, unit),
        Line(1, 0, 1, 8, unit),
        Line(0, 1, 2, 65536, unit, lazy=0.1),
        Line(1, 0, 2, 4096, unit, lazy=0.1),
        Line(0, 1, 2, 3 << 20, max(1, unit // 50)),
    ]


def mixed(steps: int) -> list[Line]:
    """Lines of all depths and sizes among three workers, and what lands is passed on around in both directions; ``steps`` for
    each of the small ones."""
    return [
        Line(0, 1, 1, 8, steps),
        Line(0, 1, 2, 0, steps),
        Line(1, 0, 3, 100, steps),
        # around, and the other way around: what lands is what goes on
        Line(0, 1, 2, 4096, steps // 2),
        Line(1, 2, 1, 4096, steps // 2, after=3),
        Line(2, 0, 3, 4096, steps // 2, after=4),
        Line(2, 1, 3, 1000, steps // 2),
        Line(1, 0, 1, 1000, steps // 2, after=6),
        Line(0, 2, 2, 1000, steps // 2, after=7),
        # a slow consumer, a fast producer, and the other way around
        Line(1, 2, 3, 65536, max(1, steps // 10), lazy=0.3),
        Line(2, 0, 2, 65536, max(1, steps // 10)),
        Line(0, 2, 2, 3 << 20, max(1, steps // 500)),
    ]
