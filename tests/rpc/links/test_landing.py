"""Where large tensors of calls land: places granted ahead, places asked for, and how all of them are given back."""

from __future__ import annotations

import functools
import io

import pytest
import torch
from called import both, identity, no_result
from group import may_stage, results, run_group
from tensor_kinds import distance
from timing import eventually

import rdmarpc as rpc
from rdmarpc.calls import agent

DEVICES = ["shm", "tcp"]


def counted(*names):
    """Counters here and at worker1."""
    here, there = agent.current().counters(), rpc.rpc_sync("worker1", counters)
    return [here[name] for name in names] + [there[name] for name in names]


def counters():
    return agent.current().counters()


def takes(*values):
    return len(values)


def grants(rank):
    if rank == 0:
        tensor = torch.randn(100_000)
        for _ in range(3):
            rpc.rpc_sync("worker1", identity, (tensor,))
        before = agent.current().counters()
        for _ in range(20):
            assert torch.equal(rpc.rpc_sync("worker1", identity, (tensor,)), tensor)
        after = agent.current().counters()
        assert after["registrations"] == before["registrations"]
        assert after["bytes_staged"] - before["bytes_staged"] == (20 * tensor.nbytes if may_stage() else 0)
        assert after["arena_used"] <= before["arena_used"] + 1_000_000
        # One frame a call: everything else was written to its landing place. No release, no further message.
        assert after["rpc_messages"] - before["rpc_messages"] == 20
        direct = after["bytes_direct"] - before["bytes_direct"]
        assert 20 * tensor.nbytes <= direct <= 20 * (tensor.nbytes + 1024)
    rpc.shutdown()


@pytest.mark.parametrize("device", DEVICES)
def test_from_the_second_call_arguments_and_results_are_written_to_granted_places(device):
    results(run_group(grants, transport=device))


def small_answer(tensor):
    return tensor[:2] + 1


def big_answer(scale):
    return torch.full((60_000,), float(scale))


def uneven_sizes(rank):
    if rank == 0:
        big = torch.ones(60_000)
        for n in range(30):
            if n == 5:
                before, there = agent.current().counters(), rpc.rpc_sync("worker1", usage)
            assert rpc.rpc_sync("worker1", small_answer, (big,)).tolist() == [2, 2]
            assert rpc.rpc_sync("worker1", big_answer, (n,)).sum() == 60_000 * n
        after = agent.current().counters()
        assert after["rpc_messages"] - before["rpc_messages"] == 51  # 25 of each, and the one that asks for the usage
        assert after["arena_used"] <= before["arena_used"] + big.nbytes
        now = rpc.rpc_sync("worker1", usage)
        assert now[0] <= there[0] + big.nbytes and now[1] <= 1
    rpc.shutdown()


def usage():
    return agent.current().counters()["arena_used"], promised()


@pytest.mark.parametrize("device", DEVICES)
def test_large_one_way_small_the_other(device):
    results(run_group(uneven_sizes, transport=device))


def many_signatures(rank):
    if rank == 0:
        for size in range(5000, 5000 + 130 * 64, 64):
            assert rpc.rpc_sync("worker1", identity, (torch.full((size,), size),)).sum() == size * size
        rpc.rpc_sync("worker1", no_result)
        assert rpc.rpc_sync("worker1", promised) <= 65
    rpc.shutdown()


def promised():
    return len(agent.current().callee.promises.landings)


def test_unused_grants_are_given_back():
    results(run_group(many_signatures))


