"""A model over workers 1 and 2 beside the same model in this process, for tests of devices and hosts."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

import rdmarpc as rpc


def train(kind: type[torch.optim.Optimizer] = torch.optim.Adam, on: str = "cpu", steps: int = 4) -> int:
    """Steps on the device ``on`` of all three; equal to the bit. Returns how many bytes the devices of all workers have
    written."""
    torch.manual_seed(1)
    first = nn.Sequential(nn.Linear(20, 300), nn.ReLU(), nn.BatchNorm1d(300))
    net = nn.Sequential(first, nn.Sequential(nn.Linear(300, 300), nn.Tanh()), nn.Linear(300, 4))
    alone = copy.deepcopy(net).to(on)
    model = rpc.wrap(net, {"0": f"worker1/{on}", "1": f"worker2/{on}", "2": f"worker0/{on}"})
    optimizers = [kind(each.parameters(), lr=0.05) for each in (model, alone)]
    for number in range(steps):
        x, y = torch.randn(64, 20), torch.randint(0, 4, (64,))
        losses = []
        for each, optimizer, at in zip((model, alone), optimizers, ("cpu", on)):
            optimizer.zero_grad()
            losses.append(F.cross_entropy(each(x.to(at)), y.to(at)))
            losses[-1].backward()
            optimizer.step()
        assert losses[0].item() == losses[1].item(), number
    for name, value in alone.state_dict().items():
        assert torch.equal(model.state_dict()[name].cpu(), value.cpu()), name
    others = (rpc.rpc_sync(f"worker{rank}", rpc.counters) for rank in (1, 2))
    return sum(each["bytes_direct"] for each in (rpc.counters(), *others))
