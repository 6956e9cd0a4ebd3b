"""``compiled``: a function of integers as machine code, which runs without the GIL.

The code is made when the function is first called (``compiler``: numba, some 50 ms a kernel) and kept on disk under a digest of
all that it is made from: the function, the functions and constants that it uses, how all is compiled, the versions of numba and
LLVM, and the processor. A process that finds it there imports no compiler.

What lies there is code that the next process runs. So a directory is used only if no other user can have put anything there.
The places, in order: ``RDMARPC_CACHE_DIR`` if that is set, else ``__pycache__`` beside the source, else the user's cache
directory; a private directory below the temporary one; none. A place that cannot be read or written (a full disk, a damaged
file) sends us on to the next.

One file has the kernels of one source module for one kind of processor: entries of name, digest, the code's own SHA-256, code.
It is replaced as a whole, so a reader sees one writer's file; what two writers add at once, one of them compiles again.
"""

from __future__ import annotations

import gc
import hashlib
import logging
import os
import stat
import struct
import sys
import tempfile
import threading
from collections.abc import Callable
from functools import cache, cached_property
from importlib.metadata import version
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

from . import machine
from .symbols import CFunction, Kernel, Operation, Scalar, Signature, inlined

_lock = threading.RLock()
"""Held while a kernel is loaded or compiled. A signal handler, or a finalizer, may come to another one in the midst of that."""
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


class Compiled(Kernel):
    """A kernel, and its code, which is loaded when it is first needed."""

    def __init__(self, function: FunctionType, signature: Signature, callback: bool) -> None:
        super().__init__(function, signature, callback)
        self._address = 0
        self.builtin, self._definition = machine.builtin(function.__name__, function.__doc__, self)
        kernels.append(self)

    def __call__(self, *arguments: Any) -> Any:
        """What ``builtin`` does until there is code."""
        if self.callback:
            raise TypeError(f"{self.name} is for C code to call")
        self._definition.function = self.address
        return self.builtin(*arguments)

    @cached_property
    def digest(self) -> bytes:
        """Of all that the code is made from."""
        return _digest(self.function, f"{self.signature} {self.callback}")

    @property
    def address(self) -> int:
        """Where the code lies, for as long as the process lives. ``SyntaxError``: there can be none."""
        return self._address or self.load()

    def load(self) -> int:
        """Load the code, or make it: its address."""
        with _lock:
            symbol = f"rdmarpc.{self.name}.{self.digest.hex()[:16]}"
            code = _find(self)
            if code is None:
                code = _made(self, symbol)
                _keep(self, code)
            self._address = machine.address_of(code, symbol)
            return self._address


def _made(kernel: Kernel, symbol: str) -> bytes:
    from .compiler import object_code

    enabled = gc.isenabled()
    gc.disable()  # a collection walks all objects that torch has made, and compiling has many begin: a fifth of the time
    try:
        return object_code(kernel, symbol)
    finally:
        if enabled:
            gc.enable()


kernels: list[Compiled] = []
"""Those of all modules that were imported."""


def compiled(signature: Any) -> Callable[[Any], Any]:
    """A decorator: the function as a builtin that takes and gives integers (``signature``: of ``i64``) and lets the GIL go."""
    return lambda function: Compiled(function, signature, False).builtin


def compiled_callback(signature: Any) -> Callable[[Any], Compiled]:
    """A decorator: the function as one that C code may call at an address."""
    return lambda function: Compiled(function, signature, True)


# -- what the code is made from


@cache
def _environment() -> str:
    """What all code depends on, in short: the processor, and all that compiles."""
    parts = (machine.processor(), sys.implementation.cache_tag, sys.flags.optimize, version("numba"), version("llvmlite"))
    found = hashlib.sha256(repr(parts).encode())
    for name in ("compiler.py", "instructions.py", "machine.py"):
        found.update(Path(__file__).with_name(name).read_bytes())
    return found.hexdigest()[:16]


def _digest(function: FunctionType, kind: str) -> bytes:
    found = hashlib.sha256(kind.encode())
    code = function.__code__
    constants = [each for each in code.co_consts if not isinstance(each, CodeType)]
    found.update(repr((code.co_code, constants, code.co_names, code.co_varnames, code.co_argcount)).encode())
    for name in code.co_names:
        if name in function.__globals__:
            found.update(f"{name}={_meaning(function.__globals__[name])};".encode())
    return found.digest()


def _meaning(value: Any) -> str:
    """What a global name of a kernel stands for."""
    if isinstance(value, (int, CFunction, Operation)):
        return repr(value)
    if isinstance(value, Scalar):
        return value.name
    if isinstance(value, ModuleType):
        return repr(sorted((name, number) for name, number in vars(value).items() if isinstance(number, int)))
    if isinstance(kernel := getattr(value, "__self__", None), Compiled):
        return kernel.digest.hex()
    if value in inlined:
        return _digest(value, "inline").hex()
    return repr(value)


# -- where the code is kept

_USUAL, _PRIVATE, _NONE = range(3)
_place = _USUAL
"""Where this process looks, and keeps what it compiles."""
_files: dict[str, tuple[int, Path, dict[str, Entry]]] = {}
"""Of each source module: the place, its file there, and what that has."""

_MAGIC = b"rdmarpc kernels 1\n"
_ENTRY = struct.Struct("<H32s32sI")  # length of the name, digest, SHA-256 of the code, length of the code


class Entry(NamedTuple):
    """``digest``: of everything that the code was made from."""

    digest: bytes
    code: bytes


