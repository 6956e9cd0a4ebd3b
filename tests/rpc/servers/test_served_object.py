"""A served model is used as the original: whoever reads its parameters waits for them, what is written there is not lost."""

from __future__ import annotations

import copy
import inspect
import pickle
import time
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from group import results, run_group
from test_served import assert_same, batch, on_workers, twins
from torch import nn
from torch.optim import swa_utils

import rdmarpc as rpc
from rdmarpc.servers.model import ServedModel
from rdmarpc.servers.parameter import ServedParameter

SERVERS = ["worker1", "worker2"]


class Lazy(torch.optim.SGD):
    """Its weights come late."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        time.sleep(0.03)
        return super().step(closure)


def both(kind: type[torch.optim.Optimizer] = Lazy) -> tuple[Any, Any]:
    """(model, optimizer), served and alone."""
    net, twin = twins()
    return (served := rpc.serve(net, SERVERS[: 1 if kind is Lazy else 2], kind, lr=0.1), served.optimizer), (
        twin,
        torch.optim.SGD(twin.parameters(), lr=0.1),
    )


def step(model: Any, optimizer: Any, number: int) -> float:
    x, y = batch(number)
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def reading(rank: int) -> None:
    ours, theirs = both()
    kept = [(list(model.parameters()), model.last, model.tied.weight.detach()) for model, _ in (ours, theirs)]
    x = torch.randn(2, 8)
    readers = [
        lambda parameters, last, alias: [p.detach().clone() for p in parameters],
        lambda parameters, last, alias: [torch.stack([p.norm() for p in parameters])],
        lambda parameters, last, alias: [nn.utils.parameters_to_vector(parameters)],
        lambda parameters, last, alias: [last(x)],
        lambda parameters, last, alias: [p.data.sum() for p in parameters],
        lambda parameters, last, alias: list(last.state_dict().values()),
        lambda parameters, last, alias: torch._foreach_mul([p.detach() for p in parameters], 2.0),
        lambda parameters, last, alias: [torch.from_numpy(last.weight.detach().numpy().copy())],
        lambda parameters, last, alias: [alias.clone()],
        lambda parameters, last, alias: [pickle.loads(pickle.dumps(last)).weight],
        lambda parameters, last, alias: list(copy.deepcopy(last).parameters()),
    ]
    for number, read in enumerate(readers):
        found = []
        for (model, optimizer), (parameters, last, alias) in zip((ours, theirs), kept):
            step(model, optimizer, number)
            found.append(read(parameters, last, alias))
        for mine, other in zip(*found):
            assert torch.equal(mine, other), number
    assert_same(ours[0].state_dict(), theirs[0].state_dict())
    assert b"rdmarpc" not in pickle.dumps(ours[0])
    ours[0].close()


def writing(rank: int) -> None:
    ours, theirs = both(torch.optim.SGD)
    aliases = [[p.data for p in model.parameters()] for model, _ in (ours, theirs)]

    def in_place(model: Any, alias: Any) -> None:
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-0.1, 0.1)

    def data(model: Any, alias: Any) -> None:
        for p in model.parameters():
            p.data.mul_(0.5)

    def anew(model: Any, alias: Any) -> None:
        torch.manual_seed(3)
        nn.init.normal_(model.last.weight)
        model.features[0].reset_parameters()

    def part(model: Any, alias: Any) -> None:
        model.last.load_state_dict({"weight": torch.eye(8), "bias": torch.ones(8)})

    def aliased(model: Any, alias: Any) -> None:
        for tensor in alias:
            tensor.clamp_(-0.05, 0.05)

    for number, write in enumerate([in_place, data, anew, part, aliased, aliased, data]):
        for (model, optimizer), alias in zip((ours, theirs), aliases):
            step(model, optimizer, number)
            write(model, alias)
        assert step(*ours, 100 + number) == step(*theirs, 100 + number), write.__name__
        assert_same(ours[0].state_dict(), theirs[0].state_dict())
    del alias, aliases
    model, optimizer = ours
    step(model, optimizer, 1), step(model, optimizer, 1)
    before = model.counters()["rpc_messages"]
    step(model, optimizer, 1), step(model, optimizer, 1)
    assert model.counters()["rpc_messages"] == before
    with pytest.raises(rpc.NotSupported, match=r"'last.weight'.*cannot become \(3, 8\)"):
        model.last.weight.data = torch.zeros(3, 8)
    assert {type(parameter).__module__.partition(".")[0] for parameter in model.parameters()} == {"torch"}
    model.close()
    assert not any(isinstance(parameter, ServedParameter) for parameter in model.parameters())


def exchanging(rank: int) -> None:
    """``.data =`` exchanges memory, which others may show; numpy writes where no version tells of it."""
    ours, theirs = both(torch.optim.SGD)
    averages, flat = ([[p.data.clone() for p in model.parameters()] for model, _ in (ours, theirs)], [[], []])

    def averaged(model: Any, average: Any, flat: Any) -> Any:
        backup = [p.data for p in model.parameters()]
        for p, value in zip(model.parameters(), average):
            value.lerp_(p.data, 0.3)
            p.data = value
        with torch.no_grad():
            found = model(batch(7)[0])
        for p, value in zip(model.parameters(), backup):
            p.data = value
        return found

    def new(model: Any, average: Any, flat: Any) -> Any:
        model.last.weight.data = model.last.weight.data * 3

    def swapped(model: Any, average: Any, flat: Any) -> Any:
        model.rare.weight.data, model.last.weight.data = model.last.weight.data, model.rare.weight.data

    def from_vector(model: Any, average: Any, flat: Any) -> Any:
        flat[:] = [nn.utils.parameters_to_vector(model.parameters()) * 0.9]
        nn.utils.vector_to_parameters(flat[0], model.parameters())

    def into_vector(model: Any, average: Any, flat: Any) -> Any:
        flat[0].detach().mul_(0.5)
        return flat[0].detach().clone()

    def by_numpy(model: Any, average: Any, flat: Any) -> Any:
        model.last.weight.detach().numpy()[0] = 0.25
        torch.from_dlpack(model.rare.weight.detach()).mul_(0.5)
        model.frozen.weight.numpy()[1] = 0.5
        with torch.inference_mode():
            model.tied.bias.detach().numpy()[2] = 0.125

    writes = [averaged, new, by_numpy, swapped, from_vector, averaged, into_vector, by_numpy, into_vector, swapped, new]
    for number, write in enumerate(writes):
        found = []
        for (model, optimizer), average, vector in zip((ours, theirs), averages, flat):
            step(model, optimizer, number)
            found.append(write(model, average, vector))
        if found[0] is not None:
            assert torch.equal(*found), write.__name__
        assert step(*ours, 100 + number) == step(*theirs, 100 + number), write.__name__
        assert_same(ours[0].state_dict(), theirs[0].state_dict())
        for mine, other in zip((*averages[0], *flat[0]), (*averages[1], *flat[1])):
            assert torch.equal(mine, other), write.__name__
    model = ours[0]
    shown = model.last.weight.detach()
    model.last.weight.data = torch.ones(8, 8)
    with pytest.raises(rpc.NotSupported, match=r"'last.weight' has other data, and weights would land"):
        step(*ours, 1)
    del shown
    step(*ours, 1)
    with pytest.raises(rpc.NotSupported, match=r"'last.weight'.*with strides \(1, 8\)"):
        model.last.weight.data = torch.ones(8, 8).t()
    model.close()


def as_the_original(rank: int) -> None:
    (model, optimizer), (twin, theirs) = both()
    average, expected = swa_utils.AveragedModel(model), swa_utils.AveragedModel(twin)
    for number in range(3):
        step(model, optimizer, number), step(twin, theirs, number)
        average.update_parameters(model), expected.update_parameters(twin)
    assert_same(average.state_dict(), expected.state_dict())
    assert model.to("cpu").float() is model and model.features.to("cpu") is model.features
    with pytest.raises(rpc.NotSupported, match=r"cannot become torch\.float64"):
        model.double()
    with pytest.raises(rpc.NotSupported, match="cannot become"):
        model.last.double()
    with pytest.raises(rpc.NotSupported, match="exchanged"):
        model.share_memory()
    # What is set on it is set on the original, which runs.
    net = copy.deepcopy(model)
    assert type(net) is type(twin) and all(type(p) is nn.Parameter for p in net.parameters())
    model.note = twin.note = 5
    model.last.forward = lambda x: x * 2
    twin.last.forward = lambda x: x * 2
    model.tied, twin.tied = nn.Identity(), nn.Identity()
    x, _ = batch(5)
    assert torch.equal(model(x), twin(x)) and not torch.equal(model(x), net(x))
    assert repr(model.last.weight) == repr(twin.last.weight)
    assert inspect.signature(model.forward) == inspect.signature(twin.forward)
    del model.note
    assert not hasattr(model, "note")
    model.training = False
    twin.training = False
    assert torch.equal(model(x), twin(x))
    assert torch.equal(torch.compile(model, backend="eager")(x), twin(x))
    model.close()


class Agent(nn.Linear):
    """A model whose class has names that a served one has."""

    def close(self) -> str:
        return "its own"


def with_names_of_ours(rank: int) -> None:
    for later in (False, True):
        net, twin = Agent(4, 2), Agent(4, 2)
        twin.load_state_dict(net.state_dict())
        net = rpc.serve(net, SERVERS) if later else net
        for model in (net, twin):
            model.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if not later:
            with pytest.raises(rpc.NotSupported, match=r"'optimizer'. of its own"):
                rpc.serve(net, SERVERS, torch.optim.SGD, lr=0.1)
            net = rpc.serve(net, SERVERS)
        for model in (net, twin):
            model(torch.ones(1, 4)).sum().backward()
            model.optimizer.step()
        assert net.close() == "its own" and list(copy.deepcopy(net).__dict__) == list(twin.__dict__)
        assert_same(net.state_dict(), twin.state_dict())
        ServedModel.close(net)


def as_a_container(rank: int) -> None:
    model = rpc.serve(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), SERVERS, torch.optim.SGD, lr=0.1)
    assert len(model) == 3 and [*model] == [model[0], model[1], model[2]] and len(model[:2]) == 2
    model[1] = nn.Tanh()
    x = torch.randn(2, 4)
    assert torch.equal(model(x), model[2](torch.tanh(model[0](x))))
    model.close()


def several_workers(rank: int) -> None:
    net, _ = twins()
    model = rpc.serve(net, ["worker2"], torch.optim.SGD, lr=0.1, workers=["worker0", "worker1"], timeout=20)
    step(model, model.optimizer, 0)
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})
    step(model, model.optimizer, 1)
    with torch.no_grad():  # an evaluation of averages
        kept = model.last.weight.data
        model.last.weight.data = torch.ones(8, 8)
        assert torch.equal(model.last(torch.ones(1, 8)), torch.full((1, 8), 8.0) + model.last.bias)
        model(batch(0)[0])
        model.last.weight.data = kept
    step(model, model.optimizer, 2)
    del kept
    with torch.no_grad():
        model.last.weight.clamp_(-0.01, 0.01)
    with pytest.raises(rpc.NotSupported, match=r"'last.weight' was written into here"):
        model(batch(0)[0])
    with pytest.raises(rpc.NotSupported, match=r"'last.weight' was written into here"):
        model.optimizer.step()
    model.close()


@pytest.mark.parametrize(
    "scenario, workers",
    [
        (reading, 1),
        (writing, 1),
        (exchanging, 1),
        (as_the_original, 1),
        (with_names_of_ours, 1),
        (as_a_container, 1),
        (several_workers, 2),
    ],
)
def test_it_is_used_as_the_original(scenario, workers):
    results(run_group(partial(on_workers, scenario, workers), 3, transport="shm"))
