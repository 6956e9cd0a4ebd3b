"""How the compiler emits the operations of the machine that kernels use: ``atomics`` and ``completions`` say what each does.

Imported only where a kernel is compiled.
"""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .atomics import FOLD_BYTES, FOLD_FLOATS, FOLD_OPERATIONS, FOLD_TYPES, FOLDS, STREAM_ALIGN, STREAM_BYTES

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_ARM = platform.machine() == "aarch64"
SYS_FUTEX = 98 if _ARM else 202

i64 = types.int64


def _word(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, _I64.as_pointer())


@intrinsic
def load_acquire(typingctx: Any, address: Any) -> Any:
    """``load_acquire(address) -> int64``."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_word(builder, args[0]), "acquire", 8)

    return i64(i64), codegen


@intrinsic
def store_release(typingctx: Any, address: Any, value: Any) -> Any:
    """``store_release(address, value)``."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store_atomic(args[1], _word(builder, args[0]), "release", 8)
        return context.get_dummy_value()

    return types.void(i64, i64), codegen


@intrinsic
def fetch_add(typingctx: Any, address: Any, value: Any) -> Any:
    """``fetch_add(address, value) -> int64`` before the addition."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _word(builder, args[0]), args[1], "seq_cst")

    return i64(i64, i64), codegen


@intrinsic
def compare_exchange(typingctx: Any, address: Any, expected: Any, desired: Any) -> Any:
    """``compare_exchange(address, expected, desired) -> int64``: 1 if the word held ``expected``, else 0."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pair = builder.cmpxchg(_word(builder, args[0]), args[1], args[2], "seq_cst", "seq_cst")
        return builder.zext(builder.extract_value(pair, 1), _I64)

    return i64(i64, i64, i64), codegen


@intrinsic
def fence(typingctx: Any) -> Any:
    """Full fence: stores before it are visible before loads after it."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def errno(typingctx: Any) -> Any:
    """``errno() -> int64``: of this thread's last C function that failed."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(_I32.as_pointer(), [])
        call = cgutils.get_or_insert_function(builder.module, kind, "__errno_location")
        return builder.sext(builder.load(builder.call(call, [])), _I64)

    return i64(), codegen


