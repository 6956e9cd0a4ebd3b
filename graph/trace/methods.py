"""The methods of capture, tried one after another, from the one that keeps most of the model as it is.

**A method of your own.** A package brings one by an entry point of the group ``rdmarpc.captures``, here in its
``pyproject.toml``::

    [project.entry-points."rdmarpc.captures"]
    mine = "mypackage.captures:mine"

``wrap(..., capture="mine")`` imports ``mypackage.captures`` and calls ``mine`` as a ``Method``, once for every new set of input
shapes. The names of the built-in methods are taken, and ``"auto"`` tries only those.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Mapping
from typing import Protocol

from torch import nn

from ...transport import NotSupported, plugins
from ..guards.fast_paths import FastPaths, cut_attention
from ..guards.flags import SetsFlag
from ..opaque.again import ActsAgain
from .capture import Capture, Join, TensorSpec, capture, first_line
from .record import check_operations, record
from .sizes import Sizes
from .watch import Beyond, Busy, Changes, watched

GROUP = "rdmarpc.captures"
"""The entry points by which packages bring capture methods."""


class Method(Protocol):
    """``model`` is a skeleton under the present flags, ``inputs`` are its tensor inputs, of which ``join`` makes the arguments;
    ``whole`` tells of a path whether that module stays one operation. Raises ``NotSupported`` for a forward that it cannot
    follow. See ``capture.capture``, and ``Capture.how`` for what ``WrappedModel.captured`` says."""

    def __call__(self, model: nn.Module, inputs: list[TensorSpec], join: Join, whole: Callable[[str], bool], /) -> Capture: ...


def methods_of(name: str) -> Mapping[str, Method]:
    """What ``capture=name`` of ``wrap`` tries, in order. Raises ``ValueError`` for a name that there is not, ``NotSupported``
    for a method that cannot be loaded."""
    if name in _ORDERS:
        return {method: _METHODS[method] for method in _ORDERS[name]}
    found: Method | None = plugins.load(GROUP, name, "capture method")
    if found is None:
        raise ValueError(f"capture is one of {', '.join(names())}, got {name!r}")
    return {name: found}


def names() -> list[str]:
    """What ``capture=`` may be, for people; nothing is imported."""
    others = plugins.packages(GROUP).items()
    return [*map(repr, _ORDERS), *(f"{name!r} (of {package})" for name, package in others if name not in _ORDERS)]


def capture_by(
    methods: Mapping[str, Method],
    model: nn.Module,
    inputs: list[TensorSpec],
    join: Join,
    whole: Callable[[str], bool],
    use: Callable[[Capture], object] = lambda found: None,
    away: Callable[[str], bool] = lambda path: False,
) -> tuple[Capture, list[str]]:
    """The first of these methods that works, and why those before it did not, one line each. See ``capture``; ``use`` looks at
    what was captured and may refuse it. If none works, ``Uncaptured``, also where that is the model's own fault: some of what
    fake tensors cannot do looks the same. Each trace is watched (``watch``): what it would freeze is refused. ``away(path)``:
    whether a module is at another worker."""
    refused: list[str] = []
    error: Exception | None = None
    again = False
    for name, method in methods.items():
        try:
            found = _watched(functools.partial(method, model, inputs, join, whole), model, whole, away)
            use(found)
            return found, refused
        except (Beyond, Busy):
            raise
        except Exception as raised:
            refused.append(f"{name}: {first_line(raised)}")
            error, again = raised, again or isinstance(raised, Changes)
            if isinstance(raised, (SetsFlag, ActsAgain)):
                break
    raise Uncaptured(refused, error, again) from error


class Uncaptured(NotSupported):
    """No method worked. ``refused`` has the reasons, ``error`` is the last; ``again``: one of them is what the forward may have
    to do only once."""

    def __init__(self, refused: list[str], error: Exception | None, again: bool = False) -> None:
        self.refused, self.error, self.again = refused, error, again
        super().__init__("\n".join(["the forward cannot be captured as a whole", *refused]), hint=getattr(error, "hint", ""))


def symbolic(
    model: nn.Module,
    inputs: list[TensorSpec],
    join: Join,
    whole: Callable[[str], bool],
    away: Callable[[str], bool],
    sizes: Sizes,
) -> Capture:
    """``capture``, watched, whose operations are those that the forward does for inputs of these sizes. What it asks of a proxy
    (``isinstance``, ``hasattr``, ``is``) may have another answer for a tensor, and nothing else tells."""

    found = _watched(lambda: capture(model, inputs, join, sizes, whole), model, whole, away)
    check_operations(model, inputs, found, _watched(lambda: record(model, inputs, join, whole), model, whole, away))
    return found


def _watched(
    make: Callable[[], Capture], model: nn.Module, whole: Callable[[str], bool], away: Callable[[str], bool]
) -> Capture:
    paths = FastPaths(cut_attention(model, whole))
    with paths.off():
        try:
            found: Capture = watched(make, model, whole, away)
        except Exception as error:
            _clear_frames(error)
            raise
    if found.how == "export":
        paths.check_export()
    found.general = paths.general
    return found


def _clear_frames(error: BaseException | None) -> None:
    """What a failed trace had entered ends now, not when the error is forgotten: older versions of ``torch.utils.checkpoint``
    leave their hooks set until then."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


def _export(model: nn.Module, inputs: list[TensorSpec], join: Join, whole: Callable[[str], bool]) -> Capture:
    from .export import export  # imports of torch.export take seconds

    return export(model, inputs, join, whole)


_METHODS: dict[str, Method] = {"fx": record, "export": _export}
_ORDERS = {"auto": ("fx", "export"), "fx": ("fx",), "export": ("export",), "eager": (), "here": ()}
