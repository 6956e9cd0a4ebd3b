"""Compiles a kernel to an object file: numba makes LLVM's code of it, to which an entry for Python or C is added.

The entry of a kernel is a function of CPython's convention ``METH_FASTCALL``: it converts integers, lets the GIL go, calls, and
takes the GIL back. That of a callback is a C function of its signature. Imported only where a kernel is compiled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import FunctionType
from typing import Any

import llvmlite.binding as llvm
import numba
from llvmlite import ir

from . import instructions, machine
from .symbols import CFunction, Kernel, Scalar, Signature, inlined, operations

_I32, _I64, _VOID = ir.IntType(32), ir.IntType(64), ir.VoidType()
_OBJECT = ir.IntType(8).as_pointer()
_TYPES = {"int32": _I32, "int64": _I64}
_dispatchers: dict[FunctionType, Any] = {}


def object_code(kernel: Kernel, kernels: Mapping[Any, Kernel]) -> bytes:
    """The object file of a kernel; its entry is ``kernel.symbol``. ``kernels``: those that it may call. What numba raises for a
    function that it cannot compile."""
    dispatcher = _dispatcher(kernel.function, kernel.signature, kernels)
    (overload,) = dispatcher.overloads
    module = llvm.parse_assembly(dispatcher.inspect_llvm(overload))
    entry = _Entry(kernel, dispatcher.overloads[overload].fndesc.llvm_func_name)
    entry.module.triple, entry.module.data_layout = module.triple, module.data_layout
    module.link_in(llvm.parse_assembly(str(entry.module)))
    module.verify()
    _check_resolved(module)
    code: bytes = machine.target().emit_object(module)
    return code


def _check_resolved(module: llvm.ModuleRef) -> None:
    """An object file with a name that the process does not know would end the process that loads it."""
    unknown = [
        function.name
        for function in module.functions
        if function.is_declaration and not function.name.startswith("llvm.") and not llvm.address_of_symbol(function.name)
    ]
    if unknown:
        raise RuntimeError(f"kernels call what there is not: {', '.join(unknown)}")


# -- by numba


def _dispatcher(function: FunctionType, signature: Signature, kernels: Mapping[Any, Kernel]) -> Any:
    if function not in _dispatchers:
        compile_one = numba.njit(_numbas(signature), nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
        _dispatchers[function] = compile_one(_translated(function, kernels))
    return _dispatchers[function]


def _numbas(signature: Signature) -> Any:
    return getattr(numba.types, signature.result)(*(getattr(numba.types, name) for name in signature.arguments))


def _translated(function: FunctionType, kernels: Mapping[Any, Kernel]) -> FunctionType:
    """The same function over numba's names."""
    known = function.__globals__
    names = {name: _meaning(known[name], kernels) for name in function.__code__.co_names if name in known}
    return FunctionType(function.__code__, {**known, **names}, function.__name__, function.__defaults__, function.__closure__)


def _meaning(value: Any, kernels: Mapping[Any, Kernel]) -> Any:
    if isinstance(value, Scalar):
        return getattr(numba.types, value.name)
    if isinstance(value, CFunction):
        return numba.types.ExternalFunction(value.name, _numbas(value.signature))
    if isinstance(value, FunctionType) and value in operations:
        return getattr(instructions, value.__name__)
    if isinstance(value, FunctionType) and value in inlined:
        return numba.njit(inline="always")(_translated(value, kernels))
    found = kernels.get(value) if callable(value) else None
    return value if found is None else _dispatcher(found.function, found.signature, kernels)


# -- entries


