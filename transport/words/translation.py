"""From the source of a kernel to LLVM's code: a small part of Python, over integers of 64 bits.

Every value is an ``int64``: sums wrap around, ``True`` is 1, ``and``, ``or`` and comparisons mean what they mean in Python.
``//`` and ``%`` round downwards; a divisor of 0 counts as 1, and shifts are modulo 64, so nothing is ever raised. A variable
that was not set is 0.

Statements: expressions, assignments (to names, and to several at once), ``if``, ``while`` and ``for ... in range`` with their
``else``, ``break``, ``continue``, ``pass``, ``return``. Functions: other kernels, inlined functions, operations of the machine
(``instructions``), functions of the C library, ``min``, ``max``. All else is refused by name: ``SyntaxError``.

Imported only where a kernel is compiled.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, NoReturn

from llvmlite import ir

from . import instructions
from .symbols import CFunction, Kernel, Scalar, Signature, inlined, operations

_I64 = ir.IntType(64)
_TYPES = {"int32": ir.IntType(32), "int64": _I64, "void": ir.VoidType()}
_ARITHMETIC = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.LShift: "shl",
    ast.RShift: "ashr",
    ast.BitAnd: "and_",
    ast.BitOr: "or_",
    ast.BitXor: "xor",
}
_COMPARISONS = {ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}


def kind_of(signature: Signature) -> ir.FunctionType:
    """LLVM's type of a C function."""
    return ir.FunctionType(_TYPES[signature.result], [_TYPES[name] for name in signature.arguments])


_BUILTINS: dict[str, Any] = {"min": min, "max": max, "range": range}
_SMALL = 150
"""Nodes of a kernel's source, with all that it calls, up to which it becomes a part of kernels that call it."""


class Unit:
    """Translates a kernel into a module, with the small functions that it calls. Large kernels that it calls are only named:
    their code is loaded already. ``kernels``: those that it may call."""

    def __init__(self, module: ir.Module, kernels: Mapping[Any, Kernel]) -> None:
        self.module, self._kernels = module, kernels
        self._made: dict[FunctionType, ir.Function] = {}

    def kernel(self, kernel: Kernel) -> ir.Function:
        """What is compiled: ``kernel.native``, of ``int64`` to ``int64``. ``SyntaxError`` for what kernels cannot do,
        ``RuntimeError`` if the source is not that of the function any more."""
        return self._function(kernel.function, kernel.native, "external")

    def call(self, builder: ir.IRBuilder, meaning: Any, given: Sequence[ir.Value]) -> ir.Value | None:
        """A call of what a kernel may call. ``None``: it is nothing of the kind."""
        if isinstance(meaning, CFunction):
            return self._call_c(builder, meaning, given)
        if isinstance(meaning, Scalar):
            return _narrowed(builder, given[0], meaning.name)
        if meaning is min or meaning is max:
            return _least(builder, "<" if meaning is min else ">", given)
        if isinstance(meaning, FunctionType) and meaning in operations:
            emitted: ir.Value | None = getattr(instructions, meaning.__name__)(builder, *given)
            return _I64(0) if emitted is None else emitted
        callee = self._callee(meaning)
        return None if callee is None else builder.call(callee, given)

    def _callee(self, meaning: Any) -> ir.Function | None:
        if isinstance(meaning, FunctionType) and meaning in inlined:
            made = self._function(meaning, f"{meaning.__module__}.{meaning.__qualname__}", "internal")
            made.attributes.add("alwaysinline")
            return made
        kernel = self._kernels.get(meaning) if callable(meaning) else None
        if kernel is None:
            return None
        if self._weight(kernel.function) <= _SMALL:
            return self._function(kernel.function, kernel.native, "internal")
        return instructions.external(self.module, kernel.native, _native_kind(kernel.function))

    def _weight(self, function: FunctionType) -> int:
        weight = sum(1 for _ in ast.walk(_definition(function)))
        for value in {function.__globals__.get(name) for name in function.__code__.co_names}:
            if isinstance(value, FunctionType) and value in inlined:
                weight += self._weight(value)
            elif callable(value) and value in self._kernels:
                weight += self._weight(self._kernels[value].function)
        return weight

    def _function(self, source: FunctionType, name: str, linkage: str) -> ir.Function:
        if source not in self._made:
            made = self._made[source] = ir.Function(self.module, _native_kind(source), self.module.get_unique_name(name))
            made.linkage = linkage
            _Body(self, source, made).translate(_definition(source))
        return self._made[source]

    def _call_c(self, builder: ir.IRBuilder, function: CFunction, given: Sequence[ir.Value]) -> ir.Value:
        kinds = function.signature.arguments
        values = [builder.trunc(value, _TYPES[kind]) if kind != "int64" else value for value, kind in zip(given, kinds)]
        result = builder.call(instructions.external(self.module, function.name, kind_of(function.signature)), values)
        if function.signature.result == "void":
            return _I64(0)
        return result if result.type == _I64 else builder.sext(result, _I64)


