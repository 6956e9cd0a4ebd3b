"""Workloads that train: a wrapped model, and parameters at servers, beside the same model in this process."""

from __future__ import annotations

import copy
import os
import random
from typing import Any

import torch
import torch.nn.functional as F

import rdmarpc as rpc

from .board import LAST_STEP, WORKING
from .diary import same
from .workloads import Net, Scene, calls, name_of

CHUNKS = 4


def _twins() -> tuple[Net, Net]:
    torch.manual_seed(1)
    net = Net()
    return net, copy.deepcopy(net)


def _batch(number: int, worker: int, size: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * number + worker)
    return torch.randn(size, 20, generator=generator), torch.randint(0, 4, (size,), generator=generator)


def wrap(scene: Scene, chance: random.Random) -> None:
    """Worker 0 trains a model over all workers; the others have parts of it, and call each other now and then."""
    if scene.rank:
        calls(scene, chance)
        return
    everybody = range(scene.trial.size)
    twins = _twins()
    model = None
    with scene.diary.doing("wrap", *everybody):
        model = rpc.wrap(twins[0], {"first": name_of(1), "second": name_of(2), "third": name_of(1)})
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.05, momentum=0.9) for each in (model, twins[1])]
        for number, size in enumerate((8, 8, 4, 8, 4)):
            _step(model, twins[1], optimizers, number, size)
    scene.diary.board.tell(0, WORKING, os.getpid())
    number, going = 5, model is not None
    while going and scene.going:
        number, going = number + 1, False
        with scene.diary.doing("train", *everybody):
            _step(model, twins[1], optimizers, number, chance.choice((8, 8, 4)))
            going = True
    if going:
        with scene.diary.doing("train", *everybody):
            for key, value in twins[1].state_dict().items():
                same(model.state_dict()[key], value, key)
    if model is not None:
        with scene.diary.doing("end", *everybody):
            model.close()
    _alone(scene, chance)


def _step(model: Any, twin: Net, optimizers: list[Any], number: int, size: int) -> None:
    """The same at both; every third in micro-batches."""
    x, y = _batch(number, 0, size)
    for optimizer in optimizers:
        optimizer.zero_grad()
    if number % 3 == 0:
        model.forward_backward(F.cross_entropy, x, target=y, chunks=CHUNKS)
        for part, target in zip(x.chunk(CHUNKS), y.chunk(CHUNKS)):
            (F.cross_entropy(twin(part), target) * (len(part) / len(x))).backward()
    else:
        loss, expected = F.cross_entropy(model(x), y), F.cross_entropy(twin(x), y)
        loss.backward()
        expected.backward()
        same(loss.item(), expected.item(), f"the loss of step {number}")
    for optimizer in optimizers:
        optimizer.step()


def _alone(scene: Scene, chance: random.Random) -> None:
    """When there is nothing left to train, the survivors call each other."""
    while scene.going:
        calls(scene, chance)


def serve(scene: Scene, chance: random.Random) -> None:
    """Workers 0 and 1 train, 2 and 3 keep the parameters; all call each other besides."""
    trainers, servers = (0, 1), (2, 3)
    if scene.rank in servers:
        calls(scene, chance)
        return
    net, twin = _twins()
    served = None
    with scene.diary.doing("serve", *trainers, *servers):
        served = rpc.serve(
            net,
            [name_of(rank) for rank in servers],
            torch.optim.SGD,
            lr=0.05,
            workers=[name_of(rank) for rank in trainers],
            timeout=20,
        )
    if served is None:
        _alone(scene, chance)
        return
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.05)
    board, number, failed = scene.diary.board, 0, False
    # The trainers step together, so the first says which step is the last: one that the other cannot be past.
    while not failed and not 0 < board.get(LAST_STEP) <= number:
        number, failed = number + 1, True
        if scene.rank == 0 and not scene.going and not board.get(LAST_STEP):
            board.put(LAST_STEP, number + 1)
        with scene.diary.doing("serve", *trainers, *servers):
            x, y = _batch(number, scene.rank)
            served.optimizer.zero_grad()
            loss = F.cross_entropy(served(x), y)
            loss.backward()
            served.optimizer.step()
            gradients = []
            for worker in trainers:
                twin.zero_grad()
                x, y = _batch(number, worker)
                expected = F.cross_entropy(twin(x), y)
                expected.backward()
                if worker == scene.rank:
                    same(loss.item(), expected.item(), f"the loss of step {number}")
                gradients.append([parameter.grad for parameter in twin.parameters()])
            for parameter, first, second in zip(twin.parameters(), *gradients):
                parameter.grad = first + second
            optimizer.step()
            failed = False
    with scene.diary.doing("end", *trainers, *servers):
        served.close()
    _alone(scene, chance)
