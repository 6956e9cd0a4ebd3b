"""The state of this worker, in numbers (``counters``, ``debug_info``) and for people (``explain``).

With ``RDMARPC_DEBUG_SIGNAL=SIGUSR1`` that signal has a running program print ``explain()`` to its stderr, also while all its
threads are stuck: a thread of ours does it, told by the interpreter's handler through a pipe (``signal.set_wakeup_fd``).

Everything is read without a lock, from tables that others change meanwhile: each number was true at some moment of the call.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from types import FrameType

from ..base import here
from ..calls import agent as _agent
from ..calls.agent import Agent
from ..calls.callee import SERVE
from ..calls.pending import Pending
from ..calls.profiled import name_of
from ..links.ring import RING_BYTES, Link

_SHOWN = 20
_PACKAGE = os.path.join(os.path.dirname(sys.modules[__name__.partition(".")[0]].__file__ or ""), "")


def counters() -> dict[str, int]:
    """Totals of this worker since ``init_rpc``: those of its device (``bytes_direct``, ``bytes_staged``, ``posts``, ...),
    ``rpc_messages`` (frames sent), ``rpc_calls`` (calls made), ``rrefs`` (values kept here for references)."""
    return _agent.current().counters()


def debug_info() -> dict[str, int]:
    """The state of this worker, by names as torch has them where it has them.

    ``agent.*``: threads that there may be, are, and idle, ``num_pending_requests`` (calls whose answer has not come),
    ``num_pending_futures`` (those of them that have a future), ``num_running`` (functions that run here for others),
    ``num_queued`` (requests and callbacks that wait for a thread), ``num_relieved`` (how often threads were added
    because all of them waited for other workers), ``num_workers``, ``num_lost``, ``uptime_ms``;
    ``num_owner_rrefs`` and what else is known of references; ``link.NAME.*`` for each connected worker: ``frames``,
    ``requests`` and ``answers`` sent, ``posts`` and ``bytes`` written to its memory, ``grants_held`` (landing places it gave
    us), ``grants_given`` (we gave it), ``ring_used`` of ``ring_bytes`` (sent, and not known to be read yet),
    ``queued`` (bytes of frames that find no room there), ``held`` (requests of that peer that are not begun before it reads its
    answers, or sends their data), ``lent`` (bytes of results that it has still to READ); ``device.*``: see ``counters``.
    """
    agent = _agent.current()
    pool, pending = agent.pool, list(agent.caller.pending.values())
    info = {
        "agent.thread_pool_size": agent.options.num_worker_threads,
        "agent.num_threads": sum(thread.is_alive() for thread in list(pool.threads)),
        "agent.num_idle_threads": len(pool.idle),
        "agent.num_running": len(pool.running),
        "agent.num_queued": len(pool.jobs),
        "agent.num_relieved": pool.relieved,
        "agent.num_pending_requests": len(pending),
        "agent.num_pending_futures": sum(call.future is not None for call in pending),
        "agent.num_workers": len(agent.workers),
        "agent.num_lost": len(agent.links.lost),
        "agent.uptime_ms": round((time.monotonic() - agent.since) * 1000),
        **{f"agent.{name}": count for name, count in agent.refused().items()},
        **agent.rrefs.debug_info(),
    }
    for link in list(agent.links.by_worker.values()):
        info |= {f"link.{link.name}.{key}": value for key, value in _link(agent, link).items()}
    return info | {f"device.{key}": value for key, value in agent.device.counters().items()}


def _link(agent: Agent, link: Link) -> dict[str, int]:
    posts, nbytes = link.channel.totals()
    return {
        "frames": link.sent,
        "requests": link.requests,
        "answers": link.answers,
        "posts": posts,
        "bytes": nbytes,
        "grants_held": len(link.grants),
        "grants_given": agent.callee.promises.count(link),
        "ring_used": link._written - link._credit,
        "ring_bytes": RING_BYTES,
        "queued": link.waiting + link.answering,
        "held": len(link.held),
        "lent": link.lent,
    }


def explain() -> str:
    """Several lines for a program that hangs: the calls that wait longest, the functions that run here and at which line, the
    connections, the process groups. Without RPC, in a process that has such groups, these alone."""
    groups = [line for source in here.explained for line in source()]
    try:
        agent = _agent.current()
    except RuntimeError:
        if not groups:
            raise
        return "\n".join(groups)
    info, now = debug_info(), time.monotonic()
    lines = [
        f"{agent.name} (rank {agent.me.id} of {len(agent.workers)}, process {os.getpid()}): up {now - agent.since:.1f} s, "
        f"device {agent.device.name}, {info['agent.thread_pool_size']} threads, {info['agent.num_idle_threads']} idle"
    ]
    calls = sorted(agent.caller.pending.values(), key=lambda call: -call.age(now))
    lines.append(f"calls without an answer yet: {len(calls)}")
    for call in calls[:_SHOWN]:
        limit = "no limit" if call.deadline is None else f"{call.deadline - now:.1f} s left"
        lines.append(f"  {call.age(now):8.1f} s  {_function(call)} -> {call.link.name}  (call {call.call}, {limit})")
    running = list(_running(agent))
    lines.append(f"functions running here for others: {len(running)}; jobs that wait for a thread: {info['agent.num_queued']}")
    lines.extend(f"  {text}" for text in running)
    for link in list(agent.links.by_worker.values()):
        known = ", ".join(f"{key} {value}" for key, value in _link(agent, link).items())
        lines.append(f"connected to {link.name}: {known}")
    for error in list(agent.links.lost.values()):
        lines.append(f"lost {error.peer}: {error.message}")
    rest = {key: value for key, value in info.items() if "rref" in key or "user" in key or "fork" in key}
    lines.append("references: " + ", ".join(f"{key} {value}" for key, value in rest.items()))
    lines.append("device: " + ", ".join(f"{key} {value}" for key, value in agent.device.counters().items()))
    lines.extend(groups)
    return "\n".join(lines)


def _function(call: Pending) -> str:
    name = call.key[0]
    if isinstance(name, str):
        return name
    return name_of(pickle.loads(name)) if name else "a callable with state of its own"


def _running(agent: Agent) -> Iterator[str]:
    """A line for each function that runs here: the worker that called it, and the line of the user's code where it is."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = sys._current_frames()
    for ident, request in list(agent.callee.running.items()):
        at = list(_places(stacks.get(ident)))
        function = request.function
        title = "a request that is being read" if function is None else name_of(function, request.args)
        place = " > ... > ".join([*at[-1:], *at[:1]][: len(at)])
        yield f"{title} <- {request.link.name}  (call {request.call}, {names.get(ident)}{': ' if at else ''}{place})"


