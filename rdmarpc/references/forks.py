"""The users' half of the protocol of references: the forks that this worker holds, and those it has passed on.

A handle keeps its ``Fork`` alive, and so do the tables below. A fork dies, by Python's reference count, when no handle, no
child that the owner has not confirmed yet, and no fetch refers to it any more. Its end is then put into ``garbage``, and told
to the owner later.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from weakref import ref

from ..base.here import Call
from ..links.frames import NotTheirs
from ..transport import PeerLost, RdmaError
from .mail import CHILD, FORK
from .store import Job, RRefStore, Send, created_on, id_text

Entry = tuple[int, int, int]
"""A fork as it travels: owner's number, id of the reference, id of the fork."""
Garbage = deque[tuple[int, int, int, "Call | Created | None"]]
Resume = Callable[[Exception | None], None]


class Created:
    """What is left of a call that has created a value."""

    done, expired, refused, future = True, False, False, None


CREATED = Created()


class Fork:
    """A fork that this worker holds. The owner holds forks too; its value lives at least as long as they do."""

    __slots__ = ("__weakref__", "confirmed", "creation", "error", "garbage", "number", "owner", "parent", "rref", "waiting")

    def __init__(self, garbage: Garbage, owner: int, rref: int, number: int, parent: int, *, confirmed: bool) -> None:
        self.garbage, self.owner, self.rref, self.number, self.parent = garbage, owner, rref, number, parent
        self.confirmed = confirmed
        """Whether the owner is known to have entered it."""
        self.creation: Call | Created | None = None
        """The call that creates the value, at its creator; ``CREATED`` in its place once the owner has made the value."""
        self.error: Exception | None = None
        """Why the owner will never enter it; ``None``: no such reason is known."""
        self.waiting: list[Held] | None = None

    def __del__(self) -> None:
        # Also runs inside the garbage collector and at the interpreter's end: this queue is all that may be touched.
        self.garbage.append((self.owner, self.rref, self.number, self.creation))


class Held:
    """A call that waits until the forks among its arguments are confirmed."""

    __slots__ = ("error", "left", "resume")

    def __init__(self, left: int, resume: Resume) -> None:
        self.left, self.resume = left, resume
        self.error: Exception | None = None


