"""The copies that bring a payload with gaps into a slot, element by element."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rdmarpc.graph.outlets.gaps import MOST, runs
from rdmarpc.graph.wire.strided import landing, span

VIEWS = (
    lambda x: x,
    lambda x: x[:, 1:],
    lambda x: x[:, :, ::2],
    lambda x: x[0],
    lambda x: x[:, 0],
    lambda x: x[..., 0],
    lambda x: x.transpose(0, 2),
    lambda x: x[:, :1].expand(-1, 5, -1),
    lambda x: x.unfold(2, 2, 1),
)


@settings(max_examples=150, deadline=None)
@given(st.tuples(*[st.integers(2, 40)] * 3), st.lists(st.sampled_from(VIEWS), max_size=2))
def test_every_element_lands_where_it_is_to_lie(shape, views):
    payload = torch.arange(shape[0] * shape[1] * shape[2], dtype=torch.float32).view(shape)
    for view in views:
        if payload.dim() == 3 and min(payload.shape) >= 2:
            payload = view(payload)
    sizes, strides = tuple(payload.shape), payload.stride()
    there = landing(sizes, strides)
    found = runs(sizes, strides, there, 4)
    if found is None:
        assert there != strides
        return
    assert 1 <= len(found) <= MOST
    count = span(sizes, there)
    room = torch.full((count,), -1.0)
    memory = payload.as_strided((span(sizes, strides),), (1,))
    for here, at, nbytes in found:
        assert here % 4 == at % 4 == nbytes % 4 == 0 and at + nbytes <= 4 * count
        room[at // 4 : (at + nbytes) // 4] = memory[here // 4 : (here + nbytes) // 4]
    assert torch.equal(room.as_strided(sizes, there), payload)


def test_gaps_go_along_where_that_is_cheaper_than_copies():
    half = ((64, 1024), (2048, 1))  # rows of 4 KiB, gaps of 4 KiB
    assert len(runs(*half, half[1], 4) or ()) == 1
    few = ((4, 1 << 20), (2 << 20, 1))  # rows of 4 MiB, gaps of 4 MiB
    assert len(runs(*few, few[1], 4) or ()) == 4
    token = ((32, 768), (197 * 768, 1))  # x[:, 0]
    assert len(runs(*token, landing(*token), 4) or ()) == 32
    comb = ((1000,), (64,))
    assert landing(*comb) != comb[1] and runs(*comb, landing(*comb), 4) is None
