"""Flags of torch within a trace: a forward that sets one is refused, what an export does to them is not the forward's."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_capture import specs_of
from torch import nn

from rdmarpc.graph.guards.flags import SetsFlag, flags
from rdmarpc.graph.trace.capture import capture, skeleton
from rdmarpc.graph.trace.export import export
from rdmarpc.graph.trace.record import record


def by_flags(x: torch.Tensor) -> torch.Tensor:
    with torch.backends.mkldnn.flags(enabled=False):
        return x.cos()


def by_property(x: torch.Tensor) -> torch.Tensor:
    torch.backends.mkldnn.enabled = False
    return x.cos()


def by_the_last_line(x: torch.Tensor) -> torch.Tensor:
    x = x.cos()
    torch.backends.cudnn.enabled = False
    return x


class Sets(nn.Module):
    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.change = nn.Linear(4, 4), change

    def forward(self, x):
        return self.change(self.layer(x))


def captured(method: Any, net: nn.Module) -> Any:
    return method(skeleton(net), specs_of([torch.randn(2, 4)]), lambda *given: (given, {}), whole=lambda path: True)


def refuses(change: Callable[[torch.Tensor], torch.Tensor], name: str) -> None:
    began = flags()
    for method in (capture, record, export):
        with pytest.raises(SetsFlag, match=f"the forward sets torch's {name} to False"):
            captured(method, Sets(change))
        assert flags() == began


@pytest.mark.parametrize("change", [by_flags, by_property])
def test_a_forward_that_sets_a_flag_is_refused(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    refuses(change, "backends.mkldnn.enabled")


def test_a_forward_finds_the_flags_of_its_program() -> None:
    """An export turns flags of backends off around it."""
    seen: list[dict[str, Any]] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(flags())
        return x

    for enabled in (True, False):
        with torch.backends.mkldnn.flags(enabled=enabled):
            now = flags()
            captured(export, Sets(look))
            assert seen and all(each == now for each in seen) and flags() == now
        seen.clear()
    assert torch.backends.mkldnn.enabled


WITH_CUDA = """
import torch
torch.version.cuda = "13.0"
import test_flags as tests
assert "backends.cudnn.enabled" in tests.flags()
tests.test_a_forward_finds_the_flags_of_its_program()
tests.refuses(tests.by_flags, "backends.mkldnn.enabled")
tests.refuses(tests.by_the_last_line, "backends.cudnn.enabled")
"""


def test_a_build_of_torch_with_cuda_has_more_flags() -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", WITH_CUDA], env=environment, check=True, timeout=120)
