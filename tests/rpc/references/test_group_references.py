"""References in groups whose members come and go."""

from __future__ import annotations

import gc
import re
import signal
import time
from functools import partial

import pytest
from called import identity
from group import die, results, run_group
from rref_things import Thing, forget, give, is_own, keep, kept, make, pair_of, tables, value_of, wait_until_empty
from timing import eventually

import rdmarpc as rpc
from rdmarpc.calls import agent
from rdmarpc.references.forks import Fork

DEVICES = ["shm", "tcp"]
LIVES = 3
GONE = r"worker {}, which owned it, has left the group"


def share(with_it, third):
    """All ways to share between us, ``with_it`` and ``third``, of values at each of us."""
    mine = rpc.RRef({"who": "me"})
    for owner, other in ((with_it, third), (third, with_it)):
        theirs = rpc.remote(owner, Thing, (5,))
        # user -> owner, as an argument and as a result
        assert rpc.rpc_sync(owner, is_own, (theirs,))
        rpc.rpc_sync(owner, keep, (mine,))
        assert rpc.rpc_sync(owner, give).local_value() is mine.local_value()
        # owner -> user
        assert rpc.rpc_sync(owner, value_of, (mine,)) == {"who": "me"}
        assert rpc.rpc_sync(owner, make, (7,)).to_here() == 7
        # user -> user
        assert rpc.rpc_sync(other, value_of, (theirs,)).number == 5
        rpc.rpc_sync(other, keep, (theirs,))
        assert rpc.rpc_sync(other, give).to_here().number == 5
        nested = rpc.remote(other, pair_of, (theirs, mine))
        assert nested.to_here()[0].rpc_sync().add(1) == 6


def refuses(reference, name):
    """Every use of a reference says that its owner has left."""
    text = GONE.format(name)
    assert reference.owner_name() == name and not reference.is_owner()
    for use in (
        reference.to_here,
        reference._get_type,
        lambda: reference.rpc_sync().add(1),
        lambda: reference.rpc_async().add(1).wait(),
        lambda: reference.remote().add(1),
        lambda: rpc.rpc_sync("worker2", value_of, (reference,)),
        lambda: rpc.remote("worker2", value_of, (reference,)),
        reference._serialize,
    ):
        with pytest.raises(rpc.PeerLost, match=text):
            use()


def found_out(use, text):
    """Try until the end of the owner has been dealt with here: until then a fetch says that it was cut off."""
    deadline = time.monotonic() + 30
    while True:
        assert time.monotonic() < deadline
        try:
            use()
        except rpc.PeerLost as error:
            if re.search(text, str(error)):
                return
        time.sleep(0.01)


def holders():
    """Who keeps forks, for people."""
    forks = [item for item in gc.get_objects() if type(item) is Fork]
    return [[type(by).__name__ + ": " + repr(by)[:200] for by in gc.get_referrers(fork) if by is not forks] for fork in forks]


def rank_changes_hands(meeting, name):
    """One worker after the other has rank 7, and leaves with references everywhere; then one dies."""
    if meeting.rank == 1:
        meeting.hear("first")
        for life in range(LIVES):
            meeting.join(name=name.format(life), rank=7)
            share("worker0", "worker2")
            share("worker2", "worker0")
            kept.append(rpc.remote("worker0", Thing, (life,)))
            kept.append(rpc.remote("worker2", Thing, (life,)))
            kept[-1].to_here()
            meeting.say(f"here{life}")
            meeting.hear(f"shared{life}")
            if life == LIVES - 1:
                die()
            rpc.shutdown(graceful=life != 1)
            forget()
            meeting.say(f"gone{life}")
            meeting.hear(f"empty{life}")
        return
    meeting.join()
    if meeting.rank == 2:
        meeting.say("second")
        meeting.hear("done", timeout=100)  # all lives of the other
        rpc.shutdown()
        return
    meeting.hear("second")
    meeting.say("first")
    old = []
    mail = agent.current().rrefs.mail
    for life in range(LIVES):
        meeting.hear(f"here{life}")
        now = name.format(life)
        share(now, "worker2")
        for reference, before in old:
            refuses(reference, before)
        fresh, passed = rpc.remote(now, Thing, (life,)), rpc.remote(now, Thing, (life,))
        assert fresh.to_here().number == life
        rpc.rpc_sync("worker2", keep, (passed,))
        old.append((fresh, now))
        own = rpc.RRef(life)
        rpc.rpc_sync(now, keep, (own,))
        rpc.rpc_sync("worker2", keep, (own,))
        del own
        number = rpc.get_worker_info(now).number
        assert knows(mail, number)
        meeting.say(f"shared{life}")
        found_out(passed.to_here, rf"worker {now}, which owned it, (has left the group|is lost)")
        if life < LIVES - 1:
            meeting.hear(f"gone{life}")
            found_out(partial(rpc.rpc_sync, "worker2", use_second_to_last), GONE.format(now))
        eventually(partial(knows, mail, number), False)
        # What it held here is given back, though nobody there has let it go.
        forget()
        rpc.rpc_sync("worker2", forget)
        del fresh, passed
        reference = before = None
        held = len(old)
        deadline = time.monotonic() + 30
        while (found := tables())["values"] or found["forks"] > held:
            assert time.monotonic() < deadline, (life, held, found, holders())
            time.sleep(0.02)
        wait_until_empty([2])
        meeting.say(f"empty{life}")
    old.clear()
    wait_until_empty([0, 2])
    meeting.say("done")
    rpc.shutdown()
    return


