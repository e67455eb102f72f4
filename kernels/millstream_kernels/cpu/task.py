"""What the decode kernel is given: numbers of 64 bits, one after another. Readable without numba and torch.

A *unit* is one row and one head of keys and values: unit `head * rows + row`. Units are shared out among threads.
"""

from __future__ import annotations

from enum import IntEnum


class Field(IntEnum):
    """Place of a number. The first are addresses of contiguous memory."""

    QUERY = 0  # float32 [rows, KV, group, D]
    POOL = 1  # float32 [2 * KV, slots, D]: the heads of the keys, then of the values
    OUTPUT = 2  # float32 [rows, KV, group, D]
    BLOCKS = 3  # int32: the block tables of all rows, one after another
    STARTS = 4  # int64 [rows]: where a row's table begins
    LENGTHS = 5  # int64 [rows]: tokens in the cache, the row's own included
    CUTS = 6  # int64 [PARTS + 1]: the first unit of each part, and the end
    SCRATCH = 7  # float32 [PARTS, group, SCORES + 2 * D]
    ROWS = 8
    KV_HEADS = 9
    GROUP = 10
    HEAD_SIZE = 11
    SLOTS = 12
    BLOCK_SIZE = 13
    WINDOW = 14  # tokens that a row sees at most, itself included; 0: all
    SCORES = 15  # scores of a head that the scratch has room for
    PARTS = 16  # that threads take, one after another
    SCALE = 17  # on query times key; a float64
    SOFTCAP = 18  # a float64: scores become softcap * tanh(scores / softcap); 0: they stay


NUM_FIELDS = len(Field)
# Functions of the machine code. Both take the task's address; the first is called by each thread of an OpenMP team.
IN_TEAM, ALONE = "millstream_paged_decode", "millstream_paged_decode_alone"
