"""Which layers share a block table, and what a request takes of the pool."""

from __future__ import annotations

import pytest

from millstream_runtime.kv_layout import (
    MOST_GROUPS,
    KVLayout,
    RequestBlocks,
    choose_layout,
    group_layers,
    longest_window,
    one_group,
)


@pytest.mark.parametrize(
    ("windowed", "full", "groups", "layers_per_group"),
    [(13, 13, 2, 13), (12, 12, 2, 12), (22, 4, 7, 4), (40, 8, 6, 8), (52, 10, 7, 10), (5, 1, 6, 1), (30, 1, 7, 5)],
    ids=["gemma-2-2b", "gpt-oss-20b", "gemma-3-1b", "gemma-3-12b", "gemma-3-27b", "five to one", "many to one"],
)
def test_groups_have_equally_many_layers_and_every_layer_a_place(
    windowed: int, full: int, groups: int, layers_per_group: int
) -> None:
    windows = [512] * windowed + [None] * full
    layout = group_layers(windows, 8192)
    assert (layout.num_groups, layout.layers_per_group) == (groups, layers_per_group)
    assert layout.num_groups <= MOST_GROUPS
    places = list(zip(layout.group_of, layout.place_of, strict=True))
    assert len(set(places)) == len(windows), "two layers would write to one place"
    assert max(layout.place_of) < layers_per_group
    assert [layout.windows[group] for group in layout.group_of] == windows
    assert layout.windows[-1] is None


@pytest.mark.parametrize("windows", [[512] * 4, [None] * 4, [512, None, 512, None]])
def test_a_model_has_one_group_where_all_layers_see_the_same(windows: list[int | None]) -> None:
    layout = group_layers(windows, 256 if None in windows else 8192)
    assert (layout.num_groups, layout.layers_per_group) == (1, 4)
    assert layout.windows == (512 if None not in windows else None,)


def chosen(windows: list[int | None], max_model_len: int, chunk_tokens: int, is_grouped: bool | None = None) -> int:
    """The number of groups of a model with these layers."""
    layout = choose_layout(
        windows,
        len(windows),
        max_model_len=max_model_len,
        block_size_tokens=16,
        max_num_batched_tokens=chunk_tokens,
        is_grouped=is_grouped,
    )
    return layout.num_groups


def test_groups_are_chosen_where_the_longest_request_takes_less_memory() -> None:
    mixed: list[int | None] = [512] * 5 + [None]
    assert chosen(mixed, 8192, 2048) == 6
    assert chosen(mixed, 2048, 2048) == 1, "a windowed layer holds its window and a chunk: as much as all"
    assert chosen(mixed, 8192, 8192) == 1
    assert chosen(mixed, 2048, 2048, is_grouped=True) == 6
    assert chosen(mixed, 8192, 2048, is_grouped=False) == 1
    assert chosen([512] * 6, 8192, 2048) == chosen([None] * 6, 8192, 2048) == chosen([], 8192, 2048) == 1


def test_a_model_with_one_kind_of_layers_keeps_the_layout_that_it_had() -> None:
    for windows in ([4096] * 4, [None] * 4):
        for max_model_len in (2048, 32768):
            layout = choose_layout(
                windows,
                4,
                max_model_len=max_model_len,
                block_size_tokens=16,
                max_num_batched_tokens=2048,
                is_grouped=None,
            )
            assert layout == one_group(4, longest_window(windows))


@pytest.mark.parametrize("windows", [(None,), (40,), (40, None), (20, 70, None)])
def test_the_longest_request_is_the_last_that_fits(windows: tuple[int | None, ...]) -> None:
    held = RequestBlocks(group_of_each(windows), 16, 32)
    for num_blocks in range(60):
        longest = held.longest_request(num_blocks, 500)
        assert longest == max(tokens for tokens in range(501) if held.most(tokens) <= num_blocks)
        assert held.settled(longest) <= held.most(longest)


def group_of_each(windows: tuple[int | None, ...]) -> KVLayout:
    return KVLayout(windows, tuple(range(len(windows))), (0,) * len(windows), 1)
