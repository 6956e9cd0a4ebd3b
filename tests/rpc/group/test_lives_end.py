"""What a worker leaves in its process when it has shut down: nothing, also before Python's collector runs."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from multiprocessing import util
from pathlib import Path

import pytest
import torch
from group import die, dismiss, results, run_group, until_dismissed
from timing import eventually
from torch import nn

import rdmarpc as rpc
from rdmarpc.calls import agent
from rdmarpc.places import worker

_MORE_MIB = 160  # of the 480 that the results of four lives would hold; an allocator keeps some, a compiler takes 70


def resident_mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20


def left():
    """Descriptors, threads, mappings that peers had or have, what is called as this process ends."""
    maps = Path("/proc/self/maps").read_text().count("/memfd:rdmarpc-")
    return len(os.listdir("/proc/self/fd")), threading.active_count(), maps, len(util._finalizer_registry)


def lives(meeting):
    gc.disable()
    gc.collect = lambda *_: 0  # nor may anybody ask for it
    seen = []
    for life in range(8):
        path = f"{meeting._place}-{life}"
        options = rpc.RpcBackendOptions(init_method=f"file://{path}", transport=meeting._options["transport"])
        rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
        tensor = torch.rand(1 << 20)
        for _ in range(30):
            rpc.rpc_sync("alone", torch.add, (tensor, 1))
        group = weakref.ref(agent.current().group)
        rpc.shutdown()
        eventually(lambda group=group: group() is None)  # it has the store's connection
        if life == 7:  # no more than after the fourth
            eventually(lambda: all(now <= then for now, then in zip(left(), seen[3], strict=False)))
        seen.append((*left(), resident_mib()))
    return seen


@pytest.mark.parametrize("device", ["shm", "tcp"])
def test_nothing_stays_of_a_life(device):
    ((*_, warm, _, _, _, last),) = results(run_group(lives, 1, transport=device, dynamic=True))
    assert all(now <= then for now, then in zip(last[:-1], warm[:-1], strict=True)), (warm, last)
    assert last[-1] < warm[-1] + _MORE_MIB, (warm, last)


def told_twice(rank):
    """An error that two threads raise at once would hold the frames of both: a future among these is a circle for ever."""
    if rank == 1:
        until_dismissed()
        rpc.shutdown(graceful=False)
        return 4
    ending = agent.current().termination
    report = ending.report(0, 1, 0, 0)
    ending.fail(rpc.PeerLost("worker1 is lost"))
    late = ending.report(0, 1, 0, 0)
    heard = []
    for wait in (report.value, late.value, report.value, lambda: ending.wait(None)):
        with pytest.raises(rpc.PeerLost, match="worker1 is lost") as error:
            wait()
        heard.append(error.value)
    dismiss("worker1")
    rpc.shutdown(graceful=False)
    return len({id(error) for error in heard})


def test_each_who_hears_of_a_loss_during_shutdown_gets_an_error_of_its_own():
    assert results(run_group(told_twice, 2)) == [4, 4]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


def total(reference):
    return float(reference.to_here().sum())


def one_life(meeting, life, how):
    options = rpc.RpcBackendOptions(
        init_method=f"file://{meeting._place}-{life}", transport=meeting._options["transport"], rpc_timeout=20
    )
    rpc.init_rpc(f"worker{meeting.rank}", rank=meeting.rank, world_size=3, rpc_backend_options=options)
    if meeting.rank == 0:
        tensor = torch.rand(1 << 18)
        for peer in ("worker1", "worker2"):
            rpc.rpc_sync(peer, torch.add, (tensor, 1))
            assert rpc.rpc_sync(peer, total, (rpc.remote("worker1", torch.ones, (4,)),)) == 4
        with rpc.autograd.context() as context:
            weight = torch.ones(4, requires_grad=True)
            rpc.autograd.backward(context, [rpc.rpc_sync("worker1", torch.mul, (weight, 2)).sum()])
        model = rpc.wrap(Net(), {"first": "worker1", "second": "worker2"})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()
        if how == "lost":
            rpc.rpc_async("worker2", die)
            with pytest.raises(rpc.PeerLost):
                for _ in range(1000):
                    model(torch.ones(4, 8)).sum().backward()
        model.close()
        del model, optimizer, context
    if how == "lost":
        with pytest.raises(rpc.PeerLost):
            rpc.shutdown(timeout=60)
    else:
        rpc.shutdown()


def full_lives(meeting):
    seen = []
    for life, how in enumerate(("well", "well", "well", "lost")):
        one_life(meeting, life, how)
        gc.collect()
        if life:
            eventually(lambda: left() == seen[0])
        seen.append(left())
    return seen


@pytest.mark.parametrize("device", ["shm", "tcp"])
def test_nothing_stays_of_models_references_and_lost_peers(device):
    outcomes = run_group(full_lives, 3, transport=device, dynamic=True, timeout=110)
    for outcome in outcomes[:2]:
        assert not outcome.error, outcome.text
        first, *rest = outcome.result
        assert first[2] == 0 and rest == [first] * 3


def one_was_never_met(rank):
    """Worker 2 has come to shutdown and waits for worker 0, which then finds that worker 1 died before it met anybody."""
    if rank == 1:
        die()
    known = weakref.ref(agent.current())
    time.sleep(1.5 * (rank == 0))
    with pytest.raises(rpc.PeerLost):
        rpc.shutdown(timeout=20)
    limit = time.monotonic() + 30
    while known() is not None and time.monotonic() < limit:
        gc.collect()
        time.sleep(0.05)
    return known() is None


def without_close(meeting):
    meeting.join(world_size=2)
    group = weakref.ref(agent.current().group)
    kept = rpc.serve(nn.Linear(2, 2), ["worker1"]) if meeting.rank == 0 else None
    rpc.shutdown()
    del kept
    gc.collect()
    eventually(lambda: group() is None)


def test_nothing_stays_of_a_served_model_that_nobody_closed():
    results(run_group(without_close, 2, dynamic=True))


@pytest.mark.parametrize("device", ["shm", "tcp"])
def test_nothing_stays_of_a_shutdown_that_failed(device):
    outcomes = run_group(one_was_never_met, 3, transport=device)
    assert [outcomes[rank].result for rank in (0, 2)] == [True, True], outcomes


def trained_there(distributed):
    """Ways to use a model of servers, and optimizers."""
    served = rpc.serve(nn.Linear(2, 2), ["worker1"], torch.optim.SGD, lr=0.1)

    def trains():
        served(torch.ones(1, 2)).sum().backward()
        served.optimizer.step()

    trains()
    return trains, served.optimizer.state_dict, distributed.state_dict


def of_an_earlier_life(meeting):
    """Workers of the same names and ranks, each time."""
    for life in range(2):
        options = rpc.RpcBackendOptions(init_method=f"file://{meeting._place}-{life}", rpc_timeout=20)
        rpc.init_rpc(f"worker{meeting.rank}", rank=meeting.rank, world_size=2, rpc_backend_options=options)
        if meeting.rank == 0:
            weight = torch.ones(2, requires_grad=True)
            with rpc.autograd.context() as context:
                loss = rpc.rpc_sync("worker1", torch.mul, (weight, 2.0)).sum()
                if life == 0:
                    kept = context, loss, weight.detach().to(rpc.device("worker1"))
                    kept[2].clone()
                    owned = [rpc.remote("worker1", torch.ones, (2,))]
                    uses = trained_there(rpc.optim.DistributedOptimizer(torch.optim.SGD, owned, lr=0.1))
                else:
                    for begun in (context, kept[0]):
                        with pytest.raises(RuntimeError, match=r"received in autograd context|Could not find autograd"):
                            rpc.autograd.backward(begun, [kept[1]], retain_graph=True)
                    rpc.autograd.backward(context, [loss])
                    assert rpc.autograd.get_gradients(context)[weight].tolist() == [2.0, 2.0]
                    for use in (torch.Tensor.clone, torch.Tensor.neg):  # the first was posted before
                        with pytest.raises(RuntimeError, match="RPC was shut down: what lay at worker worker1 is gone"):
                            use(kept[2])
                    for use in (*uses, owned[0].to_here):
                        with pytest.raises(RuntimeError, match="RPC was shut down"):
                            use()
        rpc.shutdown()


def test_what_is_of_an_earlier_life_is_an_error_in_the_next():
    results(run_group(of_an_earlier_life, dynamic=True))


def left_of_streams(patched=None):
    """With ``patched`` streams cannot be opened here any more."""
    if patched:
        worker.Runner.open = lambda *given: (_ for _ in ()).throw(rpc.PeerLost(patched))
    return sum(getattr(each, "__func__", None) is worker.Runner.stop for each in agent.current().before_closing)


def a_stream_fails_to_open(rank):
    if rank == 0:
        assert rpc.rpc_sync("worker1", left_of_streams, ("the caller is lost",)) == 0
        with pytest.raises(rpc.PeerLost, match="the caller is lost"):
            torch.ones(2).to(rpc.device("worker1"))
        assert rpc.rpc_sync("worker1", left_of_streams) == 0
    rpc.shutdown()


def test_a_stream_that_could_not_be_opened_leaves_nothing():
    """Its end failed at the shutdown, and what it had stayed."""
    results(run_group(a_stream_fails_to_open))
