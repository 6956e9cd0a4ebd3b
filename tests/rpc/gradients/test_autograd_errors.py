"""What goes wrong in a distributed backward pass: who learns of it, as what, how soon, and that all goes on afterwards."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from functools import partial

import pytest
import torch
from called import double, held, identity, let_go
from group import die, dismiss, results, run_group, until_dismissed
from test_autograd_contexts import gone_everywhere, known
from timing import eventually

import rdmarpc as rpc
from rdmarpc import autograd
from rdmarpc.autograd import BackwardError
from rdmarpc.calls import agent

PEER_TIMEOUT_S = 2.0


class Odd(ValueError):
    """Not made of one text."""

    def __init__(self, code, detail):
        super().__init__(code, detail)
        self.code = code


class Mute(Exception):
    def __str__(self):
        raise KeyError("no text")


class Does(torch.autograd.Function):
    """The identity; its backward does something first."""

    @staticmethod
    def forward(ctx, tensor, what):
        ctx.what = what
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.what()
        return gradient, None


def fail_value():
    raise ValueError("the third value is odd")


def fail_odd():
    raise Odd(7, "detail")


def fail_system():
    raise FileNotFoundError(2, "no such thing")


def fail_mute():
    raise Mute


def fail_unknown():
    """Of a type that only exists here."""
    raise type("Nowhere", (Exception,), {})("from nowhere")


def fail_exit():
    raise SystemExit(3)


def wait_a_bit():
    time.sleep(1.5)


def wait_long():
    time.sleep(4.0)


began = threading.Event()


def waits_to_be_let_go():
    began.set()
    held("backward")


def has_begun():
    return began.is_set()


class Alarms:
    """Interrupts who began the pass, which waits, and goes on when it is let go."""

    def __init__(self, pid):
        self.pid = pid

    def __call__(self):
        time.sleep(0.3)
        os.kill(self.pid, signal.SIGALRM)
        held("alarm")


def stop_me():
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(10.0)  # another thread may have taken the signal, and this one go on for a moment


def release_mine():
    for context_id in list(agent.current().contexts.live):
        autograd._release_context(context_id)


def does(tensor, path, what):
    """By way of the workers of ``path``; at the last, ``what`` happens in the backward pass."""
    if path:
        return rpc.rpc_sync(path[0], does, (tensor, path[1:], what)) * 1
    return Does.apply(tensor, what)


def fails_in_hook(tensor):
    result = tensor * 2
    result.register_hook(lambda gradient: fail_value())
    return result * 2


def hooked_leaf(tensor):
    leaf = torch.ones(3, requires_grad=True)
    leaf.register_hook(lambda gradient: fail_value())
    kept.append(leaf)
    return tensor * leaf


kept: list[object] = []


def passes_here():
    return autograd._get_debug_info()["num_current_backward_passes"]


def error_of(to, function, *args):
    tensor = torch.ones(3, requires_grad=True)
    with autograd.context() as context_id:
        loss = rpc.rpc_sync(to, function, (tensor, *args)).sum()
        with pytest.raises(RuntimeError) as raised:
            autograd.backward(context_id, [loss])
        assert passes_here() == 0
    assert tensor.grad is None
    return raised.value


def good(*path):
    """A pass that is right."""
    tensor = torch.ones(3, requires_grad=True)
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync(path[0], does, (tensor, list(path[1:]), int)).sum()])
        assert autograd.get_gradients(context_id)[tensor].tolist() == [1.0] * 3


def good_in_other_thread(*path):
    failed = []

    def run():
        try:
            good(*path)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    assert not thread.is_alive() and not failed, failed


def kinds(rank):
    if rank == 0:
        error = error_of("worker1", does, [], fail_value)
        assert isinstance(error, ValueError) and isinstance(error, BackwardError) and type(error).__name__ == "ValueError"
        text = str(error)
        assert text.startswith("Error on Node 0: Error on Node 1: the third value is odd\n")
        assert "On worker worker1:" in text and 'in fail_value\n    raise ValueError("the third value is odd")' in text
        error = error_of("worker1", does, ["worker2"], fail_value)
        assert isinstance(error, ValueError)
        assert str(error).startswith("Error on Node 0: Error on Node 1: Error on Node 2: the third value is odd\n")
        assert "On worker worker2:" in str(error) and "On worker worker1:" not in str(error)
        error = error_of("worker1", does, ["worker0"], fail_value)  # gradients come back in the answer, and fail here
        assert str(error).startswith("Error on Node 0: the third value is odd\n")
        for function in (fails_in_hook, hooked_leaf):
            error = error_of("worker1", function)
            assert isinstance(error, ValueError) and "Error on Node 1: the third value is odd\n" in str(error)
        error = error_of("worker0", does, [], fail_value)
        assert isinstance(error, ValueError) and "the third value is odd\n" in str(error)
        error = error_of("worker1", does, [], fail_odd)
        assert isinstance(error, Odd) and error.code == 7 and "Error on Node 1: (7, 'detail')" in str(error)
        error = error_of("worker1", does, ["worker2"], fail_system)
        assert isinstance(error, FileNotFoundError) and isinstance(error, BackwardError) and "no such thing" in str(error)
        assert "Mute" in str(error_of("worker1", does, ["worker2"], fail_mute))
        for what, part in ((fail_unknown, "from nowhere"), (fail_exit, "SystemExit: 3")):
            error = error_of("worker1", does, ["worker2"], what)
            assert str(error).startswith("Error on Node 0: Error on Node 1: Error on Node 2: ") and part in str(error)
        remote_root()
        good("worker1", "worker2")
        gone_everywhere("worker0", "worker1", "worker2")
    rpc.shutdown()


def failing_root(tensor):
    return does(tensor, ["worker2"], fail_value).sum()


def remote_root():
    """``RRef.backward`` tells the same."""
    with autograd.context() as context_id:
        tensor = torch.ones(3, requires_grad=True)
        root = rpc.remote("worker1", failing_root, (tensor,))
        with pytest.raises(ValueError) as raised:
            root.backward(context_id)
        assert str(raised.value).startswith("Error on Node 1: Error on Node 2: the third value is odd\n")


def test_errors_come_with_their_type_place_and_text():
    results(run_group(kinds, 3))


class Sometimes:
    """Fails while it is told to."""

    failing = True

    def __call__(self):
        if Sometimes.failing:
            raise ValueError("not now")


def set_failing(failing):
    Sometimes.failing = failing


def again_and_again(rank):
    """All workers at once: passes that fail, then one that does not, over the same graph."""
    peers = [f"worker{(rank + hop) % 4}" for hop in (1, 2, 3)]
    tensor = torch.arange(5.0, requires_grad=True)  # whole numbers: sums are exact in whatever order they come
    with autograd.context() as context_id:
        mine = rpc.rpc_sync(peers[0], does, (tensor, peers[1:], Sometimes())).sum()
        direct = (rpc.rpc_sync(peers[1], double, (tensor,)) * tensor).sum()
        for _ in range(50):
            with pytest.raises(ValueError, match=r"Error on Node \d: not now\n"):
                autograd.backward(context_id, [mine, direct], retain_graph=True)
        ready.set()
        for peer in peers:
            eventually(partial(rpc.rpc_sync, peer, is_ready), limit=30)
        set_failing(False)
        for peer in peers:
            rpc.rpc_sync(peer, set_failing, (False,))
        autograd.backward(context_id, [mine], retain_graph=True)
        assert passes_here() <= 4
    with autograd.context() as context_id:
        mine = rpc.rpc_sync(peers[0], does, (tensor, peers[1:], Sometimes())).sum()
        direct = (rpc.rpc_sync(peers[1], double, (tensor,)) * tensor).sum()
        autograd.backward(context_id, [mine, direct], retain_graph=True)
        assert torch.equal(autograd.get_gradients(context_id)[tensor], 1 + 4 * tensor)
        autograd.backward(context_id, [mine, direct])
        assert torch.equal(autograd.get_gradients(context_id)[tensor], 2 * (1 + 4 * tensor))
    assert tensor.grad is None
    rpc.shutdown()


ready = threading.Event()


def is_ready():
    return ready.is_set()


def test_many_failed_passes_then_good_ones():
    results(run_group(again_and_again, 4))


def lost_during(rank, what):
    if rank == 0:
        tensor = torch.ones(3, requires_grad=True)
        with autograd.context() as context_id:
            through = rpc.rpc_sync("worker1", does, (tensor, ["worker3"], what)).sum()
            other = rpc.rpc_sync("worker2", does, (tensor, [], wait_a_bit)).sum()
            start = time.monotonic()
            with pytest.raises(rpc.PeerLost, match=r"Error on Node 0: Error on Node 1: worker worker3 is lost") as raised:
                autograd.backward(context_id, [through, other])
            assert isinstance(raised.value, BackwardError)
            assert time.monotonic() - start < PEER_TIMEOUT_S + 12.0
        for _ in range(3):
            good("worker1", "worker2")
        gone_everywhere("worker0", "worker1", "worker2")
        dismiss("worker1", "worker2")
    else:
        until_dismissed()
    rpc.shutdown(graceful=False)
    return "survived"


def killed(rank):
    return lost_during(rank, die)


@pytest.mark.parametrize("device", ["shm", "tcp"])
def test_a_worker_is_killed_during_its_backward(device):
    outcomes = run_group(killed, 4, transport=device, peer_timeout=PEER_TIMEOUT_S)
    assert [outcomes[rank].result for rank in (0, 1, 2)] == ["survived"] * 3, outcomes


def pid():
    return os.getpid()


def stopped(rank):
    if rank == 3:
        time.sleep(60)
    if rank == 0:
        sleeper = rpc.rpc_sync("worker3", pid)
        try:
            return lost_during(rank, stop_me)
        finally:
            os.kill(sleeper, signal.SIGKILL)
    return lost_during(rank, None)


def test_a_worker_is_stopped_during_its_backward():
    outcomes = run_group(stopped, 4, peer_timeout=PEER_TIMEOUT_S)
    assert [outcomes[rank].result for rank in (0, 1, 2)] == ["survived"] * 3, outcomes


def release_when_begun(context_id, last):
    """In the midst of the pass, at ``last``."""
    eventually(partial(rpc.rpc_sync, last, has_begun))
    autograd._release_context(context_id)
    rpc.rpc_sync(last, let_go, ("backward",))


def ended_from_elsewhere(rank):
    if rank == 0:
        tensor = torch.ones(3, requires_grad=True)
        for path in ([], ["worker2"], ["worker0"]):
            last = ["worker1", *path][-1]
            with autograd.context() as context_id:
                loss = rpc.rpc_sync("worker1", does, (tensor, path, waits_to_be_let_go)).sum()
                release = threading.Thread(target=release_when_begun, args=(context_id, last))
                release.start()
                with pytest.raises(BackwardError, match=r"has ended during a backward pass|Could not find autograd context"):
                    autograd.backward(context_id, [loss])
                release.join(30)
        # On one of the workers alone.
        with autograd.context() as context_id:
            loss = rpc.rpc_sync("worker1", does, (tensor, ["worker2"], release_mine)).sum()
            with pytest.raises(BackwardError, match=r"has ended during a backward pass|Could not find autograd context"):
                autograd.backward(context_id, [loss])
        gone_everywhere("worker0", "worker1", "worker2")
        good("worker1", "worker2")
    rpc.shutdown()


def test_a_context_is_ended_in_the_middle_of_a_pass():
    results(run_group(ended_from_elsewhere, 3))


def late_root(tensor):
    return Does.apply(tensor, wait_long).sum()


def too_slow(rank):
    if rank == 0:
        tensor = torch.ones(30_000, requires_grad=True)
        with autograd.context() as context_id:
            loss = rpc.rpc_sync("worker1", does, (tensor, ["worker2"], wait_long)).sum()
            other = rpc.rpc_sync("worker2", double, (tensor,)).sum()
            root = rpc.remote("worker1", late_root, (tensor,))
            for backward in (
                lambda: autograd.backward(context_id, [loss, other], retain_graph=True),
                lambda: root.backward(context_id),
            ):
                rpc._set_rpc_timeout(0.5)
                start = time.monotonic()
                with pytest.raises(rpc.TransferTimeout, match=r"RPCErr:1:RPC ran for more than set timeout \(500 ms\)"):
                    backward()
                assert time.monotonic() - start < 3.5
                rpc._set_rpc_timeout(60.0)
            # While the answers of those come, which nobody wants.
            until = time.monotonic() + 4.5
            while time.monotonic() < until:
                good_in_other_thread("worker1")
                good_in_other_thread("worker2", "worker0")
                time.sleep(0.02)
        gone_everywhere("worker0", "worker1", "worker2")
        eventually(lambda: len(agent.current().caller.expired) + len(agent.current().caller.pending), 0)
        good("worker1", "worker2")
    rpc.shutdown()


def test_a_pass_that_takes_too_long():
    results(run_group(too_slow, 3))


class Interrupted(BaseException):
    pass


def interrupt(*_):
    raise Interrupted


def interrupted(rank):
    if rank == 0:
        signal.signal(signal.SIGALRM, interrupt)
        tensor = torch.ones(3, requires_grad=True)
        with autograd.context() as context_id:
            loss = rpc.rpc_sync("worker1", does, (tensor, ["worker2"], Alarms(os.getpid()))).sum()
            other = rpc.rpc_sync("worker2", double, (tensor,)).sum()
            with pytest.raises(Interrupted):
                autograd.backward(context_id, [loss, other], retain_graph=True)
            assert passes_here() == 0
            good_in_other_thread("worker1", "worker2")
            assert known(context_id)
            rpc.rpc_sync("worker2", let_go, ("alarm",))
        gone_everywhere("worker0", "worker1", "worker2")
        eventually(lambda: len(agent.current().caller.expired), 0)
        assert rpc.rpc_sync("worker1", identity, (1,)) == 1
    rpc.shutdown()


def test_an_interrupt_of_who_waits():
    results(run_group(interrupted, 3))


def leaves_in_the_middle(tensor):
    """The one that began a pass is gone while others run it."""
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", does, (tensor, ["worker2"], wait_a_bit)).sum()
        threading.Timer(0.2, die).start()
        autograd.backward(context_id, [loss])
        time.sleep(60)


def initiator_dies(rank):
    if rank == 0:
        with pytest.raises(rpc.PeerLost):
            rpc.rpc_sync("worker3", leaves_in_the_middle, (torch.ones(3, requires_grad=True),))
        good("worker1", "worker2")
        gone_everywhere("worker0", "worker1", "worker2")
        for worker in ("worker1", "worker2"):
            eventually(partial(rpc.rpc_sync, worker, passes_here), 0)
        dismiss("worker1", "worker2")
    else:
        until_dismissed()
    rpc.shutdown(graceful=False)
    return "survived"


def test_who_began_a_pass_dies():
    outcomes = run_group(initiator_dies, 4)
    assert [outcomes[rank].result for rank in (0, 1, 2)] == ["survived"] * 3, outcomes


backward_began = threading.Event()


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        backward_began.set()
        time.sleep(0.5)  # no longer than a worker that leaves waits for what runs
        return grad * 2


def slow(x):
    return Slow.apply(x)


def leaves_during_a_backward(rank):
    if rank == 0:
        assert backward_began.wait(20)
    else:
        with rpc.autograd.context() as context:
            y = rpc.rpc_sync("worker0", slow, (torch.ones(4, requires_grad=True),))
            with suppress(rpc.PeerLost):  # or it has done its part
                rpc.autograd.backward(context, [y.sum()])
    rpc.shutdown(graceful=False)


@pytest.mark.parametrize("device", ["shm", "tcp"])
def test_a_worker_that_leaves_during_a_backward_is_lost_or_has_done_its_part(device):
    results(run_group(leaves_during_a_backward, 2, transport=device))
