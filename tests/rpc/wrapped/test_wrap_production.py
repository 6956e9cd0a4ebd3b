"""Large tensors are made in the consumer's memory: same bits, no copy of the payload."""

from __future__ import annotations

import gc
import threading
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
import wrap_models as models
from test_wrap import assert_same_state, both, drive

import rdmarpc as rpc
from rdmarpc.transport.tcp.channel import TcpChannel

WIDTH, BATCH = 1024, 512  # 2 MiB a tensor


def steps(model, twin, count: int, kept: list | None = None) -> list[dict[str, int]]:
    """Train both, compare every loss bit for bit; the model's counters after each step."""
    mine, theirs = torch.optim.SGD(model.parameters(), 0.01), torch.optim.SGD(twin.parameters(), 0.01)
    generator = torch.Generator().manual_seed(2)
    seen = []
    for number in range(count):
        x = torch.randn(BATCH, WIDTH, generator=generator)
        losses = []
        for net, optimizer in ((model, mine), (twin, theirs)):
            optimizer.zero_grad()
            loss = net(x).pow(2).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[0] == losses[1], f"step {number}"
        seen.append(model.counters())
    assert_same_state(model, twin)
    return seen


def grown(seen: list[dict[str, int]], key: str) -> int:
    """By how much a counter grew in every step from the third to the last, if it was always the same."""
    growth = {after.get(key, 0) - before.get(key, 0) for before, after in pairwise(seen[1:])}
    assert len(growth) == 1, growth
    return growth.pop()


def produced(make, placement, expected: int, notes: dict[str, str]) -> None:
    model, twin = both(partial(make, WIDTH), placement)
    seen = steps(model, twin, 6)
    assert seen[0].get("bytes_produced", 0) == 0  # the first step records
    assert grown(seen, "bytes_produced") == expected * 4 * BATCH * WIDTH
    for key in ("bytes_staged", "registrations", "rpc_messages", "production_misses"):
        assert grown(seen, key) == 0, key
    found = model.production()
    assert found.keys() == notes.keys()
    for name, note in notes.items():
        assert note in found[name], (name, found[name])
    model.close()


CASES = [
    # made by a linear layer, then changed in place and reshaped: the storage is the linear layer's
    (models.Ends, {"body": "worker1", "head": "worker2"}, 1, {"body": "operation 2 of Linear, aten.addmm"}),
    # one source, two consumers: made in one's slot, written to the other
    (models.Fan, {"trunk": "worker1", "left": "worker2", "right": "worker3"}, 1, {"trunk": "of Tanh, aten.tanh"}),
    # the joining code belongs to nobody's module
    (models.Joined, {"one": "worker1", "two": "worker2"}, 1, {"mul()": "operation 1, aten.mul"}),
    # a consumer that writes into what it gets, and an operation that cannot write into given memory
    (models.Spoiled, {"one": "worker1", "two": "worker2", "three": "worker1"}, 0, {"two": "aten.native_layer_norm"}),
]


@pytest.mark.parametrize("make, placement, expected, notes", CASES)
def test_made_in_place(make, placement, expected, notes):
    drive(partial(produced, make, placement, expected, notes), 4)


def register_only() -> None:
    TcpChannel.registered_only = True


def registered() -> None:
    """As on a device that only sends registered memory: made there, and written from there (nothing can be mapped on tcp)."""
    for worker in ("worker0", "worker1", "worker2"):
        rpc.rpc_sync(worker, register_only)
    model, twin = both(partial(models.Ends, WIDTH), {"body": "worker1", "head": "worker2"})
    seen = steps(model, twin, 6)
    assert grown(seen, "bytes_produced") == 4 * BATCH * WIDTH
    assert grown(seen, "production_misses") == 0
    keeper, twin = both(partial(models.Hoarding, WIDTH), {"one": "worker1", "two": "worker2"}, depth=3)
    steps(keeper, twin, 8)
    keeper.close()
    model.close()


def test_made_in_registered_memory():
    drive(registered, 3, transport="tcp")


def changing() -> None:
    # Another operation makes the value in every other step: counted, still right, and given up after some misses.
    model, twin = both(partial(models.Alternating, WIDTH), {"one": "worker1", "two": "worker2"})
    seen = steps(model, twin, 24)
    assert 1 <= seen[-1]["production_misses"] <= 8
    assert seen[-1]["production_misses"] == seen[-4]["production_misses"]
    # A part that keeps what it made for ever gets no more slots than leave one free.
    keeper, twin = both(partial(models.Hoarding, WIDTH), {"one": "worker1", "two": "worker2"}, depth=3)
    steps(keeper, twin, 8)
    keeper.close()
    model.close()


def test_other_operations_and_kept_tensors():
    drive(changing, 3)


