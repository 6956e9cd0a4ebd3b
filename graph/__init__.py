"""What moves between workers. Imports ``transport`` only.

``fragments`` has what was posted to workers as a data-flow graph, ``show`` prints and draws what crosses.

Code above imports what this file names, and nothing past it.
"""

# ruff: noqa: F401

from .fragments.cut import steps
from .fragments.flow import ACTIVATION, GRADIENT, INPUT, PARAMETER, Flow
from .fragments.records import BACKWARD, FORWARD, STEP, Event, Move, Operand, Operation, Recorded
from .show.describe import Transfers, describe, described, load, save
from .show.records import Crossing
from .show.tables import size
