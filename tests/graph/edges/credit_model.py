"""The credit protocol of ``graph/`` as a state machine, small enough to look at every state it can reach.

What ``docs/protocols.md`` (6) says, and nothing else: a sender with credits and a queue; a network whose pieces land in any
order before their notification, and whose notifications are counted and keep no order among slots; a consumer that opens what
landed, whose tensors die in any order and at any time. ``explore`` visits all states, breadth first, and raises ``Wrong`` for
the first one that breaks an invariant, with the shortest way there; then it makes sure that the end can be reached from each.

A *mutant* is the protocol with one rule left out. It stands for a mistake to be caught.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

STATIC, DIRECT, DYNAMIC = "static", "direct", "dynamic"
"""Direct: the sender's own tensor lies in the slot, but for the last slot that is free of such tensors. Dynamic: the slot has
metadata, the consumer READs the source."""
HEAD, LOAD = 1, 2
MUTANTS = {
    "credit at landing": "the credit goes back when the payload has landed, not when its last tensor dies",
    "notification before data": "a notification may count before all pieces of its write are there",
    "no rest": "numbers are used again with what has come for them uncounted",
    "no fence": "numbers are used again while notifications on them are under way",
    "credit twice": "a death counts twice",
    "credit alone": "a slot whose credit is back is written although the sender's own tensor lies in it",
    "all in place": "a sender that keeps its tensors may have them in all slots",
    "in place": "a consumer writes into a slot where the sender's own tensor lies",
    "early release": "the source of a dynamic edge may die before the consumer has read it",
    "no discard": "what is held of a discarded forward is not let go, and what comes of it is kept",
    "blocking send": "a worker whose message waits for a slot does nothing else until it is written",
}


class Wrong(AssertionError):
    """An invariant is broken. The message has the way there."""


class Edge(NamedTuple):
    """``messages`` go from worker to worker, in order, 1, 2, ... ``needs``: the message k is made when these edges have
    delivered theirs: (edge, distance), message ``k - distance``. ``keeps``: edges whose message k must have been made (by the
    consumer) before the tensor k can die: what autograd holds until the backward. ``drops``: (command, forward that it
    discards). ``hoards``: the sender's own tensors never die."""

    source: int
    target: int
    depth: int
    messages: int
    kind: str = STATIC
    needs: tuple[tuple[int, int], ...] = ()
    keeps: tuple[int, ...] = ()
    drops: tuple[tuple[int, int], ...] = ()
    hoards: bool = False


class Slot(NamedTuple):
    """0 is "no message" everywhere."""

    credit: bool = True
    """The sender may write it, as far as the consumer is concerned."""
    own: int = 0
    """The message whose tensor at the sender lies in the slot (direct), or is kept for the consumer's READ (dynamic)."""
    writing: int = 0
    missing: int = 0
    """The write under way, and which of its pieces have not landed."""
    head: int = 0
    load: int = 0
    """Which message header and payload are of; negative: changed in place by the consumer."""
    landed: int = 0
    """Notifications that have come and that the consumer has not looked at."""
    open: int = 0
    """The message whose tensor is used at the consumer."""
    due: bool = False
    """That tensor has died, the credit is not yet sent."""
    flying: int = 0
    returned: int = 0
    """Credits under way; credits that came and that the sender has not looked at."""


class Line(NamedTuple):
    """One edge's state."""

    made: int
    waiting: tuple[int, ...]
    slots: tuple[Slot, ...]
    delivered: int = 0
    """Bit k: the consumer has had message k."""
    plan: int = 1
    source_end: int = 0
    target_end: int = 0
    """0 alive, 1 retired, 2 removed."""


class State(NamedTuple):
    lines: tuple[Line, ...]
    dropped: tuple[int, ...]
    """For each worker bit f: it knows that forward f was discarded."""


