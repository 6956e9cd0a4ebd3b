"""The contract of ``Channel``, as ``test_contract*`` and ``test_end`` have it, over GPU memory on either side or both."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import test_contract
import test_contract_memory
import test_end
from cuda_peer import GpuPeer, as_pair
from transport_peer import State

pytestmark = pytest.mark.gpu

PLACES = [("gpu", "gpu"), ("cpu", "gpu"), ("gpu", "cpu")]
FAR = ("other", "gpu")
CASES: list[tuple[str, dict[str, Any]]] = [
    ("test_write_then_read_back", {}),
    ("test_write_from_the_accepting_side", {}),
    ("test_both_directions_at_once_with_more_than_any_buffer_holds", {}),
    ("test_any_alignment_and_nothing_beside_it", {}),
    ("test_a_list_with_reads_and_writes_and_one_notification", {}),
    ("test_rebind_exchanges_one_source", {}),
    ("test_an_unbound_tensor_is_let_go", {}),
    ("test_empty_transfers", {}),
    ("test_notifications_count_and_do_not_depend_on_order", {}),
    ("test_sides_that_do_not_fit", {}),
    *(("test_bad_descriptors_are_refused_and_the_channel_goes_on", {"write": write}) for write in (True, False)),
    ("test_one_bad_copy_in_a_list_means_no_notification", {}),
    ("test_growth_is_reachable_at_once", {}),
    ("test_what_was_posted_before_a_fence_is_counted_after_it", {"nbytes": 1000}),
    ("test_threads_share_a_channel", {}),
]
FAR_CASES = [case for case in CASES if case[0] in ("test_write_then_read_back", "test_threads_share_a_channel")]
ENDS: list[tuple[str, dict[str, Any]]] = [
    ("test_what_was_posted_before_close_arrives", {}),
    ("test_close_in_any_order", {"order": "ab ba a b"}),
    ("test_close_in_any_order", {"order": "ba b a ab"}),
    ("test_abort_by_the_writer", {}),
]


@pytest.fixture(scope="module")
def worker() -> Iterator[GpuPeer]:
    peer = GpuPeer()
    yield peer
    peer.stop()


def run(state: State, name: str, kwargs: dict[str, Any], places: tuple[str, str]) -> None:
    tests = vars(test_contract) | vars(test_contract_memory) | vars(test_end)
    as_pair(functools.partial(tests[name], **kwargs), places)


@pytest.mark.parametrize("places", PLACES, ids="-".join)
@pytest.mark.parametrize(("name", "kwargs"), CASES, ids=[name.removeprefix("test_") for name, _ in CASES])
def test_contract_over_gpus(worker: GpuPeer, name: str, kwargs: dict[str, Any], places: tuple[str, str]) -> None:
    worker.call(run, name, kwargs, places)


@pytest.mark.parametrize(("name", "kwargs"), FAR_CASES, ids=[name.removeprefix("test_") for name, _ in FAR_CASES])
def test_contract_from_gpu_to_gpu(worker: GpuPeer, name: str, kwargs: dict[str, Any]) -> None:
    worker.call(run, name, kwargs, FAR)


@pytest.mark.parametrize("places", PLACES[:2], ids="-".join)
@pytest.mark.parametrize(("name", "kwargs"), ENDS, ids=[name.removeprefix("test_") for name, _ in ENDS])
def test_end_over_gpus(worker: GpuPeer, name: str, kwargs: dict[str, Any], places: tuple[str, str]) -> None:
    worker.call(run, name, kwargs, places)
