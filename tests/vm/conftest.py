"""The scenarios of the calls are found under their own names."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "rpc"))
