"""The secret of processes that were given none: one for each user of a running host, in a file that this user alone can read.

A process that can read that file can read the memory of the user's processes as well, so trusting it loses nothing. The first
process that needs the file makes it, in ``XDG_RUNTIME_DIR`` or ``/tmp/rdmarpc-UID``, and it stays. Its name holds the kernel's
boot id, so each boot has a new one, and hosts that share the folder have one each. No process has to pass it on or remove it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path

from ..errors import AuthenticationError

_BYTES, _MOST_BYTES = 32, 4096


def user_secret() -> tuple[bytes, Path]:
    """The secret (64 hexadecimal digits) and its file. ``AuthenticationError`` where there is no folder that is this user's
    alone, or the file is not."""
    path = _folder() / f"secret-{_boot()}"
    with contextlib.suppress(FileNotFoundError):
        return read_private(path), path
    _make(path)
    return read_private(path), path


def read_private(path: str | Path) -> bytes:
    """The content (without white space around it) of a file that only this user, or root, may read or write. Raises
    ``AuthenticationError`` for any other file, and ``FileNotFoundError``."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise AuthenticationError(f"the secret in {path} cannot be read: {error.strerror}") from None
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid not in (os.geteuid(), 0) or found.st_mode & 0o077:
            why = f"the secret in {path} is not this user's alone (owner {found.st_uid}, mode {stat.S_IMODE(found.st_mode):o})"
            raise AuthenticationError(why, hint=f"chmod 600 {path}")
        return os.read(fd, _MOST_BYTES).strip()
    finally:
        os.close(fd)


def _folder() -> Path:
    given = os.environ.get("XDG_RUNTIME_DIR")
    if given and not _not_ours(Path(given)):
        return Path(given)
    folder = Path(f"/tmp/rdmarpc-{os.geteuid()}")
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(0o700)
        why = _not_ours(folder)
    except OSError as error:
        why = error.strerror or str(error)
    if why:
        raise _nowhere(folder, why)
    return folder


def _not_ours(folder: Path) -> str:
    """Why others could change what is in it; empty: they cannot."""
    try:
        found = os.lstat(folder)
    except OSError as error:
        return error.strerror or str(error)
    if not stat.S_ISDIR(found.st_mode):
        return "it is no folder"
    if found.st_uid != os.geteuid():
        return f"it belongs to user {found.st_uid}"
    return f"its mode is {stat.S_IMODE(found.st_mode):o}, not 700" if found.st_mode & 0o077 else ""


def _make(path: Path) -> None:
    """Make the file. It appears under its name complete, or not at all; if several processes make it at once, one wins."""
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with open(fd, "wb") as file:
                file.write(secrets.token_hex(_BYTES).encode())
            with contextlib.suppress(FileExistsError):
                os.link(draft, path)
        finally:
            os.unlink(draft)
    except OSError as error:
        raise _nowhere(path.parent, error.strerror or str(error)) from None


def _nowhere(folder: Path, why: str) -> AuthenticationError:
    text = f"no job secret was given, and {folder} is no place for one that this user's processes share: {why}"
    hint = "set XDG_RUNTIME_DIR to a folder of yours with mode 700, or RDMARPC_SECRET for all (`openssl rand -hex 32`)"
    return AuthenticationError(text, hint=hint)


def _boot() -> str:
    """A text of this run of the system. Where a sandbox hides it, one secret serves for all."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "any-boot"
