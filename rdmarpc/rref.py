"""Remote references: a value that stays on its owner, and handles to it that travel.

Life: the owner keeps a value while its own handles and any fork of a user exist. A user that sends a handle to a third worker
first has the owner enter the new fork, and waits for that, so a value is never deleted while a handle is under way
(``torch.distributed.rpc`` defers this with more messages; the guarantee is the same). A handle that is sent to the owner needs
no fork: the sender's own stays alive until the call is answered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

from . import agent as _agent
from . import serialize
from .functions import async_execution
from .options import WorkerInfo
from .transport import PeerLost

if TYPE_CHECKING:
    from .agent import Agent
    from .future import Pending

T = TypeVar("T")
_LOCAL_BITS = 48


def _id_text(number: int) -> str:
    return f"GloballyUniqueId(created_on={number >> _LOCAL_BITS}, local_id={number & ((1 << _LOCAL_BITS) - 1)})"


class RRef(Generic[T]):
    """``RRef(value)`` makes a reference to a value of this worker; ``rpc.remote`` one to a value elsewhere."""

    def __init__(self, value: T, type_hint: Any = None) -> None:
        if type_hint is not None:
            raise RuntimeError("type_hint is for TorchScript, which is not supported")
        agent = _agent.require("Current RPC agent is not set! Did you initialize the RPC framework")
        number = agent.new_id()
        self._enter(agent, agent.me, number, number, None)
        agent.rrefs.add(number, number)
        agent.rrefs.fulfil(number, value)

    def _enter(self, agent: Agent, owner: WorkerInfo, rref: int, fork: int, creation: Pending | None) -> None:
        self._agent, self._owner, self._rref, self._fork, self._creation = agent, owner, rref, fork, creation
        self._alive = True
        self._confirmed = creation is None
        agent.handles.add(self)

    @classmethod
    def _of(cls, agent: Agent, owner: WorkerInfo, rref: int, fork: int, creation: Pending | None = None) -> RRef[Any]:
        handle = cls.__new__(cls)
        handle._enter(agent, owner, rref, fork, creation)
        return handle

    def owner(self) -> WorkerInfo:
        return self._owner

    def owner_name(self) -> str:
        return self._owner.name

    def is_owner(self) -> bool:
        return self._owner == self._agent.me

    def confirmed_by_owner(self) -> bool:
        """Whether the owner is known to hold this reference."""
        return self._confirmed or self.is_owner() or (self._creation is not None and self._creation.done)

    def to_here(self, timeout: float = -1.0) -> T:
        """The value: on the owner the object itself, elsewhere a copy fetched now. Waits until it exists."""
        if self.is_owner():
            return self.local_value()
        self._check_alive("call to_here() on it")
        self._check_creation()
        value = self._agent.call(self._owner, _fetch, (self._rref,), None, timeout, control=True)
        self._confirmed = True
        return value

    def local_value(self) -> T:
        """The value on its owner; waits until it exists, raises the error of its creation."""
        if not self.is_owner():
            raise RuntimeError(
                f"For {self._text('rref_id', 'fork_id')}, can't call localValue() on user {self._agent.me}. "
                f"Call it on owner {self._owner}"
            )
        return self._agent.rrefs.slot(self._rref).future.wait()

    def _check_alive(self, what: str) -> None:
        if not self._alive:
            raise RuntimeError(f"{self} has been deleted. Cannot {what} after deletion.")

    def _check_creation(self) -> None:
        creation = self._creation
        if creation is not None and creation.future is not None and creation.future.done():
            try:
                creation.future.value()
            except PeerLost:
                raise
            except Exception as error:
                raise RuntimeError(
                    "RRef creation via rpc.remote() timed out, and it is possible that the RRef on the owner node "
                    "does not exist."
                ) from error

    def _text(self, rref: str, fork: str) -> str:
        return f"UserRRef({rref}={_id_text(self._rref)}, {fork}={_id_text(self._fork)})"

    def __repr__(self) -> str:
        if self.is_owner():
            return f"OwnerRRef({_id_text(self._rref)})"
        return f"UserRRef(RRefId = {_id_text(self._rref)}, ForkId = {_id_text(self._fork)})"

    def __reduce__(self) -> Any:
        raise RuntimeError("Can not pickle rref in python pickler, rref can only be pickled when using RPC")

    def _forget(self) -> None:
        if self._alive:
            self._alive = False
            # Also runs inside the garbage collector: the queue is all that may be touched.
            self._agent.garbage.append((self._owner.id, self._rref, self._fork, self._creation))

    def __del__(self) -> None:
        if hasattr(self, "_alive"):
            self._forget()


def _reduce(handle: RRef[Any]) -> Any:
    agent = handle._agent
    handle._check_alive("call fork an UserRRef")
    handle._check_creation()
    fork = agent.new_id()
    if handle.is_owner():
        agent.rrefs.add(handle._rref, fork)
    else:
        agent.call(handle._owner, _add_fork, (handle._rref, fork), None, -1.0, control=True)
    return _receive, (handle._owner.name, handle._owner.id, handle._rref, fork)


def _receive(name: str, rank: int, rref: int, fork: int) -> RRef[Any]:
    return RRef._of(_agent.current(), WorkerInfo(name, rank), rref, fork)


serialize.register_reducer(RRef, _reduce)


# What other workers call here.


@async_execution
def _fetch(rref: int) -> Any:
    return _agent.current().rrefs.slot(rref).future


def _add_fork(rref: int, fork: int) -> None:
    _agent.current().rrefs.add(rref, fork)


def _drop(rref: int, fork: int) -> None:
    _agent.current().rrefs.drop(rref, fork)
