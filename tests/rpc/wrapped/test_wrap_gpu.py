"""``wrap`` with stages on GPUs: the bits of a model that trains alone on such a device. By way of host memory (``tcp``), and
from GPU to GPU (``cuda``; over RDMA: ``vm/test_gpu_over_verbs.py``)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import gpu
import pytest
import softverbs
import test_wrap
import torch
import torch.nn.functional as F
import wrap_models as models
from gpu_twin import computing_at
from test_wrap import STEADY
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import rdmarpc as rpc
from rdmarpc import wrap
from rdmarpc.ground.here import current
from rdmarpc.parts import placing

pytestmark = pytest.mark.gpu
TRANSPORTS = ["tcp", "cuda"]
CPU = torch.device("cpu")
Data = list[tuple[torch.Tensor, torch.Tensor]]


def drive(body: Callable[[], Any], size: int = 3, **options: Any) -> Any:
    return test_wrap.drive(body, size, gpu=True, **options)


def all_of(*bodies: Callable[[], None]) -> None:
    for body in bodies:
        body()


def batches(count: int, *shape: int, classes: int = 4) -> Data:
    generator = torch.Generator().manual_seed(2)
    return [
        (torch.randn(shape, generator=generator), torch.randint(0, classes, shape[:1], generator=generator))
        for _ in range(count)
    ]


def places(placement: dict[str, str]) -> dict[str, str]:
    """``worker1/0`` is the first GPU there, ``worker1/1`` the second one, if there are two."""
    kinds = {"0": gpu.device(), "1": gpu.device(gpu.other())}
    split = {path: where.split("/") for path, where in placement.items()}
    return {path: f"{where[0]}/{kinds.get(where[1], where[1])}" if where[1:] else where[0] for path, where in split.items()}


def both(make: Callable[[], nn.Module], placement: dict[str, str], **options: Any) -> tuple[Any, nn.Module]:
    """A wrapped model, and its twin in this process, with each part on the device that it has in the placement."""
    torch.manual_seed(1)
    net = make()
    found = placing.resolve(net, places(placement), "worker0", [f"worker{rank}" for rank in range(3)], "worker{}".format)
    devices = {path: found.devices.get(path) for path in found.homes}
    traced = options.get("capture") != "eager"
    cut = [path for path in devices if not traced and not found.whole(path)]
    twin = computing_at(copy.deepcopy(net), devices, traced=traced, cut=cut)
    return wrap(net, places(placement), **options), twin


def assert_same_state(model: nn.Module, twin: nn.Module) -> None:
    ours, theirs = model.state_dict(), twin.state_dict()
    assert list(ours) == list(theirs)
    for key, value in theirs.items():
        assert torch.equal(ours[key].cpu(), value.cpu()), key


def by_device(twin: nn.Module) -> list[dict[str, Any]]:
    """Groups of parameters. Of a group on several devices an optimizer steps one parameter after the other, which gives other
    bits than all at once; owners choose for their own parameters."""
    groups: dict[torch.device, list[nn.Parameter]] = {}
    for parameter in twin.parameters():
        groups.setdefault(parameter.device, []).append(parameter)
    return [{"params": parameters} for parameters in groups.values()]


def stays_on_gpus(here: torch.device) -> bool:
    """Whether what a model on GPUs sends is copied by nobody, where its caller's tensors are ``here``. Over RDMA that holds for
    GPUs whose memory the adapter takes, not for gradients that the CPU makes."""
    return current().device.name == "cuda" or (softverbs.played and here != CPU)


# -- equal bits


def both_backward(model: Any, twin: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    """Of one batch, which the caller has on its GPU."""
    home = gpu.device()
    losses = [F.cross_entropy(network(x.to(home)), y.to(home)) for network in (model, twin)]
    for loss in losses:
        loss.backward()
    assert losses[0].item() == losses[1].item()


def same_training(model: Any, twin: nn.Module, here: torch.device, *case: object) -> None:
    """Three steps, the caller's inputs ``here``."""
    home = gpu.device()
    mine, theirs = torch.optim.SGD(model.parameters(), 0.1), torch.optim.SGD(by_device(twin), 0.1)
    for x, y in batches(3, 8, 20):
        losses = [F.cross_entropy(network(x.to(here)).to(home), y.to(home)) for network in (model, twin)]
        for loss, optimizer in zip(losses, (mine, theirs)):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert losses[0].item() == losses[1].item(), (*case, here)
    assert_same_state(model, twin)


