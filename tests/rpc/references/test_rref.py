"""References between real workers: what users see of them, and that nothing of them is left."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import time

import pytest
import torch
from called import slow
from group import dismiss, results, run_group, until_dismissed
from rref_things import (
    Thing,
    forget,
    give,
    is_own,
    keep,
    make,
    pair_of,
    raises,
    tables,
    value_of,
    wait_until_empty,
)
from timing import eventually

import rdmarpc as rpc
from rdmarpc.base.futures import Value
from rdmarpc.calls import agent
from rdmarpc.calls.pending import Pending
from rdmarpc.transport.words import kernels

# -- calls


def keywords(rank):
    if rank == 0:
        given = {"name": "x", "form": 2, "timeout": 3, "rref": 4, "func_name": 5, "args": 6, "kwargs": 7}
        wanted = "x", 2, 3, {"rref": 4, "func_name": 5, "args": 6, "kwargs": 7}
        for owner in ("worker0", "worker1"):
            thing = rpc.remote(owner, Thing)
            assert thing.rpc_sync().named(**given) == thing.rpc_async().named(**given).wait() == wanted
            assert thing.remote().named(**given).to_here() == wanted
    rpc.shutdown()


def test_arguments_of_methods_may_have_any_name():
    results(run_group(keywords))


# -- sharing

DELETED = 100


def announced():
    """How often all threads of the pool were called."""
    return kernels.load(agent.current().progress.words.jobs)


def deleted_one_by_one(rank):
    if rank == 0:
        called = []
        while not called or (called[-1] >= DELETED // 2 and len(called) < 5):
            before = rpc.rpc_sync("worker1", announced)
            for number in range(DELETED):
                assert rpc.remote("worker1", Thing, (number,)).to_here().number == number
            called.append(rpc.rpc_sync("worker1", announced) - before)
        assert called[-1] < DELETED // 2, called  # the watchdog calls some, on a busy machine
        wait_until_empty(range(2))
    rpc.shutdown()


@pytest.mark.parametrize("device", ["shm", "tcp"])
def test_a_value_that_dies_wakes_no_thread(device):
    """The thread that read of it lets it go, as it runs what else it read."""
    results(run_group(deleted_one_by_one, transport=device))


def four_ways(rank):
    if rank == 0:
        mine = rpc.RRef({"who": 0})
        theirs = rpc.remote("worker1", Thing, (5,))
        # user -> owner, as an argument and as a result
        assert rpc.rpc_sync("worker1", is_own, (theirs,))
        rpc.rpc_sync("worker1", keep, (mine,))
        assert rpc.rpc_sync("worker1", give).local_value() is mine.local_value()
        # owner -> user, as an argument and as a result
        assert rpc.rpc_sync("worker2", value_of, (mine,)) == {"who": 0}
        made = rpc.rpc_sync("worker1", make, (torch.arange(3),))
        assert torch.equal(made.to_here(), torch.arange(3)) and made.confirmed_by_owner()
        # user -> user, as an argument and as a result
        assert rpc.rpc_sync("worker2", value_of, (theirs,)).number == 5
        assert rpc.rpc_sync("worker2", value_of, (rpc.remote("worker1", slow, (0.2, "late")),)) == "late"
        rpc.rpc_sync("worker2", keep, (theirs,))
        assert rpc.rpc_sync("worker2", give).to_here().number == 5
        # in values, in containers, twice in one message
        nested = rpc.remote("worker2", pair_of, (theirs, mine))
        assert [reference.to_here() for reference in nested.to_here()[1:]] == [{"who": 0}]
        same, other = rpc.rpc_sync("worker2", pair_of, (mine, mine))
        assert same is other and same.is_owner()
        # beside more than fits in a frame
        large = b"x" * 500_000
        assert rpc.rpc_sync("worker2", pair_of, (large, theirs))[1].to_here().number == 5
        assert rpc.remote("worker2", pair_of, (large, theirs)).to_here()[1].to_here().number == 5
        # to oneself
        assert rpc.rpc_sync("worker0", value_of, (theirs,)).number == 5
        assert rpc.rpc_sync("worker0", is_own, (mine,))
        own = rpc.remote("worker0", Thing, (7,))
        assert own.is_owner() and own.local_value().number == 7 and own.to_here() is own.local_value()
        del mine, theirs, made, nested, same, other, own
        for peer in (1, 2):
            rpc.rpc_sync(f"worker{peer}", forget)
        wait_until_empty(range(3))
    rpc.shutdown()


@pytest.mark.parametrize("device", ["shm", "tcp"])
def test_four_ways_to_share(device):
    results(run_group(four_ways, 3, transport=device))


MANY = 200


def alive(kind):
    return sum(type(each) is kind for each in gc.get_objects())


def alive_values():
    return alive(Value)


def lean(rank):
    if rank == 0:
        before = alive(Pending), rpc.rpc_sync("worker1", alive_values)
        handles = [rpc.remote("worker1", Thing, (number,)) for number in range(MANY)]
        for number, handle in enumerate(handles):
            assert handle.to_here().number == number
        assert all(handle.confirmed_by_owner() for handle in handles)
        assert alive(Pending) - before[0] < 10 and rpc.rpc_sync("worker1", alive_values) - before[1] < 10
        assert handles[0]._get_future().wait() is None and handles[0]._get_future().done()
        # A fetch that comes before the value is there, and one that comes after it, by a future and without one.
        late = rpc.remote("worker1", Thing, (7, 0.3))
        assert late.to_here().number == late.rpc_sync().add(0) == late.to_here().number == 7
        # What failed stays failed.
        failed = rpc.remote("worker1", raises)
        for _ in range(2):
            with pytest.raises(ValueError, match="on purpose"):
                failed.to_here()
        del handles, handle, late, failed
        wait_until_empty(range(2))
    rpc.shutdown()


@pytest.mark.parametrize("device", ["shm", "tcp"])
def test_a_reference_to_a_value_that_is_there_holds_no_call_and_no_future(device):
    results(run_group(lean, transport=device))


class Unpicklable:
    def __reduce__(self):
        raise ValueError("does not travel")


class Unreadable:
    def __setstate__(self, state):
        raise ValueError("does not arrive")

    def __getstate__(self):
        return {"some": "state"}


def unpicklable_result(reference):
    return [reference, rpc.RRef(1), Unpicklable()]


def unreadable_result(reference):
    return [Unreadable(), reference, rpc.RRef(1)]


def late_result(reference, seconds):
    time.sleep(seconds)
    return [reference, rpc.RRef(1)]


def fails_on_the_way(rank):
    if rank == 0:
        theirs, mine = rpc.remote("worker1", Thing), rpc.RRef("mine")
        for reference in (theirs, mine):
            for peer in ("worker1", "worker2"):
                with pytest.raises(ValueError, match="does not travel"):
                    rpc.rpc_sync(peer, pair_of, (reference, Unpicklable()))
                with pytest.raises(ValueError, match="does not arrive"):
                    rpc.rpc_sync(peer, pair_of, (Unreadable(), reference))
                with pytest.raises(RuntimeError, match="cannot be sent: ValueError: does not travel"):
                    rpc.rpc_sync(peer, unpicklable_result, (reference,))
                with pytest.raises(ValueError, match="does not arrive"):
                    rpc.rpc_sync(peer, unreadable_result, (reference,))
                with pytest.raises(RuntimeError, match="RPC ran for more than"):
                    rpc.rpc_sync(peer, late_result, (reference, 2.0), timeout=0.1)
        with pytest.raises(rpc.ArenaFull):
            rpc.rpc_sync("worker2", pair_of, (theirs, torch.ones(40_000_000)))
        del theirs, mine, reference
        wait_until_empty(range(3))
    rpc.shutdown()


def test_references_in_messages_that_fail_are_given_back():
    results(run_group(fails_on_the_way, 3, arena_limit=128 << 20))


def test_pickling_asks_nobody():
    results(run_group(pickling, 3))


def pickling(rank):
    if rank == 0:
        theirs = rpc.remote("worker1", Thing)
        theirs.to_here()
        rpc.rpc_sync("worker2", forget)
        mail = agent.current().rrefs.mail
        transmit, mail.transmit = mail.transmit, None  # not one control message may be needed
        future = rpc.rpc_async("worker2", value_of, (theirs,))
        assert agent.current().rrefs.debug_info()["num_pending_children"] == 1
        mail.transmit = transmit
        assert future.wait().number == 0
        del theirs
        wait_until_empty(range(3))
    rpc.shutdown()


# -- waiting for confirmation


holding = threading.Event()
held: list[tuple[int, object]] = []


def unconfirmed(rank):
    """The owner's control messages are held back: calls with references wait, and hold no thread."""
    if rank == 1:
        mail = agent.current().rrefs.mail
        transmit = mail.transmit
        mail.transmit = lambda to, message: held.append((to, message))
        holding.set()
        until_dismissed()
        mail.transmit = transmit
        for item in held:
            transmit(*item)
        rpc.shutdown()
        return len(held)
    if rank == 0:
        eventually(lambda: rpc.rpc_sync("worker1", holds_back))
        theirs = rpc.remote("worker1", Thing, (3,))
        waiting = [rpc.rpc_async("worker2", value_of, (theirs,)) for _ in range(30)]
        created = [rpc.remote("worker2", value_of, (theirs,)) for _ in range(5)]
        for number in range(50):
            assert rpc.rpc_sync("worker2", Thing.double, (number,)) == 2 * number
        assert not any(future.done() for future in waiting)
        assert rpc.rpc_sync("worker2", tables)["num_pending_users"] == 35
        eventually(lambda: rpc.rpc_sync("worker1", holds_some))  # the owner may hear of the forks after worker 2 has answered
        # A reference in a result need not be confirmed.
        assert not rpc.rpc_sync("worker2", make_of, ("worker1",)).confirmed_by_owner()
        dismiss("worker1")
        assert [future.wait().number for future in waiting] == [3] * 30
        assert [reference.to_here().number for reference in created] == [3] * 5
        del theirs, waiting, created
        wait_until_empty(range(3))
    rpc.shutdown()
    return None


