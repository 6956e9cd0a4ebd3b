"""Tensors that a collective must not take as they lie in memory, beside what torch computes in one process."""

from __future__ import annotations

import ctypes
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from group import Meeting, results, run_group
from test_collective_failures import join
from torch.testing._internal.two_tensor import TwoTensor

from rdmarpc.collectives.calls import sum_of
from rdmarpc.transport.exchange.kernels import FOLD_BYTES, folder

COUNT = 400_000
"""Floats of a part: more than the slots between two ranks hold, so what is overwritten too early is noticed."""
SIZE = 3


def same(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert torch.equal(found, expected), f"{what}: {found.flatten()[:8]} for {expected.flatten()[:8]}"


def _part(value: float) -> torch.Tensor:
    return torch.full((COUNT,), float(value))


def _shared(rank: int) -> None:
    """Inputs and outputs that share memory."""
    everybody = range(SIZE)
    whole = torch.cat([_part(10 * other + rank) for other in everybody])

    data = torch.cat([_part(10 * rank + other) for other in everybody])
    dist.all_to_all_single(data, data)
    same(data, whole, "all_to_all_single in place")
    parts = [_part(10 * rank + other) for other in everybody]
    dist.all_to_all(parts, parts)
    same(torch.cat(parts), whole, "all_to_all in place")

    gathered = torch.cat([_part(other + 1) for other in everybody])
    for place in (0, rank, SIZE - 1):  # its own part, which is usual, or that of another rank
        data = torch.zeros(SIZE * COUNT)
        mine = data[place * COUNT : (place + 1) * COUNT].fill_(rank + 1)
        dist.all_gather_into_tensor(data, mine)
        same(data, gathered, f"all_gather_into_tensor from part {place}")
        parts = [_part(rank + 1) for _ in everybody]
        dist.all_gather(parts, parts[place])
        same(torch.cat(parts), gathered, f"all_gather from part {place}")
    parts = [_part(rank + 1) for _ in everybody]
    dist.gather(parts[0], parts if rank == 1 else None, dst=1)
    if rank == 1:
        same(torch.cat(parts), gathered, "gather from another rank's part")

    total = _part(sum(other + rank for other in everybody))
    for place in (0, rank, SIZE - 1):
        data = torch.cat([_part(other + rank) for other in everybody])
        out = data[place * COUNT : (place + 1) * COUNT]
        dist.reduce_scatter_tensor(out, data)
        same(out, total, f"reduce_scatter_tensor into part {place}")
        parts = [_part(other + rank) for other in everybody]
        dist.reduce_scatter(parts[place], parts)
        same(parts[place], total, f"reduce_scatter into part {place}")


def _negative(rank: int) -> None:
    """Views that are the negative of what lies in memory. torch itself refuses those that are the conjugate."""

    def view(*values: float) -> torch.Tensor:
        return torch._neg_view(-torch.tensor(values))

    data = view(1.0, 2.0) if rank == 0 else torch.zeros(2)
    dist.broadcast(data, 0)
    same(data, torch.tensor([1.0, 2.0]), "broadcast of a negative view")
    data = torch.tensor([1.0, 2.0]) if rank == 0 else view(0.0, 0.0)
    dist.broadcast(data, 0)
    same(data, torch.tensor([1.0, 2.0]), "broadcast into a negative view")
    data = view(float(rank), -1.0)
    dist.all_reduce(data, dist.ReduceOp.MAX)
    same(data, torch.tensor([SIZE - 1.0, -1.0]), "all_reduce of negative views")
    out = torch.zeros(2 * SIZE)
    dist.all_gather_into_tensor(out, view(float(rank), 5.0))
    same(out, torch.tensor([value for other in range(SIZE) for value in (other, 5.0)]), "all_gather of a negative view")
    if rank == 0:
        dist.send(view(7.0, 8.0), 1)
        dist.send(torch.tensor([7.0, 8.0]), 1)
    elif rank == 1:
        data, other = torch.zeros(2), view(0.0, 0.0)
        dist.recv(data, 0)
        dist.recv(other, 0)
        same(data, torch.tensor([7.0, 8.0]), "send of a negative view")
        same(other, torch.tensor([7.0, 8.0]), "recv into a negative view")


def _types(rank: int) -> None:
    """Types that gloo has not got, of sizes that differ from rank to rank, into places with gaps; waited for backwards."""
    for dtype in (torch.bool, torch.complex64, torch.complex128, torch.int16):
        for rows in (0, 1, 50_000):
            sent = [(torch.arange((other + 1) * rows) % (other + 2)).to(dtype) for other in range(SIZE)]
            everybody = [torch.zeros(len(each), 2, dtype=dtype)[:, 0] for each in sent]
            at_root = [torch.zeros_like(each) for each in sent] if rank == 1 else None
            mine, from_left = torch.zeros_like(sent[rank]), torch.zeros_like(sent[rank - 1])
            exchanged = [torch.zeros_like(sent[rank]) for _ in sent]
            works = [
                dist.all_gather(everybody, sent[rank], async_op=True),
                dist.gather(sent[rank], at_root, 1, async_op=True),
                dist.scatter(mine, sent if rank == 2 else None, 2, async_op=True),
                dist.all_to_all(exchanged, sent, async_op=True),
                dist.isend(sent[rank], (rank + 1) % SIZE),
                dist.irecv(from_left, (rank - 1) % SIZE),
            ]
            for work in reversed(works):
                work.wait()
            found = [*everybody, *(at_root or []), mine, from_left, *exchanged]
            expected = [*sent, *(sent if at_root else []), sent[rank], sent[rank - 1], *[sent[rank]] * SIZE]
            for number, (one, other) in enumerate(zip(found, expected, strict=True)):
                same(one, other, f"{dtype}, {rows} rows, tensor {number}")


def _no_numbers(rank: int) -> None:
    """What is no number stays, whichever rank has it."""
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        for operation, of_torch in ((dist.ReduceOp.MIN, torch.minimum), (dist.ReduceOp.MAX, torch.maximum)):
            rows = torch.tensor([[float("nan"), 1, 1, 2, -0.0], [3, float("nan"), 1, 1, 0.0], [3, 4, float("nan"), 3, 0.0]])
            rows = rows.to(dtype).repeat(1, 100)
            expected = of_torch(of_torch(rows[0], rows[1]), rows[2])
            data = rows[rank].clone()
            dist.all_reduce(data, operation)
            assert torch.allclose(data, expected, equal_nan=True), f"{operation}, {dtype}: {data[:5]} for {expected[:5]}"


def _refused(rank: int) -> None:
    """Calls that cannot be made are errors before they begin: the group goes on."""

    def refused(kind: Any, text: str, call: Any, *given: Any) -> None:
        with pytest.raises(kind, match=text):
            call(*given)

    import rdmarpc as rpc

    refused(ValueError, "one place in memory", dist.all_reduce, torch.zeros(1).expand(5))
    refused(ValueError, "one place in memory", dist.broadcast, torch.zeros(1, 3).expand(2, 3), (rank + 1) % SIZE)
    refused(ValueError, "one place in memory", dist.recv, torch.zeros(1).expand(5), (rank + 1) % SIZE)
    for dtype in (torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn):
        refused(rpc.NotSupported, f"sum of {dtype}", dist.all_reduce, torch.ones(5).to(dtype))
    one, freed, shrunk = torch.ones(5), torch.ones(5), torch.ones(5)
    view, gaps = freed[3:], shrunk[::2]  # the first has an address
    freed.untyped_storage().resize_(0)
    shrunk.untyped_storage().resize_(8)
    for wrapper in (TwoTensor(one, one), freed, view, shrunk, gaps):
        refused(rpc.NotSupported, "without memory of its own", dist.all_reduce, wrapper)
    refused(rpc.NotSupported, "without memory of its own", torch.func.functionalize(dist.all_reduce), one)
    quantized = torch.quantize_per_tensor(one, 0.1 * (rank + 1), 0, torch.quint8)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(1 + rank)])
    refused(rpc.NotSupported, "broadcast of a quantized tensor", dist.broadcast, quantized, 0)
    refused(rpc.NotSupported, "all_reduce of a nested tensor", dist.all_reduce, nested)
    for absent in (SIZE, SIZE + 6):
        refused(ValueError, f"broadcast with rank {absent}", dist.broadcast, one, absent)
        refused(ValueError, f"reduce with rank {absent}", dist.reduce, one, absent)
        refused(ValueError, f"send with rank {absent}", dist.send, one, absent)
        refused(ValueError, f"recv with rank {absent}", dist.recv, one, absent)
    refused(ValueError, "itself", dist.recv, one, rank)
    _own_places(rank, refused)
    pending = functional.all_reduce(torch.ones(5), "sum", dist.group.WORLD)
    dist.all_reduce(pending)
    same(pending + 0, torch.full((5,), float(SIZE * SIZE)), "the result of a functional collective")
    data = torch.ones(5)
    dist.all_reduce(data)
    same(data, torch.full((5,), float(SIZE)), "the call after refused ones")


