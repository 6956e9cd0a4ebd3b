"""How what is not a plain dense tensor is taken apart, so that the dense parts travel out of band like any dense tensor.

Each function gives what ``__reduce__`` gives (see ``pickle``), or ``NotImplemented`` to leave the object to its own class.

TorchScript: functions travel by name, where Python finds them, or else as the receiver has compiled them, too. Modules travel
as ``torch.jit.save`` writes them.

Arrays of cupy leave as tensors over their memory and arrive as arrays over that of tensors, without a copy more than a tensor
takes. cupy has current streams of its own. At the sender torch's current stream follows what cupy's was given before. At the
receiver cupy's current stream follows the copy, in the thread that unpickles; where another thread takes the value out of a
future, its own follows too (``use_here``). The memory is torch's there, whose allocator is told of cupy's stream. cupy is
imported where an array arrives, and not before.
"""

from __future__ import annotations

import importlib
import io
import pickle
import re
import sys
from collections import namedtuple
from collections.abc import Iterable
from functools import reduce
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch._C._functorch import is_functorch_wrapped_tensor

from ..transport import Event, as_tensor
from ..transport import cuda_driver as driver
from . import device_maps, gpu, permits
from .incoming import beside
from .layout import is_memory, travels

_OF_SCRIPTS = "torch._jit_internal"
_tuple_classes: dict[tuple[str, tuple[str, ...]], type] = {}
_OF_ROWS = torch.Tensor.crow_indices, torch.Tensor.col_indices
_OF_COLUMNS = torch.Tensor.ccol_indices, torch.Tensor.row_indices
_COMPRESSED = dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), _OF_ROWS)
_COMPRESSED |= dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), _OF_COLUMNS)


def reduce_tensor(value: torch.Tensor) -> Any:
    """Take apart a tensor that does not travel as it is. Raises ``RuntimeError`` for one that cannot travel at all."""
    _check_bare(value)
    if value.layout is torch.strided and value.device.type not in ("cpu", "meta") and not value.is_quantized:
        why = "this worker has no GPU of that kind" if not value.is_nested else "it is a nested tensor"
        raise RuntimeError(device_maps.NO_WAY.format(device=value.device, why=why))
    if value.layout is torch.sparse_coo:
        plain = value.detach()
        return _coo, (plain._indices(), plain._values(), plain.shape, plain.is_coalesced(), value.requires_grad)
    if value.layout in _COMPRESSED:
        plain = value.detach()
        outer, inner = _COMPRESSED[value.layout]
        return _compressed, (outer(plain), inner(plain), plain.values(), plain.shape, value.layout, value.requires_grad)
    if value.is_quantized:
        return _reduce_quantised(value)
    if value._is_zerotensor() and value.device.type == "cpu":
        return _zeros, (value.shape, value.stride(), value.dtype, value.requires_grad)
    if value.layout is torch.strided:
        return NotImplemented  # meta, nested: torch's own way
    raise RuntimeError(f"tensors of layout {value.layout} cannot travel; call .to_dense() before sending one")


def _check_bare(value: torch.Tensor) -> None:
    if is_functorch_wrapped_tensor(value):
        raise RuntimeError(
            "tensors inside of a transform of torch.func (vmap, grad, jvp, functionalize) cannot travel; call outside"
        )
    if not is_memory(value):
        raise RuntimeError(
            "tensors with a tangent (torch.autograd.forward_ad) cannot travel: it would be lost; send unpack_dual(x).primal"
        )


def other_name(kind: type) -> str:
    """That of a class in its module, where it is another one than its own (``torch.nn.attention.SDPBackend``); else empty."""
    names = vars(sys.modules.get(kind.__module__, object))
    if "." in kind.__qualname__ or names.get(kind.__qualname__) is kind:
        return ""
    return next((name for name, value in tuple(names.items()) if value is kind), "")


def reduce_class(kind: type) -> Any:
    """Tuples with names that a TorchScript function returns are of a class of torch's making, which is found under no name."""
    if kind.__module__ == _OF_SCRIPTS and issubclass(kind, tuple):
        return _tuple_class, (kind.__name__, kind._fields)  # type: ignore[attr-defined]
    return other_name(kind) or NotImplemented


def _tuple_class(name: str, fields: tuple[str, ...]) -> type:
    found = _tuple_classes.get((name, fields))
    return found or _tuple_classes.setdefault((name, fields), namedtuple(name, fields, module=_OF_SCRIPTS))


def _zeros(shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype, requires_grad: bool) -> torch.Tensor:
    """In place of a tensor that is known to be zero, and has no memory. What arrives can be written to."""
    return torch.empty_strided(shape, strides, dtype=dtype, device="cpu").zero_().requires_grad_(requires_grad)