class Forks:
    """The forks that this worker holds or has passed on. Thread-safe; never blocks, never runs users' code (see ``RRefStore``
    about ``jobs``)."""

    def __init__(
        self, me: int, names: Callable[[int], str], new_id: Callable[[], int], store: RRefStore, send: Send, jobs: deque[Job]
    ) -> None:
        self._me, self._names, self._new_id, self._store, self._send, self._jobs = me, names, new_id, store, send, jobs
        self.garbage: Garbage = deque()
        self.pending_users: dict[int, Fork] = {}
        """Forks that their owners have not confirmed yet. They stay until then even if no handle is left."""
        self.pending_children: dict[int, tuple[Fork, int | None]] = {}
        """By number of the child: the fork of ours that it was made of, and the worker that got the child."""
        self.lost_owners: dict[int, PeerLost] = {}
        """The workers that were lost, and the error that a use of their values raises."""
        self.refused = 0
        """The number of messages about children by workers that do not hold them."""
        self._lock = threading.Lock()

    def created(self, owner: int, rref: int, number: int, creation: Call) -> Fork:
        """A fork of ours for a value that a call of ours creates, elsewhere or here."""
        fork = Fork(self.garbage, owner, rref, number, self._me, confirmed=owner == self._me)
        fork.creation = creation
        creation.fork = ref(fork)
        if creation.created:  # looked at after ``fork`` is there; ``made`` does it the other way round
            fork.creation = CREATED
        return fork

    def made(self, creation: Call) -> None:
        """The owner has made the value of a call: nothing more of the call is needed. There may be very many."""
        creation.created = True
        fork = None if creation.fork is None else creation.fork()
        if fork is not None:
            fork.creation = CREATED

    def fork(self, parent: Fork, to: int | None) -> Entry:
        """Make a child of ``parent`` for a message to ``to``, without asking any worker. The parent is kept until the child is
        confirmed. ``to=None``: for the worker that will ``claim`` it."""
        number = self._new_id()
        if parent.owner == self._me and to is not None:
            self._store.lend(parent.rref, number, to)
        else:
            with self._lock:
                if to not in self.lost_owners and parent.owner not in self.lost_owners:
                    self.pending_children[number] = (parent, to)
        return parent.owner, parent.rref, number

    def undo(self, to: int, entries: Iterable[Entry]) -> None:
        """Take back the forks of a message that was never sent."""
        for owner, rref, number in entries:
            if owner == self._me:
                self._store.delete(rref, number, to)
            else:
                self.child_accepted(number, to)

    def adopt(self, sender: int, entries: Iterable[Entry]) -> list[Fork]:
        """Take the forks that came in a message, even if no handle will be made of them: then they die at once. Raises
        ``NotTheirs``, and takes none, if the sender cannot have made one of them."""
        found = list(entries)
        with self._lock:
            for _, _, number in found:
                if created_on(number) != sender or number in self.pending_users:
                    raise NotTheirs("it passes on a reference under a number that it did not draw, or drew before")
        return [self._adopt(sender, *entry) for entry in found]

    def _adopt(self, sender: int, owner: int, rref: int, number: int) -> Fork:
        if owner == sender:
            return Fork(self.garbage, owner, rref, number, sender, confirmed=True)
        return self.claim(owner, rref, number, sender)

    def claim(self, owner: int, rref: int, number: int, parent: int) -> Fork:
        """A fork that ``parent`` made without its owner."""
        if owner == self._me:
            self._store.take(rref, number)
            self._send(parent, CHILD, rref, number)
            return Fork(self.garbage, owner, rref, number, parent, confirmed=True)
        fork = Fork(self.garbage, owner, rref, number, parent, confirmed=False)
        with self._lock:
            fork.error = self.lost_owners.get(owner)
            if fork.error is None:
                self.pending_users[number] = fork
        if fork.error is None:
            self._send(owner, FORK, rref, number)
        else:
            self._send(parent, CHILD, rref, number)
        return fork

    def hold(self, forks: list[Fork], resume: Resume) -> bool:
        """Have ``resume(error)`` run when all ``forks`` are confirmed, or one never will be; ``False`` if they are already."""
        with self._lock:
            open_ = [fork for fork in forks if not fork.confirmed]
            if not open_:
                return False
            held = Held(0, resume)
            for fork in open_:
                if fork.error is not None:
                    held.error = fork.error
                    continue
                held.left += 1
                fork.waiting = [*(fork.waiting or ()), held]
            if not held.left:
                self._jobs.append(partial(resume, held.error))
        return True

    def accepted(self, number: int, owner: int, *, refused: bool = False) -> None:
        """ACCEPT, REFUSE: the owner has answered a FORK of ours. ``NotTheirs`` if it is not the owner."""
        with self._lock:
            fork = self.pending_users.get(number)
            if fork is None:
                return  # its owner was thought to be lost
            if fork.owner != owner:
                raise NotTheirs("it answers for the owner of a reference, and is not the owner")
            del self.pending_users[number]
            error = None
            if refused:
                error = PeerLost(
                    f"RRef {id_text(fork.rref)}, passed on by worker {self._names(fork.parent)}, has no value any more",
                    peer=self._names(fork.owner),
                    hint="a worker that held the reference was lost before the owner knew of this one",
                )
            self._decide(fork, error)

    def _decide(self, fork: Fork, error: Exception | None) -> None:
        """Enter the owner's decision on a fork: confirmed, or (``error``) refused. Call it with the lock held."""
        fork.confirmed, fork.error = error is None, error
        self._send(fork.parent, CHILD, fork.rref, fork.number)
        for held in fork.waiting or ():
            held.left -= 1
            held.error = held.error or error
            if not held.left:
                self._jobs.append(partial(held.resume, held.error))
        fork.waiting = None

    def child_accepted(self, number: int, holder: int) -> None:
        """CHILD: a child that we passed on needs its parent no longer. Only its holder may say so. If the holder is not known
        here (``RRef._serialize``), any worker that claims the child may."""
        with self._lock:
            found = self.pending_children.get(number)
            if found is not None and found[1] is not None and found[1] != holder:
                self.refused += 1
                return
            self.pending_children.pop(number, None)
        del found

    def lost(self, worker: int, error: Exception) -> None:
        """A worker was lost: parents are no longer kept for the children that it got, and forks of values that it owned will
        not be confirmed any more."""
        with self._lock:
            error = self.lost_owners.setdefault(worker, self._of_owner(worker, error))
            kept = [
                self.pending_children.pop(number)
                for number, (parent, to) in list(self.pending_children.items())
                if worker in (to, parent.owner)
            ]
            for number, fork in list(self.pending_users.items()):
                if fork.owner == worker:
                    del self.pending_users[number]
                    self._decide(fork, error)
        del kept

    def _of_owner(self, worker: int, error: Exception) -> PeerLost:
        """The error of every use of a lost worker's values."""
        name, status = self._names(worker), error.status if isinstance(error, RdmaError) else ""
        text = error.message if isinstance(error, RdmaError) else str(error)
        return PeerLost(f"worker {name}, which owned it, {text.removeprefix(f'worker {name} ')}", peer=name, status=status)