def _own_places(rank: int, refused: Any) -> None:
    """What stays at a rank has to fit its place (one element was spread over all of a larger tensor), and places must not
    share memory."""
    five = torch.ones(5)
    uneven = [torch.ones(1 if other == rank else 5) for other in range(SIZE)]
    places = [torch.zeros(5) for _ in range(SIZE)]
    unfit = "of 1 elements into a tensor of 5"
    refused(ValueError, unfit, dist.scatter, five, uneven, rank)
    refused(ValueError, unfit, dist.gather, torch.ones(1), places, rank)
    refused(ValueError, unfit, dist.all_gather, places, torch.ones(1))
    refused(ValueError, unfit, dist.all_to_all, places, uneven)
    refused(ValueError, unfit, dist.reduce_scatter, five, uneven)
    rows = [3 if other == rank else 0 for other in range(SIZE)]
    split = torch.zeros(3), torch.ones(SIZE), rows, [1] * SIZE
    refused(ValueError, "of 1 elements into a tensor of 3", dist.all_to_all_single, *split)
    shared = "share memory with each other"
    refused(ValueError, shared, dist.all_gather, [five] * SIZE, torch.ones(5))
    refused(ValueError, shared, dist.gather, torch.ones(5), [five] * SIZE, rank)
    several = torch.zeros(4 * SIZE + 1)
    refused(ValueError, shared, dist.all_to_all, [several[4 * at : 4 * at + 5] for at in range(SIZE)], [torch.ones(5)] * SIZE)
    refused(ValueError, shared, dist.all_reduce_coalesced, [five, five])


