"""Options of ``init_rpc``: which are refused, by whom, and device maps checked over all workers."""

from __future__ import annotations

import logging
import pickle
from datetime import timedelta
from functools import partial

import pytest
import torch
from group import results, run_group

import rdmarpc as rpc


def test_values_that_cannot_be():
    for wrong in (timedelta(seconds=1), "1", None):
        with pytest.raises(TypeError):
            rpc.RpcBackendOptions(rpc_timeout=wrong)
    for wrong in (-1, -0.5, float("nan")):
        with pytest.raises(RuntimeError, match="RPC Timeout must be non-negative"):
            rpc.RpcBackendOptions(rpc_timeout=wrong)
    for wrong in (0, -3):
        with pytest.raises(RuntimeError, match=f"num_worker_threads must be positive, got {wrong}"):
            rpc.RpcBackendOptions(num_worker_threads=wrong)
    with pytest.raises(TypeError):
        rpc.RpcBackendOptions(8)
    options = rpc.TensorPipeRpcBackendOptions(init_method="file:///nowhere")
    options.init_method += "/else"
    options.rpc_timeout = -1
    with pytest.raises(RuntimeError, match="RPC Timeout must be non-negative"):
        rpc.init_rpc("me", rank=0, world_size=1, rpc_backend_options=options)


def test_arguments_of_init_rpc():
    options = rpc.RpcBackendOptions(init_method="file:///nowhere")
    for wrong in ("TENSORPIPE", 1):
        with pytest.raises(TypeError, match="Argument backend must be a member of BackendType"):
            rpc.init_rpc("me", backend=wrong, rank=0, world_size=1, rpc_backend_options=options)
    with pytest.raises(TypeError, match="Argument rpc_backend_options must be an instance of RpcBackendOptions"):
        rpc.init_rpc("me", backend=rpc.BackendType.TENSORPIPE, rank=0, world_size=1, rpc_backend_options={})
    for name, rank, size in ((b"me", 0, 1), ("me", 0.0, 1), ("me", 0, "1")):
        with pytest.raises(RuntimeError, match=r"Argument .* must be of type .* but got type"):
            rpc.init_rpc(name, rank=rank, world_size=size, rpc_backend_options=options)
    assert rpc.BackendType["TENSORPIPE"] is rpc.BackendType.TENSORPIPE


def test_worker_info():
    for name, text in (
        ("abc*", "Worker name must match"),
        ("a.b", "Worker name must match"),
        ("é", "Worker name must match"),
        ("", "must be non-empty"),
        ("a" * 128, "shorter than 128"),
    ):
        with pytest.raises(RuntimeError, match=text):
            rpc.WorkerInfo(name, 0)
    info = rpc.WorkerInfo("a" * 127, -1)
    with pytest.raises(AttributeError):
        info.name = "other"
    with pytest.raises(TypeError):
        rpc.WorkerInfo("worker", 70000)
    assert pickle.loads(pickle.dumps(info)) == info and info != 23 and {info: 1}[info] == 1
    assert str(rpc.WorkerInfo("worker1", 1)) == "WorkerInfo(id=1, name=worker1)"


def test_device_maps_are_one_to_one():
    options = rpc.RpcBackendOptions(device_maps={"worker1": {0: 1, "cuda:1": torch.device("cuda:0")}})
    options.set_device_map("worker1", {0: 1})  # said again
    options.set_device_map("worker1", {2: 2})
    cuda = [torch.device("cuda", n) for n in range(3)]
    assert options.device_maps == {"worker1": {cuda[0]: cuda[1], cuda[1]: cuda[0], cuda[2]: cuda[2]}}
    with pytest.raises(ValueError, match="`set_device_map` only supports 1-to-1 mapping"):
        options.set_device_map("worker1", {0: 2})
    with pytest.raises(ValueError, match="`device_map` only supports 1-to-1 mapping"):
        options.set_device_map("worker2", {0: 1, 1: 1})
    with pytest.raises(RuntimeError, match="Device index must not be negative"):
        options.set_device_map("worker2", {-1: 1})
    with pytest.raises(ValueError, match=r"`set_devices` expect a list of CUDA devices, but got device type cpu\."):
        options.set_devices(["cpu"])
    options.set_devices([0, "cuda:1"])
    assert options.devices == cuda[:2]


def add(a, b):
    return a + b


def mapped(rank):
    if rank == 0:
        assert torch.equal(rpc.rpc_sync("worker1", add, (torch.ones(3), 1)), torch.full((3,), 2.0))
        assert torch.equal(rpc.remote("worker1", add, (torch.ones(9999), 1)).to_here(), torch.full((9999,), 2.0))
    rpc.shutdown()


def test_cpu_to_cpu():
    results(run_group(mapped, each={0: {"device_maps": {"worker1": {"cpu": "cpu"}}}}))


def unreachable(rank):
    raise AssertionError("init_rpc should have failed")


# Which of these need GPUs to be right is seen from the number of GPUs there are, so they are wrong everywhere.
MANY = 10_000


