"""References when workers die, leave, or hold very many: nothing is kept, and everybody learns what is lost."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from contextlib import suppress

import pytest
import torch
from called import slow, with_frames_left
from group import die, dismiss, on_every_device, results, run_group, until_dismissed
from rref_things import Thing, forget, give, is_own, keep, kept, tables, value_of, wait_until_empty
from timing import eventually

import rdmarpc as rpc
from rdmarpc.calls import agent

# -- lost workers


def keeps_some():
    return bool(kept)


def killed_holder(rank):
    if rank == 1:
        mine = rpc.RRef(1)
        rpc.rpc_sync("worker3", keep, (mine,))
        time.sleep(30)
    if rank == 0:
        eventually(lambda: rpc.rpc_sync("worker3", keeps_some))
        orphan = rpc.rpc_sync("worker3", give)  # worker1's value, from worker3
        mine, theirs = rpc.RRef("mine"), rpc.remote("worker2", Thing, (9,))
        for reference in (mine, theirs):
            rpc.rpc_sync("worker1", keep, (reference,))
            rpc.rpc_sync("worker3", keep, (reference,))
        hanging = rpc.remote("worker1", slow, (30,))
        passed = rpc.rpc_async("worker2", value_of, (hanging,))
        rpc.rpc_async("worker1", die)
        with pytest.raises(rpc.PeerLost, match="worker1"):
            orphan.to_here()
        with pytest.raises(rpc.PeerLost, match="worker1"):
            hanging.to_here()
        with pytest.raises(rpc.PeerLost, match="worker1"):
            passed.wait()
        # What the dead one held is given back; the others' references are as good as before.
        assert rpc.rpc_sync("worker3", value_of, (theirs,)).number == 9 and rpc.rpc_sync("worker3", value_of, (mine,)) == "mine"
        rpc.rpc_sync("worker3", forget)
        del mine, theirs, reference, orphan, hanging, passed
        wait_until_empty((0, 2, 3))
        dismiss("worker2", "worker3")
    else:
        until_dismissed()
    rpc.shutdown(graceful=False)
    return "lives"


@pytest.mark.parametrize("device", ["shm", "tcp"])
def test_a_killed_worker_gives_its_references_back(device):
    outcomes = run_group(killed_holder, 4, transport=device)
    assert [outcomes[rank].result for rank in (0, 2, 3)] == ["lives"] * 3, outcomes
    assert outcomes[1].exit_code == -9


def hold_back():
    """Keep what this worker has to say about references to itself."""
    mail = agent.current().rrefs.mail
    held_back.append(mail.transmit)
    mail.transmit = lambda to, message: held_back.append((to, message))


def let_go():
    mail = agent.current().rrefs.mail
    mail.transmit, *held = held_back
    for item in held:
        mail.transmit(*item)


held_back: list = []


def fetch_from(worker):
    """Get a reference that ``worker`` keeps, and keep it."""
    kept.append(rpc.rpc_sync(worker, give))


def pass_to(worker):
    return rpc.rpc_sync(worker, value_of, (kept[-1],))


def use_kept():
    return kept[-1].to_here()


def killed_parent(rank):
    """worker2 passes a reference on and dies. The value is gone when the owner first hears of the new holder."""
    if rank == 0:
        mine = rpc.RRef("mine")
        rpc.rpc_sync("worker2", keep, (mine,))
        del mine
        rpc.rpc_sync("worker3", hold_back)
        rpc.rpc_sync("worker3", fetch_from, ("worker2",))
        assert rpc.rpc_sync("worker3", use_kept) == "mine"
        rpc.rpc_async("worker2", die)
        eventually(lambda: len(agent.current().rrefs), 0)
        with pytest.raises(rpc.PeerLost, match="does not exist"):
            rpc.rpc_sync("worker3", use_kept)
        with pytest.raises(rpc.PeerLost, match=r"passed on by worker worker3, has no value any more(.|\n)*hint"):
            rpc.rpc_sync("worker3", pass_to, ("worker1",))
        rpc.rpc_sync("worker3", let_go)
        eventually(lambda: rpc.rpc_sync("worker3", tables)["num_pending_users"], 0)
        with pytest.raises(rpc.PeerLost, match="passed on by worker worker2, has no value any more"):
            rpc.rpc_sync("worker3", use_kept)
        rpc.rpc_sync("worker3", forget)
        wait_until_empty((0, 1, 3))
        dismiss("worker1", "worker3")
    elif rank == 2:
        time.sleep(30)
    else:
        until_dismissed()
    rpc.shutdown(graceful=False)
    return "lives"


def test_a_reference_whose_giver_died_before_the_owner_knew_is_an_error():
    outcomes = run_group(killed_parent, 4)
    assert [outcomes[rank].result for rank in (0, 1, 3)] == ["lives"] * 3, outcomes


# -- many, and endings


def many(rank):
    if rank == 0:
        memory = torch.ones(1)
        references = [rpc.remote("worker1", torch.add, (memory, number)) for number in range(20_000)]
        assert references[-1].to_here() == 20_000
        assert rpc.rpc_sync("worker1", tables)["values"] == 20_000
        del references
        wait_until_empty(range(2), 30)
        values = [rpc.RRef(number) for number in range(20_000)]
        rpc.rpc_sync("worker1", keep, (values,))
        assert rpc._rref_context_get_debug_info()["num_forks"] == 20_000
        del values
        rpc.rpc_sync("worker1", forget)
        wait_until_empty(range(2), 30)
    rpc.shutdown()


def test_twenty_thousand_references():
    results(run_group(many, timeout=100, rpc_timeout=80))


def collected_anywhere(rank):
    """Handles die in the garbage collector, in threads and callbacks, while calls are made."""
    if rank == 0:
        gc.set_threshold(50)

        def churn(number):
            for _ in range(150):
                cycle = [rpc.remote(f"worker{1 + number % 2}", Thing)]
                cycle.append(cycle)
                rpc.rpc_async("worker1", value_of, (cycle[0],)).then(lambda future, cycle=cycle: future.value().number)

        threads = [threading.Thread(target=churn, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        del threads, thread
        wait_until_empty(range(3), 30)
    rpc.shutdown()


def test_handles_die_anywhere():
    results(run_group(collected_anywhere, 3, timeout=90))


def looked_at_by_the_clock(rank):
    if rank == 0:
        later = rpc.remote("worker1", slow, (2.5,))
        later.to_here()  # long enough to be seen by the thread of timeouts, which sees no other call afterwards
        del later
        eventually(lambda: tables()["forks"], 0)
    rpc.shutdown()


def test_a_fetch_that_took_long_holds_nothing_afterwards():
    results(run_group(looked_at_by_the_clock))


def leaves_with_a_value_in_the_making(rank):
    if rank == 0:
        making = rpc.remote("worker1", Thing, (1, 8.0))
        rpc.rpc_async("worker1", is_own, (making,))
        dismiss("worker1")
        with pytest.raises(rpc.PeerLost, match="worker1"):
            making.to_here()
        rpc.shutdown(graceful=False)
        return
    until_dismissed()
    time.sleep(0.3)
    start = time.monotonic()
    rpc.shutdown(graceful=False)
    assert time.monotonic() - start < 6.0


def test_leaving_while_others_wait_for_a_value():
    results(run_group(leaves_with_a_value_in_the_making))


_AT_EXIT = """
import sys, torch, rdmarpc as rpc
rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=rpc.RpcBackendOptions(init_method="file://" + sys.argv[1]))
kept = [rpc.remote("alone", torch.ones, (2,)), rpc.RRef(1)]
kept[0].to_here()
if sys.argv[2] == "shutdown":
    rpc.shutdown()
