"""A member that says what is not its to say: forged answers, others' references, contexts, gradients, landing places.

``worker0`` and ``worker1`` work with each other; the forgers, one for each forgery after which a link ends, send raw frames by
their own links. What they say has no effect on the other two, is counted, and ends their own link where it can only be malice.
"""

from __future__ import annotations

import struct
import threading
import time

import pytest
import torch
from called import double, identity
from group import results, run_group
from rref_things import Thing, wait_until_empty
from timing import eventually

import rdmarpc as rpc
from rdmarpc import autograd
from rdmarpc.calls import agent
from rdmarpc.gradients import waves
from rdmarpc.links.frames import (
    CONTROL,
    ENDED,
    FLAT,
    FORGO,
    HEAD,
    NO_CONTEXT,
    REFERENCE,
    REFERENCES,
    REMOTE,
    REQUEST,
    RESPONSE,
    request_head,
)
from rdmarpc.message import serialize
from rdmarpc.references.forks import Fork
from rdmarpc.references.handle import fork_of
from rdmarpc.references.mail import ACCEPT, CHILD, DELETE, FORK, GONE

FLOOD = 1 << 18


def send(to, kind, call=0, flags=CONTROL, payload=b"", function=b""):
    """A frame as a forger makes it."""
    link = agent.current().connections.to(to)
    deadline = time.monotonic() + 50
    while not link.try_send(kind, call, flags, parts=(function, payload, b"", b"")):
        assert time.monotonic() < deadline
        time.sleep(0.001)


def say(to, *entries):
    """Words about references, under the numbers that are the forger's turn."""
    mail = agent.current().rrefs.mail
    for entry in entries:
        mail.put(to, *entry)
    mail.flush()


def have(worker, function, *args):
    """Run it there, outside of the context that we may be in."""
    me = agent.current()
    return me.call(me.resolve(worker), function, args, None, 60, control=True)


asked = threading.Event()


def ask():
    asked.set()


def when_asked(value):
    assert asked.wait(60)
    return value


# -- what has no effect, and is counted


def deletes(to, rref, fork):
    say(to, (DELETE, rref, fork))


def ends(to, context):
    send(to, ENDED, context)


def gives_back(to, first):
    send(to, FORGO, payload=struct.pack("<8Q", *range(first, first + 8)))


def confirms_children(to, child):
    say(to, (CHILD, 0, child))


def brings_gradients(context, message):
    """Those of a tensor that worker1 got, to worker0."""
    header = waves._PASS.pack(context, 2, 7, 7, False)
    heads, gradients = waves._pack([(message, (torch.full((3,), 100.0),))])
    return repr(have("worker0", waves.deliver, header + heads, gradients)[0])


# -- what ends the link


def answers(call):
    send(0, RESPONSE, call, FLAT, serialize.dump_flat_one("forged"))


def accepts(fork):
    say(0, (ACCEPT, 0, fork))


def says_gone(rref):
    say(0, (GONE, rref, 0))


def passes_on(number):
    entry = (agent.current().number, 77, number)
    payload = struct.pack("<BIIQQ", serialize.MARK, 1, *entry) + serialize.dumps(((1,), {}))[0]
    send(0, REQUEST, 1 << 40, REFERENCE, payload, serialize.reference(identity))


def creates(rref):
    flags = HEAD | REMOTE | FLAT | REFERENCE
    payload = request_head(0, rref, rref, 0, NO_CONTEXT, 0) + serialize.dump_flat((1,))
    send(0, REQUEST, 1 << 40, flags, payload, serialize.reference(identity))


def floods(_):
    """Deletions of forks that nobody ever made."""
    for first in range(0, FLOOD + 1024, 1024):
        entries = [struct.pack("<BQQ", DELETE, 1, 10**9 + number) for number in range(first, first + 1024)]
        send(0, REFERENCES, payload=b"".join(entries))


def names_strangers(_):
    """Values that workers have created which nobody has heard of."""
    say(0, *((FORK, 1000 + number << 40, agent.current().new_id()) for number in range(1100)))


CUT = {
    "answered a call that was made to another worker": answers,
    "answers for the owner of a reference": accepts,
    "speaks for the creator of a reference": says_gone,
    "passes on a reference under a number that it did not draw": passes_on,
    "creates a value under a number that it did not draw": creates,
    "references that nobody gave it": floods,
    "workers that are not in the group": names_strangers,
}


def refused(name):
    return agent.current().refused()[f"refused_{name}"]


def until_worker0_ends():
    ended = threading.Event()
    agent.current().on_peer_lost(lambda worker, error: worker == "worker0" and ended.set())
    try:
        rpc.rpc_sync("worker0", identity, (1,))
    except rpc.PeerLost:
        ended.set()  # it was faster
    ended.wait(60)
    rpc.shutdown(graceful=False)


