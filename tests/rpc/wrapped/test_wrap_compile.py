"""``torch.compile`` before ``wrap``, of parts and of the whole, and after it."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from test_wrap import batches, drive
from torch import nn
from twins import train_both

import rdmarpc as rpc
from rdmarpc import wrap

DATA = batches(3, 6, 20)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Sequential(nn.Linear(20, 20), nn.Tanh()), nn.Linear(20, 20), nn.Linear(20, 4)
        self.gain = 1.5

    def forward(self, x):
        return self.c(torch.relu(self.b(self.a(x))) * self.gain)


def same(model: nn.Module, twin: nn.Module) -> None:
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in twin.named_parameters()]
    train_both(model, twin, DATA)


def compiled() -> None:
    torch.manual_seed(0)
    net = Two()
    nets = [net, copy.deepcopy(net)]
    for each in nets:
        each.a = torch.compile(each.a, backend="eager")
        each.b.compile(backend="aot_eager", dynamic=False)
        each.c.compile(backend="eager")
    model = wrap(nets[0], {"a": "worker1", "b": "worker1"})
    assert "a._orig_mod.0.weight" in model.state_dict()
    same(model, nets[1])
    assert copy.deepcopy(model).b._compiled_call_impl is not None
    model.b.compile(backend="eager")
    same(model, nets[1])
    model.close()

    nets = [Two(), Two()]
    nets[1].load_state_dict(nets[0].state_dict())
    whole = torch.compile(nets[0], backend="eager")
    with pytest.warns(UserWarning, match="takes torch.compile off"):
        model = wrap(whole, {"a.0": "worker1", "c": "worker1"})
    twin = torch.compile(nets[1], backend="eager")
    assert model.gain == 1.5
    same(model, twin)
    for network in (model, twin):
        network.gain = 0.5
    same(model, twin)
    model.close()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net = Two()
        model, twin = wrap(copy.deepcopy(net), {"a": "worker1"}), net
        again = torch.compile(model, backend="eager")
        assert torch.equal(again(DATA[0][0]), twin(DATA[0][0]))
        again(DATA[0][0]).sum().backward()
        same(model, twin)
        model.compile(backend="eager")
        same(model, twin)
        model.close()


def unknown_backend(graph, inputs):
    return graph.forward


def odd() -> None:
    net = Two()
    net.b = torch.compile(net.b, backend=lambda graph, inputs: graph.forward)
    with pytest.raises(rpc.NotSupported, match="cannot be pickled"):
        wrap(net, {"b": "worker1"})
    net = Two()
    net.b = torch.compile(net.b, backend=unknown_backend)
    model = wrap(net, {"b": "worker1"})
    model(DATA[0][0]).sum().backward()
    model.close()


def everything() -> None:
    compiled()
    odd()


def test_compiled_models() -> None:
    drive(everything)
