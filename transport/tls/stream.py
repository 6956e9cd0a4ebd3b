"""TLS 1.3 for the streams that leave a host: the whole of ``tcp``, and the stream beside a queue pair of ``verbs``.

Both ends prove themselves in the handshake, in one of two ways: by the job secret (a pre-shared key that is derived from it,
with an ephemeral key exchange), or by certificates of one authority, which each end has and checks. Then the ends authenticate
as they do without TLS (``peers/auth``), bound to this very stream: so whom else the authority has signed for is in between
nowhere.

There is no way down: an end that has TLS on speaks TLS 1.3 or nothing. No tickets, no resumption, no renegotiation.

The payload that RDMA carries is not encrypted by any of this: adapters move it, past the processor. So a device for ``verbs``
is refused when TLS is on, unless ``TlsOptions.rdma_in_clear`` says that this is known.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from ..errors import GONE, PeerLost
from ..peers import auth
from .options import TlsOptions

if TYPE_CHECKING:
    from ..peers.identity import Identity
    from .handshake import Tls


def failure(sock: socket.socket) -> PeerLost | None:
    """Why an encrypted stream ended, where it was not the peer's end. ``None`` also for any other stream."""
    return getattr(sock, "failure", None)


def prepare(tls: bool | TlsOptions, secret: bytes, device: str) -> Tls | None:
    """The ``Tls`` for a device's argument ``tls``; ``None`` if it is off."""
    if not tls:
        return None
    from .handshake import Tls  # compiles more kernels

    return Tls(tls if isinstance(tls, TlsOptions) else TlsOptions(), secret, device)


def authenticated(
    sock: socket.socket,
    tls: Tls | None,
    secret: bytes,
    identity: Identity,
    *,
    initiator: bool,
    deadline: float,
    expect: str = "",
) -> tuple[socket.socket, bytes]:
    """``auth.authenticate``; with TLS on a stream that is encrypted before. Returns the stream to go on with, and the peer's
    key. ``sock`` has been closed if it is another one; after an error it is the caller's to close."""
    stream, binding = (sock, b"") if tls is None else tls.seal(sock, initiator=initiator, deadline=deadline)
    try:
        key = auth.authenticate(stream, secret, identity, initiator=initiator, expect=expect, binding=binding)
    except BaseException as error:
        broken = failure(stream) if isinstance(error, PeerLost) and error.status not in GONE else None
        if stream is not sock:
            stream.close()
        if broken is not None:
            raise broken from None
        raise
    if stream is not sock:
        sock.close()
    return stream, key
