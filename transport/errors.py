"""The error tree. An error names peer, device and status where they are known, and carries a hint where something can be done.

An error that is kept and raised several times is copied for each raise (``kept``, ``fresh``), because an exception holds all
frames through which it passed.
"""

from __future__ import annotations

from contextlib import suppress
from types import MemberDescriptorType
from typing import Any, TypeVar

E = TypeVar("E", bound=BaseException)
_HEAP_TYPE = 1 << 9
"""The flag of types that are no part of the interpreter (``Py_TPFLAGS_HEAPTYPE``): what class statements make."""


class RdmaError(RuntimeError):
    """Base of everything that can go wrong between two workers.

    ``peer``, ``device`` and ``status`` are also attributes, for programs that react to them.
    """

    def __init__(self, message: str, *, peer: str = "", device: str = "", status: str = "", hint: str = "") -> None:
        where = ", ".join(f"{k}={v}" for k, v in (("peer", peer), ("device", device), ("status", status)) if v)
        text = message + (f" [{where}]" if where else "") + (f"\n  hint: {hint}" if hint else "")
        super().__init__(text)
        self.message = message
        self.peer, self.device, self.status, self.hint = peer, device, status, hint

    @property
    def gone(self) -> bool:
        """Whether ``connect`` has found that the device at that address has ended."""
        return self.status in ("NOBODY", "STALE_ADDRESS")

    @property
    def given_up(self) -> bool:
        """Whether it is the peer that has lost us: this process did not run for long."""
        return self.status == "GIVEN_UP"


class PeerLost(RdmaError):
    """The peer's process ended, its connection broke, or it is not seen running. Every wait for that peer raises this."""


class TransferTimeout(RdmaError):
    """A wait ended before its event happened. The copy may still be under way: see ``Channel.abort``."""


class RegistrationError(RdmaError):
    """Memory could not be allocated in, or registered with, a device."""


class ArenaFull(RegistrationError):
    """The arena's limit, or the system, does not allow this allocation. The text names the limit and the option that raises it,
    or what the system lacks."""


class RemoteAccessError(RdmaError):
    """A descriptor does not give access to those bytes: wrong key, out of range, revoked, or of an earlier life."""


class AuthenticationError(RdmaError):
    """A worker has not proven that it belongs to the job: no secret, key or certificate, or other ones than the peer's."""


class NotSupported(RdmaError):
    """This package, device or host cannot do that. The text says why."""


assign = BaseException.__setattr__
"""Set an attribute of an error, also where its class refuses that, as frozen dataclasses do."""


def remade(kind: type[E], args: tuple[Any, ...], state: dict[str, Any]) -> E:
    """An error with these arguments and attributes. Not by the constructor of its class, which may want other arguments than it
    passed on."""
    base: Any = next(each for each in kind.__mro__ if not each.__flags__ & _HEAP_TYPE)
    made = base.__new__(kind, *args)
    base.__init__(made, *args)
    made.__dict__.update(state)
    return made


def fresh(error: E) -> E:
    """A copy, to raise, of an error that is kept: an exception holds all frames through which it was ever raised."""
    try:
        made = remade(type(error), error.args, error.__dict__)
        for member in [each for base in type(error).__mro__ for each in vars(base).values()]:
            if type(member) is MemberDescriptorType:  # slots, and what Python's own classes hold
                _set_as(made, member, error)
        assign(made, "__cause__", error.__cause__)
    except BaseException:
        return error  # whatever that raises
    return made.with_traceback(error.__traceback__)


def _set_as(made: BaseException, member: MemberDescriptorType, error: BaseException) -> None:
    with suppress(AttributeError, TypeError):  # it has none, or it is only read
        value = member.__get__(error)
        if value is not None:
            member.__set__(made, value)


def kept(error: E) -> E:
    """A copy of an error to keep, and to raise copies of (``fresh``). It holds no frames, even if the error is raised elsewhere
    too."""
    return bare(fresh(error))


def bare(error: E) -> E:
    """The error without the frames that it and its causes have passed."""
    link: BaseException | None = error
    passed: set[int] = set()
    while link is not None and id(link) not in passed:  # a program may have made a circle of causes
        passed.add(id(link))
        link.with_traceback(None)
        if link.__cause__ is not None:
            # It is not shown beside a cause, and what was handled as this was raised has frames, too.
            assign(link, "__context__", None)
        link = link.__cause__ or link.__context__
    return error


def for_others(error: BaseException, me: str) -> BaseException:
    """The error of the worker ``me`` as other workers are told it. If a peer gave this worker up because it did not run, the
    others are told that this worker was lost."""
    if isinstance(error, PeerLost) and error.given_up:
        told = PeerLost(error.message, peer=me, device=error.device, status="SILENT", hint=error.hint)
        told.__cause__ = error
        return told
    return error
