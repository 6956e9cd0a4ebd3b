"""The workers of ``bench_verbs``: two of rdmarpc, one that runs perftest, two each of torch RPC over ``ibv`` and ``uv``.

Each group measures the same round in its turn, while the others have nothing to do.
"""

import itertools
import logging
import os
import time
from collections import Counter
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ..harness.measure import Samples, connected, identity, per_iteration, window
from ..harness.processes import Launcher
from .perftest import Perftest

ARRIVED, ANSWERED = 1, 2  # notifications
IN_FLIGHT = 16
TRANSFERS = 16
TOGETHER = 50  # pings of one sample
SMALL = 8
TIMEOUT_S = 120.0


def rdmarpc_main(rank: int, job: dict[str, Any], launcher: Launcher) -> None:
    """A worker from its first line to its last; worker0 tells ("progress", text), ("samples", ...) and ("counters", ...)."""
    import rdmarpc as rpc

    options = rpc.RpcBackendOptions(
        init_method=f"file://{job['meeting_place']}/rdmarpc", transport="verbs", rpc_timeout=TIMEOUT_S
    )
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    end = End(job["links"][rank], rank == 0, max(job["sizes"]))
    if rank == 0:
        measure(rpc, end, job, launcher)
    else:
        end.serve()
    end.close()
    rpc.shutdown()


class End:
    """One of two ends of a channel of the verbs device. The first one measures and tells the other what to do."""

    def __init__(self, link: Connection, first: bool, largest: int) -> None:
        from rdmarpc import transport

        self.link = link
        self.device = transport.open_device("verbs")
        self.channel = connected(self.device, link, first, TIMEOUT_S)
        self.arrived = self.channel.expect(ARRIVED)
        self.answered = self.channel.expect(ANSWERED)
        self.answering = self.channel.prepare([], notify=ANSWERED)
        self.source = self.device.empty((largest,), dtype=torch.uint8).fill_(1)
        landing = self.channel.empty((largest,), dtype=torch.uint8).zero_()
        link.send(self.device.export(landing))
        self.landing, self.remote = landing, transport.RemoteRegion.load(link.recv())
        self.small = self.channel.prepare([(self.remote[:SMALL], self.source[:SMALL])], notify=ARRIVED)

    def stream(self, size: int, times: int) -> float:
        """Bytes a second of so many prepared and notified WRITEs, ``IN_FLIGHT`` unfinished, until the last is done."""
        pairs = [(self.remote[:size], self.source[:size])]
        transfers = itertools.cycle([self.channel.prepare(pairs, notify=ARRIVED) for _ in range(TRANSFERS)])
        self.tell("receive", times)
        begin = time.perf_counter()
        window(lambda: next(transfers).post(), IN_FLIGHT, times)
        seconds = time.perf_counter() - begin
        self.answered.wait(TIMEOUT_S)
        return times * size / seconds

    def receive(self, times: int) -> None:
        """The other side of ``stream``."""
        self.channel.expect(ARRIVED, count=times).wait(TIMEOUT_S)
        self.answering.post().wait(TIMEOUT_S)

    def one_way_us(self, times: int) -> float:
        """Half of the median round trip of a prepared and notified WRITE of 8 bytes."""
        self.tell("pong", (times + 1) * TOGETHER)
        return per_iteration(partial(self.ping, TOGETHER), times) / TOGETHER / 2

    def ping(self, times: int) -> None:
        post, wait = self.small.post, self.arrived.wait
        for _ in range(times):
            post().wait()  # its completion while the message is on its way, as ib_write_lat
            wait()

    def pong(self, times: int) -> None:
        """The other side of ``ping``."""
        post, wait = self.small.post, self.arrived.wait
        for _ in range(times):
            wait()
            post().wait()

    def tell(self, command: str, *arguments: int) -> None:
        """Make the other end run one of its methods."""
        self.link.send((command, *arguments))

    def serve(self) -> None:
        """Does what it is told until it is told to stop."""
        commands = {"receive": self.receive, "pong": self.pong}
        while (order := self.link.recv())[0] != "stop":
            commands[order[0]](*order[1:])

    def close(self) -> None:
        self.channel.close()
        self.device.close()


class Calls:
    """The Python of one way and nothing else: a post and the waits on what is there already, between two devices of this
    process that have shared memory for a network."""

    def __init__(self) -> None:
        from rdmarpc import transport

        self.devices = [transport.open_device("shm") for _ in range(2)]
        here, there = self.devices
        self.channel = here.connect(there.address, timeout=TIMEOUT_S)
        accepted = there.accept(timeout=TIMEOUT_S)
        source, self.landing = (each.empty((SMALL,), dtype=torch.uint8).zero_() for each in (here, accepted))
        remote = transport.RemoteRegion.load(there.export(self.landing))
        self.transfer = self.channel.prepare([(remote, source)], notify=ARRIVED)
        self.arrived = accepted.expect(ARRIVED)

    def us(self, times: int) -> float:
        return per_iteration(partial(self._run, TOGETHER), times) / TOGETHER

    def _run(self, times: int) -> None:
        post, wait = self.transfer.post, self.arrived.wait
        for _ in range(times):
            work = post()
            wait()
            work.wait()

    def close(self) -> None:
        for device in self.devices:
            device.close()


