"""Calls over encrypted streams."""

from __future__ import annotations

import ctypes
import socket
import time
from typing import Any

import pytest
import torch
from group import Meeting, die, dismiss, results, run_group, until_dismissed
from wire import Wire

import rdmarpc as rpc

SECRET = "a secret for the tests of calls"
TLS = {"transport": "tcp", "tls": True, "secret": SECRET}
TIMEOUT = 1.0  # peer_timeout
KNOWN = torch.arange(5000, dtype=torch.int64) * 0x0123_4567_89AB


def a_name_to_look_for(x: torch.Tensor, factor: int) -> torch.Tensor:
    return x * factor


def calls_over_a_wire(meeting: Meeting) -> tuple[bool, bool]:
    """Whether a tensor's bytes, and a function's name, were on the wire."""
    wires: list[Wire] = []
    dial = socket.create_connection

    def over_a_wire(address: tuple[str, int], *rest: Any, **options: Any) -> socket.socket:
        wires.append(Wire(address))
        return dial(("127.0.0.1", wires[-1].port), *rest, **options)

    socket.create_connection = over_a_wire  # type: ignore[assignment]
    meeting.join(world_size=2)
    if meeting.rank == 0:
        for _ in range(3):
            back = rpc.rpc_sync("worker1", a_name_to_look_for, (KNOWN, 3))
            assert torch.equal(back, KNOWN * 3)
        rref = rpc.remote("worker1", a_name_to_look_for, (KNOWN, 2))
        assert torch.equal(rref.to_here(), KNOWN * 2)
        del rref
    rpc.shutdown()
    heard = b"".join(bytes(side) for wire in wires for side in wire.heard)
    for wire in wires:
        wire.close()
    return KNOWN[100:200].numpy().tobytes() in heard, b"a_name_to_look_for" in heard


@pytest.mark.parametrize("encrypted", [False, True])
def test_what_calls_leave_on_the_wire(encrypted: bool) -> None:
    ends = results(run_group(calls_over_a_wire, dynamic=True, **{**TLS, "tls": encrypted}))
    assert [any(found) for found in zip(*ends)] == [not encrypted] * 2  # one end has dialled


def hold_the_gil(seconds: float) -> str:
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))
    return "held"


def is_not_lost_while_it_holds_the_gil(rank: int) -> str:
    if rank == 1:
        hold_the_gil(5 * TIMEOUT)  # also before anybody has connected
        until_dismissed()
        rpc.shutdown()
        return ""
    time.sleep(0.5)
    assert rpc.rpc_sync("worker1", hold_the_gil, (3 * TIMEOUT,)) == "held"
    hold_the_gil(3 * TIMEOUT)
    answer = rpc.rpc_sync("worker1", str, ("still there",))
    dismiss("worker1")
    rpc.shutdown()
    return answer


def test_who_holds_the_gil_is_not_lost() -> None:
    assert results(run_group(is_not_lost_while_it_holds_the_gil, peer_timeout=TIMEOUT, **TLS))[0] == "still there"


def names_the_dead(rank: int) -> float:
    if rank == 1:
        until_dismissed()
        return 0.0
    assert rpc.rpc_sync("worker1", str, (1,)) == "1"
    call = rpc.rpc_async("worker1", die)
    start = time.monotonic()
    with pytest.raises(rpc.PeerLost, match="worker1"):
        call.wait()
    rpc.shutdown(graceful=False)
    return time.monotonic() - start


def test_a_death_is_noticed_at_once() -> None:
    outcome = run_group(names_the_dead, peer_timeout=20.0, **TLS)[0]
    assert not outcome.error, outcome.text
    assert outcome.result < 15.0


def test_one_worker_without_tls_is_a_named_error() -> None:
    outcomes = run_group(says_why, dynamic=True, each={1: {"tls": False}}, **{**TLS, "rpc_timeout": 20})
    assert any("TLS" in str(outcome.result) and "tls at every worker" in str(outcome.result) for outcome in outcomes), outcomes


def says_why(meeting: Meeting) -> str:
    try:
        meeting.join(world_size=2)
        rpc.rpc_sync(f"worker{1 - meeting.rank}", str, (1,), timeout=20)
    except (RuntimeError, TimeoutError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        if rpc.api._is_current_rpc_agent_set():
            rpc.shutdown(graceful=False)
    return ""


def test_a_secret_that_everybody_can_read_proves_nothing():
    with pytest.raises(ValueError, match="insecure"):
        rpc.RpcBackendOptions(tls=True, insecure=True).validate()
