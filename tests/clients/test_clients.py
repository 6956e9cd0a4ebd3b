"""Programs with torch's RPC leave the same bits over rdmarpc. These need torch alone; all: ``make clients``."""

from __future__ import annotations

import pytest
import torch

from .both import NEEDS, both, differences, run


@pytest.mark.parametrize("program", [program for program, modules in NEEDS.items() if not modules])
def test_same_bits(program: str):
    plain, ours = both(program, fresh=False)
    assert plain.found and not (found := differences(plain.found, ours.found)), found


def test_by_the_command():
    """``python -m rdmarpc run``, in interpreters that begin with it."""
    plain, ours = run("recurrent", ours=False, fresh=False), run("recurrent", ours=True)
    assert plain.found.pop("rpc").startswith("torch.") and ours.found.pop("rpc").startswith("rdmarpc")
    assert not (found := differences(plain.found, ours.found)), found


def test_differences_are_seen():
    a = {"x": [torch.zeros(2)], "n": 1}
    assert differences(a, {"x": [torch.zeros(2)], "n": 1}) == []
    assert differences(a, {"x": [torch.tensor([0.0, 1e-45])], "n": 1}) == [".x[0]"]
    assert differences(a, {"x": [torch.zeros(2).double()], "n": 2}) == [".x[0]", ".n: 1 and 2"]