def _places(frame: FrameType | None) -> Iterator[str]:
    """The places in code outside of this package where a thread that serves a request is, the innermost first."""
    while frame is not None and frame.f_code is not SERVE:
        if not frame.f_code.co_filename.startswith(_PACKAGE):
            yield f"{frame.f_code.co_name} ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})"
        frame = frame.f_back


# -- on demand


def listen_to_signal() -> None:
    """Print ``explain()`` to stderr whenever the signal that ``RDMARPC_DEBUG_SIGNAL`` names comes. Once a process, from its
    main thread (a warning elsewhere)."""
    name = os.environ.get("RDMARPC_DEBUG_SIGNAL")
    if not name or _listening:
        return
    wake, woken = os.pipe2(os.O_CLOEXEC)
    try:
        number = signal.Signals[name]
        signal.signal(number, lambda *_: None)
        os.set_blocking(woken, False)
        signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    except (KeyError, ValueError, OSError) as error:
        os.close(wake)
        os.close(woken)
        warnings.warn(f"RDMARPC_DEBUG_SIGNAL={name} is of no use here: {error!r}", stacklevel=2)
        return
    _listening.append(number)
    threading.Thread(target=_print_on, args=(wake, number), name="rdmarpc-debug", daemon=True).start()


_listening: list[int] = []


def _in_child() -> None:
    """The thread that listens is the parent's: signals of a child are not for it."""
    if _listening:
        _listening.clear()
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_in_child)


def _print_on(pipe: int, number: int) -> None:
    while True:
        for came in os.read(pipe, 64):
            if came == number:
                try:
                    text = explain()
                except RuntimeError as error:  # not initialised, or shut down this moment
                    text = str(error)
                except BaseException as error:  # it changes while it is looked at: the next time, perhaps
                    text = f"rdmarpc could not explain: {error!r}"
                print(text, file=sys.stderr, flush=True)
