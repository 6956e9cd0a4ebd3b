"""What a result was measured with."""

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("torch", "numba", "llvmlite", "numpy", "scikit-learn")
PEERS = ("grpcio", "gymnasium")
"""Packages that some experiments compare with or stand on, where they are installed."""


def commit() -> str:
    """The commit that is checked out, with ``-dirty`` behind it where its files were changed; "none" outside a repository."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude", "*"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "none"
    return done.stdout.strip() if done.returncode == 0 else "none"


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
