"""Steps, fragments, data flow, lifetimes: against definitions written down plainly, on random streams."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from relative import phases, relative

from rdmarpc.graph.fragments import Event, Flow, Kind, Move, Operand, Operation, Phase, Recorded, steps, varying

FORWARD, BACKWARD, STEP = Phase
ACTIVATION, GRADIENT, PARAMETER, INPUT, UPDATE = Kind
PLACES = ("here", "w1", "w2")


def tensor(storage: int, *shape: int, offset: int = 0) -> Operand:
    return Operand(storage, shape or (4,), (1,) * len(shape or (4,)), "float32", offset)


def ran(
    place: str, reads: list[int], makes: list[int], phase: str = FORWARD, writes: tuple[int, ...] = (), name: str = "f"
) -> Operation:
    return Operation(place, f"aten::{name}", tuple(map(tensor, reads)), writes, tuple(map(tensor, makes)), phase)


def sent(source: str, target: str, storage: int, made: int, phase: str = FORWARD) -> Move:
    return Move(source, target, tensor(storage), made, 16, phase)


@st.composite
def streams(draw: Any) -> Recorded:
    """A random step, or several: what lies where is kept, so that every operation reads what is at its place."""
    at: dict[str, list[int]] = {place: [number] for number, place in enumerate(PLACES, 1)}
    events: list[Event] = []
    fresh = 10
    for phase in draw(st.lists(st.sampled_from([FORWARD, BACKWARD, STEP]), min_size=1, max_size=4)):
        for _ in range(draw(st.integers(1, 4))):
            place = draw(st.sampled_from(PLACES))
            operands = draw(st.lists(st.sampled_from(at[place]), min_size=1, max_size=3))
            if draw(st.booleans()):
                target = draw(st.sampled_from([other for other in PLACES if other != place]))
                events.append(sent(place, target, operands[0], fresh, phase))
                at[target].append(fresh)
                fresh += 1
                continue
            made = list(range(fresh, fresh + draw(st.integers(0, 2))))
            fresh += len(made)
            writes = tuple(draw(st.sets(st.integers(0, len(operands) - 1), max_size=1)))
            events.append(ran(place, operands, made, phase, writes, draw(st.sampled_from("fgh"))))
            at[place] += made
    sizes = {storage: draw(st.integers(0, 100)) for each in at.values() for storage in each}
    return Recorded("here", tuple(events), sizes, {1: PARAMETER})


def reads(event: Event) -> set[int]:
    return {event.operand.storage} if isinstance(event, Move) else {operand.storage for operand in event.operands}


def writes(event: Event) -> set[int]:
    if isinstance(event, Move):
        return {event.made}
    return {event.operands[at].storage for at in event.written} | {result.storage for result in event.results} - reads(event)


@given(streams())
def test_edges_lead_from_the_last_write_to_each_read(recorded: Recorded):
    events = recorded.events
    expected = set()
    for reader, event in enumerate(events):
        for storage in reads(event):
            writers = [at for at in range(reader) if storage in writes(events[at])]
            expected |= {(writers[-1], reader)} if writers else set()
    assert Flow(recorded).edges == expected


@given(streams())
def test_lives_and_bytes_alive(recorded: Recorded):
    flow, events = Flow(recorded), recorded.events
    touched: dict[int, list[int]] = {}
    for number, event in enumerate(events):
        for storage in reads(event) | writes(event):
            touched.setdefault(storage, []).append(number)
    assert {storage: (life.first, life.last) for storage, life in flow.lives.items()} == {
        storage: (min(at), max(at)) for storage, at in touched.items()
    }
    for place in PLACES:
        made = [storage for storage, life in flow.lives.items() if life.place == place and life.made is not None]
        expected = [
            sum(recorded.sizes[s] for s in made if flow.lives[s].first <= number <= flow.lives[s].last)
            for number in range(len(events))
        ]
        assert list(flow.alive(place)) == expected and flow.peak(place) == max(expected)
    assert all((life.made is None) == (storage <= 3) for storage, life in flow.lives.items())


@given(streams())
def test_kinds_and_allocators_follow_copies(recorded: Recorded):
    flow = Flow(recorded)
    for storage in flow.lives:
        origin, maker = storage, None
        while (maker := next((e for e in recorded.events if origin in writes(e) - reads(e)), None)) and isinstance(maker, Move):
            origin = maker.operand.storage
        if maker is None:
            assert flow.kind(storage) == (PARAMETER if origin == 1 else INPUT)
        else:
            assert flow.allocator(storage) is maker
            assert flow.kind(storage) == {FORWARD: ACTIVATION, BACKWARD: GRADIENT, STEP: UPDATE}[maker.phase]
        assert flow.origin(storage) == origin


@given(streams())
def test_what_is_copied_again_was_not_written_meanwhile(recorded: Recorded):
    found = {number for number, _ in Flow(recorded).again()}
    events = recorded.events
    for number, event in enumerate(events):
        if isinstance(event, Move):
            storage = event.operand.storage
            before = [
                at for at in range(number)
                if isinstance(other := events[at], Move) and (other.operand, other.target) == (event.operand, event.target)
                and not any(storage in writes(events[between]) for between in range(at, number))
            ]  # fmt: skip
            assert (number in found) == bool(before)


def training_step(base: int, size: int = 4) -> tuple[Event, ...]:
    """A parameter (1) at w1, an input (2) here, which is sent; the parameter is written in the step."""
    x = Move("here", "w1", tensor(2, size), base, 4 * size, FORWARD, "x")
    y = Operation("w1", "aten::mv", (tensor(1), tensor(base, size)), (), (tensor(base + 1, size),), FORWARD, "layer")
    home = Move("w1", "here", tensor(base + 1, size), base + 2, 4 * size, FORWARD)
    grad = ran("w1", [base + 1, base], [base + 3], BACKWARD, name="mv_backward")
    return x, y, home, grad, ran("w1", [1, base + 3], [], STEP, (0,), "add_")


def test_steps_are_cut_behind_the_optimizer():
    recorded = Recorded("here", (*training_step(10), *training_step(20), *training_step(30)))
    assert [step.events[0].made for step in steps(recorded)] == [10, 20, 30]  # type: ignore[union-attr]
    first, *others = map(relative, steps(recorded))
    assert all(other == first for other in others) and phases(recorded) == [FORWARD, BACKWARD, STEP] * 3
    two = (*training_step(10)[:4], *training_step(20)[:4])
    assert [len(step.events) for step in steps(Recorded("here", two))] == [4, 4]  # no optimizer: behind the backward
    micro = (*training_step(10)[:4], *training_step(20))
    assert [len(step.events) for step in steps(Recorded("here", micro))] == [9]
    looked = (*training_step(10), *training_step(20), ran("w1", [21], [29]))
    assert [len(step.events) for step in steps(Recorded("here", looked))] == [5, 6]
    assert steps(Recorded("here", ())) == []


def test_what_varies():
    same = [Recorded("here", training_step(base)) for base in (10, 20)]
    assert varying(same) == set()
    other = [*same, Recorded("here", training_step(30, 5))]
    assert {(source, target, name) for (source, target, _, name, _), _ in varying(other)} == {
        ("here", "w1", "x"),
        ("w1", "here", ""),
    }
    without = [*same, Recorded("here", training_step(30)[:2])]
    assert [key[:2] for key, _ in varying(without)] == [("w1", "here")]