class Scaler:
    def __init__(self, scale):
        self.scale = scale

    def apply(self, tensor):
        return tensor * self.scale

    def half(self, tensor):
        return tensor[: len(tensor) // 2] * self.scale


def on(reference, method, *args):
    return getattr(reference.local_value(), method)(*args)


on._names_callee = 1


def forms(x, y):
    """Calls of every form with large tensors."""
    module = torch.nn.Linear(150, 150)
    scaler = rpc.remote("worker1", Scaler, (2.0,))
    result = rpc.remote("worker1", identity, (y,))
    result._get_future().wait()  # its argument is read there by then
    return {
        "flat": lambda: rpc.rpc_sync("worker1", both, (x, y)),
        "keywords": lambda: rpc.rpc_sync("worker1", both, kwargs={"first": x, "second": y}),
        "nested": lambda: rpc.rpc_sync("worker1", identity, ({"a": [x, {"b": (y, 1)}]},)),
        "builtin": lambda: rpc.rpc_sync("worker1", torch.add, (x, x)),
        "strided": lambda: rpc.rpc_sync("worker1", identity, (x.view(100, 200).t(),)),
        "sharing": lambda: rpc.rpc_sync("worker1", both, (x, x.view(100, 200).t())),
        "bound method": lambda: rpc.rpc_sync("worker1", Scaler(3.0).apply, (x,)),
        "another of its class": lambda: rpc.rpc_sync("worker1", Scaler(4.0).half, (x,)),
        "partial": lambda: rpc.rpc_sync("worker1", functools.partial(both, x), (y,)),
        "module": lambda: rpc.rpc_sync("worker1", module.forward, (x[:15_000].view(100, 150),)),
        "through a reference": lambda: rpc.rpc_sync("worker1", on, (scaler, "apply", x)),
        "another method": lambda: rpc.rpc_sync("worker1", on, (scaler, "half", x)),
        "future": lambda: rpc.rpc_async("worker1", identity, ([x],)).wait(),
        "fetch": lambda: result.to_here(),
        "sparse": lambda: rpc.rpc_sync("worker1", identity, (x.view(100, 200).to_sparse(),)),
        "to itself": lambda: rpc.rpc_sync("worker0", both, (x, y)),
        "array": lambda: rpc.rpc_sync("worker1", identity, (x.numpy(),)),
    }


def steady():
    """What stands still from the second call on."""
    return "rpc_reads", "registrations", *(() if may_stage() else ("bytes_staged",))


def from_the_second_call(rank):
    if rank == 0:
        calls = forms(torch.randn(20_000), torch.randn(30_000))
        for name, call in calls.items():
            call()
            before = counted(*steady())
            for _ in range(3):
                call()
            now = counted(*steady())
            assert now == before, (name, steady(), before, now)
        before = counted(*steady())
        for _ in range(3):  # alternating
            for call in calls.values():
                call()
        assert counted(*steady()) == before
    rpc.shutdown()


@pytest.mark.parametrize("device", DEVICES)
def test_from_the_second_call_of_any_form_nothing_is_read_or_staged(device):
    results(run_group(from_the_second_call, transport=device))


def many_at_once(rank):
    if rank == 0:
        tensors = [torch.full((20_000,), float(n)) for n in range(10)]

        def wave():
            for n, got in enumerate(torch.futures.wait_all([rpc.rpc_async("worker1", identity, (t,)) for t in tensors])):
                assert torch.equal(got, tensors[n])

        def as_before():
            before = counted(*steady())
            for _ in range(5):
                wave()
            return counted(*steady()) == before and rpc.rpc_sync("worker1", promised) == 10

        # Results of the first wave are asked for before the size of any is known; and only when all ten were really on their
        # way at once, which is the scheduler's choice, have ten places been needed.
        eventually(as_before)
    rpc.shutdown()


@pytest.mark.parametrize("device", DEVICES)
def test_ten_calls_in_flight_have_ten_landing_places(device):
    results(run_group(many_at_once, transport=device))


AT_ONCE = 16
there: list[torch.futures.Future] = []


@rpc.functions.async_execution
def together(tensor):
    """Is answered when all of its kind have come."""
    there.append(torch.futures.Future())
    if len(there) == AT_ONCE:
        for answer in there:
            answer.set_result(None)
    return there[-1]


def no_more_room(rank):
    if rank == 0:
        # A quarter of the arena is promised to one signature; another one gets places when it asks again.
        many = [rpc.rpc_async("worker1", together, (torch.ones(1_000_000),)) for _ in range(AT_ONCE)]
        torch.futures.wait_all(many)
        assert rpc.rpc_sync("worker1", promised) == AT_ONCE
        other = torch.ones(2_000_000)
        for function in (sum_of, takes):  # whatever the answer is
            for _ in range(3):
                rpc.rpc_sync("worker1", function, (other,))
            before = counted("rpc_reads")
            rpc.rpc_sync("worker1", function, (other,))
            assert counted("rpc_reads") == before
    rpc.shutdown()


def sum_of(tensor):
    return tensor.sum()


def test_places_promised_to_calls_of_the_past_make_room():
    results(run_group(no_more_room, arena_limit=256 << 20))


def born_registered(rank):
    if rank == 0:
        mine = agent.current().device.empty((200_000,), dtype=torch.float32).fill_(3.0)
        before = counters()["bytes_staged"]
        for _ in range(3):
            assert rpc.rpc_sync("worker1", identity, (mine,)).sum() == 600_000
        assert counters()["bytes_staged"] == before
        got = rpc.rpc_sync("worker1", identity, (mine,))  # landed in the arena: it goes on without a copy
        before = counters()["bytes_staged"]
        assert rpc.rpc_sync("worker1", takes, (got,)) == 1
        assert counters()["bytes_staged"] == before
    rpc.shutdown()


@pytest.mark.parametrize("device", DEVICES)
def test_an_argument_in_the_arena_costs_no_copy_here(device):
    results(run_group(born_registered, transport=device))


def kept_for_others():
    return len(agent.current().callee._sources)


def long_words(size):
    raise ValueError("a" * size)


class Awkward:
    """Uses a pickler of its own while it is pickled, and cannot be made again if it is told so."""

    def __init__(self, tensor, broken):
        self.tensor, self.broken = tensor, broken

    def __getstate__(self):
        file = io.BytesIO()
        torch.save(self.tensor * 2, file)
        return {"saved": file.getvalue(), "tensor": self.tensor, "broken": self.broken}

    def __setstate__(self, state):
        if state["broken"]:
            raise ValueError("cannot be made again")
        self.tensor, self.broken = state["tensor"], False
        self.doubled = torch.load(io.BytesIO(state["saved"]))


def broken_on_arrival(tensor):
    return Awkward(tensor, True)


def given_back(rank):
    if rank == 0:
        big = torch.ones(1_000_000)
        with pytest.raises(rpc.ArenaFull):
            rpc.rpc_sync("worker1", torch.ones, (20_000_000,))
        with pytest.raises(ValueError, match=r"a{150000}"):
            rpc.rpc_sync("worker1", long_words, (150_000,))
        with pytest.raises(ValueError, match="cannot be made again"):
            rpc.rpc_sync("worker1", broken_on_arrival, (big,))
        with pytest.raises(ValueError, match="cannot be made again"):
            rpc.rpc_sync("worker1", identity, ([Awkward(big, True)],))
        for _ in range(2):
            got = rpc.rpc_sync("worker1", identity, ([big, Awkward(big, False), big.view(2, -1)],))
            assert torch.equal(got[1].doubled, got[0] * 2) and got[1].tensor is got[0] and distance(got[0], got[2]) == 0
        rpc.rpc_sync("worker1", no_result)
        eventually(lambda: rpc.rpc_sync("worker1", kept_for_others), 0)
    rpc.shutdown()


def test_what_is_lent_for_reading_comes_back_whatever_happens():
    limits = {0: {"arena_limit": 64 << 20}, 1: {"arena_limit": 1 << 30}}
    results(run_group(given_back, each=limits))
