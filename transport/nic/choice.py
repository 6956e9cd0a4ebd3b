"""The choice of the Python package that reaches libibverbs in this process."""

from __future__ import annotations

import os
import threading

from ..errors import NotSupported, RdmaError
from .ibverbs import Ibverbs
from .native import Package
from .pyverbs import Pyverbs


def choose() -> Package:
    """pyverbs, else ibverbs; ``RDMARPC_VERBS=pyverbs`` or ``ibverbs`` names the one. ``NotSupported`` says for each why it
    cannot be used, and how to get it. One package a process: the first call that succeeds decides for the later ones."""
    global _chosen
    with _choosing:
        if _chosen is None:
            _chosen = _choose(os.environ.get("RDMARPC_VERBS", ""))
        return _chosen


_chosen: Package | None = None
_choosing = threading.Lock()


def _choose(wanted: str) -> Package:
    kinds: dict[str, type[Package]] = {"pyverbs": Pyverbs, "ibverbs": Ibverbs}
    if wanted and wanted not in kinds:
        raise NotSupported(f"RDMARPC_VERBS={wanted!r} names no provider", device="verbs", hint=f"one of {', '.join(kinds)}")
    refused = []
    for name in [wanted] if wanted else list(kinds):
        try:
            return kinds[name]()
        except RdmaError as error:
            refused.append(f"{name}: {error.message}" + (f" ({error.hint})" if error.hint else ""))
    raise NotSupported(
        "no Python package reaches libibverbs here: " + "; ".join(refused),
        device="verbs",
        hint="Debian, Ubuntu: apt install python3-pyverbs ibverbs-providers; anywhere: pip install ibverbs",
    )
