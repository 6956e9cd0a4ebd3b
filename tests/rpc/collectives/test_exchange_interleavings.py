"""Every order in which two ranks can exchange pieces through streams of one slot (``interleavings``): the invariants of
``transport/exchange/kernels``."""

from __future__ import annotations

import pytest
from interleavings import LONG, Explorer, Violation, Words

from rdmarpc.transport.exchange import kernels as of
from rdmarpc.transport.exchange.kernels import exchange
from rdmarpc.transport.words.atomics import load_acquire


class Rank:
    """What lies at one of the ranks: the slot that the peer writes, two records, a bell."""

    def __init__(self, words):
        self.slot = words.shared(*[0] * (of.HEADER // 8 + 1))
        self.bells = words.shared(*[0] * 10)
        self.arrived, self.credited = words.shared(0, 1 << 32), words.shared(0, 1 << 32)
        words.mark_own(*range(self.bells, self.bells + 64, 8))


def block(words, record, bells):
    """What a notification is posted by."""
    return words.constant(1, record, bells, words.constant(0), words.own(0), words.own(0, 0, 0, 0), 8)


def call_of(words, mine, peer, sends, takes, source, target):
    call, lane = [0] * of.CALL_WORDS, [0] * of.LANE_WORDS
    for name, value in {
        "LANES": 1, "PIECE": 8, "DEPTH": 1, "BELL": mine.bells + 64, "BUDGET": words.own(0), "SEQUENCE": 3, "FOLD": -1,
    }.items():  # fmt: skip
        call[getattr(of, f"CALL_{name}")] = value
    for name, value in {
        "NOTIFY": block(words, peer.arrived, peer.bells), "CREDIT": block(words, peer.credited, peer.bells),
        "OUT": peer.slot, "IN": mine.slot, "OUT_DEPTH": 1, "IN_DEPTH": 1, "ARRIVED": mine.arrived, "CREDITED": mine.credited,
        "FROM": source, "FROM_BYTES": 8 * sends, "PUSH": sends, "TO": target, "TO_BYTES": 8 * takes, "PULL": takes,
    }.items():  # fmt: skip
        lane[getattr(of, f"LANE_{name}")] = value
    return words.own(*call, *lane)


def exchanged(there, back, **constants):
    """So many pieces from one rank to the other, and back: each lies where it belongs, at both."""
    words = Words()
    ranks = Rank(words), Rank(words)

    def rank(mine, peer, sends, takes, first):
        target = words.own(*[0] * takes, 0)
        call = call_of(words, mine, peer, sends, takes, words.constant(*range(first, first + sends), 0), target)

        def run():
            result = exchange(call, LONG, 0)
            for number in range(takes):
                assert load_acquire(target + 8 * number) == 30 - first + number, "a piece was overwritten"
            return result

        return run

    threads = {"one": rank(*ranks, there, back, 10), "other": rank(*ranks[::-1], back, there, 20)}

    def check(word, results):
        assert results == [of.OK, of.OK]

    return Explorer(words, threads, **constants).run(check)


@pytest.mark.parametrize(("there", "back"), [(1, 1), (2, 0), (3, 0)])
def test_pieces_arrive_in_order_and_no_rank_sleeps_on(there, back):
    assert exchanged(there, back) > 1000


def always(lane):
    """``room`` that asks for no credit."""
    return 1 if load_acquire(lane + 8 * of.LANE_PUSHED) < load_acquire(lane + 8 * of.LANE_PUSH) else 0


def test_a_slot_that_is_written_too_early_is_found():
    with pytest.raises(Violation, match="overwritten"):
        exchanged(2, 0, room=always)
