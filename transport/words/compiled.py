"""``njit`` and ``cfunc`` with a cache on disk, wherever there is a place for one that nobody else can write to.

What lies in the cache is machine code that the next process runs. So a directory is used only if no other user can have put
anything there. The places, in order: the one that numba chooses (``NUMBA_CACHE_DIR``, ``__pycache__`` beside the source, the
user's cache directory), a private directory below the temporary one, none. A cache that cannot be read or written (a full
disk, a damaged file) sends us on to the next place; the kernel is compiled all the same.
"""

from __future__ import annotations

import logging
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba.core.caching import FunctionCache

_NUMBAS, _PRIVATE, _NONE = range(3)
_place = _NUMBAS
"""The kind of folder where this process looks for compiled kernels, and keeps them."""
_checked: set[tuple[Path, int]] = set()
"""Folders of sources, each with the kind of cache folder that was found safe for it."""


def compiled(signature: Any) -> Callable[[Callable[..., Any]], Any]:
    """A decorator: ``njit`` for one signature, without the GIL, compiled at once."""
    return lambda function: _compile(function, lambda cache: numba.njit(signature, nogil=True, cache=cache)(function))


def compiled_callback(signature: Any) -> Callable[[Callable[..., Any]], Any]:
    """A decorator: ``cfunc``, whose ``address`` C code may call."""
    return lambda function: _compile(function, lambda cache: numba.cfunc(signature, nopython=True, cache=cache)(function))


def _compile(function: Callable[..., Any], make: Callable[[bool], Any]) -> Any:
    global _place
    before = numba.config.CACHE_DIR
    while _place != _NONE:
        try:
            if _place == _PRIVATE:
                numba.config.CACHE_DIR = str(_private())
            _check(function)
            return make(True)
        except (
            Exception
        ) as error:  # also what a damaged file makes of unpickling; a fault in the kernel itself comes again below
            _place += 1
            _tell(error)
        finally:
            numba.config.CACHE_DIR = before
    return make(False)


def _tell(error: Exception) -> None:
    log, reason = logging.getLogger("rdmarpc"), f"{type(error).__name__}: {error}"
    if _place == _PRIVATE:
        log.info("compiled kernels are kept in the temporary directory: %s", reason)
    else:
        hint = "NUMBA_CACHE_DIR may name a directory for them"
        log.warning("every process compiles its kernels anew, which takes seconds: %s; %s", reason, hint)


def _check(function: Callable[..., Any]) -> None:
    """Raise ``OSError`` if numba has no cache folder for this function, or one where another user may have written."""
    source = Path(function.__code__.co_filename).absolute().parent
    if (source, _place) in _checked:
        return
    try:
        place = Path(FunctionCache(function).cache_path).absolute()
    except RuntimeError:
        raise PermissionError("no cache directory can be written to") from None
    if place.parent == source:
        # A user who can write the sources can have code run without the cache, so the rights on them are allowed here too.
        found, package = place.stat(), source.stat()
        owners = (os.geteuid(), 0, package.st_uid)
        if found.st_uid not in owners or found.st_mode & ~package.st_mode & 0o022:
            raise PermissionError(f"other users may have written to {place}")
    else:
        _check_path(place)
    _checked.add((source, _place))


def _check_path(place: Path) -> None:
    """Raise ``OSError`` unless only this user and root can have written to the directory, or put another one in its place."""
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


def _private() -> Path:
    """The directory below the temporary one, made if need be. ``OSError`` if there cannot be one that is ours alone."""
    place = Path(tempfile.gettempdir()).absolute() / f"rdmarpc-{os.geteuid()}"
    place.mkdir(mode=0o700, exist_ok=True)
    found = place.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise PermissionError(f"{place} is not ours alone")
    return place
