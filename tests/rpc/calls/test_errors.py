"""Errors of remote functions, of what travels, and of limits of time: which exception arrives, with what in it."""

from __future__ import annotations

import dataclasses
import io
import logging
import os
import subprocess
import sys
import threading
import time
from functools import partial

import pytest
import torch
from called import held, let_go, with_frames_left
from group import die, results, run_group
from timing import eventually

import rdmarpc as rpc
from rdmarpc.calls import agent


class Simple(ValueError):
    pass


class Detailed(Exception):
    """Rebuilt from its arguments and attributes."""

    def __init__(self, code, where):
        super().__init__(code, where)
        self.code, self.where = code, where


class Stubborn(Exception):
    """Cannot be rebuilt, neither from its arguments nor from a text."""

    def __init__(self, code, text):
        self.code = code
        super().__init__(text)


class Numbered(Exception):
    """Would take a text for its number."""

    def __init__(self, number):
        self.number, self.lock = number, threading.Lock()
        super().__init__()


class Slotted(Exception):
    """What it carries is not in ``__dict__``."""

    __slots__ = ("code",)

    def __init__(self, text):
        super().__init__(text)
        self.code = 7


class Silent(Exception):
    def __str__(self):
        raise RuntimeError("no text")


class Closed(Exception):
    """Nobody can look at it."""

    @property
    def args(self):
        raise RuntimeError("no arguments")


class Unreadable(Exception):
    """Is pickled, but ends the reader's interpreter if that lets it."""

    def __reduce__(self):
        return sys.exit, (7,)


def raise_it(kind, *args):
    raise kind(*args)


def raise_local():
    class Local(Exception):
        pass

    raise Local("from inside")


def raise_with_cause():
    try:
        {}["key"]
    except KeyError as error:
        raise Simple("outer") from error


def forward(to, function, *args):
    return rpc.rpc_sync(to, function, args)


def identity(value):
    return value


def slow(seconds, value=None):
    time.sleep(seconds)
    return value


def calls(function, *args):
    """The same failing call in all its forms, at a peer and here. (The owner of a reference has the exception itself.)"""
    for to in ("worker1", "worker0"):
        yield lambda to=to: rpc.rpc_sync(to, function, args)
        yield lambda to=to: rpc.rpc_async(to, function, args).wait()
    yield lambda: rpc.remote("worker1", function, args).to_here()


def kinds(rank):
    if rank == 0:
        for call in calls(raise_it, Simple, "first\nsecond"):
            with pytest.raises(Simple, match="first\nsecond") as caught:
                call()
            assert type(caught.value) is Simple and "in raise_it" in str(caught.value) and "\\n" not in str(caught.value)
        with pytest.raises(Simple, match="of its owner"):
            rpc.remote("worker0", raise_it, (Simple, "of its owner")).local_value()
        for call in calls(raise_it, Detailed, 7, {"at": [1]}):
            with pytest.raises(Detailed) as caught:
                call()
            assert (caught.value.code, caught.value.where) == (7, {"at": [1]})
            assert "in raise_it" in str(caught.value.__cause__)
        for call in calls(raise_it, KeyError, "name"):
            with pytest.raises(KeyError, match="name") as caught:
                call()
            assert caught.value.args == ("name",)
        for call in calls(raise_it, FileNotFoundError, 2, "No such file", "somewhere"):
            with pytest.raises(FileNotFoundError) as caught:
                call()
            assert caught.value.errno == 2 and caught.value.filename == "somewhere"
        for call in calls(raise_it, Stubborn, 7, "why"):
            with pytest.raises(RuntimeError, match=r"(?s)Stubborn.*Original exception on remote side was.*why"):
                call()
        for call in calls(raise_it, Numbered, 7):
            with pytest.raises(Numbered) as caught:
                call()
            assert (caught.value.number, caught.value.args) == (7, ()) and not hasattr(caught.value, "lock")
            assert "in raise_it" in str(caught.value.__cause__)
        for call in calls(raise_it, Slotted, "why"):
            with pytest.raises(Slotted, match=r"^why$") as caught:
                call()
            assert caught.value.code == 7 and "in raise_it" in str(caught.value.__cause__)
        for call in calls(raise_local):
            with pytest.raises(RuntimeError, match=r"(?s)Local.*from inside"):
                call()
        for kind, text in ((SystemExit, "SystemExit: 3"), (KeyboardInterrupt, "KeyboardInterrupt: 3")):
            for call in calls(raise_it, kind, 3):
                with pytest.raises(RuntimeError, match=rf"On WorkerInfo\(id=\d, name=worker\d\):\n(RuntimeError: )?{text}"):
                    call()
        for call in calls(raise_it, Silent):
            with pytest.raises(Silent) as caught:
                call()
            assert "in raise_it" in str(caught.value.__cause__)
        for call in calls(raise_it, Closed):
            with pytest.raises(RuntimeError, match=r"Closed \(its attributes cannot be read: RuntimeError\)"):
                call()
        for call in calls(raise_it, Unreadable):
            with pytest.raises(Unreadable) as caught:
                call()
            assert "in raise_it" in str(caught.value.__cause__)
        with pytest.raises(Simple, match=r"(?s)KeyError: 'key'.*direct cause"):
            rpc.rpc_sync("worker1", raise_with_cause)
        with pytest.raises(Simple, match=r"(?s)On WorkerInfo\(id=1, name=worker1\).*On WorkerInfo\(id=0, name=worker0\).*deep"):
            rpc.rpc_sync("worker1", forward, ("worker0", raise_it, Simple, "deep"))
        assert rpc.rpc_sync("worker1", identity, ("alive",)) == "alive"
    rpc.shutdown()


