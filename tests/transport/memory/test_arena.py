"""Properties of the allocator, over segments that no device registers."""

from __future__ import annotations

import gc
import itertools
import mmap
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rdmarpc.transport import ArenaFull
from rdmarpc.transport.memory.arena import (
    ALIGN,
    SEGMENT_BYTES,
    Arena,
    Block,
    Pool,
    Segment,
    default_limit,
    parse_bytes,
    size_class,
)
from rdmarpc.transport.memory.mapping import anonymous

MIB = 1 << 20


def make_arena(limit: int = 1 << 34) -> Arena:
    numbers = itertools.count(1)
    return Arena(lambda nbytes, pool: Segment(next(numbers), 0, anonymous(nbytes), pool), limit)


def overlap(blocks: Sequence[Block]) -> bool:
    spans = sorted((block.segment.number, block.offset, block.offset + block.nbytes) for block in blocks)
    return any(a[0] == b[0] and b[1] < a[2] for a, b in itertools.pairwise(spans))


@given(st.integers(0, 1 << 40))
def test_size_class(nbytes: int) -> None:
    size = size_class(nbytes)
    assert size >= max(nbytes, 1) and size % ALIGN == 0
    assert size_class(size) == size
    assert size - nbytes <= max(ALIGN, nbytes // 8)


@given(st.integers(1, 1 << 40), st.integers(1, 1 << 40))
def test_size_class_is_monotonic(a: int, b: int) -> None:
    assert size_class(min(a, b)) <= size_class(max(a, b))


sizes = st.one_of(st.integers(0, 300), st.integers(1, 100_000), st.integers(1, 24 * MIB))
steps = st.lists(st.one_of(sizes, st.tuples(st.just("free"), st.integers(0, 1 << 16))), max_size=60)


@settings(max_examples=60, deadline=None)
@given(steps)
def test_blocks_never_overlap_and_everything_returns(script: list) -> None:
    arena = make_arena()
    live: list[Block] = []
    for step in script:
        if isinstance(step, tuple):
            if live:
                arena.free(live.pop(step[1] % len(live)))
            continue
        block = arena.allocate(step)
        assert block.nbytes >= step and block.offset % ALIGN == 0 and block.segment.address % ALIGN == 0
        assert block.offset + block.nbytes <= block.segment.nbytes
        live.append(block)
        assert not overlap(live)
        assert arena.used == sum(block.nbytes for block in live)
        assert arena.capacity == sum(segment.nbytes for segment in arena.segments)
    for block in live:
        arena.free(block)
    if arena.segments:
        # All of it is one piece again: the largest segment can be given out whole, without growth.
        capacity, largest = arena.capacity, max(segment.nbytes for segment in arena.segments)
        whole = arena.allocate(largest // 2)
        arena.free(whole)
        arena.allocate(next(size for size in range(largest, 0, -ALIGN) if size_class(size) <= largest))
        assert arena.capacity == capacity


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 2 * MIB), min_size=1, max_size=40), st.integers(1, 16))
def test_the_limit_holds(wanted: list[int], limit_mib: int) -> None:
    limit = limit_mib * MIB
    arena = make_arena(limit)
    live = []
    for nbytes in wanted:
        try:
            live.append(arena.allocate(nbytes))
        except ArenaFull as error:
            assert str(limit) in str(error) and "arena_limit" in str(error) and "RDMARPC_ARENA_LIMIT" in str(error)
            assert arena.capacity + size_class(nbytes) > limit or arena.used + size_class(nbytes) > limit // 2
        assert arena.capacity <= limit
    assert not overlap(live)


@given(st.integers(1, 4 * MIB))
@settings(max_examples=20, deadline=None)
def test_a_warm_block_comes_back_first(nbytes: int) -> None:
    arena = make_arena()
    first, second, third = (arena.allocate(nbytes) for _ in range(3))
    for block in (second, third, first):
        arena.free(block)
    assert [arena.allocate(nbytes).offset for _ in range(3)] == [first.offset, third.offset, second.offset]


def test_an_arena_grows_by_segments() -> None:
    arena = make_arena()
    arena.allocate(1)
    assert [segment.nbytes for segment in arena.segments] == [SEGMENT_BYTES]
    arena.allocate(SEGMENT_BYTES)
    arena.allocate(3 * SEGMENT_BYTES)
    assert len(arena.segments) == 3 and arena.readable.segments[-1].nbytes >= 3 * SEGMENT_BYTES
    block = arena.allocate(100)
    found = arena.find(block.segment.address + block.offset, 100)
    assert found == (block.segment, block.offset)
    assert arena.find(block.segment.address + block.segment.nbytes - 1, 2) is None
    assert arena.find(1, 1) is None


