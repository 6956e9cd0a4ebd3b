"""Many contexts at once, many passes in one, and passes that go back and forth with hardly any threads."""

from __future__ import annotations

import sys
import threading
import time
from functools import partial

import torch
from group import results, run_group
from test_autograd_contexts import decode_late, gone_everywhere
from timing import eventually

import rdmarpc as rpc
from rdmarpc import autograd
from rdmarpc.calls import agent

TRAINERS, SERVERS, CONTEXTS = 2, 2, 100
LIMIT_S = 60.0

torch.manual_seed(0)
shared = torch.rand(4, 4).double().requires_grad_()
"""The parameter of a server, of all its calls at once (the same numbers in every process)."""


def at_once(count, function, limit=LIMIT_S):
    """``function(number)`` in many threads; their results."""
    found, failed = {}, []

    def run(number):
        try:
            found[number] = function(number)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(count)]
    deadline = time.monotonic() + limit
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    assert not any(thread.is_alive() for thread in threads), "hangs"
    if failed:
        raise failed[0]
    return [found[number] for number in range(count)]


def step(tensor):
    return (tensor @ shared).tanh()


def back_home(tensor, home):
    """A call back to the caller, in between."""
    return step(rpc.rpc_sync(home, torch.sin, (step(tensor),)))


def of_the_context(context_id):
    return autograd.get_gradients(context_id).get(shared)


def untouched():
    return shared.grad is None


def network(tensor, weight, first, second):
    """What a trainer computes; ``first`` and ``second`` are the servers' parts."""
    mine = tensor * weight
    return (first(mine) * second(mine + 1)).sum() + second(first(mine)).sum()


def train(rank, number):
    generator = torch.Generator().manual_seed(1000 * rank + number)
    tensor = torch.rand(3, 4, generator=generator).double()
    weight = torch.rand(4, generator=generator).double().requires_grad_()
    home, servers = f"worker{rank}", [f"worker{TRAINERS + (number + hop) % SERVERS}" for hop in range(SERVERS)]
    with autograd.context() as context_id:
        loss = network(
            tensor,
            weight,
            lambda mine: rpc.rpc_sync(servers[0], step, (mine,)),
            lambda mine: rpc.rpc_sync(servers[1], back_home, (mine, home)),
        )
        autograd.backward(context_id, [loss])
        mine = autograd.get_gradients(context_id)
        theirs = [rpc.rpc_sync(server, of_the_context, (context_id,)) for server in servers]
    assert mine.keys() == {weight} and weight.grad is None
    # The same, here.
    copies = [shared.detach().clone().requires_grad_() for _ in servers]

    def second(given):
        return (torch.sin((given @ copies[1]).tanh()) @ copies[1]).tanh()

    expected = torch.autograd.grad(network(tensor, weight, lambda given: (given @ copies[0]).tanh(), second), [weight, *copies])
    for got, right in zip([mine[weight], *theirs], expected, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-12, atol=1e-12)


