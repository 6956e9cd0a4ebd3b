"""Programs with torch's RPC leave the same bits over rdmarpc. These need torch alone; all: ``make clients``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from .both import NEEDS, check_used, differences, found, several

PROGRAMS = [program for program, modules in NEEDS.items() if not modules]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    several(PROGRAMS, False, folder)
    return folder


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ours")
    several(PROGRAMS, True, folder)
    return folder


def test_plainly(plain: Path):
    """Apart from the next, so that each has its own limit of time."""
    assert all(found(program, plain) for program in PROGRAMS)


@pytest.mark.parametrize("program", PROGRAMS)
def test_same_bits(program: str, plain: Path, ours: Path):
    left = found(program, plain), found(program, ours)
    check_used(*left)
    assert not (differ := differences(*left)), differ


def test_differences_are_seen():
    a = {"x": [torch.zeros(2)], "n": 1}
    assert differences(a, {"x": [torch.zeros(2)], "n": 1}) == []
    assert differences(a, {"x": [torch.tensor([0.0, 1e-45])], "n": 1}) == [".x[0]"]
    assert differences(a, {"x": [torch.zeros(2).double()], "n": 2}) == [".x[0]", ".n: 1 and 2"]
