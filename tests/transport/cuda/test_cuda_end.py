"""How a channel with copies of GPU memory under way ends, and what a failure of the driver does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import gpu
import pytest
import torch
from cuda_peer import T, Two, post_again, start_two, tensor_of, values, write, write_late
from transport_peer import C, S, State, channel_error, wait_for

from rdmarpc.transport import PeerLost, RdmaError, RemoteRegion, TransferTimeout
from rdmarpc.transport.cuda.transfer import GROUP_HEAD, JOB_HEAD

pytestmark = pytest.mark.gpu


@pytest.fixture
def start() -> Iterator[Callable[..., Two]]:
    yield from start_two()


def wait_for_loss(state: State) -> float:
    start = time.monotonic()
    with pytest.raises(PeerLost):
        state.kept["work"].wait(T)
    with pytest.raises(PeerLost):
        state.kept["transfer"].post()
    return time.monotonic() - start


def lanes(state: State, wanted: int) -> int:
    """How many side streams there are; waits for so many, and for the end of all mappings where none is wanted."""
    from rdmarpc.transport.cuda import lane

    imports = state.channel.peer_gpus.imports  # type: ignore[attr-defined]
    deadline = time.monotonic() + 30.0
    while len(lane._lanes) != wanted or not (wanted or imports.close()):
        assert time.monotonic() < deadline, f"{len(lane._lanes)} lanes, or a mapping, were left"
        time.sleep(0.02)
    return len(lane._lanes)


def test_work_under_way_fails_when_the_peer_is_killed(start: Callable[..., Two]) -> None:
    two = start()
    two.here.call(write_late, two.landing(10_000, "gpu"), 1500.0)
    two.there.kill()
    assert two.here.call(wait_for_loss) < 15.0
    assert two.here.call(lanes, 0) == 0


def copy_until_lost(state: State, remote: bytes) -> int:
    there = RemoteRegion.load(remote)
    ours = [tensor_of(state.device, there.nbytes, place, C) for place in ("gpu", "cpu")]
    transfers = [state.channel.prepare([pair], notify=1) for pair in ((there, ours[0]), (ours[1], there))]
    for turn in range(1_000_000):
        try:
            for work in [transfer.post() for transfer in transfers]:
                work.wait(T)
        except PeerLost:
            return turn
    raise AssertionError("nobody was lost")


def hear_copies(state: State, count: int) -> None:
    state.channel.expect(1, count).wait(T)


def hear_of_loss(state: State) -> None:
    with pytest.raises(PeerLost):
        state.channel.expect(1, 1 << 40).wait(T)
    state.channel.abort(T)
    assert not state.channel.peer_copies


def test_a_peer_is_killed_in_the_middle_of_copies(start: Callable[..., Two]) -> None:
    two = start()
    remote = two.landing(500_000, "gpu")
    two.here.call(write, remote, "gpu", C, None)  # it takes a GPU some seconds to begin
    two.here.start(copy_until_lost, remote)
    two.there.call(hear_copies, 4)  # of two turns
    two.there.kill()
    assert two.here.finish() > 0
    assert two.here.call(lanes, 0) == 0


def test_who_copies_is_killed_in_the_middle_of_it(start: Callable[..., Two]) -> None:
    two = start()
    remote = two.landing(500_000, "gpu")
    two.here.call(write, remote, "gpu", C, None)
    two.here.start(copy_until_lost, remote)
    two.there.start(hear_of_loss)
    time.sleep(0.15)
    two.here.kill()
    two.there.finish()


def read_late(state: State, remote: bytes, ms: float) -> None:
    there = RemoteRegion.load(remote)
    state.kept["ours"] = torch.empty(there.nbytes, dtype=torch.uint8, device=gpu.device()).fill_(C)
    gpu.sleep(ms)
    state.kept["work"] = state.channel.memcpy(state.kept["ours"], there, notify=1)


def abort(state: State, timeout: float) -> tuple[float, str]:
    start = time.monotonic()
    error = ""
    try:
        state.channel.abort(timeout)
    except TransferTimeout as caught:
        error = caught.message
    return time.monotonic() - start, error


def overwrite(state: State) -> None:
    state.kept["landing"].fill_(1)
    time.sleep(0.4)
    assert values(state, "landing") == {1}


@pytest.mark.parametrize("by", ["here", "there"])
def test_no_copy_is_under_way_after_abort(start: Callable[..., Two], by: str) -> None:
    two = start()
    two.here.call(write_late, two.landing(10_000, "gpu"), 300.0)
    took, error = getattr(two, by).call(abort, T)
    assert took < 15.0 and not error
    assert two.there.call(values, "landing") == {C}
    two.there.call(overwrite)
    with pytest.raises(PeerLost):
        two.here.call(post_again)
    assert two.here.call(lanes, 0) == 0


def test_abort_says_when_a_copy_cannot_be_stopped(start: Callable[..., Two]) -> None:
    two = start()
    two.here.call(read_late, two.landing(10_000, "gpu", S), 3000.0)
    took, error = two.here.call(abort, 0.1)
    assert took < 15.0 and "under way" in error
    assert two.there.call(channel_error) == "PeerLost"
    assert two.here.call(lanes, 0) == 0


def test_a_process_may_end_with_copies_under_way(start: Callable[..., Two]) -> None:
    two = start()
    two.here.call(write_late, two.landing(10_000, "gpu"), 600.0)
    two.here.stop()
    assert two.here.process.exitcode == 0


# -- errors of the driver


def post_nonsense(state: State, remote: bytes) -> str:
    there = RemoteRegion.load(remote)
    transfer: Any = state.channel.prepare([(there, tensor_of(state.device, there.nbytes, "gpu", C))], notify=8)
    transfer._job._words[JOB_HEAD + GROUP_HEAD + 2] = 1 << 40  # bytes
    with pytest.raises(RdmaError) as caught:
        transfer.post()
    state.channel.fence(T)
    assert state.channel.error is None and not state.channel.inboxes.copying  # type: ignore[attr-defined]
    state.channel.notify(9)
    return caught.value.status


def test_a_copy_that_the_driver_refuses_notifies_nobody(start: Callable[..., Two]) -> None:
    if gpu.TYPE == "cuda":
        pytest.skip("CUDA ends the context after that")
    two = start()
    status = two.here.call(post_nonsense, two.landing(1000, "gpu", S))
    assert status.startswith("CUDA_ERROR")
    two.there.call(wait_for, 9, 1, T)
    with pytest.raises(TransferTimeout):
        two.there.call(wait_for, 8, 1, 0.05)


def lose_gpu(state: State, remote: bytes) -> str:
    """As if a kernel had failed: from then on the driver answers everything with that, and calls nobody."""
    from rdmarpc.transport.gpu import driver as cuda_driver

    there = RemoteRegion.load(remote)
    ours = tensor_of(state.device, there.nbytes, "gpu", C)
    transfer = state.channel.prepare([(there, ours)], notify=8)
    gpu.sleep(2000.0)
    work = transfer.post()
    driver = cuda_driver.driver()
    real, driver.attempt = driver.attempt, lambda name, *args: "CUDA_ERROR_ILLEGAL_ADDRESS"  # type: ignore[method-assign]
    with pytest.raises(RdmaError) as caught:
        work.wait(T)
    assert not state.channel.inboxes.copying and work.done() and work.exception() is state.channel.error  # type: ignore[attr-defined]
    driver.attempt = real  # type: ignore[method-assign]
    return caught.value.status


def test_a_gpu_that_fails_ends_the_channel(start: Callable[..., Two]) -> None:
    if gpu.TYPE == "cuda":
        pytest.skip("it would be the driver's turn to say so")
    two = start()
    assert two.here.call(lose_gpu, two.landing(1000, "gpu")) == "CUDA_ERROR_ILLEGAL_ADDRESS"
    two.there.call(hear_of_loss)
    time.sleep(2.0)  # the copy that we only pretended to have lost
