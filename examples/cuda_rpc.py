"""A layer on another worker's GPU: activations and gradients go from GPU to GPU, or by way of host memory (``y.cpu()``).

This is PyTorch's tutorial "Direct device-to-device communication with CUDA RPC" with its imports changed. One GPU is enough:
both workers use it then. The gradients have to be those of one process; ``python -m experiments.cuda`` is the measurement.
"""

from __future__ import annotations

import sys
import tempfile
import time

import torch
from torch import Tensor, nn

import rdmarpc as rpc
from rdmarpc import autograd

SIZE, ITERATIONS = 1000, 10


class MyModule(nn.Module):
    def __init__(self, device: str, comm_mode: str) -> None:
        super().__init__()
        torch.manual_seed(1)  # the same wherever it is made
        self.device = device
        self.linear = nn.Linear(SIZE, SIZE).to(device)
        self.comm_mode = comm_mode

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x.to(self.device))
        return y.cpu() if self.comm_mode == "cpu" else y

    def gradients(self, context: int) -> list[Tensor]:
        found = autograd.get_gradients(context)
        return [found[parameter].cpu() for parameter in self.parameters()]


def measure(comm_mode: str, here: str, there: str) -> tuple[float, float]:
    """Seconds of all iterations, and how far the gradients are from those of one process. `there` is a device of worker1."""
    lm = nn.Linear(SIZE, SIZE).to(here)
    rm = rpc.remote("worker1", MyModule, args=(there, comm_mode))
    x = torch.randn(SIZE, SIZE).to(here)

    begin = time.perf_counter()
    for _ in range(ITERATIONS):
        with autograd.context() as context:
            y = rm.rpc_sync().forward(lm(x))
            autograd.backward(context, [y.sum()])
    torch.accelerator.current_stream(torch.device(here)).synchronize()
    seconds = time.perf_counter() - begin

    with autograd.context() as context:
        autograd.backward(context, [rm.rpc_sync().forward(lm(x)).sum()])
        mine = autograd.get_gradients(context)
        found = [mine[parameter].cpu() for parameter in lm.parameters()] + rm.rpc_sync().gradients(context)
    twin = MyModule(here, comm_mode)
    alone = torch.autograd.grad(twin(lm(x)).sum(), [*lm.parameters(), *twin.parameters()])
    return seconds, max(apart(one, other.cpu()) for one, other in zip(found, alone))


def apart(one: Tensor, other: Tensor) -> float:
    """The largest difference, as a part of the largest element."""
    return float((one - other).abs().max() / other.abs().max())


def worker(rank: int, meeting: str) -> None:
    options = rpc.RpcBackendOptions(init_method=f"file://{meeting}/store")
    last = min(torch.cuda.device_count(), 2) - 1
    if rank == 0:
        options.set_device_map("worker1", {0: last})
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    right = True
    for comm_mode in ("cpu", "cuda") if rank == 0 else ():
        seconds, difference = measure(comm_mode, "cuda:0", f"cuda:{last}")
        print(
            f"{comm_mode} RPC total execution time: {seconds:.4f} s; gradients are {difference:.0e} from those of one process"
        )
        right = right and difference < 1e-5
    rpc.shutdown()
    sys.exit(not right)


def missing() -> str:
    """Nothing, or what this example needs and does not find."""
    if torch.version.cuda is None:
        return f"a torch that is built with CUDA; this is {torch.__version__}"
    if not torch.cuda.is_available():
        return "a GPU of NVIDIA's and its driver; torch finds none (`nvidia-smi` and `rdmarpc doctor` say more)"
    return ""


if __name__ == "__main__":
    if missing():
        sys.exit(f"this example needs {missing()}")
    with tempfile.TemporaryDirectory() as place:
        torch.multiprocessing.spawn(worker, (place,), nprocs=2)
