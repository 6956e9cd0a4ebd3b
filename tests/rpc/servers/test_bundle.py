"""Bundles, and the two protocols over them, with both ends in this process."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from timing import eventually

from rdmarpc.servers.bundle import (
    ALWAYS,
    GRADIENT,
    PRESENT,
    TRACED,
    WEIGHT,
    Bundle,
    BundleInlet,
    BundleOutlet,
    Edge,
    Header,
    Room,
    Station,
    gradient_note,
)
from rdmarpc.servers.server import Server
from rdmarpc.servers.servers import Trainer
from rdmarpc.transport import Channel, Device, NotSupported, PeerLost, RdmaError, RemoteRegion, TransferTimeout, open_device

Shape = tuple[int, ...]
T = 20.0


def bundle(shapes: list[Shape], kind: str = GRADIENT, source: str = "w", target: str = "s", **options: Any) -> Bundle:
    dtype = options.pop("dtype", torch.float32)
    strides = options.pop("strides", [torch.empty(shape).stride() for shape in shapes])
    first = options.pop("first", 1)
    edges = [Edge(first + at, kind, f"p{at}", source, target, shape, dtype, strides[at]) for at, shape in enumerate(shapes)]
    return Bundle(edges, **options)


# -- layout


@given(st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=12), st.integers(0, 100), st.data())
def test_runs_cover_the_tensors_asked_for_and_no_other(shapes, note, data):
    laid = bundle(shapes, note=note)
    assert laid.front % 64 == 0 and laid.front >= 64 + note and all(offset % 64 == 0 for offset in laid.offsets)
    ends = [offset + edge.nbytes for offset, edge in zip(laid.offsets, laid.edges)]
    assert all(end <= start for end, start in zip([laid.front, *ends], [*laid.offsets, laid.nbytes]))
    present = sorted(data.draw(st.sets(st.integers(0, len(shapes) - 1))))
    covered = {byte for start, end in laid.runs(present) for byte in range(start, end)}
    for at, (start, end) in enumerate(zip(laid.offsets, ends)):
        assert covered.issuperset(range(start, end)) if at in present else covered.isdisjoint(range(start, end))
    assert len(laid.runs(range(len(shapes)))) == (1 if any(edge.nbytes for edge in laid.edges) else 0)


# -- two ends


@dataclass
class Ends:
    """``here`` and ``there`` are the stations of w and s."""

    here: Station
    there: Station

    def outlet(self, laid: Bundle, inlet: BundleInlet) -> BundleOutlet:
        descriptor, number = inlet.offer()
        return BundleOutlet(self.here.device, self.here.channel("s"), laid, RemoteRegion.load(descriptor), number)


@pytest.fixture(params=["shm", "tcp"])
def devices(request: pytest.FixtureRequest) -> Iterator[Callable[[int], list[tuple[Device, Channel, Device, Channel]]]]:
    """So many pairs of a device and the one of s, connected."""
    opened: list[Device] = []

    def connect(count: int) -> list[tuple[Device, Channel, Device, Channel]]:
        there = open_device(request.param)
        opened.append(there)
        found = []
        for _ in range(count):
            here = open_device(request.param)
            opened.append(here)
            channel = here.connect(there.address, timeout=T)
            found.append((here, channel, there, there.accept(timeout=T)))
        return found

    yield connect
    for device in reversed(opened):
        device.close()


@pytest.fixture
def ends(devices: Any) -> Iterator[Ends]:
    [(here, to_s, there, to_w)] = devices(1)
    made = Ends(Station("w", here, {"s": to_s}.__getitem__, T), Station("s", there, {"w": to_w}.__getitem__, T))
    yield made
    made.here.close()
    made.there.close()


def staged(station: Station) -> int:
    return station.device.counters()["bytes_staged"]


def test_loose_tensors_are_traced_and_a_miss_is_copied(ends: Ends) -> None:
    channels_last = torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last).stride()
    shapes: list[Shape] = [(3, 4), (2, 3, 4, 5), (), (0, 7)]
    laid = bundle(shapes, strides=[(4, 1), channels_last, (), (7, 1)], note=16)
    came: list[Header] = []
    inlet = BundleInlet(ends.there, laid, came.append)
    outlet = ends.outlet(laid, inlet)

    def send(tensors: list[torch.Tensor], present: tuple[int, ...], staging: str, sequence: int) -> int:
        """Bytes staged by it."""
        before, posts = staged(ends.here), ends.here.device.counters()["posts"]
        outlet.send_loose(Header(0, sequence), bytes([sequence] * 16), present, tensors, staging)
        outlet.finish(T)
        deadline = time.monotonic() + T
        while not came and time.monotonic() < deadline:
            ends.there.poll(0.1)
        assert [header.step for header in came] == [sequence] and bytes(inlet.room.note[:16]) == bytes([sequence] * 16)
        came.clear()
        for at, tensor in zip(present, tensors):
            assert torch.equal(inlet.room.tensors[at], tensor)
        assert ends.here.device.counters()["posts"] == posts + 1
        return staged(ends.here) - before

    def fresh() -> list[torch.Tensor]:
        made = [torch.randn(shape) for shape in shapes]
        made[1] = made[1].to(memory_format=torch.channels_last)
        return made

    everything, some = (0, 1, 2, 3), (1, 2)
    total = sum(edge.nbytes for edge in laid.edges)
    assert send(fresh(), everything, TRACED, 1) == total
    assert send(fresh(), everything, TRACED, 2) == 0
    assert send(fresh()[1:3], some, TRACED, 3) == laid.edges[1].nbytes + laid.edges[2].nbytes
    assert send(fresh()[1:3], some, TRACED, 4) == 0
    assert send(fresh(), everything, TRACED, 5) == 0
    # A tensor in another memory order, one with gaps, one whose sign is still to be changed: each is copied alone.
    tensors = fresh()
    assert send([tensors[0].t().contiguous().t(), *tensors[1:]], everything, TRACED, 6) == laid.edges[0].nbytes
    assert send([torch.randn(3, 8)[:, ::2], *tensors[1:]], everything, TRACED, 7) == laid.edges[0].nbytes
    negated = torch.complex(torch.randn(3, 4), torch.randn(3, 4)).conj().imag.contiguous().clone()
    assert send([torch._neg_view(negated), *tensors[1:]], everything, TRACED, 8) == laid.edges[0].nbytes
    assert send([tensors[0], tensors[1].contiguous(), *tensors[2:]], everything, TRACED, 9) == laid.edges[1].nbytes
    assert send(fresh(), everything, TRACED, 10) == 0
    for sequence in (11, 12):
        assert send(fresh(), everything, ALWAYS, sequence) == total
    assert send(fresh(), everything, TRACED, 13) == 0
    with pytest.raises(NotSupported, match="sparse"):
        outlet.send_loose(Header(0, 14), bytes(16), everything, [torch.randn(3, 4).to_sparse(), *tensors[1:]], TRACED)


def test_sources_are_let_go_when_they_were_written(ends: Ends) -> None:
    laid = bundle([(1000,)])
    inlet = BundleInlet(ends.there, laid, lambda header: None)
    outlet = ends.outlet(laid, inlet)
    died = []

    class Watched(torch.Tensor):
        def __del__(self) -> None:
            died.append(1)

    for _ in range(3):
        tensor = torch.randn(1000).as_subclass(Watched)
        outlet.send_loose(Header(0, 1), b"", (0,), [tensor], TRACED)
        outlet.finish(T)
        died.clear()
        del tensor
        eventually(lambda: bool(died))  # a thread of the device may still be on its way out
        ends.there.poll(1.0)


def test_rooms_send_what_was_asked_for(ends: Ends) -> None:
    shapes: list[Shape] = [(5,), (64, 3), (7, 2), (1,), (9,)]
    laid = bundle(shapes, dtype=torch.float64)
    came: list[Header] = []
    inlet = BundleInlet(ends.there, laid, came.append)
    outlet, room = ends.outlet(laid, inlet), Room(ends.here.device, laid)
    for sequence, present in enumerate([(0, 1, 2, 3, 4), (0, 2, 3), (4,), ()], 1):
        for tensor in room.tensors:
            tensor.normal_()
        before = [tensor.clone() for tensor in inlet.room.tensors]
        send = outlet.send_copies if sequence % 2 else outlet.send_room
        send(Header(0, sequence), room, present)
        outlet.finish(T)
        deadline = time.monotonic() + T
        while len(came) < sequence and time.monotonic() < deadline:
            ends.there.poll(0.1)
        for at, tensor in enumerate(inlet.room.tensors):
            expected = room.tensors[at] if at in present else before[at]
            assert sequence == 1 or torch.equal(tensor, expected), at
    assert len({tensor.untyped_storage().data_ptr() for tensor in room.tensors}) == len(shapes)
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in room.tensors)


# -- servers and trainers

SHAPES: list[Shape] = [(17,), (33, 40), (3, 5)]


class Adding(torch.optim.Optimizer):
    """parameter += gradient, after a while now and then."""

    def __init__(self, params: Any, rate: float = 1.0) -> None:
        super().__init__(params, {"rate": rate})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    with torch.no_grad():
                        parameter.add_(parameter.grad, alpha=group["rate"])
        if random.random() < 0.02:
            time.sleep(random.random() * 0.01)


class World:
    """``count`` trainers and one server, all of them connected and started."""

    def __init__(self, pairs: list[tuple[Device, Channel, Device, Channel]], timeout: float = T) -> None:
        self.workers = [f"w{at}" for at in range(len(pairs))]
        channels = {name: pair[3] for name, pair in zip(self.workers, pairs)}
        self.server = Server(Station("s", pairs[0][2], channels.__getitem__, timeout), self.workers)
        self.server.start()
        self.trainers: list[Trainer] = []
        for name, (device, channel, _, _) in zip(self.workers, pairs):
            weights = bundle(SHAPES, WEIGHT, "s", name, first=1)
            gradients = bundle(SHAPES[:2], GRADIENT, name, "s", first=10, note=gradient_note(2))

            def explain(server: str) -> BaseException:
                # The alarm comes when the error is there.
                assert self.server.end.error is not None
                return self.server.end.error

            trainer = Trainer(Station(name, device, {"s": channel}.__getitem__, timeout), explain)
            half = trainer.add(weights, gradients)
            half.connect(self.server.ask("enter", name, weights, gradients))
            self.trainers.append(trainer)
        self.server.ask("fill", [torch.zeros(shape) for shape in SHAPES])
        for name, trainer in zip(self.workers, self.trainers):
            self.server.ask("optimizer", 1, Adding, {"rate": 1.0}, [{"params": [0, 1, 2], "rate": 1.0}], torch.float32)
            half = trainer.halves["s"]
            self.server.ask("connect", name, half.inlet.offer(), half.alarm)

    def close(self) -> None:
        self.server.close()
        assert not self.server.is_alive()
        for trainer in self.trainers:
            trainer.close()


@pytest.fixture
def world(devices: Any) -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def make(count: int, **options: Any) -> World:
        made.append(World(devices(count), **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_slow_and_fast_ends_never_lose_or_tear_anything(world: Callable[..., World]) -> None:
    """Every element of every tensor is what all steps before add up to, at every worker, in every step."""
    steps = 600
    made = world(3)
    errors: list[BaseException] = []

    def train(at: int, trainer: Trainer) -> None:
        generator = random.Random(at)
        expected = [0.0, 0.0, 0.0]
        half = trainer.halves["s"]
        try:
            for step in range(steps):
                trainer.ready()
                for value, tensor in zip(expected, half.inlet.room.tensors):
                    assert bool((tensor == value).all()), (at, step, value, tensor)
                if generator.random() < 0.03:
                    time.sleep(generator.random() * 0.01)
                # Everybody leaves out the second gradient in some steps, one worker in others; the third has no place.
                present = (0,) if step % 7 == 0 or (step % 5 == 0 and at == 1) else (0, 1)
                marks = bytes(PRESENT if number in present else 0 for number in range(2))
                grads = [torch.full(SHAPES[number], float(step % 3 + at + number)) for number in present]
                half.send(1, marks, present, grads, [1.0 + step % 2], TRACED if step % 50 else ALWAYS)
                trainer.finish()
                for grad in grads:
                    grad.fill_(-1e9)  # they are ours again
                for number in range(2):
                    givers = [w for w in range(3) if number == 0 or not (step % 7 == 0 or (step % 5 == 0 and w == 1))]
                    expected[number] += (1.0 + step % 2) * sum(step % 3 + giver + number for giver in givers)
            trainer.pull()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=train, args=item) for item in enumerate(made.trainers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
        assert not thread.is_alive()
    if errors:
        raise errors[0]
    assert made.server.steps == steps


def send(trainer: Trainer, optimizer: int = 1, rate: float = 1.0) -> None:
    half = trainer.halves["s"]
    half.send(optimizer, b"\1\1", (0, 1), [torch.ones(shape) for shape in SHAPES[:2]], [rate], TRACED)
    trainer.finish()


def test_a_write_out_of_turn_is_an_error_of_everybody(world: Callable[..., World]) -> None:
    made = world(2)
    first, second = made.trainers
    for trainer in made.trainers:
        trainer.pull()
    send(first)
    send(first)  # without waiting for the weights: the server still has to read the gradients
    send(second)
    with pytest.raises(RdmaError, match=r"at once|were due"):
        second.pull()
    with pytest.raises(RdmaError, match=r"at once|were due"):
        first.pull()
    with pytest.raises(RdmaError, match=r"at once|were due"):  # it has ended
        made.server.ask("counters")


@pytest.mark.parametrize("devices", ["shm"], indirect=True)
def test_workers_that_disagree_are_told(world: Callable[..., World]) -> None:
    for options, says in (({"rate": 2.0}, "different hyperparameters"), ({"optimizer": 2}, "different optimizers")):
        made = world(2)
        for trainer in made.trainers:
            trainer.ready()
        send(made.trainers[0])
        send(made.trainers[1], **options)
        for trainer in made.trainers:
            with pytest.raises(NotSupported, match=says):
                trainer.pull()


@pytest.mark.parametrize("devices", ["shm"], indirect=True)
@pytest.mark.parametrize("first", [True, False], ids=["leaves first", "leaves later"])
def test_who_goes_on_when_another_has_left_is_told(world: Callable[..., World], first: bool) -> None:
    made = world(2)
    for trainer in made.trainers:
        trainer.ready()
    if first:
        made.server.ask("leave", "w0", "", "", "")
    send(made.trainers[1])
    if not first:
        made.server.ask("leave", "w0", "", "", "")
    with pytest.raises(RdmaError, match="'w0' has closed the model"):
        made.trainers[1].pull()


@pytest.mark.parametrize("devices", ["shm"], indirect=True)
def test_a_wait_ends_and_can_be_taken_up_again(world: Callable[..., World]) -> None:
    made = world(2)
    for trainer in made.trainers:
        trainer.ready()
    send(made.trainers[0])
    made.trainers[0].timeout = 1.0
    with pytest.raises(TransferTimeout, match="weights of 's' did not come"):
        made.trainers[0].pull()
    made.trainers[0].timeout = T
    send(made.trainers[1])
    for trainer in made.trainers:
        trainer.pull()
        assert bool((trainer.halves["s"].inlet.room.tensors[1] == 2.0).all())


def test_a_server_that_is_lost_is_named(world: Callable[..., World]) -> None:
    """Its channel knows an address only."""
    (trainer,) = world(1).trainers
    trainer.ready()
    trainer.station.peers["s"].abort()
    with pytest.raises(PeerLost, match="worker 's' is lost") as caught:
        send(trainer)
    assert caught.value.peer == "s"
