"""Timeouts that are no number of seconds are refused by name, and infinite ones wait as long as it takes."""

from __future__ import annotations

import math
from datetime import timedelta

import pytest
import torch

from rdmarpc import transport
from rdmarpc.transport import TransferTimeout, timeouts


def test_what_a_timeout_is():
    assert [timeouts.seconds(value) for value in (-1, 0, 0.5, True, math.inf, 1e12)] == [
        *(-1.0, 0.0, 0.5, 1.0),
        timeouts.LONGEST_S,
        timeouts.LONGEST_S,
    ]
    for check in (timeouts.seconds, timeouts.of_socket):
        with pytest.raises(ValueError, match="got nan"):
            check(math.nan)
        for wrong in ("1", None, timedelta(seconds=1)):
            with pytest.raises(TypeError, match="a number of seconds, got"):
                check(wrong)
    with pytest.raises(ValueError, match="x must not be negative, got -1 s"):
        timeouts.limit(-1, "x")
    for wrong in (0, -0.5):
        with pytest.raises(ValueError, match="x must be longer than 0 s"):
            timeouts.above_zero(wrong, "x")


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_every_wait_takes_the_same_timeouts(kind: str):
    here, there, away = (transport.open_device(kind) for _ in range(3))
    try:
        with pytest.raises(ValueError, match="got nan"):
            here.connect(there.address, timeout=math.nan)
        with pytest.raises(ValueError, match="the timeout of accept"):
            there.accept(timeout=math.nan)
        with pytest.raises(TransferTimeout):
            there.accept(timeout=0.0)
        with pytest.raises(TransferTimeout):
            here.connect(away.address, timeout=-1.0)  # at the other end it may have come about
        channel = here.connect(there.address, timeout=math.inf)
        accepted = there.accept(timeout=math.inf)
        news = accepted.expect(3)
        with pytest.raises(ValueError, match="got nan"):
            news.wait(timeout=math.nan)
        for timeout in (-1.0, 0.0):
            with pytest.raises(TransferTimeout):
                news.wait(timeout=timeout)
        place, data = accepted.empty((64,), dtype=torch.uint8), channel.device.empty((64,), dtype=torch.uint8)
        remote = transport.RemoteRegion.load(accepted.device.export(place))
        channel.memcpy(remote, data.fill_(7), notify=3).wait(timeout=math.inf)
        news.wait(timeout=1e300)
        assert (place == 7).all()
        channel.fence(timeout=math.inf)
    finally:
        for device in (here, there, away):
            device.close()
