"""Results that are handed over instead of copied: who may see the memory, and when it comes back."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time

import numpy as np
import pytest
import torch
from called import held, let_go
from group import results, run_group
from timing import eventually

import rdmarpc as rpc
from rdmarpc.calls import agent

COUNT = 1 << 16  # floats: 256 KiB
kept: list[object] = []


def handed() -> int:
    return agent.current().counters()["bytes_handed"]


def arena_used() -> int:
    gc.collect()
    agent.current().callee.handovers.sweep()
    # What has died is counted when the arena is next asked.
    agent.current().device.empty(1)
    return agent.current().counters()["arena_used"]


def identity(value):
    return value


def add_in_place(value):
    value += 1
    return value


def keep(value):
    kept.append(value)
    return value


def keep_view(value):
    kept.append(value[1:])
    return value


def keep_numpy(value):
    kept.append(value.numpy())
    return value


def other_storage(value):
    """A second storage over the same memory, by way of numpy; the first one stays here."""
    kept.append(value)
    return torch.from_numpy(value.numpy())


def keep_storage(value):
    kept.append(value.untyped_storage())
    return value


def with_graph(value):
    return value.requires_grad_()


def part(value):
    return value[16:]


def transposed(value):
    return value.view(256, -1).t()


def spoil_kept():
    for thing in kept:
        if isinstance(thing, torch.UntypedStorage):
            thing.fill_(0xFF)
        elif isinstance(thing, np.ndarray):
            thing[:] = -1
        else:
            thing.fill_(-1)
    kept.clear()


def sole_results(rank):
    if rank == 0:
        mine = torch.arange(COUNT, dtype=torch.float32)
        before = rpc.rpc_sync("worker1", handed)
        assert torch.equal(rpc.rpc_sync("worker1", identity, (mine,)), mine)
        assert rpc.rpc_sync("worker1", handed) - before == mine.nbytes
        changed = rpc.rpc_sync("worker1", add_in_place, (mine,))
        assert torch.equal(changed, mine + 1)
        assert mine[0] == 0
        changed.mul_(2)  # ours to change
        assert torch.equal(changed, 2 * mine + 2)
        piece = rpc.rpc_sync("worker1", part, (mine,))
        assert torch.equal(piece, mine[16:])
        assert rpc.rpc_sync("worker1", handed) - before == 2 * mine.nbytes  # a view has a base, so it is not alone
        turned = rpc.rpc_sync("worker1", transposed, (mine,))
        assert torch.equal(turned, mine.view(256, -1).t())
        again = rpc.rpc_sync("worker1", identity, (changed,))  # what was handed to us is an argument like any other
        assert torch.equal(again, changed)
    rpc.shutdown()


def test_a_result_that_nobody_else_sees_is_handed_over():
    results(run_group(sole_results))


def shared_results(rank):
    if rank == 0:
        mine = torch.arange(COUNT, dtype=torch.float32)
        for function in (keep, keep_view, keep_numpy, other_storage, keep_storage, with_graph):
            before = rpc.rpc_sync("worker1", handed)
            got = rpc.rpc_sync("worker1", function, (mine,))
            assert rpc.rpc_sync("worker1", handed) == before, function.__name__
            rpc.rpc_sync("worker1", spoil_kept)
            assert torch.equal(got.detach(), mine), function.__name__
    rpc.shutdown()


def test_what_the_callee_keeps_is_copied():
    results(run_group(shared_results))


def memory_returns(rank):
    found = None
    if rank == 0:
        mine = torch.arange(COUNT, dtype=torch.float32)
        for _ in range(3):
            rpc.rpc_sync("worker1", add_in_place, (mine,))
        start = rpc.rpc_sync("worker1", arena_used)
        held = [rpc.rpc_sync("worker1", add_in_place, (mine + number,)) for number in range(300)]  # more than a board has words
        during = rpc.rpc_sync("worker1", arena_used)
        for number, value in enumerate(held):
            assert torch.equal(value, mine + number + 1), number
        view = held[7][5:9]
        held.clear()
        del value
        gc.collect()
        one = rpc.rpc_sync("worker1", arena_used)
        assert view.tolist() == [5 + 8, 6 + 8, 7 + 8, 8 + 8]
        del view
        found = start, during, one, rpc.rpc_sync("worker1", arena_used)
    rpc.shutdown()
    return found


def test_memory_comes_back_when_the_last_tensor_over_it_dies():
    start, during, one, end = results(run_group(memory_returns, arena_limit=512 << 20))[0]
    block = COUNT * 4
    assert during - start >= 200 * block
    assert one - end == block
    assert end <= start


def hoard(rank):
    if rank == 0:
        mine = torch.ones(COUNT)
        held = [rpc.rpc_sync("worker1", identity, (mine * number,)) for number in range(100)]
        assert all(torch.equal(value, mine * number) for number, value in enumerate(held))
        assert rpc.rpc_sync("worker1", handed) <= (32 << 20) // 4
    rpc.shutdown()


def test_a_hoarding_caller_does_not_fill_the_callees_arena():
    results(run_group(hoard, each={1: {"arena_limit": 32 << 20}}))


def outlives(rank):
    if rank == 0:
        mine = torch.arange(COUNT, dtype=torch.float32)
        result = rpc.rpc_sync("worker1", identity, (mine,))
        pid = rpc.rpc_sync("worker1", os.getpid)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(rpc.PeerLost):
            rpc.rpc_sync("worker1", identity, (mine,), timeout=10)
        assert torch.equal(result, mine)
        rpc.shutdown(graceful=False)
        assert torch.equal(result, mine)
        result += 1
        assert torch.equal(result, mine + 1)
    else:
        time.sleep(30)


def test_a_result_outlives_its_callee_and_rpc():
    outcomes = run_group(outlives)
    assert not outcomes[0].error, outcomes[0].text


def forked(rank):
    if rank == 0:
        mine = torch.arange(COUNT, dtype=torch.float32)
        result = rpc.rpc_sync("worker1", identity, (mine,))
        child = os.fork()
        if child == 0:
            del result  # dies in the child only
            os._exit(0)
        os.waitpid(child, 0)
        for number in range(8):
            rpc.rpc_sync("worker1", add_in_place, (mine + number,))
        assert torch.equal(result, mine)
    rpc.shutdown()


def test_a_forked_child_releases_nothing():
    results(run_group(forked))


def checksums(rank):
    """Several threads, each holding its last few results while others come and go."""
    errors: list[str] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        held: list[tuple[torch.Tensor, float]] = []
        for _ in range(150):
            size = int(torch.randint(2000, 40000, (1,), generator=generator))
            mine = torch.rand(size, generator=generator)
            held.append((rpc.rpc_sync(f"worker{1 - rank}", add_in_place, (mine,)), float((mine + 1).double().sum())))
            if len(held) > 5:
                held.pop(int(torch.randint(0, 5, (1,), generator=generator)))
            for value, expected in held:
                if float(value.double().sum()) != expected:
                    errors.append(f"worker {rank}, seed {seed}: a result changed")
                    return

    threads = [threading.Thread(target=work, args=(10 * rank + seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    eventually(lambda: handed() > 0)  # the other one may begin late
    rpc.shutdown()


def test_held_results_never_change():
    results(run_group(checksums))


def late_answer(rank):
    if rank == 0:
        mine = torch.ones(COUNT)
        rpc.rpc_sync("worker1", identity, (mine,))
        start = rpc.rpc_sync("worker1", arena_used)
        for _ in range(3):
            with pytest.raises(RuntimeError, match="RPC ran for more than"):
                rpc.rpc_sync("worker1", held, ("late", mine), timeout=0.05)
        rpc.rpc_sync("worker1", let_go, ("late",))
        eventually(lambda: len(agent.current().caller.expired), 0)  # the late answers have come
        # One grant for each of these calls is all that may be left: of the other signature.
        eventually(lambda: rpc.rpc_sync("worker1", arena_used) <= start + 3 * mine.nbytes)
        eventually(lambda: rpc.rpc_sync("worker1", outstanding), 0)
    rpc.shutdown()


def outstanding():
    agent.current().callee.handovers.sweep()
    return agent.current().callee.handovers.outstanding


def test_late_answers_give_back_what_they_brought():
    results(run_group(late_answer))


def over_tcp(rank):
    if rank == 0:
        mine = torch.ones(COUNT)
        assert torch.equal(rpc.rpc_sync("worker1", identity, (mine,)), mine)
        assert rpc.rpc_sync("worker1", handed) == 0
    rpc.shutdown()


def test_over_tcp_results_are_copied():
    results(run_group(over_tcp, transport="tcp"))
