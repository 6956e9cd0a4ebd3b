"""The protocol of references under every order of events, and under very many random ones: see ``rref_world``."""

from __future__ import annotations

import random

import pytest
from rref_world import World

EVERY_ORDER = {
    "created, passed on, dropped": (
        [[], [("create", "a", 0), ("send", "a", 2, "b"), ("drop", "a")], [("drop", "b")]],
        {},
    ),
    "created and given up: the deletion overtakes the call": (
        [[], [("create", "a", 0), ("drop", "a")]],
        {},
    ),
    "a fetch overtakes the call": (
        [[], [("create", "a", 0), ("fetch", "a"), ("drop", "a")]],
        {},
    ),
    "back to the owner as an argument": (
        [[("drop", "b")], [("create", "a", 0), ("send", "a", 0, "b"), ("drop", "a")]],
        {},
    ),
    "the owner shares, and gets it back": (
        [[("own", "a"), ("send", "a", 1, "b"), ("drop", "a"), ("drop", "c")], [("result", "b", 0, "c"), ("drop", "b")]],
        {},
    ),
    "passed on twice, unconfirmed: the last one's messages may all come first": (
        [
            [("own", "a"), ("send", "a", 1, "b"), ("drop", "a")],
            [("result", "b", 2, "c"), ("drop", "b")],
            [("result", "c", 3, "d"), ("drop", "c")],
            [("drop", "d")],
        ],
        {},
    ),
    "created on oneself": (
        [[("create", "a", 0), ("send", "a", 1, "b"), ("drop", "a")], [("fetch", "b"), ("drop", "b")]],
        {},
    ),
    "a call to oneself with a reference to another's value": (
        [[], [("create", "a", 0), ("send", "a", 1, "b"), ("drop", "a"), ("drop", "b")]],
        {},
    ),
    "a message that never leaves": (
        [[("own", "a"), ("unsent", "a", 1), ("drop", "a")], [("create", "b", 0), ("unsent", "b", 2), ("drop", "b")], []],
        {},
    ),
    "the creator dies": (
        [[], [("create", "a", 0), ("send", "a", 2, "b"), ("drop", "a")], [("fetch", "b"), ("drop", "b")]],
        {"kills": [1]},
    ),
    "the owner dies": (
        [[], [("create", "a", 0), ("send", "a", 2, "b"), ("drop", "a")], [("drop", "b")]],
        {"kills": [0]},
    ),
    "who passes it on dies": (
        [[("own", "a"), ("send", "a", 1, "b"), ("drop", "a")], [("result", "b", 2, "c"), ("drop", "b")], [("drop", "c")]],
        {"kills": [1]},
    ),
    "the holder dies while the value is being made": (
        [[], [("create", "a", 0), ("result", "a", 2, "b"), ("drop", "a")], [("drop", "b")]],
        {"kills": [2]},
    ),
    "the last holder dies": (
        [[("own", "a"), ("send", "a", 1, "b"), ("drop", "a")], [("result", "b", 2, "c"), ("drop", "b")], [("drop", "c")]],
        {"kills": [2]},
    ),
}


def play(programs, options, path):
    """A world in which ``path`` has happened (numbers of actions)."""
    world = World(programs, **options)
    for choice in path:
        world.step(world.actions()[choice])
    return world


def explore(programs, options, limit):
    """Depth first through all orders, each state once. Gives the number of states and of ends seen."""
    seen, ends = set(), 0
    pending = [[]]
    while pending:
        path = pending.pop()
        world = play(programs, options, path)
        while True:
            world.check()
            key = world.key()
            if key in seen:
                break
            seen.add(key)
            assert len(seen) < limit, "more states than expected: make the case smaller"
            actions = world.actions()
            if not [action for action in actions if action[0] not in ("kill", "lose")]:
                world.check_end()
                ends += 1
                if not actions:
                    break
            pending.extend([*path, choice] for choice in range(1, len(actions)))
            path = [*path, 0]
            world.step(actions[0])
    return len(seen), ends


@pytest.mark.parametrize("case", EVERY_ORDER)
def test_every_order(case):
    programs, options = EVERY_ORDER[case]
    states, ends = explore(programs, options, 60_000)
    print(case, states, ends)
    assert states > 10 and ends


def random_programs(chooser, workers, operations):
    """Handles wander between workers; everybody drops all of theirs in the end."""
    programs = [[] for _ in range(workers)]
    held = [set() for _ in range(workers)]
    names = iter(range(10**6))
    for _ in range(operations):
        rank, to, new = chooser.randrange(workers), chooser.randrange(workers), f"h{next(names)}"
        name = chooser.choice(sorted(held[rank])) if held[rank] else None
        what = chooser.choice(["create", "own", "send", "send", "result", "result", "fetch", "unsent", "drop", "drop"])
        if what == "create":
            programs[rank].append(("create", new, to))
            held[rank].add(new)
        elif what == "own":
            programs[rank].append(("own", new))
            held[rank].add(new)
        elif name is None:
            continue
        elif what in ("send", "result"):
            programs[rank].append((what, name, to, new))
            held[to].add(new)
        elif what == "unsent":
            programs[rank].append(("unsent", name, to))
        else:
            programs[rank].append((what, name))
            if what == "drop":
                held[rank].discard(name)
    for rank in range(workers):
        programs[rank].extend(("drop", name) for name in sorted(held[rank]))
    return programs


def wander(chooser, programs, **options):
    """One random order of events. Gives the world at its end."""
    world = World(programs, **options)
    while True:
        actions = world.actions()
        quiet = [action for action in actions if action[0] != "kill"]
        if not quiet and not world.skip():
            break
        if not quiet:
            continue
        # Rarely does somebody die: most of what can go wrong needs time before and after.
        world.step(chooser.choice(actions if chooser.random() < 0.05 else quiet))
        world.check()
    world.check_end()
    return world


def wander_far(seed, **options):
    chooser = random.Random(seed)
    return wander(chooser, random_programs(chooser, 4, 60), **options)


def test_random_orders():
    worlds = [wander_far(seed) for seed in range(100)]
    assert sum(len(world.resumed) for world in worlds) > 300


def test_random_orders_and_deaths():
    worlds = [wander_far(seed, kills=[1, 2]) for seed in range(150)]
    assert sum(len(world.dead) for world in worlds) > 150


def test_a_link_in_the_middle_dies_before_the_owner_knew_it():
    """Too many orders for all of them. In some, the last holder is refused."""
    refused = 0
    for seed in range(1500):
        programs = [[], [("create", "a", 0), ("result", "a", 2, "b"), ("drop", "a")]]
        programs += [[("send", "b", 3, "c"), ("drop", "b")], [("drop", "c")]]
        world = wander(random.Random(seed), programs, kills=[2])
        refused += 3 in world.refused
    assert refused > 5
