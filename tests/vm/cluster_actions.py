"""What a process on a host of the cluster can be ordered to do; arguments and results are JSON.

Numbers of bytes are small: the guests are emulated. What a tensor should hold follows from its size and a seed, so both ends
know it.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import time
from typing import Any

import torch

from rdmarpc import transport
from rdmarpc.transport import Channel, Device, Region, RemoteRegion

SECRET = b"the two hosts of the cluster"
PEER_TIMEOUT_S = 3.0
"""Less would make an emulated host that gets no processor for a while a dead one."""


class State:
    """What the orders of one process leave behind."""

    def __init__(self) -> None:
        self.device: Device = None  # type: ignore[assignment]
        self.channels: dict[str, Channel] = {}
        self.kept: dict[str, torch.Tensor] = {}
        self.regions: dict[str, Region] = {}
        self.made: dict[str, Any] = {}


# -- the device and its channels


def open_device(state: State, name: str) -> str:
    state.device = transport.open_device(name, secret=SECRET, peer_timeout=PEER_TIMEOUT_S)
    return state.device.address.decode()


def explain(state: State) -> str:
    return state.device.explain()


def counters(state: State) -> dict[str, int]:
    return state.device.counters()


def connect(state: State, to: str, address: str) -> None:
    state.channels[to] = state.device.connect(address.encode(), timeout=30.0)


def accept(state: State, whom: str) -> None:
    state.channels[whom] = state.device.accept(timeout=30.0)


def close(state: State) -> None:
    state.channels.clear()
    state.made.clear()
    state.device.close()


# -- memory


def pattern(nbytes: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def make(state: State, name: str, nbytes: int, seed: int) -> str:
    """A tensor in the arena, for all to write; its descriptor."""
    state.kept[name] = state.device.empty(nbytes, dtype=torch.uint8, writable=True)
    state.kept[name].copy_(pattern(nbytes, seed))
    return state.device.export(state.kept[name]).hex()


def register(state: State, name: str, nbytes: int, seed: int) -> str:
    """Memory of our own, that peers may touch until ``revoke``."""
    state.kept[name] = pattern(nbytes, seed)
    state.regions[name] = state.device.register(state.kept[name])
    return state.regions[name].export().hex()


def revoke(state: State, name: str) -> None:
    state.regions.pop(name).close()


def holds(state: State, name: str, seed: int) -> bool:
    return torch.equal(state.kept[name], pattern(state.kept[name].numel(), seed))


# -- copies


def remote_of(descriptor: str, changes: dict[str, int]) -> RemoteRegion:
    remote = RemoteRegion.load(bytes.fromhex(descriptor))
    fields = ("owner", "epoch", "region", "key", "offset", "nbytes")
    return RemoteRegion(**{field: changes.get(field, getattr(remote, field)) for field in fields})


def write(state: State, to: str, name: str, descriptor: str, notify: int, timeout: float) -> None:
    state.channels[to].memcpy(remote_of(descriptor, {}), state.kept[name], notify=notify).wait(timeout)


def altered(state: State, to: str, descriptor: str, changes: dict[str, int]) -> None:
    """A write by a descriptor that was tampered with."""
    remote = remote_of(descriptor, changes)
    local = torch.zeros(remote.nbytes, dtype=torch.uint8)
    state.channels[to].memcpy(remote, local, notify=99).wait(20.0)


def forge_rkey(state: State, to: str, descriptor: str) -> None:
    """Have the channel believe in another rkey than the peer announced."""
    places: dict[int, tuple[int, int, int, int, bool]] = vars(state.channels[to])["_places"]
    number = RemoteRegion.load(bytes.fromhex(descriptor)).region
    address, nbytes, key, rkey, writable = places[number]
    places[number] = address, nbytes, key, rkey ^ 0xFF00, writable


def read(state: State, to: str, name: str, descriptor: str, timeout: float) -> None:
    state.channels[to].memcpy(state.kept[name], RemoteRegion.load(bytes.fromhex(descriptor))).wait(timeout)


def wait_for(state: State, whom: str, imm: int, count: int, timeout: float) -> None:
    state.channels[whom].expect(imm, count).wait(timeout)


def came(state: State, whom: str, imm: int) -> bool:
    """Whether a notification is there that nobody has waited for."""
    return state.channels[whom].expect(imm).done()


def prepare(state: State, to: str, name: str, descriptor: str, notify: int) -> None:
    state.made[to] = state.channels[to].prepare([(remote_of(descriptor, {}), state.kept[name])], notify=notify)


def post(state: State, to: str, times: int, timeout: float) -> float:
    """Post what was prepared, one after the other; seconds that it took."""
    begin = time.monotonic()
    for _ in range(times):
        state.made[to].post().wait(timeout)
    return time.monotonic() - begin


def flood(state: State, to: str, descriptor: str, notify: int, count: int, timeout: float) -> None:
    """More posts at once than any send queue holds, each of its own bytes."""
    remote = remote_of(descriptor, {})
    piece = remote.nbytes // count
    source = state.kept["source"]
    works = []
    for i in range(count):
        part = slice(i * piece, (i + 1) * piece)
        works.append(state.channels[to].memcpy(remote[part], source[part], notify=notify))
    deadline = time.monotonic() + timeout
    for work in works:
        work.wait(max(0.1, deadline - time.monotonic()))


def post_until_lost(state: State, to: str, times: int, pause: float) -> int:
    """Goes on until an error comes, which is raised; how often it went well, if none came."""
    for _ in range(times):
        state.made[to].post().wait(30.0)
        time.sleep(pause)
    return times


def wait_until_lost(state: State, whom: str, timeout: float) -> None:
    """Only waits, and never sends: who is not asked must be missed too."""
    state.channels[whom].expect(98).wait(timeout)


def error_of(state: State, whom: str) -> str:
    error = state.channels[whom].error
    return "" if error is None else type(error).__name__


# -- faults of this process


def limit_memlock(state: State, nbytes: int) -> None:
    """As for an ordinary user of a host whose ``ulimit -l`` nobody has raised: without the capability that lifts the limit."""
    drop_capability(14)  # CAP_IPC_LOCK
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (nbytes, nbytes))


def drop_capability(number: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3, this thread
    data = (ctypes.c_uint32 * 6)()
    if libc.capget(header, data):
        raise OSError(ctypes.get_errno(), "capget")
    for word in range(3):  # effective, permitted, inheritable
        data[3 * (number // 32) + word] &= ~(1 << (number % 32))
    if libc.capset(header, data):
        raise OSError(ctypes.get_errno(), "capset")


def die(state: State) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def strangers(state: State, host: str, port: int, count: int) -> None:
    """Connections that say nothing, and are kept."""
    state.made["strangers"] = [socket.create_connection((host, port), 10.0) for _ in range(count)]


# -- calls


def join(state: State, rank: int, world_size: int, device: str, init_method: str) -> None:
    import rdmarpc as rpc

    options = rpc.RpcBackendOptions(
        init_method=init_method,
        transport=device,
        secret=SECRET.decode(),
        rpc_timeout=60,
        peer_timeout=PEER_TIMEOUT_S,
        num_worker_threads=2,
    )
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)


def double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def call(state: State, to: str, numel: int, times: int) -> bool:
    """Whether calls of ``double`` at a worker give what they should."""
    import rdmarpc as rpc

    x = torch.arange(numel, dtype=torch.float32)
    return all(torch.equal(rpc.rpc_sync(to, double, (x,)), 2 * x) for _ in range(times))


def call_until_lost(state: State, to: str, numel: int) -> None:
    while True:
        call(state, to, numel, 1)
        time.sleep(0.01)


def leave(state: State) -> None:
    import rdmarpc as rpc

    rpc.shutdown(graceful=False)


def pid(state: State) -> int:
    return os.getpid()


def open_and_fill(state: State, name: str) -> None:
    """A device, and more memory than ``limit_memlock`` allows to register."""
    open_device(state, name)
    make(state, "much", 8 << 20, 0)
