"""Mutual authentication of two ends of a fresh stream, before anything else is parsed.

Each end proves two things: that it knows the job secret, and that it holds the private half of its key (``Identity``). The
proofs cover both keys and nonces of both ends, so none can be used a second time, elsewhere, or by somebody in between:

    both        magic, key, nonce (72 bytes)
    initiator   HMAC(secret, transcript), HMAC(X25519, transcript)
    acceptor    HMAC(X25519, HMAC(secret, transcript)), or a refusal

The initiator goes first: a stranger who connects gets nothing that was made with the secret, and costs us one HMAC. Somebody
who answers in place of the acceptor does get a proof, and anybody who reads the group's store does: both can try secrets
against it without asking us again. So a secret has to be random; ``check_secret`` refuses short ones, and no slow derivation
of keys is spent on guessable ones.

Everything has a fixed size. What follows on the stream is neither encrypted nor protected from changes by somebody in between,
but for ``tls``.

Processes that were given no secret have one for each user of a running host, in a file that this user alone can read. A process
that can read that file can read the memory of the user's processes as well, so trusting it loses nothing. The first process
that needs the file makes it, in ``XDG_RUNTIME_DIR`` or ``/tmp/rdmarpc-UID``, and it stays. Its name holds the kernel's boot id,
so each boot has a new one, and hosts that share the folder have one each. No process has to pass it on or remove it.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import socket
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from ..errors import AuthenticationError, PeerLost, TransferTimeout
from .address import lines
from .guard import nobody

_BYTES, _MOST_BYTES = 32, 4096


def user_secret() -> tuple[bytes, Path]:
    """The secret (64 hexadecimal digits) and its file. ``AuthenticationError`` where there is no folder that is this user's
    alone, or the file is not."""
    (boot,) = lines("/proc/sys/kernel/random/boot_id") or ["any-boot"]  # where a sandbox hides it, one secret serves for all
    path = _folder() / f"secret-{boot}"
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
    try:
        fd, draft = tempfile.mkstemp(dir=path.parent, prefix=path.name)
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


KEY_BYTES = 32


class Identity:
    """A key pair. A peer that computes the same ``shared`` from its own key and ``public`` knows that it talks to the holder of
    the private half. It lives as long as the memory it belongs to, and is never stored. Thread-safe."""

    def __init__(self) -> None:
        # Not ``generate``: OpenSSL's generator needs getrandom, which some sandboxes forbid.
        self._private = X25519PrivateKey.from_private_bytes(os.urandom(KEY_BYTES))
        self.public = self._private.public_key().public_bytes_raw()
        """The public half, which reveals nothing of the private one."""

    def shared(self, public: bytes) -> bytes:
        """The bytes that only the two holders of the private halves can compute. Raises ``AuthenticationError`` for a public
        key with which the result is the same for everybody."""
        try:
            return self._private.exchange(X25519PublicKey.from_public_bytes(public))
        except ValueError:
            raise AuthenticationError("the peer's key is none", status="PROTOCOL") from None


def uid_of(public: bytes) -> int:
    """The 64 bits by which addresses and descriptors name the holder of a key. Another key with these bits is found in 2^64
    attempts; where all 256 bits count, compare the key."""
    return int.from_bytes(hashlib.sha256(b"uid" + public).digest()[:8], "little")


_MAGIC = b"rdmarpc\x02"
_NONCE, _PROOF = 32, 32
_HELLO = len(_MAGIC) + KEY_BYTES + _NONCE
_TLS = (b"\x16\x03", b"\x15\x03")  # how a handshake of TLS begins, and an alert
_REFUSED = b"refused".ljust(_PROOF, b"\0")
MIN_SECRET_BYTES = 16
HOW_TO_SET = "export RDMARPC_SECRET=$(openssl rand -hex 32), the same for every worker, or RDMARPC_SECRET_FILE=FILE (mode 0600)"


def check_secret(secret: bytes) -> None:
    """Raise ``ValueError`` for a secret that is so short that it can be guessed."""
    if len(secret) < MIN_SECRET_BYTES:
        raise ValueError(
            f"the job secret has {len(secret)} bytes, and {MIN_SECRET_BYTES} at least are needed: it is random text, such as "
            "`openssl rand -hex 32` prints, not a password"
        )


def receive_exactly(sock: socket.socket, nbytes: int) -> bytes:
    """Raises ``PeerLost`` if the stream ends first, ``TransferTimeout`` after the socket's timeout."""
    parts = bytearray()
    while len(parts) < nbytes:
        try:
            piece = sock.recv(nbytes - len(parts))
        except TimeoutError:
            raise TransferTimeout("the peer did not answer in time") from None
        except OSError as error:
            raise PeerLost(f"the connection broke: {error}") from None
        if not piece:
            raise PeerLost("the peer closed the connection")
        parts += piece
    return bytes(parts)


