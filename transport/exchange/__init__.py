"""Messages among several processes at once: streams of pieces between each two of them, through slots that each end keeps for
the other, and the sums of what arrives. The compiled loop for peers whose memory is mapped here, and the one that posts for
others."""

# ruff: noqa: F401

from ..words.atomics import fold_code
from .lane import NUMBERS, Lane
from .layout import CLOSED, MISMATCH, OK
from .streams import COPY_PAST, NOTHING, Fold, Head, Plan, Span, Streams, fold_local, streams
