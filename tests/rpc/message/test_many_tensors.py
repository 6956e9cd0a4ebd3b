"""Messages with more tensors than the 16 bits of a frame can count."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from called import identity
from group import results, run_group

import rdmarpc as rpc

MORE = 2**16 + 3


def more_than_a_frame_counts(rank: int) -> int:
    if rank == 0:
        sent = list(torch.arange(MORE).unbind())
        came = rpc.rpc_sync("worker1", identity, (sent,))
        assert [int(value) for value in came] == list(range(MORE))
        kept = rpc.remote("worker1", torch.stack, (sent,))
        assert torch.equal(kept.to_here(), torch.arange(MORE))
        del kept
    rpc.shutdown(timeout=60)
    return rank


@pytest.mark.parametrize("device", ["shm", "tcp"])
def test_more_tensors_than_a_frame_counts(device: str) -> None:
    assert results(run_group(more_than_a_frame_counts, transport=device, rpc_timeout=100)) == [0, 1]


BYTES_BESIDE_A_TENSOR = """
import torch
from rdmarpc.message import serialize
values = (b"bytes", torch.ones(2), "text")
came = serialize.load_flat(serialize.dump_flat(values), serialize.flat(values))
assert came[0] == b"bytes" and came[1] is values[1] and came[2] == "text"
"""


def test_bytes_beside_a_tensor_are_compared_with_no_text() -> None:
    """``python -bb`` makes an error of such a comparison."""
    subprocess.run([sys.executable, "-bb", "-c", BYTES_BESIDE_A_TENSOR], check=True, timeout=100)