def steps(model: Any, twin: nn.Module, data: Data, here: torch.device, make: Callable[[Any], torch.optim.Optimizer]) -> None:
    """The caller's tensors are ``here``, the loss is computed on a GPU."""
    home, direct = gpu.device(), stays_on_gpus(here)
    mine, theirs = make(model.parameters()), make(by_device(twin))
    early: dict[str, int] = {}
    for number, (x, y) in enumerate(data):
        mine.zero_grad()
        output = model(x.to(here))
        assert output.device == here
        loss = F.cross_entropy(output.to(home), y.to(home))
        loss.backward()
        mine.step()
        theirs.zero_grad()
        expected = F.cross_entropy(twin(x.to(here)).to(home), y.to(home))
        expected.backward()
        theirs.step()
        assert loss.item() == expected.item(), f"step {number}"
        if number == 1:
            early = model.counters()
    late = model.counters()
    steady = STEADY if direct else [key for key in STEADY if key != "bytes_staged"]
    assert {key: late[key] for key in steady} == {key: early[key] for key in steady}, (early, late)
    assert current().device.name != "cuda" or late["bytes_staged"] == 0
    assert direct or late["bytes_staged"] > early["bytes_staged"]
    assert_same_state(model, twin)
    model.close()


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2),
}
CHAIN = {"0-1": "worker1/0", "2-3": "worker2/1", "4": "worker1/0"}
CASES: list[tuple[Callable[[], nn.Module], dict[str, str], tuple[int, ...], int]] = [
    (models.mlp, CHAIN, (8, 20), 4),
    (models.mlp, {"0-1": "worker0/0", "2-3": "worker1", "4": "worker2/1"}, (8, 20), 4),
    (models.mlp, {"0-1": "worker1/0", "2-3": "worker1/1", "4": "rank:2/0"}, (8, 20), 4),
    (models.Cnn, {"features": "worker0/0", "middle": "worker1/0", "classifier": "worker2/1"}, (8, 1, 8, 8), 10),
    (models.Skip, {"a": "worker1/0", "b": "worker2/1", "c": "worker1/0"}, (8, 20), 4),
    (models.PingPong, {"first": "worker1/0", "third": "worker2/0"}, (8, 20), 4),
]


def equal() -> None:
    for number, (make, placement, shape, classes) in enumerate(CASES):
        for here in (CPU, gpu.device()):
            model, twin = both(make, placement)
            steps(model, twin, batches(4, *shape, classes=classes), here, OPTIMIZERS[["momentum", "adamw"][number % 2]])


def one_after_another(
    twin: nn.Module, loss_fn: Callable[..., torch.Tensor], chunks: int, x: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    total: Any = None
    for part, target in zip(x.chunk(chunks), y.chunk(chunks)):
        loss = loss_fn(twin(part), target) * (len(part) / len(x))
        loss.backward()
        total = loss.detach() if total is None else total + loss.detach()
    return total


def micro_batches() -> None:
    home = gpu.device()
    for make, placement, shape, classes in (CASES[0], CASES[3], CASES[4], CASES[5]):
        model, twin = both(make, placement)
        mine, theirs = (torch.optim.SGD(network.parameters(), 0.1, momentum=0.9) for network in (model, twin))
        sizes = (8, 8, 10)  # 10: the last of its micro-batches is smaller
        for size in sizes:
            x, y = (tensor.to(home) for tensor in batches(1, size, *shape[1:], classes=classes)[0])
            loss = model.forward_backward(F.cross_entropy, x, target=y, chunks=4)
            expected = one_after_another(twin, F.cross_entropy, 4, x, y)
            assert loss.device == home
            assert loss.item() == expected.item()
            for optimizer in (mine, theirs):
                optimizer.step()
                optimizer.zero_grad()
        assert_same_state(model, twin)
        model.close()


def total(value: torch.Tensor) -> float:
    return float(value.sum())


def calls_beside() -> None:
    """Calls with tensors on GPUs between the same workers: the same segments, slots and pinned pages, used in both ways."""
    home = gpu.device()
    model, twin = both(models.mlp, {"0-1": "worker1/0", "2-3": "worker1", "4": "worker2/0"})
    before = rpc.counters()
    kept = []
    for number, (x, y) in enumerate(batches(12, 8, 20)):
        both_backward(model, twin, x, y)
        # Of sizes that the allocator gets from the driver one by one.
        kept.append(torch.full(((3 + number) << 20,), 1.0, device=home))
        for worker in ("worker1", "worker2"):
            assert rpc.rpc_sync(worker, total, (kept[-1],)) == kept[-1].numel()
    after = rpc.counters()
    assert not stays_on_gpus(home) or after["bytes_staged"] == before["bytes_staged"]
    model.close()


def staged() -> None:
    """The ablation: every payload is copied into a registered buffer of host memory first."""
    model, twin = both(models.mlp, CHAIN, staging="always")
    for x, y in batches(3, 8, 20):
        both_backward(model, twin, x, y)
    assert model.counters()["bytes_staged"] > 0
    model.close()


# -- everything else that a model has


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(20, 16), nn.Dropout(0.5), nn.Linear(16, 16), nn.Dropout(0.3))
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.body(x))


