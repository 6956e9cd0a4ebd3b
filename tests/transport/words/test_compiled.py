"""Compiled kernels: what they take, what they are made anew for, and where they are kept: where no other user can write."""

from __future__ import annotations

import importlib
import logging
import os
import pwd
import resource
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from forks import forks

import rdmarpc.transport
from rdmarpc.transport.words import atomics, compiled, kernels
from rdmarpc.transport.words.symbols import i64

_SOURCES = ("atomics", "compiled", "compiler", "instructions", "machine", "signals", "symbols")
_NOBODY = pwd.getpwnam("nobody").pw_uid
_NAMELESS = 4_000_000
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
        if user == _NAMELESS:
            del os.environ["HOME"], os.environ["XDG_CACHE_HOME"]
        os.environ.pop("RDMARPC_CACHE_DIR", None)
        tempfile.tempdir = f"{folder}/tmp"
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
        words = np.zeros(2, np.int64)
        assert signals.ring_bell(words.ctypes.data) == 0
        pipe.send((heard.lines, "words.compiler" not in sys.modules))
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
        shutil.copy(Path(rdmarpc.transport.__path__[0]) / "words" / f"{name}.py", package)
    yield folder
    shutil.rmtree(folder)


def _run(folder, user=_NOBODY, limit=0):
    """What the import said, and whether it found all kernels on disk."""
    ours, theirs = forks().Pipe(duplex=False)
    process = forks().Process(target=_import, args=(str(folder), user, limit, theirs), daemon=True)
    process.start()
    theirs.close()
    assert ours.poll(60), "the import hangs"
    said, found = ours.recv()
    process.join(10)
    assert isinstance(said, list), said
    return said, found


def _private(folder, user=_NOBODY):
    return folder / "tmp" / f"rdmarpc-{user}"


def _kept(path):
    return list(path.rglob("*.kernels"))


@pytest.mark.parametrize("user", [_NOBODY, _NAMELESS], ids=["no folder", "no home"])
def test_no_folder_can_be_written_to_but_the_temporary_one(place, user):
    said, _ = _run(place, user)
    assert [level for level, _ in said] == ["INFO"], said
    assert _private(place, user).stat().st_mode & 0o777 == 0o700
    assert len(_kept(_private(place, user))) == 1
    assert _run(place, user)[1], "the second process compiled again"


@pytest.mark.parametrize("temporary", [0o1777, 0o755], ids=["another folder", "no folder"])
def test_what_was_compiled_when_the_package_was_installed(place, temporary):
    (place / "tmp").chmod(temporary)
    assert _run(place, user=0) == ([], False)
    assert _run(place)[1], "another user compiled again"
    (place / "package" / "words" / "__pycache__").chmod(0o777)
    assert not _run(place)[1], "others may have written it"


@pytest.mark.parametrize("limit", [0, _TINY], ids=["no folder", "no space"])
def test_nothing_can_be_kept(place, limit):
    if limit:
        (place / "package" / "words").chmod(0o777)
    else:
        (place / "tmp").chmod(0o755)
    said, _ = _run(place, limit=limit)
    assert sum(level == "WARNING" for level, _ in said) == 1, said
    assert "RDMARPC_CACHE_DIR" in said[-1][1]
    assert not _kept(place)


def test_a_damaged_file(place):
    assert _run(place, user=0) == ([], False)
    [found] = (place / "package" / "words" / "__pycache__").glob("*.kernels")
    found.write_bytes(found.read_bytes()[:-1])
    said, _ = _run(place, user=0)
    assert [level for level, _ in said] == ["INFO"], said
    assert "damaged" in said[0][1]


def test_every_damage_is_seen(tmp_path):
    path, entries = tmp_path / "file", {"a": compiled.Entry(b"1" * 32, b"code"), "b": compiled.Entry(b"2" * 32, b"")}
    compiled._write(path, entries)
    assert compiled._read(path) == entries
    whole = path.read_bytes()
    first = len(compiled._MAGIC)
    ends = {len(whole) - 1, first + 1, 0, 5}
    for damaged in (
        *(whole[:end] for end in ends),
        *(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in (first, first + 40, first + 72, len(whole) - 1)),
    ):
        path.write_bytes(damaged)
        with pytest.raises((ValueError, UnicodeError)):
            compiled._read(path)


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


