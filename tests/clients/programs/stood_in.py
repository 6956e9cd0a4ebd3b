"""``stood_in.py PROGRAM RESULTS``: the program after ``rdmarpc.install()``, where torch has been imported already."""

from __future__ import annotations

import runpy
import sys

import rdmarpc

if __name__ == "__main__":
    rdmarpc.install()
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