def staging() -> None:
    model, twin = both(partial(models.Ends, WIDTH), {"body": "worker1", "head": "worker2"}, staging="always")
    seen = steps(model, twin, 5)
    assert grown(seen, "bytes_produced") == 0
    # x, body, the gradient of body; the result and its gradient
    assert grown(seen, "bytes_staged") == 3 * 4 * BATCH * WIDTH + 2 * 4 * BATCH * 8
    model.close()
    with pytest.raises(ValueError, match="traced"):
        rpc.wrap(twin, {"body": "worker1"}, staging="sometimes")


def test_staging_always_is_the_same_path_with_a_copy():
    drive(staging, 3)


def modes() -> None:
    # Training and evaluation are traced each for itself; a forward without gradients frees its slots at once.
    model, twin = both(partial(models.Ends, WIDTH), {"body": "worker1", "head": "worker2"})
    generator = torch.Generator().manual_seed(3)
    for number in range(8):
        x = torch.randn(BATCH, WIDTH, generator=generator)
        if number % 2:
            with torch.no_grad():
                assert torch.equal(model.eval()(x), twin.eval()(x))
            continue
        ours, theirs = model.train()(x), twin.train()(x)
        assert torch.equal(ours, theirs)
        F.mse_loss(ours, torch.zeros_like(ours)).backward()
        F.mse_loss(theirs, torch.zeros_like(theirs)).backward()
    assert model.counters()["bytes_produced"] == (3 + 3) * 4 * BATCH * WIDTH
    model.close()


def test_training_and_evaluation():
    drive(modes, 3)


def at_the_caller() -> None:
    # What this process makes is made in the worker's memory too; modules are left as they were.
    model, twin = both(partial(models.Ends, WIDTH), {"head": "worker1"})
    seen = steps(model, twin, 5)
    assert grown(seen, "bytes_produced") == 4 * BATCH * WIDTH
    assert "aten.addmm" in model.production()["body"]
    assert all("forward" not in module.__dict__ for module in model.modules())
    model.close()
    # What a worker made in our memory, written by what runs here: tanh needs its result for the backward.
    model, twin = both(partial(models.Written, WIDTH), {"one": "worker1"})
    for number in range(3):
        x = torch.randn(BATCH, WIDTH)
        assert torch.equal(model(x), twin(x))
        if number == 0:
            model(x).sum().backward()
    models.Written.spoil = True
    result = model(x)
    with pytest.raises(rpc.NotSupported, match="one was written in place by 'worker0'"):
        result.sum().backward()
    models.Written.spoil = False
    assert torch.equal(model(x), twin(x))
    model.close()


def test_the_caller_makes_and_takes():
    drive(at_the_caller, 2)


def churn() -> None:
    # Much comes to every worker at once, of the size of slots, into memory that was given back.
    sent = [torch.full((BATCH * WIDTH + 16,), float(number)) for number in range(12)]
    for worker in ("worker1", "worker2"):
        rpc.rpc_sync(worker, gc.collect)
        assert torch.equal(rpc.rpc_sync(worker, torch.cat, args=(sent,)), torch.cat(sent))


def closing() -> None:
    # Whoever keeps what was made in a slot keeps it when the model is closed.
    model, twin = both(partial(models.Ends, WIDTH), {"head": "worker1"})
    kept = []
    model.body.register_forward_hook(lambda module, args, result: kept.append((result, result.detach().clone())))
    steps(model, twin, 4)
    model.close()
    # A part that still runs when the model is closed writes into no slot that was given back.
    model = rpc.wrap(models.Late(WIDTH), {"one": "worker2", "two": "worker1"}, timeout=2.0)
    with pytest.raises(rpc.TransferTimeout):
        model(torch.ones(BATCH, WIDTH))
    model.close()
    churn()
    assert len(kept) == 4 and all(torch.equal(old, copy) for old, copy in kept)


def threads() -> int:
    """Of executors, in this process."""
    return sum(thread.name.startswith("rdmarpc-executor") for thread in threading.enumerate())


def dropped() -> None:
    """What nobody closes, and nobody has any more, is closed by the next ones; what somebody has stays, by a parameter, too."""
    model, twin = both(partial(models.Ends, WIDTH), {"head": "worker1"})
    steps(model, twin, 2)
    result = model(torch.ones(BATCH, WIDTH))
    values = result.detach().clone()
    parameter = next(p for p in model.head.parameters())
    del model
    for number in range(70):  # more than a device has bells for
        other = rpc.wrap(models.Ends(WIDTH), {"head": "worker1"})
        loss = other(torch.ones(BATCH, WIDTH)).sum()
        loss.backward() if number % 2 else None
    del other, loss
    assert torch.equal(result, values)
    assert parameter.detach().norm() > 0
    del result
    gc.collect()
    rpc.wrap(models.Ends(WIDTH), {"head": "worker1"}).close()
    assert rpc.rpc_sync("worker1", threads) == 1  # of the first one


def test_models_that_are_dropped_are_closed():
    drive(dropped, 3)


def test_closed_models_leave_nothing_half_done():
    drive(closing, 3)
