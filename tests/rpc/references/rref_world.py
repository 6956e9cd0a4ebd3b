"""Workers without processes: the real ``RRefContext`` of each, over a network whose every step is chosen from outside.

All that is under way lies in ``World.network``, and any of it may come next. What the workers do is given as programs, one per
worker: a list of operations on named handles, done in order, each as soon as its handle is there.

    ("create", handle, owner)   ("own", handle)              a value is made, and a first handle to it
    ("send", handle, to, new)   ("result", handle, to, new)  the receiver gets it as ``new``: confirmed first, or at once
    ("unsent", handle, to)                                   as send, but the message never leaves
    ("fetch", handle)           ("drop", handle)
"""

from __future__ import annotations

import struct
import weakref
from functools import partial
from types import SimpleNamespace

from rref_things import unsent, unsettled

from rdmarpc.message import serialize
from rdmarpc.references.context import RRefContext
from rdmarpc.references.store import LOCAL_BITS


class Value:
    """What lives on an owner."""


def table(entries):
    """Forks as they stand in front of a pickle."""
    return struct.pack("<BI", serialize.MARK, len(entries)) + b"".join(struct.pack("<IQQ", *entry) for entry in entries)


class Worker:
    def __init__(self, world, rank, program):
        self.rank, self.program = rank, list(program)
        self.drawn = 0
        self.unanswered = set()
        self.handles = {}
        self.context = RRefContext(
            rank,
            names=lambda rank: f"worker{rank}",
            new_id=self.new_id,
            run=lambda job: job(),
            under_way=lambda rref, worker: rref in self.unanswered and world.owners[rref] == worker,
            knows=lambda worker: True,
        )
        self.context.mail.transmit = lambda to, message: world.transmit(rank, to, message)

    def new_id(self):
        self.drawn += 1
        return self.rank << LOCAL_BITS | self.drawn - 1