class _Entry:
    """``module`` has the entry of a kernel, which calls ``native``: numba's function, which takes addresses for its result and
    for an exception, then the arguments, and gives a status."""

    def __init__(self, kernel: Kernel, native: str) -> None:
        self.module = ir.Module()
        self._signature = kernel.signature
        arguments = [_TYPES[name] for name in kernel.signature.arguments]
        result = _TYPES.get(kernel.signature.result, _OBJECT)
        pointer = ir.IntType(8).as_pointer()
        exception = ir.LiteralStructType([pointer, _I32, pointer, pointer, _I32]).as_pointer()
        self._result, self._exception = result, exception
        kind = ir.FunctionType(_I32, [result.as_pointer(), exception.as_pointer(), *arguments])
        self._native = ir.Function(self.module, kind, native)
        (self._for_c if kernel.callback else self._for_python)(kernel, arguments)

    def _for_c(self, kernel: Kernel, arguments: Sequence[ir.Type]) -> None:
        entry = ir.Function(self.module, ir.FunctionType(_VOID, arguments), kernel.symbol)
        builder = ir.IRBuilder(entry.append_basic_block())
        self._call(builder, self._places(builder), entry.args)
        builder.ret_void()

    def _for_python(self, kernel: Kernel, arguments: Sequence[ir.Type]) -> None:
        kind = ir.FunctionType(_OBJECT, [_OBJECT, _OBJECT.as_pointer(), _I64])
        entry = ir.Function(self.module, kind, kernel.symbol)
        builder = ir.IRBuilder(entry.append_basic_block())
        places = self._places(builder)
        _, given, count = entry.args
        wrong = builder.icmp_signed("!=", count, ir.Constant(_I64, len(arguments)))
        with builder.if_then(wrong, likely=False):
            self._fail(builder, TypeError, f"{kernel.name} takes {len(arguments)} integers")
        values = []
        for at in range(len(arguments)):
            item = builder.load(builder.gep(given, [ir.Constant(_I64, at)]))
            value = builder.call(self._python("PyLong_AsLongLong", _I64, [_OBJECT]), [item])
            with builder.if_then(builder.icmp_signed("==", value, ir.Constant(_I64, -1)), likely=False):
                raised = builder.call(self._python("PyErr_Occurred", _OBJECT, []), [])
                with builder.if_then(builder.icmp_unsigned("!=", raised, _OBJECT(None)), likely=False):
                    builder.ret(_OBJECT(None))
            values.append(value)
        state = builder.call(self._python("PyEval_SaveThread", _OBJECT, []), [])
        status = self._call(builder, places, values)
        builder.call(self._python("PyEval_RestoreThread", _VOID, [_OBJECT]), [state])
        with builder.if_then(builder.icmp_signed("!=", status, ir.Constant(_I32, 0)), likely=False):
            self._fail(builder, RuntimeError, f"{kernel.name} failed")
        builder.ret(builder.call(self._python("PyLong_FromLongLong", _OBJECT, [_I64]), [builder.load(places[0])]))

    def _places(self, builder: ir.IRBuilder) -> tuple[ir.Value, ir.Value]:
        return builder.alloca(self._result), builder.alloca(self._exception)

    def _call(self, builder: ir.IRBuilder, places: tuple[ir.Value, ir.Value], values: Sequence[ir.Value]) -> ir.Value:
        return builder.call(self._native, [*places, *values])

    def _python(self, name: str, result: ir.Type, arguments: Sequence[ir.Type]) -> ir.Function:
        found = self.module.globals.get(name)
        return found if found is not None else ir.Function(self.module, ir.FunctionType(result, arguments), name)

    def _fail(self, builder: ir.IRBuilder, kind: type[Exception], text: str) -> None:
        error = ir.GlobalVariable(self.module, ir.IntType(8), machine.ERRORS[kind])
        data = ir.Constant(ir.ArrayType(ir.IntType(8), len(text) + 1), bytearray(text.encode() + b"\0"))
        message = ir.GlobalVariable(self.module, data.type, self.module.get_unique_name("text"))
        message.initializer, message.linkage, message.global_constant = data, "private", True
        fail = self._python("PyErr_SetString", _VOID, [_OBJECT, _OBJECT])
        builder.call(fail, [error, builder.bitcast(message, _OBJECT)])
        builder.ret(_OBJECT(None))
