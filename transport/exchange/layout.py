"""The words of an exchange: of a call, of its lanes, of the plan that calls of one signature have in common, and of the header
of a piece."""

OK, TIMEOUT, CHANGED, MISMATCH, CLOSED = 0, -1, -2, -3, -4
"""What ``exchange`` returns; for the last two ``CALL_LANE`` says which lane."""

HEADER = 64
"""Bytes in front of a piece: four words, see ``HEAD_*``."""
HEAD_SEQUENCE, HEAD_CODE, HEAD_BYTES, HEAD_COUNT = 0, 1, 2, 3

# The words of a call, int64 each; the rows of its lanes follow.
CALL_LANES, CALL_PIECE, CALL_DEPTH, CALL_BELL, CALL_BUDGET = 0, 1, 2, 3, 4
CALL_SEQUENCE, CALL_CODE, CALL_COUNT = 5, 6, 7
CALL_FOLD, CALL_OWN, CALL_RESULT, CALL_RANK, CALL_BYTES, CALL_FOLDED = 8, 9, 10, 11, 12, 13
CALL_TABLE, CALL_FOLDER, CALL_WHOLE = 14, 15, 16
CALL_LANE, CALL_KICK, CALL_SEEN, CALL_PATIENT = 17, 18, 19, 20
CALL_PART, CALL_CHUNK, CALL_CHUNKS, CALL_PAST = 21, 22, 23, 24
CALL_WORDS = 32

LANE_NOTIFY, LANE_CREDIT, LANE_OUT, LANE_IN, LANE_ARRIVED, LANE_CREDITED, LANE_SENT, LANE_TAKEN = 0, 1, 2, 3, 4, 5, 6, 7
LANE_FROM, LANE_FROM_BYTES, LANE_PUSHED, LANE_PUSH = 8, 9, 10, 11
LANE_TO, LANE_TO_BYTES, LANE_PULLED, LANE_PULL, LANE_RANK, LANE_ADVICE = 12, 13, 14, 15, 16, 17
LANE_OUT_DEPTH, LANE_IN_DEPTH = 18, 19
"""The slots at the peer, and here: a direction of a lane has few until it has carried a large message."""
LANE_WORDS = 20

# The words of a plan: what every call of one signature has in common. Addresses are offsets. The rows of its lanes follow.
PLAN_CODE, PLAN_COUNT, PLAN_FOLD, PLAN_OWN, PLAN_RESULT, PLAN_BYTES, PLAN_WHOLE = 0, 1, 2, 3, 4, 5, 6
PLAN_PART, PLAN_CHUNK, PLAN_CHUNKS, PLAN_PAST = 7, 8, 9, 10
PLAN_WORDS = 11
PLAN_FROM, PLAN_FROM_BYTES, PLAN_PUSH, PLAN_TO, PLAN_TO_BYTES, PLAN_PULL = 0, 1, 2, 3, 4, 5
PLAN_LANE_WORDS = 6
