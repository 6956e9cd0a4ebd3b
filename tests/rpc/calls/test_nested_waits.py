"""Waits inside waits, and waits that end by an exception: ``polling/role``."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from rdmarpc import transport
from rdmarpc.polling.role import Role
from rdmarpc.transport import Poller

T = 20.0


@pytest.fixture
def role() -> Iterator[Role]:
    with transport.open_device("shm") as device:
        poller = Poller(device.memory, device.port)
        yield Role(poller)
        poller.close()


class Answer:
    def __init__(self, *, done: bool) -> None:
        self.done = done


def test_a_thread_of_the_pool_waits_until_its_outer_wait_is_over(role: Role) -> None:
    """A finalizer that waits may run in the midst of another wait. A thread that counts as running can hold up the pool."""
    number = role.here.pool = role.new_number()
    found = []

    class Outer:
        @property
        def done(self) -> bool:
            if not found:
                role.wait_for(Answer(done=True), time.monotonic() + T)
                found.append(number in role.waiting)
            return True

    role.wait_for(Outer(), time.monotonic() + T)
    assert found == [True] and not role.waiting


def test_jobs_that_came_with_the_answer_are_offered_though_a_handler_raises(role: Role) -> None:
    answer, offers = Answer(done=False), []

    def read(row: int, fresh: int) -> None:
        answer.done = True
        role.jobs.append(lambda: None)

    def offer() -> None:
        offers.append(len(role.jobs))
        if len(offers) == 1:
            raise KeyboardInterrupt  # as if it had come just before

    role.read, role.offer = read, offer
    role.poller.kick()
    with pytest.raises(KeyboardInterrupt):
        role.wait_for(answer, time.monotonic() + T)
    assert offers == [1, 1]
