"""Environment variables that decide how fast several workers run on one host. They count when a process starts, so nothing here
sets them; warnings and ``rdmarpc doctor`` name them.

* OpenMP's threads, which torch computes with, spin for a while after each parallel region and take the cores that another
  worker needs.
* glibc gives every large block back to the system at once, and the next one costs a page fault for each 4 KiB. Threads but the
  first keep blocks of up to 64 MiB only, in arenas of their own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

PASSIVE = "OMP_WAIT_POLICY=PASSIVE"
KEEPING = "MALLOC_ARENA_MAX=1 MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TRIM_THRESHOLD_=1073741824"
"""Freed blocks stay with the process, up to 1 GiB at the end of its heap; all threads share one arena."""


def spins(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether OpenMP's threads spin between parallel regions."""
    passive = environ.get("OMP_WAIT_POLICY", "").lower() == "passive"
    return not (passive or environ.get("GOMP_SPINCOUNT") == "0" or environ.get("KMP_BLOCKTIME") == "0")


def gives_back(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a block of 64 MiB goes back to the system when a thread frees it."""
    tunables = dict(item.partition("=")[::2] for item in environ.get("GLIBC_TUNABLES", "").split(":"))

    def setting(variable: str, tunable: str) -> int:
        text = environ.get(variable) or tunables.get(f"glibc.malloc.{tunable}", "")
        return int(text, 0) if text.removeprefix("0x").isalnum() else 0

    kept = min(setting("MALLOC_MMAP_THRESHOLD_", "mmap_threshold"), setting("MALLOC_TRIM_THRESHOLD_", "trim_threshold"))
    return kept <= 64 << 20 or setting("MALLOC_ARENA_MAX", "arena_max") != 1


def crowded(workers: int, threads: int, cores: int, environ: Mapping[str, str] = os.environ) -> str:
    """Why ``workers`` processes of ``threads`` threads each disturb each other on ``cores`` cores; empty if they do not."""
    if workers < 2 or threads < 2 or workers * threads <= cores or not spins(environ):
        return ""
    return (
        f"{workers} workers of {threads} threads each share {cores} cores of this host, and threads that wait spin: "
        f"start them with OMP_NUM_THREADS={max(1, cores // workers)}, or with {PASSIVE}"
    )
