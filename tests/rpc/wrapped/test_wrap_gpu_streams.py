"""``wrap`` with stages on GPUs whose streams lag behind: what is read and written when, what is shown of it, and the ends."""

from __future__ import annotations

import json
import time
import warnings
from functools import partial
from typing import Any

import gpu
import pytest
import torch
import torch.nn.functional as F
import wrap_models as models
from group import die, dismiss, results, run_group
from test_wrap import leave_after_a_loss, on_driver
from test_wrap_gpu import (
    CHAIN,
    TRANSPORTS,
    all_of,
    assert_same_state,
    batches,
    both,
    drive,
    one_after_another,
    places,
)
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import rdmarpc as rpc
from rdmarpc import wrap

pytestmark = pytest.mark.gpu


# -- streams that lag behind their threads


class Lagging(nn.Module):
    """Its GPU is late, forward and backward: what is told of it before it is there, or reused too early, gives other bits."""

    def __init__(self, inputs: int, outputs: int, ms: float) -> None:
        super().__init__()
        self.layer, self.ms = nn.Linear(inputs, outputs), ms

    def forward(self, x):
        lag(x, self.ms)
        return Late.apply(self.layer(x), self.ms)


class Late(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, ms):
        ctx.ms = ms
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        lag(grad, ctx.ms)
        return grad.clone(), None


def lag(x: torch.Tensor, ms: float) -> None:
    if not isinstance(x, FakeTensor) and not x.is_cpu:
        gpu.sleep(ms, x.device.index)


class Copying(nn.Module):
    """Nothing but work that nobody waits for: it is done long after the forward, and after the backward, has returned."""

    def __init__(self, ms: float) -> None:
        super().__init__()
        self.ms = ms

    def forward(self, x):
        return Copied.apply(x, self.ms)


class Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, ms):
        ctx.ms = ms
        lag(x, ms)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        lag(grad, ctx.ms)
        return grad.clone(), None


def lagging() -> nn.Module:
    return nn.Sequential(Lagging(20, 64, 3), nn.ReLU(), Lagging(64, 64, 1), nn.Tanh(), Lagging(64, 4, 2))


def late_streams(steps: int = 6) -> None:
    model, twin = both(lagging, CHAIN)
    home = gpu.device()
    mine, theirs = (torch.optim.SGD(network.parameters(), 0.1) for network in (model, twin))
    for number, (x, y) in enumerate(batches(steps, 8, 20)):
        x, y = x.to(home), y.to(home)
        if number % 3 == 2:
            loss = model.forward_backward(F.cross_entropy, x, target=y, chunks=4)
            expected = one_after_another(twin, F.cross_entropy, 4, x, y)
        elif number % 3 == 1:
            # What was given to the model may be overwritten when it has returned.
            given = x.clone()
            loss, expected = F.cross_entropy(model(given), y), F.cross_entropy(twin(x), y)
            given.fill_(float("nan"))
            loss.backward()
            expected.backward()
        else:
            kept = [model(x * scale) for scale in (1.0, 2.0)]
            expected = [twin(x * scale) for scale in (1.0, 2.0)]
            loss, expected = (F.cross_entropy(a, y) + F.cross_entropy(b, y) for a, b in (kept, expected))
            loss.backward()
            expected.backward()
        for optimizer in (mine, theirs):
            optimizer.step()
            optimizer.zero_grad()
        assert loss.item() == expected.item(), f"step {number}"
        with torch.no_grad():
            outputs = [model(x * scale) for scale in range(5)]  # more than there are slots
            for scale, output in enumerate(outputs):
                assert torch.equal(output, twin(x * scale))
    assert_same_state(model, twin)
    model.close()


