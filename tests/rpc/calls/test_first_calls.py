"""The first calls over a connection, while others are being made."""

from __future__ import annotations

import time
from functools import partial

import pytest
import torch
from group import die, on_every_device, results, run_group

import rdmarpc as rpc
from rdmarpc.calls import agent
from rdmarpc.links.polling import pool

WORKERS, ROUNDS = 4, 12


def meet_often(rank):
    # A thread that sleeps through news then does so for longer than any call may take.
    pool._SECOND_NS = 60 * 10**9
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


def both_at_once(dies, meeting):
    """Both connect; the connection of worker 0 counts, and takes its time, or never comes."""
    meeting.join(world_size=2)
    me = agent.current()
    if meeting.rank == 0:
        connect = me.device.connect

        def slowly(*args, **options):
            meeting.say("connects")
            time.sleep(3.0)  # the other one has asked for long
            if dies:
                die()
            return connect(*args, **options)

        me.device.connect = slowly
        assert rpc.rpc_sync("worker1", abs, (-1,)) == 1
    else:
        meeting.hear("connects")
        start = time.monotonic()
        if dies:
            with pytest.raises(rpc.PeerLost, match="worker0 cannot be reached: the peer's process ended"):
                rpc.rpc_sync("worker0", abs, (-1,))
            assert time.monotonic() - start < 15.0
        else:
            assert rpc.rpc_sync("worker0", abs, (-1,)) == 1
    if not dies:
        meeting.step("done", 2)
    rpc.shutdown(graceful=False)


@pytest.mark.parametrize("dies", [False, True], ids=["slow", "dies"])
def test_of_two_that_connect_at_once_one_waits_for_the_other(dies):
    for outcomes in on_every_device(partial(both_at_once, dies), 2, dynamic=True).values():
        assert not outcomes[1].error, outcomes[1].text
        assert dies or not outcomes[0].error, outcomes[0].text
