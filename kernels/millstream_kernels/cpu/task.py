"""What the decode kernel is given: numbers of 64 bits, one after another. Readable without numba and torch.

A *unit* is one row and one group of query heads, which share a head of keys: unit `group * rows + row`. Units are
shared out among threads.
"""

from __future__ import annotations

from enum import IntEnum


class Format(IntEnum):
    """How keys and values are stored: as they are, or as codes, `number = code * scale`."""

    FLOAT32 = 0
    INT8 = 1  # int8, a float16 scale per head and slot
    FP8 = 2  # float8_e4m3fn, a float32 scale per head
    BFLOAT16 = 3
    FLOAT16 = 4


class Field(IntEnum):
    """Place of a number. The first are addresses of contiguous memory."""

    QUERY = 0  # float32 [rows, GROUPS, GROUP, D]
    POOL = 1  # of FORMAT, [pool heads, slots, D]: keys, then values; keys alone where VALUE_HEADS is 0
    OUTPUT = 2  # float32 [rows, GROUPS, GROUP, VALUE_SIZE]
    BLOCKS = 3  # int32: the block tables of all rows, one after another
    STARTS = 4  # int64 [rows]: where a row's table begins
    LENGTHS = 5  # int64 [rows]: tokens in the cache, the row's own included
    CUTS = 6  # int64 [PARTS + 1]: the first unit of each part, and the end
    SCRATCH = 7  # float32 [PARTS, GROUP * (SCORES + 2 * D) + BLOCK_SIZE * D]
    SCALES = 8  # of FORMAT: float16 [pool heads, slots] or float32 [pool heads]; else 0
    FORMAT = 9
    ROWS = 10
    GROUPS = 11
    GROUP = 12  # query heads of a group
    HEAD_SIZE = 13
    SLOTS = 14
    BLOCK_SIZE = 15
    WINDOW = 16  # tokens that a row sees at most, itself included; 0: all
    SCORES = 17  # scores of a head that the scratch has room for
    PARTS = 18  # that threads take, one after another
    SCALE = 19  # on query times key; a float64
    SOFTCAP = 20  # a float64: scores become softcap * tanh(scores / softcap); 0: they stay
    KEY_HEADS = 21  # of the pool; GROUPS / KEY_HEADS neighbouring groups share one
    VALUE_HEADS = 22  # of the pool: as many, behind the keys; 0: a key is the value too (MLA)
    VALUE_SIZE = 23  # first numbers of such a head that are the value: D, or fewer


NUM_FIELDS = len(Field)
# Functions of the machine code. Both take the task's address; the first is called by each thread of an OpenMP team.
IN_TEAM, ALONE = "millstream_paged_decode", "millstream_paged_decode_alone"
