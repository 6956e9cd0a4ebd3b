"""Frames of the ``tcp`` device: a header of fixed layout, little-endian, then ``nbytes`` of payload for WRITE, DATA, REFUSED.

One *post* is the run of frames with one sequence number; the last one carries ``LAST``. The receiver serves posts strictly in
order and answers each one that wants it, so an answer to post ``n`` also answers everything before it:

    sender -> receiver   WRITE    region, key, offset: lay the payload there
                         READ     region, key, offset: answer with DATA (``index`` says which copy of the post this is)
                         CHECK    region, key, offset: may I write there?
                         NOTIFY   nothing but the notification
                         BYE      the channel has ended (``index``: why, ``peers/heartbeat``)
                         BEAT     nothing: a sign of life, outside of all posts (``peers/heartbeat``)
    receiver -> sender   ACK      all posts up to ``seq`` are done
                         DATA     payload of copy ``index`` of post ``seq``; with LAST the post is done
                         REFUSED  post ``seq`` failed (payload: why, UTF-8); nothing was notified

``imm`` is the notification plus one, or 0. It is counted when the frame that carries it is complete. A post with ``LATER`` is
answered by an ACK in front of whatever the receiver sends next; the sender asks (a NOTIFY of no number) if it needs to know
before.
"""

from __future__ import annotations

import ctypes
import struct

WRITE, READ, CHECK, NOTIFY, BYE, ACK, DATA, REFUSED, BEAT = range(1, 10)
LAST, SILENT, LATER = 1, 2, 4  # SILENT: no ACK wanted, a later one will cover it; LATER: an ACK wanted, not by itself

HEADER = struct.Struct("<BBHIQQQQQ")
"""op, flags, index, imm, seq, region, key, offset, nbytes"""
MAX_COPIES = 1 << 16
TURN_BYTES = 4 << 20
"""The bytes that one channel sends or receives before it is another channel's turn."""
MAX_REASON = 1024

Buffers = list[bytes | memoryview]

_PyBUF_WRITE = 0x200
_from_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_from_memory.restype = ctypes.py_object
_from_memory.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int]


def memory_at(address: int, nbytes: int) -> memoryview:
    """A view of ``nbytes`` of this process's memory. The caller keeps the memory alive for as long as the view."""
    return _from_memory(address, nbytes, _PyBUF_WRITE) if nbytes else memoryview(b"")