def holds_back():
    return holding.is_set()


def holds_some():
    return bool(held)


def make_of(owner):
    return rpc.remote(owner, Thing)


def test_calls_wait_for_confirmation_without_a_thread():
    assert results(run_group(unconfirmed, 3, each={2: {"num_worker_threads": 2}}))[1] > 0


# -- errors and timeouts


ran = 0


def count_slowly(seconds):
    global ran
    time.sleep(seconds)
    ran += 1
    return Thing(ran)


def counted():
    return ran


def expired(rank):
    if rank == 0:
        late = rpc.remote("worker1", count_slowly, (4.0,), timeout=2.0)
        fetched = []
        fetching = threading.Thread(target=lambda: fetched.append(late.to_here()))
        fetching.start()
        with pytest.raises(RuntimeError, match="RPC ran for more than set timeout"):
            late._get_future().wait()
        for use in (late.to_here, late._get_type, lambda: late.rpc_sync().add(1), lambda: late.remote().add(1)):
            with pytest.raises(RuntimeError, match="RRef creation via rpc"):
                use()
        with pytest.raises(RuntimeError, match="RRef creation via rpc"):
            late.rpc_async().add(1).wait()
        with pytest.raises(RuntimeError, match="RRef creation via rpc"):
            rpc.rpc_async("worker1", keep, (late,))
        assert not late.confirmed_by_owner() and "UserRRef" in repr(late)
        fetching.join(30)
        assert fetched[0].number == 1  # it was under way already
        with pytest.raises(RuntimeError, match="RRef creation via rpc"):
            late.to_here()  # for good
        del late, fetching, use
        # Given up, and dropped before it ran: it runs once, and its value is not kept.
        del fetched
        never = rpc.remote("worker1", count_slowly, (1.0,), timeout=0.1)
        time.sleep(0.3)
        del never
        eventually(lambda: rpc.rpc_sync("worker1", counted), 2)
        wait_until_empty(range(2))
        slow_one = rpc.remote("worker1", Thing, (1, 3.0))
        with pytest.raises(RuntimeError, match=r"RPC ran for more than set timeout \(100 ms\)"):
            slow_one.to_here(timeout=0.1)
        with pytest.raises(RuntimeError, match="RPC ran for more than"):
            slow_one._get_type(timeout=0.1)
        with pytest.raises(RuntimeError, match="RPC ran for more than"):
            slow_one._get_type(timeout=0.1, blocking=False).wait()
        with pytest.raises(RuntimeError, match="RPC ran for more than"):
            slow_one.rpc_async(timeout=0.1).add(1).wait()
        assert slow_one._get_type() is Thing and slow_one.to_here().number == 1
        for form in (slow_one.rpc_sync, slow_one.rpc_async, slow_one.remote):
            with pytest.raises(RuntimeError, match="RPC ran for more than"):
                outcome = form(timeout=0.2).sleep(2.5)
                (outcome._get_future() if form == slow_one.remote else outcome).wait()
        outcome = form = None
        del slow_one, outcome, form
        wait_until_empty(range(2))
    rpc.shutdown()
    return ran


