"""Steps and fragments of what was recorded, with relative names: what is done again is equal to what was done before."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .flow import Flow
from .records import BACKWARD, FORWARD, STEP, Event, Move, Operand, Operation, Recorded


@dataclass(frozen=True, slots=True)
class Fragment:
    """Events of one phase in a row. In ``form`` storages are numbered in the order in which the fragment meets them, so equal
    forms do the same to other storages. ``storages``: their numbers in what was recorded. ``outside``: how many of them, by
    relative number, the fragment did not make."""

    phase: str
    form: tuple[Event, ...]
    storages: tuple[int, ...]
    outside: frozenset[int]


def steps(recorded: Recorded) -> list[Recorded]:
    """What was recorded, step by step. A step begins with the first forward after an optimizer's step; where no optimizer ran,
    with the first one after a backward. A forward at the end that ran in no module looks at results: it belongs to the step
    before."""
    events = recorded.events
    last = STEP if any(event.phase == STEP for event in events) else BACKWARD
    begins = [at for at, _ in _runs(events) if at == 0 or (events[at].phase == FORWARD and events[at - 1].phase == last)]
    if len(begins) > 1 and all(event.phase == FORWARD and not _path(event) for event in events[begins[-1] :]):
        begins.pop()
    ends = [*begins[1:], len(events)]
    return [dataclasses.replace(recorded, events=events[begin:end]) for begin, end in zip(begins, ends)]


def _path(event: Event) -> str:
    return event.path if isinstance(event, Operation) else ""


def fragments(recorded: Recorded) -> list[Fragment]:
    """The forwards, backwards and optimizer's steps, in order. Nothing lies between them."""
    return [_fragment(events) for _, events in _runs(recorded.events)]


def _runs(events: Sequence[Event]) -> Iterator[tuple[int, tuple[Event, ...]]]:
    begin = 0
    for at in range(1, len(events) + 1 if events else 0):
        if at == len(events) or events[at].phase != events[begin].phase:
            yield begin, tuple(events[begin:at])
            begin = at


def _fragment(events: tuple[Event, ...]) -> Fragment:
    numbers: dict[int, int] = {}
    made: set[int] = set()

    def relative(operand: Operand) -> Operand:
        return dataclasses.replace(operand, storage=numbers.setdefault(operand.storage, len(numbers)))

    form: list[Event] = []
    for event in events:
        if isinstance(event, Move):
            operand = relative(event.operand)
            target = numbers.setdefault(event.made, len(numbers))
            made.add(target)
            form.append(dataclasses.replace(event, operand=operand, made=target))
            continue
        operands = tuple(map(relative, event.operands))
        known = set(numbers.values())
        results = tuple(map(relative, event.results))
        made.update(result.storage for result in results if result.storage not in known)
        form.append(dataclasses.replace(event, operands=operands, results=results))
    outside = frozenset(range(len(numbers))) - made
    return Fragment(events[0].phase, tuple(form), tuple(numbers), outside)


# -- what is the same in every step


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
            shapes = {_shape(column[at][1]) if at < len(column) else None for column in columns}
            if len(shapes) > 1:
                found.add((key, at))
    return found


def _shape(move: Move) -> tuple[object, ...]:
    return move.operand.shape, move.operand.strides, move.operand.dtype


def repeats(recorded: Recorded) -> bool:
    """Whether all of its steps do the same: their fragments have the same forms."""
    forms = [[fragment.form for fragment in fragments(step)] for step in steps(recorded)]
    return all(form == forms[0] for form in forms)
