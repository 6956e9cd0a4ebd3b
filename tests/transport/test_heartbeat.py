"""Signs of life: beats between frames, never inside one; and what counts as silence."""

from __future__ import annotations

import os
import random
import socket
import struct
import threading
import time

import numpy as np
import pytest

from rdmarpc.transport import kernels, open_device
from rdmarpc.transport.heartbeat import Heart, Looks

_FRAME = struct.Struct("<II")  # kind (1 data, 2 beat), bytes that follow
_BEAT = _FRAME.pack(2, 40) + b"\xbb" * 40


def _receive(sock: socket.socket, slow: float, found: dict[int, int], wrong: list[bytes]) -> None:
    stream = bytearray()
    while piece := sock.recv(random.randrange(1, 4096)):
        stream += piece
        while len(stream) >= _FRAME.size:
            kind, nbytes = _FRAME.unpack_from(stream)
            if (kind, nbytes > 1 << 20) not in ((1, False), (2, False)):
                wrong.append(bytes(stream[:64]))
                return
            if len(stream) < _FRAME.size + nbytes:
                break
            if set(stream[_FRAME.size : _FRAME.size + nbytes]) - {0xBB if kind == 2 else 0xDD}:
                wrong.append(bytes(stream[:64]))
                return
            del stream[: _FRAME.size + nbytes]
            found[kind] += 1
        if slow and random.random() < 0.02:
            time.sleep(slow)
    if stream:
        wrong.append(bytes(stream[:64]))


@pytest.mark.parametrize("slow", [0.0, 0.002])
def test_beats_go_between_frames_whatever_room_there_is(slow):
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4608)
    ours.settimeout(20)
    heart = Heart(frame=_BEAT, tick_ns=20_000)
    found, wrong = {1: 0, 2: 0}, []
    receiver = threading.Thread(target=_receive, args=(theirs, slow, found, wrong))
    receiver.start()
    pulse = heart.pulse(ours.fileno(), 0.0)
    pulse.free()
    sent = 0
    try:
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline:
            owed = pulse.take()
            ours.sendall(owed + _FRAME.pack(1, size := random.randrange(0, 9000)) + b"\xdd" * size)
            pulse.free()
            sent += 1
            if random.random() < 0.1:
                time.sleep(random.random() / 2000)
        owed = pulse.take()
        pulse.close()
        ours.sendall(owed)
        pulse.end()
        at_close = found[2]
        ours.shutdown(socket.SHUT_WR)
        receiver.join(10)
    finally:
        heart.stop()
        ours.close()
        receiver.join(10)
        theirs.close()
    assert not wrong and found[1] == sent
    assert at_close and found[2] > 50, "hardly any beats went out"


def test_a_closed_pulse_beats_no_more_and_its_row_is_used_again():
    heart = Heart(frame=_BEAT, tick_ns=20_000)
    ours, theirs = socket.socketpair()
    theirs.settimeout(2)
    try:
        pulse = heart.pulse(ours.fileno(), 0.0)
        time.sleep(0.02)
        theirs.setblocking(False)
        with pytest.raises(BlockingIOError):  # taken until it is freed
            theirs.recv(1)
        pulse.free()
        theirs.settimeout(2)
        assert theirs.recv(len(_BEAT)) == _BEAT
        pulse.close()
        assert pulse.take() == b""
        time.sleep(0.02)
        theirs.setblocking(False)
        try:
            while theirs.recv(1 << 16):
                pass
        except BlockingIOError:
            pass
        time.sleep(0.02)
        with pytest.raises(BlockingIOError):
            theirs.recv(1)
        pulse.end()
        assert heart.pulse(ours.fileno(), 1.0)._row == pulse._row
    finally:
        heart.stop()
        ours.close()
        theirs.close()


def test_the_heart_beats_while_the_gil_is_held():
    import ctypes

    word = np.zeros(1, np.int64)
    heart = Heart(word.ctypes.data)
    try:
        before = kernels.load(word.ctypes.data)
        ctypes.PyDLL(None).usleep(1_200_000)
        assert kernels.load(word.ctypes.data) >= before + 3
    finally:
        heart.stop()


def test_silence_is_counted_in_looks():
    looks = Looks(4.0)
    assert looks.interval == 1.0 and looks.due() == 0.0
    looks._last -= 1000.0  # we did not look for long: that is no fault of a peer
    assert looks.due() == 1.0
    assert not looks.too_long(3.9) and looks.too_long(4.0)
    assert Looks(0.0).due() == 0.0


@pytest.mark.parametrize("name", ["shm", "tcp"])
def test_a_timeout_too_short_for_beats_is_refused(name):
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ValueError, match="at least 1"):
        open_device(name, peer_timeout=0.2)
    assert len(os.listdir("/proc/self/fd")) == before
