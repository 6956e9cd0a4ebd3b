"""What the steps of DistributedDataParallel compute: real models, and one whose layers sleep."""

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..exchange import collective_models as together


def _small() -> nn.Module:
    """0.8 million parameters: for a quick look."""
    layers: list[nn.Module] = []
    for _ in range(12):
        layers += [nn.Linear(256, 256), nn.ReLU()]
    return nn.Sequential(*layers)


MODELS = {**together.MODELS, "small": (_small, (8, 256))}
"""Each a model, and the shape of a batch."""


class _Slept(torch.autograd.Function):
    """Takes so long, forward and backward, and gives its parameters a gradient of ones."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        ctx.weight, ctx.seconds = weight, backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        time.sleep(ctx.seconds)
        return grads[0], torch.ones_like(ctx.weight), None, None


class Sleeping(nn.Module):
    """``layers`` layers that share ``parameters`` numbers and the time of a step: a third of it in the forward, as usual."""

    def __init__(self, layers: int, parameters: int, compute_ms: float) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(parameters // layers) for _ in range(layers))
        self.layer_s = compute_ms / 1e3 / layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = _Slept.apply(x, weight, self.layer_s / 3, 2 * self.layer_s / 3)
        return x


def made(name: str) -> tuple[nn.Module, torch.Tensor]:
    """One of ``MODELS``, and a batch for it; the same at every rank."""
    make, shape = MODELS[name]
    torch.manual_seed(0)
    return make(), torch.randn(shape)


class Full:
    """The buckets of one backward that are full and not yet summed."""

    def __init__(self, group: Any) -> None:
        self.group, self.buckets = group, list[tuple[torch.Tensor, torch.futures.Future[torch.Tensor]]]()


def at_last(state: Full, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A communication hook without overlap: the buckets are summed, one after the other, once the last of them is full.

    DDP reads the annotations of a hook, so they must not be text."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    state.buckets.append((bucket.buffer(), future))
    if bucket.is_last():
        for buffer, done in state.buckets:
            dist.all_reduce(buffer, group=state.group)
            done.set_result(buffer.div_(dist.get_world_size(state.group)))
        state.buckets.clear()
    return future


def unsummed(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A communication hook that divides each bucket, as DDP does, and sends nothing: what is left is DDP's own work."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer().div_(dist.get_world_size(group)))
    return future


def parallel(model: nn.Module, group: Any, cap_mb: float, overlap: bool = True) -> DistributedDataParallel:
    """``cap_mb``: MiB of a bucket; 0: one for each parameter."""
    found = DistributedDataParallel(model, process_group=group, bucket_cap_mb=cap_mb, gradient_as_bucket_view=True)
    if not overlap:
        found.register_comm_hook(Full(group), at_last)
    return found