def _native_kind(function: FunctionType) -> ir.FunctionType:
    return ir.FunctionType(_I64, [_I64] * function.__code__.co_argcount)


def _narrowed(builder: ir.IRBuilder, value: ir.Value, kind: str) -> ir.Value:
    return value if kind == "int64" else builder.sext(builder.trunc(value, _TYPES[kind]), _I64)


def _least(builder: ir.IRBuilder, order: str, given: Sequence[ir.Value]) -> ir.Value:
    best = given[0]
    for value in given[1:]:
        best = builder.select(builder.icmp_signed(order, value, best), value, best)
    return best


# -- sources


@cache
def _source(path: str) -> tuple[dict[tuple[str, int], ast.FunctionDef], dict[tuple[str, int], CodeType]]:
    """The functions of a file by name and first line: their source, and what Python makes of it."""
    text = Path(path).read_bytes()
    nodes = {}
    for node in ast.walk(ast.parse(text, path)):
        if isinstance(node, ast.FunctionDef):
            nodes[node.name, node.decorator_list[0].lineno if node.decorator_list else node.lineno] = node
    codes, left = {}, [compile(text, path, "exec", dont_inherit=True)]
    while left:
        code = left.pop()
        codes[code.co_name, code.co_firstlineno] = code
        left += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return nodes, codes


def _definition(function: FunctionType) -> ast.FunctionDef:
    """``RuntimeError`` if the file was changed after the function was made."""
    code = function.__code__
    nodes, codes = _source(code.co_filename)
    key = code.co_name, code.co_firstlineno
    if key not in nodes or key not in codes or _content(codes[key]) != _content(code):
        raise RuntimeError(f"{code.co_filename} is not the source of {function.__qualname__}: it was changed after the import")
    return nodes[key]


def _content(code: CodeType) -> tuple[Any, ...]:
    return code.co_code, code.co_consts, code.co_names, code.co_varnames


# -- bodies


