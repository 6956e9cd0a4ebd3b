"""torch_geometric's layers in small graph classifiers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric import nn as gnn
from torch_geometric.data import Batch, Data

from .entry import Entry


def _graph(n: int) -> Any:
    return (torch.randn(12, 8), torch.randint(0, 12, (2, 40)), torch.tensor([0] * 5 + [1] * 7)), {}


class Classifier(nn.Module):
    def __init__(self, kind: str, pool: str = "global_mean_pool", dropout: float = 0.0) -> None:
        super().__init__()
        make = getattr(gnn, kind)
        if kind == "GINConv":
            layers = [make(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))) for _ in range(3)]
        elif kind == "GATConv":
            layers = [make(8, 4, heads=2, dropout=dropout) for _ in range(3)]
        else:
            layers = [make(8, 8) for _ in range(3)]
        self.layers, self.head, self.pool = nn.ModuleList(layers), nn.Linear(8, 3), pool

    def forward(self, x, edges, of):
        for layer in self.layers:
            x = F.relu(layer(x, edges))
        return self.head(getattr(gnn, self.pool)(x, of))


class Pooled(nn.Module):
    """Keeps half of the nodes: how many, the data decides."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.pool, self.two = gnn.GCNConv(8, 8), gnn.TopKPooling(8, 0.5), gnn.GCNConv(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x, edges, of):
        x = F.relu(self.one(x, edges))
        x, edges, _, of, _, _ = self.pool(x, edges, None, of)
        return self.head(gnn.global_max_pool(F.relu(self.two(x, edges)), of))


class Attending(Classifier):
    """Message passing and attention over whole graphs, with dropout of both."""

    def __init__(self) -> None:
        super().__init__("GCNConv")
        self.layers = nn.ModuleList(gnn.GPSConv(8, layer, heads=2, dropout=0.1) for layer in self.layers)

    def forward(self, x, edges, of):
        for layer in self.layers:
            x = layer(x, edges, of)
        return self.head(gnn.global_mean_pool(x, of))


class Coarsened(Pooled):
    """Its pooling multiplies sparse matrices in CSR."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = gnn.ASAPooling(8, 0.5)

    def forward(self, x, edges, of):
        x, edges, _, of, _ = self.pool(F.relu(self.one(x, edges)), edges, batch=of)
        return self.head(gnn.global_max_pool(F.relu(self.two(x, edges)), of))


class OnData(nn.Module):
    """Takes a ``Batch`` of graphs, as loaders give it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Classifier("GCNConv")

    def forward(self, data):
        return self.inner(data.x, data.edge_index, data.batch)


def _data(n: int) -> Any:
    graphs = [Data(x=torch.randn(k, 8), edge_index=torch.randint(0, k, (2, 3 * k))) for k in (4, 6)]
    return (Batch.from_data_list(graphs),), {}


def _of(kind: str, **more: Any) -> Entry:
    return Entry(lambda: Classifier(kind), _graph, **more)


ENTRIES: dict[str, Entry] = {
    "GCN": _of("GCNConv"),
    "GAT": _of("GATConv"),
    "GAT, dropout": Entry(lambda: Classifier("GATConv", dropout=0.3), _graph),
    "GIN": _of("GINConv"),
    "GraphSAGE": _of("SAGEConv"),
    "TransformerConv": _of("TransformerConv"),
    "GATv2, attention pooling": Entry(lambda: Classifier("GATv2Conv", "global_add_pool"), _graph),
    "top-k pooling": Entry(Pooled, _graph),
    "ASA pooling": Entry(Coarsened, _graph),
    "graph U-Net": Entry(lambda: gnn.GraphUNet(8, 8, 3, 2), _graph),
    "GPS": Entry(Attending, _graph),
    "GCN on Data": Entry(OnData, _data),
}
