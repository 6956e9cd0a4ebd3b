"""Dynamic edges over transport alone: bits, counters, the life of sources, what is refused, a peer that dies."""

from __future__ import annotations

import copy
import gc
import random
import time
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from cluster import Cluster, Split
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from rdmarpc.graph.caller.stage import Plan
from rdmarpc.graph.plan.analyze import analyze
from rdmarpc.graph.trace.capture import TensorSpec, capture
from rdmarpc.graph.trace.sizes import FREE, Sizes
from rdmarpc.graph.wire.header import Header
from rdmarpc.graph.wire.metadata import Metadata, metadata_bytes
from rdmarpc.transport import ArenaFull, Device, NotSupported, PeerLost, RdmaError


class Delayed(nn.Module):
    """Now and then slow, forward and backward; gives what its input says (its first element) instead of a sound result."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.layer, self.random = nn.Linear(16, 16), random.Random(seed)

    def forward(self, x):
        if isinstance(x, FakeTensor):
            return torch.tanh(self.layer(x))
        self.sleep()
        y = torch.tanh(self.layer(x))
        if y.requires_grad:
            y.register_hook(lambda grad: self.sleep())
        code = int(x[0, 0]) if len(x) else 0
        return {1000: y[None], 2000: y.double()}.get(code, y)

    def sleep(self) -> None:
        if self.random.random() < 0.2:
            time.sleep(self.random.random() * 0.01)


class Shifted(nn.Module):
    """The gradient of ``shift`` lies where the gradient of its input does."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(rows, 16))

    def forward(self, x):
        return (x + self.shift.unsqueeze(0).squeeze(0)) * 2


class Sleeping(nn.Module):
    """Its backward takes long."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x):
        y = self.layer(x)
        if not isinstance(x, FakeTensor) and y.requires_grad:
            y.register_hook(lambda grad: time.sleep(0.3))
        return y


class Twice(nn.Module):
    """The worker of ``shifted`` goes backward twice while that of the others sleeps, and has not read the first gradient."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.first, self.middle, self.sleeping, self.shifted = nn.Linear(16, 16), nn.Tanh(), Sleeping(), Shifted(rows)

    def forward(self, x):
        y = self.first(x)
        return self.sleeping(self.middle(y)), self.shifted(y), self.shifted(x)


def shared_plan(split: Split, x: torch.Tensor) -> Plan:
    spec = TensorSpec(tuple(x.shape), x.dtype, x.requires_grad)

    def build() -> Any:
        found = capture(split.shape, [spec], lambda *t: (t, {}), Sizes({(0, 0)}))
        return analyze(found, split.owner, "w0")

    return split.caller.plan(x.requires_grad, build)


def counted(cluster: Cluster, split: Split, key: str) -> int:
    there = cluster.ask("counters", dict.fromkeys(split.counts, ())).values()
    return sum(counts.get(key, 0) for counts in [*there, cluster.device.counters(), split.caller.station.counts])


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_dynamic_edges(kind):
    torch.set_num_threads(1)
    cluster = Cluster(3, kind, arena_limit=192 << 20)
    try:
        torch.manual_seed(3)
        net = nn.Sequential(Delayed(1), Delayed(2), Delayed(3), nn.Linear(16, 4))
        twin = copy.deepcopy(net)
        split = Split(cluster, net, {"0": "w1", "1": "w2", "2": "w1"})
        steps(cluster, split, twin)
        sources(cluster, split, twin)
        refused(cluster, split)
        accumulated(cluster, 5, Sizes(known=False))
        accumulated(cluster, 100_000, None)
        bad_metadata(cluster)
        death(cluster)
    finally:
        cluster.close()


def steps(cluster: Cluster, split: Split, twin: nn.Module) -> None:
    """Other sizes in every step, also none: the twin's bits, one READ an edge, messages of one size, nothing registered."""
    sizes = random.Random(5)
    plan = shared_plan(split, torch.zeros(7, 16, requires_grad=True))
    edges = plan.placement.edges
    assert len(edges) == 8
    assert not any(edge.static for edge in edges)
    assert {edge.shape for edge in edges} == {(FREE, 16)}
    assert {edge.nbytes for edge in edges} == {metadata_bytes(2)}
    settled: dict[str, int] = {}
    for number in range(120):
        x = torch.randn(sizes.choice([0, 1, 7, 64, 500, sizes.randrange(2, 3000)]), 16, requires_grad=True)
        other = x.detach().clone().requires_grad_()
        weights = torch.randn(len(x), 4)
        before = {key: counted(cluster, split, key) for key in ("dynamic_reads", "posts")}
        ours, expected = split.caller.forward(plan, (x,), 1), twin(other)
        assert torch.equal(ours, expected), f"step {number}"
        (ours * weights).sum().backward()
        (expected * weights).sum().backward()
        assert torch.equal(x.grad, other.grad), f"step {number}"
        assert counted(cluster, split, "dynamic_reads") - before["dynamic_reads"] == (len(edges) if len(x) else 0)
        # Per edge the metadata, the READ and the credit, which may be late; two workers say that they are done.
        if len(x):
            assert counted(cluster, split, "posts") - before["posts"] <= 3 * len(edges) + 2 * 2 + 2
        del ours, expected
        if number == 10:
            settled = {key: counted(cluster, split, key) for key in ("registrations",)}
    assert {key: counted(cluster, split, key) for key in settled} == settled


