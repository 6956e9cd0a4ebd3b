"""A language model in two stages on two workers: a transformer that reads Python's own documentation byte by byte and learns to
say which byte comes next.

A batch is cut into micro-batches. Each goes through the first stage, whose output stays where it is; the second stage fetches
it from there and computes the loss, while the first stage already has the next one (Huang et al., "GPipe", NeurIPS 2019). One
distributed autograd context holds a step: the gradients go back the way that the values came, and a distributed optimizer
steps every parameter where it lives. Then one process trains the same model alone: what it reaches has to be the same.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
import sys
import tempfile

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rdmarpc as rpc

LENGTH, WIDTH, HEADS, BYTES = 64, 64, 4, 128
BATCH, MICRO_BATCHES = 32, 4
HELD_OUT = 512 * LENGTH + 1
LEARN = {"lr": 3e-3, "weight_decay": 0.01}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attend, self.join = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.think = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.attend(self.before(x)).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.join(seen.transpose(1, 2).flatten(2))
        return x + self.think(self.between(x))


class First(nn.Module):
    """Bytes (n, LENGTH) to what the second stage needs of them (n, LENGTH, WIDTH)."""

    def __init__(self, blocks: int) -> None:
        torch.manual_seed(1)
        super().__init__()
        self.byte, self.place = nn.Embedding(BYTES, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(blocks)))

    def forward(self, text: Tensor) -> Tensor:
        return self.blocks(self.byte(text) + self.place.weight)

    def parameter_rrefs(self) -> list[rpc.RRef[nn.Parameter]]:
        return [rpc.RRef(parameter) for parameter in self.parameters()]


class Second(nn.Module):
    """From there to the loss: how surprising the bytes were that really came next, the mean in nats."""

    def __init__(self, blocks: int) -> None:
        torch.manual_seed(2)
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(blocks)), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, BYTES))

    def forward(self, hidden: Tensor, following: Tensor) -> Tensor:
        return F.cross_entropy(self.blocks(hidden).flatten(0, 1), following.flatten())

    def loss(self, hidden: rpc.RRef[Tensor], following: Tensor) -> Tensor:
        """The same, of what the first stage keeps."""
        return self(hidden.to_here(), following)

    parameter_rrefs = First.parameter_rrefs


def documentation() -> tuple[Tensor, Tensor]:
    """The language reference as `help` shows it, as bytes below 128. The end of it is held out."""
    text = "\n".join(pydoc_data.topics.topics.values()).encode("ascii", "replace")
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    return data[:-HELD_OUT], data[-HELD_OUT:]


def pieces(data: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """What stands in `data` from each of `starts` on, and the same one byte later: (n, LENGTH) each."""
    windows = data[starts[:, None] + torch.arange(LENGTH + 1)]
    return windows[:, :-1], windows[:, 1:]


class OnTwoWorkers:
    def __init__(self, blocks: int) -> None:
        self.first = rpc.remote("worker0", First, (blocks,))
        self.second = rpc.remote("worker1", Second, (blocks,))
        parameters = self.first.rpc_sync().parameter_rrefs() + self.second.rpc_sync().parameter_rrefs()
        self.optimizer = rpc.optim.DistributedOptimizer(torch.optim.AdamW, parameters, **LEARN)

    def loss(self, text: Tensor, following: Tensor) -> Tensor:
        losses = []
        for one, after in zip(text.chunk(MICRO_BATCHES), following.chunk(MICRO_BATCHES)):
            hidden = self.first.remote().forward(one)
            losses.append(self.second.rpc_async().loss(hidden, after))
        return torch.stack(torch.futures.wait_all(losses)).mean()

    def step(self, text: Tensor, following: Tensor) -> float:
        with rpc.autograd.context() as context:
            loss = self.loss(text, following)
            rpc.autograd.backward(context, [loss])
            self.optimizer.step(context)
        return loss.item()


class InOneProcess:
    def __init__(self, blocks: int) -> None:
        self.first, self.second = First(blocks), Second(blocks)
        self.optimizer = torch.optim.AdamW([*self.first.parameters(), *self.second.parameters()], **LEARN)

    def loss(self, text: Tensor, following: Tensor) -> Tensor:
        return self.second(self.first(text), following)

    def step(self, text: Tensor, following: Tensor) -> float:
        self.optimizer.zero_grad()
        loss = self.loss(text, following)
        loss.backward()
        self.optimizer.step()
        return loss.item()


def train(model: OnTwoWorkers | InOneProcess, steps: int) -> tuple[list[float], float]:
    """The loss of every step, and that on the text held out."""
    data, held_out = documentation()
    order = torch.Generator().manual_seed(0)
    losses = []
    for number in range(steps):
        starts = torch.randint(len(data) - LENGTH, (BATCH,), generator=order)
        losses.append(model.step(*pieces(data, starts)))
        if number % 20 == 0:
            print(f"{type(model).__name__}: step {number}: loss {losses[-1]:.3f}", flush=True)
    with torch.no_grad():
        last = model.loss(*pieces(held_out, torch.arange(0, HELD_OUT - 1, LENGTH))).item()
    return losses, last


def by_frequency() -> float:
    """The loss on the text held out of somebody who only knows how often each byte comes."""
    data, held_out = documentation()
    counts = data.bincount(minlength=BYTES) + 1
    return -(counts / counts.sum()).log()[held_out].mean().item()


def worker(rank: int, steps: int, blocks: int, meeting: str) -> None:
    torch.set_num_threads(1)
    options = rpc.RpcBackendOptions(init_method=f"file://{meeting}/store")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        losses, reached = train(OnTwoWorkers(blocks), steps)
        alone, twin = train(InOneProcess(blocks), steps)
        apart = max(abs(one - other) for one, other in zip(losses, alone))
        print(f"no step's losses are further apart than {apart:.1e}")
        print(f"loss on text never seen: {reached:.4f} by two workers, {twin:.4f} by one, {by_frequency():.4f} by frequency")
        rpc.shutdown()
        sys.exit(max(apart, abs(reached - twin)) > 1e-4 or reached > 0.9 * by_frequency())
    rpc.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--blocks", type=int, default=2, help="of each stage")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as meeting:
        torch.multiprocessing.spawn(worker, (given.steps, given.blocks, meeting), nprocs=2)