@pytest.mark.parametrize(
    ("each", "text"),
    [
        ({0: {"device_maps": {"nobody": {"cpu": "cpu"}}}}, "Node worker0 has invalid target node names in its device maps"),
        ({1: {"devices": [MANY]}}, "Node worker1 has devices with invalid indices"),
        ({1: {"devices": [0, 0]}}, "Node worker1 has duplicated devices"),
        (
            {1: {"device_maps": {"worker0": {MANY: "cpu"}}}},
            "Node worker1 has source devices with invalid indices in its device map for worker0",
        ),
        (
            {0: {"device_maps": {"worker1": {"cpu": MANY}}}},
            "Node worker0 has target devices with invalid indices in its device map for worker1",
        ),
        (
            {0: {"device_maps": {"nobody": {"cpu": "cpu"}}}, 1: {"devices": [MANY]}},
            "Node worker0 has invalid target node names",
        ),
    ],
)
def test_device_maps_are_checked_at_every_worker(each, text):
    for outcome in run_group(unreachable, 3, each=each):
        assert (outcome.error, outcome.exit_code) == ("ValueError", 0)
        assert text in outcome.text


def tries_the_other(kind, text, meeting):
    meeting.join(world_size=2)
    other = f"worker{1 - meeting.rank}"
    for wait in (lambda: rpc.rpc_sync(other, abs, (-1,)), lambda: torch.ones(3).to(rpc.device(other))):
        with pytest.raises(kind, match=f"worker {other} cannot be reached: ") as caught:
            wait()
        assert text in str(caught.value) and caught.value.peer == other
    meeting.step("tried", 2)  # who leaves before is lost
    rpc.shutdown(graceful=False)


@pytest.mark.parametrize(
    ("each", "kind", "text"),
    [
        ({0: {"transport": "shm"}, 1: {"transport": "tcp"}}, rpc.NotSupported, "the same transport at every worker"),
        ({0: {"transport": "tcp"}, 1: {"transport": "auto"}}, rpc.NotSupported, "the same transport at every worker"),
        ({0: {"tls": True}, 1: {"tls": False}}, rpc.AuthenticationError, "tls at every worker, or at none"),
    ],
)
def test_workers_that_cannot_reach_each_other_say_so_by_name(each, kind, text):
    options = {"transport": "tcp", "secret": "of this test, and of no other one"}
    each = {rank: {**options, **own} for rank, own in each.items()}
    results(run_group(partial(tries_the_other, kind, text), dynamic=True, each=each))


def test_torchscript_functions_and_modules_travel():
    results(run_group(scripted))


@torch.jit.script
def double(x: torch.Tensor) -> torch.Tensor:
    return x + x


@torch.jit.script
def refuse(text: str) -> torch.Tensor:
    raise ValueError(text)


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)

    @torch.jit.export
    def twice(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def scripted_layer():
    return torch.jit.script(Layer())


def apply(module, x):
    return type(module).__name__, module(x)


def scripted(rank):
    if rank == 0:
        x = torch.arange(3.0)
        assert torch.equal(rpc.rpc_sync("worker1", double, (x,)), 2 * x)
        assert torch.equal(rpc.remote("worker1", double, (x,)).to_here(), 2 * x)
        with pytest.raises(torch.jit.Error, match="Expected error"):
            rpc.rpc_async("worker1", refuse, ("Expected error",)).wait()
        module = torch.jit.script(Layer())
        name, found = rpc.rpc_sync("worker1", apply, (module, x))
        assert name == "RecursiveScriptModule" and torch.equal(found, module(x))
        for layer in (rpc.remote("worker1", scripted_layer), rpc.RRef(module, Layer)):
            assert layer.rpc_sync().forward(x).shape == layer.remote().forward(x).to_here().shape == (2,)
            assert layer.rpc_async().twice(x).wait().tolist() == [0, 2, 4]
            with pytest.raises(AttributeError, match="nowhere"):
                layer.rpc_sync().nowhere(x)

        @torch.jit.script
        def local(x: torch.Tensor) -> torch.Tensor:
            return x

        with pytest.raises(RuntimeError, match="undefined function local"):
            rpc.rpc_sync("worker1", local, (x,))
    rpc.shutdown()


def heard_at_the_start(threads, meeting):
    torch.set_num_threads(threads)
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    logging.getLogger("rdmarpc").addHandler(handler)
    meeting.join(world_size=2)
    rpc.shutdown()
    return heard


def test_workers_that_share_cores_are_told_so():
    spinning = {"OMP_WAIT_POLICY": "ACTIVE"}  # the tests themselves may run with PASSIVE
    runs = (run_group(partial(heard_at_the_start, threads), dynamic=True, environment=spinning) for threads in (4096, 1))
    crowded, roomy = map(results, runs)
    assert "2 workers of 4096 threads each share" in crowded[0][0] and "OMP_WAIT_POLICY=PASSIVE" in crowded[0][0]
    assert crowded[1:] == [[]] and roomy == [[], []]  # once a host