def _hmac(key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"".join(parts), hashlib.sha256)


def authenticate(
    sock: socket.socket,
    secret: bytes,
    identity: Identity,
    *,
    initiator: bool,
    expect: str = "",
    binding: bytes = b"",
    proven: Callable[[], None] = nobody,
) -> bytes:
    """Authenticate both ends, which both run this under the socket's timeout. Returns the peer's key. The other end has proven
    that it holds the private half.

    ``expect``: the uid (``uid_of``, 16 hexadecimal digits) that the other end must have; ``PeerLost`` with the status
    ``STALE_ADDRESS`` if it is another one. ``binding``: what the proofs cover besides, the same at both ends, so that they hold
    for this stream alone (of a TLS session: its channel binding). ``proven``: called by the acceptor when the other end has
    proven itself, before that is told so. Raises ``AuthenticationError`` at both ends if secrets or bindings differ."""
    mine = identity.public + secrets.token_bytes(_NONCE)
    try:
        sock.sendall(_MAGIC + mine)
        hello = receive_exactly(sock, _HELLO)
        if hello[: len(_MAGIC)] != _MAGIC:
            raise _stranger(hello)
        theirs = hello[len(_MAGIC) :]
        peer = theirs[:KEY_BYTES]
        if expect and f"{uid_of(peer):016x}" != expect:
            raise PeerLost("another device listens there now", status="STALE_ADDRESS")
        transcript = (mine + theirs if initiator else theirs + mine) + hashlib.sha256(binding).digest()
        if initiator:
            _prove_first(sock, secret, identity.shared(peer), transcript)
        else:
            shared = _check_first(sock, secret, identity, peer, transcript)
            proven()
            sock.sendall(_answer(secret, shared, transcript))
    except OSError as error:
        raise PeerLost(f"the connection broke: {error}") from None
    return peer


def _stranger(hello: bytes) -> AuthenticationError:
    if hello[:2] in _TLS:
        why, hint = "the other end speaks TLS, and this one does not", "tls at every worker, or at none"
        return AuthenticationError(why, status="TLS", hint=hint)
    return AuthenticationError("the other end does not speak this protocol", hint="is this the right address?")


def _prove_first(sock: socket.socket, secret: bytes, shared: bytes, transcript: bytes) -> None:
    sock.sendall(_hmac(secret, b"initiator", transcript) + _hmac(shared, b"initiator", transcript))
    answer = receive_exactly(sock, _PROOF)
    if not hmac.compare_digest(answer, _answer(secret, shared, transcript)):
        raise _another_secret("the peer refused our proof" if answer == _REFUSED else "the peer's proof is wrong")


def _check_first(sock: socket.socket, secret: bytes, identity: Identity, peer: bytes, transcript: bytes) -> bytes:
    """Returns the bytes that both ends share."""
    proofs = receive_exactly(sock, 2 * _PROOF)
    if not hmac.compare_digest(proofs[:_PROOF], _hmac(secret, b"initiator", transcript)):
        sock.sendall(_REFUSED)
        raise _another_secret("its proof is wrong")
    shared = identity.shared(peer)
    if not hmac.compare_digest(proofs[_PROOF:], _hmac(shared, b"initiator", transcript)):
        sock.sendall(_REFUSED)
        raise AuthenticationError("the peer does not hold the key that it shows", status="PROTOCOL")
    return shared


def _answer(secret: bytes, shared: bytes, transcript: bytes) -> bytes:
    return _hmac(shared, b"acceptor", _hmac(secret, b"acceptor", transcript))


def _another_secret(how: str) -> AuthenticationError:
    return AuthenticationError(f"the peer does not hold the same job secret: {how}", hint=HOW_TO_SET)