def nothing_of_others(rank):
    """Workers 0 and 1 against forger 2. No link ends."""
    if rank:
        return until_worker0_ends()
    forge = "worker2"
    # A reference that worker0 holds, and a child of it that worker1 holds.
    reference = rpc.remote("worker1", Thing, (5,))
    assert reference.to_here().number == 5
    have(forge, deletes, 1, fork_of(reference).rref, fork_of(reference).number)
    eventually(lambda: have("worker1", refused, "references"), 1)
    assert reference.to_here(timeout=5).number == 5
    # A context of worker0 that worker1 takes part in: before, and after it is heard of.
    tensor = torch.ones(3, requires_grad=True)
    with autograd.context() as context_id:
        have(forge, ends, 1, context_id)
        loss = rpc.rpc_sync("worker1", double, (tensor,)).sum()
        for worker in (0, 1):
            have(forge, ends, worker, context_id)
        eventually(lambda: (refused("ends"), have("worker1", refused, "ends")), (1, 2))
        # Gradients of what went to worker1, by one that takes part, and by one that does not.
        (message,) = agent.current().contexts.live[context_id].sent
        assert "did not get from here" in have(forge, brings_gradients, context_id, message)
        assert "went to worker number 1" in rpc.rpc_sync(forge, brings_gradients, (context_id, message))
        assert refused("gradients") == 2
        autograd.backward(context_id, [loss])
        assert autograd.get_gradients(context_id)[tensor].tolist() == [2.0] * 3
    # Landing places that worker1 holds of worker0, and others.
    large = torch.ones(100_000)
    for _ in range(3):
        assert rpc.rpc_sync("worker1", identity, (large,)).shape == large.shape
    held = have("worker1", granted, 0)
    assert held
    have(forge, gives_back, 1, 1)
    eventually(lambda: have("worker1", refused, "grants"), 8)
    assert have("worker1", granted, 0) == held
    assert rpc.rpc_sync("worker1", identity, (large,)).shape == large.shape
    # A child that worker1 holds of a reference of worker0's to a value at worker2, before its owner has confirmed it.
    mine = rpc.remote(forge, Thing, (1,))
    assert mine.to_here().number == 1
    child = agent.current().rrefs.forks.fork(fork_of(mine), 1)
    have(forge, confirms_children, 0, child[2])
    eventually(lambda: refused("references"), 1)
    assert child[2] in agent.current().rrefs.forks.pending_children
    agent.current().rrefs.forks.child_accepted(child[2], 1)
    del reference, mine, loss
    wait_until_empty((0, 1, 2))
    assert not agent.current().links.lost
    counters = agent.current().counters()
    assert counters["refused_gradients"] == 2 and counters["refused_answers"] == 0
    rpc.shutdown(graceful=False)
    return True


def granted(worker):
    me = agent.current()
    return me.callee.promises.count(me.links.by_worker[worker])


@pytest.mark.parametrize("device", ["shm", "tcp"])
def test_what_others_hold_is_theirs(device):
    assert results(run_group(nothing_of_others, 3, transport=device))[0]


def cut(rank):
    """Worker 0 against a forger each. Their links end, and nobody else is disturbed."""
    if rank:
        return until_worker0_ends()
    lost, heard = {}, threading.Semaphore(0)
    agent.current().on_peer_lost(lambda worker, error: (lost.update({worker: str(error)}), heard.release()))
    waiting = rpc.rpc_async("worker1", when_asked, ("honest",))
    (call,) = [pending.call for pending in agent.current().caller.pending.values()]
    mine = rpc.remote("worker1", Thing, (5,))
    # A fork that was passed on, and that worker1, the owner, has not confirmed yet.
    rrefs = agent.current().rrefs
    fork = Fork(rrefs.garbage, 1, fork_of(mine).rref, (1 << 40) + 12345, 0, confirmed=False)
    rrefs.forks.pending_users[fork.number] = fork
    drawn = agent.current().new_id()
    arguments = {answers: call, accepts: fork.number, says_gone: fork_of(mine).rref, passes_on: drawn, creates: drawn}
    for forger, (text, forge) in enumerate(CUT.items(), 2):
        with pytest.raises(rpc.PeerLost, match=f"worker worker{forger} is lost.*{text}"):
            have(f"worker{forger}", forge, arguments.get(forge, 0))
            for _ in range(1000):
                have(f"worker{forger}", identity, 1)
                time.sleep(0.01)
        assert heard.acquire(timeout=30) and text in lost[f"worker{forger}"]
    assert not fork.confirmed
    have("worker1", ask)
    assert waiting.wait() == "honest"
    assert mine.rpc_sync().add(1) == 6
    counts = agent.current().refused()
    assert counts["refused_answers"] == 1 and counts["refused_references"] == len(CUT) - 1, counts
    eventually(lambda: len(rrefs.store.unsettled.early), 0)
    rpc.shutdown(graceful=False)
    return sorted(lost)


@pytest.mark.parametrize("device", ["shm", "tcp"])
def test_a_link_by_which_forgeries_come_ends(device):
    size = 2 + len(CUT)
    lost = results(run_group(cut, size, transport=device, num_worker_threads=4))[0]
    assert lost == [f"worker{forger}" for forger in range(2, size)]
