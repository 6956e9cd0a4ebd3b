"""A graph network: nodes' features are at servers, and a worker fetches those of a batch's neighbourhood, in every step others
(GraphSAGE: Hamilton et al., 2017). The net's gradients go to the same servers and weights come back, as in ``learning``.

The graph is generated: nodes of one community mostly have neighbours of the same, and their features lie about its centre.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..harness.functions import FUNCTIONS
from ..harness.libraries import Client
from ..harness.meeting import meet
from ..harness.turns import Figure
from . import learning_server as server
from .vectors import Vectors

COMMUNITIES, ALIKE = 16, 0.8
"""How many there are, and the share of a node's neighbours that are of its own."""
FANS = (8, 4)
"""Neighbours that are drawn of each node of the batch, and of each of those."""
NAMES = [*server.NAMES, "features"]
_features: Tensor | None = None


def begin(job: dict[str, Any]) -> None:
    """In every process of a turn; a server makes the features of its nodes: those whose number leaves its own when divided by
    the number of servers."""
    global _features
    server.begin(job)
    number = job["rank"] - job["clients"]
    if number >= 0:
        mine = torch.arange(number, job["nodes"], job["servers"])
        centres = torch.randn(COMMUNITIES, job["features"], generator=torch.Generator().manual_seed(3))
        noise = torch.randn(len(mine), job["features"], generator=torch.Generator().manual_seed(10 + number))
        _features = centres[community(mine)] + 2.0 * noise


def features(x: Tensor) -> Tensor:
    """``x``: rows of this server, as float32, which has all whole numbers up to 16,777,216. Returns milliseconds that it took,
    and the rows."""
    assert _features is not None
    begin = time.perf_counter()
    answer = torch.empty(1 + len(x) * _features.shape[1])
    torch.index_select(_features, 0, x.long(), out=answer[1:].view(len(x), -1))
    answer[0] = 1e3 * (time.perf_counter() - begin)
    return answer


FUNCTIONS.update(features=features)


def community(nodes: Tensor) -> Tensor:
    return (nodes * 2654435761 >> 7) % COMMUNITIES  # not by servers, whose nodes are those that leave a number


class Graph:
    """Draws neighbours. They are not stored: who is asked for a node's k-th neighbour draws it in the same way."""

    def __init__(self, nodes: int) -> None:
        self._nodes = nodes
        self._by_community = [torch.nonzero(community(torch.arange(nodes)) == each).view(-1) for each in range(COMMUNITIES)]

    def neighbours(self, of: Tensor, count: int, drawn: torch.Generator) -> Tensor:
        """``of``: (n,) nodes. Returns (n, count)."""
        shape = (len(of), count)
        anyone = torch.randint(self._nodes, shape, generator=drawn)
        alike, places = torch.rand(shape, generator=drawn) < ALIKE, torch.rand(shape, generator=drawn)
        own = torch.empty(shape, dtype=torch.int64)
        for number, members in enumerate(self._by_community):
            here = community(of) == number
            own[here] = members[(places[here] * len(members)).long()]
        return torch.where(alike, own, anyone)


class Sage(nn.Module):
    """Two layers: a node's vector beside the mean of its neighbours'."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(2 * features, width), nn.Linear(2 * width, COMMUNITIES)

    def forward(self, nodes: Tensor, near: Tensor, far: Tensor) -> Tensor:
        """Features of the batch (n, f), of neighbours (n, k, f), of theirs (n, k, l, f)."""
        inner = F.relu(self.first(torch.cat([near, far.mean(2)], 2)))
        own = F.relu(self.first(torch.cat([nodes, near.mean(1)], 1)))
        logits: Tensor = self.second(torch.cat([own, inner.mean(1)], 1))
        return logits


def drive(client: Client, job: dict[str, Any]) -> tuple[list[Figure], dict[str, bytes]]:
    """All steps; the first does not count."""
    rank, servers = job["rank"], job["servers"]
    net, graph = Sage(job["features"], job["width"]), Graph(job["nodes"])
    vectors = Vectors(net, servers, rank)
    if rank == 0:
        vectors.begin(client)
    meet("begun", job)
    drawn = torch.Generator().manual_seed(200 + rank)
    took: list[tuple[float, float, float, float]] = []
    losses, sizes = [], []
    for _ in range(job["steps"] + 1):
        start = time.perf_counter()
        batch = torch.randint(job["nodes"], (job["batch"],), generator=drawn)
        near = graph.neighbours(batch, FANS[0], drawn)
        far = graph.neighbours(near.view(-1), FANS[1], drawn)
        nodes, places = torch.unique(torch.cat([batch, near.view(-1), far.view(-1)]), return_inverse=True)
        asking = time.perf_counter()
        rows, fetch_served = fetched(client, nodes, job)
        got = time.perf_counter()
        vectors.forget()
        parts = rows[places].split([batch.numel(), near.numel(), far.numel()])
        loss = F.cross_entropy(
            net(parts[0], parts[1].view(*near.shape, -1), parts[2].view(*near.shape, FANS[1], -1)), community(batch)
        )
        loss.backward()
        computed = time.perf_counter()
        vectors.exchange(client)
        end = time.perf_counter()
        took.append((1e3 * (end - start), 1e3 * (got - asking), 1e3 * (end - computed), fetch_served))
        losses.append(float(loss.detach()))
        sizes += [rows.numel() * 4 / servers, *(4.0 * len(each) for each in vectors.weights)]
    figures: list[Figure] = []
    for (step, fetch, exchange, served), step_served in list(zip(took, vectors.spent(client)))[1:]:
        at_servers = served + step_served
        figures += [("step", 0, step), ("at servers", 0, at_servers), ("communication", 0, fetch + exchange - at_servers)]
        figures += [("computation", 0, step - fetch - exchange), ("fetch", 0, fetch)]
    figures += [("average tensor", 0, sum(sizes) / len(sizes)), ("sent", 0, 4.0 * rows.numel())]
    return figures, {"losses of worker 0": torch.tensor(losses).numpy().tobytes(), "weights": vectors.digest()}


def fetched(client: Client, nodes: Tensor, job: dict[str, Any]) -> tuple[Tensor, float]:
    """The features of these nodes (n, f), from all servers at once; and how long the slowest server took, milliseconds."""
    owners = nodes % job["servers"]
    rows = torch.empty(len(nodes), job["features"])
    calls = []
    for number in range(job["servers"]):
        here = owners == number
        calls.append((here, client.start("features", (nodes[here] // job["servers"]).float(), None, number)))
    served = 0.0
    for here, call in calls:
        answer = client.finish(call).view(-1)
        rows[here] = answer[1:].view(-1, job["features"])
        served = max(served, float(answer[0]))
    return rows, served
