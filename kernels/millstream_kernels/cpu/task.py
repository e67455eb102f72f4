"""What kernels for a CPU are given: numbers of 64 bits, one after another. Readable without numba and torch.

In `Field`, a *unit* is one row and one group of query heads, which share a head of keys: unit `group * rows + row`.
Threads share the units.
"""

from __future__ import annotations

import functools
import struct
import sys
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
    SCRATCH = 7  # float32 [PARTS, decode_scratch_numbers(..)]
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


class PromptField(IntEnum):
    """Of `paged_prefill`. A unit is up to UNIT_ROWS rows of one chunk and one head of keys: a row is a token of the
    chunk and one of the GROUP query heads that share the head, row `token * GROUP + member`."""

    QUERY = 0  # float32 [tokens of all chunks, HEADS, GROUP, HEAD_SIZE]
    POOL = 1  # as `Field.POOL`
    OUTPUT = 2  # float32 [tokens of all chunks, HEADS, GROUP, VALUE_SIZE]
    BLOCKS = 3  # int32: the block tables of all chunks, one after another
    STARTS = 4  # int64 [CHUNKS]: where a chunk's table begins
    LENGTHS = 5  # int64 [CHUNKS]: tokens in the cache, the chunk's own included
    FIRSTS = 6  # int64 [CHUNKS + 1]: a chunk's first token among those of all chunks, and the end
    UNITS = 7  # int64 [NUM_UNITS, 4]: chunk, head, first row, rows
    NEXT = 8  # int64 [1]: the next unit that no thread has taken
    SCRATCH = 9  # SCRATCH_BYTES for each thread
    SCALES = 10  # as `Field.SCALES`
    FORMAT = 11
    CHUNKS = 12
    NUM_UNITS = 13
    SCRATCH_BYTES = 14
    HEADS = 15  # of keys
    GROUP = 16
    HEAD_SIZE = 17
    SLOTS = 18
    BLOCK_SIZE = 19
    WINDOW = 20
    SCALE = 21  # a float64
    SOFTCAP = 22  # a float64
    VALUE_HEADS = 23  # of the pool, behind the keys; 0: a key is the value too (MLA)
    VALUE_SIZE = 24


PANEL_ROWS = 16  # queries that lie next to one another in vectors
UNIT_ROWS = 64
KEY_TILE_TOKENS = 64  # from a multiple of it on: whatever the chunk, a query's sums are of the same tiles
OVERHANG_TOKENS = 3  # behind the last, whose scores are computed too: of 6 or 4 tokens at a time


def decode_scratch_numbers(group: int, most_scores: int, head_size: int, block_size_tokens: int) -> int:
    """float32 that a part of `paged_decode` needs: scores, scaled queries and sums of a group of heads; a block."""
    return group * (most_scores + 2 * head_size) + block_size_tokens * head_size


