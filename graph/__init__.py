"""What moves between workers. Imports ``transport`` only.

``fragments`` has what was posted to workers as a data-flow graph, ``show`` prints and draws what crosses.

Code above imports what this file names, and nothing past it. All of it is imported when it is first asked for: programs that
only call do without.
"""

# ruff: noqa: F401

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .fragments.cut import steps
    from .fragments.flow import ACTIVATION, GRADIENT, INPUT, PARAMETER, Flow
    from .fragments.records import BACKWARD, FORWARD, STEP, Event, Move, Operand, Operation, Recorded
    from .show.describe import Transfers, describe, described, load, save
    from .show.records import Crossing
    from .show.tables import size

_HOMES = {
    "fragments.cut": "steps",
    "fragments.flow": "ACTIVATION GRADIENT INPUT PARAMETER Flow",
    "fragments.records": "BACKWARD FORWARD STEP Event Move Operand Operation Recorded",
    "show.describe": "Transfers describe described load save",
    "show.records": "Crossing",
    "show.tables": "size",
}
"""Modules, and the names that are theirs."""
_HOME = {name: home for home, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f".{home}", __name__)
    found = globals()[name] = getattr(module, name)
    return found
