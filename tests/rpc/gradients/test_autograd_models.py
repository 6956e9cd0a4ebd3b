"""Distributed autograd as models use it: each against the same model in one process, with the same weights and inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from group import results, run_group
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import rdmarpc as rpc
from rdmarpc import autograd
from rdmarpc.optim import DistributedOptimizer


def made(kind: Callable[..., nn.Module], seed: int, *args: Any, **kwargs: Any) -> nn.Module:
    """The same wherever it is made."""
    module = kind(*args, **kwargs)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.uniform_(-0.5, 0.5, generator=generator)
    return module


class Part:
    """A module on its owner."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.module = made(*args, **kwargs)

    def run(self, *inputs: Any) -> Any:
        return self.module(*inputs)

    def run_on(self, x: rpc.RRef[Tensor]) -> Tensor:
        return self.module(x.to_here())

    def parameters(self) -> list[rpc.RRef[Tensor]]:
        return [rpc.RRef(parameter) for parameter in self.module.parameters()]

    def values(self) -> list[Tensor]:
        return [parameter.detach() for parameter in self.module.parameters()]

    def gradients(self, context: int) -> list[Tensor]:
        """Of all parameters, each of which has one; ``.grad`` has nothing."""
        assert all(parameter.grad is None for parameter in self.module.parameters())
        found = autograd.get_gradients(context)
        return [found[parameter] for parameter in self.module.parameters()]

    def scale(self, context: int, factor: float) -> None:
        for gradient in autograd.get_gradients(context).values():
            gradient.mul_(factor)


def assert_close(found: list[Tensor], wanted: list[Tensor | None] | list[Tensor]) -> None:
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted):
        assert other is not None
        assert one.layout == other.layout
        torch.testing.assert_close(one.to_dense(), other.to_dense(), rtol=1e-5, atol=1e-5)


def grads(*modules: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for module in modules for parameter in module.parameters()]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def recurrent() -> None:
    """A remote table with sparse gradients, a recurrent network here, a remote decoder; the state is carried over steps."""
    table, decoder = (nn.Embedding, 1, 50, 8), (nn.Linear, 2, 16, 50)
    far_table = rpc.remote("worker1", Part, table, {"sparse": True})
    far_decoder = rpc.remote("worker2", Part, decoder)
    here, twin = (made(nn.LSTM, 3, 8, 16, 2) for _ in range(2))
    near_table, near_decoder = made(*table, sparse=True), made(*decoder)
    far = far_table.rpc_sync().parameters() + far_decoder.rpc_sync().parameters()
    optimizer = DistributedOptimizer(torch.optim.SGD, far + [rpc.RRef(p) for p in here.parameters()], lr=0.5)
    alone = torch.optim.SGD([p for m in (near_table, near_decoder, twin) for p in m.parameters()], lr=0.5)
    state = same_state = (torch.zeros(2, 4, 16), torch.zeros(2, 4, 16))
    for number in range(6):
        x, y = torch.randint(50, (2, 10, 4), generator=torch.Generator().manual_seed(number))
        with autograd.context() as context:
            hidden, state = here(far_table.rpc_sync().run(x), tuple(each.detach() for each in state))
            loss = F.cross_entropy(far_decoder.rpc_sync().run(hidden).flatten(0, 1), y.flatten())
            autograd.backward(context, [loss])
            assert far_table.rpc_sync().gradients(context)[0].is_sparse
            optimizer.step(context)
        alone.zero_grad()
        hidden, same_state = twin(near_table(x), tuple(each.detach() for each in same_state))
        same_loss = F.cross_entropy(near_decoder(hidden).flatten(0, 1), y.flatten())
        same_loss.backward()
        alone.step()
        assert abs(loss.item() - same_loss.item()) < 1e-5
    assert_close(
        far_table.rpc_sync().values() + far_decoder.rpc_sync().values(), [*near_table.parameters(), *near_decoder.parameters()]
    )
    assert_close(list(here.parameters()), list(twin.parameters()))


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv1d(4, 4, 3, padding=1), nn.BatchNorm1d(4), nn.ReLU(inplace=True))


def chain() -> None:
    """Three stages that fetch from each other, micro-batches, batch norm and in-place operations; all in one backward."""
    far = [rpc.remote(f"worker{rank}", Part, (convolutions, rank)) for rank in (1, 2, 3)]
    near = nn.Sequential(*(made(convolutions, rank) for rank in (1, 2, 3)))
    x = random(8, 4, 10)
    with autograd.context() as context:
        losses = []
        for piece in x.split(4):
            reference = rpc.RRef(piece)
            for stage in far:
                reference = stage.remote().run_on(reference)
            losses.append(reference.to_here().pow(2).mean())
        autograd.backward(context, losses)
        found = [gradient for stage in far for gradient in stage.rpc_sync().gradients(context)]
    torch.autograd.backward([near(piece).pow(2).mean() for piece in x.split(4)])
    assert_close(found, grads(near))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


