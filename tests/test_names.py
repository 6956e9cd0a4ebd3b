"""The folders of the tests share one space of module names: each is put on the path by pytest, and child processes search them
in another order than the process that began."""

from __future__ import annotations

from collections import Counter
from pathlib import Path


def test_every_module_of_the_tests_has_a_name_of_its_own():
    files = [path for path in Path(__file__).parent.rglob("*.py") if path.name not in ("conftest.py", "__init__.py")]
    twice = {name for name, count in Counter(path.stem for path in files).items() if count > 1}
    assert len(files) > 50 and not twice, [str(path) for path in files if path.stem in twice]
