"""Compiles a kernel to an object file: its source becomes LLVM's code (``translation``), with an entry for Python or C.

The entry of a kernel is a function of CPython's convention ``METH_FASTCALL``: it converts integers, lets the GIL go, calls, and
takes the GIL back. That of a callback is a C function of its signature. Imported only where a kernel is compiled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir

from . import machine
from .instructions import external
from .symbols import Kernel
from .translation import Unit, kind_of

_I32, _I64, _VOID = ir.IntType(32), ir.IntType(64), ir.VoidType()
_OBJECT = ir.IntType(8).as_pointer()


def object_code(kernel: Kernel, kernels: Mapping[Any, Kernel]) -> bytes:
    """The object file of a kernel; its entry is ``kernel.symbol``. ``kernels``: those that it may call. Errors: see
    ``Unit.kernel``."""
    target = machine.target()
    made = ir.Module(kernel.symbol)
    made.triple, made.data_layout = target.triple, str(target.target_data)
    (_entry_for_c if kernel.callback else _entry_for_python)(kernel, made, Unit(made, kernels).kernel(kernel))
    module = llvm.parse_assembly(str(made))
    module.verify()
    passes = llvm.create_pass_builder(target, llvm.create_pipeline_tuning_options(speed_level=3))
    passes.getModulePassManager().run(module, passes)
    _check_resolved(module)
    code: bytes = target.emit_object(module)
    return code


def _check_resolved(module: llvm.ModuleRef) -> None:
    """An object file with a name that the process does not know would end the process that loads it."""
    unknown = [
        function.name
        for function in module.functions
        if function.is_declaration and not function.name.startswith("llvm.") and not machine.has_symbol(function.name)
    ]
    if unknown:
        raise RuntimeError(f"kernels call what there is not: {', '.join(unknown)}")


# -- entries


def _entry_for_c(kernel: Kernel, module: ir.Module, native: ir.Function) -> None:
    entry = ir.Function(module, kind_of(kernel.signature), kernel.symbol)
    builder = ir.IRBuilder(entry.append_basic_block())
    result = builder.call(native, [value if value.type == _I64 else builder.sext(value, _I64) for value in entry.args])
    wanted = entry.function_type.return_type
    if wanted == _VOID:
        builder.ret_void()
    else:
        builder.ret(result if wanted == _I64 else builder.trunc(result, wanted))


def _entry_for_python(kernel: Kernel, module: ir.Module, native: ir.Function) -> None:
    kind = ir.FunctionType(_OBJECT, [_OBJECT, _OBJECT.as_pointer(), _I64])
    entry = ir.Function(module, kind, kernel.symbol)
    builder = ir.IRBuilder(entry.append_basic_block())
    _, given, count = entry.args
    arguments = len(native.args)
    wrong = builder.icmp_signed("!=", count, _I64(arguments))
    with builder.if_then(wrong, likely=False):
        _fail(builder, TypeError, f"{kernel.name} takes {arguments} integers")
    values = []
    for at in range(arguments):
        item = builder.load(builder.gep(given, [_I64(at)]))
        value = _python(builder, "PyLong_AsLongLong", _I64, [item])
        with builder.if_then(builder.icmp_signed("==", value, _I64(-1)), likely=False):
            raised = _python(builder, "PyErr_Occurred", _OBJECT, [])
            with builder.if_then(builder.icmp_unsigned("!=", raised, _OBJECT(None)), likely=False):
                builder.ret(_OBJECT(None))
        values.append(value)
    state = _python(builder, "PyEval_SaveThread", _OBJECT, [])
    result = builder.call(native, values)
    _python(builder, "PyEval_RestoreThread", _VOID, [state])
    builder.ret(_python(builder, "PyLong_FromLongLong", _OBJECT, [result]))


def _python(builder: ir.IRBuilder, name: str, result: ir.Type, given: Sequence[ir.Value]) -> ir.Value:
    return builder.call(external(builder.module, name, ir.FunctionType(result, [value.type for value in given])), given)


def _fail(builder: ir.IRBuilder, kind: type[Exception], text: str) -> None:
    module = builder.module
    error = ir.GlobalVariable(module, ir.IntType(8), machine.ERRORS[kind])
    data = ir.Constant(ir.ArrayType(ir.IntType(8), len(text) + 1), bytearray(text.encode() + b"\0"))
    message = ir.GlobalVariable(module, data.type, module.get_unique_name("text"))
    message.initializer, message.linkage, message.global_constant = data, "private", True
    _python(builder, "PyErr_SetString", _VOID, [error, builder.bitcast(message, _OBJECT)])
    builder.ret(_OBJECT(None))
