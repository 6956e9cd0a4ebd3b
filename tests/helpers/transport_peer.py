"""A peer in a process of its own, that runs functions of the test files on its device and its channel."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from forks import forks

from rdmarpc import transport
from rdmarpc.transport import Channel, Device, RemoteRegion

ENCRYPTED = {"tls": True, "secret": b"a secret of tests"}
"""Options of a device whose streams are encrypted."""
C, S = ord("c"), ord("s")
"""Bytes that come from the connecting side, and from the other one: a copy in the wrong direction shows."""


class State:
    """What the functions of one peer share."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.channel: Channel = None  # type: ignore[assignment]
        self.kept: dict[str, Any] = {}


def _serve(pipe: Connection, kind: str, options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    with transport.open_device(kind, **options) as device:
        state = State(device)
        pipe.send(device.address)
        while True:
            try:
                order = pipe.recv()
            except EOFError:
                return
            if order is None:
                return
            function, args = order
            try:
                pipe.send((True, function(state, *args)))
            except BaseException as error:
                error.add_note(traceback.format_exc())
                pipe.send((False, error))


class Peer:
    """Started with a device of this kind; ``stop`` (or ``kill``) it."""

    def __init__(self, kind: str, **options: Any) -> None:
        self._pipe, theirs = forks().Pipe()
        self.process = forks().Process(target=_serve, args=(theirs, kind, options), daemon=True)
        self.process.start()
        theirs.close()
        self.address: bytes = self._receive(60.0)

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        """Have it run ``function(state, *args)``; ``finish`` gives the result."""
        self._pipe.send((function, args))

    def finish(self, timeout: float = 60.0) -> Any:
        good, result = self._receive(timeout)
        if not good:
            raise result
        return result

    def call(self, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> Any:
        self.start(function, *args)
        return self.finish(timeout)

    def stop(self) -> None:
        try:
            self._pipe.send(None)
        except OSError:
            pass
        self.process.join(30.0)
        self.kill()

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        if self.process.is_alive():
            self.process.kill()
        self.process.join(30.0)
        assert not self.process.is_alive()
        self._pipe.close()

    def _receive(self, timeout: float) -> Any:
        assert self._pipe.poll(timeout), f"the peer process did not answer within {timeout} s"
        return self._pipe.recv()


@dataclass
class Pair:
    """Two devices of this process, connected: what is ``a``'s connected, what is ``b``'s accepted."""

    a: Device
    b: Device
    ab: Channel
    ba: Channel

    def remote(self, tensor: torch.Tensor) -> RemoteRegion:
        """The descriptor, as ``a`` receives it, of an arena tensor of ``b``."""
        return RemoteRegion.load(self.b.export(tensor))


@dataclass
class Across:
    """Our device connected to one in a process of its own."""

    device: Device
    channel: Channel
    peer: Peer


def works(a: Device, b: Device) -> None:
    """``a`` can connect to ``b`` and copy."""
    channel = a.connect(b.address)
    b.accept(timeout=30.0)
    theirs = filled(b, 10, 0)
    channel.memcpy(RemoteRegion.load(b.export(theirs)), a.empty(10, dtype=torch.uint8).fill_(C)).wait(30.0)
    assert bool((theirs == C).all())
    channel.close()


def filled(device: Device, nbytes: int, fill: int) -> torch.Tensor:
    """Of the arena, for all peers to read and write."""
    return device.empty(nbytes, dtype=torch.uint8, writable=True).fill_(fill)


def altered(remote: RemoteRegion, **fields: int) -> RemoteRegion:
    names = ("owner", "epoch", "region", "key", "offset", "nbytes")
    return RemoteRegion(**{name: fields.get(name, getattr(remote, name)) for name in names})


def all_are(tensor: torch.Tensor, fill: int) -> bool:
    return bool((tensor == fill).all())


# -- orders


def accept(state: State) -> bytes:
    state.channel = state.device.accept(timeout=30.0)
    return state.channel.peer_hello


def make(state: State, name: str, nbytes: int, fill: int) -> bytes:
    """A tensor in the peer's arena, every byte ``fill``, for us to read and write: its descriptor."""
    tensor = filled(state.device, nbytes, fill)
    state.kept[name] = tensor
    return state.device.export(tensor)


def fetch(state: State, name: str) -> bytes:
    return bytes(state.kept[name].numpy())


def wait_for(state: State, imm: int, count: int, timeout: float) -> None:
    state.channel.expect(imm, count).wait(timeout)


def write(state: State, name: str, remote: RemoteRegion, imm: int | None) -> None:
    state.channel.memcpy(remote, state.kept[name], notify=imm).wait(20.0)


def read(state: State, name: str, remote: RemoteRegion) -> None:
    state.channel.memcpy(state.kept[name], remote).wait(20.0)


def notify(state: State, imm: int) -> None:
    state.channel.notify(imm)


def close_channel(state: State) -> None:
    state.channel.close()


def channel_error(state: State) -> str:
    """That of an ended channel, whose thread may hear of the end a moment later."""
    limit = time.monotonic() + 5.0
    while state.channel.error is None and time.monotonic() < limit:
        time.sleep(0.01)
    return type(state.channel.error).__name__
