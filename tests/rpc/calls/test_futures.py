"""Futures of calls: callbacks, errors, completion by users, ``torch.futures``, ``_wait_all``."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from called import held, let_go
from group import results, run_group
from timing import eventually

import rdmarpc as rpc
from rdmarpc.calls import agent


def add(a, b):
    return a + b


def fail(text):
    raise ValueError(text)


def slow(seconds, value=None):
    time.sleep(seconds)
    return value


class Thing:
    """Needs the full pickler on its way back."""

    def __init__(self, value):
        self.value = value


def after_collect(rank):
    """Callbacks that call and wait, behind futures that only torch knows to have callbacks."""
    if rank == 0:
        there = "worker1"
        for count in (1, 4, 64):
            for function in (add, Thing):
                args = (torch.ones(2), 1) if function is add else (3,)
                every = torch.futures.collect_all([rpc.rpc_async(there, function, args) for _ in range(count)])
                nested = every.then(lambda done: rpc.rpc_sync(there, add, (len(done.wait()), 1)))
                again = nested.then(lambda done: rpc.rpc_async(there, add, (done.wait(), 1)).wait())
                done = threading.Event()
                again.add_done_callback(lambda _, done=done: done.set())
                assert done.wait(30)
                assert again.value() == count + 2
        # The same while the main thread makes progress for a call of its own.
        pending = rpc.rpc_async(there, slow, (0.5, "last"))
        every = torch.futures.collect_all([rpc.rpc_async(there, add, (n, 1)) for n in range(8)])
        nested = every.then(lambda done: rpc.rpc_sync(there, add, (len(done.wait()), 1)))
        assert pending.wait() == "last" and nested.wait() == 9
    rpc.shutdown()


def test_callbacks_of_collect_all_may_call():
    results(run_group(after_collect))


def errors(rank):
    if rank == 0:
        future = rpc.rpc_async("worker1", fail, ("Expected error",))
        for _ in range(2):
            with pytest.raises(ValueError, match="Expected error"):
                future.wait()
        assert future.done()
        with pytest.raises(ValueError, match="Expected error"):
            future.value()
        seen = []

        def look(done):
            with pytest.raises(ValueError, match="Expected error"):
                done.wait()
            seen.append(done.done())
            return "looked"

        assert rpc.rpc_async("worker1", fail, ("Expected error",)).then(look).wait() == "looked"
        assert future.then(look).wait() == "looked"
        assert seen == [True, True]
        futures = [rpc.rpc_async("worker1", add, (n, 1)) for n in range(9)]
        futures.insert(4, rpc.rpc_async("worker1", fail, ("among others",)))
        with pytest.raises(ValueError, match="among others"):
            torch.futures.wait_all(futures)
        assert torch.futures.wait_all(futures[:4]) == [1, 2, 3, 4]
        with pytest.raises(TypeError, match=r"incompatible function arguments\."):
            futures[0].then(None)
        with pytest.raises(RuntimeError, match="Future can only be marked completed once"):
            futures[0].set_result(1)
    rpc.shutdown()


def test_errors_in_futures():
    results(run_group(errors))


def completed_by_the_user(rank):
    """Whoever completes a future of a call wins; the answer is dropped, and nothing else suffers."""
    if rank == 0:
        for value, end in ((5, lambda f: f.set_result(5)), (None, lambda f: f.set_exception(KeyError("mine")))):
            for function, args in ((slow, (0.05, 1)), (fail, ("theirs",)), (Thing, (1,))):
                future = rpc.rpc_async("worker1", function, args)
                try:
                    end(future)
                except RuntimeError:
                    assert future.done()  # the answer was first
                    continue
                time.sleep(0.1)
                if value is not None:
                    assert future.wait() == value
                else:
                    with pytest.raises(KeyError, match="mine"):
                        future.wait()
                assert rpc.rpc_sync("worker1", add, (1, 1)) == 2
    rpc.shutdown()


def test_a_future_that_the_user_completes():
    results(run_group(completed_by_the_user))


def gathered(rank):
    there = f"worker{1 - rank}"
    with rpc.api._wait_all():
        futures = [rpc.rpc_async(there, slow, (0.05, n)) for n in range(5)]
        assert rpc.api._thread_local_var.future_list == futures
        other = []
        thread = threading.Thread(target=lambda: other.append(rpc.rpc_async(there, slow, (0.0,))))
        thread.start()
        thread.join()
        assert len(rpc.api._thread_local_var.future_list) == 5  # of this thread only
    assert all(future.done() for future in futures)
    with pytest.raises(ValueError, match="in the end"), rpc.api._wait_all():
        rpc.rpc_async(there, fail, ("in the end",))
    with pytest.raises(RuntimeError, match="RPC ran for more than"), rpc.api._wait_all():
        rpc.rpc_async(there, held, ("gathered",), timeout=0.1)
    rpc.rpc_sync(there, let_go, ("gathered",))
    assert not hasattr(rpc.api._thread_local_var, "future_list")
    everything = rpc.api._all_gather({"rank": rank, "tensor": torch.full((3,), rank)})
    assert {name: int(found["tensor"].sum()) for name, found in everything.items()} == {"worker0": 0, "worker1": 3}
    rpc.api._barrier(["worker0", "worker1"])
    rpc.api._barrier(set())  # torch: all workers
    assert rpc.api._all_gather(rank, [f"worker{rank}"]) == {f"worker{rank}": rank}
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"timed out in _all_gather after 0\.20 seconds(.|\n)*worker1"):
            rpc.api._all_gather(None, timeout=0.2)
    rpc.shutdown()


def test_waiting_for_all():
    results(run_group(gathered))


def first_error(rank):
    """One call fails at once, the others take for ever, and have no limit of time."""
    if rank == 0:
        there = "worker1"
        for collect in (torch.futures.wait_all, lambda futures: torch.futures.collect_all(futures).wait()):
            for order in (0, 1):
                calls = [rpc.rpc_async(there, held, ("errors",), timeout=0), rpc.rpc_async(there, fail, ("at once",))]
                rref = rpc.remote(there, held, ("errors",), timeout=0)
                calls += [rref.rpc_async(timeout=0).bit_length(), torch.futures.Future()]
                with pytest.raises(ValueError, match="at once"):
                    collect(calls[:: -1 if order else 1])
                assert not calls[0].done()
        told, waited = threading.Event(), threading.Event()

        def tell(done):
            with pytest.raises(ValueError, match="at once"):
                done.value()
            told.set()
            assert waiting.wait() == 7  # one of those that were collected
            waited.set()

        waiting = rpc.rpc_async(there, held, ("errors", 7), timeout=0)
        every = torch.futures.collect_all([waiting, rpc.rpc_async(there, fail, ("at once",))])
        nested = torch.futures.collect_all([torch.futures.Future(), every])
        every.add_done_callback(tell)
        with pytest.raises(ValueError, match="at once"):
            nested.wait()
        assert told.wait(30)
        rpc.rpc_sync(there, let_go, ("errors",))
        assert waited.wait(30)
        assert torch.futures.wait_all([]) == [] and torch.futures.collect_all([]).wait() == []
        with pytest.raises((TypeError, AttributeError)):
            torch.futures.collect_all([1])
    rpc.shutdown()


def test_waiting_for_many_ends_at_the_first_error():
    results(run_group(first_error, num_worker_threads=32))


def cut_short(rank):
    """Calls that nobody waits for when RPC is stopped under them."""
    if rank == 0:
        told = threading.Event()
        futures = [rpc.rpc_async("worker1", slow, (30.0,)) for _ in range(3)]
        futures[0].add_done_callback(lambda done: told.set())
        every = torch.futures.collect_all(futures)
        rpc.shutdown(graceful=False)
        assert told.wait(30)
        for future in (*futures, every):
            with pytest.raises(rpc.PeerLost):
                future.wait()
    else:
        until(lambda: agent.current().links.lost)
        rpc.shutdown(graceful=False)


def until(true, timeout=30.0):
    deadline = time.monotonic() + timeout
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_futures_of_calls_under_way_end_with_the_agent():
    results(run_group(cut_short))


def outlives(rank):
    """A call that takes long enough for the thread of timeouts to look at it."""
    if rank == 0:
        value = rpc.rpc_async("worker1", slow, (0.2, Thing(1))).wait()
        value = weakref.ref(value)
        eventually(lambda: value() is None)
    rpc.shutdown()


def test_a_result_lives_as_long_as_it_is_wanted():
    results(run_group(outlives))


def waited_for_in_a_handler(to):
    """Whether what this function has is gone after it: its future's error, which has a cause, came as another was handled."""
    known = weakref.ref(mine := Thing(to))
    try:
        raise KeyError(mine.value)
    except KeyError:
        future = rpc.rpc_async(to, fail_with_two, ("text", "another"))
        with pytest.raises(Twofold):
            future.wait()
    return known


