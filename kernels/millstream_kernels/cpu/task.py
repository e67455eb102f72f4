"""What the decode kernel is given: numbers of 64 bits, one after another. Readable without numba and torch.

A *unit* is one row and one head of keys and values: unit `head * rows + row`. Units are shared out among threads.
"""

from __future__ import annotations

from enum import IntEnum


class Format(IntEnum):
    """How keys and values are stored: `number = code * scale`."""

    FLOAT32 = 0  # as they are
    INT8 = 1  # int8, a float16 scale per head and slot
    FP8 = 2  # float8_e4m3fn, a float32 scale per head


class Field(IntEnum):
    """Place of a number. The first are addresses of contiguous memory."""

    QUERY = 0  # float32 [rows, KV, group, D]
    POOL = 1  # of FORMAT, [2 * KV, slots, D]: the heads of the keys, then of the values
    OUTPUT = 2  # float32 [rows, KV, group, D]
    BLOCKS = 3  # int32: the block tables of all rows, one after another
    STARTS = 4  # int64 [rows]: where a row's table begins
    LENGTHS = 5  # int64 [rows]: tokens in the cache, the row's own included
    CUTS = 6  # int64 [PARTS + 1]: the first unit of each part, and the end
    SCRATCH = 7  # float32 [PARTS, group * (SCORES + 2 * D) + BLOCK_SIZE * D]
    SCALES = 8  # of FORMAT: float16 [2 * KV, slots] or float32 [2 * KV]
    FORMAT = 9
    ROWS = 10
    KV_HEADS = 11
    GROUP = 12
    HEAD_SIZE = 13
    SLOTS = 14
    BLOCK_SIZE = 15
    WINDOW = 16  # tokens that a row sees at most, itself included; 0: all
    SCORES = 17  # scores of a head that the scratch has room for
    PARTS = 18  # that threads take, one after another
    SCALE = 19  # on query times key; a float64
    SOFTCAP = 20  # a float64: scores become softcap * tanh(scores / softcap); 0: they stay


NUM_FIELDS = len(Field)
# Functions of the machine code. Both take the task's address; the first is called by each thread of an OpenMP team.
IN_TEAM, ALONE = "millstream_paged_decode", "millstream_paged_decode_alone"
