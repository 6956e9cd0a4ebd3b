"""Peers that are let in, and then send what is no message."""

from __future__ import annotations

import struct
import threading
import time

import pytest
from called import identity
from forks import output
from group import dismiss, results, run_group, until_dismissed

import rdmarpc as rpc
from rdmarpc.calls import agent
from rdmarpc.links.frames import CONTROL, FORGO, HEAD, REFERENCES, REMOTE, REQUEST, alone

FRAMES = {
    "references, cut shorter": (REFERENCES, CONTROL, b"\1\2\3"),
    "references, cut short": (REFERENCES, CONTROL, struct.pack("<BQ", 1, 2)),
    "references of no kind": (REFERENCES, CONTROL, struct.pack("<BQQ", 99, 1, 1)),
    "a creating call without its head": (REQUEST, HEAD | REMOTE, b"\1\2\3"),
    "places given back, cut short": (FORGO, 0, b"\1\2\3"),
}


def sends(rank, kind, flags, body):
    heard = threading.Event()
    lost = []
    agent.current().on_peer_lost(lambda worker, error: (lost.append((worker, str(error))), heard.set()))
    if rank == 1:
        assert rpc.rpc_sync("worker0", identity, (1,)) == 1
        link = agent.current().connections.to(0)
        assert link.try_send(kind, 0, flags, parts=alone(body))
        with pytest.raises(rpc.PeerLost, match="worker0"):
            for _ in range(1000):
                rpc.rpc_sync("worker0", identity, (1,))
                time.sleep(0.01)
        dismiss("worker2")
    elif rank == 0:
        assert heard.wait(20)
        # Nobody else is disturbed.
        for number in range(100):
            assert rpc.rpc_sync("worker2", identity, (number,)) == number
            assert rpc.rpc_sync("worker2", ask, ("worker0", number)) == number
        with pytest.raises(rpc.PeerLost, match="worker1"):
            rpc.rpc_sync("worker1", identity, (1,))
        dismiss("worker2")
    else:
        until_dismissed(2)
    rpc.shutdown(graceful=False)
    return lost


def ask(worker, value):
    return rpc.rpc_sync(worker, identity, (value,))


class Sends:
    def __init__(self, what):
        self.what = what

    def __call__(self, rank):
        return sends(rank, *FRAMES[self.what])


@pytest.mark.parametrize("device", ["shm", "tcp"])
@pytest.mark.parametrize("what", FRAMES)
def test_a_frame_that_is_no_message_ends_its_connection(what, device):
    lost = results(run_group(Sends(what), 3, transport=device))[0]
    assert lost[0][0] == "worker1" and f"what came is no message (frame of kind {FRAMES[what][0]}: " in lost[0][1], lost
    assert "struct.error" not in output()  # of no thread
