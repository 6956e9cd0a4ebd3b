"""Tensors on GPUs as arguments and results: in the order of streams, without waiting, to the devices that the maps name."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

import gpu
import pytest
import torch
from group import die, results, run_group
from timing import eventually

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]


def counters() -> dict[str, int]:
    from rdmarpc.calls import agent

    return agent.current().counters()


# -- functions that are called


def identity(value: Any) -> Any:
    return value


def where(value: torch.Tensor) -> str:
    return str(value.device)


def shifted(value: torch.Tensor) -> torch.Tensor:
    return value + 1


def slowly(value: torch.Tensor, ms: float) -> torch.Tensor:
    """Not even begun when the answer leaves."""
    made = torch.zeros_like(value)
    gpu.fill_later(made, 7.0, ms)
    return made


# -- arguments and results


def arguments_and_results(rank: int) -> Any:
    import rdmarpc as rpc

    found = None
    if rank == 0:
        device = gpu.device()
        value = torch.arange(1000.0, device=device)
        views = value.view(10, 100)[2:7].t()
        matrix = torch.randn(64, 64, device=device)
        for _ in range(3):
            back = rpc.rpc_sync("worker1", identity, (value,))
            assert back.device == device and torch.equal(back.cpu(), value.cpu())
        back, same, other, plain = rpc.rpc_sync("worker1", identity, ([views, value, matrix, 3],))
        assert back.stride() == views.stride() and torch.equal(back.cpu(), views.cpu())
        assert torch.equal(same.cpu(), value.cpu()) and torch.equal(other.cpu(), matrix.cpu()) and plain == 3
        empty = rpc.rpc_sync("worker1", identity, (torch.empty(0, 3, device=device),))
        assert empty.shape == (0, 3) and empty.device == device
        mixed = rpc.rpc_sync("worker1", identity, ({"here": torch.ones(3), "there": value},))
        assert mixed["here"].device.type == "cpu" and mixed["there"].device == device
        whole = torch.tensor([1, 2, 3], dtype=torch.int16, device=device)
        assert rpc.rpc_sync("worker1", identity, (whole,)).dtype == torch.int16
        parameter = torch.nn.Parameter(torch.ones(4, device=device))
        back = rpc.rpc_sync("worker1", identity, (parameter,))
        assert type(back) is torch.nn.Parameter and back.device == device and back.requires_grad
        futures = [rpc.rpc_async("worker1", shifted, (value + i,)) for i in range(5)]
        for i, back in enumerate(torch.futures.wait_all(futures)):
            assert torch.equal(back.cpu(), value.cpu() + i + 1)
        own = rpc.rpc_sync("worker0", shifted, (value,))  # a call to oneself
        assert torch.equal(own.cpu(), value.cpu() + 1)
        found = counters()
    rpc.shutdown()
    return found


def test_arguments_and_results_go_from_gpu_to_gpu() -> None:
    found = results(run_group(arguments_and_results, gpu=True))[0]
    assert found["gpu_bytes_direct"] > 0
    assert found["bytes_staged"] == 0


def no_waiting(rank: int) -> Any:
    import rdmarpc as rpc

    found = None
    if rank == 0:
        value = torch.zeros(4096, device=gpu.device())
        rpc.rpc_sync("worker1", identity, (value,))  # the first asks whether memory can be reached
        rpc.rpc_async("worker1", identity, (value,)).wait()
        for ms in (0.0, 30.0):
            before = gpu.host_waits()
            gpu.fill_later(value, 3.0, ms)
            back = rpc.rpc_sync("worker1", identity, (value,))
            later = rpc.rpc_sync("worker1", slowly, (back, ms))
            future = rpc.rpc_async("worker1", slowly, (back, ms))
            also = future.wait()
            waited = gpu.host_waits() - before
            assert waited == 0, f"waited {waited} times"
            assert back.cpu().eq(3.0).all()
            assert later.cpu().eq(7.0).all()
            assert also.cpu().eq(7.0).all()
            value.zero_()
        found = rpc.rpc_sync("worker1", gpu.host_waits), gpu.host_waits
    rpc.shutdown()
    return found and found[0]


def test_a_slow_kernel_is_waited_for_by_streams_alone() -> None:
    assert results(run_group(no_waiting, gpu=True))[0] == 0


def bursts(rank: int) -> Any:
    import rdmarpc as rpc

    if rank == 0:
        device = gpu.device()
        rpc.rpc_sync("worker1", identity, (torch.ones(1, device=device),))
        futures = []
        for number in range(1500):  # more than there are slots
            value = torch.full((16,), float(number), device=device)
            futures.append(rpc.rpc_async("worker1", shifted, (value,)))
            del value  # its memory must not go round before it has been read
        found = [future.wait() for future in futures]
        assert [int(back[0]) for back in found] == list(range(1, 1501))
    rpc.shutdown()


def test_memory_of_arguments_is_not_used_again_before_it_is_read() -> None:
    results(run_group(bursts, gpu=True))


def made(value: float, ms: float) -> torch.Tensor:
    """Nobody knows before that it is on a GPU."""
    found = torch.zeros(64, device=gpu.device())
    gpu.fill_later(found, value, ms)
    return found


def unexpected(rank: int) -> Any:
    import time

    import rdmarpc as rpc

    found = None
    if rank == 0:
        stream = torch.Stream(gpu.device())
        rpc.rpc_sync("worker1", made, (0.0, 0.0))
        for value in (1.0, 2.0):
            future = rpc.rpc_async("worker1", made, (value, 60.0))
            time.sleep(0.02)  # a thread of ours completes it, on a stream of its own
            with stream:
                assert future.wait().eq(value).all()
        chained = rpc.rpc_async("worker1", made, (3.0, 60.0)).then(lambda done: done.wait() + 1)
        assert chained.wait().eq(4.0).all()
        found = counters()["gpu_host_waits"]
    rpc.shutdown()
    return found


def test_futures_of_results_that_turn_out_to_be_on_a_gpu() -> None:
    assert results(run_group(unexpected, gpu=True))[0] == 1


# -- device maps


def mapped_devices(rank: int) -> Any:
    import rdmarpc as rpc

    if rank == 0:
        here, there = gpu.device(0), gpu.device(gpu.other())
        value = torch.arange(4.0, device=here)
        assert rpc.rpc_sync("worker1", where, (value,)) == str(there)
        back = rpc.rpc_sync("worker1", shifted, (value,))
        assert back.device == here and back.tolist() == [1, 2, 3, 4]
        assert rpc.rpc_sync("worker2", where, (value,)) == str(here), "without a map it is the same index"
        ref = rpc.remote("worker1", shifted, (value,))
        assert ref.to_here().device == here
        assert rpc.rpc_sync("worker1", where, (ref.to_here(),)) == str(there)
    rpc.shutdown()


def test_maps_say_where_tensors_go_and_answers_come_back_the_other_way() -> None:
    maps = {"worker1": {0: 1, 1: 0}} if gpu.TYPE == "softgpu" else {"worker1": {0: 0}}
    results(run_group(mapped_devices, 3, gpu=True, each={0: {"device_maps": maps}}))


def fewer_devices(rank: int) -> Any:
    import rdmarpc as rpc

    if rank == 0:
        last = gpu.device(1)
        with pytest.raises(RuntimeError, match="worker worker1 has only 1 GPUs"):
            rpc.rpc_sync("worker1", identity, (torch.ones(2, device=last),))
        with pytest.raises(RuntimeError, match="worker worker2 has no GPU"):
            rpc.rpc_sync("worker2", identity, (torch.ones(2, device=gpu.device()),))
        assert rpc.rpc_sync("worker1", where, (torch.ones(2, device=gpu.device()),)) == str(gpu.device())
        assert rpc.rpc_sync("worker2", torch.add, (torch.ones(2), 1)).tolist() == [2, 2]
    rpc.shutdown()


@pytest.mark.skipif(gpu.TYPE != "softgpu", reason="takes a host whose processes have different numbers of GPUs")
def test_a_tensor_for_which_there_is_no_device_is_an_error_that_says_so() -> None:
    each: dict[int, dict[str, Any]] = {1: {"environment": {"SOFTCUDA_DEVICES": "1"}}, 2: {"gpu": False}}
    results(run_group(fewer_devices, 3, gpu=True, each=each))


def wrong_maps(rank: int) -> Any:
    raise AssertionError("the group must not come together")


def test_a_map_to_a_device_that_does_not_exist_fails_at_every_worker() -> None:
    outcomes = run_group(wrong_maps, gpu=True, each={0: {"device_maps": {"worker1": {0: 7}}}})
    for outcome in outcomes:
        assert outcome.error == "ValueError" and "Node worker0 has target devices with invalid indices" in outcome.text


# -- through host memory


def through_the_host(rank: int) -> Any:
    import rdmarpc as rpc

    found = None
    if rank == 0:
        value = torch.zeros(100, 50, device=gpu.device())
        gpu.fill_later(value, 2.0, 20)
        back = rpc.rpc_sync("worker1", shifted, (value.t(),))
        assert back.device == value.device and back.shape == (50, 100) and back.stride() == (1, 50)
        assert back.cpu().eq(3.0).all()
        assert rpc.rpc_async("worker1", identity, ([value],)).wait()[0].cpu().eq(2.0).all()
        found = counters()
    rpc.shutdown()
    return found


def test_where_no_memory_is_shared_tensors_go_through_the_host_and_that_is_counted() -> None:
    found = results(run_group(through_the_host, gpu=True, transport="tcp"))[0]
    assert found["bytes_staged"] == 4 * 100 * 50 * 4  # out and in, two calls
    assert "gpu_bytes_direct" not in found


# -- the end of a peer


def waits_for_the_dead(rank: int) -> Any:
    import os
    import time

    import rdmarpc as rpc

    if rank == 1:
        time.sleep(60)
        os._exit(1)
    value = torch.ones(64, device=gpu.device())
    rpc.rpc_sync("worker1", identity, (value,))
    # Our stream now waits for one of the peer that never comes so far.
    back = rpc.rpc_sync("worker1", slowly, (value, 60_000.0))
    with pytest.raises(rpc.PeerLost):
        rpc.rpc_sync("worker1", os._exit, (1,))
    begun = time.monotonic()
    back.cpu()
    assert time.monotonic() - begun < 30
    eventually(lambda: counters().get("gpu_messages_lost", 0), 1)
    rpc.shutdown(graceful=False)
    return True


def test_no_stream_waits_for_ever_for_one_of_a_process_that_has_ended() -> None:
    assert run_group(waits_for_the_dead, gpu=True, rpc_timeout=30)[0].result is True


# -- CUDA graphs


def made_there(count: int) -> torch.Tensor:
    return torch.ones(count, device=gpu.device())


def beside_captures(rank: int) -> None:
    """One thread captures graphs; others call, and answers come."""
    import rdmarpc as rpc

    value = torch.zeros(1000, device=gpu.device())
    peer = f"worker{1 - rank}"
    rpc.rpc_sync(peer, identity, (value,))
    over, calls, wrong = threading.Event(), [0, 0], []

    def call(number: int) -> None:
        try:
            while not over.is_set():
                futures = [rpc.rpc_async(peer, shifted, (value,)) for _ in range(3)]
                torch.futures.wait_all([*futures, rpc.rpc_async(peer, made_there, (10,))])
                rpc.rpc_sync(peer, identity, (value,))
                calls[number] += 1
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    try:
        while min(calls) < 20 and not wrong:
            with gpu.capture():
                time.sleep(0.02)
            time.sleep(0.002)
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert not wrong, wrong
    rpc.shutdown()


def test_calls_do_not_spoil_a_graph_that_is_captured() -> None:
    results(run_group(beside_captures, gpu=True))


def round_a_capture(rank: int) -> None:
    """torch's pool is gone round past the stream that captures, wherever that is and wherever the next one is."""
    import rdmarpc as rpc
    from rdmarpc.transport.gpu.events import StreamPool

    over = threading.Event()
    other = threading.Thread(target=lambda: [torch.Stream(gpu.device()) for _ in iter(over.is_set, True)])
    other.start()
    try:
        pools = [StreamPool(0) for _ in range(30)]  # while another thread takes some
    finally:
        over.set()
        other.join()
    streams = {}
    while (stream := torch.Stream(gpu.device())).stream_id not in streams:
        streams[stream.stream_id] = stream
    for pool, captured in zip(pools, itertools.cycle((0, 5, len(streams) - 1))):
        number, stream = list(streams.items())[captured]
        with gpu.capture(stream):
            for _ in range(len(streams)):
                torch.Stream(gpu.device())
                pool.pass_captures()
                assert number not in {torch.Stream(gpu.device()).stream_id for _ in range(len(streams) - 1)}
    rpc.shutdown()


