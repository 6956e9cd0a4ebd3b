"""What can be seen of calls: torch's profiler, the timeline, the numbers, and what a hanging program waits for."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from group import Meeting, die, results, run_group
from timing import eventually
from torch.profiler import ProfilerActivity, profile

import rdmarpc as rpc
from rdmarpc.calls import agent
from rdmarpc.links import messages
from rdmarpc.tools import events as trace_events

arrived, may_go = threading.Event(), threading.Event()


def double(x):
    return x + x


def same(x):
    return x


def arrive():
    arrived.set()


def let_go():
    may_go.set()


def hang(x):
    arrived.set()
    assert may_go.wait(20)
    return x


def fail():
    raise ValueError("no")


def nap(seconds):
    time.sleep(seconds)


def via(there, x):
    return rpc.rpc_sync(there, double, (x,))


@rpc.functions.async_execution
def later(x):
    future = torch.futures.Future()
    threading.Timer(0.02, future.set_result, (x,)).start()
    return future


# -- torch.profiler


def profiled(rank):
    with profile(activities=[ProfilerActivity.CPU], experimental_config=rpc.profiling.all_threads()) as seen:
        if rank == 1:
            rpc.rpc_sync("worker0", arrive)
            assert may_go.wait(20)
            eventually(lambda: rpc.debug_info()["agent.num_running"], 0)  # what lets this one go has ended, too
        else:
            assert arrived.wait(20)
            for _ in range(3):
                rpc.rpc_sync("worker1", double, (torch.ones(100),))
            future = rpc.rpc_async("worker1", nap, (0.2,))
            rref = rpc.remote("worker1", double, (torch.ones(2),))
            rref.to_here()
            assert rref.rpc_sync().sum() == 4
            with pytest.raises((AttributeError, pickle.PicklingError)):
                rpc.rpc_sync("worker1", lambda: None)
            with pytest.raises(ValueError, match="no"):
                rpc.rpc_sync("worker1", fail)
            with pytest.raises(ValueError, match="no"):
                rpc.rpc_async("worker1", fail).wait()
            rpc.rpc_sync("worker1", later, (1,))
            future.wait()
            rpc.rpc_sync("worker1", let_go)
    found = defaultdict(list)
    for event in seen.events():
        found[event.name].append((event.time_range.start, event.time_range.end))
    inside = [event.cpu_parent.name for event in seen.events() if event.name == "aten::add" and event.cpu_parent is not None]
    rpc.shutdown()
    return dict(found), inside


def test_profiler_shows_calls_on_both_sides():
    (calling, _), (called, inside) = results(run_group(profiled))
    here, there = f"{__name__}.", "(worker0 -> worker1)"
    assert len(calling[f"rpc_sync#{here}double{there}"]) == 3
    assert len(calling[f"remote#{here}double{there}"]) == 1
    assert len([name for name in calling if name.startswith("to_here#") and name.endswith(there)]) == 1
    assert len(calling[f"rpc_sync#rref.sum{there}"]) == len(called[f"rpc#rref.sum{there}"]) == 1
    [(_, unsent)] = [event for name, events in calling.items() if "<lambda>" in name for event in events]
    [(next_begun, _)] = calling[f"rpc_sync#{here}fail{there}"]
    assert unsent <= next_begun  # it was never sent, and the event of a call that nobody waits for ends as well
    assert len(calling[f"rpc_async#{here}fail{there}"]) == 1
    [(begun, ended)] = calling[f"rpc_async#{here}nap{there}"]
    assert ended - begun > 190_000  # until the answer, not until it was sent
    for name, times in (("double", 4), ("nap", 1), ("fail", 2), ("later", 1), ("let_go", 1)):
        assert len(called[f"rpc#{here}{name}{there}"]) == times, name
    assert inside.count(f"rpc#{here}double{there}") == 4  # what a function does is inside of its event
    [(begun, ended)] = called[f"rpc#{here}nap{there}"]
    assert ended - begun > 190_000


def profiled_in_one_thread(rank):
    found = {}
    if rank == 0:
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            rpc.rpc_sync("worker1", double, (torch.ones(100),))
            rpc.rpc_async("worker1", nap, (0.1,)).wait()
        found = {event.name: event.time_range.elapsed_us() for event in seen.events()}
        rpc.rpc_sync("worker1", double, (torch.ones(100),))  # after the end: as ever
    rpc.shutdown()
    return found


def test_a_profiler_of_one_thread_shows_its_calls():
    found = results(run_group(profiled_in_one_thread))[0]
    assert f"rpc_sync#{__name__}.double(worker0 -> worker1)" in found
    assert found[f"rpc_async#{__name__}.nap(worker0 -> worker1)"] > 90_000


# -- the timeline


def check_format(trace):
    """By the specification of the trace event format: what each phase needs, and that what belongs together is there."""
    open_spans, arrows, threads = set(), defaultdict(list), set()
    for event in trace["traceEvents"]:
        assert type(event["pid"]) is int and type(event["tid"]) is int and type(event["name"]) is str, event
        phase = event["ph"]
        if phase == "M":
            if event["name"] == "thread_name":
                threads.add((event["pid"], event["tid"]))
            continue
        assert event["ts"] > 0 and event["cat"], event
        if phase == "X":
            assert event["dur"] >= 0 and (event["pid"], event["tid"]) in threads, event
        elif phase in "be":
            key = (event["cat"], event["id"], event["name"])
            assert (key in open_spans) == (phase == "e"), event
            open_spans ^= {key}
        else:
            assert phase in "sf", event
            arrows[event["id"]].append(event)
    assert not open_spans
    return arrows


def check_nesting(trace):
    """Spans of one thread contain each other or do not touch."""
    tracks = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            begin = round(event["ts"] * 1000)
            tracks[event["pid"], event["tid"]].append((begin, begin + round(event["dur"] * 1000), event["name"]))
    for spans in tracks.values():
        inside = []
        for begin, end, name in sorted(spans, key=lambda span: (span[0], -span[1])):
            while inside and inside[-1][1] <= begin:
                inside.pop()
            assert not inside or end <= inside[-1][1], (name, inside[-1])
            inside.append((begin, end))


def spans(trace, category):
    return [event for event in trace["traceEvents"] if event["ph"] == "X" and event["cat"] == category]


CALLS, THREADS = 250, 4


def many_calls(rank):
    def some(number):
        for at in range(CALLS):
            x = torch.full((30_000,), float(at))
            if number % 2:
                assert rpc.rpc_async("worker1", double, (x,)).wait()[0] == 2 * at
            else:
                assert rpc.rpc_sync("worker1", via, ("worker2", x))[0] == 2 * at

    if rank == 0:
        threads = [threading.Thread(target=some, args=(number,), name=f"caller {number}") for number in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        rpc.rpc_sync("worker1", later, (torch.ones(5),))
        for _ in range(3):
            rpc.rpc_sync("worker2", same, (torch.ones(25_000),))
        with pytest.raises(ValueError, match="no"):
            rpc.rpc_sync("worker2", fail)
        rpc.remote("worker2", double, (torch.ones(5),)).to_here()
    rpc.shutdown()


def held_while_served(rank):
    """A request whose arguments have to be READ is held; here it has been served before the thread that held it goes on."""
    if rank == 1:
        hold = messages.hold

        def slowly(*args):
            hold(*args)
            time.sleep(0.05)

        messages.hold = slowly
    if rank == 0:
        for at in range(5):
            assert rpc.rpc_sync("worker1", double, (torch.full((1000 * (at + 30),), 1.0),))[0] == 2
    rpc.shutdown()


def test_a_timeline_holds_what_was_served_before_its_holder_went_on(tmp_path):
    results(run_group(held_while_served, 2, timeline=str(tmp_path), transport="tcp"))
    trace = json.loads((tmp_path / "timeline.json").read_text())
    served = [event["name"] for event in spans(trace, "serve")]
    assert served.count(f"{__name__}.double <- worker0") == 5 and not any(name.startswith("?") for name in served), served


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_timeline_of_a_run_holds_every_call(tmp_path, transport):
    results(run_group(many_calls, 3, timeline=str(tmp_path), transport=transport))
    assert os.listdir(tmp_path) == ["timeline.json"]
    trace = json.loads((tmp_path / "timeline.json").read_text())
    assert sorted(worker["name"] for worker in trace["otherData"]["workers"]) == ["worker0", "worker1", "worker2"]
    assert not any(worker["dropped"] for worker in trace["otherData"]["workers"])
    arrows = check_format(trace)
    check_nesting(trace)

    half = CALLS * THREADS // 2
    blocking = [event for event in spans(trace, "rpc_sync") if event["pid"] == 0]
    assert len([event for event in blocking if event["name"] == f"rpc_sync {__name__}.via -> worker1"]) == half
    served = spans(trace, "serve")
    assert len([event for event in served if event["name"] == f"{__name__}.double <- worker0" and event["pid"] == 1]) == half
    assert len([event for event in served if event["name"] == f"{__name__}.double <- worker1" and event["pid"] == 2]) == half
    apart = [event for event in trace["traceEvents"] if event["ph"] == "b" and event["cat"] == "rpc_async"]
    assert len(apart) == half and len(spans(trace, "run")) == len(served)
    [failed] = [event for event in blocking if event["name"] == f"rpc_sync {__name__}.fail -> worker2"]
    assert failed["args"]["error"] == "ValueError"
    assert len([event for event in trace["traceEvents"] if event["ph"] == "b" and event["cat"] == "remote"]) == 1
    assert len(spans(trace, "to_here")) == 1
    titles = [event["name"] for event in trace["traceEvents"] if event["ph"] == "b"]
    assert titles.count(f"deferred {__name__}.later") == 1

    # An arrow from each request to the span that served it, and from each answer back: forward in time, both ends inside of
    # a span of the right worker.
    starts = {(event["pid"], event["tid"], round(event["ts"] * 1000)) for event in trace["traceEvents"] if event["ph"] == "X"}
    user_calls = [*blocking, *[event for event in apart if event["pid"] == 0]]
    for event in user_calls:
        for what in ("request", "answer"):
            begin, end = sorted(arrows[f"{what} {event['args']['call']}"], key=lambda end: end["ph"] == "f")
            assert (begin["ph"], end["ph"], end["bp"]) == ("s", "f", "e") and begin["ts"] <= end["ts"]
            assert (begin["pid"] == 0) == (what == "request") and (end["pid"] == 0) == (what == "answer")
            for tip in (begin, end):
                assert (tip["pid"], tip["tid"], round(tip["ts"] * 1000) - 1) in starts

    # How the bytes went: 12,000 a call, read by the callee the first time, written to a granted place from then on.
    sent = [event["args"]["sent"] for event in user_calls if f"{__name__}.via" in event["name"]]
    assert all(item["direct"] + item["read"] == 120_000 and item["inline"] == 0 and item["tensors"] == 1 for item in sent)
    assert sum(item["direct"] == 120_000 for item in sent) > half * 0.8
    served_same = {event["args"]["call"] for event in served if event["name"] == f"{__name__}.same <- worker0"}
    returned = [event["args"]["sent"] for event in spans(trace, "reply") if event["args"]["call"] in served_same]
    assert [sent["handed"] + sent["direct"] + sent["read"] for sent in returned] == [100_000] * 3
    assert transport != "shm" or returned[-1]["handed"] == 100_000
    answered = [event["args"]["sent"] for event in spans(trace, "reply")]
    assert len([sent for sent in answered if sent.get("tensors") == 1 and sent["inline"] == 20]) == 2  # ``later``, ``to_here``
    names = {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"}
    assert {"MainThread", "caller 0", "caller 1", "caller 2", "caller 3"} <= names


def stop_when_a_request_comes(rank):
    line = agent.current().timeline
    if rank == 1:
        note = line.note

        def stops(kind, *fields):
            note(kind, *fields)
            if kind == "came":
                line.stop()

        line.note = stops
    rpc.api._wait_all_workers(20)
    if rank == 0:
        assert [rpc.rpc_sync("worker1", double, (number,)) for number in range(3)] == [0, 2, 4]
    rpc.shutdown()


def test_a_recording_that_ends_while_a_request_is_read_fails_no_call(tmp_path):
    results(run_group(stop_when_a_request_comes, 2, timeline=str(tmp_path)))


def leave_at_once(meeting: Meeting):
    meeting.join(world_size=2)
    for _ in range(21):
        rpc.rpc_sync(f"worker{1 - meeting.rank}", double, (torch.ones(2),))
    meeting.step("answered", 2)
    rpc.shutdown(graceful=False)


def test_timelines_that_nobody_gathers_are_merged_by_the_command(tmp_path):
    results(run_group(leave_at_once, 2, dynamic=True, timeline=str(tmp_path / "run.json")))
    files = [tmp_path / f"run.worker{rank}.json" for rank in (0, 1)]
    assert sorted(tmp_path.iterdir()) == files
    # As if the second one had run on another host, whose clock is 5 s ahead.
    ahead = json.loads(files[1].read_text())
    ahead["otherData"]["workers"][0]["host"] = "elsewhere"
    for event in ahead["traceEvents"]:
        if "ts" in event:
            event["ts"] += 5e6
    files[1].write_text(json.dumps(ahead))
    merged = tmp_path / "all.json"
    command = [str(Path(sys.executable).parent / "rdmarpc"), "timeline", "merge", *map(str, files), "-o", str(merged)]
    subprocess.run(command, check=True, timeout=60)
    trace = json.loads(merged.read_text())
    arrows = check_format(trace)
    check_nesting(trace)
    assert len(arrows) == 2 * 42
    for ends in arrows.values():
        begin, end = sorted(ends, key=lambda end: end["ph"] == "f")
        assert begin["pid"] != end["pid"] and begin["ts"] <= end["ts"] < begin["ts"] + 1e6

    with pytest.raises(SystemExit, match="rank 0"):
        rpc.timeline.main(["merge", str(files[0]), str(files[0])])
    files[0].write_text("[]")
    with pytest.raises(SystemExit, match=r"run\.worker0\.json is no timeline"):
        rpc.timeline.main(["merge", *map(str, files)])


def test_hosts_that_no_call_connects_are_brought_together_by_their_wall_clocks():
    def alone(rank, host, wall):
        event = {"ph": "X", "ts": 10.0, "pid": rank}
        return {"traceEvents": [event], "otherData": {"workers": [{"rank": rank, "host": host, "wall": wall}]}}

    merged = trace_events.merge([alone(0, "a", 5_000), alone(1, "b", 2_000), alone(2, "a", 5_100)])
    assert [event["ts"] for event in merged["traceEvents"]] == [10.0, 7.0, 10.0]


def lose_the_other(rank):
    if rank == 1:
        rpc.rpc_sync("worker0", double, (1,))
        die()
    with pytest.raises(rpc.PeerLost):
        rpc.rpc_sync("worker1", hang, (1,))
    with pytest.raises(rpc.PeerLost):
        rpc.shutdown()


def test_who_outlives_another_writes_its_own_timeline(tmp_path):
    outcomes = run_group(lose_the_other, 2, timeline=str(tmp_path))
    assert not outcomes[0].error, outcomes[0].text
    trace = json.loads((tmp_path / "worker0.json").read_text())
    check_format(trace)
    check_nesting(trace)
    [lost] = [event for event in spans(trace, "rpc_sync") if "hang" in event["name"]]
    assert lost["args"]["error"] == "PeerLost"


DYING = """
import sys, rdmarpc as rpc
from test_observability import same
rpc.init_rpc("lonely", rank=0, world_size=1, rpc_backend_options=rpc.RpcBackendOptions(init_method="file://" + sys.argv[1]))
rpc.rpc_sync("lonely", same, (1,))
raise ValueError("a bug of the user's")
"""


def test_a_program_that_dies_of_an_error_leaves_its_timeline(tmp_path):
    environment = os.environ | {"RDMARPC_TIMELINE": str(tmp_path / "run"), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", DYING, str(tmp_path / "store")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "a bug of the user's" in done.stderr
    trace = json.loads((tmp_path / "run" / "lonely.json").read_text())
    check_format(trace)
    assert [event["name"] for event in spans(trace, "rpc_sync")] == ["rpc_sync test_observability.same -> lonely"]


def record_a_part(rank):
    """The file of one process, of a part of the run."""
    other = f"worker{1 - rank}"
    rpc.rpc_sync(other, double, (1,))
    path = Path(agent.current().options.init_method.removeprefix("file://")).with_name(f"part{rank}.json")
    if rank == 0:
        with rpc.timeline.record(path):
            rpc.rpc_sync(other, double, (2,))
            pending = rpc.rpc_async(other, hang, (3,))
            rpc.rpc_sync(other, arrive)
            with pytest.raises(RuntimeError, match="is being recorded already"), rpc.timeline.record(path):
                pass
        rpc.rpc_sync(other, let_go)
        assert pending.wait() == 3
        first = json.loads(path.read_text())
        with rpc.timeline.record(path):
            rpc.rpc_sync(other, double, (torch.ones(2000, 2000).t()[::3],))  # sparse in its memory: compacted first
    rpc.shutdown()
    return (first, json.loads(path.read_text())) if rank == 0 else None


def test_a_part_of_a_run():
    first, second = results(run_group(record_a_part))[0]
    check_format(first)
    check_nesting(first)
    assert [event["name"] for event in spans(first, "rpc_sync")] == [
        f"rpc_sync {__name__}.{f} -> worker1" for f in ("double", "arrive")
    ]
    [unfinished] = [event for event in first["traceEvents"] if event["ph"] == "b" and event["cat"] == "rpc_async"]
    assert unfinished["args"]["unfinished"] and "hang" in unfinished["name"]
    [call] = spans(second, "rpc_sync")
    assert call["args"]["sent"]["staged"] == call["args"]["sent"]["direct"] + call["args"]["sent"]["read"] == 667 * 2000 * 4


# -- the numbers


def look():
    return rpc.debug_info(), rpc.explain()


def look_while_calls_hang(rank):
    if rank == 1:
        return rpc.shutdown()
    futures = [rpc.rpc_async("worker1", hang, (torch.ones(30_000),), timeout=0) for _ in range(3)]
    futures.append(rpc.rpc_async("worker1", hang, ("slow",), timeout=100))
    rref = rpc.remote("worker1", double, (torch.ones(3),))
    rref.to_here()
    time.sleep(1.5)
    theirs, ours = rpc.rpc_sync("worker1", look), look()
    rpc.rpc_sync("worker1", let_go)
    for future in futures:
        future.wait()
    rpc.rpc_sync("worker1", double, (torch.ones(30_000),))
    after, counts = rpc.debug_info(), rpc.counters()
    del rref
    rpc.shutdown()
    return ours, theirs, after, counts


def test_debug_info_while_calls_hang():
    (info, text), (served, serving), after, counts = results(run_group(look_while_calls_hang))[0]
    assert all(type(value) is int for value in [*info.values(), *served.values()])
    assert info["agent.num_pending_requests"] == info["agent.num_pending_futures"] == 4
    assert info["agent.thread_pool_size"] >= info["agent.num_idle_threads"] >= 1
    assert info["agent.num_workers"] == 2 and info["agent.num_lost"] == 0 and info["agent.uptime_ms"] >= 300
    assert info["link.worker1.requests"] == 6 and info["link.worker1.ring_used"] >= 0
    assert served["agent.num_running"] == 5 and served["num_owner_rrefs"] == 1 and served["link.worker0.answers"] == 1
    assert after["agent.num_pending_requests"] == 0 and after["link.worker1.grants_held"] >= 1
    assert after["device.bytes_direct"] > 0 and counts["rpc_calls"] == 8

    lines = [line for line in text.splitlines() if f"{__name__}.hang -> worker1" in line]
    assert len(lines) == 4 and sum("no limit" in line for line in lines) == 3 and "s left" in lines[3]
    assert all(float(line.split()[0]) >= 0.3 for line in lines)
    assert "calls without an answer yet: 4" in text and "connected to worker1" in text
    running = [line for line in serving.splitlines() if f"{__name__}.hang <- worker0" in line]
    assert len(running) == 4 and all(os.path.basename(__file__) in line or "threading.py" in line for line in running)


def explain_a_loss(rank):
    if rank == 1:
        rpc.rpc_sync("worker0", double, (1,))
        die()
    with pytest.raises(rpc.PeerLost):
        rpc.rpc_sync("worker1", hang, (1,))
    eventually(lambda: rpc.debug_info()["agent.num_lost"], 1)
    info, text = look()
    rpc.shutdown(graceful=False)
    return info, text


def test_a_lost_worker_is_explained():
    info, text = run_group(explain_a_loss)[0].result
    assert info["agent.num_lost"] == 1 and "lost worker1: " in text


def test_before_init():
    for call in (rpc.debug_info, rpc.counters, rpc.explain):
        with pytest.raises(RuntimeError, match=r"^RPC has not been initialized"):
            call()
    with pytest.raises(RuntimeError, match=r"^RPC has not been initialized"), rpc.timeline.record("never.json"):
        pass


PROGRAM = """
import sys, torch, rdmarpc as rpc
from test_observability import arrived, hang
options = rpc.RpcBackendOptions(init_method="file://" + sys.argv[1])
rpc.init_rpc("lonely", rank=0, world_size=1, rpc_backend_options=options)
rpc.rpc_async("lonely", hang, (1,))
assert arrived.wait(20)
print("ready", flush=True)
torch.futures.Future().wait()  # in C++: Python runs no signal handler in here
"""


def test_a_signal_has_a_hanging_program_say_what_it_waits_for(tmp_path):
    environment = os.environ | {"RDMARPC_DEBUG_SIGNAL": "SIGUSR1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "store")]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            time.sleep(0.3)
            process.send_signal(signal.SIGUSR1)
            said: list[str] = []
            reader = threading.Thread(target=lambda: said.extend(iter(process.stderr.readline, "")), daemon=True)
            reader.start()
            deadline = time.monotonic() + 20
            while not any(line.startswith("device: ") for line in said) and time.monotonic() < deadline:
                time.sleep(0.05)
        finally:
            process.kill()
    text = "".join(said)
    assert "lonely (rank 0 of 1" in text and "test_observability.hang -> lonely" in text
    assert "test_observability.hang <- lonely" in text
