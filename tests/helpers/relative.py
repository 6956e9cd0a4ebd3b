"""What was recorded, with numbers of storages in the order in which they are met: what does the same is equal."""

from __future__ import annotations

import dataclasses
import itertools

from rdmarpc.graph.fragments import Event, Move, Operand, Recorded


def relative(recorded: Recorded) -> list[Event]:
    numbers: dict[int, int] = {}

    def renamed(operand: Operand) -> Operand:
        return dataclasses.replace(operand, storage=numbers.setdefault(operand.storage, len(numbers)))

    found: list[Event] = []
    for event in recorded.events:
        if isinstance(event, Move):
            operand = renamed(event.operand)
            found.append(dataclasses.replace(event, operand=operand, made=numbers.setdefault(event.made, len(numbers))))
        else:
            operands, results = tuple(map(renamed, event.operands)), tuple(map(renamed, event.results))
            found.append(dataclasses.replace(event, operands=operands, results=results))
    return found


def phases(recorded: Recorded) -> list[str]:
    return [phase for phase, _ in itertools.groupby(event.phase for event in recorded.events)]