def sources(cluster: Cluster, split: Split, twin: nn.Module) -> None:
    """Kept until they are read, and no longer; not copied where the consumer can read them as they lie."""
    device, name = cluster.device, "bytes_staged[input 0]"
    plan = shared_plan(split, torch.zeros(7, 16))
    for number in range(6):
        born = device.empty((300, 16), dtype=torch.float32).normal_()
        plain = torch.randn(200, 16)
        wide = torch.randn(50, 32)[:, ::2]
        turned = torch.randn(16, 40).t()
        for x, staged_on_tcp, staged_on_shm in (
            (born, 0, 0),
            (plain, 200 * 64, 0),
            (wide, 50 * 64, 50 * 64),
            (turned, 40 * 64, 0),
        ):
            before = split.caller.station.counts[name]
            with torch.no_grad():
                assert torch.equal(split.caller.forward(plan, (x,), 1), twin(x)), f"step {number}"
            staged = split.caller.station.counts[name] - before
            assert staged == (staged_on_tcp if device.name.startswith("tcp") else staged_on_shm)
    if not device.name.startswith("tcp"):
        before = split.caller.station.counts[name]
        device.can_lend = partial(Device.can_lend, device)  # as if this system did not let a process read another
        with torch.no_grad():
            assert torch.equal(split.caller.forward(plan, (plain,), 1), twin(plain))
        assert split.caller.station.counts[name] - before == 200 * 64
        del device.can_lend
    watched = weakref.ref(plain.untyped_storage())
    del born, plain, wide, turned, x
    deadline = time.monotonic() + 30
    [outlet] = plan.fittings.outlets_of("activation", "input 0")
    while not all(target.free for target in outlet._targets):
        assert time.monotonic() < deadline, "no credit"
        split.caller.station.poll(0.1)
    assert all(target.source is None for target in outlet._targets)
    gc.collect()
    assert watched() is None


def refused(cluster: Cluster, split: Split) -> None:
    """Rank and dtype are fixed: what does not fit is an error that names the edge, and the model goes on."""
    plan = shared_plan(split, torch.zeros(7, 16))
    x = torch.randn(7, 16)
    with torch.no_grad():
        for code, what in ((1000, r"\(1, 7, 16\) torch.float32"), (2000, r"\(7, 16\) torch.float64")):
            x[0, 0] = code
            with pytest.raises(NotSupported, match=rf"activation 0 is {what}, but \(\?, 16\) torch.float32 was captured"):
                split.caller.forward(plan, (x,), 1)
        with pytest.raises(NotSupported, match=r"activation input 0 is \(7, 15\)"):
            split.caller.forward(plan, (x[:, 1:],), 1)
        if not cluster.device.name.startswith("tcp"):  # there it is the sender whose arena is too small
            with pytest.raises(
                ArenaFull, match=r"on worker 'w1': activation input 0 \(dynamic edge \d+\): .*(.|\n)*arena_limit"
            ):
                split.caller.forward(plan, (torch.zeros(4_000_000, 16),), 1)
        x[0, 0] = 0
        assert split.caller.forward(plan, (x,), 1).shape == (7, 4)
    split.caller.close()


def accumulated(cluster: Cluster, rows: int, sizes: Sizes | None) -> None:
    """A gradient that is still to be read, or to be sent, is not accumulated into, whatever shares its memory."""
    torch.manual_seed(4)
    net = Twice(rows)
    twin = copy.deepcopy(net)
    split = Split(cluster, net, {"first": "w2", "sleeping": "w2", "shifted": "w1"})
    x = torch.randn(rows, 16)

    def build() -> Any:
        found = capture(split.shape, [TensorSpec((rows, 16), x.dtype)], lambda *t: (t, {}), sizes)
        return analyze(found, split.owner, "w0")

    plan = split.caller.plan("any", build)
    for network in (lambda x: split.caller.forward(plan, (x,), 1), twin):
        sum(output.pow(2).sum() for output in network(x)).backward()
    states = cluster.ask("gradients", {"w1": (), "w2": ()})
    assert torch.equal(states["w1"]["shifted.shift"], twin.shifted.shift.grad)
    assert torch.equal(states["w2"]["first.weight"], twin.first.weight.grad)
    split.caller.close()


def bad_metadata(cluster: Cluster) -> None:
    """Metadata that contradict themselves are an error at the consumer, before anything is read."""
    split = Split(cluster, nn.Sequential(nn.Linear(16, 16), nn.Identity()), {"0": "w1"})
    plan = shared_plan(split, torch.zeros(7, 16))
    [outlet] = plan.fittings.outlets_of("activation", "input 0")
    target = outlet._targets[0]
    source = cluster.device.empty((4, 16), dtype=torch.float32)
    Metadata(cluster.device.lend(source, outlet.channel), (1 << 40, 16)).write(target._metadata)
    Header(outlet.edge.number, 99).write(target._head)
    target.free = False
    target._transfer.post()
    with pytest.raises(RdmaError, match=r"activation input 0 \(dynamic edge \d+\): .*1099511627776, 16.* 256 bytes"):
        for _ in range(3):
            split.caller.forward(plan, (torch.zeros(7, 16),), 1)
            time.sleep(0.1)
    split.caller.close()


def death(cluster: Cluster) -> None:
    """The sender dies between its metadata and the READ."""
    split = Split(cluster, nn.Sequential(nn.Linear(16, 16), nn.Identity()), {"0": "w1"}, timeout=60.0)
    plan = shared_plan(split, torch.zeros(7, 16))
    channel = cluster.channels["w1"]
    read = channel.memcpy

    def memcpy(*args: Any, **options: Any) -> Any:
        cluster.processes["w1"].kill()
        cluster.processes["w1"].join()
        return read(*args, **options)

    channel.memcpy = memcpy
    started = time.monotonic()
    with pytest.raises(PeerLost, match=r"0 \(dynamic edge \d+\).*peer=w1"):
        split.caller.forward(plan, (torch.zeros(100_000, 16),), 1)
    assert time.monotonic() - started < 50
    split.caller.close()
