"""The secret of this user on this host: where it is, who can read it, and what is no place for it."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from transport_peer import works

from rdmarpc.transport import AuthenticationError, Device, read_private, user_secret

Open = Callable[..., Device]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = tmp_path / "run"
    made.mkdir(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(made))
    return made


def test_it_is_made_once_and_for_this_user_alone(folder: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        found = set(pool.map(lambda _: user_secret(), range(64)))
    ((secret, path),) = found
    assert len(bytes.fromhex(secret.decode())) == 32 and list(folder.iterdir()) == [path]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and path.stat().st_uid == os.geteuid()


def test_a_folder_of_others_is_not_taken(folder: Path) -> None:
    folder.chmod(0o770)
    _, path = user_secret()
    assert path.parent == Path(f"/tmp/rdmarpc-{os.geteuid()}") and stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_file_that_others_can_read_is_refused(folder: Path) -> None:
    _, path = user_secret()
    path.chmod(0o604)
    with pytest.raises(AuthenticationError, match=r"mode 604(.|\n)*chmod 600"):
        user_secret()
    with pytest.raises(AuthenticationError, match="is not this user's alone"):
        read_private(folder)


def test_devices_without_a_secret_meet_those_that_can_read_it(
    kind: str, folder: Path, open_device: Open, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    a, b = open_device(kind), open_device(kind)
    works(a, b)
    (tmp_path / "other").mkdir(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "other"))
    with pytest.raises(AuthenticationError, match="same job secret"):
        open_device(kind).connect(b.address)


@pytest.mark.parametrize("secret", [b"x", b"fifteen bytes.."])
def test_a_short_secret_is_refused(kind: str, open_device: Open, secret: bytes) -> None:
    with pytest.raises(ValueError, match="16 at least"):
        open_device(kind, secret=secret)
