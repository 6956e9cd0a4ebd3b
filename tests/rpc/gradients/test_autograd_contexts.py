"""Contexts of distributed autograd: how they begin, where they are known, and that they end everywhere, whatever happens."""

from __future__ import annotations

import threading
import time
from functools import partial

import pytest
import torch
from called import double, slow
from group import die, dismiss, results, run_group, until_dismissed
from timing import eventually

import rdmarpc as rpc
from rdmarpc import autograd
from rdmarpc.calls import agent

LIMIT_S = 30.0


def live():
    return sorted(agent.current().contexts.live)


def known(context_id):
    return autograd._is_valid_context(context_id)


def gone_everywhere(*workers, limit=LIMIT_S):
    for worker in workers:
        eventually(partial(rpc.rpc_sync, worker, live), [], limit)


def relay(path, tensor):
    """By way of all workers of ``path``."""
    return rpc.rpc_sync(path[0], relay, (path[1:], tensor)) if path else tensor * 2


def relay_nothing(path):
    return rpc.rpc_sync(path[0], relay_nothing, (path[1:],)) if path else live()


def test_before_init_and_after_shutdown():
    text = "Need to initialize distributed autograd using torch.distributed.autograd.init()"
    for use in (
        autograd.context().__enter__,
        lambda: autograd.backward(0, [torch.ones((), requires_grad=True) * 2]),
        lambda: autograd.get_gradients(0),
        autograd._get_max_id,
    ):
        with pytest.raises(RuntimeError) as raised:
            use()
        assert str(raised.value) == text
    assert autograd._get_debug_info() == {"num_current_backward_passes": 0, "num_autograd_contexts": 0}
    assert not autograd._is_valid_context(0)