def test_callbacks_run_on_no_stream_that_is_captured() -> None:
    results(run_group(round_a_capture, 1, gpu=True))


def in_a_capture(rank: int) -> None:
    import rdmarpc as rpc

    if rank == 0:
        value = torch.zeros(1000, device=gpu.device())
        for _ in range(3):
            rpc.rpc_sync("worker1", identity, (value,))
            rpc.rpc_sync("worker1", made_there, (10,))
        with gpu.capture():
            assert rpc.rpc_sync("worker1", identity, (1,)) == 1
            assert rpc.rpc_sync("worker1", identity, (torch.ones(3),)).sum() == 3
            for function, argument in ((identity, value), (made_there, 10)):
                with pytest.raises(rpc.NotSupported, match="captures a CUDA graph"):
                    rpc.rpc_sync("worker1", function, (argument,))
        assert rpc.rpc_sync("worker1", shifted, (value,)).cpu().eq(1).all()
        # The peer has its memory back, also of the answer that was not taken.
        eventually(lambda: rpc.rpc_sync("worker1", all_read))
        eventually(all_read)
    rpc.shutdown()


def all_read() -> bool:
    """Whether nobody has still to read GPU memory of this worker."""
    from rdmarpc.message.gpu import current

    return current is not None and current.settled


def test_a_thread_that_captures_is_told_that_it_cannot_call() -> None:
    results(run_group(in_a_capture, gpu=True))