def _inference(rank: int) -> None:
    """Tensors made in the mode of inference, whose calls another thread runs."""
    with torch.inference_mode():
        gaps, halves, came = torch.full((5, 2), rank + 1.0)[:, 0], torch.full((5,), rank + 1).half(), torch.zeros(5, 2)[:, 0]
        works = [
            dist.all_reduce(gaps, async_op=True),
            dist.all_reduce(halves, dist.ReduceOp.AVG, async_op=True),
            dist.irecv(came, (rank - 1) % SIZE),
            dist.isend(torch.full((5,), float(rank)), (rank + 1) % SIZE),
        ]
        for work in works:
            work.wait()
    for found, expected in ((gaps, 6.0), (halves.float(), 2.0), (came, float((rank - 1) % SIZE))):
        assert found.tolist() == [expected] * 5


def _misfits(meeting: Meeting) -> list[str]:
    """The errors of rank 1, which asks for other messages than come, from rank 0 or from anybody; and of those that send."""
    found = []
    for what, peer in (("named", 0), ("any", None)):
        join(meeting, SIZE, what)
        with pytest.raises(Exception) as error:
            if meeting.rank == 1:
                dist.recv(torch.zeros(5), peer)
            else:
                dist.send(torch.zeros(4), 1)
                dist.recv(torch.zeros(1), 1)  # never comes: the sender hears of it here
        found.append(f"{type(error.value).__name__}: {error.value}")
        dist.destroy_process_group()
    return found


