"""What was posted to command streams, as plain data, and as a data-flow graph: steps, who made and who reads each value, how
long it lives, bytes alive.

What was posted are operations, in order, and copies from one place to another. A *storage* is memory that tensors lie over. Its
number is its name at the worker where it lies; memory of the process that posts has a negative number. A copy of a storage at
another place is another storage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum


class Phase(StrEnum):
    """A step is an optimizer's, with all that runs without grad between a backward and the next forward."""

    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"


class Kind(StrEnum):
    """Of values: made in a forward, made in a backward, there before as a parameter or buffer, there before, made in an
    optimizer's step."""

    ACTIVATION = "activation"
    GRADIENT = "gradient"
    PARAMETER = "parameter"
    INPUT = "input"
    UPDATE = "update"


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor over a storage. Strides and offset in elements."""

    storage: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Operation:
    """An operator that ran at a place. ``written``: positions of the operands that it writes. ``results`` over storages of no
    operand are new. ``path``: the module in which it (of a backward: its forward) ran; "" where nobody knows."""

    place: str
    name: str
    operands: tuple[Operand, ...]
    written: tuple[int, ...]
    results: tuple[Operand, ...]
    phase: Phase
    path: str = ""

    @property
    def short(self) -> str:
        """Without namespace and overload: ``addmm``."""
        return self.name.partition("::")[2].partition(".")[0] or self.name

    def __str__(self) -> str:
        where = f"{self.path}: {self.short}" if self.path else f"{self.short}()"
        return f"backward of {where}" if self.phase == Phase.BACKWARD else where


@dataclass(frozen=True, slots=True)
class Move:
    """A copy of ``operand`` from place to place, which is storage ``made`` there. ``nbytes`` have crossed. ``name``: what the
    tensor is called, where that is known; of a gradient: what it is the gradient of. ``maker``: the operation that made it, if
    it is none that was recorded."""

    source: str
    target: str
    operand: Operand
    made: int
    nbytes: int
    phase: Phase
    name: str = ""
    maker: str = ""


Event = Operation | Move


@dataclass(frozen=True, slots=True)
class Recorded:
    """What one thread posted. ``sizes``: bytes of each storage. ``kinds``: of storages whose making was not recorded (those of
    no kind are inputs). ``here``: the place of the process that posted."""

    here: str
    events: tuple[Event, ...]
    sizes: Mapping[int, int] = field(default_factory=dict)
    kinds: Mapping[int, Kind] = field(default_factory=dict)


# -- the graph

Version = tuple[int, int]
"""A storage, and how often it was written before."""


@dataclass(frozen=True, slots=True)
class Life:
    """Of a storage: its place, and the first and last event (by number) that touches it. ``made``: the event that made it;
    ``None``: it was there before."""

    place: str
    made: int | None
    first: int
    last: int


class Flow:
    """The graph of ``recorded``. An edge leads from the event that wrote a version of a storage to one that reads it."""

    def __init__(self, recorded: Recorded) -> None:
        self.recorded = recorded
        self.edges: set[tuple[int, int]] = set()
        self.readers: dict[Version, list[int]] = {}
        """The events that read each version, in order."""
        self.writer: dict[Version, int] = {}
        """The event that wrote each version; none for what was there before."""
        self.lives: dict[int, Life] = {}
        self.moved: list[tuple[int, Move, Version]] = []
        """Each copy from place to place: its event, and the version that it took."""
        self._versions: Counter[int] = Counter()
        for number, event in enumerate(recorded.events):
            if isinstance(event, Move):
                self._move(number, event)
            else:
                self._operation(number, event)

    def _operation(self, number: int, event: Operation) -> None:
        known = {operand.storage for operand in event.operands}
        for operand in event.operands:
            self._read(number, operand.storage, event.place)
        for storage in dict.fromkeys(event.operands[at].storage for at in event.written):
            self._write(number, storage, event.place)
        for storage in dict.fromkeys(result.storage for result in event.results if result.storage not in known):
            self._write(number, storage, event.place)

    def _move(self, number: int, event: Move) -> None:
        storage = event.operand.storage
        self.moved.append((number, event, (storage, self._versions[storage])))
        self._read(number, storage, event.source)
        self._write(number, event.made, event.target)

    def _read(self, number: int, storage: int, place: str) -> None:
        version = storage, self._versions[storage]
        readers = self.readers.setdefault(version, [])
        if not readers or readers[-1] != number:
            readers.append(number)
        if version in self.writer:
            self.edges.add((self.writer[version], number))
        self._touch(number, storage, place, None)

    def _write(self, number: int, storage: int, place: str) -> None:
        self._touch(number, storage, place, number)
        self._versions[storage] += 1
        self.writer[storage, self._versions[storage]] = number

    def _touch(self, number: int, storage: int, place: str, made: int | None) -> None:
        life = self.lives.get(storage)
        self.lives[storage] = (
            Life(place, made, number, number) if life is None else Life(life.place, life.made, life.first, number)
        )

    # -- what a value is

    def allocator(self, storage: int) -> Event | None:
        """The event that allocated a storage, or that of which it is a copy; ``None``: it was there before."""
        event = self._maker(storage)
        while isinstance(event, Move):
            found = self._maker(event.operand.storage)
            if found is None:
                return event
            event = found
        return event

    def origin(self, storage: int) -> int:
        """The storage of which it is a copy, at last; itself if it is none."""
        while isinstance(event := self._maker(storage), Move):
            storage = event.operand.storage
        return storage

    def kind(self, storage: int) -> Kind:
        """What lies in a storage, by what made it."""
        origin = self.origin(storage)
        maker = self._maker(origin)
        if maker is not None:
            return {Phase.FORWARD: Kind.ACTIVATION, Phase.BACKWARD: Kind.GRADIENT}.get(maker.phase, Kind.UPDATE)
        return self.recorded.kinds.get(origin, Kind.INPUT)

    def _maker(self, storage: int) -> Event | None:
        life = self.lives.get(storage)
        return None if life is None or life.made is None else self.recorded.events[life.made]

    # -- copies

    def again(self) -> list[tuple[int, Move]]:
        """Copies of what had been copied to the same place, and was not written since: each but the first."""
        seen: set[tuple[object, ...]] = set()
        found = []
        for number, move, version in self.moved:
            operand = move.operand
            key = version, move.target, operand.shape, operand.strides, operand.offset, operand.dtype
            if key in seen:
                found.append((number, move))
            seen.add(key)
        return found

    def uses(self, move: Move) -> list[Event]:
        """The events that read a copy, as it came."""
        return [self.recorded.events[at] for at in self.readers.get((move.made, 1), ())]

    # -- memory

    def alive(self, place: str) -> Iterator[int]:
        """During each event, the bytes at ``place`` of all storages that were made in what was recorded, from the event that
        made it to the last one that touches it."""
        changes: Counter[int] = Counter()
        for storage, life in self.lives.items():
            if life.place == place and life.made is not None:
                nbytes = self.recorded.sizes.get(storage, 0)
                changes[life.first] += nbytes
                changes[life.last + 1] -= nbytes
        now = 0
        for number in range(len(self.recorded.events)):
            now += changes[number]
            yield now

    def peak(self, place: str) -> int:
        """The most of ``alive``."""
        return max(self.alive(place), default=0)

    @property
    def places(self) -> list[str]:
        """In the order in which they are met, the caller's first."""
        found = [self.recorded.here]
        for event in self.recorded.events:
            found += [event.source, event.target] if isinstance(event, Move) else [event.place]
        return list(dict.fromkeys(found))


