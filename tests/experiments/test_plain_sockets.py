"""The plain connection that the benchmark measures beside ``tcp``: what it moves, and its end. No time is judged."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from rdmarpc.experiments.latency.rows import time_row
from rdmarpc.experiments.latency.sockets import Sockets

WAIT_S = 60


@pytest.fixture
def ends() -> Iterator[tuple[Sockets, Sockets]]:
    links = multiprocessing.get_context("spawn").Pipe()
    with ThreadPoolExecutor(2) as threads:
        made = [threads.submit(Sockets, link, first) for link, first in zip(links, (True, False))]
        first, second = (each.result(WAIT_S) for each in made)
    for link in links:
        link.close()
    yield first, second
    first.close()
    second.close()


WAYS = [Sockets.compiled, Sockets.python]


@pytest.mark.parametrize("nbytes", [4, 3 << 20])
@pytest.mark.parametrize("way", WAYS)
def test_both_ends_measure_a_way(way: Callable[[Sockets, int, int], float], nbytes: int, ends: tuple[Sockets, Sockets]) -> None:
    with ThreadPoolExecutor(1) as threads:
        there = threads.submit(way, ends[1], nbytes, 2)
        assert way(ends[0], nbytes, 2) > 0
        assert there.result(WAIT_S) > 0


@pytest.mark.parametrize("way", WAYS)
def test_an_end_that_has_gone_is_an_error(way: Callable[[Sockets, int, int], float], ends: tuple[Sockets, Sockets]) -> None:
    ends[0].close()
    with pytest.raises(ConnectionError):
        way(ends[1], 4, 2)


def test_a_row_has_both_beside_it() -> None:
    whole = dict.fromkeys((("one_way", 4, what) for what in ("floor", "rdmarpc", "torch_rpc")), 2.0)
    row = time_row("one_way", 4, whole | {("one_way", 4, "compiled_socket"): 3.0, ("one_way", 4, "python_socket"): 5.0})
    assert (row["compiled_socket_us"], row["python_socket_us"]) == (3.0, 5.0)
    assert time_row("one_way", 4, whole)["compiled_socket_us"] is None