def many_contexts(rank):
    if rank < TRAINERS:
        # They exist at once, all of them, while their calls share two threads at one server, and four at the other.
        at_once(CONTEXTS // TRAINERS, lambda number: train(rank, number))
        gone_everywhere(*(f"worker{other}" for other in range(TRAINERS + SERVERS)), limit=20.0)
        assert rpc.rpc_sync(f"worker{TRAINERS}", untouched)
        if rank == 0:
            crowd()
    rpc.shutdown()
    # Answers of the last calls may still have been under way.
    assert autograd._get_debug_info() == {"num_current_backward_passes": 0, "num_autograd_contexts": 0}


def root_of(tensor):
    return (step(tensor) * rpc.rpc_sync("worker3", step, (tensor,))).sum()


def crowd():
    """Fifty users begin passes on one owner at once."""

    def use(number):
        tensor = torch.full((2, 4), number / 50).double().requires_grad_()
        with autograd.context() as context_id:
            rpc.remote("worker2", root_of, (tensor,)).backward(context_id)
            got = autograd.get_gradients(context_id)[tensor], rpc.rpc_sync("worker2", of_the_context, (context_id,))
        copy = shared.detach().clone().requires_grad_()
        loss = ((tensor @ copy).tanh() * (tensor @ shared.detach()).tanh()).sum()
        for each, right in zip(got, torch.autograd.grad(loss, [tensor, copy]), strict=True):
            torch.testing.assert_close(each, right, rtol=1e-12, atol=1e-12)

    at_once(50, use)


def test_a_hundred_contexts_at_once():
    results(
        run_group(many_contexts, TRAINERS + SERVERS, num_worker_threads=4, each={2: {"num_worker_threads": 2}}, timeout=115)
    )


def one_step(tensor):
    return tensor * weight


weight = torch.tensor(0.5, dtype=torch.double, requires_grad=True)


@rpc.functions.async_execution
def ball(depth, tensor):
    """From worker to worker, without a thread that waits."""
    here = one_step(tensor)
    if not depth:
        done = torch.futures.Future()
        done.set_result(here)
        return done
    me = rpc.get_worker_info().id
    return rpc.rpc_async(f"worker{1 - me}", ball, (depth - 1, here)).then(lambda answer: answer.wait() + 1)


def of_weight(context_id):
    return autograd.get_gradients(context_id)[weight].item()


def deep_chains(rank):
    if rank == 0:

        def play(number):
            tensor = torch.tensor(number + 1.0, dtype=torch.double, requires_grad=True)
            with autograd.context() as context_id:
                nested = rpc.rpc_sync("worker1", ball, (19, tensor))
                value = tensor
                for hop in range(20):
                    value = rpc.rpc_sync(f"worker{1 - hop % 2}", one_step, (value,))
                autograd.backward(context_id, [nested + value])
                assert autograd.get_gradients(context_id)[tensor].item() == 2 * 0.5**20
                # Each worker's weight: ten of the twenty factors, in both chains.
                for got in (of_weight(context_id), rpc.rpc_sync("worker1", of_weight, (context_id,))):
                    assert got == 2 * 10 * tensor.item() * 0.5**19

        play(0)
        at_once(10, play)
        gone_everywhere("worker0", "worker1")
        busy = agent.current().pool
        eventually(lambda: len(busy.running), 0)
        assert len(busy.threads) <= 4  # the pool's, its spare one, and the watchdog
    rpc.shutdown()


def test_long_chains_need_no_thread_a_hop():
    results(run_group(deep_chains, 2, num_worker_threads=1))


over = threading.Event()


def set_over():
    over.set()


class Waits(torch.autograd.Function):
    """The identity; its backward waits until it is told to go on."""

    @staticmethod
    def forward(ctx, tensor):
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient):
        assert over.wait(LIMIT_S)
        return gradient


def gated(path, tensor):
    return rpc.rpc_sync(path[0], gated, (path[1:], tensor)) if path else Waits.apply(tensor)


def running():
    return len(agent.current().pool.running) - 1  # but this


def none_held(rank):
    """While gradients are awaited no thread is held, neither where a pass goes through nor where one was begun for others."""
    if rank == 0:
        tensor = torch.ones(3, requires_grad=True)

        def use(number):
            with autograd.context() as context_id:
                if number % 2:
                    autograd.backward(context_id, [rpc.rpc_sync("worker1", gated, (["worker2"], tensor)).sum()])
                else:
                    rpc.remote("worker1", gated_root, (tensor,)).backward(context_id)
                assert autograd.get_gradients(context_id)[tensor].tolist() == [1.0] * 3

        def look():
            eventually(partial(rpc.rpc_sync, "worker2", running), 8)
            eventually(partial(rpc.rpc_sync, "worker1", running), 0)
            assert rpc.rpc_sync("worker1", passes) == 8
            rpc.rpc_sync("worker2", set_over)

        at_once(9, lambda number: use(number) if number < 8 else look())
        assert tensor.grad is None
    rpc.shutdown()