class Model:
    """``plans``: so many times the edges are set up with the same numbers, each time for the same messages."""

    def __init__(self, edges: list[Edge], mutant: str = "", plans: int = 1) -> None:
        assert not mutant or mutant in MUTANTS
        self.edges, self.mutant, self.plans = edges, mutant, plans
        self.workers = 1 + max(max(edge.source, edge.target) for edge in edges)

    def start(self) -> State:
        lines = tuple(Line(0, (), (Slot(),) * edge.depth) for edge in self.edges)
        return State(lines, (0,) * self.workers)

    # -- what may happen next

    def steps(self, state: State) -> Iterator[tuple[str, State]]:
        for at, (edge, line) in enumerate(zip(self.edges, state.lines)):
            yield from self._sender(state, at, edge, line)
            for place in range(len(line.slots)):
                if line.slots.index(line.slots[place]) == place:  # of equal slots, one
                    yield from self._slot(state, at, edge, line, place)
            if self.plans > 1:
                yield from self._end_of_plan(state, at, edge, line)

    def _sender(self, state: State, at: int, edge: Edge, line: Line) -> Iterator[tuple[str, State]]:
        number = line.made + 1
        gone = state.dropped[edge.source]
        if number <= edge.messages and not line.source_end and not self._blocked(state, edge.source):
            skipped = gone >> number & 1 and not edge.drops
            if skipped:
                yield f"{at}: {number} is not made", put(state, at, line._replace(made=number))
            elif self._has(state, edge, number):
                made = put(state, at, line._replace(made=number, waiting=(*line.waiting, number)))
                for command, forward in edge.drops:
                    if command == number:
                        made = self._drop(made, edge.source, forward)
                yield f"{at}: {number} made", made
        if line.waiting:
            for place, slot in enumerate(line.slots):
                if slot.credit and (not slot.own or self.mutant == "credit alone"):
                    number = line.waiting[0]
                    if slot.own:
                        raise Wrong(f"edge {at}: {number} is written over the sender's tensor {slot.own}")
                    kept = edge.kind == DYNAMIC or (edge.kind == DIRECT and self._has_room(line))
                    own = number if kept else 0
                    written = slot._replace(credit=False, own=own, writing=number, missing=HEAD | LOAD)
                    yield (
                        f"{at}.{place}: {number} posted",
                        put(state, at, fit(line._replace(waiting=line.waiting[1:]), place, written)),
                    )
                    break  # equal slots: whichever is free

    def _has_room(self, line: Line) -> bool:
        return sum(bool(slot.own) for slot in line.slots) + 1 < len(line.slots) or self.mutant == "all in place"

    def _blocked(self, state: State, worker: int) -> bool:
        waits = any(line.waiting for edge, line in zip(self.edges, state.lines) if edge.source == worker)
        return waits and self.mutant == "blocking send"

    def _has(self, state: State, edge: Edge, number: int) -> bool:
        return all(
            number - distance < 1 or (state.lines[other].delivered | state.dropped[edge.source]) >> (number - distance) & 1
            for other, distance in edge.needs
        )

    def _drop(self, state: State, worker: int, forward: int) -> State:
        """A worker hears that a forward was discarded."""
        dropped = tuple(mask | (1 << forward) * (who == worker) for who, mask in enumerate(state.dropped))
        lines = []
        for edge, line in zip(self.edges, state.lines):
            if edge.source == worker and not edge.drops:
                line = line._replace(waiting=tuple(number for number in line.waiting if number != forward))
            lines.append(line)
        return State(tuple(lines), dropped)

    def _slot(self, state: State, at: int, edge: Edge, line: Line, place: int) -> Iterator[tuple[str, State]]:
        slot, mutant = line.slots[place], self.mutant
        name = f"{at}.{place}: "

        def to(**changes: object) -> State:
            return put(state, at, fit(line, place, slot._replace(**changes)))  # type: ignore[arg-type]

        # the network
        if slot.writing:
            if slot.missing & HEAD:
                yield name + "header lands", to(missing=slot.missing & ~HEAD, head=slot.writing)
            if slot.missing & LOAD:
                yield name + "payload lands", to(missing=slot.missing & ~LOAD, load=slot.writing)
            if not slot.missing:
                yield name + "write notified", to(writing=0, landed=slot.landed + 1)
            elif mutant == "notification before data" and not slot.landed:
                yield name + "write notified early", to(landed=1)
        if slot.flying:
            yield name + "credit counts", to(flying=slot.flying - 1, returned=slot.returned + 1)
        # the sender
        if slot.own and edge.kind == DIRECT and not slot.missing & LOAD and not edge.hoards:
            yield name + "the sender's tensor dies", to(own=0)
        if slot.own and edge.kind == DYNAMIC and mutant == "early release" and not slot.writing:
            yield name + "source let go", to(own=0)
        if slot.returned and line.source_end < 2:
            if slot.credit or slot.returned > 1:
                raise Wrong(f"edge {at}: a credit for a slot that is free")
            own = 0 if edge.kind == DYNAMIC else slot.own
            yield name + "credit taken", to(returned=0, credit=True, own=own)
        # the consumer
        if slot.landed and line.target_end < 2 and not self._blocked(state, edge.target):
            yield self._take(state, at, edge, line, place)
        shared = slot.own == slot.open  # the header says so
        if slot.open and slot.load == slot.open and (not shared or mutant == "in place") and edge.kind != DYNAMIC:
            yield name + "changed in place", to(load=-slot.open)
        if slot.open and self._may_die(state, edge, slot.open):
            died = to(open=0, due=mutant != "credit at landing")
            yield name + "last tensor dies", died
            if mutant == "credit twice" and not slot.flying:
                yield name + "last tensor dies", to(open=0, due=True, flying=1)
        if slot.due:
            sends = line.target_end == 0
            yield name + "credit posted", to(due=False, flying=slot.flying + sends)

    def _may_die(self, state: State, edge: Edge, number: int) -> bool:
        if state.dropped[edge.target] >> number & 1:
            return self.mutant != "no discard"
        return all(state.lines[other].made >= number for other in edge.keeps)

    def _take(self, state: State, at: int, edge: Edge, line: Line, place: int) -> tuple[str, State]:
        slot = line.slots[place]
        if slot.landed > 1 or slot.open or slot.due:
            raise Wrong(f"edge {at}: a write that nobody allowed")
        number = slot.head
        if number != slot.load:
            raise Wrong(f"edge {at}: torn, the header of {number} and the payload of {slot.load}")
        if number < 1 or line.delivered >> number & 1:
            raise Wrong(f"edge {at}: {number} came twice")
        discarded = state.dropped[edge.target] >> number & 1 and not edge.drops and self.mutant != "no discard"
        taken = slot._replace(landed=0)
        if discarded:
            taken = taken._replace(due=True)
        elif self.mutant == "credit at landing":
            taken = taken._replace(open=number, flying=slot.flying + 1)
        else:
            taken = taken._replace(open=number)
        after = put(state, at, fit(line._replace(delivered=line.delivered | 1 << number), place, taken))
        for command, forward in edge.drops:
            if command == number:
                after = self._drop(after, edge.target, forward)
        return f"{at}.{place}: {number} taken", after

    def _end_of_plan(self, state: State, at: int, edge: Edge, line: Line) -> Iterator[tuple[str, State]]:
        """Retire at both ends, in any order; then remove at both; then the next plan with the same numbers."""
        if line.plan < self.plans and not line.source_end and self._all_made(state, edge, line) and not line.waiting:
            yield f"{at}: the sender retires", put(state, at, line._replace(source_end=1))
        if line.plan < self.plans and not line.target_end and self._all_made(state, edge, line):
            yield f"{at}: the consumer retires", put(state, at, line._replace(target_end=1))
        both = line.source_end and line.target_end
        quiet = not any(slot.writing or slot.flying for slot in line.slots)
        if both and (quiet or self.mutant == "no fence"):
            rests = self.mutant != "no rest"
            if line.source_end == 1:
                slots = tuple(slot._replace(returned=0) for slot in line.slots) if rests else line.slots
                yield f"{at}: the sender removes", put(state, at, line._replace(source_end=2, slots=slots))
            if line.target_end == 1:
                slots = tuple(slot._replace(landed=0) for slot in line.slots) if rests else line.slots
                yield f"{at}: the consumer removes", put(state, at, line._replace(target_end=2, slots=slots))
        if line.source_end == 2 and line.target_end == 2:
            # New memory, old numbers: what still flies counts for the new plan. Old tensors keep the old memory.
            slots = tuple(Slot(landed=s.landed + bool(s.writing), flying=s.flying, returned=s.returned) for s in line.slots)
            yield f"{at}: the next plan", put(state, at, Line(0, (), tuple(sorted(slots)), plan=line.plan + 1))

    def _all_made(self, state: State, edge: Edge, line: Line) -> bool:
        """Every message is made, and delivered unless its forward was discarded: a plan has no pending forward."""
        settled = line.delivered | state.dropped[edge.source]
        return line.made == edge.messages and all(settled >> k & 1 for k in range(1, edge.messages + 1))

    # -- what must hold

    def check(self, state: State) -> None:
        for at, (edge, line) in enumerate(zip(self.edges, state.lines)):
            for slot in line.slots:
                if slot.open and abs(slot.load) != slot.open and edge.kind != DYNAMIC:
                    raise Wrong(f"edge {at}: {slot.open} is read while {slot.load} lies there")
                if slot.open and slot.writing and slot.missing:
                    raise Wrong(f"edge {at}: {slot.writing} is written under the tensor {slot.open}")
                if slot.landed and slot.missing != 0 and self.mutant != "notification before data":
                    raise Wrong(f"edge {at}: {slot.writing} is written over {slot.head}, which nobody has seen")
                if slot.own and edge.kind == DIRECT and not slot.missing & LOAD and slot.load != slot.own:
                    raise Wrong(f"edge {at}: the sender's tensor {slot.own} has become {slot.load}")
                if slot.open and edge.kind == DYNAMIC and slot.own != slot.open:
                    raise Wrong(f"edge {at}: the source of {slot.open} died before it was read")

    def finished(self, state: State) -> bool:
        """Everything was delivered or discarded, nothing is under way, and every slot may be written again."""
        for edge, line in zip(self.edges, state.lines):
            if line.plan < self.plans or line.waiting or line.made < edge.messages:
                return False
            gone = state.dropped[edge.source] | state.dropped[edge.target]
            if not all((line.delivered | gone) >> k & 1 for k in range(1, edge.messages + 1)):
                return False
            for slot in line.slots:
                idle = slot._replace(head=0, load=0, own=0 if edge.hoards else slot.own)
                if idle != Slot():
                    return False
        return True


