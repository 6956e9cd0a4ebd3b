"""torch_geometric's distributed loader: two partitions of one graph, neighbours and features of the other come by RPC."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from ranks import free_port, implementation, start
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch_geometric.distributed import DistContext, DistNeighborLoader, LocalFeatureStore, LocalGraphStore
from torch_geometric.nn import SAGEConv

PARTS, NODES, BATCH, CLASSES = 2, 60, 6, 3


def partition(rank: int) -> tuple[LocalFeatureStore, LocalGraphStore]:
    """The nodes with ``number % PARTS == rank`` and the edges that end there."""
    generator = torch.Generator().manual_seed(1)
    edges = torch.stack([torch.randint(NODES, (400,), generator=generator), torch.randint(NODES, (400,), generator=generator)])
    x, y = torch.randn(NODES, 8, generator=generator), torch.randint(CLASSES, (NODES,), generator=generator)
    edge_attr = torch.randn(400, 2, generator=generator)
    node_part, edge_part = torch.arange(NODES) % PARTS, edges[1] % PARTS
    here, mine = node_part == rank, edge_part == rank
    edge_id = torch.arange(400)[mine]
    order = edges[1][mine].argsort(stable=True)
    edge_id = edge_id[order]
    features = LocalFeatureStore.from_data(
        node_id=torch.arange(NODES)[here], x=x[here], edge_id=edge_id, edge_attr=edge_attr[edge_id]
    )
    graph = LocalGraphStore.from_data(edge_id=edge_id, edge_index=edges[:, edge_id], num_nodes=NODES, is_sorted=True)
    for store in (features, graph):
        store.num_partitions, store.partition_idx, store.meta = PARTS, rank, {"is_hetero": False, "num_parts": PARTS}
    features.labels = y
    features.node_feat_pb, features.edge_feat_pb = node_part, edge_part
    graph.node_pb, graph.edge_pb = node_part, edge_part
    return features, graph


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.second = SAGEConv(8, 16), SAGEConv(16, CLASSES)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x, edge_index).relu(), edge_index)


def load(rank: int, port: int, workers: int) -> dict[str, Any]:
    """All batches of an epoch and the losses of training on them; ``workers``: processes that sample, 0: this one does."""
    features, graph = partition(rank)
    loader = DistNeighborLoader(
        (features, graph),
        num_neighbors=[-1, -1],  # all: what a worker draws depends on who asks first
        batch_size=BATCH,
        input_nodes=torch.arange(NODES)[rank::PARTS],
        master_addr="127.0.0.1",
        master_port=port,
        current_ctx=DistContext(rank, rank, PARTS, PARTS, "sampling"),
        num_workers=workers,
        concurrency=2 if workers else 1,
        async_sampling=bool(workers),
        shuffle=False,
        persistent_workers=bool(workers),
    )
    net = DDP(Net())
    optimizer, batches, losses = torch.optim.SGD(net.parameters(), lr=0.1), [], []
    for batch in loader:
        kept = ("n_id", "e_id", "x", "y", "edge_attr", "edge_index")
        batches.append({name: batch[name].clone() for name in kept})
    batches.sort(key=lambda found: found["n_id"][:BATCH].tolist())  # several may be sampled at once
    for found in batches:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(found["x"], found["edge_index"])[:BATCH], found["y"][:BATCH])
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return {"batches": batches, "losses": losses, "net": net.module.state_dict()}


def main(rank: int) -> dict[str, Any] | None:
    dist.init_process_group("gloo")
    ports = torch.tensor([free_port(), free_port()])
    dist.broadcast(ports, 0)
    found: dict[str, Any] = {"rpc": implementation()}
    found["in workers"] = load(rank, int(ports[0]), 1)
    dist.barrier()
    found["here"] = load(rank, int(ports[1]), 0)
    dist.barrier()
    dist.destroy_process_group()
    return found


if __name__ == "__main__":
    start(main, PARTS)
