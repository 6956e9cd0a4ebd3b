"""Meetings of workers by RPC: everybody's object to everybody (``torch.distributed.rpc.api._all_gather``), and barriers.

The first worker by name leads. The others bring it their objects; when the last has come, it hands all of them out. A meeting
is known by its members and by how often these have met before, so every member has to call in the same order.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

from . import constants
from .base import here
from .internal import taken_apart
from .transport import timeouts

_Key = tuple[tuple[str, ...], int]


class Meeting:
    """With the names that ``AllGatherStates`` of torch has."""

    def __init__(self) -> None:
        self.gathered_objects: dict[str, Any] = {}
        self.proceed_signal = threading.Event()


_held: weakref.WeakKeyDictionary[Any, dict[_Key, Meeting]] = weakref.WeakKeyDictionary()
"""The meetings of each agent that are not over."""
_met: weakref.WeakKeyDictionary[Any, Counter[tuple[str, ...]]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def _meeting(agent: Any, key: _Key) -> Meeting:
    """The meeting of a key. The first that needs it makes it: a member here, or the news of another one."""
    with _lock:
        return _held.setdefault(agent, {}).setdefault(key, Meeting())


def _all_gather(value: Any, worker_names: Iterable[str] | None = None, timeout: float = constants.UNSET_RPC_TIMEOUT) -> Any:
    """``{name: value}`` of all workers, or of ``worker_names`` if there are any: each has to call. ``timeout`` in seconds
    limits the wait for the others and each message; unset: only messages, by the default; 0: nothing. Raises
    ``RuntimeError``."""
    agent = here.current()
    names = tuple(sorted(set(worker_names or ()) or set(agent.worker_names())))
    unset = timeout == constants.UNSET_RPC_TIMEOUT
    limit = agent.rpc_timeout if unset else timeouts.limit(timeout, "the timeout of _all_gather")
    with _lock:
        met = _met.setdefault(agent, Counter())
        met[names] += 1
        key = names, met[names]
    meeting, leader = _meeting(agent, key), names[0]
    try:
        if agent.name == leader:
            _bring(key, agent.name, value)
        else:
            agent.call(agent.resolve(leader), *taken_apart(_bring, (key, agent.name, value), None), limit)
        if not meeting.proceed_signal.wait(None if unset or not limit else limit):
            missing = sorted(set(names) - set(meeting.gathered_objects))
            raise RuntimeError(f"{agent.name} timed out in _all_gather after {limit:.2f} seconds: no sign of {missing}")
        if agent.name == leader:
            _hand_out_all(agent, key, meeting, limit)
        return meeting.gathered_objects
    finally:
        with _lock:
            _held[agent].pop(key, None)


def _hand_out_all(agent: Any, key: _Key, meeting: Meeting, limit: float) -> None:
    sent = {
        name: agent.call_async(agent.resolve(name), *taken_apart(_hand_out, (key, meeting.gathered_objects), None), limit)
        for name in key[0][1:]
    }
    errors: dict[str, Exception] = {}
    for name, future in sent.items():
        try:
            future.wait()
        except Exception as error:
            errors[name] = error
    if errors:
        first = next(iter(errors.values()))
        why = f"Followers {list(errors)} timed out in _all_gather after {limit:.2f} seconds. The first exception is {first}"
        raise RuntimeError(why) from first


def _barrier(worker_names: Iterable[str]) -> None:
    """Wait until all of ``worker_names`` (we are one of them; empty: all workers) have come here."""
    _all_gather(None, worker_names)


def _bring(key: _Key, name: str, value: Any) -> None:
    meeting = _meeting(here.current(), key)
    with _lock:
        meeting.gathered_objects[name] = value
        complete = len(meeting.gathered_objects) == len(key[0])
    if complete:
        meeting.proceed_signal.set()


def _hand_out(key: _Key, objects: dict[str, Any]) -> None:
    meeting = _meeting(here.current(), key)
    meeting.gathered_objects = objects
    meeting.proceed_signal.set()