class _Expressions:
    """Translates the expressions of one function into ``made``."""

    def __init__(self, unit: Unit, source: FunctionType, made: ir.Function) -> None:
        self._unit, self._source, self._made = unit, source, made
        self._builder = ir.IRBuilder(made.append_basic_block("variables"))
        self._variables: dict[str, ir.Value] = {}

    def _refuse(self, node: Any) -> NoReturn:
        where = self._source.__code__.co_filename, getattr(node, "lineno", None), None, None
        raise SyntaxError(
            f"kernel {self._source.__qualname__}: {ast.unparse(node).splitlines()[0]!r} is not possible in kernels", where
        )

    def _value(self, node: ast.expr) -> ir.Value:
        handle: Callable[[Any], ir.Value] = getattr(self, f"_{type(node).__name__.lower()}_value", self._refuse)
        return handle(node)

    def _truth(self, node: ast.expr) -> ir.Value:
        return self._builder.icmp_signed("!=", self._value(node), _I64(0))

    def _constant_value(self, node: ast.Constant) -> ir.Value:
        return self._number(node, node.value)

    def _number(self, node: ast.expr, value: Any) -> ir.Value:
        if not isinstance(value, int) or not -(1 << 63) <= value < 1 << 63:
            self._refuse(node)
        return _I64(int(value))

    def _name_value(self, node: ast.Name) -> ir.Value:
        if node.id in self._variables:
            return self._builder.load(self._variables[node.id])
        return self._number(node, self._meaning(node))

    def _attribute_value(self, node: ast.Attribute) -> ir.Value:
        return self._number(node, self._meaning(node))

    def _meaning(self, node: ast.expr) -> Any:
        """What a name of the module, or an attribute of a module, stands for."""
        if isinstance(node, ast.Attribute):
            owner = self._meaning(node.value)
            return getattr(owner, node.attr, None) if isinstance(owner, ModuleType) else None
        if not isinstance(node, ast.Name) or node.id in self._variables:
            return None
        return self._source.__globals__.get(node.id, _BUILTINS.get(node.id))

    def _call_value(self, node: ast.Call) -> ir.Value:
        if node.keywords or (not node.args and self._meaning(node.func) in (min, max)):
            self._refuse(node)
        result = self._unit.call(self._builder, self._meaning(node.func), [self._value(each) for each in node.args])
        return self._refuse(node) if result is None else result

    def _binop_value(self, node: ast.BinOp) -> ir.Value:
        return self._operation(node, node.op, self._value(node.left), self._value(node.right))

    def _operation(self, node: ast.AST, kind: ast.operator, left: ir.Value, right: ir.Value) -> ir.Value:
        if isinstance(kind, (ast.LShift, ast.RShift)):
            right = self._builder.and_(right, _I64(63))
        if type(kind) in _ARITHMETIC:
            result: ir.Value = getattr(self._builder, _ARITHMETIC[type(kind)])(left, right)
            return result
        if not isinstance(kind, (ast.FloorDiv, ast.Mod)):
            self._refuse(node)
        return self._divided(left, right, isinstance(kind, ast.Mod))

    def _divided(self, left: ir.Value, right: ir.Value, rest: bool) -> ir.Value:
        # The processor traps for a divisor of 0, and for the least number by -1.
        builder = self._builder
        minus = builder.icmp_signed("==", right, _I64(-1))
        trapped = builder.or_(minus, builder.icmp_signed("==", right, _I64(0)))
        divisor = builder.select(trapped, _I64(1), right)
        remainder = builder.srem(left, divisor)
        # C rounds towards zero, Python downwards.
        other_side = builder.icmp_signed("<", builder.xor(remainder, divisor), _I64(0))
        lower = builder.and_(other_side, builder.icmp_signed("!=", remainder, _I64(0)))
        if rest:
            return builder.select(lower, builder.add(remainder, divisor), remainder)
        quotient = builder.sub(builder.sdiv(left, divisor), builder.zext(lower, _I64))
        return builder.select(minus, builder.neg(left), quotient)

    def _unaryop_value(self, node: ast.UnaryOp) -> ir.Value:
        builder = self._builder
        if isinstance(node.op, ast.Not):
            return builder.zext(builder.not_(self._truth(node.operand)), _I64)
        value = self._value(node.operand)
        if isinstance(node.op, ast.USub):
            return builder.neg(value)
        return builder.not_(value) if isinstance(node.op, ast.Invert) else value

    def _compare_value(self, node: ast.Compare) -> ir.Value:
        """``a < b < c`` evaluates ``c`` only if ``a < b``."""
        if any(type(kind) not in _COMPARISONS for kind in node.ops):
            self._refuse(node)
        left, tests = self._value(node.left), list(zip(node.ops, node.comparators))

        def holds(at: int, left: ir.Value) -> ir.Value:
            kind, right = tests[at][0], self._value(tests[at][1])
            result = self._builder.zext(self._builder.icmp_signed(_COMPARISONS[type(kind)], left, right), _I64)
            if at + 1 == len(tests):
                return result
            return self._chosen(result, lambda: holds(at + 1, right), lambda: result)

        return holds(0, left)

    def _boolop_value(self, node: ast.BoolOp) -> ir.Value:
        def joined(values: Sequence[ast.expr]) -> ir.Value:
            first = self._value(values[0])
            if len(values) == 1:
                return first
            rest, same = (lambda: joined(values[1:])), (lambda: first)
            return self._chosen(first, *((rest, same) if isinstance(node.op, ast.And) else (same, rest)))

        return joined(node.values)

    def _ifexp_value(self, node: ast.IfExp) -> ir.Value:
        return self._chosen(self._value(node.test), lambda: self._value(node.body), lambda: self._value(node.orelse))

    def _chosen(self, test: ir.Value, then: Callable[[], ir.Value], other: Callable[[], ir.Value]) -> ir.Value:
        """One of two values; the other is not evaluated."""
        builder = self._builder
        blocks = [self._made.append_basic_block(name) for name in ("then", "else", "after")]
        builder.cbranch(builder.icmp_signed("!=", test, _I64(0)), blocks[0], blocks[1])
        made = []
        for block, value in zip(blocks, (then, other)):
            builder.position_at_end(block)
            made.append((value(), builder.block))
            builder.branch(blocks[2])
        builder.position_at_end(blocks[2])
        phi = builder.phi(_I64)
        for value, block in made:
            phi.add_incoming(value, block)
        return phi