def test_exceptions_keep_their_type_and_what_they_carry():
    results(run_group(kinds))


def told(rank):
    class Broken(io.StringIO):
        def write(self, text):
            raise OSError("no room")

    if rank == 1:
        mine = sys.stderr = io.StringIO()
    if rank == 0:
        eventually(lambda: rpc.rpc_sync("worker1", has_its_own_stderr))
        with pytest.raises(Simple):
            rpc.rpc_sync("worker1", raise_it, (Simple, "written down"))
        rpc.rpc_sync("worker1", break_stderr)
        with pytest.raises(Simple):
            rpc.rpc_sync("worker1", raise_it, (Simple, "nowhere to write"))
    rpc.shutdown()
    sys.stderr = sys.__stderr__
    return mine.getvalue() if rank == 1 else None


def has_its_own_stderr():
    return isinstance(sys.stderr, io.StringIO)


def break_stderr():
    sys.stderr = None


def test_the_callee_writes_the_traceback_to_its_stderr_of_the_moment():
    text = results(run_group(told))[1]
    assert "written down" in text and "in raise_it" in text and "nowhere" not in text


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(logging.Formatter().format(record))


def failing(rank):
    heard = Lines()
    logging.getLogger("rdmarpc").addHandler(heard)
    logging.getLogger("rdmarpc").propagate = False
    if rank == 0:
        for _ in range(150):
            with pytest.raises(Simple):
                rpc.rpc_sync("worker1", raise_it, (Simple, "again"))
        for _ in range(2):
            with pytest.raises(RuntimeError):
                rpc.rpc_sync("worker1", torch.add, (torch.ones(2), torch.ones(3)))
        with pytest.raises(ValueError, match="another kind"):
            rpc.rpc_sync("worker1", raise_it, (ValueError, "another kind"))
        with pytest.raises(Simple, match="the creator"):
            rpc.remote("worker1", raise_it, (Simple, "the creator")).to_here()
        assert rpc.rpc_sync("worker1", rpc.counters)["rpc_failures"] == 154
    rpc.shutdown()
    return heard.lines


