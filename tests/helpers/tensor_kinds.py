"""Tensors of every kind, how to tell that one is a faithful copy of another, and random structures of them."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from rdmarpc.message import layout

QUANTISED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)} - QUANTISED, key=str)
SAVED = [dtype for dtype in DTYPES if not re.fullmatch(r"torch\.u?int[1-7]", str(dtype))]
"""Without the integers of less than eight bits, which torch cannot save."""
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Tagged(torch.Tensor):
    """A subclass with an attribute and nothing else of its own."""


class Box:
    def __init__(self, **held):
        self.__dict__.update(held)


def of_bytes(dtype: torch.dtype, count: int, seed: int = 0) -> torch.Tensor:
    """A row of elements with random bits."""
    generator = torch.Generator().manual_seed(seed)
    top = 2 if dtype is torch.bool else 256
    raw = torch.randint(0, top, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return torch.empty(0, dtype=dtype).set_(raw.untyped_storage(), 0, (count,), (1,))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor as integers, so that any dtype and NaN compare."""
    value = tensor.detach()
    value = value.conj() if value.is_conj() else value
    value = torch._neg_view(value) if value.is_neg() else value
    if value.dtype.is_complex:
        value = torch.view_as_real(value)
    return value.view(_WORDS[value.itemsize]) if value.dtype is not torch.bool else value


def check_same(got: Any, sent: Any, *, strides: bool = True) -> None:
    """Fails unless ``got`` is a faithful copy. ``strides``: they too have to be the same."""
    assert type(got) is type(sent), (type(got), type(sent))
    what = (sent.dtype, sent.layout, tuple(sent.shape) if not sent.is_nested else None)
    assert got.dtype == sent.dtype and got.layout == sent.layout and got.device == sent.device, what
    assert got.requires_grad == sent.requires_grad and got.is_leaf and got.grad is None, what
    if sent.is_nested:
        assert got.size(0) == sent.size(0)
        for one, other in zip(got.unbind(), sent.unbind()):
            assert torch.equal(one, other)
        return
    assert got.shape == sent.shape, what
    if sent.layout is torch.sparse_coo:
        assert got.is_coalesced() == sent.is_coalesced()
        check_same(got.detach()._indices(), sent.detach()._indices(), strides=False)
        check_same(got.detach()._values(), sent.detach()._values(), strides=False)
    elif sent.layout in (torch.sparse_csr, torch.sparse_bsr):
        check_same(got.detach().crow_indices(), sent.detach().crow_indices())
        check_same(got.detach().col_indices(), sent.detach().col_indices())
        check_same(got.detach().values(), sent.detach().values(), strides=False)
    elif sent.layout in (torch.sparse_csc, torch.sparse_bsc):
        check_same(got.detach().ccol_indices(), sent.detach().ccol_indices())
        check_same(got.detach().row_indices(), sent.detach().row_indices())
        check_same(got.detach().values(), sent.detach().values(), strides=False)
    elif sent.is_quantized:
        assert got.qscheme() == sent.qscheme() and got.stride() == sent.stride()
        assert torch.equal(got.dequantize(), sent.dequantize())
        if sent.dtype in (torch.qint8, torch.quint8, torch.qint32):
            assert torch.equal(got.int_repr(), sent.int_repr())
    else:
        assert got.is_conj() == sent.is_conj() and got.is_neg() == sent.is_neg(), what
        size, used = (count * sent.itemsize for count in (layout.span(sent.shape, sent.stride()), sent.numel()))
        if strides and not layout.wasteful(size, used):  # else it may have been gathered
            assert got.stride() == sent.stride(), (what, got.stride(), sent.stride())
        if not sent.is_meta:
            assert torch.equal(bits(got), bits(sent)), what


