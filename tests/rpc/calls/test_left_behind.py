"""What a function leaves in the thread that ran it does not reach the next call."""

from __future__ import annotations

import threading

import pytest
import torch
from group import results, run_group
from timing import eventually
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import rdmarpc as rpc
from rdmarpc.gradients.context import current

THERE = "worker1"
_kept = []


class Functions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Dispatches(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def enter(made):
    made.__enter__()
    _kept.append(made)


LEAVE = {
    "grad": lambda: torch.set_grad_enabled(False),
    "no_grad": lambda: enter(torch.no_grad()),
    "inference": lambda: enter(torch.inference_mode()),
    "default_device": lambda: torch.set_default_device("meta"),
    "device": lambda: enter(torch.device("meta")),
    "autocast": lambda: enter(torch.autocast("cpu", dtype=torch.float16)),
    "autocasts": lambda: (
        enter(torch.autocast("cpu")),
        enter(torch.autocast("cpu", enabled=False)),
        enter(torch.autocast("cpu")),
    ),
    "functions": lambda: enter(Functions()),
    "dispatches": lambda: enter(Dispatches()),
    "context": lambda: enter(rpc.autograd.context()),
    "all": lambda: [leave() for name, leave in LEAVE.items() if name != "all"],
}


def leave(what, size=None):
    """And returns a tensor all the same."""
    found = None if size is None else torch.ones(size, device="cpu")
    LEAVE[what]()
    return threading.get_ident(), found


def state():
    with torch.autocast("cpu"):
        dtype = torch.mm(torch.ones(2, 2, device="cpu"), torch.ones(2, 2, device="cpu")).dtype
    new = torch.ones(1)
    return (
        threading.get_ident(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        str(new.device),
        new.is_inference(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        str(torch.get_default_device()),
        dtype,
        torch._C._len_torch_function_stack() + torch._C._len_torch_dispatch_stack(),
        current.context is not None,
    )


def leaves(rank):
    if rank == 0:
        first = rpc.rpc_sync(THERE, state)[1:]
        for what in LEAVE:
            for size in (None, 3, 300_000):
                for to in (THERE, "worker0"):
                    threads = set()
                    for _ in range(3):
                        thread, found = rpc.rpc_sync(to, leave, (what, size))
                        threads.add(thread)
                        assert found is None or (found.sum() == size and str(found.device) == "cpu"), what
                        rpc.rpc_async(to, leave, (what,)).wait()
                    for _ in range(6):
                        thread, *after = rpc.rpc_sync(to, state)
                        assert tuple(after) == first, (what, size, after)
        # A callback runs on such a thread, too.
        done = threading.Event()
        rpc.rpc_async(THERE, state).add_done_callback(lambda _: (leave("all"), done.set()))
        assert done.wait(30)
        eventually(lambda: rpc.rpc_sync("worker0", state)[1:], first)  # it says so before it has come to its end
        assert rpc.rpc_sync(THERE, state)[1:] == first
    rpc.shutdown()


@pytest.mark.parametrize("threads", [1, 4])
def test_what_a_function_leaves_does_not_reach_the_next_call(threads):
    results(run_group(leaves, num_worker_threads=threads))
