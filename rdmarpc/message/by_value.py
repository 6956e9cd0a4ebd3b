"""Functions and classes by value: the pickler of ``RpcBackendOptions(pickler="cloudpickle")``."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import cloudpickle


class Pickler(cloudpickle.Pickler):
    """A pickler that asks ``reduce`` first, and leaves the rest to cloudpickle. ``in_band``: the ``buffer_callback`` of
    ``pickle.Pickler``."""

    def __init__(self, file: io.BytesIO, reduce: Callable[[Any], Any], in_band: Callable[[pickle.PickleBuffer], bool]) -> None:
        super().__init__(file, protocol=5, buffer_callback=in_band)
        self._reduce = reduce

    def reducer_override(self, value: Any) -> Any:
        found = self._reduce(value)
        return super().reducer_override(value) if found is NotImplemented else found


def needed(function: Any) -> bool:
    """Whether a function or class cannot be found by its name in another process: defined in ``__main__`` or on the spot."""
    return function.__module__ == "__main__" or "<" in function.__qualname__