class World:
    def __init__(self, programs, *, kills=()):
        """``kills``: who may die, at any moment."""
        self.network = []
        self.workers = [Worker(self, rank, program) for rank, program in enumerate(programs)]
        self.kills = list(kills)
        self.dead = set()
        self.noticed = set()
        self.values = {}
        self.made = set()
        self.runs = {}
        self.resumed = {}
        self.refused = []
        self.owners = {}
        self.fetches = {}

    # -- the network

    def transmit(self, sender, to, message):
        self.network.append(("control", sender, to, message))

    def actions(self):
        """All that may happen next, in a fixed order."""
        found = []
        for index, (_, sender, *_) in enumerate(self.network):
            found.append(("deliver", index))
            if sender in self.dead:
                found.append(("lose", index))
        for worker in self.workers:
            if worker.rank in self.dead:
                continue
            if worker.program and self.enabled(worker, worker.program[0]):
                found.append(("operate", worker.rank))
            probes = worker.context._probes
            if worker.context.garbage or any(rref not in worker.unanswered for _, rref in probes):
                found.append(("collect", worker.rank))
            found.extend(("notice", worker.rank, rank) for rank in self.dead if (worker.rank, rank) not in self.noticed)
        found.extend(("kill", rank) for rank in self.kills)
        return found

    def enabled(self, worker, operation):
        return operation[0] in ("create", "own") or operation[1] in worker.handles

    def skip(self):
        """Nothing is under way any more, and somebody died: leave out one operation a worker, on handles that never came, and
        in the end drop the handles whose end was left out. ``False`` if there was nothing to do."""
        if not self.dead:
            return False
        waiting = [worker for worker in self.workers if worker.program]
        holding = [worker for worker in self.workers if worker.handles and not waiting]
        for worker in waiting:
            worker.program.pop(0)
        for worker in holding:
            worker.handles.clear()
        return bool(waiting or holding)

    def step(self, action):
        kind, *what = action
        if kind == "deliver":
            self.deliver(*self.network.pop(what[0]))
        elif kind == "lose":
            del self.network[what[0]]
        elif kind == "operate":
            worker = self.workers[what[0]]
            self.operate(worker, *worker.program.pop(0))
        elif kind == "collect":
            self.workers[what[0]].context.collect()
        elif kind == "kill":
            self.kill(what[0])
        else:
            self.notice(*what)

    def kill(self, rank):
        self.kills.remove(rank)
        self.dead.add(rank)
        self.workers[rank].program.clear()
        self.workers[rank].handles.clear()
        self.network[:] = [message for message in self.network if message[2] != rank]

    def notice(self, at, rank):
        """A worker learns of a death. Control messages of the dead are not listened to any more; its calls may be queued."""
        self.noticed.add((at, rank))
        worker = self.workers[at]
        self.network[:] = [message for message in self.network if message[:3] != ("control", rank, at)]
        worker.unanswered -= {rref for rref in worker.unanswered if self.owners[rref] == rank}
        for tag in [tag for tag in worker.handles if self.fetches.get(tag) == rank]:
            del worker.handles[tag]
        worker.context.lost(rank, RuntimeError(f"worker{rank} is lost"))

    # -- what workers do

    def operate(self, worker, kind, name, *rest):
        context = worker.context
        if name in worker.handles and worker.handles[name].error is not None and kind != "drop":
            return
        if kind == "create":
            (owner,) = rest
            rref = context._new_id()
            fork = rref if owner == worker.rank else context._new_id()
            self.owners[rref] = owner
            if (worker.rank, owner) not in self.noticed:
                worker.unanswered.add(rref)
            worker.handles[name] = context.forks.created(owner, rref, fork, SimpleNamespace(refused=False, created=False))
            if owner not in self.dead:
                self.network.append(("create", worker.rank, owner, rref, fork))
        elif kind == "own":
            value = Value()
            worker.handles[name] = context.own(value)
            rref = worker.handles[name].rref
            self.owners[rref] = worker.rank
            self.values[rref] = weakref.ref(value)
            self.made.add(rref)
        elif kind == "drop":
            del worker.handles[name]
        elif kind == "fetch":
            fork = worker.handles[name]
            if (worker.rank, fork.owner) in self.noticed:
                return
            tag = f"fetching {name} {len(self.fetches)}"
            worker.handles[tag] = fork  # until the answer comes, however late
            self.fetches[tag] = fork.owner
            if fork.owner not in self.dead:
                self.network.append(("fetch", worker.rank, fork.owner, fork.rref, tag))
        elif kind == "unsent":
            (to,) = rest
            entry = context.forks.fork(worker.handles[name], to)
            context.undo(to, table([entry]))
        else:
            to, new = rest
            entry = context.forks.fork(worker.handles[name], to)
            if to not in self.dead:
                self.network.append(("data", worker.rank, to, table([entry]), new, kind))

    def deliver(self, kind, sender, to, *what):
        worker = self.workers[to]
        context = worker.context
        if kind == "control":
            context.receive(sender, what[0])
        elif kind == "create":
            rref, fork = what
            self.runs[rref] = self.runs.get(rref, 0) + 1
            context.introduce(rref, fork, sender)
            self.network.append(("finish", to, to, rref, sender))
        elif kind == "finish":
            rref, creator = what
            value = Value()
            self.values[rref] = weakref.ref(value)
            self.made.add(rref)
            context.store.fulfil(rref, value)
            del value
            if creator not in self.dead:
                self.network.append(("answer", to, creator, rref))
        elif kind == "answer":
            worker.unanswered.discard(what[0])
        elif kind == "fetch":
            rref, tag = what
            context.future(rref).add_done_callback(partial(self.answer_fetch, to, sender, rref, tag))
        elif kind == "fetched":
            worker.handles.pop(what[0], None)
        else:
            payload, name, how = what
            (fork,) = forks = context.adopt(sender, payload)
            tag = (to, fork.number)
            if how == "result":
                worker.handles[name] = fork
            else:
                self.resumed[tag] = 0
                resume = partial(self.resume, worker, name, forks, tag)
                if not context.hold(forks, resume):
                    resume(None)

    def answer_fetch(self, owner, to, rref, tag, future):
        try:
            assert isinstance(future.value(), Value)
        except RuntimeError:
            assert self.dead, "a fetch fails, and nobody died"
        if to not in self.dead:
            self.network.append(("fetched", owner, to, tag))

    def resume(self, worker, name, forks, tag, error):
        self.resumed[tag] += 1
        if error is None:
            assert forks[0].confirmed
            worker.handles[name] = forks[0]
        else:
            assert self.dead, "an argument is refused, and nobody died"
            self.refused.append(worker.rank)
            worker.program[:] = [operation for operation in worker.program if operation[1] != name]
        forks.clear()

    # -- what must hold

    def check(self):
        """No value is gone to which somebody may still come. (After a death one may have gone before its owner heard of all
        forks, who then get an error: only those of which it had heard count.)"""
        needed = set()
        for worker in self.workers:
            if worker.rank in self.dead:
                continue
            for fork in worker.handles.values():
                heard = fork.confirmed and fork.owner != worker.rank
                if fork.owner not in self.dead and (heard or not self.dead):
                    needed.add(fork.rref)
        if not self.dead:
            for kind, _, _, *what in self.network:
                if kind == "data":
                    needed.update(entry[1] for entry in serialize.enclosed(what[0]))
        for rref in needed & self.made:
            assert self.values[rref]() is not None, f"{rref:x} was deleted early"
        assert all(count == 1 for count in self.runs.values())
        assert all(count <= 1 for count in self.resumed.values())

    def check_end(self):
        """Nothing is left once nobody refers to anything."""
        for worker in self.workers:
            if worker.rank in self.dead:
                continue
            context = worker.context
            assert not worker.program or self.dead, f"worker {worker.rank} waits for ever: {worker.program}"
            assert not worker.handles, worker.handles
            assert (len(context), unsettled(context.store), unsent(context.mail)) == (0, 0, 0), vars(context.store)
            assert not any(context.debug_info().values()), context.debug_info()
        for (rank, fork), count in self.resumed.items():
            assert count == 1 or rank in self.dead, f"fork {fork:x} was never confirmed to worker {rank}"
        for rref in self.made:
            assert self.owners[rref] in self.dead or self.values[rref]() is None, f"{rref:x} is never deleted"

    def key(self):
        """Two worlds with the same key go on alike."""
        return repr([self._key(worker) for worker in self.workers]) + repr(
            (sorted(map(repr, self.network)), self.kills, self.dead, self.noticed, sorted(self.made))
        )

    def _key(self, worker):
        context = worker.context
        owned = {
            rref: (each.known, each.settled, sorted(each.forks.items()), sorted(each.parked.items()))
            for rref, each in sorted(context.store._values.items())
        }
        return (
            owned,
            sorted(context.store.unsettled.early),
            sorted(context.store.unsettled.refused),
            sorted(context.forks.pending_users),
            sorted((child, parent.number) for child, (parent, _) in context.forks.pending_children.items()),
            sorted((name, fork.number, fork.confirmed, fork.error is None) for name, fork in worker.handles.items()),
            sorted(item[:3] for item in context.garbage),
            sorted(context._probes),
            sorted(worker.unanswered),
            len(worker.program),
        )