@pytest.mark.parametrize("device", ["shm", "tcp"])
def test_one_traceback_of_each_kind_and_then_counts(device):
    caller, callee = results(run_group(failing, transport=device))
    assert caller == []
    traces = [line for line in callee if "Traceback" in line]
    assert len(traces) == 3
    assert "again" in traces[0]
    assert "another worker called, add, failed" in traces[1]  # by its name: it has no frame of Python
    assert "another kind" in traces[2]
    counts = [line for line in callee if line not in traces]
    assert [line.partition(" failed ")[2].split(" times")[0] for line in counts] == ["10", "100"]
    assert all(", raise_it (" in line and "Simple(" in line for line in counts)


def from_deep(count):
    return with_frames_left(count, lambda: rpc.rpc_sync("worker0", identity, ([2],)))


def near_the_limit(rank):
    if rank == 0:
        reference, large = rpc.remote("worker1", identity, ([2],)), torch.ones(1 << 17)
        ways = (
            lambda: rpc.rpc_sync("worker1", identity, ([2],)),
            lambda: [rpc.rpc_sync("worker1", identity, (large,)).sum().item() / (1 << 16)],
            lambda: [rpc.rpc_async("worker1", identity, (2,)).wait()],
            lambda: rpc.remote("worker1", identity, ([2],)).to_here(),
            lambda: rpc.rpc_sync("worker1", identity, (reference,)).to_here(),
            lambda: [reference.rpc_sync().index(2) + 2],
        )
        failed = 0
        for way in ways:
            for count in range(4, 110, 3):
                for call in (partial(with_frames_left, count, way), partial(rpc.rpc_sync, "worker1", from_deep, (count,))):
                    try:
                        assert call() == [2]
                    except RecursionError:
                        failed += 1
                assert way() == [2]
        assert failed
    rpc.shutdown(timeout=60)


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="frames and C code have limits of their own, and one is not seen")
@pytest.mark.parametrize("device", ["shm", "tcp"])
def test_near_the_limit_of_recursion_a_call_fails_by_that_and_takes_nothing_with_it(device):
    """Neither a message that its thread has read for others, nor the worker that sent it."""
    results(run_group(near_the_limit, transport=device))


class Unpicklable:
    def __reduce__(self):
        raise TypeError("not this one")


class BreaksWhenRead:
    def __init__(self, what=None):
        self.what = what

    def __getstate__(self):
        return self.what

    def __setstate__(self, what):
        raise_it(what, "while it was read")


def unpicklable_result():
    return [Unpicklable()]


def breaks_when_read(kind):
    return BreaksWhenRead(kind)


def only_there():
    global Hidden

    class Hidden:
        pass

    Hidden.__qualname__ = "Hidden"
    return Hidden()


def pickling(rank):
    if rank == 0:
        for start in (rpc.rpc_sync, rpc.rpc_async, rpc.remote):
            with pytest.raises(TypeError, match="not this one"):
                start("worker1", identity, (Unpicklable(),))
            with pytest.raises(RuntimeError, match=r"Can not pickle torch.futures.Future"):
                start("worker1", identity, ([torch.futures.Future()],))
        for to in ("worker0", "worker1"):
            with pytest.raises(RuntimeError, match="not this one"):
                rpc.rpc_sync(to, unpicklable_result)
            with pytest.raises(RuntimeError, match="not this one"):
                rpc.rpc_async(to, unpicklable_result).wait()
        for kind in (ValueError, OSError):
            with pytest.raises(kind, match="while it was read"):
                rpc.rpc_sync("worker1", identity, (BreaksWhenRead(kind),))
            for start in (rpc.rpc_sync, lambda *call: rpc.rpc_async(*call).wait(), lambda *call: rpc.remote(*call).to_here()):
                with pytest.raises(kind, match="while it was read"):
                    start("worker1", breaks_when_read, (kind,))
        with pytest.raises(RuntimeError, match="while it was read"):
            rpc.rpc_async("worker1", breaks_when_read, (SystemExit,)).wait()
        unwatched = rpc.rpc_async("worker1", breaks_when_read, (SystemExit,))
        done = threading.Event()
        unwatched.add_done_callback(lambda _: done.set())
        assert done.wait(30)
        with pytest.raises(RuntimeError, match="RPC pickler does not serialize"):
            rpc.rpc_sync("worker1", only_there)
        rref = rpc.remote("worker1", unpicklable_result)
        with pytest.raises(RuntimeError, match="not this one"):
            rref.to_here()
        assert rpc.rpc_sync("worker1", identity, ("alive",)) == "alive"
    rpc.shutdown()


