"""What a result was measured with."""

import os
import platform
from importlib import metadata

PACKAGES = ("torch", "llvmlite", "numpy", "scikit-learn")
PEERS = ("grpcio", "gymnasium")
"""Packages that some experiments compare with or stand on, where they are installed."""


def versions() -> dict[str, str]:
    """Versions of Python and the packages, the machine's kernel and its number of cores."""
    return {
        "python": platform.python_version(),
        "machine": platform.platform(),
        "cores": str(os.cpu_count()),
        **{name: metadata.version(name) for name in PACKAGES},
        **{name: version for name in PEERS if (version := _version(name)) is not None},
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
