"""The copies of ``kernels``: bytes and nothing but the bytes, whichever way they go."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rdmarpc.transport.words import kernels

_SOURCE = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8)
_SIZES = st.sampled_from([0, 1, 31, 32, 33, 255, 256, 257, 4096, 65_537, 200_001]) | st.integers(0, 3000)


@settings(deadline=None, max_examples=200)
@given(nbytes=_SIZES, to=st.integers(0, 300), out_of=st.integers(0, 300))
def test_past_the_caches(nbytes, to, out_of):
    target = torch.zeros(nbytes + 700, dtype=torch.uint8)
    kernels.copy_past_caches(target.data_ptr() + to, _SOURCE.data_ptr() + out_of, nbytes)
    assert torch.equal(target[to : to + nbytes], _SOURCE[out_of : out_of + nbytes])
    assert not target[:to].any() and not target[to + nbytes :].any()


@pytest.mark.parametrize("advice", [0, -1, 1, 2, 64])
def test_every_advice_moves_the_bytes(advice):
    state = np.array([advice], np.int64)
    for nbytes in (100, kernels.MOVE_MIN, kernels.MOVE_MIN + 13, 700_000):
        target = torch.zeros(nbytes, dtype=torch.uint8)
        kernels.move(target.data_ptr(), _SOURCE.data_ptr(), nbytes, state.ctypes.data)
        assert torch.equal(target, _SOURCE[:nbytes])
    assert -1 <= state[0] <= kernels._STREAMED
