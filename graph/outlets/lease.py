"""Production in place: memory for a payload, in which whatever makes it writes it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ...transport import Device, Mapped


class Lease:
    """The memory is the mapped slot, or registered memory of ours that is written from (``place``).

    ``taken``: a tensor lies in it, or has and ``end`` was not called yet; ``occupied``: one does at this moment.
    """

    __slots__ = ("_address", "_device", "_mapped", "_nbytes", "_place", "_view", "_writing")

    def __init__(self, device: Device, nbytes: int) -> None:
        self._device, self._nbytes = device, nbytes
        self._place: torch.Tensor | None = None
        self._view: weakref.ref[memoryview] | None = None
        self._mapped: Mapped | None = None
        self._writing, self._address = False, 0

    @property
    def taken(self) -> bool:
        return self._view is not None

    @property
    def occupied(self) -> bool:
        return self._view is not None and self._view() is not None

    @property
    def place(self) -> torch.Tensor:
        """Bytes; registered."""
        if self._place is None:
            self._place = self._device.empty(self._nbytes, dtype=torch.uint8)
        return self._place

    def take(
        self,
        mapped: Mapped | None,
        dtype: torch.dtype,
        shape: Sequence[int],
        strides: Sequence[int],
        died: Callable[[], None],
    ) -> torch.Tensor:
        """The memory as a tensor over a storage of its own, to be written from now on. ``died`` hears of the end of that
        storage: on any thread, also from finalizers."""
        if mapped is not None:
            mapped.begin()
            view = memoryview(mapped.memory)[: self._nbytes]
        else:
            view = memoryview(self.place.numpy())
        self._mapped, self._writing = mapped, True
        self._view = weakref.ref(view, lambda _: died())
        flat = torch.frombuffer(view, dtype=dtype)
        self._address = flat.data_ptr()
        return torch.empty(0, dtype=dtype, device="cpu").set_(flat.untyped_storage(), 0, shape, strides)

    def holds(self, payload: torch.Tensor) -> bool:
        """Whether this payload was written here."""
        return self._writing and payload.untyped_storage().data_ptr() == self._address

    def stop_writing(self) -> None:
        """Nothing is written here any more."""
        if self._writing:
            self._writing = False
            if self._mapped is not None:
                self._mapped.end()

    def end(self) -> None:
        """The last tensor over the memory has died."""
        self._view = None
