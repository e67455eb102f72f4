"""How weights of 4 to 8 bits lie in memory for `integer_product`, and rows that are rounded to 8 bits. Facts only.

A weight lies in panels of 16 outputs, each one run of memory; inputs are in groups of 32.

    codes     of a group: 8 vectors of [16 outputs][4 inputs], 64 bytes each where a code has 8 bits
              4 bits: 4 vectors, the low halves of bytes are vectors 0 to 3, the high ones 4 to 7
              5 bits: the same of the low 4 bits, then a vector of whose bytes bit i is the fifth of vector i
              6 bits: the same of the low 4 bits, then two vectors of four times 2 bits
    scales    of a unit, of 32 or 256 inputs: float16 [1 or 2][16], then for each of its groups bytes [1 or 2][16]

A row lies in records, one for each group: 32 codes, step, least, and sums of codes times an offset. Rows are in tiles
of 8, the last one of what is left: [tile][group][row of the tile].
"""

from __future__ import annotations

from dataclasses import dataclass

GROUP_INPUTS = 32
MOST_TILE_ROWS = 8
RECORD_BYTES = 52
STEP_PLACE, LEAST_PLACE, OFFSETS_PLACE = 32, 36, 40  # of each half of a group, and of all of it
PANEL_OUTPUTS = 16


@dataclass(frozen=True, slots=True)
class ScaleLayout:
    """What scales of a unit consist of.

    Attributes:
        inputs: of a unit.
        num_halves: float16 vectors: the scale, and the least's scale where there is a least.
        group_bytes: of whole numbers of a group; by them the float16 are multiplied.
        has_least: the last half and the second whole number are of a least weight, which is subtracted.
        is_signed: whole numbers are.
    """

    inputs: int
    num_halves: int
    group_bytes: int = 0
    has_least: bool = False
    is_signed: bool = False

    @property
    def num_bytes(self) -> int:
        """Of a unit and a panel."""
        return 2 * PANEL_OUTPUTS * self.num_halves + self.inputs // GROUP_INPUTS * self.group_bytes


@dataclass(frozen=True, slots=True)
class CodeFormat:
    """One format of weights. `offset`: is subtracted of each code."""

    name: str
    number: int
    bits: int
    offset: int
    scales: ScaleLayout

    @property
    def group_bytes(self) -> int:
        """Of codes of a group and a panel."""
        return GROUP_INPUTS * PANEL_OUTPUTS * self.bits // 8


_HALF, _HALF_AND_LEAST = ScaleLayout(32, 1), ScaleLayout(32, 2, has_least=True)
_OF_8_GROUPS = ScaleLayout(256, 2, group_bytes=2 * PANEL_OUTPUTS, has_least=True)
_OF_16_GROUPS = ScaleLayout(256, 1, group_bytes=2 * PANEL_OUTPUTS, is_signed=True)
FORMATS = {
    code_format.name: code_format
    for code_format in (
        CodeFormat("Q8_0", 0, 8, 128, _HALF),
        CodeFormat("Q4_0", 1, 4, 8, _HALF),
        CodeFormat("Q4_1", 2, 4, 0, _HALF_AND_LEAST),
        CodeFormat("Q5_0", 3, 5, 16, _HALF),
        CodeFormat("Q5_1", 4, 5, 0, _HALF_AND_LEAST),
        CodeFormat("Q4_K", 5, 4, 0, _OF_8_GROUPS),
        CodeFormat("Q5_K", 6, 5, 0, _OF_8_GROUPS),
        CodeFormat("Q6_K", 7, 6, 32, _OF_16_GROUPS),
    )
}