def gated_root(tensor):
    return gated(["worker2"], tensor).sum()


def passes():
    return autograd._get_debug_info()["num_current_backward_passes"]


def test_no_thread_is_held_while_gradients_are_awaited():
    results(run_group(none_held, 3, num_worker_threads=16))


def part(tensor):
    return tensor * shared


class Counted(torch.autograd.Function):
    """Three times; waits a little, so that passes meet in it."""

    @staticmethod
    def forward(ctx, tensor):
        return tensor * 3

    @staticmethod
    def backward(ctx, gradient):
        runs.append(gradient)
        time.sleep(0.002)
        return gradient * 3


runs: list[torch.Tensor] = []


def in_one_context(rank):
    if rank == 0:
        tensor = torch.rand(4, 4).double().requires_grad_()
        with autograd.context() as context_id:
            # Nodes that wait for one another: what is sent depends on what came, and a part is never used.
            one = Counted.apply(tensor * 2)
            two = Counted.apply(rpc.rpc_sync("worker1", part, (one,)))
            three = Counted.apply(two + one)
            rpc.rpc_sync("worker1", part, (three,))
            four = rpc.rpc_sync("worker1", part, (three + two,))
            loss = (four * one + two).sum()

            def again(number):
                for _ in range(5):
                    autograd.backward(context_id, [loss], retain_graph=True)

            interval = sys.getswitchinterval()
            sys.setswitchinterval(1e-6)  # threads give way at every step, also between counting a pass and knowing it
            at_once(6, again)
            sys.setswitchinterval(interval)
            # From another thread than the one that is in the context, too.
            assert len(runs) == 3 * 30
            got = autograd.get_gradients(context_id)
            at_worker1 = rpc.rpc_sync("worker1", of_the_context, (context_id,))
        copy = shared.detach().clone().requires_grad_()
        one = tensor * 6
        two = one * copy * 3
        three = (two + one) * 3
        loss = ((three + two) * copy * one + two).sum()
        for each, right in zip((got[tensor], at_worker1), torch.autograd.grad(loss, [tensor, copy]), strict=True):
            torch.testing.assert_close(each, 30 * right, rtol=1e-10, atol=1e-10)
        assert tensor.grad is None and rpc.rpc_sync("worker1", untouched)
    rpc.shutdown()


def test_passes_at_once_in_one_context():
    results(run_group(in_one_context, 2))


def fresh_leaves(rank):
    """Passes meet at a leaf whose accumulator is new: nothing goes to ``.grad``."""
    sys.setswitchinterval(1e-6)
    for _ in range(30):
        leaf = torch.ones(2, requires_grad=True)
        losses = [(leaf * 2).sum() for _ in range(4)]
        together = threading.Barrier(4)

        def use(number, leaf=leaf, losses=losses, together=together):
            with autograd.context() as context_id:
                together.wait(LIMIT_S)
                autograd.backward(context_id, [losses[number]])
                assert autograd.get_gradients(context_id)[leaf].tolist() == [2.0, 2.0]

        at_once(4, use)
        assert leaf.grad is None
    sys.setswitchinterval(0.005)
    rpc.shutdown()


def test_passes_meet_at_a_new_accumulator():
    results(run_group(fresh_leaves, 1))


def overtakes_creation(rank):
    if rank == 0:
        rpc.rpc_sync("worker2", decode_late, ("root_of", time.sleep, 0.3))
        tensor = torch.rand(2, 4).double().requires_grad_()
        with autograd.context() as context_id:
            rpc.remote("worker2", root_of, (tensor,)).backward(context_id)
            assert autograd.get_gradients(context_id)[tensor].shape == (2, 4)
    rpc.shutdown()


def test_backward_overtakes_the_call_that_makes_its_root():
    results(run_group(overtakes_creation, 4))
