"""The state that an owner's half loads has the dtypes that ``Optimizer.load_state_dict`` gives it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from rdmarpc.graph.servers.updates import load_state


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("options", [{}, {"capturable": True}, {"fused": True}], ids=["plain", "capturable", "fused"])
def test_dtypes_are_those_of_load_state_dict(dtype: torch.dtype, options: dict[str, Any]) -> None:
    parameter = nn.Parameter(torch.ones(3, dtype=dtype))
    ours, theirs = (torch.optim.Adam([parameter], 0.1, **options) for _ in range(2))
    entries = {
        "step": torch.tensor(2.0, dtype=torch.float64),
        "exp_avg": torch.rand(3, dtype=torch.float32),
        "exp_avg_sq": torch.rand(3, dtype=torch.float64),
    }
    theirs.load_state_dict({**theirs.state_dict(), "state": {0: copy.deepcopy(entries)}})
    load_state(ours, [parameter], {0: copy.deepcopy(entries)})
    mine, expected = ours.state[parameter], theirs.state[parameter]
    assert list(mine) == list(expected)
    for key, value in expected.items():
        assert mine[key].dtype == value.dtype and torch.equal(mine[key], value), key
