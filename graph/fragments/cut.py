"""The steps of what was recorded, and which of their copies every step makes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from .flow import Flow
from .records import BACKWARD, FORWARD, STEP, Move, Operation, Recorded


def steps(recorded: Recorded) -> list[Recorded]:
    """What was recorded, step by step. A step begins with the first forward after an optimizer's step; where no optimizer ran,
    with the first one after a backward. A forward at the end that ran in no module looks at results: it belongs to the step
    before."""
    events = recorded.events
    last = STEP if any(event.phase == STEP for event in events) else BACKWARD
    begins = [at for at, event in enumerate(events) if not at or (event.phase == FORWARD and events[at - 1].phase == last)]
    if len(begins) > 1 and all(event.phase == FORWARD and not getattr(event, "path", "") for event in events[begins[-1] :]):
        begins.pop()
    ends = [*begins[1:], len(events)]
    return [dataclasses.replace(recorded, events=events[begin:end]) for begin, end in zip(begins, ends)]


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
