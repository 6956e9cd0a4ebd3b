"""Posts that wait for the streams of a GPU: their order, their ends. On the GPU in software; what they post is written down."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import softgpu
import torch
from test_verbs_gpu import Bench, tensor

from rdmarpc.transport import NotSupported, PeerLost, RdmaError, TransferTimeout
from rdmarpc.transport.channel import DONE, Work


class Wire:
    """In place of a channel."""

    peer = "somebody"

    def __init__(self) -> None:
        self.error: RdmaError | None = None
        self.later: set[Work] = set()
        self.posted: list[Any] = []

    def lost(self, error: RdmaError) -> None:
        self.error = self.error or error

    def post(self, what: object) -> Callable[[], Work]:
        def post() -> Work:
            if self.error is not None:
                raise self.error
            self.posted.append(what() if callable(what) else what)
            return DONE

        return post


def behind(bench: Bench, wire: Wire, what: object, *indices: int) -> Work:
    post = wire.post(what)
    return bench.memory.behind(wire, indices or (0,), post) or post()  # type: ignore[arg-type]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def posts_what_is_made() -> None:
    module = softgpu.load()
    with Bench() as bench:
        wire, value = Wire(), tensor(0.0)
        module.drain()
        assert behind(bench, wire, "idle") is DONE and bench.counts == {}
        with module.held():
            module.fill_later(value, 5.0, 100)
            work = behind(bench, wire, lambda: module.peek(value)[0].item())
            assert not work.done() and wire.posted == ["idle"], "nobody waited"
            release = module.hold()
        module.fill_later(value, 6.0, 0)
        work.wait(20.0)
        assert work.done() and work.exception() is None and wire.posted == ["idle", 5.0], "neither sooner nor later"
        release()
        module.drain()
        until(lambda: not wire.later)
        assert bench.counts == {"gpu_posts_behind": 1}


def keeps_the_order() -> None:
    """Of one GPU, whatever streams things come from; another GPU goes on."""
    module = softgpu.load()
    with Bench() as bench:
        wire, other = Wire(), Wire()
        module.drain()
        with module.held():
            works = [behind(bench, wire, 0), behind(bench, other, 0)]
            with torch.Stream(device=torch.device("softgpu", 0)):
                works.append(behind(bench, wire, 1))  # its own stream has nothing to do
                module.sleep(100)
                works.append(behind(bench, wire, 2))
            works.append(behind(bench, wire, 3))
            assert wire.posted == other.posted == []
            assert behind(bench, wire, "there", 1) is DONE
        for work in works:
            work.wait(20.0)
        assert wire.posted == ["there", 0, 1, 2, 3] and other.posted == [0]
        module.sleep(100, 0)
        with module.held(1):
            both = behind(bench, wire, "both", 0, 1)
            module.drain(0)
            assert not both.done()
        both.wait(20.0)


def comes_to_an_end() -> None:
    module = softgpu.load()
    with Bench() as bench:
        wire, fine, value = Wire(), Wire(), tensor(0.0)
        module.drain()
        with module.held():
            module.fill_later(value, 1.0, 0)
            work, good = behind(bench, wire, "late"), behind(bench, fine, "good")
            with pytest.raises(TransferTimeout, match="the GPU has not made within"):
                work.wait(0.05)
            heard: list[RdmaError] = []

            def hear() -> None:
                with pytest.raises(PeerLost) as raised:
                    work.wait(20.0)
                heard.append(raised.value)

            waiter = threading.Thread(target=hear)
            waiter.start()
            time.sleep(0.05)
            wire.error = PeerLost("gone", peer="somebody")
            waiter.join(20.0)  # before the GPU is done
            assert [str(error) for error in heard] == [str(wire.error)] and work.done() and work.exception() is wire.error
            assert fine.posted == []
        good.wait(20.0)
        until(lambda: not wire.later)
        assert wire.posted == []

        def breaks() -> None:
            raise ValueError("so much for that")

        module.sleep(50)
        broken, next_one = behind(bench, fine, breaks), behind(bench, fine, "next")
        with pytest.raises(RdmaError, match="so much for that"):
            broken.wait(20.0)
        next_one.wait(20.0)
        release = module.hold()
        left = behind(bench, fine, "never")
    with pytest.raises(RdmaError, match="the device was closed"):
        left.wait(20.0)
    release()
    assert fine.posted == ["good", "next"]
    module.drain()


def refuses_what_is_captured() -> None:
    module = softgpu.load()
    with Bench() as bench:
        wire = Wire()
        module.drain()
        with module.capture(), pytest.raises(NotSupported, match="captured into a CUDA graph"):
            behind(bench, wire, 0)
        assert behind(bench, wire, 1) is DONE


def ends_the_channels_of_a_gpu_that_fails() -> None:
    module = softgpu.load()
    with Bench() as bench:
        wire, other = Wire(), Wire()
        module.drain()
        module.hold()
        works = [behind(bench, wire, 0), behind(bench, other, 0)]
        module.fail()
        for work in works:
            with pytest.raises(RdmaError, match=r"failed.*ILLEGAL_ADDRESS"):
                work.wait(20.0)
        until(lambda: wire.error is not None and other.error is not None)
        with pytest.raises(RdmaError, match="ILLEGAL_ADDRESS"):
            behind(bench, Wire(), 1)
        assert wire.posted == other.posted == []


@pytest.fixture(scope="module")
def process() -> Iterator[softgpu.Process]:
    with softgpu.Process(SOFTCUDA_DMABUF="1", SOFTCUDA_DEVICES="2", SOFTCUDA_DELAY_US="300") as one:
        yield one


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [posts_what_is_made, keeps_the_order, comes_to_an_end, refuses_what_is_captured],
    ids=lambda case: case.__name__,
)
def test_behind(process: softgpu.Process, case: Callable[[], None]) -> None:
    process.run(case)


@pytest.mark.gpu
def test_a_gpu_that_fails() -> None:
    with softgpu.Process() as one:
        one.run(ends_the_channels_of_a_gpu_that_fails)