class _Body(_Expressions):
    """Translates the statements of one function into ``made``."""

    def __init__(self, unit: Unit, source: FunctionType, made: ir.Function) -> None:
        super().__init__(unit, source, made)
        self._loops: list[tuple[ir.Block, ir.Block]] = []
        """Where ``continue`` and ``break`` go, of the loops that we are in."""

    def translate(self, node: ast.FunctionDef) -> None:
        builder, names = self._builder, self._source.__code__.co_varnames
        if self._source.__code__.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS | inspect.CO_GENERATOR):
            self._refuse(node)
        for name in names:
            self._variables[name] = builder.alloca(_I64, name=name)
        for at, name in enumerate(names):
            builder.store(self._made.args[at] if at < len(self._made.args) else _I64(0), self._variables[name])
        start = self._made.append_basic_block("start")
        builder.branch(start)
        builder.position_at_end(start)
        self._run(node.body)
        if not builder.block.is_terminated:
            builder.ret(_I64(0))

    def _run(self, body: Sequence[ast.stmt]) -> None:
        for node in body:
            if self._builder.block.is_terminated:
                return
            handle: Callable[[Any], None] = getattr(self, f"_{type(node).__name__.lower()}", self._refuse)
            handle(node)

    def _expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):
            self._value(node.value)

    def _pass(self, node: ast.Pass) -> None:
        pass

    def _return(self, node: ast.Return) -> None:
        self._builder.ret(_I64(0) if node.value is None else self._value(node.value))

    def _assign(self, node: ast.Assign) -> None:
        given = node.value
        if len(node.targets) == 1 and isinstance(node.targets[0], ast.Tuple) and isinstance(given, ast.Tuple):
            targets, sources = node.targets[0].elts, given.elts
            if len(targets) != len(sources):
                self._refuse(node)
            for target, value in zip(targets, [self._value(source) for source in sources]):
                self._builder.store(value, self._place(target))
            return
        value = self._value(given)
        for target in node.targets:
            self._builder.store(value, self._place(target))

    def _annassign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._builder.store(self._value(node.value), self._place(node.target))

    def _augassign(self, node: ast.AugAssign) -> None:
        place = self._place(node.target)
        before = self._builder.load(place)
        self._builder.store(self._operation(node, node.op, before, self._value(node.value)), place)

    def _place(self, target: ast.expr) -> ir.Value:
        if not isinstance(target, ast.Name) or target.id not in self._variables:
            self._refuse(target)
        return self._variables[target.id]

    def _if(self, node: ast.If) -> None:
        builder = self._builder
        then, other, after = (self._made.append_basic_block(name) for name in ("then", "else", "after"))
        builder.cbranch(self._truth(node.test), then, other)
        for block, body in ((then, node.body), (other, node.orelse)):
            builder.position_at_end(block)
            self._run(body)
            self._go(after)
        builder.position_at_end(after)

    def _go(self, block: ir.Block) -> None:
        if not self._builder.block.is_terminated:
            self._builder.branch(block)

    def _while(self, node: ast.While) -> None:
        test, body, other, after = (self._made.append_basic_block(name) for name in ("test", "body", "else", "after"))
        self._go(test)
        self._builder.position_at_end(test)
        self._builder.cbranch(self._truth(node.test), body, other)
        self._loop(node, (body, test, other, after))

    def _loop(self, node: ast.While | ast.For, blocks: tuple[ir.Block, ir.Block, ir.Block, ir.Block]) -> None:
        body, again, other, after = blocks
        self._builder.position_at_end(body)
        self._loops.append((again, after))
        self._run(node.body)
        self._loops.pop()
        self._go(again)
        self._builder.position_at_end(other)
        self._run(node.orelse)
        self._go(after)
        self._builder.position_at_end(after)

    def _for(self, node: ast.For) -> None:
        builder, over = self._builder, node.iter
        if not (
            isinstance(over, ast.Call) and isinstance(over.func, ast.Name) and over.func.id == "range" and not over.keywords
        ):
            self._refuse(node)
        if "range" in self._variables or "range" in self._source.__globals__ or len(over.args) not in (1, 2):
            self._refuse(node)
        bounds = [self._value(bound) for bound in over.args]
        first, end = bounds if len(bounds) == 2 else (_I64(0), bounds[0])
        place = self._place(node.target)
        with builder.goto_entry_block():
            counter = builder.alloca(_I64)
        builder.store(first, counter)
        names = "test", "body", "next", "else", "after"
        test, body, further, other, after = (self._made.append_basic_block(name) for name in names)
        builder.branch(test)
        builder.position_at_end(test)
        builder.cbranch(builder.icmp_signed("<", builder.load(counter), end), body, other)
        builder.position_at_end(further)
        builder.store(builder.add(builder.load(counter), _I64(1)), counter)
        builder.branch(test)
        builder.position_at_end(body)
        builder.store(builder.load(counter), place)
        self._loop(node, (body, further, other, after))

    def _break(self, node: ast.Break) -> None:
        self._builder.branch(self._loops[-1][1])

    def _continue(self, node: ast.Continue) -> None:
        self._builder.branch(self._loops[-1][0])
