"""The protocol of references: which references keep a value alive, and how no worker has to wait for that.

An *RRef* is a value on its *owner*. A *fork* is one reference to it, held by one worker; forks form a tree, whose root is the
fork of the creator. The worker that makes an RRef or a fork draws its id. The protocol follows Damania et al. ("PyTorch RPC",
MLSys 2023) and the design notes of ``torch.distributed.rpc``; the differences are listed at the end.

Invariants:

G1  The owner is told when a fork dies, exactly once (DELETE), and before that exactly once that it exists: by the call that
    creates the value, by a FORK, or because the owner made the fork itself.
G2  A fork does not die before all its children are confirmed by the owner, or their holders are lost. It is in its holder's
    ``pending_children`` until then. So as long as a fork lives anywhere, or is under way, there is one that the owner knows, or
    the call that creates the value is on its way: the value is never deleted early.
G3  Pickling a reference asks no worker and waits for none. The forks of a message travel in front of its pickle. All of them
    are adopted before anything else of the message is looked at: so no fork is lost if unpickling fails, or if an answer comes
    that no thread waits for any more.
G4  A user's function runs after all forks among its arguments are confirmed. No thread waits for that.
G5  ACCEPT means that the creating call has reached the owner, or that the fork is dead already. A FORK or a fetch that comes
    before it is parked, and the owner PROBEs the creator, which answers GONE when the call was answered, or is not known. If no
    worker was lost the creating call has come by then (G2). So no worker waits for a value that will never exist.
G6  No lock is held while something is sent, a future that somebody has is completed, a value dies or users' code runs. Messages
    are taken on whatever thread reads them, and never queue behind users' functions.

Messages (``references/mail``):

    FORK    child's holder -> owner     a user gave me this fork              answered by ACCEPT or REFUSE
    CHILD   child's holder -> parent    the owner has decided, or I am the owner: you need not keep the parent for me
    DELETE  holder -> owner             this fork died
    PROBE   owner -> creator            tell me when the call that creates this was answered
    GONE    creator -> owner            it was, or never was

    user -> owner (argument, result)    CHILD at once
    owner -> user                       nothing: the owner has entered the fork before it sends it
    user -> user                        FORK, ACCEPT, CHILD

Rights. The worker at the other end of the link by which a message came (``sender``) must be entitled to it:

    a fork in front of a pickle     the worker that drew its number, for one fork only             else the link ends
    FORK                            any worker, for itself; a fork that is known already is REFUSEd
    ACCEPT, REFUSE                  the owner of the fork                                           else the link ends
    CHILD                           the worker that got the child                                  else no effect, counted
    DELETE                          the holder of the fork                                         else no effect, counted
    PROBE                           the callee of the creating call; any other worker hears GONE
    GONE                            the worker that drew the id                                    else the link ends

A wrong CHILD or DELETE does not end the link, because its sender may itself have been deceived by the worker that passed it the
reference. References are no secrets: any member may fetch a value by its number, which can be guessed.

Reordering: a DELETE that overtakes its FORK, or the creating call, is remembered (``store.Unsettled``) and annuls it; a
refused fork is remembered until its DELETE has come. Both tables are empty when nothing is under way, and bounded for each
worker (``MAX_OPEN``): one that fills them does not keep to the protocol, and its link ends. A creating call that its
caller has given up still runs once; if the caller's handle died meanwhile its value is dropped as soon as it is made.

Lost workers: the owner drops all forks that a lost worker held, parents forget the children it got, forks of values it owned
that were not confirmed yet fail with ``PeerLost``, and so does every use of the others.

Differences from torch: a fork may be deleted before it was confirmed; the owner knows the holder of each fork; the value's
creation is confirmed by the answer to the call; PROBE and GONE, without which a lost worker could leave others waiting.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Any

from ..base import streams
from ..base.recursion import ROOM
from ..links.frames import FLAT, NotTheirs, without_head
from ..message import serialize
from .forks import Fork, Forks, Resume
from .mail import ACCEPT, CHILD, DELETE, FORK, GONE, PROBE, REFUSE, Mail, drained
from .store import Job, RRefStore, created_on

MAX_STRANGERS = 1024
"""Workers of which nothing is known here that one worker may name: such as joined since we looked."""


class RRefContext:
    """The references of one worker: the owner's half (``store``), the users' half (``forks``), and their messages to other
    workers (``mail``). Thread-safe, never blocks.

    Workers are known by their numbers (``members.Record``), which are never used twice, even if a worker takes over the rank of
    another. ``names(worker)`` gives a name for texts; ``new_id()`` draws ids; ``run(job)`` runs a job on another thread;
    ``under_way(rref, worker)`` tells whether a call of ours to that worker that creates ``rref`` is unanswered;
    ``knows(worker)`` tells whether a worker is, or was, in the group as far as is known here.
    ``mail.transmit(worker, message)`` carries a message to ``receive`` there.

    A message of a peer about something that it has no right to raises ``NotTheirs``; the caller then ends the peer's link.
    """

    def __init__(
        self,
        me: int,
        *,
        names: Callable[[int], str],
        new_id: Callable[[], int],
        run: Callable[[Job], None],
        under_way: Callable[[int, int], bool],
        knows: Callable[[int], bool],
    ) -> None:
        self._me, self._new_id, self._run, self._under_way, self._knows = me, new_id, run, under_way, knows
        self.names = names
        self._jobs: deque[Job] = deque()
        self.mail = Mail()
        self.store = RRefStore(me, self.mail.put, self._jobs)
        self.forks = Forks(me, names, new_id, self.store, self.mail.put, self._jobs)
        self.garbage = self.forks.garbage
        self._probes: set[tuple[int, int]] = set()
        self._strangers: dict[int, set[int]] = {}
        """For each sender the unknown workers that it named."""
        self._refused = 0
        self._burying = False
        """Whether a job that lets dead values go has still to begin."""
        self.closed = False
        """Whether RPC was shut down. All handles count as deleted then."""

    # -- handles

    def own(self, value: Any) -> Fork:
        """Enter a value of ours, and return a fork of it."""
        number = self._new_id()
        self.store.add(number, value)
        return Fork(self.garbage, self._me, number, number, self._me, confirmed=True)

    # -- messages with forks in them

    def adopt(self, sender: int, payload: bytes) -> list[Fork]:
        """The forks in front of a pickle that came from ``sender``. ``NotTheirs`` if it cannot have made them."""
        entries = list(serialize.enclosed(payload))
        try:
            for owner, _, _ in entries:
                self._meet(sender, owner)
            forks = self.forks.adopt(sender, entries)
        except NotTheirs:
            self._refused += 1
            raise
        self._act()
        return forks

    def claim(self, owner: int, rref: int, number: int, parent: int) -> Fork:
        """See ``Forks.claim``."""
        return self._act(self.forks.claim(owner, rref, number, parent))

    def hold(self, forks: list[Fork], resume: Resume) -> bool:
        """See ``Forks.hold``."""
        return self._act(self.forks.hold(forks, resume))

    def undo(self, to: int, payload: bytes) -> None:
        """Take back the forks in front of a pickle that was not sent to ``to``, if there are any."""
        self.forks.undo(to, serialize.enclosed(payload))
        self._act()

    def take_back(self, to: int, kind: int, flags: int, payload: bytes) -> None:
        """The references in a request or an answer that was not sent to worker ``to``, and the GPU memory that it lends."""
        if not flags & FLAT and payload:
            payload = without_head(kind, flags, payload)
            self.undo(to, payload)
            serialize.undo(to, payload)

    def introduce(self, rref: int, fork: int, creator: int) -> None:
        """Enter the value of a creating call that arrived. Raises ``NotTheirs`` if its caller did not draw the numbers."""
        if created_on(rref) != creator or created_on(fork) != creator:
            self._refused += 1
            raise NotTheirs("it creates a value under a number that it did not draw")
        self.store.introduce(rref, fork, creator)
        self._act()

    def future(self, rref: int) -> Any:
        """The future of a value that lives, or will live, here (``RRefStore.future``)."""
        return self._act(self.store.future(rref))

    def found(self, rref: int) -> Any:
        """See ``RRefStore.found``."""
        return self._act(self.store.found(rref))

    # -- control messages

    def receive(self, sender: int, message: bytes) -> None:
        """Take a control message, on the thread that read it. Raises ``NotTheirs`` if the sender had no right to send it."""
        try:
            for kind, rref, fork in self.mail.open(sender, message):
                self._take(sender, kind, rref, fork)
        except NotTheirs:
            self._refused += 1
            raise
        if self._probes:
            self._answer_probes()
        self._act()

    def _take(self, sender: int, kind: int, rref: int, fork: int) -> None:
        if kind == DELETE:
            self.store.delete(rref, fork, sender)
        elif kind == FORK:
            self._meet(sender, created_on(rref))
            self.store.request(rref, fork, sender)
        elif kind == ACCEPT or kind == REFUSE:
            self.forks.accepted(fork, sender, refused=kind == REFUSE)
        elif kind == CHILD:
            self.forks.child_accepted(fork, sender)
        elif kind == PROBE:
            self._probes.add((sender, rref))
        elif created_on(rref) == sender:
            self.store.gone(rref)
        else:
            raise NotTheirs("it speaks for the creator of a reference, and is not the creator")

    def _meet(self, sender: int, worker: int) -> None:
        """Check a worker that ``sender`` names. Raises ``NotTheirs`` for too many unknown ones: each costs a look at the store,
        and an entry for ever."""
        if self._knows(worker):
            return
        named = self._strangers.setdefault(sender, set())
        named.add(worker)
        if len(named) > MAX_STRANGERS:
            raise NotTheirs(f"it names {len(named)} workers that are not in the group")

    def _answer_probes(self) -> None:
        for owner, rref in list(self._probes):
            if self._under_way(rref, owner):
                continue
            try:
                self._probes.remove((owner, rref))
            except KeyError:
                continue  # another thread answers, too
            self.mail.put(owner, GONE, rref, 0)

    def collect(self) -> None:
        """Tell the owners of the forks that died here. Called from time to time."""
        isinstance(None, ROOM)
        for owner, rref, fork, creation in islice(drained(self.garbage), len(self.garbage)):
            if creation is not None and creation.refused:
                continue  # the owner never knew it
            if owner == self._me:
                self.store.delete(rref, fork, owner)
            else:
                self.mail.put(owner, DELETE, rref, fork)
        if self._probes:
            self._answer_probes()
        self._act()

    def lost(self, worker: int, error: Exception) -> None:
        """A worker was lost, or has left. For good."""
        self._strangers.pop(worker, None)
        self._probes.difference_update([probe for probe in list(self._probes) if probe[0] == worker])
        self.mail.lost(worker)
        self.store.lost(worker)
        self.forks.lost(worker, error)
        self._act()

    def _act(self, found: Any = None) -> Any:
        """Without any lock: what follows from what was entered. Returns ``found``."""
        for job in drained(self._jobs):
            self._run(job)
        if self.store.dead and not self._burying:
            self._burying = True
            self._run(self._bury)
        self.mail.flush()
        return found

    def _bury(self) -> None:
        """Values die here: their finalizers are users' code."""
        self._burying = False  # before we look: what dies from now on has a job of its own
        for owned in drained(self.store.dead):
            if streams.current is not None:
                streams.current.retire(owned)
            del owned

    def close(self, error: Exception) -> None:
        """Let all values go. Nothing can be sent any more."""
        self.store.close(error)
        self.garbage.clear()
        self._run, self._under_way = lambda job: job(), lambda rref, worker: False

    # -- looking

    def __len__(self) -> int:
        """Values that live here."""
        return len(self.store)

    @property
    def refused(self) -> int:
        """Words about references that were not their sender's to say."""
        return self._refused + self.store.refused + self.forks.refused

    def debug_info(self) -> dict[str, int]:
        owners, forks = self.store.counts()
        return {
            "num_owner_rrefs": owners,
            "num_forks": forks,
            "num_pending_users": len(self.forks.pending_users),
            "num_pending_children": len(self.forks.pending_children),
        }