def _coo(indices: torch.Tensor, values: torch.Tensor, shape: torch.Size, coalesced: bool, requires_grad: bool) -> torch.Tensor:
    # The sender's tensor was valid, and checking reads every index. So only tensors of peers without full trust are checked.
    checked, where = permits.current is not None, values.device
    made = torch.sparse_coo_tensor(indices, values, shape, device=where, check_invariants=checked, is_coalesced=coalesced)
    return made.requires_grad_(requires_grad)


def _compressed(
    outer: torch.Tensor, inner: torch.Tensor, values: torch.Tensor, shape: torch.Size, layout: torch.layout, requires_grad: bool
) -> torch.Tensor:
    checked = permits.current is not None
    made = torch.sparse_compressed_tensor(
        outer, inner, values, shape, layout=layout, device=values.device, check_invariants=checked
    )
    return made.requires_grad_(requires_grad)


def _reduce_quantised(value: torch.Tensor) -> Any:
    if value.device.type != "cpu":
        raise RuntimeError(device_maps.NO_WAY.format(device=value.device, why="it is quantised"))
    if value.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        scales: tuple[Any, ...] = (value.q_scale(), value.q_zero_point())
    else:
        scales = (value.q_per_channel_scales(), value.q_per_channel_zero_points(), value.q_per_channel_axis())
    raw = bytes_of(value.untyped_storage())
    place = (value.storage_offset(), value.shape, value.stride())
    return _quantised, (raw, place, value.dtype, scales)


def _quantised(raw: torch.Tensor, place: Any, dtype: torch.dtype, scales: tuple[Any, ...]) -> torch.Tensor:
    offset, shape, strides = place
    if len(scales) == 2:
        made = torch._empty_affine_quantized(shape, scale=scales[0], zero_point=scales[1], dtype=dtype, device="cpu")
    else:
        made = torch._empty_per_channel_affine_quantized(
            shape, scales=scales[0], zero_points=scales[1], axis=scales[2], dtype=dtype, device="cpu"
        )
    return made.set_(raw.untyped_storage(), offset, shape, strides)


def reduce_subclass(value: torch.Tensor) -> Any:
    """Take apart a tensor of a subclass of ``torch.Tensor``. If it is a dense tensor and the subclass adds only Python
    behaviour, its data goes out of band."""
    kind = type(value)
    if isinstance(value, torch._subclasses.FakeTensor):
        raise RuntimeError("a FakeTensor has no data to send; send a tensor of device 'meta', or its shape")
    if kind.__reduce_ex__ is not torch.Tensor.__reduce_ex__ or kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return NotImplemented
    _check_bare(value)
    with torch._C.DisableTorchFunctionSubclass():
        plain = value.detach().as_subclass(torch.Tensor)
        if not travels(plain) and (gpu.current is None or not gpu.current.takes(plain)):
            return NotImplemented
        return _subclass, (kind, plain, value.requires_grad, torch._utils._get_obj_state(value))


def own_way(value: torch.Tensor) -> Any:
    """What the class of a tensor says itself of how it is pickled, if that can be called from here; else ``NotImplemented``."""
    reduced = value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    return reduced if type(reduced) is tuple and len(reduced) == 2 else NotImplemented


def _subclass(kind: type[torch.Tensor], plain: torch.Tensor, requires_grad: bool, state: Any) -> torch.Tensor:
    if not issubclass(kind, torch.Tensor):
        raise TypeError(f"{kind.__qualname__} is no kind of tensor")
    made = plain.as_subclass(kind).requires_grad_(requires_grad)
    if state:
        torch._utils._set_obj_state(made, state)
    return made


def reduce_parameter(value: torch.nn.Parameter, _: Any) -> Any:
    return _parameter, (value.detach(), value.requires_grad, value.__dict__ or None)


def _parameter(plain: torch.Tensor, requires_grad: bool, state: dict[str, Any] | None) -> torch.nn.Parameter:
    made = torch.nn.Parameter(plain, requires_grad)
    if state:
        made.__dict__.update(state)
    return made


def reduce_array(value: np.ndarray) -> Any:
    """One that may not be written to leaves that behind: a function owns what it receives."""
    return NotImplemented if value.flags.writeable else value.copy("K").__reduce_ex__(pickle.HIGHEST_PROTOCOL)


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """A storage of the CPU as a tensor (uint8) over the same memory."""
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage, 0, (storage.nbytes(),), (1,))


def reduce_storage(value: torch.UntypedStorage, _: Any) -> Any:
    if value.device.type != "cpu":
        return NotImplemented
    return _storage, (bytes_of(value),)


def _storage(raw: torch.Tensor) -> torch.UntypedStorage:
    return raw.untyped_storage()


def reduce_typed_storage(value: torch.storage.TypedStorage, _: Any) -> Any:
    if value.device.type != "cpu":
        return NotImplemented
    return _typed_storage, (value._untyped_storage, value.dtype)


def _typed_storage(untyped: torch.UntypedStorage, dtype: torch.dtype) -> torch.storage.TypedStorage:
    return torch.storage.TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)


# -- TorchScript