def test_what_cannot_be_pickled_or_read_back_fails_that_call_only():
    results(run_group(pickling))


def limits(rank):
    if rank == 0:
        assert rpc.rpc_sync("worker1", slow, [0.0, "a list of arguments"]) == "a list of arguments"
        assert rpc.rpc_sync("worker1", identity, None, {"value": 3}) == 3
        for to in ("worker0", "worker1"):
            for limit, text in ((0.1, "100 ms"), (-5.0, "RPC ran for more than")):
                with pytest.raises(RuntimeError, match=text):
                    rpc.rpc_sync(to, held, ("limited",), timeout=limit)
                with pytest.raises(RuntimeError, match=text):
                    rpc.rpc_async(to, held, ("limited",), timeout=limit).wait()
            rpc.rpc_sync(to, let_go, ("limited",))
        for wrong in ("1", None, 1j, [1]):
            with pytest.raises(TypeError):
                rpc.rpc_sync("worker1", identity, (1,), timeout=wrong)
        # The default is that of the moment of the call.
        rpc._set_rpc_timeout(30)
        long = rpc.rpc_async("worker1", slow, (0.6, "in time"))
        rpc._set_rpc_timeout(0.1)
        with pytest.raises(RuntimeError, match="RPC ran for more than"):
            rpc.rpc_async("worker1", held, ("default",)).wait()
        rpc.rpc_sync("worker1", let_go, ("default",), timeout=20)
        assert long.wait() == "in time"
        rpc._set_rpc_timeout(0)
        assert rpc.rpc_sync("worker1", slow, (0.2, "no limit")) == "no limit"
        rpc._set_rpc_timeout(20)
        late = [rpc.rpc_async("worker1", held, ("late", n), timeout=0.001) for n in range(10)]
        for future in late:
            with pytest.raises(RuntimeError, match="RPC ran for more than"):
                future.wait()
        rpc.rpc_sync("worker1", let_go, ("late",))
        eventually(lambda: len(agent.current().caller.expired), 0)  # the late answers have come
        assert [rpc.rpc_sync("worker1", identity, (n,)) for n in range(20)] == list(range(20))
    rpc.shutdown()


def test_limits_of_time():
    results(run_group(limits))


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    """Nobody may set an attribute of it, not even ``__traceback__``."""

    number: int = 0
    place: str = ""


def raises_frozen():
    raise Frozen(3, "disk")


@rpc.functions.async_execution
def fails_with_frozen():
    future = torch.futures.Future()
    future.set_exception(Frozen(3, "disk"))
    return future


def frozen_errors(rank):
    if rank == 0:
        for to in ("worker0", "worker1"):
            for function in (raises_frozen, fails_with_frozen):
                for call in (
                    lambda to=to, function=function: rpc.rpc_sync(to, function, timeout=20),
                    lambda to=to, function=function: rpc.rpc_async(to, function, timeout=20).wait(),
                    lambda to=to, function=function: rpc.remote(to, function).to_here(timeout=20),
                ):
                    with pytest.raises(Frozen) as caught:
                        call()
                    assert (caught.value.number, caught.value.place) == (3, "disk")
    rpc.shutdown(timeout=60)


def test_errors_that_refuse_to_be_written_arrive():
    results(run_group(frozen_errors, 2))


def unseen_limit(rank):
    """The thread that looks at the clock does not run, as on a machine that is too busy: an answer after the limit is none."""
    if rank == 0:
        agent.current().caller.timeouts.stop()
        late = rpc.rpc_async("worker1", slow, (0.5, torch.ones(3)), timeout=0.1)
        with pytest.raises(RuntimeError, match="RPC ran for more than"):
            late.wait()
        eventually(lambda: len(agent.current().caller.expired), 0)
        assert rpc.rpc_async("worker1", slow, (0.1, "in time"), timeout=20).wait() == "in time"
    rpc.shutdown()


