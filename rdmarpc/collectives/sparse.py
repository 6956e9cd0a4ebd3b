"""``all_reduce`` of sparse tensors (COO): all parts to all ranks, which add them up in the order of the ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from ..transport import NotSupported
from . import calls
from .engine import Engine
from .signature import Mismatch
from .sums import sum_of


def all_reduce(tensor: torch.Tensor, operation: dist.ReduceOp) -> Callable[[Engine, float], None]:
    """``tensor`` gets the sum, coalesced. All ranks give tensors of one shape and one number of sparse dimensions."""
    if sum_of(operation, tensor.dtype).name != "sum":
        raise NotSupported("an all_reduce of sparse tensors that is no sum")
    part = tensor.detach().coalesce()

    def run(engine: Engine, limit: float) -> None:
        size = engine.size

        def gather(into: list[torch.Tensor], own: torch.Tensor) -> None:
            calls.all_to_all("all_gather", into, [own] * size)(engine, limit)

        mine = torch.tensor([part._nnz(), part.sparse_dim(), *part.shape], device="cpu")
        heads = [torch.zeros_like(mine) for _ in range(size)]
        gather(heads, mine)
        for rank, head in enumerate(heads):
            if not torch.equal(head[1:], mine[1:]):
                me, other = engine.ranks[engine.rank], engine.ranks[rank]
                theirs = f"{tuple(head[2:].tolist())}, {int(head[1])} of them sparse"
                raise Mismatch(
                    f"rank {me} adds up a sparse tensor of {tuple(part.shape)}, {part.sparse_dim()} of them sparse, and rank "
                    f"{other} one of {theirs}"
                )
        counts = [head[0] for head in heads]
        inner = tuple(part.values().shape[1:])
        indices = [torch.empty(part.sparse_dim() * int(count), dtype=torch.int64, device="cpu") for count in counts]
        gather(indices, part.indices().contiguous().view(-1))
        values = [torch.empty((int(count), *inner), dtype=part.dtype, device="cpu") for count in counts]
        gather([each.view(-1) for each in values], part.values().contiguous().view(-1))
        where = torch.cat([each.view(part.sparse_dim(), -1) for each in indices], dim=1)
        tensor.copy_(torch.sparse_coo_tensor(where, torch.cat(values), part.shape, device="cpu").coalesce())

    return run