def test_fetches_end_at_their_timeout():
    assert results(run_group(expired))[1] == 2


def failed(rank):
    if rank == 0:
        for owner in ("worker1", "worker0"):
            for kind in (ValueError, KeyError):
                bad = rpc.remote(owner, raises, (kind,))
                assert bad._get_future().wait() is None
                with pytest.raises(kind, match="on purpose"):
                    bad.to_here()
                with pytest.raises(kind, match="on purpose"):
                    bad._get_type()
                with pytest.raises(kind, match="on purpose"):
                    bad._get_type(blocking=False).wait()
                with pytest.raises(kind, match="on purpose"):
                    bad.rpc_async().add(1).wait()
                with pytest.raises(kind, match="on purpose"):
                    rpc.rpc_sync("worker2", value_of, (bad,))
                with pytest.raises(kind, match="on purpose"):
                    rpc.rpc_sync(owner, is_own, (bad,))
        del bad
        wait_until_empty(range(3))
    rpc.shutdown()


def test_the_error_of_a_creation_goes_to_whoever_wants_the_value():
    results(run_group(failed, 3))


# -- proxies


def proxies(rank):
    if rank == 0:
        for owner in ("worker1", "worker0"):
            thing = rpc.remote(owner, Thing, (1,))
            assert thing.rpc_async == thing.rpc_async and thing.rpc_sync != thing.rpc_async
            proxy = thing.rpc_sync()
            assert [proxy.add(1), proxy.add(1, times=3), proxy.add(other=0)] == [2, 5, 5]
            assert thing.rpc_async().add(1).wait() == 6
            assert thing.remote().add(1).to_here() == 7
            assert proxy.double(4) == 8 and proxy.name() == "Thing"
            assert thing.rpc_sync().later(0.1) == "later 7"
            assert thing.rpc_async().later(0.1).wait() == "later 7"
            assert thing.remote().later(0.1).to_here() == "later 7"
            assert thing.rpc_sync().itself().to_here().number == 7
            for form in (thing.rpc_sync, thing.remote):
                with pytest.raises(AttributeError, match="has no attribute 'non_exist'"):
                    form().non_exist()
            future = thing.rpc_async().non_exist()
            with pytest.raises(AttributeError, match="has no attribute 'non_exist'"):
                future.wait()
            with pytest.raises(AttributeError, match="__call__"):
                proxy.__call__(1)
            assert not callable(proxy)
            tensor = rpc.remote(owner, torch.ones, (2, 2))
            assert tensor.rpc_sync().size() == torch.Size([2, 2])
            assert torch.equal(tensor.rpc_async().view(1, 4).wait(), torch.ones(1, 4))
            assert tensor.remote().add(1).to_here().sum() == 8
            # Not there yet: rpc_async returns at once, and holds no thread of the owner's.
            late = rpc.remote(owner, Thing, (1, 4.0))
            start = time.monotonic()
            futures = [late.rpc_async().add(1) for _ in range(40)]
            given, unknown = [1], late.rpc_async().non_exist()
            named, later = late.rpc_async().named(given, given), late.rpc_async().later(0.1)
            given.append(2)  # too late for the call
            assert time.monotonic() - start < 3.5
            assert rpc.rpc_sync(owner, Thing.double, (2,)) == 4
            assert sorted(future.wait() for future in futures) == list(range(2, 42))
            assert named.wait() == ([1], [1], 0.0, {}) and later.wait().startswith("later")
            with pytest.raises(AttributeError, match="has no attribute 'non_exist'"):
                unknown.wait()
            first = late._get_type(blocking=False)
            assert first is late._get_type(blocking=False) and first.wait() is Thing is late._get_type()
        del thing, proxy, future, futures, tensor, late, first, form, unknown, named, later
        wait_until_empty(range(2))
    rpc.shutdown()


