"""What TLS costs on `tcp` over loopback: `python -m experiments.bench_tls ROUNDS`. Rounds with and without it alternate."""

import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch

from rdmarpc import transport

PLACE, SECRET = "tcp://127.0.0.1", b"a secret for this measurement"
PING, PONG = 1, 2  # notifications
CONNECTS, PINGS, COPIES, BYTES = 11, 1100, 12, 64 << 20
TIMEOUT_S = 60.0


def answer(link: Connection, tls: bool) -> None:
    """The other process."""
    torch.set_num_threads(1)
    with transport.open_device(PLACE, secret=SECRET, tls=tls) as device:
        link.send(device.address)
        channels = [device.accept(timeout=TIMEOUT_S) for _ in range(CONNECTS)]
        landing = channels[-1].empty(BYTES, dtype=torch.uint8).zero_()
        link.send(device.export(landing))
        ping = channels[-1].expect(PING)
        for _ in range(PINGS):
            ping.wait(TIMEOUT_S)
            channels[-1].notify(PONG)
        link.recv()


def times(step: Callable[[], object], count: int) -> float:
    """Median seconds, the first tenth left out."""
    found = []
    for _ in range(count):
        start = time.perf_counter()
        step()
        found.append(time.perf_counter() - start)
    return statistics.median(found[count // 10 :])


def measure(tls: bool) -> tuple[float, float, float]:
    """Milliseconds of a connect, microseconds of a round trip, GB/s of large copies."""
    processes = multiprocessing.get_context("spawn")
    link, theirs = processes.Pipe()
    other = processes.Process(target=answer, args=(theirs, tls), daemon=True)
    other.start()
    with transport.open_device(PLACE, secret=SECRET, tls=tls) as device:
        address = link.recv()
        channels: list[transport.Channel] = []
        connect = times(lambda: channels.append(device.connect(address)), CONNECTS)
        channel = channels[-1]
        pong, source = channel.expect(PONG), device.empty(BYTES, dtype=torch.uint8).fill_(1)

        def bounce() -> None:
            channel.notify(PING)
            pong.wait(TIMEOUT_S)

        trip = times(bounce, PINGS)
        remote = transport.RemoteRegion.load(link.recv())
        copy = times(lambda: channel.memcpy(remote, source).wait(TIMEOUT_S), COPIES)
        link.send(None)
    other.join(TIMEOUT_S)
    return connect * 1e3, trip * 1e6, BYTES / copy / 1e9


def main(rounds: int) -> None:
    rows: dict[bool, list[tuple[float, float, float]]] = {False: [], True: []}
    for _ in range(rounds):
        for tls, found in rows.items():
            found.append(measure(tls))
    for at, what in enumerate(("connect (ms)", "round trip (us)", "64 MiB (GB/s)")):
        for tls, found in rows.items():
            row = [each[at] for each in found]
            print(f"{what:16} {'tls' if tls else 'plain':6} {statistics.median(row):8.3g}  ({min(row):.3g} to {max(row):.3g})")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
