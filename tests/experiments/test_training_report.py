"""What the training job says below its table and above its picture."""

from __future__ import annotations

import pytest

from rdmarpc.experiments.harness.pictures import finding
from rdmarpc.experiments.training.digits_report import counted


def test_a_step_in_plain_words() -> None:
    counters = {"steps": 10, "bytes_in": 1_340_300, "bytes_out": 655_000, "operations": 121, "rpc_messages": 5}
    assert counted(counters) == (
        "12.1 operations posted, 134 KB written to workers and 65.5 KB fetched from them, 0 B through staging buffers;"
        " 0 registrations of memory, 0.5 RPC messages"
    )


@pytest.mark.parametrize(
    ("ours", "theirs", "says"),
    [
        (1.0, 4.0, "spends 4.0× less time"),
        (4.0, 1.0, "spends 4.0× more time"),
        (0.0, 1.0, "adds 0.00 ms to a step; with torch RPC 1.00 ms"),
        (1.0, 0.0, "adds 1.00 ms to a step; with torch RPC 0.00 ms"),
        (0.0, 0.0, "with torch RPC 0.00 ms"),
    ],
)
def test_the_finding_of_any_measurement(ours: float, theirs: float, says: str) -> None:
    assert says in finding({"rdmarpc": ours, "torch_rpc": theirs})
