"""A program written for torch's RPC: ``python stood_in_program.py PORT``. Its workers are started in different ways, each calls
the next one and prints a line."""

import os
import subprocess
import sys

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch.distributed.nn import RemoteModule
from torch.distributed.nn.api.remote_module import RemoteModule as SameModule
from torch.distributed.optim import DistributedOptimizer
from torch.distributed.rpc import RRef, rpc_sync
from torch.distributed.rpc.api import _require_initialized

WAYS = ("spawn", "fork", "forkserver", "subprocess")


class Descent:
    """No ``Optimizer``: DistributedOptimizer takes whatever steps. (torch's first one imports torch._dynamo.)"""

    def __init__(self, parameters: list, lr: float) -> None:
        self.parameters, self.lr = list(parameters), lr

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.parameters:
            parameter -= self.lr * parameter.grad


def fill(parameter: RRef) -> None:
    with torch.no_grad():
        parameter.local_value().fill_(0.5)


def train(to: str) -> list:
    from stood_in_program import Descent, fill  # so are they called in each process, whatever is main there

    module = RemoteModule(to, torch.nn.Linear, (4, 2))
    for parameter in module.remote_parameters():
        rpc_sync(to, fill, (parameter,))
    optimizer = DistributedOptimizer(Descent, module.remote_parameters(), lr=0.1)
    losses = []
    for step in range(3):
        with dist_autograd.context() as context:
            loss = (module(torch.full((3, 4), step + 1.0)) ** 2).sum()
            dist_autograd.backward(context, [loss])
            optimizer.step(context)
        losses.append(loss.item())
    return losses


def train_here() -> list:
    module = torch.nn.Linear(4, 2)
    for parameter in module.parameters():
        fill(RRef(parameter))
    optimizer = Descent(module.parameters(), 0.1)
    losses = []
    for step in range(3):
        module.zero_grad()
        loss = (module(torch.full((3, 4), step + 1.0)) ** 2).sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def work(how: str, rank: int, port: str) -> None:
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=port)
    me, to = f"w{rank}", f"w{(rank + 1) % len(WAYS)}"
    rpc.init_rpc(me, rank=rank, world_size=len(WAYS))
    reference = rpc.remote(to, torch.add, (torch.ones(2), 1))
    assert isinstance(reference, torch._C._distributed_rpc.PyRRef) and isinstance(RRef(1), RRef)
    assert torch._C._distributed_rpc._is_current_rpc_agent_set() and SameModule is RemoteModule
    # Functions of torch's modules, by name and as arguments.
    nested = rpc_sync(to, rpc.rpc_sync, (me, torch.add, (torch.ones(1), 2)))
    told = type(rpc.api._get_current_rpc_agent()).__module__.partition(".")[0]
    assert train(to) == train_here()
    line = f"{how} {told} {reference.to_here().tolist()} {nested.tolist()} {_require_initialized(int)('3')}\n"
    os.write(1, line.encode())  # at once: others write there too
    rpc.shutdown()


def main() -> None:
    if len(sys.argv) > 2:
        work("subprocess", int(sys.argv[2]), sys.argv[1])
        return
    started = subprocess.Popen([sys.executable, __file__, sys.argv[1], str(WAYS.index("subprocess"))])
    processes = [
        mp.get_context(how).Process(target=work, args=(how, rank, sys.argv[1]))
        for rank, how in enumerate(WAYS)
        if how != "subprocess"
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(200)
    assert not started.wait(200) and not any(process.exitcode for process in processes)


if __name__ == "__main__":
    main()