# -- memory that goes round


kept: list[torch.Tensor] = []
place = 0


def make_and_keep(count: int) -> int:
    kept.append(torch.zeros(count, device=gpu.device()))
    return threading.get_ident()


def write_late_and_drop(maker: int, ms: float) -> bool:
    """On the other thread than the maker's."""
    global place
    if threading.get_ident() == maker:
        time.sleep(0.1)  # so that the other one gets the other call
        return False
    if kept:
        place = kept[0].data_ptr()
        gpu.fill_later(kept.pop(), 5.0, ms)
    return True


def intact(value: torch.Tensor) -> tuple[bool, bool]:
    """Whether it lies in that place, and is as it was."""
    found = value.data_ptr() == place, bool(value.eq(1).all())
    time.sleep(0.1)
    return found


def memory_is_reused(rank: int) -> None:
    """A function lets go of a tensor that another thread had made, with a kernel on it still to come. What that thread gets
    next may lie in its place."""
    import rdmarpc as rpc

    met = 0
    if rank == 0:
        value = torch.ones(3_000_000, device=gpu.device())
        assert rpc.rpc_sync("worker1", intact, (value,))[1]
        for _ in range(60):
            maker = rpc.rpc_sync("worker1", make_and_keep, (3_000_000,))
            drops = [rpc.rpc_async("worker1", write_late_and_drop, (maker, 150.0)) for _ in range(2)]
            if not any(torch.futures.wait_all(drops)):
                continue  # the maker's thread took both
            for there, fine in torch.futures.wait_all([rpc.rpc_async("worker1", intact, (value,)) for _ in range(3)]):
                assert fine
                met += there
            if met:
                break
        assert met
    rpc.shutdown()