def put(state: State, at: int, line: Line) -> State:
    return state._replace(lines=(*state.lines[:at], line, *state.lines[at + 1 :]))


def fit(line: Line, place: int, slot: Slot) -> Line:
    """Slots of one edge are alike, so their order does not matter: it is a smaller space without it."""
    if not slot.writing and not slot.landed and not slot.open and not slot.own:
        slot = slot._replace(head=0, load=0)  # nobody looks at what lies there
    return line._replace(slots=tuple(sorted((*line.slots[:place], slot, *line.slots[place + 1 :]))))


def explore(model: Model, limit: int) -> int:
    """Visit every state; returns how many there are. Raises ``Wrong``; ``AssertionError`` beyond ``limit`` states."""
    start = model.start()
    number = {start: 0}
    states = [start]
    came: list[tuple[int, str]] = [(0, "")]
    before: list[list[int]] = [[]]
    ends = []
    at = 0
    while at < len(states):
        state = states[at]
        try:
            model.check(state)
            moved = False
            for label, after in model.steps(state):
                moved = True
                known = number.get(after)
                if known is None:
                    known = number[after] = len(states)
                    states.append(after)
                    came.append((at, label))
                    before.append([])
                before[known].append(at)
            if model.finished(state):
                ends.append(at)
            elif not moved:
                raise Wrong("nothing can happen any more")
        except Wrong as wrong:
            raise Wrong(f"{wrong}\n{_way(came, at)}") from None
        assert len(states) <= limit, "more states than expected: make the case smaller"
        at += 1
    good = set(ends)
    while ends:
        for one in before[ends.pop()]:
            if one not in good:
                good.add(one)
                ends.append(one)
    stuck = next((one for one in range(len(states)) if one not in good), None)
    if stuck is not None:
        raise Wrong(f"from here the end cannot be reached\n{_way(came, stuck)}")
    return len(states)


def _way(came: list[tuple[int, str]], at: int) -> str:
    labels = []
    while at:
        at, label = came[at]
        labels.append(label)
    return "\n".join(reversed(labels))
