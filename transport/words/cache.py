"""Where machine code is kept between processes: wherever there is a place that nobody else can write to.

What lies there is code that the next process runs. So a directory is used only if no other user can have put anything there.
The places, in order: ``RDMARPC_CACHE_DIR`` if that is set, else ``__pycache__`` beside the source, else the user's cache
directory; a private directory below the temporary one; none. A place that cannot be read or written (a full disk, a damaged
file) sends us on to the next.

One file has the kernels of one source module for one kind of processor: entries of name, digest, the code's own SHA-256, code.
It is replaced as a whole, so a reader sees one writer's file; what two writers add at once, one of them compiles again.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import struct
import tempfile
from pathlib import Path
from typing import NamedTuple

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


def find(module: str, source: str, environment: str, name: str, digest: bytes) -> bytes | None:
    """The code of the kernel ``name`` of a module whose file is ``source``, if it is kept."""
    while _place != _NONE:
        try:
            _, entries = _opened(module, source, environment)
        except (OSError, ValueError) as error:
            _next(error)
            continue
        found = entries.get(name)
        return found.code if found is not None and found.digest == digest else None
    return None


def keep(module: str, source: str, environment: str, name: str, entry: Entry) -> None:
    """Keep the code of a kernel for other processes."""
    while _place != _NONE:
        try:
            path, entries = _opened(module, source, environment)
            if path.exists():
                entries.update({**_read(path), **entries})
            entries[name] = entry
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


def _opened(module: str, source: str, environment: str) -> tuple[Path, dict[str, Entry]]:
    known = _files.get(module)
    if known is None or known[0] != _place:
        folder = _private(source) if _place == _PRIVATE else _usual(source)
        path = folder / f"{module}.{environment}.kernels"
        known = _files[module] = (_place, path, _read(path) if path.exists() else {})
    return known[1], known[2]


# -- files


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
        os.replace(draft, path)
    except BaseException:
        os.unlink(draft)
        raise


# -- places


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
