"""What moves between workers. Imports ``transport`` only.

``fragments`` has what was posted to workers as a data-flow graph, ``show`` prints and draws what crosses.

Code above imports what this file names, and nothing past it.
"""

# ruff: noqa: F401

from .fragments import Event, Flow, Kind, Move, Operand, Operation, Phase, Recorded, steps
from .show import Crossing, Transfers, describe, described, load, save, size
