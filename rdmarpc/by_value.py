"""Functions and classes by value: the pickler of ``RpcBackendOptions(pickler="cloudpickle")``."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from typing import Any

import cloudpickle
import torch

from .serialize import keep_in_band


class Pickler(cloudpickle.Pickler):
    """``reduce`` is asked first, cloudpickle for the rest."""

    def __init__(self, file: io.BytesIO, reduce: Callable[[Any], Any], buffers: list[torch.Tensor]) -> None:
        super().__init__(file, protocol=5, buffer_callback=partial(keep_in_band, buffers))
        self._reduce = reduce

    def reducer_override(self, value: Any) -> Any:
        found = self._reduce(value)
        return super().reducer_override(value) if found is NotImplemented else found


def needed(function: Any) -> bool:
    """Whether a function or class cannot be found by its name in another process: defined in ``__main__`` or on the spot."""
    return function.__module__ == "__main__" or "<" in function.__qualname__