class Twofold(Exception):
    """Travels whole, and has the remote text as its cause."""


def fail_with_two(*texts):
    raise Twofold(*texts)


def handled(rank):
    if rank == 0:
        for to in ("worker0", "worker1"):
            known = waited_for_in_a_handler(to)
            gc.collect()
            assert known() is None, to
    rpc.shutdown()


def test_the_error_of_a_future_holds_nothing_of_what_was_handled_as_it_came():
    """Else the future, which no collector sees, held the frame that has it, and all of a worker's life with that."""
    results(run_group(handled))


def cut_short_at_work(rank):
    if rank == 0:
        kept = threading.Event()
        futures = [rpc.rpc_async("worker1", slow, (30.0,)) for _ in range(3)]
        every = torch.futures.collect_all(futures)
        futures[0].add_done_callback(lambda _: kept.wait(30))  # this must not keep the shutdown, nor the others
        rpc.rpc_sync("worker1", keep_busy, ("worker0",))
        rpc.shutdown(graceful=False)
        for future in futures:
            with pytest.raises(rpc.PeerLost):
                future.wait()
        until(every.done)
        kept.set()
    else:
        until(lambda: agent.current().links.lost)
        rpc.shutdown(graceful=False)


_busy: list[rpc.Future] = []


def keep_busy(there):
    """Returns when every thread of ``there`` is at work for us."""
    _busy.append(rpc.rpc_async(there, slow, (30.0,)))
    time.sleep(0.5)


