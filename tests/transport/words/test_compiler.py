"""What kernels compute: what Python computes, for the part of it that they may use. Python itself is the oracle."""

from __future__ import annotations

import ctypes
import importlib
import random
import sys

import numpy as np
import pytest

from rdmarpc.transport.words import compiled, compiler, machine
from rdmarpc.transport.words.symbols import CFunction, Kernel, i32, i64, inline, void

FORTY = 40
RANDOM = 8
_llabs, _abs = CFunction("llabs", i64(i64)), CFunction("abs", i32(i32))
_VALUES = (-7, -3, -1, 0, 1, 2, 5, 41)
_LEAST = -(1 << 63)


@inline
def _both(a, b):
    if a > b:
        return a
    for _ in range(b):
        if a == 3:
            break
        a += 1
    return a * 2 + b


def arithmetic(a, b):
    c = a * b - a + (b << 3) ^ a & 12 | b
    c += -a + ~b + (a >> 1)
    c *= 2
    return c - FORTY


def divisions(a, b):
    d = b if b else 1
    return a // d * 1000 + a % d + (a - 9) // 4 + (b - 9) % 16


def logic(a, b):
    x = a and b
    y = a or b
    z = not a
    return (
        (x * 100 + y) * 10
        + z
        + (a < b)
        + (a < b <= 5)
        + (a == b or (a != 2 and b > 0))
        + (1 if a >= b else b)
        + min(a, b, 3)
        - max(a, b)
    )


def loops(a, b):
    total = number = 0
    for number in range(b):
        if number == a:
            continue
        if number > 20:
            break
        total += number
    else:
        total += 1000
    for inner in range(a, b):
        inner += 5
        total += inner
    left = b
    while left > 0:
        left -= 2
        if left == a:
            break
    else:
        total += 7
    while True:
        total += 1
        if total % 5 == 0:
            return total * 64 + number


def several(a, b):
    a, b = b, a
    c = d = a
    if a > 0:
        if b > 0:
            return c
        d = 3
    elif b:
        pass
    else:
        d = 5
    return c + d * b + _both(a, b) + _both(b, 2)


def evaluated_once(a, b):
    # A side is evaluated only if it matters: else the loop of ``_both`` would change what is counted.
    return (a > 0 and _both(a, b)) + (b if a < 0 else _both(b, a)) + (0 < _both(a, b) < b < 9)


@pytest.mark.parametrize(
    "function", [arithmetic, divisions, logic, loops, several, evaluated_once], ids=lambda each: each.__name__
)
def test_as_python_does(function):
    kernel = compiled.compiled(i64(i64, i64))(function)
    for a in _VALUES:
        for b in _VALUES:
            assert kernel(a, b) == int(function(a, b)), (a, b)


def _program(chance):
    """The source of a random function: it ends, and its numbers stay small."""
    names = ("a", "b", "c", "d")

    def expression(depth):
        if depth == 0:
            return chance.choice([*names, str(chance.randint(-9, 30))])
        x, y, z = (expression(depth - 1) for _ in range(3))
        operator = chance.choice(
            ["+", "-", "*", "&", "|", "^", "<", "<=", "==", "!=", ">", ">=", "and", "or", "//", "%", "if", "not", "min"]
        )
        if operator in ("//", "%"):
            return f"(({x}) {operator} (({y}) or 7))"
        if operator == "if":
            return f"({x} if {y} else {z})"
        if operator == "min":
            return f"{chance.choice(['min', 'max'])}({x}, {y}, {z})"
        return f"(not {x})" if operator == "not" else f"({x} {operator} {y})"

    def block(depth, loop):
        lines = []
        for _ in range(chance.randint(1, 3)):
            kind = chance.choice(["set", "set", "if", "for", "while", "leave"]) if depth else "set"
            if kind == "set":
                first, second = chance.sample(names[:3], 2)
                lines.append(f"{first}, {second} = ({expression(2)}) % 997, ({expression(1)}) % 31 - 9")
            elif kind == "leave":
                lines += [f"if {expression(1)}:", f"    {chance.choice(['break', 'continue'] if loop else ['return a - b'])}"]
            else:
                variable = chance.choice(names)
                head = {
                    "if": f"if {expression(1)}:",
                    "for": f"for {variable} in range(({expression(1)}) % 6):",
                    "while": "while d < 9:",
                }
                inside = block(depth - 1, loop or kind != "if")
                lines += [head[kind], *("    " + line for line in [*(["d += 1"] if kind == "while" else []), *inside])]
                if chance.random() < 0.5:
                    lines += ["else:", *("    " + line for line in block(depth - 1, loop))]
        return lines

    return "\n    ".join(["c, d = 3, 0", *block(3, False), "return a * 31 + b * 7 + c * 3 + d"])


