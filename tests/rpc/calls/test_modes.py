"""Modes of torch in the thread that calls or waits: they change neither what is sent nor what comes, nor what callbacks and
gradients become of it. Each scenario runs in real worker processes."""

from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import nullcontext

import pytest
import torch
from called import identity
from group import results, run_group
from timing import eventually
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import rdmarpc as rpc
from rdmarpc import autograd

DEVICES = ["shm", "tcp"]


class Changes(TorchDispatchMode):
    """Adds one to what operations give."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        return found + 1 if isinstance(found, torch.Tensor) and found.is_floating_point() and found.numel() else found


class ChangesFunctions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        return found.mul_(2) if function is torch.frombuffer and found.is_floating_point() else found


MODES = {
    "none": nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "device": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu"),
    "dispatch": Changes,
    "functions": ChangesFunctions,
}


def of_all_kinds():
    base = torch.arange(12.0)
    return {
        "small": base,
        "large": torch.arange(300_000.0).view(600, 500),
        "gathered": torch.arange(300_000.0)[::3],
        "empty": torch.empty(0, 3),
        "sharing": [base, base[2:], base.view(torch.int32)],
        "coo": torch.eye(3).to_sparse(),
        "csr": torch.eye(3).to_sparse_csr(),
        "quantised": torch.quantize_per_tensor(base, 0.5, 0, torch.qint8),
        "zero": torch._efficientzerotensor((3,)),
        "storage": base.untyped_storage(),
        "parameter": torch.nn.Parameter(base),
    }


def plain(value):
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, torch.UntypedStorage):
        return value.tolist()
    assert value.device.type == "cpu" and not value.is_inference(), value
    value = value.detach().clone()
    if value.is_quantized:
        value = value.dequantize()
    return (value if value.layout is torch.strided else value.to_dense()).tolist()


def ways(to, value):
    yield lambda: rpc.rpc_sync(to, identity, (value,))
    yield lambda: rpc.rpc_async(to, identity, (value,)).wait()
    yield lambda: rpc.remote(to, identity, (value,)).to_here()


def values(rank):
    if rank == 0:
        for kind, value in of_all_kinds().items():
            wanted = plain(value)
            for name, mode in MODES.items():
                for to in ("worker0", "worker1"):
                    for way in ways(to, value):
                        for _ in range(2):  # the second time large ones are written to places granted ahead
                            with mode():
                                found = way()
                            assert plain(found) == wanted, (kind, name, to)
    rpc.shutdown()


@pytest.mark.parametrize("device", DEVICES)
def test_values_are_those_that_were_sent(device):
    results(run_group(values, transport=device))


_GATE = threading.Event()


def open_gate():
    _GATE.set()


def behind_gate(x):
    """Answers when the gate is opened, once."""
    assert _GATE.wait(20)
    _GATE.clear()
    return x * 2


def state():
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
    return *modes, str(torch.ones(1).device), torch.ones(1).item()


def callbacks(rank):
    if rank == 0:
        wanted = state()
        for name, mode in MODES.items():
            for early in (False, True):
                for context in (nullcontext, autograd.context):
                    future = rpc.rpc_async("worker1", behind_gate, (torch.ones(2),))
                    found = future.then(lambda done: state())
                    found_by_all = torch.futures.collect_all([future]).then(lambda done: state())
                    opened = threading.Timer(0.0 if early else 0.1, rpc.rpc_sync, ("worker1", open_gate))
                    opened.start()
                    if early:
                        eventually(found.done)
                    with mode(), context():
                        assert future.wait().tolist() == [2, 2]
                    assert found.wait() == found_by_all.wait() == wanted, (name, early)
                    opened.join(20)
    rpc.shutdown()


@pytest.mark.parametrize("device", DEVICES)
def test_callbacks_do_not_see_who_waited(device):
    results(run_group(callbacks, transport=device))


def double(x):
    return x * 2


def connected(rank):
    if rank == 0:
        x = torch.ones(2, requires_grad=True)
        for name, waits in MODES.items():
            for early in (False, True):
                for calls in (True, False):
                    with autograd.context() as context:
                        with torch.set_grad_enabled(calls):
                            future = rpc.rpc_async("worker1", behind_gate, (x,))
                        # A call in the callback is one of the same context, whoever waits.
                        again = future.then(lambda done: rpc.rpc_sync("worker1", double, (x,)))
                        opened = threading.Timer(0.0 if early else 0.1, rpc.rpc_sync, ("worker1", open_gate))
                        opened.start()
                        if early:
                            eventually(again.done)
                        with waits():
                            found = future.wait()
                        opened.join(20)
                        assert found.requires_grad and (found.grad_fn is not None) == calls, (name, early, calls)
                        autograd.backward(context, [found.sum() + again.wait().sum()])
                        assert autograd.get_gradients(context)[x].tolist() == [4 if calls else 2] * 2, (name, early, calls)
    rpc.shutdown()


@pytest.mark.parametrize("device", DEVICES)
def test_whether_a_result_is_connected_was_said_by_the_call(device):
    results(run_group(connected, transport=device))


@rpc.functions.async_execution
def completed_elsewhere(x, name):
    """The future is completed by a thread that is in some mode."""
    future = torch.futures.Future()
    made = x * 2

    def complete():
        with MODES[name]():
            future.set_result(made)

    threading.Thread(target=complete).start()
    return future


def completions(rank):
    if rank == 0:
        x = torch.ones(3, requires_grad=True)
        for name in MODES:
            with autograd.context() as context:
                autograd.backward(context, [rpc.rpc_sync("worker1", completed_elsewhere, (x, name)).sum()])
                assert autograd.get_gradients(context)[x].tolist() == [2, 2, 2], name
            sparse = rpc.rpc_sync("worker1", completed_elsewhere, (torch.eye(2).to_sparse(), name))
            assert plain(sparse) == [[2, 0], [0, 2]], name
    rpc.shutdown()


def test_the_thread_that_completes_a_result_may_be_in_any_mode():
    results(run_group(completions))


_IMPORTS = """
import importlib, pkgutil, sys, torch
torch.set_default_device("meta")
import rdmarpc
for found in pkgutil.walk_packages(rdmarpc.__path__, "rdmarpc."):
    if "__main__" not in found.name and "sitecustomize" not in found.name:
        try:
            importlib.import_module(found.name)
        except ImportError:  # of what is not installed
            pass
ours = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "rdmarpc"}
print(len(ours), [f"{name}.{key}" for name, module in ours.items() for key, value in vars(module).items()
                  if isinstance(value, torch.Tensor) and value.is_meta])
"""


def test_tensors_of_ours_are_on_the_cpu_whatever_the_default_device_is():
    ended = subprocess.run([sys.executable, "-c", _IMPORTS], capture_output=True, text=True, timeout=120)
    count, _, found = ended.stdout.strip().rpartition("\n")[2].partition(" ")
    assert ended.returncode == 0 and int(count) > 150 and found == "[]", (ended.stdout[-500:], ended.stderr[-2000:])