@pytest.mark.parametrize("where", ["home", "home/.cache", "home/.cache/rdmarpc", "package/words/__pycache__"])
def test_a_cache_that_others_can_write_to(place, where):
    """Neither read nor written: what lies there may be another user's code."""
    (place / "home" / ".cache" / "rdmarpc").mkdir(parents=True)
    for path in (place / "home").rglob("*"):
        os.chown(path, _NOBODY, -1)
    (place / where).mkdir(exist_ok=True)
    os.chown(place / where, _NOBODY, -1)
    (place / where).chmod(0o777)
    said, _ = _run(place)
    assert [level for level, _ in said] == ["INFO"], said
    assert "other users" in said[0][1]
    assert len(_kept(_private(place))) == 1 == len(_kept(place))


def test_a_home_of_our_own(place):
    (place / "home").chmod(0o700)
    os.chown(place / "home", _NOBODY, -1)
    assert _run(place) == ([], False)
    assert len(_kept(place / "home")) == 1
    assert _run(place) == ([], True)


def test_how_operations_are_emitted_changes(place):
    assert _run(place, user=0) == ([], False)
    source = place / "package" / "words" / "instructions.py"
    source.write_text(source.read_text().replace('"release"', '"seq_cst"'))
    assert _run(place, user=0) == ([], False)


def test_what_a_kernel_is_made_from():
    """Another function, constant, or kernel below: another digest."""

    def digest(source, **names):
        made = {"load_acquire": atomics.load_acquire, "kernel": kernels.load, "ONE": 1, **names}
        exec(source, made)
        return compiled._digest(made["f"], "f")

    base = "def f(a):\n    return load_acquire(a) + ONE + kernel(a)"
    first = digest(base)
    assert first == digest("\n\n" + base)
    assert (
        len(
            {
                first,
                digest(base, ONE=2),
                digest(base, kernel=kernels.wake),
                digest(base.replace("+ ONE", "- ONE")),
                digest(base.replace("ONE", "1")),
            }
        )
        == 5
    )


def test_what_a_kernel_takes():
    words = np.zeros(2, np.int64)
    address = words.ctypes.data
    assert kernels.store(address, -1) == 0
    assert kernels.load(address) == -1
    assert kernels.add(np.int64(address), True) == -1
    assert kernels.swap_if(address, 0, -(1 << 63)) == 1
    assert kernels.load(address) == -(1 << 63)
    assert list(words) == [-(1 << 63), 0]
    for wrong, error in (
        ((), TypeError),
        ((address, 1), TypeError),
        (("x",), TypeError),
        ((1.5,), TypeError),
        ((1 << 70,), OverflowError),
    ):
        with pytest.raises(error):
            kernels.load(*wrong)
    with pytest.raises(TypeError):
        kernels.load(address=address)
    with pytest.raises(TypeError, match="only kernels"):
        atomics.load_acquire(address)


def test_no_compiler_is_imported():
    """Once the code is on disk."""
    program = """
import sys, numpy, rdmarpc, rdmarpc.api
from rdmarpc.transport.words import kernels
kernels.store(numpy.zeros(1, numpy.int64).ctypes.data, 1)
print([name for name in ("numba", "scipy", "rdmarpc.transport.words.compiler") if name in sys.modules])
"""
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "[]\n", done.stderr


def _add_one(a):
    return a + 1


def _add_two(a):
    return a + 2


def _add_three(a):
    return a + 3


def test_a_first_call():
    """Nothing is compiled before it; it refuses arguments as later ones do; any thread may make it, or a forked child."""
    first, second, third = (compiled.compiled(i64(i64))(each) for each in (_add_one, _add_two, _add_three))
    assert not any(each.__self__._address for each in (first, second, third))
    with pytest.raises(TypeError, match="takes 1 integers"):
        first(1, 2)
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(second, [4] * 64)) == {6}
    child = os.fork()
    if child == 0:
        os._exit(third(4))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