@intrinsic
def call(typingctx: Any, function: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """``call(function, a, b, c, d) -> int64``: the C function at an address, which returns an ``int`` and has at most four
    arguments, integers or pointers. Those that it has not are ignored: all travel in whole registers on the ABIs that we run on
    (x86-64, aarch64 Linux)."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        target = builder.inttoptr(args[0], ir.FunctionType(_I32, [_I64] * 4).as_pointer())
        return builder.sext(builder.call(target, args[1:]), _I64)

    return i64(i64, i64, i64, i64, i64), codegen


@intrinsic
def pause(typingctx: Any) -> Any:
    """Tell the core that this is a spin loop."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if _ARM:
            kind, name, operands = ir.FunctionType(ir.VoidType(), [_I32]), "llvm.aarch64.hint", [ir.Constant(_I32, 1)]
        else:
            kind, name, operands = ir.FunctionType(ir.VoidType(), []), "llvm.x86.sse2.pause", []
        builder.call(cgutils.get_or_insert_function(builder.module, kind, name), operands)
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def now(typingctx: Any) -> Any:
    """``now() -> int64``: CLOCK_MONOTONIC in nanoseconds (no system call: vDSO)."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        spec = cgutils.alloca_once(builder, ir.ArrayType(_I64, 2))
        kind = ir.FunctionType(_I32, [_I32, _I64])
        call = cgutils.get_or_insert_function(builder.module, kind, "clock_gettime")
        builder.call(call, [ir.Constant(_I32, 1), builder.ptrtoint(spec, _I64)])
        value = builder.load(spec)
        seconds = builder.mul(builder.extract_value(value, 0), ir.Constant(_I64, 1_000_000_000))
        return builder.add(seconds, builder.extract_value(value, 1))

    return i64(), codegen


@intrinsic
def futex(typingctx: Any, address: Any, operation: Any, value: Any, timeout_ns: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address, operation, value, timeout_ns = args
        billion = ir.Constant(_I64, 1_000_000_000)
        spec = cgutils.alloca_once(builder, ir.ArrayType(_I64, 2))
        pair = ir.Constant(ir.ArrayType(_I64, 2), ir.Undefined)
        pair = builder.insert_value(pair, builder.sdiv(timeout_ns, billion), 0)
        pair = builder.insert_value(pair, builder.srem(timeout_ns, billion), 1)
        builder.store(pair, spec)
        # syscall() is variadic in C; on the ABIs we run on (x86-64, aarch64 Linux) integers travel alike.
        kind = ir.FunctionType(_I64, [_I64] * 7)
        call = cgutils.get_or_insert_function(builder.module, kind, "syscall")
        zero = ir.Constant(_I64, 0)
        number = ir.Constant(_I64, SYS_FUTEX)
        return builder.call(call, [number, address, operation, value, builder.ptrtoint(spec, _I64), zero, zero])

    return i64(i64, i64, i64, i64), codegen


_WIDE = ir.VectorType(_I64, 4)


@intrinsic
def stream(typingctx: Any, dst: Any, src: Any) -> Any:
    """Copy ``STREAM_BYTES`` bytes with stores that go past the caches. ``dst`` is aligned to ``STREAM_ALIGN``. A ``fence``
    has to come before anything that announces the data."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        past_caches = builder.module.add_metadata([ir.Constant(_I32, 1)])
        offsets = [ir.Constant(_I64, at) for at in range(0, STREAM_BYTES, STREAM_ALIGN)]
        pieces = []
        for offset in offsets:
            source = builder.inttoptr(builder.add(args[1], offset), _WIDE.as_pointer())
            pieces.append(builder.load(source, align=1))
        for offset, piece in zip(offsets, pieces, strict=True):
            target = builder.inttoptr(builder.add(args[0], offset), _WIDE.as_pointer())
            builder.store(piece, target, align=STREAM_ALIGN).set_metadata("nontemporal", past_caches)
        return context.get_dummy_value()

    return types.void(i64, i64), codegen


@intrinsic
def call_2(typingctx: Any, function: Any, a: Any, b: Any) -> Any:
    """``int function(a, b)`` at an address; ``b`` is a 32-bit integer."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(_I32, [_I64, _I32])
        target = builder.inttoptr(args[0], kind.as_pointer())
        return builder.sext(builder.call(target, [args[1], builder.trunc(args[2], _I32)]), _I64)

    return i64(i64, i64, i64), codegen


@intrinsic
def call_3(typingctx: Any, function: Any, a: Any, b: Any, c: Any) -> Any:
    """``int function(a, b, c)`` at an address; all are pointers."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        target = builder.inttoptr(args[0], ir.FunctionType(_I32, [_I64] * 3).as_pointer())
        return builder.sext(builder.call(target, args[1:]), _I64)

    return i64(i64, i64, i64, i64), codegen


@intrinsic
def call_poll(typingctx: Any, function: Any, cq: Any, count: Any, wc: Any) -> Any:
    """``int poll_cq(cq, count, wc)``."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        target = builder.inttoptr(args[0], ir.FunctionType(_I32, [_I64, _I32, _I64]).as_pointer())
        return builder.sext(builder.call(target, [args[1], builder.trunc(args[2], _I32), args[3]]), _I64)

    return i64(i64, i64, i64, i64), codegen


@intrinsic
def u32(typingctx: Any, address: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.zext(builder.load(builder.inttoptr(args[0], _I32.as_pointer())), _I64)

    return i64(i64), codegen


@intrinsic
def be32(typingctx: Any, address: Any) -> Any:
    """A 32-bit word in network order."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = builder.load(builder.inttoptr(args[0], _I32.as_pointer()))
        return builder.zext(builder.bswap(word), _I64)

    return i64(i64), codegen


@intrinsic
def set_u32(typingctx: Any, address: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(builder.trunc(args[1], _I32), builder.inttoptr(args[0], _I32.as_pointer()))
        return context.get_dummy_value()

    return types.void(i64, i64), codegen


_ELEMENTS = {
    "float32": ir.FloatType(),
    "float64": ir.DoubleType(),
    "bfloat16": ir.IntType(16),
    "int8": ir.IntType(8),
    "uint8": ir.IntType(8),
    "int16": ir.IntType(16),
    "int32": _I32,
    "int64": _I64,
}
_PIECE = 64


@intrinsic
def fold(typingctx: Any, code: Any, dst: Any, left: Any, right: Any) -> Any:
    """``dst = left OP right`` over ``FOLD_BYTES`` bytes: a case for each type and operation."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code, *places = args
        over = builder.append_basic_block("folded")
        choice = builder.switch(code, over)
        for at, kind in enumerate(FOLD_TYPES):
            for number, operation in enumerate(FOLD_OPERATIONS):
                if operation.startswith("b") and kind in FOLD_FLOATS:
                    continue
                block = builder.append_basic_block(f"{kind}.{operation}")
                choice.add_case(ir.Constant(_I64, FOLDS * at + number), block)
                builder.position_at_end(block)
                _fold_all(builder, kind, operation, places)
                builder.branch(over)
        builder.position_at_end(over)
        return context.get_dummy_value()

    return types.void(i64, i64, i64, i64), codegen


def _fold_all(builder: Any, kind: str, operation: str, places: Any) -> None:
    element = _ELEMENTS[kind]
    width = {"float": 32, "double": 64}.get(str(element)) or element.width
    vector = ir.VectorType(element, 8 * _PIECE // width)

    def at(place: Any, offset: int) -> Any:
        return builder.inttoptr(builder.add(place, ir.Constant(_I64, offset)), vector.as_pointer())

    dst, left, right = places
    made = []
    for offset in range(0, FOLD_BYTES, _PIECE):
        a, b = (builder.load(at(place, offset), align=1) for place in (left, right))
        made.append(_bfloat16(builder, operation, a, b) if kind == "bfloat16" else _folded(builder, kind, operation, a, b))
    for number, value in enumerate(made):
        builder.store(value, at(dst, number * _PIECE), align=1)


def _folded(builder: Any, kind: str, operation: str, a: Any, b: Any) -> Any:
    is_float, unsigned = kind in FOLD_FLOATS, kind == "uint8"
    if operation in ("min", "max"):
        # As std::min and std::max, which keep the first of two that are equal or not ordered.
        x, y = (b, a) if operation == "min" else (a, b)
        compare = builder.fcmp_ordered if is_float else builder.icmp_unsigned if unsigned else builder.icmp_signed
        return builder.select(compare("<", x, y), b, a)
    integer = {"sum": builder.add, "product": builder.mul, "band": builder.and_, "bor": builder.or_, "bxor": builder.xor}
    real = {"sum": builder.fadd, "product": builder.fmul}
    return (real if is_float else integer)[operation](a, b)


def _bfloat16(builder: Any, operation: str, a: Any, b: Any) -> Any:
    """Through float32, rounded to the nearest, ties to even. A result that is no number becomes torch's."""
    count = a.type.count
    wide, real = ir.VectorType(_I32, count), ir.VectorType(ir.FloatType(), count)

    def each(value: int) -> Any:
        return ir.Constant(wide, [value] * count)

    def widened(value: Any) -> Any:
        return builder.bitcast(builder.shl(builder.zext(value, wide), each(16)), real)

    result = _folded(builder, "float32", operation, widened(a), widened(b))
    bits = builder.bitcast(result, wide)
    odd = builder.and_(builder.lshr(bits, each(16)), each(1))
    rounded = builder.lshr(builder.add(bits, builder.add(odd, each(0x7FFF))), each(16))
    none = builder.fcmp_unordered("uno", result, result)
    return builder.trunc(builder.select(none, each(0x7FC0), rounded), a.type)
