"""How the operations of the machine that kernels use are emitted: ``atomics`` and ``completions`` say what each does.

A function here has the name of the operation; it takes the builder and the operands (``int64``), and gives the result, or
``None``. Imported only where a kernel is compiled.
"""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir

from .atomics import FOLD_BYTES, FOLD_FLOATS, FOLD_OPERATIONS, FOLD_TYPES, FOLDS, STREAM_ALIGN, STREAM_BYTES

_I32, _I64, _VOID = ir.IntType(32), ir.IntType(64), ir.VoidType()
_ARM = platform.machine() == "aarch64"
SYS_FUTEX = 98 if _ARM else 202


def external(module: Any, name: str, kind: Any) -> Any:
    """A function that is defined elsewhere."""
    found = module.globals.get(name)
    return found if found is not None else ir.Function(module, kind, name)


def _word(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, _I64.as_pointer())


def _half(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, _I32.as_pointer())


def _room(builder: Any, words: int) -> Any:
    """Words of the function's own."""
    with builder.goto_entry_block():
        return builder.alloca(ir.ArrayType(_I64, words))


def load_acquire(builder: Any, address: Any) -> Any:
    return builder.load_atomic(_word(builder, address), "seq_cst", 8)


def store_release(builder: Any, address: Any, value: Any) -> None:
    builder.store_atomic(value, _word(builder, address), "release", 8)


def fetch_add(builder: Any, address: Any, value: Any) -> Any:
    return builder.atomic_rmw("add", _word(builder, address), value, "seq_cst")


def compare_exchange(builder: Any, address: Any, expected: Any, desired: Any) -> Any:
    pair = builder.cmpxchg(_word(builder, address), expected, desired, "seq_cst", "seq_cst")
    return builder.zext(builder.extract_value(pair, 1), _I64)


def fence(builder: Any) -> None:
    builder.fence("seq_cst")


def errno(builder: Any) -> Any:
    place = external(builder.module, "__errno_location", ir.FunctionType(_I32.as_pointer(), []))
    return builder.sext(builder.load(builder.call(place, [])), _I64)


def pause(builder: Any) -> None:
    if _ARM:
        kind, name, operands = ir.FunctionType(_VOID, [_I32]), "llvm.aarch64.hint", [_I32(1)]
    else:
        kind, name, operands = ir.FunctionType(_VOID, []), "llvm.x86.sse2.pause", []
    builder.call(external(builder.module, name, kind), operands)


def now(builder: Any) -> Any:
    spec = _room(builder, 2)
    clock = external(builder.module, "clock_gettime", ir.FunctionType(_I32, [_I32, _I64]))
    builder.call(clock, [_I32(1), builder.ptrtoint(spec, _I64)])
    value = builder.load(spec)
    seconds = builder.mul(builder.extract_value(value, 0), _I64(1_000_000_000))
    return builder.add(seconds, builder.extract_value(value, 1))


def futex(builder: Any, address: Any, operation: Any, value: Any, timeout_ns: Any) -> Any:
    billion, spec = _I64(1_000_000_000), _room(builder, 2)
    pair = ir.Constant(ir.ArrayType(_I64, 2), ir.Undefined)
    pair = builder.insert_value(pair, builder.sdiv(timeout_ns, billion), 0)
    pair = builder.insert_value(pair, builder.srem(timeout_ns, billion), 1)
    builder.store(pair, spec)
    # syscall() is variadic in C; on the ABIs we run on (x86-64, aarch64 Linux) integers travel alike.
    call = external(builder.module, "syscall", ir.FunctionType(_I64, [_I64] * 7))
    return builder.call(call, [_I64(SYS_FUTEX), address, operation, value, builder.ptrtoint(spec, _I64), _I64(0), _I64(0)])


_WIDE = ir.VectorType(_I64, 4)


def stream(builder: Any, dst: Any, src: Any) -> None:
    past_caches = builder.module.add_metadata([_I32(1)])
    offsets = [_I64(at) for at in range(0, STREAM_BYTES, STREAM_ALIGN)]
    pieces = []
    for offset in offsets:
        source = builder.inttoptr(builder.add(src, offset), _WIDE.as_pointer())
        pieces.append(builder.load(source, align=1))
    for offset, piece in zip(offsets, pieces, strict=True):
        target = builder.inttoptr(builder.add(dst, offset), _WIDE.as_pointer())
        builder.store(piece, target, align=STREAM_ALIGN).set_metadata("nontemporal", past_caches)


