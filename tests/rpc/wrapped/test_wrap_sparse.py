"""Sparse tensors: as in one process where they stay at one worker, refused by name where they would cross."""

from __future__ import annotations

import contextlib
import copy
from functools import partial
from typing import Any

import pytest
import torch
from test_wrap import drive
from torch import nn
from torch.nn import functional as F

import rdmarpc as rpc


def graph_of(layout: torch.layout = torch.sparse_coo) -> torch.Tensor:
    graph = torch.eye(4).roll(1, 0) + torch.eye(4)
    return graph.to_sparse() if layout is torch.sparse_coo else graph.to_sparse_csr()


class Mixes(nn.Module):
    """A layer of a graph network."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(8, 8)

    def forward(self, x, graph=None):
        x = self.line(x)
        return x if graph is None else torch.sparse.mm(graph, x)


class Makes(Mixes):
    def forward(self, x):
        return super().forward(x), x.detach().relu().to_sparse()


class Inside(Mixes):
    """A sparse tensor and a sparse gradient that never leave it."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(4, 8, sparse=True)
        self.register_buffer("graph", graph_of())

    def forward(self, x):
        return super().forward(x + self.rows(torch.arange(4)), self.graph * 2)


class Table(nn.Module):
    """Its result gets a sparse gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.ones(4, 8))

    def forward(self, x):
        return self.rows * 2


class Looks(nn.Module):
    """Its input gets a sparse gradient."""

    def forward(self, rows):
        return F.embedding(torch.tensor([0, 1, 1, 2]), rows, sparse=True)


class Net(nn.Module):
    part: type[nn.Module] = Mixes

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.head = nn.Linear(8, 8), type(self).part(), nn.Linear(8, 4)
        self.rows = nn.Parameter(torch.ones(4, 8))

    def middle(self, x, graph):
        return self.body(x)

    def forward(self, x, graph=None):
        return self.head(self.middle(self.stem(x), graph))


class Gives(Net):
    """Makes the sparse tensor here."""

    def middle(self, x, graph):
        return self.body(x, graph=graph_of())


class Passes(Net):
    def middle(self, x, graph):
        return self.body(x, graph)


class Gets(Net):
    part = Makes

    def middle(self, x, graph):
        x, sparse = self.body(x)
        return x * sparse.to_dense()


class GetsInTurn(Gets):
    """Not to be captured."""

    def middle(self, x, graph):
        return super().middle(x, graph) if float(x.detach().sum()) < 1e9 else x


class Stays(Net):
    part = Inside


class Here(Net):
    """Its own sparse tensors stay here."""

    def middle(self, x, graph):
        return torch.sparse.mm(graph_of(torch.sparse_csr), self.body(x))


class OfInput(Net):
    def middle(self, x, graph):
        return torch.sparse.mm(graph, self.body(x)) if graph.is_sparse else self.body(x)


class Counts(Net):
    def middle(self, x, graph):
        return self.body(x) * graph_of()._nnz()


class Back(Net):
    part = Table

    def middle(self, x, graph):
        return x + F.embedding(torch.tensor([0, 1, 1, 2]), self.body(x), sparse=True)


class BackThere(Net):
    part = Looks

    def middle(self, x, graph):
        return x + self.body(self.rows * 2)


def loss_of(output: torch.Tensor, target: Any = None) -> torch.Tensor:
    return output.pow(2).mean()


CASES: list[tuple[type[Net], bool, str]] = [
    (Gives, False, "part 'body' is given 'graph': a tensor of layout sparse_coo"),
    (Passes, True, "part 'body' is given 'graph': a tensor of layout sparse_coo"),
    (Gets, False, ""),  # what is computed from it runs at its worker
    (GetsInTurn, False, r"the result has 'body\[1\]': a tensor of layout sparse_coo"),
    (Stays, False, ""),
    (Here, False, ""),
    (OfInput, True, ""),
    (Counts, False, ""),
    (Back, False, "gradient body is a tensor of layout sparse_coo"),
    (BackThere, False, r"(?s)on worker 'worker1'.*gradient mul\(\) is a tensor of layout sparse_coo"),
]


def equal_or_refused(how: str) -> None:
    for kind, given, says in CASES:
        torch.manual_seed(1)
        net = kind()
        twin, args = copy.deepcopy(net), (torch.randn(4, 8), graph_of())[: 1 + given]
        ours, theirs = torch.optim.SGD, torch.optim.SGD(twin.parameters(), 0.1)
        model = rpc.serve(net, ["worker1"]) if how == "serve" else rpc.wrap(net, {"body": "worker1"})
        refused = says and how != "serve"  # the forward of a served model is all here
        with contextlib.closing(model), pytest.raises(rpc.NotSupported, match=says) if refused else contextlib.nullcontext():
            steps = ours(model.parameters(), 0.1)
            for _ in range(3):
                steps.zero_grad()
                theirs.zero_grad()
                if how == "batches":
                    loss = model.forward_backward(loss_of, *args, target=torch.zeros(4), chunks=1)
                else:
                    loss = loss_of(model(*args))
                    loss.backward()
                expected = loss_of(twin(*args))
                expected.backward()
                assert torch.equal(loss.detach(), expected.detach()), (kind, how)
                steps.step()
                theirs.step()
            if how == "serve":
                model.pull()
            state = model.state_dict()
            for name, value in twin.state_dict().items():
                assert torch.equal(state[name].to_dense(), value.to_dense()), (kind, how, name)


@pytest.mark.parametrize("how", ["loop", "batches", "serve"])
def test_sparse_tensors_are_right_or_refused(how):
    drive(partial(equal_or_refused, how))


def uncounted(method: str) -> None:
    model = rpc.wrap(Counts(), {"body": "worker1"}, capture=method)
    with pytest.raises(rpc.NotSupported, match="asks a tensor of layout sparse_coo for its _nnz"):
        model(torch.randn(4, 8))
    model.close()


@pytest.mark.parametrize("method", ["fx", "export"])
def test_no_capture_asks_a_sparse_tensor_without_data_for_its_values(method):
    drive(partial(uncounted, method))