def recomputed() -> None:
    """Activation checkpointing on the other worker."""
    far, near = rpc.remote("worker1", Part, (Checkpointed, 1)), made(Checkpointed, 1)
    x = random(3, 6).requires_grad_()
    with autograd.context() as context:
        autograd.backward(context, [far.rpc_sync().run(x).sum()])
        found = [autograd.get_gradients(context)[x], *far.rpc_sync().gradients(context)]
    near(x).sum().backward()
    assert_close(found, [x.grad, *grads(near)])


def clipped() -> None:
    """The norm of all gradients on all workers, which are scaled where they are and then stepped."""
    arguments = [(nn.Linear, rank, 6, 6) for rank in (1, 2)]
    far = [rpc.remote(f"worker{args[1]}", Part, args) for args in arguments]
    near = nn.Sequential(*(made(*args) for args in arguments))
    optimizer = DistributedOptimizer(torch.optim.Adam, [p for part in far for p in part.rpc_sync().parameters()], lr=0.1)
    alone = torch.optim.Adam(near.parameters(), lr=0.1)
    for number in range(4):
        x = random(3, 6, seed=number)
        with autograd.context() as context:
            autograd.backward(context, [far[1].rpc_sync().run(far[0].rpc_sync().run(x)).pow(2).sum()])
            norms = [gradient.norm() for part in far for gradient in part.rpc_sync().gradients(context)]
            factor = min(1.0, 0.5 / (torch.stack(norms).norm().item() + 1e-6))
            assert factor < 1
            for part in far:
                part.rpc_sync().scale(context, factor)
            optimizer.step(context)
        alone.zero_grad()
        near(x).pow(2).sum().backward()
        nn.utils.clip_grad_norm_(near.parameters(), 0.5)
        alone.step()
    assert_close([value for part in far for value in part.rpc_sync().values()], list(near.parameters()))


def experts() -> None:
    """A gate here sends each row to one of three experts, all asked at once, as the first thing that is asked of them."""
    arguments = [(nn.Linear, rank, 6, 6) for rank in (1, 2, 3)]
    far, near = [rpc.remote(f"worker{args[1]}", Part, args) for args in arguments], [made(*args) for args in arguments]
    gate, twin = (made(nn.Linear, 9, 6, 3) for _ in range(2))

    def loss(gate: nn.Module, ask: Callable[[int, Tensor], Any]) -> Tensor:
        weights = gate(x).softmax(1)
        chosen = weights.argmax(1)
        asked = [ask(number, x[chosen == number]) for number in range(3)]
        answers = torch.futures.wait_all(asked) if isinstance(asked[0], torch.futures.Future) else asked
        y = torch.zeros(len(x), 6)
        for number, answer in enumerate(answers):
            rows = (chosen == number).nonzero()[:, 0]
            y = y.index_add(0, rows, answer * weights[rows, number : number + 1])
        return y.pow(2).sum()

    for rows in (24, 2):  # with 2, some are sent nothing
        x = random(rows, 6)
        with autograd.context() as context:
            autograd.backward(context, [loss(gate, lambda number, some: far[number].rpc_async().run(some))])
            found = [gradient for part in far for gradient in part.rpc_sync().gradients(context)]
            gates = autograd.get_gradients(context)
        for module in (*near, twin):
            module.zero_grad()
        loss(twin, lambda number, some: near[number](some)).backward()
        assert_close(found, grads(*near))
        assert_close([gates[parameter] for parameter in gate.parameters()], grads(twin))


def trainer(server: rpc.RRef[Part], seed: int) -> None:
    optimizer = DistributedOptimizer(torch.optim.SGD, server.rpc_sync().parameters(), lr=0.02)
    for number in range(60):
        x = random(16, 8, seed=1000 * seed + number)
        with autograd.context() as context:
            loss = F.mse_loss(server.rpc_sync().run(x), x.cumsum(1) / 8)
            autograd.backward(context, [loss])
            optimizer.step(context)


def hogwild() -> None:
    """Six trainers in three processes at one server's parameters, nobody waits for anybody."""
    server = rpc.remote("worker1", Part, (nn.Linear, 1, 8, 8))
    running = [rpc.rpc_async(f"worker{rank}", trainer, (server, 2 * rank + n)) for rank in (0, 2, 3) for n in range(2)]
    torch.futures.wait_all(running)
    # However their steps met: of one trainer alone the loss would be half as large, of six a thirtieth.
    x, untrained = random(64, 8, seed=999_999), made(nn.Linear, 1, 8, 8)
    before, after = (F.mse_loss(y, x.cumsum(1) / 8).item() for y in (untrained(x), server.rpc_sync().run(x)))
    assert after < before / 2


class Drive:
    """Worker 0 runs a model, the others serve."""

    def __init__(self, model: Callable[[], None]) -> None:
        self.model = model

    def __call__(self, rank: int) -> None:
        if rank == 0:
            self.model()
        rpc.shutdown()


@pytest.mark.parametrize("model", [recurrent, chain, recomputed, clipped, experts, hogwild], ids=lambda model: model.__name__)
def test_model_learns_as_in_one_process(model: Callable[[], None]) -> None:
    results(run_group(Drive(model), 4))
