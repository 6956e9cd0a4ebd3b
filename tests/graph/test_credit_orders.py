"""The real halves of edges under every order of events of small cases, and under many random ones of larger cases."""

from __future__ import annotations

import gc
import random

import pytest
from slow_net import World

SMALL = {
    "depth 1": {"edges": [(0, 1, 1)], "messages": 2},
    "depth 2": {"edges": [(0, 1, 2)], "messages": 2},
    "produced in the slot": {"edges": [(0, 1, 2)], "messages": 2, "mapped": True},
    "discarded": {"edges": [(0, 1, 1)], "messages": 2, "drops": ((0, 1),)},
    "two plans": {"edges": [(0, 1, 1)], "messages": 1, "plans": 2},
    "two plans, discarded": {"edges": [(0, 1, 1)], "messages": 1, "plans": 2, "drops": ((0, 1),)},
}
LARGE = {
    "one edge, depth 3": {"edges": [(0, 1, 3)], "messages": 12},
    "produced in the slots": {"edges": [(0, 1, 3), (1, 0, 2)], "messages": 8, "mapped": True},
    "a circle of three": {"edges": [(0, 1, 1), (1, 2, 2), (2, 0, 3)], "messages": 5, "drops": ((0, 2), (1, 2), (2, 2))},
    "plans, discarded": {"edges": [(0, 1, 2), (1, 0, 1)], "messages": 3, "plans": 4, "drops": ((0, 1), (1, 1), (0, 3))},
    "plans, produced": {"edges": [(0, 1, 3), (1, 0, 2)], "messages": 4, "plans": 3, "mapped": True, "drops": ((0, 1),)},
}


@pytest.fixture(autouse=True)
def quick_collections():
    """Each world of several plans collects garbage: not what torch has made."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def explore(options, limit):
    """Depth first through all orders, each state once; the ways there are played again from the start."""
    seen, ends, pending = set(), 0, [[]]
    while pending:
        path = pending.pop()
        world = World(**options)
        for choice in path:
            world.step(world.actions()[choice])
        while (key := world.key()) not in seen:
            seen.add(key)
            assert len(seen) < limit, "more states than expected: make the case smaller"
            actions = world.actions()
            if not actions:
                world.check_end()
                ends += 1
                break
            pending.extend([*path, choice] for choice in range(1, len(actions)))
            path = [*path, 0]
            world.step(actions[0])
    return len(seen), ends


@pytest.mark.parametrize("case", SMALL)
def test_every_order(case):
    states, ends = explore(SMALL[case], 5_000)
    print(case, states, ends)
    assert states > 20 and ends


@pytest.mark.parametrize("case", LARGE)
def test_random_orders(case):
    for seed in range(60):
        chooser, world = random.Random(seed), World(**LARGE[case])
        while actions := world.actions():
            lasting = [action for action in actions if action[0] not in ("die", "own dies")]
            world.step(chooser.choice(lasting if lasting and chooser.random() < 0.7 else actions))
        world.check_end()
