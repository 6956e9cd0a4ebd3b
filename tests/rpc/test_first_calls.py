"""The first calls over a connection, while others are being made."""

from __future__ import annotations

import torch
from group import results, run_group

import rdmarpc as rpc
from rdmarpc import progress

WORKERS, ROUNDS = 4, 12


def meet_often(rank):
    # A thread that sleeps through news then does so for longer than any call may take.
    progress._SECOND_NS = 60 * 10**9
    for round_ in range(ROUNDS):
        for step in range(1, WORKERS):
            to = f"worker{(rank + step) % WORKERS}"
            assert rpc.rpc_sync(to, torch.add, (torch.ones(2), round_), timeout=10)[0] == round_ + 1
        agent = rpc._get_current_rpc_agent()
        rpc.shutdown(timeout=15)
        if round_ < ROUNDS - 1:
            options = rpc.RpcBackendOptions(init_method=f"{agent.options.init_method}+", rpc_timeout=20)
            rpc.init_rpc(f"worker{rank}", rank=rank, world_size=WORKERS, rpc_backend_options=options)
    return ROUNDS


def test_nobody_sleeps_through_a_new_connection():
    assert results(run_group(meet_often, WORKERS, timeout=100)) == [ROUNDS] * WORKERS