def test_random_programs(tmp_path, monkeypatch):
    chance = random.Random(7)
    source = "".join(f"def f{number}(a, b):\n    {_program(chance)}\n" for number in range(RANDOM))
    (tmp_path / "random_kernels.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    made = importlib.import_module("random_kernels")
    for number in range(RANDOM):
        function = getattr(made, f"f{number}")
        kernel = compiled.compiled(i64(i64, i64))(function)
        for a, b in ((0, 0), (1, -5), (17, 3), (-8, 20)):
            assert kernel(a, b) == int(function(a, b)), (number, a, b)


def wide(a, b):
    return a * b


def shifted(a, b):
    return (a << b) + (a >> b)


def divided(a, b):
    return a // b


def left_over(a, b):
    return a % b


def test_the_ends_of_the_numbers():
    """Sums wrap around, and no division ends the process."""
    take = compiled.compiled(i64(i64, i64))
    multiply, shift, divide, rest = take(wide), take(shifted), take(divided), take(left_over)
    assert multiply(1 << 62, 2) == _LEAST
    assert shift(5, 64) == 10 and shift(3, 65) == 7
    assert [divide(9, 0), rest(9, 0)] == [9, 0]
    assert [divide(_LEAST, -1), rest(_LEAST, -1), divide(9, -1), rest(9, -1)] == [_LEAST, 0, -9, 0]


def c_functions(a):
    return _llabs(a) * 1000 + _abs(i32(a)) + i32(1 << 31) // (1 << 30)


def large(a):
    b = a
    for number in range(10):
        b = (b * 3 + number) % 1001 if b % 2 else (b + number * 7) % 1001
    return b + a


def test_calls():
    assert compiled.compiled(i64(i64))(c_functions)(-3) == 3001
    globals()["_large"] = kernel = compiled.compiled(i64(i64))(large)
    assert compiled.compiled(i64(i64))(calls_large)(5) == large(5) + large(6)
    assert kernel(7) == large(7)


def lower(a, b):
    return a // b


def test_callbacks():
    """Those that C code calls: with the types of their signature."""
    whole = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
    half = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int32, ctypes.c_int64)
    assert whole(compiled.compiled_callback(i64(i64, i64))(lower).address)(-(1 << 40), 3) == -(1 << 40) // 3
    assert half(compiled.compiled_callback(i32(i32, i64))(lower).address)(-7, 2) == -4
    assert (
        ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)(compiled.compiled_callback(void(i64, i64))(lower).address)(1, 2)
        is None
    )


def calls_large(a):
    return _large(a) + _large(a + 1)  # noqa: F821


def floats(a):
    return a * 0.5


def keywords(a):
    return min(a, key=a)


def unknown(a):
    return len(a)


def lists(a):
    for each in (1, 2):
        a += each
    return a


def to_the_power(a):
    return a**2


def half(a):
    return 0.5


def large_number(a):
    return a + (1 << 63)


def raises(a):
    if a > 3:
        raise ValueError
    return a


def asserts(a):
    assert a
    return a


def catches(a):
    try:
        return a // 3
    except ZeroDivisionError:
        return 4


def nothing_or_something(a):
    if a > 3:
        return None
    return a


_REFUSED = [
    floats,
    half,
    keywords,
    unknown,
    lists,
    to_the_power,
    large_number,
    raises,
    asserts,
    catches,
    nothing_or_something,
]


@pytest.mark.parametrize("function", _REFUSED, ids=lambda each: each.__name__)
def test_what_is_refused(function):
    with pytest.raises(SyntaxError, match=f"kernel {function.__name__}: .* not possible"):
        compiler.object_code(Kernel(function, i64(i64), False), "entry")


def sometimes_set(a):
    if a > 3:
        b = a
    return b


def test_a_variable_that_was_not_set():
    kernel = compiled.compiled(i64(i64))(sometimes_set)
    assert [kernel(3), kernel(4)] == [0, 4]


def absent(a):
    return _nowhere(a)


_nowhere = CFunction("rdmarpc_no_such_function", i64(i64))


def test_a_function_that_is_not_there():
    """An object file that names it would end the process that loads it."""
    assert machine.has_symbol("memcpy") and not machine.has_symbol(_nowhere.name)
    with pytest.raises(RuntimeError, match="rdmarpc_no_such_function"):
        compiler.object_code(Kernel(absent, i64(i64), False), "entry")


def test_every_operation_is_emitted():
    from rdmarpc.transport.words import atomics, completions, instructions
    from rdmarpc.transport.words.symbols import Operation

    operations = [each for module in (atomics, completions) for each in vars(module).values() if isinstance(each, Operation)]
    assert len(operations) > 10 and all(callable(getattr(instructions, each.name, None)) for each in operations)
    assert np.int64(3) == compiled.compiled(i64(i64, i64))(wide)(np.int64(1), 3)
