"""The same training over `torch.distributed.rpc` (TensorPipe), as PyTorch's own tutorials write it.

A part on another worker is a `Stage` held through an RRef; a step is one distributed autograd context, and
`DistributedOptimizer` steps every parameter where it lives. The stages are called with `rpc_sync` one after the other:
at these tensor sizes that is faster than a chain of RRefs, which costs more messages.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import Tensor, nn
from torch.distributed.optim import DistributedOptimizer
from torch.nn import functional as F

from ..harness.processes import Launcher
from . import digits_models as models
from .digits_data import load_digits
from .digits_training import Record, blocks


def main(rank: int, job: dict[str, Any], launcher: Launcher) -> None:
    """A worker from its first line to its last; worker0 tells ("trained", ...)."""
    logging.captureWarnings(True)  # torch warns of its own deprecated parts, on every use
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{job['meeting_place']}/torch_rpc")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=job["workers"], rpc_backend_options=options)
    if rank == 0:
        train(job, launcher)
    rpc.shutdown()


def train(job: dict[str, Any], launcher: Launcher) -> None:
    """The job as worker0 drives it."""
    digits = load_digits(job["seed"])
    model = TorchRpcModel(models.build(job["model"], job["seed"]), job["placement"], job["lr"], job["momentum"])
    record = Record()
    for _, batches in blocks(digits, job):
        launcher.wait_for_turn()
        record.train(model, batches)
        record.evaluate(model, digits)
    launcher.tell(("trained", {"torch_rpc": record.as_dict()}))


class Stage:
    """One or more parts of the model in the process that owns them."""

    def __init__(self, parts: nn.Sequential) -> None:
        self.parts = parts

    def forward(self, x: Tensor) -> Tensor:
        """The parts' output; recorded by distributed autograd when the caller is in a context."""
        return self.parts(x)

    def infer(self, x: Tensor) -> Tensor:
        """The parts' output, not recorded."""
        with torch.no_grad():
            return self.parts(x)

    def parameter_rrefs(self) -> list[rpc.RRef]:
        return [rpc.RRef(parameter) for parameter in self.parts.parameters()]


class TorchRpcModel:
    """A chain of stages; the ones on other workers are called through their RRefs."""

    def __init__(self, net: nn.Sequential, placement: dict[str, str], lr: float, momentum: float) -> None:
        self.stages = [place(parts, worker) for worker, parts in group_by_worker(net, placement)]
        parameters = [rref for stage in self.stages for rref in stage.rpc_sync().parameter_rrefs()]
        self.optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=lr, momentum=momentum)

    def step(self, x: Tensor, y: Tensor) -> float:
        """One training step on a batch; returns its loss."""
        with dist_autograd.context() as context:
            loss = F.cross_entropy(self._chain(x, lambda stage: stage.forward), y)
            dist_autograd.backward(context, [loss])
            self.optimizer.step(context)
        return loss.item()

    def infer(self, x: Tensor) -> Tensor:
        """Logits of `x`."""
        return self._chain(x, lambda stage: stage.infer)

    def _chain(self, x: Tensor, method: Callable[[Any], Callable[[Tensor], Tensor]]) -> Tensor:
        for stage in self.stages:
            x = method(stage.local_value() if stage.is_owner() else stage.rpc_sync())(x)
        return x


def place(parts: nn.Sequential, worker: str) -> rpc.RRef:
    """A Stage with these parts on `worker`."""
    if worker == rpc.get_worker_info().name:
        return rpc.RRef(Stage(parts))
    return rpc.remote(worker, Stage, args=(parts,))


def group_by_worker(net: nn.Sequential, placement: dict[str, str]) -> list[tuple[str, nn.Sequential]]:
    """Neighbouring parts with one worker become one chain, so that nothing crosses between them."""
    groups: list[tuple[str, list[nn.Module]]] = []
    for name, part in net.named_children():
        if not groups or groups[-1][0] != placement[name]:
            groups.append((placement[name], []))
        groups[-1][1].append(part)
    return [(worker, nn.Sequential(*parts)) for worker, parts in groups]
