"""One of the two ends between which the benchmark measures: the floor, and a channel of one transport device."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch

from rdmarpc import transport

from ..harness.floor import Floor
from ..harness.measure import connected
from .sockets import Sockets

ARRIVED, ANSWERED = 1, 2  # notifications
TIMEOUT_S = 60.0


class End:
    """Both processes make one at the same time. The first one measures and tells the other what to do."""

    def __init__(self, link: Connection, first: bool, job: dict[str, Any]) -> None:
        self.link = link
        self.floor = Floor(link, first, max(job["sizes"] + [size for sizes in job["cells"].values() for size in sizes]))
        self.sockets = Sockets(link, first) if job["device"] == "tcp" else None
        self.device = transport.open_device(job["device"])
        self.channel = connected(self.device, link, first, TIMEOUT_S)
        self.arrived = self.channel.expect(ARRIVED)
        self.answered = self.channel.expect(ANSWERED)
        self.announcement = self.channel.prepare([], notify=ARRIVED)
        self.answering = self.channel.prepare([], notify=ANSWERED)

    def prepare(self, size: int) -> None:
        """A transfer of `size` bytes to the other end; both ends prepare at the same time."""
        self.source = self.device.empty((size,), dtype=torch.uint8).fill_(1)
        self.landing = self.channel.empty((size,), dtype=torch.uint8).zero_()
        self.returned = self.channel.empty((size,), dtype=torch.uint8).zero_()
        self.link.send((self.device.export(self.landing), self.device.export(self.returned)))
        landing, returned = map(transport.RemoteRegion.load, self.link.recv())
        self.transfer = self.channel.prepare([(landing, self.source)], notify=ARRIVED)
        self.echo = self.channel.prepare([(returned, self.landing)], notify=ANSWERED)

    def ping(self, times: int) -> None:
        """Sends and waits for the other end to send as much back, `times` times."""
        post, wait = self.transfer.post, self.arrived.wait
        for _ in range(times):
            post().wait()
            wait()

    def pong(self, times: int) -> None:
        """The other side of `ping`."""
        post, wait = self.transfer.post, self.arrived.wait
        for _ in range(times):
            wait()
            post().wait()

    def send_answered(self, times: int) -> None:
        """Sends and waits for a notification from the other end, `times` times."""
        post, wait = self.transfer.post, self.answered.wait
        for _ in range(times):
            post().wait()
            wait()

    def announce_answered(self, times: int) -> None:
        """As `send_answered`, but what goes there is only a notification too."""
        post, wait = self.announcement.post, self.answered.wait
        for _ in range(times):
            post().wait()
            wait()

    def answer(self, times: int) -> None:
        """The other side of both."""
        wait, post = self.arrived.wait, self.answering.post
        for _ in range(times):
            wait()
            post().wait()

    def return_all(self, times: int) -> None:
        """The other side of `send_answered`, sending back what has landed."""
        wait, post = self.arrived.wait, self.echo.post
        for _ in range(times):
            wait()
            post().wait()

    def send_stream(self, times: int) -> None:
        """Sends `times` times without waiting in between; returns when all of it has arrived."""
        post = self.transfer.post
        for _ in range(times):
            post().wait()
        self.answered.wait()

    def receive_stream(self, times: int) -> None:
        """The other side of `send_stream`."""
        self.channel.expect(ARRIVED, count=times).wait()
        self.answering.post().wait()

    def tell(self, command: str, *arguments: int) -> None:
        """Make the other end run one of its methods."""
        self.link.send((command, *arguments))

    def serve(self) -> None:
        """Does what it is told until it is told to stop."""
        commands: dict[str, Callable[..., Any]] = {
            "flags": self.floor.ping_pong,
            "prepare": self.prepare,
            "pong": self.pong,
            "answer": self.answer,
            "return_all": self.return_all,
            "receive_stream": self.receive_stream,
        }
        if self.sockets is not None:
            commands |= {"compiled": self.sockets.compiled, "python": self.sockets.python}
        while (order := self.link.recv())[0] != "stop":
            with self.own_core():
                commands[order[0]](*order[1:])

    @contextmanager
    def own_core(self) -> Iterator[None]:
        """This thread on one core, the other end's on another where there are two: a scheduler that finds two waiting
        processes idle enough puts both on one. The threads of the RPC layers stay free."""
        allowed = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(allowed) if self.floor.first else max(allowed)})
        try:
            yield
        finally:
            os.sched_setaffinity(0, allowed)

    def close(self) -> None:
        if self.sockets is not None:
            self.sockets.close()
        self.channel.close()
        self.device.close()