_MANGLED = re.compile(r"___torch_mangle_\d+\.")


def _find(module: str, name: str) -> Any:
    return reduce(getattr, name.split("."), importlib.import_module(module))


def _place(qualified_name: str) -> tuple[str, str]:
    """The module and the name under which TorchScript found the Python of a function."""
    module, _, name = _MANGLED.sub("", qualified_name).removeprefix("__torch__.").rpartition(".")
    return module, name


def _found(module: str, name: str) -> Any:
    try:
        return _find(module, name)
    except (ImportError, AttributeError, ValueError):
        return None


def reduce_function(function: torch.jit.ScriptFunction, _: Any) -> Any:
    place = _place(function.qualified_name)
    return (_find, place) if _found(*place) is function else (_compiled, (function.qualified_name,))


def _compiled(qualified_name: str) -> torch.jit.ScriptFunction:
    """A function that has been compiled in this process, too, under the same name: ``torch.jit.script`` and ``trace`` need not
    leave it where Python finds it."""
    found = torch.jit._state._python_cu.find_function(qualified_name)
    if found is None:
        name = qualified_name.rpartition(".")[2]
        raise RuntimeError(f"attempted to get undefined function {name}: this worker has not compiled {qualified_name}")
    python = _found(*_place(qualified_name))
    if isinstance(python, FunctionType):
        found._torchdynamo_inline = python  # type: ignore[attr-defined] # as ``torch.jit.script`` notes it
    return found


def check_arguments(function: Any, args: tuple[Any, ...]) -> None:
    """Raise ``RuntimeError`` for too many arguments: as torch does, at the caller. All else is found out where it runs."""
    if len(args) > (most := len(function.schema.arguments)):
        raise RuntimeError(
            f"{function.name}() expected at most {most} argument(s) but received {len(args)} argument(s). "
            f"Declaration: {function.schema}"
        )


def reduce_module(module: torch.jit.ScriptModule, _: Any) -> Any:
    file = io.BytesIO()
    torch.jit.save(module, file)
    return _load, (file.getvalue(),)


def reduce_native_module(module: torch._C.ScriptModule, _: Any) -> Any:
    """A module as TorchScript's own functions return it."""
    return reduce_module(torch.jit._recursive.wrap_cpp_module(module), _)


def _load(data: bytes) -> torch.jit.ScriptModule:
    return torch.jit.load(io.BytesIO(data))


# -- arrays of cupy

Arrived = tuple[torch.Tensor, Event]
"""The tensor under an array, and the end of the copy into its memory."""


def is_cupy(kind: type) -> bool:
    return kind.__module__ == "cupy" and kind.__name__ == "ndarray"


def reduce_cupy(array: Any) -> Any:
    """See ``pickle``: ``__reduce__``. ``ValueError`` for one that torch cannot share. Where torch has no GPU, the array goes as
    cupy pickles it: through host memory."""
    if gpu.current is None:
        return NotImplemented
    if any(stride < 0 for stride in array.strides):  # which torch does not have
        array = array.copy()
    return landed_array, (as_tensor(array),)


def landed_array(tensor: torch.Tensor) -> Any:
    """The array over a tensor that came."""
    try:
        if permits.current is not None and "cupy" not in sys.modules:
            raise ImportError("nothing is imported for a peer where `allow` is set")
        import cupy
    except ImportError as error:
        raise RuntimeError(
            f"this worker cannot make the array of cupy that came: {error}. Install cupy here (cupy-cuda12x, cupy-cuda13x), "
            "import it where `allow` is set, or send torch.from_dlpack(array)"
        ) from error
    if tensor.is_cpu:
        raise RuntimeError("an array of cupy came to the CPU: the sender's device map has to name a GPU for it")
    torch._jit_internal._TensorExtractor = _TensorExtractor  # type: ignore[misc]
    index = tensor.device.index
    with torch.accelerator.device_index(index):  # torch shows others the memory of its current device only
        array = cupy.from_dlpack(tensor)
    _lend(tensor)
    if beside.now.arrays is not None:
        beside.now.arrays.append((tensor, Event(index, driver.current_stream(index))))
    return array


def use_here(arrays: Iterable[Arrived]) -> None:
    """This thread uses arrays that another one may have unpickled."""
    for tensor, copied in arrays:
        copied.follow(_lend(tensor))


def _lend(tensor: torch.Tensor) -> int:
    """Have torch use this memory again only after what cupy's current stream, whose handle is returned, is given until then."""
    index = tensor.device.index
    stream: int = sys.modules["cupy"].cuda.get_current_stream(index).ptr
    tensor.record_stream(driver.as_torch(index, stream))
    return stream


class _TensorExtractor(torch._jit_internal._TensorExtractor):
    """Torch pickles the values of futures that know of devices, to find the tensors. An array would be copied to the host."""

    def persistent_id(self, obj: Any) -> Any:
        return "" if is_cupy(type(obj)) else super().persistent_id(obj)