def call(builder: Any, function: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    kind = ir.FunctionType(_I32, [_I64] * 4)
    return builder.sext(builder.call(builder.inttoptr(function, kind.as_pointer()), [a, b, c, d]), _I64)


def u32(builder: Any, address: Any) -> Any:
    return builder.zext(builder.load(_half(builder, address)), _I64)


def be32(builder: Any, address: Any) -> Any:
    return builder.zext(builder.bswap(builder.load(_half(builder, address))), _I64)


def set_u32(builder: Any, address: Any, value: Any) -> None:
    builder.store(builder.trunc(value, _I32), _half(builder, address))


_ELEMENTS = {
    "float32": ir.FloatType(),
    "float64": ir.DoubleType(),
    **dict.fromkeys(("int8", "uint8"), ir.IntType(8)),
    **dict.fromkeys(("int16", "bfloat16", "float16"), ir.IntType(16)),
    "int32": _I32,
    "int64": _I64,
}
_PIECE = 64


def fold(builder: Any, code: Any, *places: Any) -> None:
    """A case for each type and operation."""
    over = builder.append_basic_block("folded")
    choice = builder.switch(code, over)
    for at, kind in enumerate(FOLD_TYPES):
        for number, operation in enumerate(FOLD_OPERATIONS):
            if operation.startswith("b") and kind in FOLD_FLOATS:
                continue
            block = builder.append_basic_block(f"{kind}.{operation}")
            choice.add_case(_I64(FOLDS * at + number), block)
            builder.position_at_end(block)
            _fold_all(builder, kind, operation, places)
            builder.branch(over)
    builder.position_at_end(over)


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
        made.append(_SHORT[kind](builder, operation, a, b) if kind in _SHORT else _folded(builder, kind, operation, a, b))
    for number, value in enumerate(made):
        builder.store(value, at(dst, number * _PIECE), align=1)


def _folded(builder: Any, kind: str, operation: str, a: Any, b: Any) -> Any:
    is_float, unsigned = kind in FOLD_FLOATS, kind == "uint8"
    if operation in ("min", "max"):
        # As torch: what is no number stays. Of two that are equal the first is kept.
        x, y = (b, a) if operation == "min" else (a, b)
        if not is_float:
            compare = builder.icmp_unsigned if unsigned else builder.icmp_signed
            return builder.select(compare("<", x, y), b, a)
        better = builder.select(builder.fcmp_unordered("<", x, y), b, a)
        return builder.select(builder.fcmp_unordered("uno", a, a), a, better)
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


def _float16(builder: Any, operation: str, a: Any, b: Any) -> Any:
    """As ``_bfloat16``. By integers, because not every processor converts, and the functions that LLVM calls there are not in
    every process. ``_EXPONENT``: how much larger an exponent of float32 is that means the same."""
    count = a.type.count
    wide, real = ir.VectorType(_I32, count), ir.VectorType(ir.FloatType(), count)

    def each(value: int) -> Any:
        return ir.Constant(wide, [value] * count)

    def floats(bits: Any) -> Any:
        return builder.bitcast(bits, real)

    def widened(value: Any) -> Any:
        whole = builder.zext(value, wide)
        bits = builder.shl(builder.and_(whole, each(0x7FFF)), each(13))
        exponent, normal = builder.and_(bits, each(0x1F << 23)), builder.add(bits, each(_EXPONENT << 23))
        infinite = builder.select(builder.icmp_unsigned("==", exponent, each(0x1F << 23)), each(_EXPONENT << 23), each(0))
        least = each((_EXPONENT + 1) << 23)  # below it there is no exponent: 1.mantissa, less 1, of the least one that there is
        tiny = builder.fsub(floats(builder.add(bits, least)), floats(least))
        is_tiny = builder.icmp_unsigned("==", exponent, each(0))
        size = builder.select(is_tiny, builder.bitcast(tiny, wide), builder.add(normal, infinite))
        return floats(builder.or_(size, builder.shl(builder.and_(whole, each(0x8000)), each(16))))

    result = builder.bitcast(_folded(builder, "float32", operation, widened(a), widened(b)), wide)
    size = builder.and_(result, each(0x7FFFFFFF))
    odd = builder.and_(builder.lshr(size, each(13)), each(1))
    normal = builder.lshr(builder.add(builder.sub(size, each(_EXPONENT << 23)), builder.add(odd, each(0xFFF))), each(13))
    unit = each((_EXPONENT + 14) << 23)  # its last bit is that of the least float16: so the sum is rounded there
    tiny = builder.sub(builder.bitcast(builder.fadd(floats(size), floats(unit)), wide), unit)
    made = builder.select(builder.icmp_unsigned("<", size, each((_EXPONENT + 1) << 23)), tiny, normal)
    made = builder.select(builder.icmp_unsigned(">=", size, each((_EXPONENT + 0x1F) << 23)), each(0x7C00), made)
    made = builder.select(builder.icmp_unsigned(">", size, each(0xFF << 23)), each(0x7E00), made)
    return builder.trunc(builder.or_(made, builder.lshr(builder.and_(result, each(0x80000000)), each(16))), a.type)


_EXPONENT = 127 - 15
_SHORT = {"bfloat16": _bfloat16, "float16": _float16}
"""Types that are computed with as float32."""
