"""Frames: kinds, flags, and the layout of the bodies of requests and answers (docs/formats.md).

A message is function, payload, table and data, one after the other; the frame says how long each is. The payload of a request
or an answer with ``HEAD`` begins with a head of fixed layout and landing places; the pickle follows, with the references in
front of it (``serialize.MARK``).
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from ..transport import RdmaError

# Kinds of frames.
REQUEST, RESPONSE, ERROR, RELEASE, FORGO, REFERENCES, ENDED, GOODBYE, CREDIT, WRAP, GRADIENTS = range(1, 12)

# Flags of requests and responses. CONTROL marks a message of our own, not of a user.
FLAT, REFERENCE, REMOTE, BULK, READS, CONTROL, HEAD, LONE = 1, 2, 4, 8, 16, 32, 64, 128

# grant used, RRef id, fork id, bytes of result places, autograd context or NO_CONTEXT, number of its message or 0
_REQUEST_HEAD = struct.Struct("<QQQIQQ")
# grant given, bytes of places, number of its message
_RESPONSE_HEAD = struct.Struct("<QIQ")
# With ``HEAD`` a payload begins with one of these, and the places.
request_head, response_head = _REQUEST_HEAD.pack, _RESPONSE_HEAD.pack
NO_CONTEXT = (1 << 64) - 1


Parts = tuple[bytes, bytes, bytes, bytes]
"""What goes out in a frame: function, payload, table, data."""
NO_PARTS: Parts = (b"", b"", b"", b"")


def alone(payload: bytes) -> Parts:
    """A payload without anything else."""
    return b"", payload, b"", b""


class NotTheirs(RdmaError):
    """A message is about something that its sender has no right to. Only malice or a bug can be the reason, so the link by
    which it came ends."""


class Frame(NamedTuple):
    """A received frame. ``body`` is the concatenation of function (of a request, pickled by reference; empty if the payload's
    pickle contains it), payload and table, whose lengths the other fields give.
    ``data`` belongs to whoever takes it out: a tensor may lie in it."""

    kind: int
    flags: int
    tensors: int
    call: int
    function: int
    payload: int
    table: int
    body: bytes
    data: bytearray


class Head(NamedTuple):
    """The facts in a request or an answer that came, besides its payload."""

    grant: int = 0
    """The number of the grant that it uses (request), or gives (answer); 0: none."""
    places: bytes = b""
    """The landing places for the result (request), or for the next call's arguments (answer): see ``tensors.Places``."""
    message: int = 0
    """The message's number in the autograd context (``gradients/graph``); 0: none."""
    context: int = NO_CONTEXT
    """The id of the autograd context (request)."""
    rref: int = 0
    """With ``REMOTE``: the id of the value to be created, and (``fork``) the id of its creator's fork."""
    fork: int = 0


_NO_HEAD = Head()


Body = tuple[Head, bytes, bytes, bytearray]
"""The parsed body of a request or an answer: head, payload, table, data."""


def without_head(kind: int, flags: int, payload: bytes) -> bytes:
    """The pickle in the payload of an outgoing message."""
    if not flags & HEAD:
        return payload
    if kind == RESPONSE:
        return payload[_RESPONSE_HEAD.size + _RESPONSE_HEAD.unpack_from(payload)[1] :]
    return payload[_REQUEST_HEAD.size + _REQUEST_HEAD.unpack_from(payload)[3] :]


def created(frame: Frame) -> tuple[int, int]:
    """The id of the reference whose value a request with ``REMOTE`` creates, and the id of its creator's fork."""
    _, rref, fork, *_ = _REQUEST_HEAD.unpack_from(frame.body, frame.function)
    return rref, fork


def request_body(frame: Frame) -> Body:
    """Parse the body of a request. Raises ``struct.error`` if it is malformed."""
    body, at, head = frame.body, frame.function, _NO_HEAD
    end = at + frame.payload
    if frame.flags & HEAD:
        grant, rref, fork, nbytes, context, message = _REQUEST_HEAD.unpack_from(body, at)
        at += _REQUEST_HEAD.size
        head = Head(grant, body[at : at + nbytes], message, context, rref, fork)
        at += nbytes
    return head, body[at:end], body[end:], frame.data


def response_body(frame: Frame) -> Body:
    """Parse the body of an answer. Raises ``struct.error`` if it is malformed."""
    body, at, head = frame.body, frame.function, _NO_HEAD
    end = at + frame.payload
    if frame.flags & HEAD:
        grant, nbytes, message = _RESPONSE_HEAD.unpack_from(body, at)
        at += _RESPONSE_HEAD.size
        head = Head(grant, body[at : at + nbytes], message)
        at += nbytes
    return head, body[at:end], body[end:], frame.data