def test_memory_that_a_function_lets_go_of_is_not_written_while_it_is_used() -> None:
    results(run_group(memory_is_reused, gpu=True, num_worker_threads=2))


# -- a GPU that fails


def breaks_its_gpu(value: torch.Tensor) -> torch.Tensor:
    gpu.fail()
    return value + 1


def nap(seconds: float) -> None:
    time.sleep(seconds)


def timeouts_still_come() -> str:
    import rdmarpc as rpc

    future = rpc.rpc_async("worker0", nap, (20.0,), timeout=0.5)
    seen = threading.Event()
    future.add_done_callback(lambda _: seen.set())  # nobody waits in it
    return "came" if seen.wait(10) else "never came"


def failing(rank: int) -> str:
    import rdmarpc as rpc

    if rank == 1:
        with pytest.raises(rpc.PeerLost):
            while True:
                rpc.rpc_sync("worker0", identity, (1,))
                time.sleep(0.05)
        rpc.shutdown(graceful=False)
        return "left"
    value = torch.ones(100, device=gpu.device())
    rpc.rpc_sync("worker1", shifted, (value,))
    with pytest.raises(RuntimeError, match=r"CUDA|device"):
        rpc.rpc_sync("worker1", breaks_its_gpu, (value,), timeout=10)
    with pytest.raises(RuntimeError):
        rpc.rpc_sync("worker1", shifted, (value,), timeout=10)
    assert rpc.rpc_sync("worker1", identity, (torch.ones(3),), timeout=10).sum() == 3
    assert rpc.rpc_sync("worker1", timeouts_still_come, timeout=15) == "came"
    rpc.shutdown(graceful=False)
    return "left"


