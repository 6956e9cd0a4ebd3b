"""The places of a peer's memory, as the peer announced them on the control stream.

Descriptors are checked here, before anything is posted: a wrong key, range or life is an error of one call.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from ..errors import RemoteAccessError
from ..peers.questions import Questions
from ..region import RemoteRegion
from .control import REGION, SEGMENT, SYNC, Message

Place = tuple[int, int]
"""Address and rkey of remote memory."""


class Places:
    """The announced memory of one channel's peer. Any thread looks places up; the thread that hears the peer enters them."""

    def __init__(self, peer: str, identity: tuple[int, int], questions: Questions, send: Callable[[int, int], None]) -> None:
        """``identity``: the peer's uid and epoch. ``send(kind, number)`` sends a control message."""
        self.peer, self._identity = peer, identity
        self._questions, self._send = questions, send
        self.known: dict[int, tuple[int, int, int, int, bool]] = {}  # number -> (address, bytes, key, rkey, may be written)
        self._foreign: dict[int, weakref.WeakSet[Any]] = {}  # regions that may go, and what was prepared for them
        self._lock = threading.Lock()

    def refusal(self, why: str) -> RemoteAccessError:
        return RemoteAccessError(why, peer=self.peer, device="verbs", status="REM_ACCESS_ERR")

    def resolve(self, remote: RemoteRegion, asking: Any, *, write: bool) -> Place:
        """The place of a remote range. If the peer has not announced its region yet, the call asks for it over ``asking``, our
        end of the channel, and waits. Raises ``RemoteAccessError``."""
        if remote.nbytes == 0:
            return 0, 0
        found = remote.resolved
        if found is not None and found[0] is self and (found[2] or not write):
            return found[1]  # type: ignore[return-value]
        if (remote.owner, remote.epoch) != self._identity:
            raise self.refusal("the descriptor was exported by another device, or in an earlier life of this one")
        entry = self.known.get(remote.region)
        if entry is None:
            # A peer announces a region before it exports a descriptor of it, so a missing announcement is on its way already.
            # Control messages are ordered: it has come when the answer comes.
            number = self._questions.number()
            self._questions.ask(asking, self._send, SYNC, number, lambda: remote.region in self.known)
            entry = self.known.get(remote.region)
        if entry is None:
            raise self.refusal(f"region {remote.region} is not registered (any more)")
        address, nbytes, key, rkey, writable = entry
        if write and not writable:
            raise self.refusal(f"region {remote.region} may only be read")
        if key != remote.key:
            raise self.refusal(f"wrong key for region {remote.region}")
        if remote.offset + remote.nbytes > nbytes:
            raise self.refusal(f"bytes {remote.offset}:{remote.offset + remote.nbytes} of a region of {nbytes} bytes")
        place = address + remote.offset, rkey
        if remote.region not in self._foreign:  # segments stay for the channel's life, so the answer holds as long
            remote.resolved = (self, place, write)  # type: ignore[assignment]
        return place

    def stays(self, remote: RemoteRegion) -> bool:
        """Whether that region stays for the channel's life."""
        return remote.region not in self._foreign

    def use(self, user: Any, remotes: Iterable[RemoteRegion]) -> None:
        """Have ``user`` revoked if one of these regions is withdrawn. Raises ``RemoteAccessError`` if one was meanwhile."""
        with self._lock:
            for remote in remotes:
                if (users := self._foreign.get(remote.region)) is not None:
                    users.add(user)
                elif remote.nbytes and remote.region not in self.known:
                    raise self.refusal(f"region {remote.region} is not registered (any more)")

    def announce(self, message: Message) -> None:
        """The peer has registered a region."""
        writable = message.kind != SEGMENT
        with self._lock:
            self.known[message.number] = (message.address, message.nbytes, message.key, message.rkey, writable)
            if message.kind == REGION:
                self._foreign[message.number] = weakref.WeakSet()
        self._questions.news()

    def withdraw(self, number: int) -> int:
        """Take a withdrawn region out: nothing is posted for it any more. Returns the number of the last post that may still
        touch it."""
        with self._lock:
            self.known.pop(number, None)
            users = list(self._foreign.pop(number, ()))
        why = f"region {number} is not registered (any more)"
        return max((user.revoke(why) for user in users), default=0)
