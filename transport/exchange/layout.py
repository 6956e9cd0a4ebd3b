"""The words of an exchange: of a call, of its lanes, of the plan that calls of one signature have in common, and of the header
of a piece."""

OK, TIMEOUT, MISMATCH, CLOSED = 0, -1, -2, -3
"""What ``exchange`` returns; for the last two ``CALL_LANE`` says which lane."""

HEADER = 64
"""Bytes in front of a piece: five words, see ``HEAD_*``. The last has the bytes of this piece, the third of its message."""
HEAD_SEQUENCE, HEAD_CODE, HEAD_BYTES, HEAD_COUNT, HEAD_PIECE = 0, 1, 2, 3, 4

# The words of a call, int64 each; the rows of its lanes follow.
CALL_LANES, CALL_PIECE, CALL_DEPTH, CALL_BELL, CALL_BUDGET = 0, 1, 2, 3, 4
CALL_SEQUENCE, CALL_CODE, CALL_COUNT = 5, 6, 7
CALL_FOLD, CALL_OWN, CALL_RESULT, CALL_BYTES, CALL_WHOLE = 8, 9, 10, 11, 12
CALL_PART, CALL_CHUNK, CALL_CHUNKS, CALL_PAST = 13, 14, 15, 16
CALL_RANK, CALL_FOLDED, CALL_TABLE, CALL_FOLDER = 17, 18, 19, 20
CALL_LANE, CALL_PATIENT = 21, 22
CALL_WORDS = 24

LANE_NOTIFY, LANE_CREDIT, LANE_OUT, LANE_IN, LANE_ARRIVED, LANE_CREDITED, LANE_SENT, LANE_TAKEN = 0, 1, 2, 3, 4, 5, 6, 7
LANE_FROM, LANE_FROM_BYTES, LANE_PUSH, LANE_TO, LANE_TO_BYTES, LANE_PULL = 8, 9, 10, 11, 12, 13
LANE_PUSHED, LANE_PULLED, LANE_RANK, LANE_ADVICE = 14, 15, 16, 17
LANE_OUT_DEPTH, LANE_IN_DEPTH = 18, 19
"""The slots at the peer, and here: a direction of a lane has few until it has carried a large message."""
LANE_WORDS = 20

PLAN_WORDS, PLAN_LANE_WORDS = CALL_PAST - CALL_CODE + 1, LANE_PULL - LANE_FROM + 1
"""A plan has what every call of one signature has in common: the words from ``CALL_CODE`` to ``CALL_PAST``, then, for each
lane, those from ``LANE_FROM`` to ``LANE_PULL``. Addresses are offsets."""