def dense() -> Iterator[torch.Tensor]:
    """Every dtype small, large, transposed; and every way in which strides can be odd."""
    for dtype in DTYPES:
        yield of_bytes(dtype, 6)
        yield of_bytes(dtype, 12).view(3, 4).t()
        yield of_bytes(dtype, 9000)
        yield of_bytes(dtype, 9000).view(30, 300).t()
    base = torch.arange(60.0)
    yield torch.tensor(3.0)
    yield torch.tensor(2.0, requires_grad=True)
    yield torch.ones(0, 4)
    yield torch.ones(0, 4).t()
    yield torch.empty_strided((0, 3), (7, 2), dtype=torch.int8)
    yield torch.ones(3, 1).as_strided((3, 1), (1, 17))
    yield torch.ones(3, requires_grad=True)
    yield base.view(3, 20).t()
    yield base[::7]
    yield base[5:9]
    yield base[:12].view(3, 4)[:, ::2]
    yield base.expand(4, 60)
    yield torch.tensor(1.5).expand(1000, 1000)
    yield base.as_strided((10, 5), (3, 2), 4)
    yield torch.arange(20_000.0).as_strided((3000, 5), (3, 2), 4)
    yield torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    yield torch.randn(2, 30, 14, 15).to(memory_format=torch.channels_last)
    yield torch.randn(2000, 3).t()
    yield torch.randn(300, 300)[:, 1:200]
    yield of_bytes(torch.float8_e5m2, 5).requires_grad_()
    for count in (5, 3000):
        row = of_bytes(torch.complex64, count)
        yield row.conj()
        yield row.conj().imag
        yield torch._neg_view(row.conj())
        yield torch.randn(count, 2, dtype=torch.float64).t().requires_grad_()


def gathered() -> Iterator[torch.Tensor]:
    """Views that use little of a large span: they arrive row-major."""
    yield torch.randn(100, 5000)[:, 17]
    yield torch.randn(200, 300).t()[::5]
    yield of_bytes(torch.complex64, 30_000)[::3].conj()
    yield torch.randn(100_000)[::50].requires_grad_()


def other() -> Iterator[torch.Tensor]:
    """What is not dense."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield torch.sparse_coo_tensor([[0, 2]], [1.0, 2.0], (4,))
        yield torch.sparse_coo_tensor([[0, 2, 0]], [1, 2, 3], (4,))
        yield torch.sparse_coo_tensor([[0, 2, 0]], torch.randn(3, 5), (4, 5))
        yield torch.sparse_coo_tensor([[0, 2]], [1.0, 2.0], (4,), requires_grad=True)
        yield (torch.rand(200, 200) > 0.5).float().to_sparse()
        matrix = torch.randn(40, 60) * (torch.rand(40, 60) > 0.5)
        yield matrix.to_sparse_csr()
        yield matrix.to_sparse_csc()
        yield matrix.to_sparse_bsr((2, 3))
        yield matrix.to_sparse_bsc((2, 3))
        yield matrix.to_sparse_csr().requires_grad_()
        for dtype in (torch.qint8, torch.quint8, torch.qint32):
            yield torch.quantize_per_tensor(torch.randn(40, 60), 0.1, 2, dtype)
            yield torch.quantize_per_tensor(torch.randn(4, 6), 0.1, 2, dtype).t()
        yield torch.quantize_per_channel(torch.randn(4, 60), torch.rand(4).double(), torch.arange(4), 0, torch.qint8)
        yield torch.quantize_per_channel(torch.randn(4, 6), torch.rand(4), torch.zeros(4), 0, torch.quint4x2)
        yield torch.nested.nested_tensor([torch.ones(2), torch.randn(3)])
        yield torch.nested.nested_tensor([torch.ones(2), torch.randn(3)], layout=torch.jagged)
    yield torch.ones(3, 4, device="meta").t()
    yield torch.nn.Parameter(torch.ones(4))
    yield torch.nn.Parameter(torch.ones(4), requires_grad=False)
    yield torch.nn.Parameter(torch.randn(40, 50).t())
    yield torch.randn(40, 50).as_subclass(Tagged).requires_grad_()


# -- random ones


@st.composite
def _views(draw: Any, base: torch.Tensor) -> torch.Tensor:
    """A view of a row of elements, often an odd one."""
    room = base.numel()
    shape, strides = [], []
    for _ in range(draw(st.integers(0, 4))):
        size = draw(st.integers(0, 5))
        stride = draw(st.integers(0, max(0, (room - 1) // (size - 1)))) if size > 1 else draw(st.integers(0, 9))
        shape.append(size)
        strides.append(stride)
        room -= max(0, (size - 1) * stride)
    if room < 1 and 0 not in shape:
        return base
    offset = base.storage_offset() + draw(st.integers(0, max(0, room - 1)))
    view = base.as_strided(shape, strides, min(offset, base.numel()))
    if view.dtype.is_complex and draw(st.booleans()):
        view = view.conj()
    elif view.dtype.is_floating_point and view.itemsize > 1 and draw(st.booleans()):
        view = torch._neg_view(view)
    return view


@dataclass
class Number:
    """Stands for a tensor while a structure is drawn: torch cannot print some."""

    at: int


class Message:
    """A structure, printed without the elements of its tensors."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"Message({_text(self.value)})"