def seed(number: int) -> None:
    torch.manual_seed(number)


def random_numbers() -> None:
    model, twin = both(Dropping, {"body": "worker1/0", "head": "worker2/0"})
    home = gpu.device()
    rpc.rpc_sync("worker1", seed, (7,))
    torch.manual_seed(7)
    for x, _ in batches(3, 8, 20):
        assert torch.equal(model(x.to(home)), twin(x.to(home)))
    model.eval()
    twin.eval()
    assert torch.equal(model(x), twin(x))
    model.close()


def accumulation_and_zeroing() -> None:
    model, twin = both(models.Skip, CASES[4][1])
    home = gpu.device()
    mine, theirs = (torch.optim.SGD(network.parameters(), 0.1) for network in (model, twin))
    for number, (x, y) in enumerate(batches(4, 8, 20)):
        x, y = x.to(home), y.to(home)
        for network, optimizer in ((model, mine), (twin, theirs)):
            for part in x.split(4):
                F.cross_entropy(network(part), y[: len(part)]).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=number % 2 == 0)
    for network, optimizer in ((model, mine), (twin, theirs)):
        F.cross_entropy(network(x), y).backward()
        norm = norm_of(twin) if network is twin else torch.nn.utils.get_total_norm([p.grad for p in network.parameters()])
        torch.nn.utils.clip_grads_with_norm_(network.parameters(), 0.1, norm)
        optimizer.step()
    assert_same_state(model, twin)
    model.close()


def norm_of(twin: nn.Module) -> torch.Tensor:
    """Of all gradients, whose norms are combined in the order of the parameters; torch would go from device to device."""
    found: dict[int, torch.Tensor] = {}
    for group in by_device(twin):
        norms = torch._foreach_norm([parameter.grad for parameter in group["params"]])
        found |= {id(parameter): norm.cpu() for parameter, norm in zip(group["params"], norms)}
    return torch.stack([found[id(parameter)] for parameter in twin.parameters()]).norm()


def states() -> None:
    home, data = gpu.device(), batches(6, 8, 20)

    def run(network: nn.Module, optimizer: torch.optim.Optimizer, part: slice) -> None:
        for x, y in data[part]:
            optimizer.zero_grad()
            F.cross_entropy(network(x.to(home)), y.to(home)).backward()
            optimizer.step()

    model, twin = both(models.mlp, CHAIN)
    mine, theirs = (torch.optim.Adam(network.parameters(), 1e-2) for network in (model, twin))
    run(model, mine, slice(0, 3))
    run(twin, theirs, slice(0, 6))
    state = model.state_dict()
    assert all(value.device == CPU for value in state.values())
    again = wrap(models.mlp(), places(CHAIN))
    again.load_state_dict({key: value.to(home) for key, value in state.items()})
    resumed = torch.optim.Adam(again.parameters(), 1.0)
    again.attach(resumed)
    resumed.load_state_dict(mine.state_dict())
    run(again, resumed, slice(3, 6))
    assert_same_state(again, twin)
    ours, expected = resumed.state_dict(), theirs.state_dict()
    for index, entries in expected["state"].items():
        for key, value in entries.items():
            assert torch.equal(ours["state"][index][key], value.cpu()), key
    model.close()
    again.close()


