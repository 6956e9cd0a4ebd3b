"""What worker processes print is shown for the test in which they did, if that fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = """
from forks import forks

def started(text):
    process = forks().Process(target=print, args=(text,))
    process.start()
    process.join()

def test_that_passes():
    started("said by one")

def test_that_fails():
    started("said by another")
    assert False
"""


def test_what_workers_print_is_shown_of_tests_that_fail(tmp_path: Path) -> None:
    (tmp_path / "test_given.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-p", "no:cacheprovider", str(tmp_path)]
    for option, expected in ([], [False, True]), (["-s"], [True, True]):
        done = subprocess.run([*command, *option], cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
        assert [f"said by {who}" in done.stdout for who in ("one", "another")] == expected
