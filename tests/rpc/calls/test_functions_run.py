"""How many Python functions of ours a steady operation runs: printed (``pytest -s``), and no limit."""

from __future__ import annotations

import os

import torch
from called import identity
from functions_run import per_step, watch
from group import run_group

import rdmarpc as rpc
from rdmarpc import autograd


def product(x, y):
    return x * y


def _operations():
    small, large = torch.ones(1), torch.ones(1 << 20)
    weight = torch.ones(4, requires_grad=True)

    def differentiated():
        with autograd.context() as context:
            loss = rpc.rpc_sync("worker1", product, (weight, weight)).sum()
            autograd.backward(context, [loss])

    return {
        "call, 4 B": lambda: rpc.rpc_sync("worker1", identity, (small,)),
        "call, 4 MiB": lambda: rpc.rpc_sync("worker1", identity, (large,)),
        "future, 4 B": lambda: rpc.rpc_async("worker1", identity, (small,)).wait(),
        "remote and to_here, 4 B": lambda: rpc.remote("worker1", identity, (small,)).to_here(),
        "call with its backward": differentiated,
    }


def _count(meeting):
    watch()
    meeting.join(world_size=2)
    found = {}
    if meeting.rank == 0:
        found = {name: per_step(step, "worker1") for name, step in _operations().items()}
    rpc.shutdown()
    return found


def test_functions_of_a_step():
    found = run_group(_count, 2, dynamic=True)[0].result
    assert found, "no worker has counted"
    for name, sides in found.items():
        caller, callee = (sum(side.values()) for side in sides)
        print(f"\n{name}: {caller:.0f} at the caller, {callee:.0f} at the callee", end="")
        if os.environ.get("RDMARPC_NAMES"):
            for side in sides:
                print()
                for function, count in sorted(side.items(), key=lambda item: -item[1]):
                    print(f"    {count:7.2f}  {function}")
        assert caller > 0 and callee > 0
    print()
