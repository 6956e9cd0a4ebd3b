"""The part ``step`` of the benchmark of CUDA tensors: a training step of a wrapped model, half of it at the other worker, and
the same step of one process. Both are taken by turns in one process, and their losses are compared.
"""

import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

ROWS = 64
WARM_STEPS = 5
"""They warm the allocator and the libraries."""
Step = Callable[[], Tensor]


def wrapped(rpc: Any, here: torch.device, there: torch.device, job: dict[str, Any]) -> list[tuple[str, int, float]]:
    """("step_wrapped" and "step_alone", width of a layer, ms a step), and ("step_apart", width, the largest difference between
    two losses of the same step)."""
    figures: list[tuple[str, int, float]] = []
    for width in job["widths"]:
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(job["layers"])))
        half = job["layers"] // 2
        placement = {f"0-{half - 1}": f"worker0/{here}", f"{half}-{job['layers'] - 1}": f"worker1/{there}"}
        alone = copy.deepcopy(net).to(here)
        model = rpc.wrap(net, placement)
        x = torch.randn(ROWS, width, device=here)
        steps = {"step_wrapped": step_of(model, x), "step_alone": step_of(alone, x)}
        losses = {name: [float(step()) for _ in range(WARM_STEPS)] for name, step in steps.items()}
        times: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(job["batches"]):
            for name, step in steps.items():
                found, loss = timed(step, job["steps"], here)
                times[name].append(found)
                losses[name].append(float(loss))
        figures += [(name, width, statistics.median(values)) for name, values in times.items()]
        figures.append(("step_apart", width, max(abs(a - b) for a, b in zip(*losses.values()))))
        model.close()
    return figures


def step_of(model: nn.Module, x: Tensor) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def timed(step: Step, times: int, device: torch.device) -> tuple[float, Tensor]:
    """Milliseconds a step, and the last one's loss."""
    module = torch.get_device_module(device)
    module.synchronize(device)
    begin = time.perf_counter()
    for _ in range(times):
        loss = step()
    loss.item()  # it may be computed at the other worker
    module.synchronize(device)
    return 1e3 * (time.perf_counter() - begin) / times, loss
