"""Groups of decodes: every row once, an equal distance apart, no more padding than they are worth."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream_runtime.engine.attention.decode_groups import PoolRows, groups_of
from millstream_runtime.engine.attention.paged_attention import TorchAttention
from millstream_runtime.engine.attention.side_by_side import CALL_BYTES, decode_groups, side_by_side
from millstream_runtime.models.layers.attention import AttentionSpec
from tests.unit.engine.attention.test_paged_attention import BLOCK, cache_of, chunk

CALL_TOKENS = 256
REGION = 1024  # slots of a row


def rows_at(places: list[int], lengths: list[int]) -> PoolRows:
    return PoolRows([REGION * place for place in places], lengths, REGION * (max(places) + 1))


def test_rows_of_one_length_at_equal_distances_are_one_group() -> None:
    assert groups_of(rows_at([0, 1, 2, 3, 4], [90] * 5), CALL_TOKENS) == [[0, 1, 2, 3, 4]]


def test_long_and_short_rows_that_take_turns_are_two_groups() -> None:
    rows = rows_at([0, 1, 2, 3, 4], [900, 40, 910, 45, 890])
    assert groups_of(rows, CALL_TOKENS) == [[0, 2, 4], [1, 3]]


def test_a_row_joins_while_its_padding_is_less_than_a_call_is_worth() -> None:
    just, too_short = [600, 601 - CALL_TOKENS], [600, 600 - CALL_TOKENS]
    assert groups_of(rows_at([0, 1], just), CALL_TOKENS) == [[0, 1]]
    assert groups_of(rows_at([0, 1], too_short), CALL_TOKENS) == [[0], [1]]


def test_no_call_reads_beyond_the_pool() -> None:
    rows = PoolRows([0, REGION], [200, 40], REGION + 100)
    assert groups_of(rows, CALL_TOKENS) == [[0], [1]]
    assert groups_of(PoolRows([0, REGION], [200, 40], REGION + 200), CALL_TOKENS) == [[0, 1]]


def test_rows_that_begin_in_the_same_slot_share_no_call() -> None:
    groups = groups_of(PoolRows([0, 0, REGION], [40, 50, 45], 2 * REGION), CALL_TOKENS)
    assert sorted(map(sorted, groups)) == [[0], [1, 2]]


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.integers(0, 60), st.integers(1, REGION), min_size=1), st.integers(0, 600))
def test_groups_hold_every_row_once_and_are_worth_their_padding(lengths_at: dict[int, int], call_tokens: int) -> None:
    places, lengths = [*lengths_at], [*lengths_at.values()]
    rows = rows_at(places, lengths)
    groups = groups_of(rows, call_tokens)
    assert sorted(row for group in groups for row in group) == [*range(len(places))]
    for group in groups:
        slots, longest = [rows.first_slots[row] for row in group], max(lengths[row] for row in group)
        assert len({after - before for before, after in pairwise(slots)}) <= 1
        assert slots == sorted(slots)
        assert slots[-1] + longest <= rows.end_slot
        assert sum(longest - lengths[row] for row in group) <= call_tokens * (len(group) - 1)


def test_the_order_of_rows_is_given_up_only_where_that_saves_more_than_a_call() -> None:
    cache = cache_of(2, 16)
    most_tokens = CALL_BYTES // cache.token_bytes
    assert most_tokens > 64 * BLOCK, "the lengths below differ by less than a call is worth"
    even = [chunk(1, 20 + row, [4 * row, 4 * row + 1, 4 * row + 2]) for row in range(6)]
    assert [[*rows] for rows, _ in decode_groups(cache, even)] == [[0, 1, 2, 3, 4, 5]]
    homes = [0, 4, 9, 13, 18, 22, 27, 31]  # two progressions, mixed
    mixed = [chunk(1, 20, [home, home + 1]) for home in homes]
    found = decode_groups(cache, mixed)
    assert len([*side_by_side(cache, mixed)]) == 4
    assert [[*rows] for rows, _ in found] == [[0, 2, 4, 6], [1, 3, 5, 7]]


@pytest.mark.parametrize("has_bad_padding", [False, True], ids=["finite", "NaN behind a shorter row"])
def test_rows_come_back_in_their_order(has_bad_padding: bool) -> None:
    cache, spec = cache_of(2, 16), AttentionSpec(scale=0.25)
    homes = [0, 4, 9, 13, 18, 22, 27, 31]
    chunks = [chunk(1, 18 + row, [home, home + 1]) for row, home in enumerate(homes)]
    query = torch.randn(len(chunks), 4, 16)
    slots = torch.tensor([one.block_table[0] * BLOCK + one.context_len - 1 for one in chunks])
    if has_bad_padding:
        cache.heads[0][:, homes[2] * BLOCK + chunks[2].context_len] = torch.nan
    together = TorchAttention(cache, slots, chunks).attend(0, query, spec)
    for row, one in enumerate(chunks):
        alone = TorchAttention(cache, slots[row : row + 1], [one]).attend(0, query[row : row + 1], spec)
        torch.testing.assert_close(together[row], alone[0], rtol=1e-5, atol=1e-6)