def test_proxies_call_methods_at_the_owner():
    results(run_group(proxies, num_worker_threads=4))


# -- texts and refusals

SCRIPTED = torch.jit.script(torch.nn.Identity())


def texts(rank):
    if rank == 0:
        own, user = rpc.RRef(1), rpc.remote("worker1", Thing)
        assert str(own) == "OwnerRRef(GloballyUniqueId(created_on=0, local_id=0))"
        assert repr(user) == (
            "UserRRef(RRefId = GloballyUniqueId(created_on=0, local_id=1), ForkId = GloballyUniqueId(created_on=0, local_id=2))"
        )
        rpc.rpc_sync("worker1", keep, (user,))  # one id for the new fork
        user.rpc_sync().add(1)  # and one more, none for the question after the type
        user.to_here()
        assert str(rpc.remote("worker0", Thing)) == "OwnerRRef(GloballyUniqueId(created_on=0, local_id=5))"
        assert str(rpc.RRef(2)) == "OwnerRRef(GloballyUniqueId(created_on=0, local_id=6))"
        with pytest.raises(RuntimeError) as caught:
            user.local_value()
        assert str(caught.value) == (
            "For UserRRef(rref_id=GloballyUniqueId(created_on=0, local_id=1), "
            "fork_id=GloballyUniqueId(created_on=0, local_id=2)), can't call localValue() on user "
            "WorkerInfo(id=0, name=worker0). Call it on owner WorkerInfo(id=1, name=worker1)"
        )
        for reference in (own, user):
            for way in (pickle.dumps, copy.copy, copy.deepcopy, lambda item: torch.save(item, io.BytesIO())):
                with pytest.raises(RuntimeError, match="Can not pickle rref in python pickler, rref can only be pickled"):
                    way(reference)
            assert reference == reference and reference != 1 and {reference: 1}[reference] == 1
            assert reference.owner() == rpc.get_worker_info(reference.owner_name())
        assert rpc.RRef(value=5).to_here() == 5 and rpc.RRef(None).local_value() is None
        assert rpc.RRef[int](3).local_value() == 3
        for value, hint, text in ((1, int, "should only be specified"), (SCRIPTED, None, "must provide its ModuleInterface")):
            with pytest.raises(RuntimeError, match=text):
                rpc.RRef(value, type_hint=hint)
        assert rpc.RRef(SCRIPTED, type_hint=type).local_value() is SCRIPTED
        with pytest.raises(RuntimeError, match="future of its creation"):
            own._get_future()
        assert own._get_type() is int and own._get_type(blocking=False).wait() is int
        # Serialised by hand, for one other worker.
        assert rpc.rpc_sync("worker1", from_data, (own._serialize(),)) == 1
        assert rpc.rpc_sync("worker1", from_data, (user._serialize(),)).number == 1
        assert rpc.rpc_sync("worker2", from_data, (user._serialize(),)).number == 1
        assert rpc.rpc_sync("worker0", from_data, (user._serialize(),)).number == 1
        rpc.rpc_sync("worker1", forget)
        del own, user, reference, caught
        wait_until_empty(range(3))
        cycle = [rpc.remote("worker1", Thing)]
        cycle.append(cycle)  # outlives shutdown
        last = rpc.RRef(1)
        rpc.shutdown()
        with pytest.raises(RuntimeError, match=r"^UserRRef.* has been deleted. Cannot call to_here\(\) on it after deletion."):
            cycle[0].to_here()
        with pytest.raises(RuntimeError, match=r"has been deleted. Cannot call fork an UserRRef after deletion."):
            cycle[0]._serialize()
        for form in (cycle[0].rpc_sync, cycle[0].remote):
            with pytest.raises(RuntimeError, match="has been deleted"):
                form().add(1)
        with pytest.raises(RuntimeError, match="has been deleted"):
            last.local_value()
        assert cycle[0].owner_name() == "worker1" and not cycle[0].is_owner() and "UserRRef" in str(cycle[0])
        return
    rpc.shutdown()


