"""Compiles a kernel to an object file. numba makes LLVM's code of the Python of the kernel, and of the functions that it calls;
here stands what numba is told of them: what functions and operators mean in kernels, and how functions are called.

Every value is an ``int64``: sums wrap around, ``True`` is 1, ``and``, ``or`` and comparisons mean what they mean in Python.
``//`` and ``%`` round downwards; a divisor of 0 counts as 1, and shifts are modulo 64, so nothing is ever raised. A variable
that was not set is 0. What numba could compile besides (floats, lists, exceptions) is refused by name: ``SyntaxError``. numba's
own tables are not even loaded: that takes longer than to compile all kernels, and each operator is looked for in them in vain.

The entry of a kernel is a function of CPython's convention for builtins (``machine``): it converts integers, lets the GIL go,
calls, and takes the GIL back. That of a callback is a C function of its signature. Imported only where a kernel is compiled.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from functools import cache, partial
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import llvmlite.binding as llvm
import numba.cpython.numbers
import numba.cpython.rangeobj
import numba.cpython.tupleobj  # noqa: F401
from llvmlite import ir
from numba import types
from numba.core import base, callconv, compiler, errors
from numba.core.compiler_machinery import AnalysisPass, PassManager, register_pass
from numba.core.imputils import builtin_registry
from numba.core.typed_passes import NativeLowering, NopythonTypeInference, PreLowerStripPhis
from numba.core.typing import builtins, context
from numba.core.typing.templates import AbstractTemplate, signature
from numba.core.untyped_passes import FixupArgs, IRProcessing, ReconstructSSA, TranslateByteCode

from . import instructions, machine
from .instructions import external
from .symbols import CFunction, Kernel, Operation, Scalar, Signature, inlined

_I64, _VOID, _OBJECT = ir.IntType(64), ir.VoidType(), ir.IntType(8).as_pointer()
_OF_PYTHON = "Py", "_Py", "NRT_", "numba_"
"""What names of functions of Python, and of numba's support library, begin with."""
_TYPES = {"int32": ir.IntType(32), "int64": _I64, "void": _VOID}


def object_code(kernel: Kernel, symbol: str) -> bytes:
    """The object file of a kernel; its entry is called ``symbol``. ``SyntaxError`` for what kernels cannot do."""
    target, entry = machine.target(), ir.Module(symbol)
    entry.triple, entry.data_layout = target.triple, str(target.target_data)
    native = external(entry, _symbol(kernel.function), _native_kind(kernel.function))
    (_entry_for_c if kernel.callback else _entry_for_python)(kernel, entry, native)
    module = llvm.parse_assembly(str(entry))
    for text in _reached(kernel.function):
        module.link_in(llvm.parse_assembly(text))
    for function in module.functions:
        if not function.is_declaration and function.name != symbol:
            function.linkage = "internal"
    module.verify()
    passes = llvm.create_pass_builder(target, llvm.create_pipeline_tuning_options(speed_level=3))
    passes.getModulePassManager().run(module, passes)
    _check_resolved(module)
    return target.emit_object(module)


def _reached(function: FunctionType) -> list[str]:
    """LLVM's code of a function, and of all that it calls."""
    texts: dict[FunctionType, str] = {}
    left = [function]
    while left:
        each = left.pop()
        if each not in texts:
            texts[each], called = _translated(each)
            left += called
    return list(texts.values())


def _check_resolved(module: llvm.ModuleRef) -> None:
    """An object file with a name that the process does not know would end the process that loads it."""
    declared = [function.name for function in module.functions if function.is_declaration]
    unknown = [name for name in declared if not name.startswith("llvm.") and not machine.has_symbol(name)]
    if unknown:
        raise RuntimeError(f"kernels call what there is not: {', '.join(unknown)}")


# -- what may be called


class _Callee(NamedTuple):
    """Takes ``int64``, as many as one of ``arguments``. ``emit``: the builder and the operands in, the result out (``None``
    stands for 0); without it numba knows how."""

    arguments: Collection[int]
    result: types.Type
    emit: Callable[..., ir.Value | None] | None


def _callee(value: Any) -> _Callee | None:
    """What a value of a kernel's module, or an operator, means in a kernel. ``None``: it cannot be called there."""
    if isinstance(value, CFunction):
        return _Callee([len(value.signature.arguments)], types.int64, partial(_call_c, value))
    if isinstance(value, Operation):
        return _Callee([len(value.operands.split())], types.int64, getattr(instructions, value.name))
    if isinstance(value, Scalar):
        return _Callee([1], types.int64, partial(_narrowed, value.name))
    if isinstance(value, Kernel):
        return _callee_here(value.function)
    if not isinstance(value, FunctionType):
        return _OPERATORS.get(value)
    return _callee_here(value) if value in inlined else None


