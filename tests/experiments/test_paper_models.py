"""The models of the paper: sizes and numbers of tensors as printed there, and a step of each with its parameters at servers."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from group import results, run_group
from torch import nn

import rdmarpc as rpc
from rdmarpc.experiments.exchange.models import MODELS, Convolution, loss_of
from rdmarpc.graph import show as transfers
from rdmarpc.places.placement import home, resolve

SERVERS = ["worker1", "worker2"]
PRINTED = {
    "AlexNet": (46_247_882, "176.42", 16),
    "InceptionV3": (24_353_332, "92.90", 196),
    "VGG16": (134_301_514, "512.32", 32),
    "LSTM": (9_417_704, "35.93", 14),
    "GRU": (7_319_528, "27.92", 11),
    "FCN5": (53_600_266, "204.47", 10),
    "Transformer": (11_640_320, "44.40", 148),
}
"""Parameters, MiB and tensors of table 2; of the transformer, which is ours, as it is."""
SMALLEST = {"AlexNet": torch.randn(1, 3, 195, 195), "VGG16": torch.randn(1, 3, 224, 224), "FCN5": torch.randn(2, 784)}


@pytest.mark.parametrize("name", MODELS)
def test_sizes_are_those_of_the_paper(name):
    model = MODELS[name]
    with torch.device("meta"):
        net = model.make()
    parameters = list(net.parameters())
    count, mib, tensors = PRINTED[name]
    assert sum(parameter.numel() for parameter in parameters) == model.parameters == count
    assert len(parameters) == model.tensors == tensors and f"{model.mib:.2f}" == mib
    if name == "InceptionV3":
        assert sum(isinstance(module, Convolution) for module in net.modules()) == 96


CUT = {
    "AlexNet": {"0-16": "w0", "17-20": "w1"},
    "VGG16": {"0-34": "w0", "35-38": "w1"},
    "LSTM": {"gate.0-1": "w0", "gate.2-3": "w1", "output": "w1"},
    "GRU": {"gate.0-1": "w0", "gate.2": "w1", "output": "w1"},
    "FCN5": {"0-3": "w0", "4-8": "w1"},
}
"""Placement over two workers by bytes."""


@pytest.mark.parametrize("name", MODELS)
def test_placements_are_even(name):
    with torch.device("meta"):
        net = MODELS[name].make()
    placement = rpc.auto_placement(net, ["w0", "w1"])
    assert CUT.get(name) in (None, placement)
    places = resolve(net, placement, ["w0", "w1"])
    # Even as far as it goes: one layer has most of VGG-16.
    shares = dict.fromkeys(("w0", "w1"), 0)
    for path, parameter in net.named_parameters():
        where = home(places, path.rpartition(".")[0])
        shares[where[0] if where else "w0"] += parameter.numel()
    assert sum(shares.values()) == MODELS[name].parameters and min(shares.values()) > MODELS[name].parameters / 9


def steps(names: list[str], rank: int) -> None:
    try:
        if rank == 0:
            for name in names:
                step(name)
    finally:
        rpc.shutdown()


def step(name: str) -> None:
    """One step of gradient descent; every new weight is the one that it has to be, to the bit."""
    torch.manual_seed(1)
    model = MODELS[name]
    net = model.make()
    x, y = model.sample(2)
    if name in SMALLEST:
        x, y = SMALLEST[name], y[: len(SMALLEST[name])]
    served = rpc.serve(net, SERVERS, torch.optim.SGD, lr=0.01)

    [plan] = served.transfers()
    placed = [(crossing.name, crossing.kind, crossing.source, crossing.target) for crossing in plan.crossings]
    expected = set()
    for number, (parameter, _) in enumerate(net.named_parameters()):
        server = SERVERS[number % 2]
        expected |= {(parameter, "weight", server, "worker0"), (parameter, "gradient", "worker0", server)}
    assert set(placed) == expected and len(placed) == 2 * model.tensors
    assert all(crossing.static for crossing in plan.crossings) and plan.nbytes == 8 * model.parameters
    total = f"{2 * model.tensors} edges, {8 * model.parameters:,} bytes cross in a training step"
    assert total in served.placement_table() and transfers.from_json(plan.to_json()) == [plan]
    assert sum(worker.parameter_bytes for worker in plan.workers) == 4 * model.parameters

    loss_of(served(x), y).backward()
    before = [parameter.detach().clone() for parameter in net.parameters()]
    served.optimizer.step()
    served.pull()
    for parameter, old in zip(net.parameters(), before):
        assert isinstance(parameter, nn.Parameter) and parameter.grad is not None
        assert torch.equal(parameter, old.add_(parameter.grad, alpha=-0.01))
    served.close()


def test_a_step_of_each_with_parameters_at_two_servers():
    results(run_group(partial(steps, [name for name in MODELS if name != "VGG16"]), 3, timeout=250))


@pytest.mark.slow
def test_a_step_of_vgg_with_parameters_at_two_servers():
    results(run_group(partial(steps, ["VGG16"]), 3, timeout=250))