def from_data(data):
    return rpc.RRef._deserialize(data).to_here()


def test_texts_ids_and_refusals():
    results(run_group(texts, 3))


def local_backward(rank):
    if rank == 0:
        leaf = torch.ones(2, requires_grad=True)
        root = rpc.RRef((leaf * 3).sum())
        root.backward(retain_graph=True)
        root.backward()
        assert torch.equal(leaf.grad, torch.full((2,), 6.0))
        with pytest.raises(RuntimeError, match="tensors does not require grad and does not have a grad_fn"):
            rpc.RRef(torch.ones(())).backward()
        with pytest.raises(RuntimeError, match="grad can be implicitly created only for scalar outputs"):
            rpc.RRef(leaf * 2).backward()
        with pytest.raises(RuntimeError, match=r"RRef should contain a tensor for .backward\(\)"):
            rpc.RRef("text").backward()
        with pytest.raises(RuntimeError, match="User RRefs require 'dist_autograd_ctx_id' to be specified"):
            rpc.remote("worker1", torch.ones, (1,)).backward()
        with pytest.raises(RuntimeError, match="Could not find autograd context with id: 0"):
            root.backward(0)
    rpc.shutdown()


def test_backward_without_a_context():
    results(run_group(local_backward))


def debugging(rank):
    if rank == 0:
        info = rpc._rref_context_get_debug_info
        empty = {
            "num_owner_rrefs": 0,
            "num_forks": 0,
            "num_pending_users": 0,
            "num_pending_children": 0,
            "num_pending_futures": 0,
        }
        own = rpc.RRef(1)
        assert info() == empty  # not shared
        for number in (1, 2, 1):
            rpc.rpc_sync(f"worker{number}", keep, (own,))
        assert info() == {**empty, "num_owner_rrefs": 1, "num_forks": 3}
        for number in (1, 2):
            rpc.rpc_sync(f"worker{number}", forget)
        eventually(info, empty)
        assert own.local_value() == 1 and rpc.rpc_sync("worker1", info) == empty
    rpc.shutdown()


def test_debug_info():
    results(run_group(debugging, 3))