def sizes_that_vary() -> None:
    model, twin = both(models.mlp, CHAIN)
    for size in (8, 5, 3, 5, 7, 8):
        both_backward(model, twin, *batches(1, size, 20)[0])
    assert model.counters()["dynamic_reads"] > 0
    model.close()


class Looking(nn.Module):
    """Goes by values, so that nothing can trace it."""

    def forward(self, x):
        return x * 2 if float(x.sum()) > 0 else x - 1


def forwards_in_python() -> None:
    home = gpu.device()
    for here in (home, CPU):
        model, twin = both(
            models.PingPong, {"first": "worker1/0", "second": "worker2/1", "fourth": "worker0/0"}, capture="eager"
        )
        for network in (model, twin):
            network.third.to(here), network.fourth.to(here)
        for x, y in batches(3, 8, 20):
            losses = [F.cross_entropy(network(x.to(here)), y.to(here)) for network in (model, twin)]
            for loss in losses:
                loss.backward()
            assert losses[0].device == here
            assert losses[0].item() == losses[1].item()
        model.close()
    model, twin = both(
        lambda: nn.Sequential(nn.Linear(20, 20), Looking(), nn.Linear(20, 4)), {"1": "worker1/0"}, capture="eager"
    )
    for network in (model, twin):
        network.get_submodule("0").to(home), network.get_submodule("2").to(home)
    for x, _ in batches(3, 8, 20):
        assert torch.equal(model(x.to(home)), twin(x.to(home)))
    assert model.captured.startswith("eager")
    model.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_equal_to_the_bit(transport):
    bodies = (equal, micro_batches, calls_beside, staged, random_numbers, accumulation_and_zeroing, states, sizes_that_vary)
    drive(partial(all_of, *bodies, forwards_in_python), transport=transport)


# -- models that lie on GPUs, and what their forward says of devices


class Parallel(nn.Module):
    """Written for two GPUs."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(20, 16).to(gpu.device())
        self.b = nn.Linear(16, 4).to(gpu.device(gpu.other()))

    def forward(self, x):
        x = torch.relu(self.a(x.to(self.a.weight.device)))
        return self.b(x.to(self.b.weight.device))


class Saying(nn.Module):
    """Makes tensors, some where others are, and says where it wants them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(20, 20), nn.Linear(20, 4)
        self.register_buffer("shift", torch.arange(20.0))

    def forward(self, x):
        at = torch.arange(x.shape[1], device=x.device) / 20
        x = torch.tanh(self.a(x + at)) * torch.linspace(0, 1, 20)
        x = x.to("cpu") + self.shift.cpu()
        return self.b(x.to(at.device) + torch.zeros_like(x))


def on_their_own_devices() -> None:
    home, far = gpu.device(), gpu.device(gpu.other())
    for here in (home, CPU):
        net = models.mlp().to(home)
        twin = computing_at(copy.deepcopy(net), {})
        model = wrap(net, {"0-1": "worker1", "2-3": "worker2"})
        steps(model, twin, batches(4, 8, 20), here, OPTIMIZERS["momentum"])
    net = Parallel()
    twin = copy.deepcopy(net)
    model = wrap(net, {"a": "worker1", "b": "worker2"})
    for x, _ in batches(3, 8, 20):
        output, expected = model(x.to(home)), twin(x.to(home))
        assert output.device == expected.device == far
        output.sum().backward()
        expected.sum().backward()
        assert torch.equal(output, expected)
    model.close()


def devices_in_a_forward() -> None:
    for placement in ({"a": "worker1/0", "b": "worker2/1"}, {"a": "worker1/0"}, {"b": "worker1/cpu", "a": "worker2/1"}):
        for here in (CPU, gpu.device()):
            torch.manual_seed(1)
            net = Saying()
            twin = copy.deepcopy(net)
            model = wrap(net, places(placement))
            x, y = batches(1, 8, 20)[0]
            output = model(x.to(here))
            F.cross_entropy(output, y.to(here)).backward()
            expected = twin(x)
            assert output.device == here
            torch.testing.assert_close(output.cpu(), expected)
            table = model.placement_table()
            assert f"worker1/{gpu.device()}" in table or "cpu" in placement["b"]
            model.close()