def test_what_is_set_apart_needs_no_room() -> None:
    arena = make_arena(8 * MIB)
    messages = [arena.allocate(MIB) for _ in range(4)]
    while arena.capacity < arena.limit:
        messages.append(arena.allocate(MIB))
    pool = arena.pool()
    apart = [pool.set_apart(2 * MIB) for _ in range(3)]
    assert len({piece.data_ptr() for piece in apart}) == 3 and all(piece.nbytes == 2 * MIB for piece in apart)
    with pytest.raises(ArenaFull, match=f"{8 * MIB} of {8 * MIB} bytes in use, limit {8 * MIB}"):
        arena.allocate(1, pool)
    with pytest.raises(ArenaFull):
        arena.allocate(MIB)
    pool.close()
    apart.clear()
    for block in messages:
        arena.free(block)
    arena.allocate(MIB)
    assert arena.capacity == arena.limit and arena.used == MIB


def test_a_failed_segment_changes_nothing() -> None:
    def refuse(nbytes: int, pool: Pool) -> Segment:
        raise OSError("no memory")

    arena = Arena(refuse, 1 << 30)
    for _ in range(2):
        with pytest.raises(OSError, match="no memory"):
            arena.allocate(100)
    assert arena.used == 0 and arena.capacity == 0


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=0, max_size=4), st.sampled_from([torch.float32, torch.bfloat16, torch.bool]))
def test_a_tensor_gives_its_block_back(shape: list[int], dtype: torch.dtype) -> None:
    arena = make_arena()
    tensor = arena.readable.tensor(shape, dtype)
    assert tensor.shape == torch.Size(shape) and tensor.dtype == dtype and tensor.is_contiguous()
    tensor.fill_(1)
    view = tensor.reshape(-1)[:1] if tensor.numel() else tensor
    nbytes = tensor.numel() * dtype.itemsize
    del tensor
    arena.free(arena.allocate(1))  # reclaims
    assert arena.used == ALIGN + (size_class(nbytes) if nbytes else 0)
    del view
    arena.free(arena.allocate(1))
    arena.allocate(1)  # reclaims
    assert arena.used == ALIGN


def test_tensors_come_and_go_on_many_threads() -> None:
    arena = make_arena(1 << 30)
    errors: list[BaseException] = []

    def run(lane: int) -> None:
        try:
            for turn in range(200):
                tensors = [arena.readable.tensor((64 * (turn % 7 + 1),), torch.int64).fill_(lane) for _ in range(4)]
                assert all(bool((tensor == lane).all()) for tensor in tensors)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(lane,)) for lane in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert not errors
    arena.free(arena.allocate(1))
    arena.allocate(1)
    assert arena.used == ALIGN and arena.capacity == SEGMENT_BYTES


def test_a_gradient_keeps_its_storage() -> None:
    arena = make_arena()
    weight = arena.readable.tensor((100,), torch.float32).fill_(2.0).requires_grad_()
    product = (weight * weight).sum()
    del weight
    arena.readable.tensor((100,), torch.float32).fill_(-1.0)
    product.backward()
    assert arena.used >= 2 * size_class(400)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("1048576", MIB), ("512MiB", 512 * MIB), ("8g", 8 << 30), ("1.5 kb", 1536), ("2T", 2 << 40), (" 7B ", 7)],
)
def test_sizes_in_words(text: str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


def test_the_default_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RDMARPC_ARENA_LIMIT", "3MiB")
    assert default_limit() == 3 * MIB
    monkeypatch.delenv("RDMARPC_ARENA_LIMIT")
    assert default_limit() > MIB
    monkeypatch.setenv("RDMARPC_ARENA_LIMIT", "plenty")
    with pytest.raises(ValueError, match="RDMARPC_ARENA_LIMIT"):
        default_limit()


def test_memory_that_the_host_refuses_is_an_error_and_no_signal(tmp_path: Path) -> None:
    place = tmp_path / "segment"
    place.write_bytes(bytes(4 * MIB))
    with open(place, "r+b") as file, open(place, "rb") as unwritable:
        arena = Arena(lambda nbytes, pool: segment, 4 * MIB)
        segment = Segment(1, 0, mmap.mmap(file.fileno(), 4 * MIB), arena.readable, unwritable.fileno())
        with pytest.raises(ArenaFull, match="this host has no memory for 2097152 more bytes"):
            arena.readable.tensor((2 * MIB,), torch.uint8)
        segment.fd = file.fileno()
        assert arena.readable.tensor((4 * MIB,), torch.uint8).fill_(1).sum() == 4 * MIB  # nothing was lost


def test_tensors_that_the_collector_frees_while_all_are_looked_at() -> None:
    arena = make_arena()
    gc.collect()
    gc.disable()
    limits = gc.get_threshold()
    kept = [arena.readable.tensor((64,), torch.uint8) for _ in range(60)]
    for _ in range(60):
        cycle: list[object] = [arena.readable.tensor((64,), torch.uint8)]
        cycle.append(cycle)
    del cycle
    taken = [(number, number) for number in range(4000)]  # no tuple is left that can be used again
    gc.set_threshold(gc.get_count()[0] + 30)
    gc.enable()
    try:
        assert arena.shown() == []  # memory of this process alone
    finally:
        gc.set_threshold(*limits)
    assert len(kept) == 60 and len(taken) == 4000
