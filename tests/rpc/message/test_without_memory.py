"""Tensors that have no memory, or less than they need."""

import pytest
import torch
from called import identity
from group import results, run_group

import rdmarpc as rpc


def zero(shape, dtype=torch.float32):
    """A tensor that torch knows to be zero, and that has no memory."""
    return torch._efficientzerotensor(shape, dtype=dtype)


def released(count, left):
    """A tensor whose storage was resized."""
    made = torch.arange(float(count))
    made.untyped_storage().resize_(left)
    return made


def without_memory(rank):
    if rank == 0:
        for shape in ((3,), (300, 200)):
            leaf = zero(shape).requires_grad_()
            for sent in (
                zero(shape),
                zero(shape).t(),
                zero(shape, torch.complex64).conj(),
                leaf,
                torch.nn.Parameter(zero(shape)),
            ):
                for got in (
                    rpc.rpc_sync("worker1", identity, (sent,)),
                    rpc.rpc_sync("worker1", identity, ([sent, sent],))[0],
                    rpc.rpc_sync("worker1", identity, ((sent, sent.detach()),))[1],
                ):
                    assert got.shape == sent.shape and got.stride() == sent.stride() and got.dtype == sent.dtype
                    assert not got.count_nonzero() and not got.detach().add_(1).count_nonzero() < got.numel()
                assert rpc.rpc_sync("worker1", identity, (sent,)).requires_grad == sent.requires_grad
            assert not rpc.rpc_sync("worker1", zero, (shape,)).count_nonzero()
        for count, left in ((10, 0), (10, 16), (100_000, 0), (100_000, 4096)):
            lost = released(count, left)
            for sent in ((lost,), ([lost, lost.detach()],), (torch.nn.Parameter(lost),), ([lost, lost.view(torch.int32)],)):
                with pytest.raises(RuntimeError, match=f"no data to send: its storage was resized to {left} bytes"):
                    rpc.rpc_sync("worker1", identity, sent)
            with pytest.raises(RuntimeError, match="no data to send"):
                rpc.rpc_sync("worker1", released, (count, left))
            assert lost.untyped_storage().nbytes() == left
        assert rpc.rpc_sync("worker1", identity, (released(10, 16)[:4],)).tolist() == [0, 1, 2, 3]
    rpc.shutdown()


@pytest.mark.parametrize("device", ["shm", "tcp"])
def test_tensors_without_memory_are_zeros_or_refused(device):
    results(run_group(without_memory, transport=device))