def _find(kernel: Compiled) -> bytes | None:
    """Its code, if that is kept."""
    entries = None
    while entries is None and _place != _NONE:
        try:
            entries = _opened(kernel)[1]
        except (OSError, ValueError) as error:
            _next(error)
    found = (_installed(kernel) if entries is None else entries).get(kernel.name)
    return found.code if found is not None and found.digest == kernel.digest else None


def _keep(kernel: Compiled, code: bytes) -> None:
    """Keep its code for other processes."""
    while _place != _NONE:
        try:
            path, entries = _opened(kernel)
            if path.exists():
                entries.update({**_read(path), **entries})
            entries[kernel.name] = Entry(kernel.digest, code)
            _write(path, entries)
            return
        except (OSError, ValueError) as error:
            _next(error)


def _next(error: Exception) -> None:
    global _place
    _place += 1
    log, reason = logging.getLogger("rdmarpc"), f"{type(error).__name__}: {error}"
    if _place == _PRIVATE:
        log.info("compiled kernels are kept in the temporary directory: %s", reason)
    else:
        hint = "RDMARPC_CACHE_DIR may name a directory for them"
        log.warning("every process compiles its kernels anew, which takes seconds: %s; %s", reason, hint)


def _opened(kernel: Compiled) -> tuple[Path, dict[str, Entry]]:
    module, source = kernel.function.__module__, kernel.function.__code__.co_filename
    known = _files.get(module)
    if known is None or known[0] != _place:
        folder = _private(source) if _place == _PRIVATE else _usual(source)
        path = folder / f"{module}.{_environment()}.kernels"
        known = _files[module] = (_place, path, _read(path) if path.exists() else _installed(kernel))
    return known[1], known[2]


def _installed(kernel: Compiled) -> dict[str, Entry]:
    """What lies beside the sources, compiled by whoever has installed them: in a container's image, say."""
    beside = Path(kernel.function.__code__.co_filename).absolute().parent
    place = beside / "__pycache__"
    try:
        _check_beside(place, beside)
        return _read(place / f"{kernel.function.__module__}.{_environment()}.kernels")
    except (OSError, ValueError):
        return {}


def _read(path: Path) -> dict[str, Entry]:
    """``ValueError`` for a damaged file."""
    data = path.read_bytes()
    if not data.startswith(_MAGIC):
        raise ValueError(f"{path} is damaged")
    found, at = {}, len(_MAGIC)
    while at < len(data):
        if at + _ENTRY.size > len(data):
            raise ValueError(f"{path} is damaged")
        name_bytes, digest, checksum, nbytes = _ENTRY.unpack_from(data, at)
        at += _ENTRY.size
        name, code = data[at : at + name_bytes], data[at + name_bytes : at + name_bytes + nbytes]
        at += name_bytes + nbytes
        if hashlib.sha256(name + code).digest() != checksum:
            raise ValueError(f"{path} is damaged")
        found[name.decode()] = Entry(digest, code)
    return found


def _write(path: Path, entries: dict[str, Entry]) -> None:
    blob = bytearray(_MAGIC)
    for key, entry in entries.items():
        name = key.encode()
        checksum = hashlib.sha256(name + entry.code).digest()
        blob += _ENTRY.pack(len(name), entry.digest, checksum, len(entry.code)) + name + entry.code
    descriptor, draft = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with open(descriptor, "wb") as file:
            file.write(blob)
            os.fchmod(descriptor, 0o644)  # others may use it, if they can look into the folder
        os.replace(draft, path)
    except BaseException:
        os.unlink(draft)
        raise


def _usual(source: str) -> Path:
    """``OSError`` if there is none, or one where another user may have written."""
    beside = Path(source).absolute().parent
    own = f"{beside.name}-{hashlib.sha256(str(beside).encode()).hexdigest()[:16]}"
    chosen = os.environ.get("RDMARPC_CACHE_DIR")
    # Relative where nobody knows of a home, as for a container's user without a name.
    users = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "rdmarpc", own)
    for place in [Path(chosen, own).absolute()] if chosen else [beside / "__pycache__", users]:
        if not (place.is_absolute() and _writable(place)):
            continue
        if place.parent == beside:
            _check_beside(place, beside)
        else:
            _check_path(place)
        return place
    raise PermissionError("no cache directory can be written to")


def _writable(place: Path) -> bool:
    try:
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=place):
            return True
    except OSError:
        return False


def _check_beside(place: Path, source: Path) -> None:
    # Whoever can change the sources needs no cache to have code run.
    found, package = place.stat(), source.stat()
    owners = (os.geteuid(), 0, package.st_uid)
    if found.st_uid not in owners or found.st_mode & ~package.st_mode & 0o022:
        raise PermissionError(f"other users may have written to {place}")


def _check_path(place: Path) -> None:
    """``OSError`` unless we and root alone can have put anything there: into the directory, or another one in its place."""
    for at in (place, *place.parents):
        found = at.lstat()
        open_to = 0 if stat.S_ISLNK(found.st_mode) else found.st_mode & 0o022
        if at != place and found.st_mode & stat.S_ISVTX:
            open_to = 0  # as /tmp: what is ours stays where it is
        if found.st_uid not in (os.geteuid(), 0) or open_to:
            raise PermissionError(f"other users may have written to {at}")
    real = place.resolve()
    if real != place:
        _check_path(real)


def _private(source: str) -> Path:
    """A directory below the temporary one, made if need be. ``OSError`` if there cannot be one that is ours alone."""
    place = Path(tempfile.gettempdir()).absolute() / f"rdmarpc-{os.geteuid()}"
    place.mkdir(mode=0o700, exist_ok=True)
    found = place.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise PermissionError(f"{place} is not ours alone")
    own = place / hashlib.sha256(str(Path(source).absolute().parent).encode()).hexdigest()[:16]
    own.mkdir(mode=0o700, exist_ok=True)
    return own
