"""Which way a forward is captured: one after another, from the one that keeps most of the model as it is."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from ..transport import NotSupported
from .capture import Capture, Join, TensorSpec, capture, first_line
from .record import record

METHODS = {"auto": ("fx", "export"), "fx": ("fx",), "export": ("export",), "eager": ()}
"""What each ``capture=`` of ``wrap`` tries, in order."""


def capture_by(
    methods: tuple[str, ...], model: nn.Module, inputs: list[TensorSpec], join: Join, whole: Callable[[str], bool]
) -> tuple[Capture, list[str]]:
    """The first of these methods that works, and why those before it did not, one line each. See ``capture``; if none works,
    ``Uncaptured``, also where that is the model's own fault: some of what fake tensors cannot do looks the same."""
    refused: list[str] = []
    error: Exception | None = None
    for method in methods:
        try:
            return _METHODS[method](model, inputs, join, whole), refused
        except Exception as raised:
            refused.append(f"{method}: {first_line(raised)}")
            error = raised
    raise Uncaptured(refused, error) from error


class Uncaptured(NotSupported):
    """No method worked. ``refused`` has the reasons, ``error`` is the last."""

    def __init__(self, refused: list[str], error: Exception | None) -> None:
        self.refused, self.error = refused, error
        super().__init__("\n".join(["the forward cannot be captured as a whole", *refused]), hint=getattr(error, "hint", ""))


def _fx(model: nn.Module, inputs: list[TensorSpec], join: Join, whole: Callable[[str], bool]) -> Capture:
    try:
        return capture(model, inputs, join, whole=whole)
    except NotSupported:  # also writes: where shapes are known, it is known who reads afterwards
        return record(model, inputs, join, whole)


def _export(model: nn.Module, inputs: list[TensorSpec], join: Join, whole: Callable[[str], bool]) -> Capture:
    from .export import export  # imports of torch.export take seconds

    return export(model, inputs, join, whole)


_METHODS: dict[str, Callable[..., Capture]] = {"fx": _fx, "export": _export}