class Asking(nn.Module):
    """Asks for shapes, keeps running statistics, and calls its parts in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(20, 20) for _ in range(3))
        self.norm, self.scale = nn.BatchNorm1d(20), nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x)) if x.dim() == 2 and len(x) > 1 else x
        return self.norm(x)[:, :4] * self.scale


def captures() -> None:
    placement = {"layers.0": "worker1/0", "layers.1-2": "worker2/1", "norm": "worker1/0"}
    for capture in ("fx", "export"):
        for here in (CPU, gpu.device()):
            model, twin = both(Asking, placement, capture=capture)
            same_training(model, twin, here, capture)
            model.close()


class Block(nn.Module):
    """Has tensors of its own, and parts that may lie elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.other = nn.Linear(20, 20), nn.Linear(20, 4)
        self.gain = nn.Parameter(torch.full((20,), 1.5))
        self.register_buffer("shift", torch.arange(20.0) / 20)

    def forward(self, x):
        return self.other(torch.tanh(self.inner(x) * self.gain + self.shift) + x)


def cut_modules() -> None:
    for placement in (
        {"0": "worker1/0", "0.inner": "worker2/1"},
        {"0": "worker1/0", "0.inner": "worker1/1"},
        {"0": "worker1/cpu", "0.inner": "worker1/0"},
    ):
        for capture, here in (("fx", CPU), ("export", gpu.device()), ("eager", CPU), ("eager", gpu.device())):
            model, twin = both(lambda: nn.Sequential(Block()), placement, capture=capture)
            same_training(model, twin, here, placement, capture)
            model.close()


def wrong_devices() -> None:
    net = models.mlp()
    with pytest.raises(rpc.NotSupported, match=rf"worker has no device {gpu.TYPE}:99"):
        wrap(net, {"0": f"worker1/{gpu.TYPE}:99"})
    with pytest.raises(rpc.NotSupported, match=rf"worker has no device {gpu.TYPE}:99"):
        wrap(net, {"0": f"worker0/{gpu.TYPE}:99"})
    for where in ("worker1/nonsense", "worker1/meta", "worker1/"):
        with pytest.raises(ValueError, match="placement puts '0' on"):
            wrap(net, {"0": where})
    with pytest.raises(ValueError, match="worker9"):
        wrap(net, {"0": f"worker9/{gpu.TYPE}:0"})
    if gpu.other():
        tied = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
        tied["b"].weight = tied["a"].weight
        with pytest.raises(rpc.NotSupported, match="are one tensor"):
            wrap(tied, places({"a": "worker1/0", "b": "worker1/1"}))


def notes() -> None:
    net = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 4))
    model = wrap(net, places({"0": "worker1/0", "2": "worker2/0"}))
    model(torch.randn(1024, 64)).sum().backward()
    assert f"copied: it is made on {gpu.device()}" in model.production().values()
    model.close()


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(20, 20)

    def forward(self, x):
        return Failed.apply(self.layer(x))


class Failed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        if not isinstance(x, FakeTensor) and float(x.abs().max()) > 1e6:
            raise KeyError("the forward of this part fails")
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        if float(ctx.saved_tensors[0].abs().max()) > 1e3:
            raise ZeroDivisionError("the backward of this part fails")
        return grad


def errors() -> None:
    net = nn.Sequential(nn.Linear(20, 20), Failing(), nn.Linear(20, 4))
    model = wrap(net, places({"0": "worker1/0", "1": "worker2/1"}), timeout=10.0)
    x = torch.randn(8, 20, device=gpu.device())
    for scale, error in ((1e9, KeyError), (1e5, ZeroDivisionError)):
        with pytest.raises(error) as caught:
            model(x * scale).sum().backward()
        assert "worker2" in str(caught.value.__cause__)
        model.zero_grad()
        model(x).sum().backward()
    model.close()


@pytest.mark.parametrize("transport", ["tcp", "cuda"])
def test_devices(transport):
    drive(
        partial(all_of, on_their_own_devices, devices_in_a_forward, captures, cut_modules, wrong_devices, notes, errors),
        transport=transport,
    )
