"""``wrap`` with stages on GPUs over ``verbs``, as between hosts: where the adapter reaches GPU memory, and where not. Over
Soft-RoCE with the software GPU; an adapter's driver that takes its memory is played by ``softverbs``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import gpu
import packets
import pytest
import softverbs
import test_wrap_gpu
import test_wrap_gpu_streams
import torch
from group import Meeting, results, run_group
from test_wrap import on_driver
from test_wrap_gpu import CPU

import rdmarpc as rpc

pytestmark = [pytest.mark.gpu, pytest.mark.rdma, pytest.mark.timeout(400)]


def joined(library: str, scenario: Callable[[int], Any], meeting: Meeting) -> Any:
    if library:
        softverbs.play(library)
    meeting.join(world_size=3)
    return scenario(meeting.rank)


def run(library: str, scenario: Callable[[int], Any]) -> list[Any]:
    return run_group(
        partial(joined, library, scenario),
        3,
        dynamic=True,
        gpu=True,
        transport="verbs",
        environment={"SOFTCUDA_DMABUF": "1"},
        timeout=300.0,
        rpc_timeout=60,
    )


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    return softverbs.library(tmp_path_factory.mktemp("softverbs"))


def counters() -> list[dict[str, int]]:
    return [rpc.rpc_sync(f"worker{rank}", rpc.counters) for rank in range(3)]


def trained(cases: Sequence[tuple[int, torch.device]]) -> int:
    """Models of ``test_wrap_gpu``, and where their caller's tensors are. Returns how many bytes all workers have written."""
    for case, here in cases:
        make, placement, shape, classes = test_wrap_gpu.CASES[case]
        model, twin = test_wrap_gpu.both(make, placement)
        data = test_wrap_gpu.batches(4, *shape, classes=classes)
        test_wrap_gpu.steps(model, twin, data, here, test_wrap_gpu.OPTIMIZERS["momentum"])
    return sum(each["bytes_direct"] for each in counters())


def late() -> int:
    test_wrap_gpu_streams.late_streams(steps=3)
    test_wrap_gpu_streams.slots_that_are_read_late()
    found = counters()
    assert sum(each.get("gpu_posts_behind", 0) for each in found) > 0
    return sum(each["bytes_direct"] for each in found)


def on_gpus() -> int:
    return trained([(0, gpu.device()), (3, gpu.device())])


def from_the_cpu() -> int:
    """And to it: copies between host memory and a peer's GPU."""
    return trained([(3, CPU), (1, CPU)])


@pytest.mark.parametrize("body", [on_gpus, from_the_cpu, late], ids=lambda body: body.__name__)
def test_gpu_to_gpu(body: Callable[[], int], library: str, record_property: Callable[[str, object], None]) -> None:
    before = packets.counters()
    nbytes = results(run(library, partial(on_driver, body)))[0]
    sent = packets.counters() - before
    record_property("bytes_direct", nbytes)
    assert nbytes > 0 and sent["sent_pkts"] >= packets.needed(nbytes)


def test_through_host_memory() -> None:
    results(run("", partial(on_driver, partial(trained, [(0, CPU)]))))


def test_a_worker_is_killed_in_mid_step(library: str) -> None:
    outcomes = run(library, test_wrap_gpu_streams.killed)
    assert not outcomes[0].error, outcomes[0].text
    assert outcomes[1].exit_code == -9
    assert outcomes[2].result == "left", outcomes[2].text