def test_an_answer_after_the_limit_is_none():
    results(run_group(unseen_limit))


def destinations(rank):
    if rank == 0:
        there = rpc.get_worker_info("worker1")
        for to in ("worker1", 1, True, there, rpc.WorkerInfo("worker1", 5)):
            assert rpc.rpc_sync(to, os.getpid) == rpc.rpc_async(to, os.getpid).wait() != os.getpid()
        assert rpc.get_worker_info(1) == there and rpc.get_worker_info() == rpc.WorkerInfo("worker0", 0)
        for start in (rpc.rpc_sync, rpc.rpc_async, rpc.remote):
            for to in ("nobody", 2, -1, 2**40):
                with pytest.raises(RuntimeError, match="could not find destination"):
                    start(to, os.getpid)
            for to in (1.5, 1.0, None, ("worker1",)):
                with pytest.raises(ValueError, match="Cannot get WorkerInfo"):
                    start(to, os.getpid)
            with pytest.raises(TypeError, match="callable"):
                start("worker1", 3)
    rpc.shutdown()


def test_destinations():
    results(run_group(destinations))


def to_the_dead(rank):
    if rank == 1:
        rpc.rpc_sync("worker0", identity, (1,))
        die()
    deadline = time.monotonic() + 15
    with pytest.raises(rpc.PeerLost, match="worker1"):
        while time.monotonic() < deadline:
            rpc.rpc_sync("worker1", identity, (1,))
    future = rpc.rpc_async("worker1", identity, (1,))  # does not raise
    rref = rpc.remote("worker1", identity, (1,))
    with pytest.raises(rpc.PeerLost, match="worker1"):
        future.wait()
    with pytest.raises(rpc.PeerLost, match="worker1"):
        rref.to_here()
    assert rpc.rpc_sync("worker0", identity, (2,)) == 2
    rpc.shutdown(graceful=False)


def test_a_call_to_a_dead_worker_gives_a_future_that_fails():
    outcomes = run_group(to_the_dead)
    assert not outcomes[0].error, outcomes[0].text


def without_a_group(rank):
    rpc.shutdown()
    uninitialised = (
        lambda: rpc.rpc_sync("worker1", identity),
        lambda: rpc.rpc_async("worker1", identity),
        lambda: rpc.remote("worker1", identity),
        rpc.get_worker_info,
        rpc.shutdown,
        rpc.api._wait_all_workers,
        lambda: rpc.api._barrier(["worker0"]),
    )
    for call in uninitialised:
        with pytest.raises(RuntimeError, match=r"^RPC has not been initialized"):
            call()
    for call in (lambda: rpc.RRef(1), rpc.get_rpc_timeout, lambda: rpc._set_rpc_timeout(1), rpc._get_current_rpc_agent):
        with pytest.raises(RuntimeError, match=r"^Current RPC agent is not set! Did you initialize the RPC framework"):
            call()
    assert not rpc._is_current_rpc_agent_set() and rpc.is_available()


def test_calls_after_shutdown():
    results(run_group(without_a_group, 1))


ENDS_BY_ITSELF = """
import sys, torch, rdmarpc as rpc
rpc.init_rpc("me", rank=0, world_size=1, rpc_backend_options=rpc.RpcBackendOptions(init_method="file://" + sys.argv[1]))
futures = [rpc.rpc_async("me", torch.add, (torch.ones(9), n)) for n in range(50)]
last = torch.futures.collect_all(futures).then(lambda done: None)
if sys.argv[2] == "after shutdown":
    rpc.shutdown()
"""


@pytest.mark.parametrize("when", ["without shutdown", "after shutdown"])
def test_the_interpreter_ends_cleanly(tmp_path, when):
    """Its modules are taken down while threads of ours may run: no signal, no message, no hang."""
    command = [sys.executable, "-c", ENDS_BY_ITSELF, str(tmp_path / "store"), when]
    done = subprocess.run(command, timeout=60, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
