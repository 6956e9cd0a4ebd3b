"""How the processes that this one starts come to know."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path

VARIABLE = "RDMARPC_STANDING_IN"
_SITE = str(Path(__file__).parent / "site")


def tell(environment: MutableMapping[str, str]) -> None:
    """Have every Python that inherits this environment begin with ``hook.register``: a folder with a ``sitecustomize`` leads
    ``PYTHONPATH``. It runs the ``sitecustomize`` that it hides."""
    environment[VARIABLE] = "1"
    path = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry and entry != _SITE]
    environment["PYTHONPATH"] = os.pathsep.join([_SITE, *path])
