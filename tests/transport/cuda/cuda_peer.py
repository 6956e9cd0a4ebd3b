"""A process with a GPU, a ``cuda`` device and a channel, that runs functions of the test files. That of the tests has none."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import gpu
import torch
import transport_peer
from forks import forks
from transport_peer import C, Pair, Peer, State, accept

from rdmarpc import transport
from rdmarpc.transport import Device, RemoteRegion

T = 30.0


def _serve(pipe: Connection, kind: str, environment: dict[str, str], options: dict[str, Any]) -> None:
    os.environ.update(environment)  # before the driver reads it
    if environment.pop("NO_GPU", "") == "":
        gpu.load()
    transport_peer._serve(pipe, kind, options)


class GpuPeer(Peer):
    """``environment``: of the process, ``NO_GPU`` for one that has none."""

    def __init__(self, kind: str = "cuda", *, environment: dict[str, str] | None = None, **options: Any) -> None:
        self._pipe, theirs = forks().Pipe()
        self.process = forks().Process(target=_serve, args=(theirs, kind, environment or {}, options), daemon=True)
        self.process.start()
        theirs.close()
        self.address = self._receive(60.0)


class Two:
    """Two such processes, the first of which has connected to the second."""

    def __init__(self, here: GpuPeer, there: GpuPeer) -> None:
        self.here, self.there = here, there
        there.start(accept)
        here.call(connect, there.address)
        there.finish()

    def landing(self, nbytes: int, place: str, fill: int = 0) -> bytes:
        """The descriptor of fresh memory of the second process, on ``"cpu"``, ``"gpu"`` or ``"other"`` (GPU)."""
        return self.there.call(make, "landing", nbytes, place, fill)


def start_two() -> Iterator[Callable[..., Two]]:
    """What a fixture yields: starts ``Two`` new processes; the environment is that of both. They end with the test."""
    started: list[GpuPeer] = []

    def start(there: str = "cuda", here: str = "cuda", **environment: str) -> Two:
        started.extend(GpuPeer(kind, environment=dict(environment)) for kind in (here, there))
        return Two(*started[-2:])

    yield start
    for peer in started:
        if peer.process.is_alive():
            peer.stop()
            assert peer.process.exitcode == 0


def where(place: str) -> torch.device:
    if place == "cpu":
        return torch.device("cpu")
    return gpu.device(gpu.other() if place == "other" else 0)


def tensor_of(device: Device, nbytes: int, place: str, fill: int) -> torch.Tensor:
    made: torch.Tensor = device.empty(nbytes, dtype=torch.uint8, writable=True, device=where(place))  # type: ignore[call-arg]
    return made.fill_(fill)


# -- orders


def connect(state: State, address: bytes) -> None:
    state.channel = state.device.connect(address)


def make(state: State, name: str, nbytes: int, place: str, fill: int) -> bytes:
    state.kept[name] = tensor_of(state.device, nbytes, place, fill)
    return state.device.export(state.kept[name])


def values(state: State, name: str) -> set[int]:
    """What bytes a tensor holds, as seen by the current stream."""
    return set(state.kept[name].cpu().tolist())


def write(state: State, remote: bytes, place: str, fill: int, imm: int | None) -> None:
    there = RemoteRegion.load(remote)
    ours = tensor_of(state.device, there.nbytes, place, fill)
    state.channel.memcpy(there, ours, notify=imm).wait(T)


def read(state: State, remote: bytes, place: str) -> set[int]:
    there = RemoteRegion.load(remote)
    ours = tensor_of(state.device, there.nbytes, place, 0)
    state.channel.memcpy(ours, there).wait(T)
    return set(ours.cpu().tolist())


def write_late(state: State, remote: bytes, ms: float) -> None:
    there = RemoteRegion.load(remote)
    ours = torch.empty(there.nbytes, dtype=torch.uint8, device=gpu.device()).fill_(C)
    gpu.sleep(ms)
    state.kept["transfer"] = state.channel.prepare([(there, ours)])
    state.kept["work"] = state.kept["transfer"].post()


def post_again(state: State) -> None:
    state.kept["work"].wait(T)
    state.kept["transfer"].post()


def as_pair(run: Callable[[Pair], None], places: tuple[str, str]) -> None:
    """Run a test of the contract over two devices of this process, whose tensors lie in these places."""
    import test_contract
    import test_contract_memory
    import test_end

    with transport.open_device("cuda") as a, transport.open_device("cuda") as b:
        place = {a.uid: places[0], b.uid: places[1]}
        filled = lambda device, nbytes, fill: tensor_of(device, nbytes, place[device.uid], fill)  # noqa: E731
        test_contract.filled = test_contract_memory.filled = test_end.filled = filled
        ab = a.connect(b.address, hello=b"from a")
        run(Pair(a, b, ab, b.accept(timeout=T)))