def test_a_message_that_does_not_fit_is_an_error_at_once():
    for rank, errors in enumerate(results(run_group(_misfits, SIZE, dynamic=True))):
        for error in errors:
            assert error.startswith("Mismatch: rank 1 receives 20 bytes of torch.float32 from rank "), (rank, error)


@pytest.mark.parametrize("name", ["SUM", "PRODUCT", "MIN", "MAX"])
def test_float16_is_added_up_by_a_kernel_as_by_torch(name: str):
    """Every number there is with some others, and what comes of three."""
    how = sum_of(getattr(dist.ReduceOp, name), torch.float16)
    assert how.code >= 0, "by torch"
    fold = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 4)(folder.address)
    generator = torch.Generator().manual_seed(1)
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16)
    left = every.repeat(20)
    right = torch.cat([every[torch.randperm(len(every), generator=generator)] for _ in range(20)])
    parts = [each.view(torch.float16) for each in (left, right, left.flip(0))]
    for count in (2, 3):
        for size in (parts[0].numel(), 999):  # the last elements go another way
            given = [part[:size].clone() for part in parts[:count]]
            expected, result = given[0], torch.empty_like(given[0])
            for part in given[1:]:
                expected = how.function(expected, part)
            scratch = torch.empty(2 * FOLD_BYTES, dtype=torch.uint8)
            table = torch.tensor([each.data_ptr() for each in (result, scratch, *given)])
            fold(how.code, table.data_ptr(), result.nbytes, count)
            none = expected.isnan()
            assert torch.equal(result.isnan(), none)
            assert torch.equal(result[~none].view(torch.int16), expected[~none].view(torch.int16))


BEYOND = (2 << 30) + 77
"""Elements, of a byte each: more than an int32 counts."""


def _beyond(meeting: Meeting) -> None:
    """One tensor of more than 2 GiB. Its elements differ around the ends of what int32 and uint32 words hold."""
    join(meeting, 2, "beyond", seconds=600.0, peer_timeout=60.0)
    rank = meeting.rank
    marks = [0, 1, (1 << 30) + 1, (1 << 31) - 1, 1 << 31, (1 << 31) + 1, BEYOND - 1]
    data = torch.zeros(BEYOND, dtype=torch.int8)

    def check(marked: int, others: int, what: str) -> None:
        for mark in marks:
            assert data[mark] == marked, f"{what}: {data[mark]} at {mark}"
            data[mark] = others
        assert tuple(torch.aminmax(data)) == (others, others), what

    def give(marked: int, others: int) -> None:
        data.fill_(others)
        data[marks] = marked

    give(10 + rank, 1 + rank)
    dist.all_reduce(data)
    check(21, 3, "all_reduce")
    give(30 + rank, 4 + rank)
    dist.broadcast(data, 1)
    check(31, 5, "broadcast")
    give(40 + rank, 6 + rank)
    if rank:
        dist.send(data, 0)
    else:
        dist.recv(data, 1)
        check(41, 7, "send and recv")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_more_than_two_gibibytes():
    if psutil.virtual_memory().available < 8 << 30:
        pytest.skip("needs 8 GiB of free memory")
    results(run_group(_beyond, 2, dynamic=True, timeout=900.0))


def _all(meeting: Meeting) -> None:
    join(meeting, SIZE, "tensors")
    for part in (_shared, _negative, _types, _no_numbers, _refused, _inference):
        part(meeting.rank)
    dist.destroy_process_group()


@pytest.mark.parametrize("device", ["shm", "tcp"])
def test_tensors_that_are_not_as_they_lie_in_memory(device: str):
    results(run_group(_all, SIZE, dynamic=True, environment={"RDMARPC_COLLECTIVES_DEVICE": device}))
