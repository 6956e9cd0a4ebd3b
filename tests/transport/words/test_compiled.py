"""Where compiled kernels are kept: nowhere that another user can write to, and nowhere if there is no place or no space."""

from __future__ import annotations

import importlib
import logging
import os
import pwd
import resource
import shutil
import sys
import tempfile
from pathlib import Path

import numba
import pytest
from forks import forks

import rdmarpc.transport

_SOURCES = ("atomics.py", "compiled.py", "signals.py")
_NOBODY = pwd.getpwnam("nobody").pw_uid
_TINY = 1000  # bytes: less than any file of the cache


class _Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append((record.levelname, record.getMessage()))


def _import(folder, user, limit, pipe):
    """In a process of its own, as ``user``: import the kernels, use one, and say what was said and where they came from."""
    try:
        os.environ.update(HOME=f"{folder}/home", XDG_CACHE_HOME=f"{folder}/home/.cache")
        tempfile.tempdir, numba.config.CACHE_DIR = f"{folder}/tmp", ""
        os.chdir("/")
        os.setgroups([])
        os.setuid(user)
        if limit:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        heard = _Lines()
        logging.getLogger("rdmarpc").addHandler(heard)
        logging.getLogger("rdmarpc").setLevel(logging.INFO)
        sys.path.insert(0, f"{folder}/package")
        sys.dont_write_bytecode = True
        signals = importlib.import_module("words.signals")
        assert signals.ring_bell.signatures
        pipe.send((heard.lines, sum(signals.ring_bell.stats.cache_hits.values())))
    except BaseException as error:
        pipe.send((f"{type(error).__name__}: {error}", None))


@pytest.fixture
def place():
    """A package with two kernels, a home, and a directory for temporary files."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to become another user")
    folder = Path(tempfile.mkdtemp())  # pytest's own is closed to other users
    folder.chmod(0o755)
    package = folder / "package" / "words"
    for path in (package, folder / "home", folder / "tmp"):
        path.mkdir(parents=True)
    (folder / "tmp").chmod(0o1777)
    (package / "__init__.py").touch()
    for name in _SOURCES:
        shutil.copy(Path(rdmarpc.transport.__path__[0]) / "words" / name, package)
    yield folder
    shutil.rmtree(folder)


def _run(folder, user=_NOBODY, limit=0):
    ours, theirs = forks().Pipe(duplex=False)
    process = forks().Process(target=_import, args=(str(folder), user, limit, theirs), daemon=True)
    process.start()
    theirs.close()
    assert ours.poll(60), "the import hangs"
    said, hits = ours.recv()
    process.join(10)
    assert isinstance(said, list), said
    return said, hits


def _private(folder):
    return folder / "tmp" / f"rdmarpc-{_NOBODY}"


def _kept(path):
    return list(path.rglob("*.nbc"))


def test_no_folder_can_be_written_to_but_the_temporary_one(place):
    said, _ = _run(place)
    assert [level for level, _ in said] == ["INFO"], said
    assert _private(place).stat().st_mode & 0o777 == 0o700
    assert len(_kept(_private(place))) == 2
    assert _run(place)[1] == 1, "the second process compiled again"


@pytest.mark.parametrize("limit", [0, _TINY], ids=["no folder", "no space"])
def test_nothing_can_be_kept(place, limit):
    if limit:
        (place / "package" / "words").chmod(0o777)
    else:
        (place / "tmp").chmod(0o755)
    said, _ = _run(place, limit=limit)
    assert sum(level == "WARNING" for level, _ in said) == 1, said
    assert "NUMBA_CACHE_DIR" in said[-1][1]
    assert not _kept(place)


def test_a_damaged_file(place):
    assert _run(place, user=0) == ([], 0)
    for found in (place / "package" / "words" / "__pycache__").glob("*.nb?"):
        found.write_bytes(found.read_bytes()[:40])
    said, _ = _run(place, user=0)
    assert len(said) == 1, said
    assert said[0][0] == "INFO"


@pytest.mark.parametrize("how", ["open to all", "of another user", "a link"])
def test_a_private_folder_that_is_not(place, how):
    private = _private(place)
    if how == "a link":
        (place / "target").mkdir()
        os.chown(place / "target", _NOBODY, -1)
        private.symlink_to(place / "target")
    else:
        private.mkdir()
        os.chown(private, _NOBODY if how == "open to all" else _NOBODY - 1, -1)
        private.chmod(0o777)
    assert [level for level, _ in _run(place)[0]] == ["INFO", "WARNING"]
    assert not _kept(place)


@pytest.mark.parametrize("where", ["home", "home/.cache", "home/.cache/numba", "package/words/__pycache__"])
def test_a_cache_that_others_can_write_to(place, where):
    """Neither read nor written: what lies there may be another user's code."""
    (place / "home" / ".cache" / "numba").mkdir(parents=True)
    for path in (place / "home").rglob("*"):
        os.chown(path, _NOBODY, -1)
    (place / where).mkdir(exist_ok=True)
    os.chown(place / where, _NOBODY, -1)
    (place / where).chmod(0o777)
    said, _ = _run(place)
    assert [level for level, _ in said] == ["INFO"], said
    assert "other users" in said[0][1]
    assert len(_kept(_private(place))) == 2 == len(_kept(place))


def test_a_home_of_our_own(place):
    (place / "home").chmod(0o700)
    os.chown(place / "home", _NOBODY, -1)
    assert _run(place) == ([], 0)
    assert len(_kept(place / "home")) == 2
    assert _run(place) == ([], 1)
