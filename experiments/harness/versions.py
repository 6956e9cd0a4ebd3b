"""What a result was measured with."""

import os
import platform
from importlib import metadata

PACKAGES = ("torch", "numba", "numpy", "scikit-learn")


def versions() -> dict[str, str]:
    """Versions of Python and the packages, the machine's kernel and its number of cores."""
    return {
        "python": platform.python_version(),
        "machine": platform.platform(),
        "cores": str(os.cpu_count()),
        **{name: metadata.version(name) for name in PACKAGES},
    }
