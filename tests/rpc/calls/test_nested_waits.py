"""Waits inside waits, and waits that end by an exception: ``links/polling/progress``."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from rdmarpc import transport
from rdmarpc.links.polling.progress import Progress
from rdmarpc.transport import Poller

T = 20.0


@pytest.fixture
def progress() -> Iterator[Progress]:
    with transport.open_device("shm") as device:
        poller = Poller(device.memory, device.port)
        yield Progress(poller)
        poller.close()


class Answer:
    def __init__(self, *, done: bool) -> None:
        self.done = done


def test_a_thread_of_the_pool_waits_until_its_outer_wait_is_over(progress: Progress) -> None:
    """A finalizer that waits may run in the midst of another wait. A thread that counts as running can hold up the pool."""
    number = progress.here.pool = progress.new_number()
    found = []

    class Outer:
        @property
        def done(self) -> bool:
            if not found:
                progress.wait_for(Answer(done=True), time.monotonic() + T)
                found.append(number in progress.waiting)
            return True

    progress.wait_for(Outer(), time.monotonic() + T)
    assert found == [True] and not progress.waiting


def test_jobs_that_came_with_the_answer_are_offered_though_a_handler_raises(progress: Progress) -> None:
    answer, offers = Answer(done=False), []

    def read(row: int, fresh: int) -> None:
        answer.done = True
        progress.jobs.append(lambda: None)

    def offer() -> None:
        offers.append(len(progress.jobs))
        if len(offers) == 1:
            raise KeyboardInterrupt  # as if it had come just before

    progress.read, progress.offer = read, offer
    progress.poller.kick()
    with pytest.raises(KeyboardInterrupt):
        progress.wait_for(answer, time.monotonic() + T)
    assert offers == [1, 1]