def prompt_scratch_bytes(head_size: int, value_size: int, *, is_copied: bool) -> int:
    """What a thread of `paged_prefill` needs. `is_copied`: keys and values are not float32 in the pool.

    In this order: addresses of keys and values of a tile and of a panel's rows; panels of queries and of outputs; of
    each panel three numbers of state; first and last tokens; scores; a number; a tile of keys and one of values.
    """
    addresses = 2 * (KEY_TILE_TOKENS + OVERHANG_TOKENS) + PANEL_ROWS
    panels = UNIT_ROWS // PANEL_ROWS
    numbers = panels * (head_size + value_size + 3) + 2 + KEY_TILE_TOKENS + OVERHANG_TOKENS + 1
    copied = 2 * KEY_TILE_TOKENS * head_size if is_copied else 0
    return -(-(8 * addresses + 4 * (PANEL_ROWS * numbers + copied)) // 64) * 64


class NormField(IntEnum):
    """Of `rms_norm`. Here and below the first are addresses of contiguous memory."""

    X = 0  # float32 [ROWS, SIZE]
    WEIGHT = 1  # float32 [SIZE]
    OUT = 2  # float32 [ROWS, SIZE]
    ROWS = 3
    SIZE = 4
    EPS = 5  # a float64


class ActivationKind(IntEnum):
    SILU = 0
    GELU_TANH = 1


class GateField(IntEnum):
    """Of `gated_activation`."""

    X = 0  # float32 [ROWS, 2 * SIZE]: gates, then ups
    OUT = 1  # float32 [ROWS, SIZE]
    ROWS = 2
    SIZE = 3
    KIND = 4  # an ActivationKind


class RopeField(IntEnum):
    """Of `rope_kv_write`."""

    QKV = 0  # float32 [TOKENS, HEADS + 2 * KV_HEADS, HEAD_SIZE]
    QUERY = 1  # float32 [TOKENS, HEADS, HEAD_SIZE]
    POOL = 2  # of FORMAT, [2 * KV_HEADS, POOL_SLOTS, HEAD_SIZE]: keys, then values
    COS = 3  # float32 [NUM_ANGLES, PAIRS]
    SIN = 4  # float32 [NUM_ANGLES, PAIRS]
    POSITIONS = 5  # int64 [TOKENS]: rows of the angles
    SLOTS = 6  # int64 [TOKENS]
    HEAD_WEIGHT = 7  # float32 [HEADS + KV_HEADS, HEAD_SIZE], of norms; 0: there are none
    TOKENS = 8
    HEADS = 9
    KV_HEADS = 10
    HEAD_SIZE = 11
    PAIRS = 12  # of numbers that turn: half of the rotary size
    POOL_SLOTS = 13
    NUM_ANGLES = 14
    EPS = 15  # a float64
    FORMAT = 16  # FLOAT32, BFLOAT16 or FLOAT16


class ProductField(IntEnum):
    """Of `packed_product`."""

    X = 0  # float32 [ROWS, INPUTS]
    PANELS = 1  # of FORMAT, [NUM_PANELS, INPUTS, PANEL_OUTPUTS]
    OUT = 2  # float32 [ROWS, NUM_PANELS * PANEL_OUTPUTS]
    ROWS = 3
    INPUTS = 4
    NUM_PANELS = 5
    FORMAT = 6  # BFLOAT16 or FLOAT16


PANEL_OUTPUTS = 16


class RowField(IntEnum):
    """Of `bfloat16_row`."""

    X = 0  # bfloat16 [INPUT_BLOCKS * BLOCK_INPUTS]
    WEIGHT = 1  # bfloat16, in oneDNN's blocks
    OUT = 2  # float32 [OUTPUT_BLOCKS * BLOCK_OUTPUTS]
    INPUT_BLOCKS = 3
    OUTPUT_BLOCKS = 4
    SUM_BLOCKS = 5  # of inputs, behind which a new sum starts


BLOCK_INPUTS, BLOCK_OUTPUTS = 32, 64  # of a block of oneDNN's bfloat16 weights


# By the name of each kernel, where it is: a module of this package. The function has the same name.
KERNELS = {
    "paged_decode": "paged_decode",
    "paged_prefill": "paged_prefill",
    "rms_norm": "elementwise",
    "gated_activation": "elementwise",
    "rope_kv_write": "elementwise",
    "packed_product": "packed_product",
}
# The same of kernels that are written in LLVM's language: the module gives its text.
TEXT_KERNELS = {"bfloat16_row": "bfloat16.row_kernel"}
ALL_KERNELS = (*KERNELS, *TEXT_KERNELS)


@functools.lru_cache
def bits_of(number: float) -> int:
    """Of a float64, as the integer that a field holds."""
    return int.from_bytes(struct.pack("=d", number), sys.byteorder, signed=True)


def in_team(kernel: str) -> str:
    """The function of the machine code that each thread of an OpenMP team calls with the task's address."""
    return f"millstream_{kernel}"


def alone(kernel: str) -> str:
    """The function that one thread calls with it."""
    return f"millstream_{kernel}_alone"
