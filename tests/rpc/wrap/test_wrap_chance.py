"""Random numbers of a wrapped model: a seed repeats a run; ``rng="caller"`` gives the numbers of one process; what draws here
draws from the generator here."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from beside import assert_same, batches, beside, both, sgd, step
from torch import nn

DATA = batches(3, 6, 20)
KINDS = {
    "dropout": lambda x: F.dropout(x, 0.3, True),
    "randn_like": lambda x: x + 0.1 * torch.randn_like(x),
    "of a size": lambda x: x * torch.rand(x.shape[0], 1),
    "in place": lambda x: x + torch.empty_like(x).normal_(),
    "bernoulli": lambda x: x * torch.bernoulli(torch.sigmoid(x)).detach(),
    "gumbel": lambda x: F.gumbel_softmax(x, tau=0.5),
    "distribution": lambda x: torch.distributions.Normal(x, 1.0, validate_args=False).rsample(),
    "multinomial": lambda x: x.gather(1, torch.multinomial(torch.softmax(x, 1), 3)).sum(1, keepdim=True) + x,
    "attention": lambda x: F.scaled_dot_product_attention(*[x.view(1, 1, -1, 20)] * 3, dropout_p=0.2).view(-1, 20),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "permutation": lambda x: x[torch.randperm(len(x))],
    "uniform parameters": lambda x: x * torch.empty(20).uniform_(0.5, 1.5),
}


class Noisy(nn.Module):
    def __init__(self, kind: str = "dropout") -> None:
        super().__init__()
        self.one, self.two = nn.Sequential(nn.Linear(20, 20), nn.Dropout(0.5)), nn.Linear(20, 20)
        self.head, self.kind = nn.Sequential(nn.Dropout(0.2), nn.Linear(20, 4)), kind

    def forward(self, x):
        noise = KINDS[self.kind] if self.training else lambda x: x
        return self.head(noise(torch.tanh(self.two(noise(self.one(x))))))


def of_one_process(kind: str) -> None:
    """Forwards, micro-batches and an initialisation, with all draws of this process in their order."""

    def program(net: Any) -> Iterator[Any]:
        optimizer = sgd(net)
        for number, (x, y) in enumerate(DATA):
            torch.manual_seed(number)
            yield step(net, optimizer, x, y), torch.get_rng_state()
        nn.init.normal_(net.two.weight)
        nn.init.uniform_(net.one[0].weight, -0.1, 0.1)
        yield torch.rand(2), torch.randn_like(net.two.weight), torch.rand_like(net(DATA[0][0]))
        source = torch.Generator().manual_seed(3)
        net.head[1].weight.data.normal_(generator=source)
        yield net.eval()(DATA[0][0]), torch.get_rng_state()

    beside(program, lambda: Noisy(kind), {"one": "worker1", "two": "worker2", "head": "worker1"}, rng="caller")


@pytest.mark.parametrize("kind", KINDS)
def test_the_caller_draws_what_one_process_draws(drive, kind):
    drive(of_one_process, kind)


def losses_of(net: nn.Module, seed: int) -> list[Any]:
    torch.manual_seed(seed)
    return [step(net, sgd(copy.deepcopy(net)), x, y).item() for x, y in DATA]


def repeated() -> None:
    """A seed here seeds the workers, so runs repeat, also of another model with the same placement; others differ."""
    model, twin = both(Noisy, {"one": "worker1", "two": "worker2", "head": "worker1"})
    other, _ = both(Noisy, {"one": "worker1", "two": "worker2", "head": "worker1"})
    first = losses_of(model, 7)
    assert losses_of(model, 7) == first and losses_of(other, 7) == first
    assert losses_of(model, 8) != first
    ratio = [float((F.dropout(model.two.weight.detach().abs() + 1, 0.5) > 0).float().mean()) for _ in range(8)]
    assert all(0.3 < each < 0.7 for each in ratio) and len(set(ratio)) > 1
    for network in (model, twin):
        network.eval()
    state = torch.get_rng_state()
    assert_same(model(DATA[0][0]), twin(DATA[0][0]))
    assert torch.equal(torch.get_rng_state(), state)


def test_a_seed_repeats_a_run(drive):
    drive(repeated)


class Here(nn.Module):
    """It draws here only, before its part."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.part = nn.Dropout(0.4), nn.Linear(20, 4)

    def forward(self, x):
        return self.part(self.drop(x) + torch.rand(20))


def here() -> None:
    def program(net: Any) -> Iterator[Any]:
        for x, y in DATA:
            yield step(net, sgd(net), x, y), torch.get_rng_state()

    beside(program, Here, {"part": "worker1"})


def test_what_draws_here_draws_as_in_one_process(drive):
    drive(here)