def _callee_here(function: FunctionType) -> _Callee:
    def emit(builder: ir.IRBuilder, *given: ir.Value) -> ir.Value:
        return builder.call(external(builder.module, _symbol(function), _native_kind(function)), given)

    return _Callee([function.__code__.co_argcount], types.int64, emit)


def _native_kind(function: FunctionType) -> ir.FunctionType:
    return ir.FunctionType(_I64, [_I64] * function.__code__.co_argcount)


def _c_kind(kind: Signature) -> ir.FunctionType:
    return ir.FunctionType(_TYPES[kind.result], [_TYPES[name] for name in kind.arguments])


def _call_c(function: CFunction, builder: ir.IRBuilder, *given: ir.Value) -> ir.Value | None:
    kind = _c_kind(function.signature)
    values = [value if wanted == _I64 else builder.trunc(value, wanted) for value, wanted in zip(given, kind.args)]
    result = builder.call(external(builder.module, function.name, kind), values)
    if function.signature.result == "void":
        return None
    return result if result.type == _I64 else builder.sext(result, _I64)


def _narrowed(kind: str, builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    return value if kind == "int64" else builder.sext(builder.trunc(value, _TYPES[kind]), _I64)


def _least(order: str, builder: ir.IRBuilder, *given: ir.Value) -> ir.Value:
    best = given[0]
    for value in given[1:]:
        best = builder.select(builder.icmp_signed(order, value, best), value, best)
    return best


def _shifted(name: str, builder: ir.IRBuilder, value: ir.Value, by: ir.Value) -> ir.Value:
    return getattr(builder, name)(value, builder.and_(by, _I64(63)))


def _divided(rest: bool, builder: ir.IRBuilder, left: ir.Value, right: ir.Value) -> ir.Value:
    # The processor traps for a divisor of 0, and for the least number by -1.
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


def _operators() -> dict[Any, _Callee]:
    def compared(order: str) -> _Callee:
        return _Callee([2], types.boolean, lambda builder, left, right: builder.icmp_signed(order, left, right))

    def truth(order: str) -> _Callee:
        return _Callee([1], types.boolean, lambda builder, value: builder.icmp_signed(order, value, _I64(0)))

    two = {
        **{name: getattr(ir.IRBuilder, name) for name in ("add", "sub", "mul", "and_", "or_", "xor")},
        "lshift": partial(_shifted, "shl"),
        "rshift": partial(_shifted, "ashr"),
        "floordiv": partial(_divided, False),
        "mod": partial(_divided, True),
    }
    made = {getattr(operator, name): _Callee([2], types.int64, emit) for name, emit in two.items()}
    made |= {getattr(operator, f"i{name.strip('_')}"): made[getattr(operator, name)] for name in two}
    orders = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
    made |= {getattr(operator, name): compared(order) for name, order in orders.items()}
    return made | {
        operator.neg: _Callee([1], types.int64, ir.IRBuilder.neg),
        operator.invert: _Callee([1], types.int64, ir.IRBuilder.not_),
        operator.pos: _Callee([1], types.int64, lambda builder, value: value),
        operator.not_: truth("=="),
        operator.truth: truth("!="),
        bool: truth("!="),
        range: _Callee([1, 2], types.range_state64_type, None),
        min: _Callee(range(1, 256), types.int64, partial(_least, "<")),
        max: _Callee(range(1, 256), types.int64, partial(_least, ">")),
    }


_OPERATORS = _operators()


# -- numba


def _is_integer(kind: types.Type) -> bool:
    return types.unliteral(kind) in (types.int64, types.boolean)


@cache
def _known(value: Any) -> types.Function | None:
    """numba's type of something that kernels may call."""
    callee = _callee(value)
    if callee is None:
        return None
    counts, result = callee.arguments, callee.result

    class Template(AbstractTemplate):
        key = value

        def generic(self, given: Sequence[types.Type], named: dict[str, types.Type]) -> Any:
            if named or len(given) not in counts or not all(map(_is_integer, given)):
                return None
            return signature(result, *[types.int64] * len(given))

    return types.Function(Template)


class _Typing(context.BaseContext):
    """What kernels may name: integers, modules, and what they may call."""

    def _load_builtins(self) -> None:
        if not self._functions:
            loops = builtins.GetIter, builtins.IterNext, builtins.PairFirst, builtins.PairSecond
            for template in (*loops, builtins.StaticGetItemTuple):
                self.insert_function(template(self))

    def _lookup_global(self, value: Any) -> types.Function | None:
        kernel = getattr(value, "__self__", None)
        try:
            return _known(kernel if isinstance(kernel, Kernel) else value)
        except TypeError:  # not hashable
            return None

    def resolve_value_type(self, value: Any) -> types.Type:
        found = self._lookup_global(value)
        if found is not None:
            return found
        if value is None or isinstance(value, (int, tuple, ModuleType)):
            return super().resolve_value_type(value)
        raise errors.TypingError(f"kernels have no use for {value!r}")


class _Calling(callconv.BaseCallConv):
    """A C function of ``int64``, which raises nothing."""

    def _make_call_helper(self, builder: ir.IRBuilder) -> None:
        return None

    def get_arguments(self, function: ir.Function) -> Sequence[ir.Value]:
        return function.args

    def return_value(self, builder: ir.IRBuilder, value: ir.Value) -> None:
        if not isinstance(value.type, ir.IntType):
            value = _I64(0)  # None
        builder.ret(value if value.type == _I64 else builder.zext(value, _I64))

    def return_user_exc(self, builder: ir.IRBuilder, *what: Any, **more: Any) -> None:
        builder.ret(_I64(0))  # a range whose step is 0: it is 1


class _Target(base.BaseContext):
    call_conv = property(_Calling)
    target_data = property(lambda self: machine.target().target_data)

    def refresh(self) -> None:
        if not self._defns:
            wanted = (range, "getiter", "iternext", "pair_first", "pair_second", "static_getitem")
            self.insert_func_defn(each for each in builtin_registry.functions if each[1] in wanted)
            self._insert_cast_defn(builtin_registry.casts)
            self._insert_get_constant_defn(builtin_registry.constants)

    def codegen(self) -> None:
        return None

    def declare_env_global(self, module: ir.Module, name: str) -> None:
        """Objects of Python that the code refers to: none."""

    def declare_function(self, module: ir.Module, description: Any) -> ir.Function:
        function = external(module, module.name, ir.FunctionType(_I64, [_I64] * len(description.argtypes)))
        if description.inline:
            function.attributes.add("alwaysinline")
        return function

    def get_function(self, function: Any, kind: Any, _firstcall: bool = True) -> Any:
        callee = _callee(function.typing_key) if isinstance(function, types.Function) else None
        emit = callee and callee.emit
        if emit is None:
            return super().get_function(function, kind, _firstcall=False)

        def emitted(builder: ir.IRBuilder, given: Sequence[ir.Value], loc: Any = None) -> ir.Value:
            result = emit(builder, *given)
            return _I64(0) if result is None else result

        return emitted


@register_pass(mutates_CFG=False, analysis_only=True)
class _Integers(AnalysisPass):
    """Refuses a variable that is no integer."""

    _name = "rdmarpc_integers"
    _others = (types.Function, types.Module, types.NoneType, types.Pair, types.RangeType, types.RangeIteratorType)

    def __init__(self) -> None:
        super().__init__()

    def run_pass(self, state: Any) -> bool:
        for name, kind in state.typemap.items():
            parts = kind if isinstance(kind, types.BaseTuple) else [kind]
            if not all(_is_integer(part) or isinstance(part, self._others) for part in parts):
                raise errors.TypingError(f"{name} would be {kind}; kernels have integers of 64 bits")
        return False


class _Pipeline(compiler.CompilerBase):
    def define_pipelines(self) -> list[PassManager]:
        passes = PassManager("kernel")
        for each in (
            TranslateByteCode,
            FixupArgs,
            IRProcessing,
            ReconstructSSA,
            NopythonTypeInference,
            PreLowerStripPhis,
            _Integers,
            NativeLowering,
        ):
            passes.add_pass(each, each.__name__)
        passes.finalize()
        return [passes]


class _Library:
    """Where numba puts a function: into a module of the function's name."""

    recorded_timings = None

    def __init__(self, name: str) -> None:
        self.name, self._reload_init = name, set[Any]()

    def create_ir_module(self, name: str) -> ir.Module:
        self.module = ir.Module(self.name)
        return self.module

    def add_ir_module(self, module: ir.Module) -> None:
        """It is there."""


@cache
def _contexts() -> tuple[_Typing, _Target]:
    typing = _Typing()
    return typing, _Target(typing, "cpu")


_functions: dict[str, FunctionType] = {}
"""By the names that LLVM knows them by."""


@cache
def _symbol(function: FunctionType) -> str:
    name = f"{len(_functions)}.{function.__qualname__}"
    _functions[name] = function
    return name


@cache
def _translated(function: FunctionType) -> tuple[str, list[FunctionType]]:
    """LLVM's code of a function, which is one module; and the functions that it calls."""
    flags = compiler.Flags()
    flags.no_compile = flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
    flags.error_model, flags.forceinline = "numpy", function in inlined
    library = _Library(_symbol(function))
    arguments = (types.int64,) * function.__code__.co_argcount
    try:
        compiler.compile_extra(*_contexts(), function, arguments, None, flags, {}, library=library, pipeline_class=_Pipeline)
    except (errors.NumbaError, NotImplementedError) as error:
        where = function.__code__.co_filename, function.__code__.co_firstlineno, None, None
        raise SyntaxError(f"kernel {function.__qualname__}: this is not possible in kernels: {error}", where) from None
    declared = [each.name for each in library.module.functions if each.is_declaration]
    if foreign := [name for name in declared if name.startswith(_OF_PYTHON)]:
        raise RuntimeError(f"kernel {function.__qualname__} runs without Python's lock, but would call {', '.join(foreign)}")
    return str(library.module), [_functions[name] for name in declared if name in _functions]


# -- entries


def _entry_for_c(kernel: Kernel, module: ir.Module, native: ir.Function) -> None:
    entry = ir.Function(module, _c_kind(kernel.signature), module.name)
    builder = ir.IRBuilder(entry.append_basic_block())
    result = builder.call(native, [value if value.type == _I64 else builder.sext(value, _I64) for value in entry.args])
    wanted = entry.function_type.return_type
    if wanted == _VOID:
        builder.ret_void()
    else:
        builder.ret(result if wanted == _I64 else builder.trunc(result, wanted))


def _entry_for_python(kernel: Kernel, module: ir.Module, native: ir.Function) -> None:
    kind = ir.FunctionType(_OBJECT, [_OBJECT, _OBJECT.as_pointer(), _I64, _OBJECT])
    entry = ir.Function(module, kind, module.name)
    builder = ir.IRBuilder(entry.append_basic_block())
    _, given, count, names = entry.args
    arguments, none = len(native.args), _OBJECT(None)
    wrong = builder.or_(builder.icmp_signed("!=", count, _I64(arguments)), builder.icmp_unsigned("!=", names, none))
    with builder.if_then(wrong, likely=False):
        _fail(builder, f"{kernel.name} takes {arguments} integers")
    values = []
    for at in range(arguments):
        item = builder.load(builder.gep(given, [_I64(at)]))
        value = _python(builder, "PyLong_AsLongLong", _I64, [item])
        with builder.if_then(builder.icmp_signed("==", value, _I64(-1)), likely=False):
            raised = _python(builder, "PyErr_Occurred", _OBJECT, [])
            with builder.if_then(builder.icmp_unsigned("!=", raised, none), likely=False):
                builder.ret(none)
        values.append(value)
    state = _python(builder, "PyEval_SaveThread", _OBJECT, [])
    result = builder.call(native, values)
    _python(builder, "PyEval_RestoreThread", _VOID, [state])
    builder.ret(_python(builder, "PyLong_FromLongLong", _OBJECT, [result]))


def _python(builder: ir.IRBuilder, name: str, result: ir.Type, given: Sequence[ir.Value]) -> ir.Value:
    return builder.call(external(builder.module, name, ir.FunctionType(result, [value.type for value in given])), given)


def _fail(builder: ir.IRBuilder, text: str) -> None:
    module = builder.module
    data = ir.Constant(ir.ArrayType(ir.IntType(8), len(text) + 1), bytearray(text.encode() + b"\0"))
    message = ir.GlobalVariable(module, data.type, module.get_unique_name("text"))
    message.initializer, message.linkage, message.global_constant = data, "private", True
    error = ir.GlobalVariable(module, ir.IntType(8), machine.TYPE_ERROR)
    _python(builder, "PyErr_SetString", _VOID, [error, builder.bitcast(message, _OBJECT)])
    builder.ret(_OBJECT(None))
