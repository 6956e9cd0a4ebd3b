"""Packages of others, as far as ``importlib.metadata`` looks: a name and entry points."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path


def install(folder: Path, name: str, group: str, points: Mapping[str, str]) -> None:
    """In a folder on ``sys.path``: the package ``name`` with these entry points (name and object reference)."""
    about = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [f"[{group}]", *(f"{point} = {reference}" for point, reference in points.items())]
    (about / "entry_points.txt").write_text("\n".join(lines) + "\n")
    importlib.invalidate_caches()
