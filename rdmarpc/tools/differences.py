"""What torch's modules have and ours do not, and why (``differences.tsv``). Errors quote it; a test compares it with the
installed torch."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

REASONS: dict[str, dict[str, str]] = defaultdict(dict)
"""By module, and those below it: why it lacks a name."""
MODULES: dict[str, str] = {}
"""Modules that are absent as a whole."""

for _line in Path(__file__).with_suffix(".tsv").read_text(encoding="utf-8").splitlines()[1:]:
    _modules, _why, _names = _line.split("\t")
    for _module in _modules.split():
        if _names:
            REASONS[_module].update(dict.fromkeys(_names.split(), _why))
        else:
            MODULES[_module] = _why


def known(module: str, name: str) -> str | None:
    """Why a module of ours lacks a name of torch's, if that is said here."""
    if f"{module}.{name}" in MODULES:
        return MODULES[f"{module}.{name}"]
    for part, table in REASONS.items():
        if (module == part or module.startswith(f"{part}.")) and name in table:
            return table[name]
    return None
