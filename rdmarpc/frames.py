"""What frames are, and the parts of their layout that both sides of calling know (docs/protocols.md)."""

from __future__ import annotations

import struct
from typing import NamedTuple

# Kinds of frames.
REQUEST, RESPONSE, ERROR, RELEASE, FORGO, REFERENCES, ENDED, GOODBYE, CREDIT, WRAP = range(1, 11)

# Flags of requests and responses. With CONTROL a message of our own, not of a user.
FLAT, REFERENCE, REMOTE, BULK, READS, CONTROL, HEAD, LONE = 1, 2, 4, 8, 16, 32, 64, 128

# With HEAD, before the pickle of a request: grant used, RRef id, fork id, bytes of result places, autograd context or
# NO_CONTEXT, number of its message (``grad_record``) or 0; of a response: grant given, bytes of places, number of its message.
REQUEST_HEAD = struct.Struct("<QQQIQQ")
RESPONSE_HEAD = struct.Struct("<QIQ")
NO_CONTEXT = (1 << 64) - 1


class Frame(NamedTuple):
    """What came: ``body`` is the concatenation of function, payload, table and data, of the lengths given."""

    kind: int
    flags: int
    tensors: int
    call: int
    function: int
    payload: int
    table: int
    body: bytes
