"""Workloads without a fixed group around them: channels of bare devices, and groups that workers join and leave."""

from __future__ import annotations

import itertools
import os
import random
import threading
import time
from typing import Any

import torch

import rdmarpc as rpc
from rdmarpc import transport

from .diary import Wrong, ranks_in, same
from .workloads import Scene, add, double, make, name_of

LANES = 3
_LANE = 1 << 19
_PING, _PONG = 20, 30


def meet(scene: Scene, what: str, mine: bytes, seconds: float) -> dict[int, bytes]:
    """What every worker that is not lost has said of itself; of those who come within so many seconds."""
    path = scene.folder / f"{what}{scene.rank}"
    path.with_suffix(".new").write_bytes(mine)
    os.rename(path.with_suffix(".new"), path)
    found: dict[int, bytes] = {}
    limit = time.monotonic() + seconds
    while len(found) < len(scene.alive()) and time.monotonic() < limit:
        for rank in scene.alive():
            other = scene.folder / f"{what}{rank}"
            if rank not in found and other.exists():
                found[rank] = other.read_bytes()
        time.sleep(0.005)
    return found


class Ends:
    """A bare device, a channel to every other worker, and a region at each of them that is ours to write."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self._mine, self._lanes = threading.local(), itertools.count()
        self.channels: dict[int, Any] = {}
        self.places: dict[int, Any] = {}
        self.device = transport.open_device(
            scene.trial.device,
            secret=b"the secret of a campaign",
            peer_timeout=scene.options["peer_timeout"],
            on_connect=self._welcome,
        )
        self._room = [self.device.empty(LANES * _LANE, dtype=torch.uint8, writable=True) for _ in range(scene.trial.size)]
        self._exports = [self.device.export(room) for room in self._room]

    def _welcome(self, channel: Any) -> bytes:
        rank, place = int(channel.peer_hello[:1][0]), channel.peer_hello[1:]
        channel.peer = name_of(rank)
        self._enter(rank, channel, place)
        return bytes([self.scene.rank]) + self._exports[rank]

    def _enter(self, rank: int, channel: Any, place: bytes) -> None:
        self.places[rank] = transport.RemoteRegion.load(place)
        self.channels[rank] = channel
        for lane in range(LANES):
            threading.Thread(target=self._answer, args=(channel, lane), daemon=True).start()

    def connect(self) -> None:
        scene = self.scene
        for rank, address in meet(scene, "address", self.device.address, 5.0).items():
            if rank < scene.rank:
                with scene.diary.doing("connect", scene.rank, rank):
                    hello = bytes([scene.rank]) + self._exports[rank]
                    channel = self.device.connect(address, hello=hello, timeout=5.0)
                    channel.peer = name_of(rank)
                    self._enter(rank, channel, channel.peer_hello[1:])

    def _answer(self, channel: Any, lane: int) -> None:
        """Every ping is answered, until the channel ends."""
        try:
            while True:
                channel.expect(_PING + lane).wait(None)
                channel.notify(_PONG + lane)
        except rpc.RdmaError:
            return

    def _lane(self) -> int:
        """Threads write to places of their own."""
        if not hasattr(self._mine, "lane"):
            self._mine.lane = next(self._lanes)
        return self._mine.lane

    def step(self, chance: random.Random) -> None:
        scene = self.scene
        rank = chance.choice([rank for rank in self.channels if rank in scene.alive()] or [-1])
        if rank < 0:
            time.sleep(0.01)
            return
        lane = self._lane()
        channel, place = self.channels[rank], self.places[rank]
        size = chance.choice((1, 4096, 100_000, _LANE))
        at = lane * _LANE + chance.randrange(_LANE - size + 1)
        value = (torch.arange(size) * chance.randrange(1, 200)).to(torch.uint8)
        back = self.device.empty(size, dtype=torch.uint8)
        with scene.diary.doing("write", scene.rank, rank):
            channel.memcpy(place[at : at + size], value).wait(20.0)
            channel.memcpy(back, place[at : at + size]).wait(20.0)
            same(back, value, "what was written and read back")
            channel.notify(_PING + lane)
            channel.expect(_PONG + lane).wait(20.0)
        time.sleep(chance.uniform(0, 0.005))


class Visits:
    """A group without ``world_size``. Workers 0 and 1 stay; the others join, call everybody, and leave, again and again."""

    def __init__(self, scene: Scene) -> None:
        self.scene, self.life = scene, 0

    def join(self) -> bool:
        scene = self.scene
        self.life += 1
        name = name_of(scene.rank) if scene.rank < 2 else f"{name_of(scene.rank)}-{self.life}"
        with scene.diary.doing("join", *range(scene.trial.size)):
            options = rpc.RpcBackendOptions(**scene.options)
            rpc.init_rpc(name, rank=scene.rank, rpc_backend_options=options)
            return True
        return False

    def step(self, chance: random.Random) -> None:
        """One call to somebody who is in the group now."""
        scene = self.scene
        name = chance.choice(rpc._get_current_rpc_agent().worker_names() or [""])
        if not name:
            time.sleep(0.01)
            return
        (to,) = ranks_in(name)
        with scene.diary.doing("call", scene.rank, to):
            number = chance.randrange(10**6)
            same(rpc.rpc_sync(name, add, (number, 1)), number + 1, "add")
            value = make(number, 20_000)
            same(rpc.rpc_sync(name, double, (value,)), double(value), "double")
        time.sleep(chance.uniform(0, 0.01))

    def stay(self, chance: random.Random) -> None:
        """Until the end, or (visitors) for a moment."""
        scene = self.scene
        limit = time.monotonic() + (1e9 if scene.rank < 2 else chance.uniform(0.1, 0.6))
        while scene.going and time.monotonic() < limit:
            self.step(chance)

    def leave(self) -> None:
        with self.scene.diary.doing("leave", *range(self.scene.trial.size)):
            rpc.shutdown(timeout=20)
        if rpc._is_current_rpc_agent_set():
            raise Wrong("shutdown left an agent behind")