# -- steps


def steps(recorded: Recorded) -> list[Recorded]:
    """What was recorded, step by step. A step begins with the first forward after an optimizer's step; where no optimizer ran,
    with the first one after a backward. A forward at the end that ran in no module looks at results: it belongs to the step
    before."""
    events = recorded.events
    last = Phase.STEP if any(event.phase == Phase.STEP for event in events) else Phase.BACKWARD
    forward = [event.phase == Phase.FORWARD for event in events]
    begins = [at for at in range(len(events)) if not at or (forward[at] and events[at - 1].phase == last)]
    if len(begins) > 1 and all(forward[begins[-1] :]) and not any(getattr(each, "path", "") for each in events[begins[-1] :]):
        begins.pop()
    ends = [*begins[1:], len(events)]
    return [replace(recorded, events=events[begin:end]) for begin, end in zip(begins, ends)]


def crossings(recorded: Recorded) -> dict[tuple[str, ...], list[tuple[int, Move]]]:
    """The copies of a step, each with the number of its event, by what they are: source, target, kind, name and maker. Copies
    of one key are told apart by order."""
    flow = Flow(recorded)
    found: dict[tuple[str, ...], list[tuple[int, Move]]] = {}
    for number, move, _ in flow.moved:
        maker = flow.allocator(move.operand.storage)
        made_by = str(maker) if isinstance(maker, Operation) else move.maker
        key = move.source, move.target, flow.kind(move.operand.storage), move.name, made_by
        found.setdefault(key, []).append((number, move))
    return found


def varying(recorded: Sequence[Recorded]) -> set[tuple[tuple[str, ...], int]]:
    """(key, number among those of that key) of the copies that are not made in each of these steps with the same shape, strides
    and dtype: dynamic ones. The others are static."""
    every = [crossings(step) for step in recorded]
    found = set()
    for key in dict.fromkeys(key for each in every for key in each):
        columns = [each.get(key, []) for each in every]
        for at in range(max(map(len, columns))):
            tensors = [column[at][1].operand if at < len(column) else None for column in columns]
            if len({each and (each.shape, each.strides, each.dtype) for each in tensors}) > 1:
                found.add((key, at))
    return found
