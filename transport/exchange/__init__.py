"""Messages among several processes at once: streams of pieces between each two of them, through slots that each end keeps for
the other, and the sums of what arrives. One compiled loop writes to peers whose memory is mapped here, and to memory
of our own that is posted to others."""

# ruff: noqa: F401

from ..words.atomics import fold_code
from .kernels import CLOSED, MISMATCH, OK
from .lane import NUMBERS, Lane
from .streams import COPY_PAST, NOTHING, Fold, Head, Plan, Span, Streams, streams