kept.append(kept)
print("fine")
"""


@pytest.mark.parametrize("way", ["shutdown", "none"])
def test_handles_may_outlive_everything(tmp_path, way):
    command = [sys.executable, "-c", _AT_EXIT, str(tmp_path / "store"), way]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "fine\n", "")


def uses_one_before_the_loss_is_told(rank):
    if rank == 1:
        until_dismissed()
    kept = rpc.remote("worker1", Thing, (1,))
    used = rpc.remote("worker1", Thing, (2,))
    assert kept.to_here().number == 1 and used.to_here().number == 2
    device, go = agent.current().device, threading.Event()
    channel, tell = agent.current().connections.to(1).channel, device.on_lost
    # Without the limit, a request between the note of the error and the end of posting would wait for the telling for ever.
    device.on_lost = lambda channel: (go.wait(3), tell(channel))
    rpc.rpc_async("worker1", die)
    deadline = time.monotonic() + 30
    while channel.error is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with suppress(rpc.PeerLost):
        used.to_here()
    go.set()
    del used
    # The first reference has its creating call, that its link, and that the error with which the connection ended.
    while tables()["forks"] > 1:
        assert time.monotonic() < deadline + 5, "a reference lives in an error that is kept"
        time.sleep(0.02)
    rpc.shutdown(graceful=False)
    return kept is not None


def test_an_error_that_is_kept_keeps_no_reference():
    for outcomes in on_every_device(uses_one_before_the_loss_is_told, 2).values():
        assert outcomes[0].result is True, outcomes


class OwnArguments(Exception):
    """Its constructor wants other arguments than it passes on."""

    __slots__ = ("slot",)

    def __init__(self, *, code):
        super().__init__(f"code {code}")
        self.code, self.slot = code, code + 1


class Numbered(OSError):
    def __init__(self, code):
        super().__init__(code, "no such thing", "a file")


class Prefixed(Exception):
    """Its constructor takes what it passed on, and makes something else of it."""

    def __init__(self, code):
        super().__init__(f"code {code}")


def raises(number):
    raise (OwnArguments(code=number), Numbered(number), Prefixed(number), UnicodeDecodeError("utf8", b"x", 0, 1, "bad"))[number]


def fetches_what_failed_here(rank):
    def fetched(number):
        reference, told = rpc.remote("worker0", raises, (number,)), []
        for use in (reference.to_here, reference.local_value):
            try:
                use()
            except Exception as error:
                held = [getattr(error, name, None) for name in ("code", "slot", "errno")]
                told.append((type(error).__name__, str(error), held))
        assert told[0] == told[1]
        return told[0]

    found = [fetched(number) for number in range(4)]
    wait_until_empty(range(1), 10)
    rpc.shutdown()
    return found


def test_an_error_of_any_class_is_raised_at_its_owner_and_keeps_no_reference():
    assert run_group(fetches_what_failed_here, 1)[0].result == [
        ("OwnArguments", "code 0", [0, 1, None]),
        ("Numbered", "[Errno 1] no such thing: 'a file'", [None, None, 1]),
        ("Prefixed", "code 2", [None, None, None]),
        ("UnicodeDecodeError", "'utf8' codec can't decode byte 0x78 in position 0: bad", [None, None, None]),
    ]


def dropped_near_the_limit_of_recursion(rank):
    if rank == 0:
        for left in range(3, 90):
            references = [rpc.remote("worker1", Thing, (n,)) for n in range(3)]
            for reference in references:
                reference.to_here()
            del reference
            references.clear()  # the next call tells the owner
            with suppress(RecursionError):
                with_frames_left(left, lambda: rpc.rpc_sync("worker1", abs, (-3,)))
        wait_until_empty(range(2), 10)
    rpc.shutdown()
    return True


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="C code has a limit of its own")
def test_what_is_dropped_near_the_limit_of_recursion_is_told():
    assert [each.result for each in run_group(dropped_near_the_limit_of_recursion, 2)] == [True, True]