def test_a_gpu_that_fails_takes_no_answer_and_no_timeout_with_it() -> None:
    assert results(run_group(failing, gpu=True)) == ["left", "left"]


def empty_first(rank: int) -> None:
    import rdmarpc as rpc

    if rank == 0:
        back = rpc.rpc_sync("worker1", identity, (torch.empty(0, 3, device=gpu.device()),))
        assert back.shape == (0, 3) and back.device == gpu.device()
        full = rpc.rpc_sync("worker1", identity, (torch.ones(3, device=gpu.device()),))
        assert full.cpu().sum() == 3
    rpc.shutdown()


def test_an_empty_tensor_may_be_the_first() -> None:
    results(run_group(empty_first, gpu=True))


def recycled(rank: int) -> int:
    """Memory is given back to the driver, and other memory comes to its address, which the peer has mapped."""
    import rdmarpc as rpc

    places = set()
    if rank == 0:
        for turn in range(4):
            value = torch.full((8_000_000,), float(turn), device=gpu.device())
            places.add(value.data_ptr())
            assert rpc.rpc_sync("worker1", where, (value,)) == str(gpu.device())
            back = rpc.rpc_sync("worker1", shifted, (value,))
            assert back.eq(turn + 1.0).all()
            del value, back
            eventually(all_read)
            torch.accelerator.synchronize()
            torch.accelerator.empty_cache()
        assert counters()["bytes_staged"] == 0
    rpc.shutdown()
    return len(places)


def test_an_address_is_used_again() -> None:
    places = results(run_group(recycled, gpu=True))[0]
    assert gpu.TYPE == "cuda" or places < 4  # the case was met


begun, ended = threading.Event(), threading.Event()


def waits_for(value: torch.Tensor) -> None:
    begun.set()
    value.cpu()
    ended.set()


def dies_while_all_wait(rank: int) -> str:
    """The only thread of worker 0 waits for what the GPU of worker 1 has still to make."""
    import rdmarpc as rpc

    value = torch.ones(64, device=gpu.device())
    if rank == 1:
        rpc.rpc_sync("worker0", shifted, (value,))
        gpu.fill_later(value, 3.0, 60_000.0)
        rpc.rpc_async("worker0", waits_for, (value,))
        time.sleep(60)
    assert begun.wait(30) and not ended.is_set()
    rpc.rpc_async("worker1", die)
    assert ended.wait(20)
    rpc.shutdown(graceful=False)
    return "went on"


def test_a_peer_is_lost_while_all_threads_wait_for_its_gpu() -> None:
    assert run_group(dies_while_all_wait, gpu=True, each={0: {"num_worker_threads": 1}})[0].result == "went on"
