"""The credit protocol in every order of events: see ``credit_model``."""

from __future__ import annotations

import pytest
from credit_model import DIRECT, DYNAMIC, MUTANTS, Edge, Model, Wrong, explore

CASES: dict[str, tuple[list[Edge], int]] = {
    "depth 1": ([Edge(0, 1, 1, 4)], 1),
    "depth 2": ([Edge(0, 1, 2, 5)], 1),
    "depth 3": ([Edge(0, 1, 3, 4)], 1),
    "produced in the slot, depth 2": ([Edge(0, 1, 2, 4, DIRECT)], 1),
    "produced in the slot, depth 3": ([Edge(0, 1, 3, 3, DIRECT)], 1),
    "produced in the slot by a sender that keeps everything": ([Edge(0, 1, 3, 5, DIRECT, hoards=True)], 1),
    "dynamic, depth 1": ([Edge(0, 1, 1, 4, DYNAMIC)], 1),
    "dynamic, depth 2": ([Edge(0, 1, 2, 4, DYNAMIC)], 1),
    # The second forward of three may start before the gradient of the first came: two are pending.
    "activation there, gradient back": (
        [Edge(0, 1, 2, 3, needs=((1, 2),), keeps=(1,)), Edge(1, 0, 2, 3, needs=((0, 0),))],
        1,
    ),
    "activation produced in the slot, gradient back": (
        [Edge(0, 1, 2, 2, DIRECT, needs=((1, 2),), keeps=(1,)), Edge(1, 0, 1, 2, needs=((0, 0),))],
        1,
    ),
    "commands in between": (
        [
            Edge(0, 1, 1, 2, needs=((2, 1),), keeps=(1,)),
            Edge(1, 0, 1, 2, needs=((0, 0),)),
            Edge(0, 1, 2, 2, needs=((1, 0),)),
        ],
        1,
    ),
    "a circle of three": (
        [Edge(0, 1, 1, 2), Edge(1, 2, 1, 2, needs=((0, 0),)), Edge(2, 0, 1, 2, needs=((1, 0),))],
        1,
    ),
    "both ways at once": ([Edge(0, 1, 1, 3), Edge(1, 0, 1, 3)], 1),
    # As three workers that pass activations on and gradients back.
    "there and back over three": (
        [
            Edge(0, 1, 1, 2, needs=((3, 1),), keeps=(3,)),
            Edge(1, 2, 1, 2, needs=((0, 0),), keeps=(2,)),
            Edge(2, 1, 1, 2, needs=((1, 0),)),
            Edge(1, 0, 1, 2, needs=((2, 0),)),
        ],
        1,
    ),
    # Command 1 says that forward 1 is discarded: at any moment, also while it is anywhere between the two.
    "a forward is discarded": (
        [
            Edge(0, 1, 1, 2, keeps=(1,)),
            Edge(1, 0, 1, 2, needs=((0, 0),)),
            Edge(0, 1, 1, 1, drops=((1, 1),)),
        ],
        1,
    ),
    "plans follow each other": ([Edge(0, 1, 1, 2)], 3),
    "plans follow each other, depth 2": ([Edge(0, 1, 2, 2)], 2),
    "plans produced in the slot follow each other": ([Edge(0, 1, 2, 2, DIRECT)], 2),
}


@pytest.mark.parametrize("case", CASES)
def test_every_order(case):
    edges, plans = CASES[case]
    states = explore(Model(edges, plans=plans), 60_000)
    print(case, states)
    assert states > 50


CATCHES = {
    "credit at landing": ("depth 1", "is read while|written under"),
    "notification before data": ("depth 1", "torn|came twice"),
    "no rest": ("plans follow each other", "a credit for a slot that is free|a write that nobody allowed"),
    "no fence": ("plans follow each other", "a credit for a slot that is free|a write that nobody allowed"),
    "credit twice": ("depth 2", "a credit for a slot that is free|is read while|written under"),
    "credit alone": ("produced in the slot, depth 2", "the sender's tensor"),
    "in place": ("produced in the slot, depth 2", "the sender's tensor"),
    "all in place": ("produced in the slot by a sender that keeps everything", "the end cannot be reached|nothing can happen"),
    "early release": ("dynamic, depth 1", "died before it was read"),
    "no discard": ("a forward is discarded", "the end cannot be reached|nothing can happen"),
    "blocking send": ("both ways at once", "the end cannot be reached|nothing can happen"),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_what_breaks_a_rule_is_caught(mutant):
    case, says = CATCHES[mutant]
    edges, plans = CASES[case]
    with pytest.raises(Wrong, match=says) as caught:
        explore(Model(edges, mutant, plans), 60_000)
    print(caught.value)
