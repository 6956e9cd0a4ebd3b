"""Signs of life: beats between frames, never inside one; and what counts as silence."""

from __future__ import annotations

import ctypes
import os
import random
import select
import socket
import struct
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from timing import eventually

from rdmarpc.transport import open_device
from rdmarpc.transport.peers.heartbeat import FREE, Heart, Looks, Pulse
from rdmarpc.transport.words import kernels

_FRAME = struct.Struct("<II")  # kind (1 data, 2 beat), bytes that follow
_BEAT = _FRAME.pack(2, 40) + b"\xbb" * 40
T = 30.0


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


def _send(pulse: Pulse, sock: socket.socket, parts: list[bytes]) -> None:
    left = sum(map(len, parts)) - pulse.send(parts, True, random.randrange(1, 20000))
    while left:
        assert select.select([], [sock], [], T)[1]
        left -= pulse.resume(random.randrange(1, 20000))


@pytest.mark.parametrize("slow", [0.0, 0.002])
def test_beats_go_between_frames_whatever_room_there_is(slow):
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4608)
    ours.settimeout(T)
    heart = Heart(frame=_BEAT, tick_ns=20_000)
    found, wrong = {1: 0, 2: 0}, []
    receiver = threading.Thread(target=_receive, args=(theirs, slow, found, wrong))
    receiver.start()
    pulse = heart.pulse(ours.fileno(), 0.0)
    sent = 0
    try:
        begun = time.monotonic()
        while time.monotonic() < begun + 2.0 or (found[2] <= 50 and time.monotonic() < begun + T):
            size = random.randrange(1, 9000)
            _send(pulse, ours, [_FRAME.pack(1, size), b"\xdd" * size])
            sent += 1
            if random.random() < 0.1:
                time.sleep(random.random() / 2000)
        while pulse.resume(0) or kernels.load(pulse.at) != FREE or kernels.load(pulse.at + 16):
            assert select.select([], [ours], [], T)[1]
            pulse.resume(1 << 20)
        pulse.close()
        pulse.end()
        ours.shutdown(socket.SHUT_WR)
        receiver.join(T)
    finally:
        heart.stop()
        ours.close()
        receiver.join(T)
        theirs.close()
    assert not wrong and found[1] == sent
    assert found[2] > 50, "hardly any beats went out"


def _drain(sock: socket.socket) -> bytes:
    got = bytearray()
    sock.setblocking(False)
    try:
        while piece := sock.recv(1 << 16):
            got += piece
    except BlockingIOError:
        pass
    return bytes(got)


def test_a_closed_pulse_beats_no_more_and_its_row_is_used_again():
    heart = Heart(frame=_BEAT, tick_ns=20_000)
    ours, theirs = socket.socketpair()
    theirs.settimeout(T)
    try:
        pulse = heart.pulse(ours.fileno(), 0.0)
        assert theirs.recv(len(_BEAT)) == _BEAT
        pulse.close()
        time.sleep(0.02)
        _drain(theirs)
        time.sleep(0.02)
        assert not _drain(theirs)
        assert pulse.send([b"goodbye"], True, 100) == 7
        time.sleep(0.02)
        assert _drain(theirs) == b"goodbye"
        pulse.end()
        again = heart.pulse(ours.fileno(), 1.0)
        assert again.at == pulse.at
        again.close()
    finally:
        heart.stop()
        ours.close()
        theirs.close()


READER = """
import os, socket, sys
stream, told, nbytes = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3])
data = beats = 0
for wanted, number in (0, b"1"), (nbytes, b"2"):
    beats = 0
    while beats < (40 if wanted == 0 else 400):
        piece = stream.recv(1 << 20)
        if not piece:
            sys.exit("the stream has ended")
        data += piece.count(0xDD)
        if data == wanted:
            beats += piece[piece.rfind(0xDD) + 1 :].count(0xBB)
    os.write(told, number)
"""


