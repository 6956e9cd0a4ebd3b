"""Arrays of cupy in messages. Each leaves as a tensor over its memory and arrives as an array over that of a tensor, without a
copy more than a tensor takes.

cupy has current streams of its own. At the sender torch's current stream follows what cupy's was given before. At the receiver
cupy's current stream follows the copy, in the thread that unpickles; where another thread takes the value out of a future, its
own follows too (``use_here``). The memory is torch's there, whose allocator is told of cupy's stream.

cupy is imported where an array arrives, and not before.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch

from ..transport import Event, as_tensor
from ..transport import cuda_driver as driver
from . import gpu, permits
from .incoming import beside

Arrived = tuple[torch.Tensor, Event]
"""The tensor under an array, and the end of the copy into its memory."""


def is_array(kind: type) -> bool:
    return kind.__module__ == "cupy" and kind.__name__ == "ndarray"


def reduce_array(array: Any) -> Any:
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
        return "" if is_array(type(obj)) else super().persistent_id(obj)