def knows(mail, number):
    return number in mail._out


def use_second_to_last():
    return kept[-2].to_here()


def one_name(meeting):
    rank_changes_hands(meeting, "seven")


def many_names(meeting):
    rank_changes_hands(meeting, "seven{}")


@pytest.mark.parametrize("scenario", [one_name, many_names])
@pytest.mark.parametrize("device", DEVICES)
def test_a_rank_changes_hands_among_references(device, scenario):
    outcomes = run_group(scenario, 3, dynamic=True, transport=device, timeout=110)
    assert not outcomes[0].error and not outcomes[2].error, outcomes
    assert outcomes[1].exit_code == -signal.SIGKILL


def reaches(name):
    try:
        return rpc.rpc_sync(name, identity, (1,)) == 1
    except rpc.PeerLost:
        return False


def held_back_for_the_old_one(meeting):
    """What was to be said to a worker that has left does not reach the one that took over its name and rank."""
    if meeting.rank == 1:
        meeting.hear("first")
        for life in range(2):
            meeting.join(rank=7, name="seven")
            meeting.say(f"here{life}")
            meeting.hear(f"shared{life}")
            found = tables()
            rpc.shutdown()
            meeting.say(f"gone{life}")
        return found
    meeting.join()
    meeting.say("first")
    meeting.hear("here0")
    mail = agent.current().rrefs.mail
    transmit, held = mail.transmit, []
    mail.transmit = lambda *message: held.append(message)
    reference = rpc.remote("seven", Thing, (1,))
    for _ in range(5):
        assert rpc.rpc_sync("seven", pair_of, (reference, 0))[0].to_here().number == 1
    agent.current().rrefs.collect()
    meeting.say("shared0")
    meeting.hear("gone0", "here1")
    eventually(lambda: reaches("seven"))  # until the end of the old one is heard, calls by this name fail
    mail.transmit = transmit
    for message in held:
        transmit(*message)
    with pytest.raises(rpc.PeerLost, match=GONE.format("seven")):
        reference.to_here()
    assert rpc.rpc_sync("seven", identity, (1,)) == 1
    meeting.say("shared1")
    meeting.hear("gone1")
    rpc.shutdown()
    return len(held)


@pytest.mark.parametrize("device", DEVICES)
def test_messages_for_a_worker_that_left_reach_nobody(device):
    held, found = results(run_group(held_back_for_the_old_one, 2, dynamic=True, transport=device))
    assert held > 3 and not any(found.values()), found


def never_met(meeting):
    """References whose owner left before the worker that has them, or gets them, ever heard of it."""
    if meeting.rank == 1:
        meeting.hear("first")
        meeting.join(name="left", rank=7)
        meeting.say("here")
        meeting.hear("created")
        rpc.shutdown()
        meeting.say("gone")
        return
    if meeting.rank == 2:
        meeting.hear("gone")
    meeting.join()
    if meeting.rank == 2:
        meeting.say("second")
        meeting.hear("done")
        rpc.shutdown()
        return
    meeting.say("first")
    meeting.hear("here")
    reference = rpc.remote("left", Thing, (1,))
    assert reference.to_here().number == 1
    data = [reference._serialize() for _ in range(4)]
    meeting.say("created")
    meeting.hear("gone", "second")
    for use in (fetch_data, owner_of_data):
        with pytest.raises(rpc.PeerLost, match=r"worker number \d+(, which owned it,)? has left the group"):
            rpc.rpc_sync("worker2", use, (data.pop(),))
    with pytest.raises(rpc.PeerLost, match=r"has left the group"):
        rpc.rpc_sync("worker2", pass_data_to, (data.pop(), "worker0"))
    with pytest.raises(rpc.PeerLost, match=GONE.format("left")):
        reference.to_here()
    del reference
    wait_until_empty([0, 2])
    meeting.say("done")
    rpc.shutdown()


def fetch_data(data):
    return rpc.RRef._deserialize(data).to_here()


def owner_of_data(data):
    return rpc.RRef._deserialize(data).owner()


def pass_data_to(data, worker):
    return rpc.rpc_sync(worker, value_of, (rpc.RRef._deserialize(data),))


def test_references_of_a_worker_that_one_never_met():
    results(run_group(never_met, 3, dynamic=True))