@pytest.mark.parametrize("nbytes", [10, 4 << 20])
def test_whoever_sent_may_lose_the_gil_and_shows_life(nbytes):
    """After the system call, with all of a frame sent or a part of it, nothing here runs in Python for long: the reader says
    when it has the rest of the frame and ten beats behind it."""
    heart = Heart(frame=_BEAT, tick_ns=2_000_000)
    ours, theirs = socket.socketpair()
    hear, tell = os.pipe()
    given = [theirs.fileno(), tell]
    reader = subprocess.Popen([sys.executable, "-c", READER, *map(str, given), str(nbytes)], pass_fds=given)
    theirs.close()
    os.close(tell)
    heard = ctypes.create_string_buffer(struct.pack("ihh", hear, select.POLLIN, 0))
    try:
        pulse, frame = heart.pulse(ours.fileno(), 0.01), b"\xdd" * nbytes
        assert select.select([hear], [], [], T)[0] and os.read(hear, 1) == b"1", "no beat has come"
        out = pulse.send([frame], True, 1 << 30)
        assert ctypes.PyDLL(None).poll(heard, 1, int(T * 1000)) == 1, "no sign of life while the GIL is held"
        assert os.read(hear, 1) == b"2"
        out += pulse.resume(0)
        assert out == nbytes
        pulse.close()
        pulse.end()
    finally:
        heart.stop()
        ours.close()
        os.close(hear)
        reader.kill()
        reader.wait(T)


def test_what_is_withdrawn_is_not_sent_and_no_beat_breaks_the_frame():
    heart = Heart(frame=_BEAT, tick_ns=20_000)
    ours, theirs = socket.socketpair()
    try:
        pulse = heart.pulse(ours.fileno(), 0.0)
        frame = np.arange(1 << 17, dtype=np.int64)
        out, before = pulse.send([memoryview(frame).cast("B")], True, 1 << 30), b""
        while not out:  # beats have filled the socket
            before += _drain(theirs)
            out = pulse.resume(1 << 30)
        time.sleep(0.01)
        out += pulse.withdraw()
        assert 0 < out < frame.nbytes
        before += _drain(theirs)
        time.sleep(0.01)
        assert not _drain(theirs), "something was sent in the middle of a frame"
        rest = frame.copy().view(np.uint8)[out:]
        frame[:] = -1
        while len(rest):
            rest = rest[pulse.send([memoryview(rest)], True, 1 << 30) + pulse.withdraw() :]
            before += _drain(theirs)
        time.sleep(0.01)
        before += _drain(theirs)
        data = before[before.index(bytes(8) + b"\1") :][: frame.nbytes]
        assert np.array_equal(np.frombuffer(data, np.int64), np.arange(1 << 17))
        pulse.close()
    finally:
        heart.stop()
        ours.close()
        theirs.close()


def test_the_heart_beats_while_the_gil_is_held():
    word, switch = np.zeros(1, np.int64), sys.getswitchinterval()
    heart = Heart(word.ctypes.data)
    try:
        eventually(lambda: word[0] > 0)  # its thread needs the GIL to come to its kernel, and never again
        before, limit = word[0], time.monotonic() + T
        sys.setswitchinterval(10 * T)  # no other thread gets the GIL
        while word[0] < before + 3:
            assert time.monotonic() < limit
            ctypes.PyDLL(None).usleep(50_000)
    finally:
        sys.setswitchinterval(switch)
        heart.stop()


COLD = """
import sys, time
import numpy as np
from rdmarpc.transport.peers.heartbeat import Heart
from rdmarpc.transport.words import compiled

word, limit = np.zeros(1, np.int64), time.monotonic() + 30
with compiled._lock:  # as while other threads compile one kernel after the other
    heart = Heart(word.ctypes.data)
    while word[0] < 2:
        if time.monotonic() > limit:
            sys.exit("it does not beat")
        time.sleep(0.01)
heart.stop()
"""


def test_the_heart_beats_before_other_kernels_are_compiled(tmp_path):
    """Where none is kept on disk. Peers that have connected meanwhile took this process for stopped, after their timeout."""
    environment = {**os.environ, "RDMARPC_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", COLD], check=True, timeout=120, env=environment)


def test_silence_is_counted_in_looks():
    looks = Looks(4.0)
    looks._last = time.monotonic() + 1000.0
    assert looks.interval == 1.0 and looks.due() == 0.0
    looks._last = time.monotonic() - 1000.0  # we did not look for long: that is no fault of a peer
    assert looks.due() == 1.0
    assert not looks.too_long(3.9) and looks.too_long(4.0)
    assert Looks(0.0).due() == 0.0


@pytest.mark.parametrize("name", ["shm", "tcp"])
def test_a_timeout_too_short_for_beats_is_refused(name):
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(ValueError, match="at least 1"):
        open_device(name, peer_timeout=0.2)
    assert set(os.listdir("/proc/self/fd")) <= before
