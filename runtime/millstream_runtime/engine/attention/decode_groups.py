"""Which decodes share a call: those of similar length that lie an equal distance apart in the pool. Pure.

A call reads each of its rows up to the longest. A row that joins saves a call of its own, which is worth some reading,
and costs its padding:

    first slot     0     64    128   192   256           groups
    length         300   40    310   45    290           {0, 128, 256} up to 310, {64, 192} up to 45

Greedy: the longest row that is left, with the others of the progression through it that saves the most.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import islice

# Rows of the nearest lengths that are tried as the second member, which gives the distance. Of 128 neighbouring rows of
# mixed lengths 4 make 27 groups that read 1.4 times what the rows hold; more make fewer groups that read more.
PARTNERS = 4


@dataclass(frozen=True, slots=True)
class PoolRows:
    """Where the rows are: `first_slots` and `lengths` in tokens, by row. No call may read beyond `end_slot`."""

    first_slots: Seq[int]
    lengths: Seq[int]
    end_slot: int


def groups_of(rows: PoolRows, call_tokens: int) -> list[list[int]]:
    """Return groups of rows, each in the order of its first slots. `call_tokens`: the padding that a call is worth."""
    by_length = sorted(range(len(rows.lengths)), key=lambda row: (-rows.lengths[row], rows.first_slots[row]))
    left: dict[int, int] = {}  # by first slot
    groups: list[list[int]] = []
    for row in by_length:
        if left.setdefault(rows.first_slots[row], row) != row:
            groups.append([row])  # begins where another does: no distance leads to both
    for place, longest in enumerate(by_length):
        if left.get(rows.first_slots[longest]) != longest:
            continue
        behind = (row for row in islice(by_length, place + 1, None) if left.get(rows.first_slots[row]) == row)
        group = _best_group(rows, longest, islice(behind, PARTNERS), left, call_tokens)
        for row in group:
            del left[rows.first_slots[row]]
        groups.append(group)
    return groups


def _best_group(
    rows: PoolRows, longest: int, partners: Iterator[int], left: dict[int, int], call_tokens: int
) -> list[int]:
    start, length = rows.first_slots[longest], rows.lengths[longest]
    shortest = length - call_tokens  # a row of this length costs as much padding as its own call

    def along(distance: int) -> Iterator[int]:
        slot = start + distance
        while (row := left.get(slot)) is not None and rows.lengths[row] > shortest and slot + length <= rows.end_slot:
            yield row
            slot += distance

    best, most_saved = [longest], 0
    for partner in partners:
        if rows.lengths[partner] <= shortest:
            break
        distance = abs(rows.first_slots[partner] - start)
        joining = [*along(distance), *along(-distance)]
        saved = sum(rows.lengths[row] - shortest for row in joining)
        if saved > most_saved:
            best, most_saved = [longest, *joining], saved
    return sorted(best, key=rows.first_slots.__getitem__)