def _text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        where = f"storage {value.untyped_storage()._cdata:x} of {value.untyped_storage().nbytes()} at {value.storage_offset()}"
        return f"<{type(value).__name__} {value.dtype} {tuple(value.shape)} {value.stride()} {where}>"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}({', '.join(map(_text, value))})"
    if isinstance(value, dict):
        return str({key: _text(part) for key, part in value.items()})
    return f"Box({_text(vars(value))})" if isinstance(value, Box) else repr(value)


@st.composite
def structures(draw: Any, most: int = 512) -> Any:
    """A nested Python structure over a few tensors, which may share storage (of at most ``most`` elements: by default so few
    that nothing is gathered) and may occur more than once."""
    pool = []
    for _ in range(draw(st.integers(1, 3))):
        base = of_bytes(draw(st.sampled_from(SAVED)), draw(st.integers(0, most)), draw(st.integers(0, 99)))
        for _ in range(draw(st.integers(1, 3))):
            tensor = draw(_views(base))
            kind = draw(st.integers(0, 5))
            learns = tensor.dtype.is_floating_point and tensor.itemsize > 1  # torch cannot load smaller ones that require grad
            if kind == 1 and learns:
                tensor = tensor.detach().requires_grad_()
            elif kind == 2 and learns:
                tensor = torch.nn.Parameter(tensor, requires_grad=draw(st.booleans()))
            pool.append(tensor)
    leaves = st.one_of(st.builds(Number, st.integers(0, len(pool) - 1)), st.integers(), st.text(max_size=3), st.none())
    inner = st.recursive(
        leaves,
        lambda part: st.one_of(
            st.lists(part, max_size=4),
            st.tuples(part, part),
            st.dictionaries(st.text(max_size=2), part, max_size=3),
            st.builds(Box, left=part, right=part),
        ),
        max_leaves=12,
    )
    return Message(_filled(draw(inner), pool))


def _filled(value: Any, pool: list[torch.Tensor]) -> Any:
    if isinstance(value, Number):
        return pool[value.at]
    if isinstance(value, list | tuple):
        return type(value)(_filled(part, pool) for part in value)
    if isinstance(value, dict):
        return {key: _filled(part, pool) for key, part in value.items()}
    return Box(**_filled(vars(value), pool)) if isinstance(value, Box) else value


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of such a structure, in order, as often as they occur."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from tensors_in(part)
    elif isinstance(value, Box):
        yield from tensors_in(vars(value))


def shape_of(value: Any) -> Any:
    """The structure without its tensors, to compare."""
    if isinstance(value, torch.Tensor):
        return "tensor"
    if isinstance(value, list | tuple):
        return type(value), [shape_of(part) for part in value]
    if isinstance(value, dict):
        return {key: shape_of(part) for key, part in value.items()}
    return (Box, shape_of(vars(value))) if isinstance(value, Box) else value


def distance(one: torch.Tensor, other: torch.Tensor) -> int | None:
    """Bytes between two tensors of one storage; ``None`` if they are of two."""
    if one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr():
        return None
    return one.storage_offset() * one.itemsize - other.storage_offset() * other.itemsize