def measure(rpc: Any, end: End, job: dict[str, Any], launcher: Launcher) -> None:
    """The rounds as worker0 drives them."""
    samples, calls, size = Samples(), Calls(), job["call"]
    tensors = {
        "arena": rpc._get_current_rpc_agent().device.empty((size,), dtype=torch.uint8).fill_(1),
        "ordinary": torch.ones(size, dtype=torch.uint8),
    }
    for x in tensors.values():  # the first calls of a signature make its landing places
        for _ in range(3):
            rpc.rpc_sync("worker1", identity, args=(x,))
    model, step = model_of(rpc)
    for _ in range(5):
        step()
    before = registrations(rpc, end)
    for number in range(job["rounds"]):
        launcher.wait_for_turn()
        launcher.tell(("progress", f"round {number + 1}"))
        for nbytes in job["sizes"]:
            samples.add("bandwidth", nbytes, "rdmarpc", end.stream(nbytes, writes(job, nbytes)))
        samples.add("one_way", SMALL, "python", calls.us(job["pings"]))
        samples.add("one_way", SMALL, "rdmarpc", end.one_way_us(job["pings"]))
        for name, x in tensors.items():
            staged = everywhere(rpc)["bytes_staged"]
            call_us = per_iteration(lambda: rpc.rpc_sync("worker1", identity, args=(x,)), job["calls"])  # noqa: B023
            samples.add("identity", size, f"rdmarpc_{name}", call_us)
            samples.add("staged", size, name, (everywhere(rpc)["bytes_staged"] - staged) / (job["calls"] + 1))
    steps = steps_counted(rpc, model, step, job["steps"])
    launcher.tell(("counters", {"registrations": registrations(rpc, end) - before, "step": steps}))
    end.tell("stop")
    calls.close()
    launcher.tell(("samples", samples.records()))


def writes(job: dict[str, Any], nbytes: int) -> int:
    """WRITEs of one sample."""
    return max(IN_FLIGHT, job["bytes"] // nbytes)


def model_of(rpc: Any) -> tuple[Any, Any]:
    """Two stages, one a worker, and a training step of them."""
    torch.manual_seed(0)
    model = rpc.wrap(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), {"1": "worker1"})
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    x, y = torch.randn(16, 64), torch.randn(16, 64)

    def step() -> None:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        loss.item()

    return model, step


def steps_counted(rpc: Any, model: Any, step: Any, steps: int) -> dict[str, Any]:
    """The counts that a traced step adds at each worker, without those that reading the counters adds."""
    none, some = (Counter[str]() for _ in range(2))
    asked = {0: none, steps: some}
    for times, totals in asked.items():
        before = {rank: counted(rpc, rank) for rank in range(2)}
        for _ in range(times):
            step()
        for rank in range(2):
            totals.update({f"worker{rank}.{key}": value - before[rank][key] for key, value in counted(rpc, rank).items()})
    return {key: (some[key] - none[key]) / steps for key in some}


def counters() -> dict[str, int]:
    """This worker's counters. A call runs this at the other worker."""
    import rdmarpc as rpc

    kept = ("posts", "bytes_direct", "bytes_staged", "registrations", "rpc_messages")
    return {key: value for key, value in rpc.counters().items() if key in kept}


def counted(rpc: Any, rank: int) -> dict[str, int]:
    return counters() if rank == 0 else rpc.rpc_sync("worker1", counters)


def everywhere(rpc: Any) -> Counter[str]:
    """The counters of both workers, added up."""
    return Counter(counted(rpc, 0)) + Counter(counted(rpc, 1))


def registrations(rpc: Any, end: End) -> int:
    """The registrations of the devices below the calls and the model, at both workers, and of the measuring end's device."""
    return everywhere(rpc)["registrations"] + end.device.counters()["registrations"]


def perftest_main(rank: int, job: dict[str, Any], launcher: Launcher) -> None:
    """Tells ("progress", text) and ("samples", ...)."""
    samples, perftest = Samples(), Perftest(job["port"].split(":")[0], job["gid_index"])
    for number in range(job["rounds"]):
        launcher.wait_for_turn()
        launcher.tell(("progress", f"round {number + 1}"))
        for nbytes in job["sizes"]:
            samples.add("bandwidth", nbytes, "perftest", perftest.bandwidth(nbytes, writes(job, nbytes)))
        samples.add("one_way", SMALL, "perftest", perftest.latency_us(SMALL, job["pings"] * TOGETHER))
    launcher.tell(("samples", samples.records()))


def torch_main(transport: str, rank: int, job: dict[str, Any], launcher: Launcher) -> None:
    """torch RPC over one of TensorPipe's transports; worker0 tells ("progress", text) and ("samples", ...)."""
    import torch.distributed.rpc as rpc

    logging.captureWarnings(True)  # torch warns of its own deprecated parts
    os.environ["TP_SOCKET_IFNAME"] = job["interface"]
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{job['meeting_place']}/torch_{transport}",
        rpc_timeout=0,
        _transports=[transport],
        _channels=["basic"],
    )
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        samples, x = Samples(), torch.ones(job["call"], dtype=torch.uint8)
        rpc.rpc_sync("worker1", identity, args=(x,))
        for number in range(job["rounds"]):
            launcher.wait_for_turn()
            launcher.tell(("progress", f"round {number + 1}"))
            call_us = per_iteration(lambda: rpc.rpc_sync("worker1", identity, args=(x,)), job["calls"])
            samples.add("identity", job["call"], f"torch_{transport}", call_us)
        launcher.tell(("samples", samples.records()))
    rpc.shutdown()
