"""The real halves of edges under every order of events of small cases, and under many random ones of larger cases."""

from __future__ import annotations

import gc
import random

import pytest
from slow_net import SlowChannel, SlowPoller, World

from rdmarpc.graph.edges.dynamic import DynamicTarget
from rdmarpc.graph.edges.slot import Inlet, Slot
from rdmarpc.graph.outlets.outlet import Outlet
from rdmarpc.graph.outlets.target import Target
from rdmarpc.transport import RdmaError

DYNAMIC = "dynamic, a circle of three"
SMALL = {
    "depth 1": {"edges": [(0, 1, 1)], "messages": 2},
    "depth 2": {"edges": [(0, 1, 2)], "messages": 2},
    "produced in the slot": {"edges": [(0, 1, 2)], "messages": 2, "mapped": True},
    "dynamic": {"edges": [(0, 1, 2)], "messages": 2, "static": False, "drops": ((0, 1),)},
    "discarded": {"edges": [(0, 1, 1)], "messages": 2, "drops": ((0, 1),)},
    "two plans": {"edges": [(0, 1, 1)], "messages": 1, "plans": 2},
    "two plans, discarded": {"edges": [(0, 1, 1)], "messages": 1, "plans": 2, "drops": ((0, 1),)},
}
LARGE = {
    "one edge, depth 3": {"edges": [(0, 1, 3)], "messages": 12},
    "produced in the slots": {"edges": [(0, 1, 3), (1, 0, 2)], "messages": 8, "mapped": True},
    "a circle of three": {"edges": [(0, 1, 1), (1, 2, 2), (2, 0, 3)], "messages": 5, "drops": ((0, 2), (1, 2), (2, 2))},
    DYNAMIC: {"edges": [(0, 1, 1), (1, 2, 2), (2, 0, 3)], "messages": 5, "static": False, "plans": 2},
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


def wander(case, seeds):
    for seed in range(seeds):
        chooser, world = random.Random(seed), World(**LARGE[case])
        while actions := world.actions():
            lasting = [action for action in actions if action[0] not in ("die", "own dies")]
            world.step(chooser.choice(lasting if lasting and chooser.random() < 0.7 else actions))
        world.check_end()


@pytest.mark.parametrize("case", LARGE)
def test_random_orders(case):
    wander(case, 30)


def twice(method):
    def call(self, *args):
        method(self, *args)
        method(self, *args)

    return call


def freed_at_once(slot, order):
    tensor = open_slot(slot, order)
    slot.close()
    return tensor


open_slot = Slot.open
MISTAKES = {
    "a credit at landing": (Slot, "open", freed_at_once, "one edge, depth 3"),
    "a credit twice": (Inlet, "credit", twice(Inlet.credit), "one edge, depth 3"),
    "a slot that the sender's tensor lies in is used": (
        Target,
        "free",
        property(lambda target: target._credit),
        "produced in the slots",
    ),
    "memory of such a slot is used again": (Outlet, "leased", lambda outlet: [], "plans, produced"),
    "numbers with what has come for them": (SlowPoller, "skip", lambda poller, row: None, "plans, discarded"),
    "numbers with what is under way for them": (SlowChannel, "fence", lambda channel, timeout: None, "plans, discarded"),
    "a source that is not let go": (Target, "_over", lambda target: None, "one edge, depth 3"),
    "a source that dies before it is read": (DynamicTarget, "source", property(lambda _: None, lambda _, x: None), DYNAMIC),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_breaks_a_rule_is_caught(mistake, monkeypatch):
    where, name, instead, case = MISTAKES[mistake]
    monkeypatch.setattr(where, name, instead)
    with pytest.raises((AssertionError, RdmaError)):
        wander(case, 200)
