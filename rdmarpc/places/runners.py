"""The streams of other workers that are run here, and what their callers ask for by call."""

from __future__ import annotations

import weakref

import torch

from ..base import here
from ..calls import agent as _agent
from ..calls.agent import Agent
from ..transport import NotSupported, RdmaError
from .worker import Runner

_runners: weakref.WeakKeyDictionary[Agent, dict[str, Runner]] = weakref.WeakKeyDictionary()


def running(key: str) -> Runner:
    """The stream of another worker that is run here. ``RdmaError`` if it has ended."""
    found = _runners.get(_agent.current(), {}).get(key)
    if found is None or found.stopped:
        raise RdmaError("this stream has ended")
    return found


def open_stream(key: str, caller: str, device: str, reply: bytes, done: bytes, notify: int) -> tuple[bytes, int]:
    """Begin to run a stream of worker ``caller`` on a device: its ring, and the number of the ring's notifications."""
    agent = _agent.current()
    where = torch.device(device)
    if where.type != "cpu" and not _has(where):
        raise NotSupported(f"worker {agent.name} has no device {where}", hint="rdmarpc doctor says what a host can do")
    runner = Runner(agent, caller, where)
    known = _runners.setdefault(agent, {})
    for ended in [each for each, runner in known.items() if runner.stopped]:
        del known[ended]
    known[key] = runner
    agent.before_closing.append(runner.stop)
    try:
        return runner.open(reply, done, notify)
    except BaseException:  # it has no thread that would end it, as where the caller is lost by now
        del known[key]
        agent.before_closing.remove(runner.stop)
        raise


def _has(device: torch.device) -> bool:
    if not torch.accelerator.is_available() or torch.accelerator.current_accelerator() != torch.device(device.type):
        return False
    return (device.index or 0) < torch.accelerator.device_count()


def new_region(key: str, number: int, source: str, nbytes: int) -> tuple[bytes, int]:
    """See ``Runner.region``."""
    return running(key).region(number, source, nbytes)


def reach_region(key: str, number: int, target: str, descriptor: bytes, notify: int) -> None:
    """See ``Runner.reach``."""
    running(key).reach(number, target, descriptor, notify)


def take_large(key: str, question: int) -> bytes:
    """An answer that was too large for its place."""
    return running(key).large.pop(question)


def _explain() -> list[str]:
    agent = here.found()
    return [runner.explain() for runner in list(_runners.get(agent, {}).values()) if not runner.stopped] if agent else []


here.explained.append(_explain)


def counters_here() -> dict[str, int]:
    """The counters of this process."""
    return _agent.current().counters()