def test_futures_end_with_the_agent_when_its_threads_are_all_at_work():
    results(run_group(cut_short_at_work, each={0: {"num_worker_threads": 1}}))


def calls_to_the_end(rank):
    """Threads that go on calling while RPC stops under them: each call ends."""
    futures: list[rpc.Future] = []
    there, ended = f"worker{1 - rank}", []

    def go_on():
        try:
            while True:
                future = rpc.rpc_async(there, add, (torch.ones(2), 1), timeout=0)
                futures.append(future)
                rpc.rpc_sync(there, add, (1, 1), timeout=0)
        except Exception as error:
            ended.append(error)

    threads = [threading.Thread(target=go_on, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    rpc.shutdown(graceful=False)
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads), "a call does not end"
    assert all(isinstance(error, RuntimeError) for error in ended), ended
    for future in futures:
        until(future.done)


@pytest.mark.parametrize("device", ["shm", "tcp"])
def test_calls_that_race_with_the_end_of_the_agent_end(device):
    for _ in range(5):
        results(run_group(calls_to_the_end, transport=device))


def waits_for_one_with_callbacks(there):
    """Its answer comes while this thread, the only one, is busy here."""
    future = rpc.rpc_async(there, add, (1, 2))
    future.add_done_callback(lambda _: None)
    time.sleep(0.3)
    return future.wait()


def one_thread(rank):
    if rank == 0:
        assert rpc.rpc_sync("worker1", waits_for_one_with_callbacks, ("worker0",)) == 3
    rpc.shutdown()


def test_a_function_waits_for_a_future_that_no_other_thread_could_complete():
    results(run_group(one_thread, num_worker_threads=1))


async def awaits(there, rref):
    """Many at once; errors keep their type; a wait that is given up leaves its call alone."""
    values = await asyncio.gather(*(take(rpc.rpc_async(there, add, (torch.full((2,), n), 1))) for n in range(32)))
    assert [int(value[0]) for value in values] == [*range(1, 33)]
    assert await rref.rpc_async().__len__() == 3
    with pytest.raises(ValueError, match="Expected error"):
        await rpc.rpc_async(there, fail, ("Expected error",))
    done = rpc.rpc_async(there, add, (1, 2))
    done.wait()
    assert (await done, await done) == (3, 3)
    gate = f"awaited by {threading.get_ident()}"
    call = rpc.rpc_async(there, held, (gate, "arrived"))
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(take(call), 0.05)
    task = asyncio.create_task(take(call))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await rpc.rpc_async(there, let_go, (gate,))
    return await call


async def take(future):
    return await future


def loops(rank):
    """A loop in this thread, and two in others."""
    if rank == 0:
        rref = rpc.remote("worker1", list, ((1, 2, 3),))
        with ThreadPoolExecutor(2) as threads:
            others = [threads.submit(lambda: asyncio.run(awaits("worker1", rref))) for _ in range(2)]
            assert asyncio.run(awaits("worker1", rref)) == "arrived"
            assert [other.result(30) for other in others] == ["arrived"] * 2
        late = rpc.rpc_async("worker1", held, ("late", "late"))
        with pytest.raises(asyncio.TimeoutError):
            asyncio.run(asyncio.wait_for(take(late), 0.05))  # the loop is closed when the answer comes
        rpc.rpc_sync("worker1", let_go, ("late",))
        assert late.wait() == "late"
    rpc.shutdown()


def test_await_takes_futures():
    results(run_group(loops))