def slots_that_are_read_late() -> None:
    """A slot is written again only when what reads it has run, though its tensor died long before."""
    net = nn.Sequential(nn.Linear(20, 20), Copying(8), nn.Linear(20, 20), Copying(8), nn.Linear(20, 4))
    model, twin = both(lambda: net, {"0": "worker1/0", "1": "worker2/1", "2": "worker1/0", "3": "worker2/1"})
    home = gpu.device()
    for network in (model, twin):
        network.get_submodule("4").to(home)
    mine, theirs = (torch.optim.SGD(network.parameters(), 0.1) for network in (model, twin))
    for x, y in batches(3, 16, 20):
        x, y = x.to(home), y.to(home)
        loss = model.forward_backward(F.cross_entropy, x, target=y, chunks=8)
        assert loss.item() == one_after_another(twin, F.cross_entropy, 8, x, y).item()
        for optimizer in (mine, theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert_same_state(model, twin)
    default, side = torch.accelerator.current_stream(), torch.Stream(home)
    model = wrap(nn.Sequential(nn.Linear(20, 20)), places({"0": "worker1/0"}))
    twin = nn.Linear(20, 20).to(home)
    twin.load_state_dict({key[2:]: value for key, value in model.state_dict().items()})
    kept = []
    with torch.no_grad():
        for number in range(10):
            torch.accelerator.set_stream(side if number % 2 else default)
            output = model(x * number)
            lag(output, 10)
            kept.append(output.clone())
            del output
        torch.accelerator.set_stream(default)
        torch.accelerator.synchronize()
        for number, output in enumerate(kept):
            assert torch.equal(output, twin(x * number)), number
    model.close()


def a_stream_of_its_own() -> None:
    """The caller computes on a side stream, which lags behind too."""
    home = gpu.device()
    default, side = torch.accelerator.current_stream(), torch.Stream(home)
    model, twin = both(lambda: nn.Sequential(*lagging(), Copying(10), nn.Linear(4, 4)), {**CHAIN, "5-6": "worker0/0"})
    mine, theirs = (torch.optim.SGD(network.parameters(), 0.1) for network in (model, twin))
    for number, (x, y) in enumerate(batches(4, 8, 20)):
        torch.accelerator.synchronize()
        torch.accelerator.set_stream(side)
        try:
            given = x.to(home).requires_grad_()
            lag(given, 5)
            loss = F.cross_entropy(model(given * 2), y.to(home))
            torch.accelerator.set_stream(default)  # the engine goes by the streams of the forward
            loss.backward()
            mine.step()
            mine.zero_grad()
            torch.accelerator.synchronize()
        finally:
            torch.accelerator.set_stream(default)
        wanted = x.to(home).requires_grad_()
        expected = F.cross_entropy(twin(wanted * 2), y.to(home))
        expected.backward()
        theirs.step()
        theirs.zero_grad()
        assert loss.item() == expected.item(), f"step {number}"
        assert torch.equal(given.grad, wanted.grad)
    assert_same_state(model, twin)
    model.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_streams_that_lag_behind(transport):
    bodies = (late_streams, slots_that_are_read_late, a_stream_of_its_own)[: 3 if transport == "cuda" else 1]
    drive(partial(all_of, *bodies), transport=transport, environment={"SOFTCUDA_DELAY_US": "200"})


def crosswise(rank: int) -> None:
    """Each trains a model of which the other has the middle, at the same time."""
    try:
        torch.manual_seed(rank)
        model, twin = both(lagging, {"2": f"worker{1 - rank}/0", "0": f"worker{rank}/0", "4": f"worker{rank}/0"}, timeout=20.0)
        home = gpu.device()
        mine, theirs = (torch.optim.SGD(network.parameters(), 0.1) for network in (model, twin))
        for x, y in batches(8, 8, 20):
            for network, optimizer in ((model, mine), (twin, theirs)):
                optimizer.zero_grad()
                loss = F.cross_entropy(network(x.to(home)), y.to(home))
                if network is model:
                    time.sleep(-time.monotonic() % 0.1)  # both go backward at the same moment
                loss.backward()
                optimizer.step()
        assert_same_state(model, twin)
        model.close()
    finally:
        rpc.shutdown()


def test_models_that_need_each_others_gpu():
    results(run_group(crosswise, 2, gpu=True, transport="cuda"))


# -- copies while kernels run


def wide() -> nn.Module:
    return nn.Sequential(Lagging(20, 1024, 8), nn.ReLU(), Lagging(1024, 1024, 8), nn.Tanh(), Lagging(1024, 4, 8))


def in_micro_batches() -> None:
    model = wrap(wide(), places({"0-1": "worker1/0", "2-3": "worker2/1"}))
    x, y = (tensor.to(gpu.device()) for tensor in batches(1, 64, 20)[0])
    for _ in range(3):
        model.forward_backward(F.cross_entropy, x, target=y, chunks=4)
    model.close()


def test_a_timeline_shows_copies_beside_kernels(tmp_path):
    drive(in_micro_batches, transport="cuda", timeline=str(tmp_path), environment={"SOFTCUDA_DELAY_US": "1000"})
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    spans: dict[str, list[tuple[str, float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            row = f"{event['pid']} {rows[event['pid'], event['tid']]}"
            spans.setdefault(row, []).append((event["name"], event["ts"], event["ts"] + event["dur"]))
    copies, kernels = spans[f"1 {gpu.TYPE}:0 copies to worker2"], spans[f"1 {gpu.TYPE}:0"]
    assert len(copies) == 3 * 4
    assert {name for name, _, _ in kernels} == {"forward segment 1", "backward segment 1"}
    assert all(begin <= end for _, begin, end in copies)
    overlapping = [copy for copy in copies if any(copy[1] < end and begin < copy[2] for _, begin, end in kernels)]
    assert overlapping, (copies, kernels)
    assert any(name == "forward segment 1" for name, _, _ in spans["1 rdmarpc-executor-worker1"])


# -- what the hosts cannot do, and what dies


def refused(rank: int) -> None:
    from rdmarpc.transport.errors import RdmaError
    from rdmarpc.transport.gpu.ipc import Imports

    def base(*args: Any) -> int:
        raise RdmaError("no way from here to there", device="cuda", status="CUDA_ERROR_PEER_ACCESS_UNSUPPORTED")

    Imports.base = base  # type: ignore[method-assign]
    on_driver(without_mapping, rank)


def without_mapping() -> None:
    model, twin = both(models.mlp, CHAIN)
    mine, theirs = (torch.optim.SGD(network.parameters(), 0.1) for network in (model, twin))
    with pytest.warns(UserWarning, match="by way of host memory.*no way from here to there"):
        model.prepare(torch.randn(8, 20))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for x, y in batches(3, 8, 20):
            for network, optimizer in ((model, mine), (twin, theirs)):
                optimizer.zero_grad()
                F.cross_entropy(network(x.to(gpu.device())), y.to(gpu.device())).backward()
                optimizer.step()
    assert model.counters()["bytes_staged"] > 0
    assert_same_state(model, twin)


def test_gpus_that_cannot_map_each_other():
    results(run_group(refused, 3, gpu=True, transport="cuda"))


class Dying(nn.Module):
    """Its third forward kills the worker, with work on its streams."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(20, 20), 0

    def forward(self, x):
        if not isinstance(x, FakeTensor):
            self.calls += 1
            lag(x, 50)
            if self.calls == 3:
                die()
        return self.layer(x)


def killed(rank: int) -> Any:
    if rank != 0:
        leave_after_a_loss()
        return "left"
    net = nn.Sequential(nn.Linear(20, 20), Dying(), nn.Linear(20, 4))
    model = wrap(net, places({"0": "worker2/0", "1": "worker1/0", "2": "worker2/0"}))
    with pytest.raises(rpc.PeerLost, match="worker1"):
        for x, y in batches(5, 8, 20):
            started = time.monotonic()
            F.cross_entropy(model(x.to(gpu.device())), y.to(gpu.device())).backward()
    seconds = time.monotonic() - started
    model.close()
    dismiss("worker2")
    with pytest.raises(rpc.PeerLost):
        rpc.shutdown(timeout=20)
    return seconds


def test_a_worker_is_killed_in_mid_step():
    outcomes = run_group(killed, 3, gpu=True, transport="cuda")
    assert not outcomes[0].error, outcomes[0].text
    assert outcomes[0].result < 15.0
    assert outcomes[1].exit_code == -9
    assert outcomes[2].result == "left", outcomes[2].text