def ids(rank):
    with autograd.context() as first:
        assert first >> 48 == rank
        with pytest.raises(RuntimeError, match=r"^Already have an autograd context id for this thread\.$"):
            autograd.context().__enter__()
        assert autograd._current_context()._context_id() == first  # the refused one has changed nothing
    assert autograd._get_max_id() == (rank + 1 << 48) - 1
    with pytest.raises(RuntimeError, match="doesn't have a valid autograd context"):
        autograd._current_context()
    drawn, together = [], threading.Barrier(32)

    def enter():
        with autograd.context() as mine:
            together.wait(LIMIT_S)
            drawn.append((mine, autograd._current_context()._context_id(), sum(number >> 48 == rank for number in live())))
            together.wait(LIMIT_S)

    threads = [threading.Thread(target=enter) for _ in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert sorted(mine for mine, _, _ in drawn) == [first + count for count in range(1, 33)]
    assert all(mine == current and count == 32 for mine, current, count in drawn)
    assert not any(number >> 48 == rank for number in live())


def uses_after_the_end(context_id):
    """The texts of all uses of a context that is none."""
    texts = set()
    root = torch.ones((), requires_grad=True) * 2
    for use in (
        lambda: autograd.get_gradients(context_id),
        lambda: autograd.backward(context_id, [root]),
        lambda: autograd._release_context(context_id),
        lambda: autograd._retrieve_context(context_id),
    ):
        with pytest.raises(RuntimeError) as raised:
            use()
        texts.add(str(raised.value))
    return texts


def clean_up(rank):
    ids(rank)
    if rank:
        rpc.shutdown()
        return
    tensor = torch.ones(3, requires_grad=True)
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", relay, (["worker2", "worker3"], tensor)).sum()
        assert [rpc.rpc_sync(f"worker{other}", known, (context_id,)) for other in (1, 2, 3)] == [True] * 3
        autograd.backward(context_id, [loss])
        assert autograd.get_gradients(context_id)[tensor].tolist() == [2.0] * 3
        assert autograd.get_gradients(context_id) is not autograd.get_gradients(context_id)
    for other in (0, 1, 2, 3):
        eventually(partial(rpc.rpc_sync, f"worker{other}", known, (context_id,)), False)
        texts = rpc.rpc_sync(f"worker{other}", uses_after_the_end, (context_id,))
        assert texts == {f"Could not find autograd context with id: {context_id}"}
    # Workers that only saw calls without tensors know it too, and forget it.
    with autograd.context() as context_id:
        assert rpc.rpc_sync("worker1", relay_nothing, (["worker2", "worker3"],)) == [context_id]
    gone_everywhere("worker1", "worker2", "worker3")
    # By an exception, and by hand, after which a thread may enter another.
    with pytest.raises(KeyError), autograd.context() as context_id:
        rpc.rpc_sync("worker1", double, (tensor,))
        raise KeyError
    gone_everywhere("worker0", "worker1")
    with autograd.context() as context_id:
        rpc.rpc_sync("worker1", double, (tensor,))
        autograd._release_context(context_id)
        with autograd.context() as other:
            assert other == context_id + 1
            assert rpc.rpc_sync("worker1", relay_nothing, (["worker2"],)) == [other]
    gone_everywhere("worker0", "worker1", "worker2", "worker3")
    assert rpc.counters()["autograd_contexts"] == 0
    rpc.shutdown()


def test_contexts_begin_and_end():
    results(run_group(clean_up, 4))


class SlowToPickle:
    """Leaves when the context is over already."""

    def __reduce__(self):
        time.sleep(0.4)
        return SlowToPickle, ()


def double_too(_, tensor):
    return tensor * 2


def forward_late(to, tensor):
    """The request is still being made when the context ends."""
    return rpc.rpc_sync(to, double_too, (SlowToPickle(), tensor)).requires_grad


def until_no_context():
    eventually(live, [])


def decode_late(function, wait, *args):
    """From now on requests of ``function`` (its name) wait, by ``wait(*args)``, before anybody looks at what they bring."""
    callee = agent.current().callee
    decode = callee._decode

    def slow_decode(request):
        if function.encode() in request.frame.body:
            wait(*args)
        return decode(request)

    callee._decode = slow_decode


def arrives_late(tensor):
    seen.append(autograd._current_context() if _entered() else None)
    return tensor * 2


def _entered():
    try:
        autograd._current_context()
    except RuntimeError:
        return False
    return True


seen: list[object] = []


def what_was_seen():
    return [context is not None for context in seen]


def overtaken(rank):
    if rank:
        rpc.shutdown()
        return
    tensor = torch.ones(3, requires_grad=True)
    # The end comes while a request waits for its thread, or to be looked at.
    rpc.rpc_sync("worker1", decode_late, ("arrives_late", until_no_context))
    with autograd.context():
        rpc.rpc_async("worker2", slow, (0.3,))
        waiting = [rpc.rpc_async("worker2", double, (tensor,)) for _ in range(5)]
        rpc.rpc_sync("worker1", double, (tensor,))
        pending = rpc.rpc_async("worker1", arrives_late, (tensor,))
    assert pending.wait().tolist() == [2.0] * 3
    assert torch.stack([each.wait() for each in waiting]).sum() == 30
    assert rpc.rpc_sync("worker1", what_was_seen) == [False]
    gone_everywhere("worker0", "worker1", "worker2")
    # A worker passes the context on to one that has not heard of it, while it ends.
    rpc.rpc_sync("worker1", relay, (["worker2"], tensor))  # they are connected
    with autograd.context():
        pending = rpc.rpc_async("worker1", forward_late, ("worker2", tensor))
        time.sleep(0.1)
    pending.wait()
    gone_everywhere("worker0", "worker1", "worker2")
    rpc.shutdown()


def test_the_end_overtakes_calls():
    results(run_group(overtaken, 3, each={2: {"num_worker_threads": 1}}))


def enter_and_die(tensor):
    """On a worker of its own: it dies in the middle of a context, with calls under way."""
    with autograd.context():
        rpc.rpc_sync("worker1", relay, (["worker2"], tensor))
        rpc.rpc_async("worker1", slow, (1.0,))
        for _ in range(3):  # these wait for a thread of worker1 when it learns of the loss
            rpc.rpc_async("worker1", relay, (["worker2"], tensor))
        time.sleep(0.1)
        die()


def one_dies(rank):
    if rank:
        until_dismissed()
        rpc.shutdown(graceful=False)
        return "survived"
    tensor = torch.ones(3, requires_grad=True)
    rpc.rpc_sync("worker2", relay, (["worker3"], tensor))  # who dies is linked to all
    with pytest.raises(rpc.PeerLost):
        rpc.rpc_sync("worker3", enter_and_die, (tensor,))
    assert rpc.rpc_sync("worker1", slow, (0.0, "free")) == "free"  # it has served what the dead one had left
    gone_everywhere("worker0", "worker1", "worker2")
    # It is the one by way of whom another heard of the context.
    with autograd.context() as context_id:
        rpc.rpc_sync("worker1", relay, (["worker2"], tensor))
        rpc.rpc_async("worker1", die)
        eventually(lambda: 1 in agent.current().links.lost)
        assert known(context_id)
    gone_everywhere("worker0", "worker2")
    dismiss("worker2")
    rpc.shutdown(graceful=False)
    return "survived"


def test_contexts_end_with_a_worker_that_dies():
    outcomes = run_group(one_dies, 4, each={1: {"num_worker_threads": 1}})
    assert [outcomes[rank].result for rank in (0, 2)] == ["survived"] * 2, outcomes


def second_life(meeting):
    """A worker that comes back under its name and rank enters contexts anew: nobody takes them for those of its first life."""
    if meeting.rank == 0:
        meeting.join()
        meeting.say("first")
        meeting.hear("over")
        eventually(live, [])
        rpc.shutdown()
        return
    meeting.hear("first")
    drawn = []
    for _ in range(2):
        meeting.join()
        for _ in range(2):
            with autograd.context() as context_id:
                tensor = torch.ones(3, requires_grad=True)
                autograd.backward(context_id, [rpc.rpc_sync("worker0", double, (tensor,)).sum()])
                assert autograd.get_gradients(context_id)[tensor].tolist() == [2.0] * 3
                drawn.append(context_id)
        rpc.shutdown()
    assert len(set(drawn)) == 4
    meeting.say("over")


def test_contexts_of_a_worker_that_comes_back():
    results(run_group(second_life, 2, dynamic=True))


def entered_in_another_life(meeting):
    for life in range(2):
        meeting.join(world_size=1)
        if life == 0:
            left_over = autograd.context()
            left_over.__enter__()
        else:
            left_over.__exit__(None, None, None)
            with autograd.context() as context_id:
                assert known(context_id)
            assert live() == []
        rpc.shutdown()


def test_a_context_is_left_after_the_next_init():
    results(run_group(entered_in_another_life, 1, dynamic=True))
