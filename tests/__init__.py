"""The tests mirror the rooms of what they test. All their folders share one space of module names: a test finds its helpers,
and the scenarios of other rooms, by name. This is the one place that sees to it, for pytest and for programs among the
tests (``python -m tests.campaign``)."""

import sys
from pathlib import Path

_HERE = Path(__file__).parent
for _folder in sorted({path.parent for path in _HERE.rglob("*.py")}):
    if str(_folder) not in sys.path and (_folder == _HERE or not (_folder / "__init__.py").exists()):
        sys.path.append(str(_folder))
