"""Groups of layers that share one pool of KV blocks (vLLM's hybrid KV cache manager), and what a request takes of it.

Layers with one window form a group, or several groups of `layers_per_group` layers; so do the layers that attend to all
tokens. A sequence has a block table per group. A block holds `block_size_tokens` tokens of the layers of one group,
whichever needs it: all groups have equally many layers, so a block has the same bytes in each, and the pool is counted
in blocks alone. What a windowed group has passed is free for the others.

    26 layers, every second one windowed: 2 groups of 13         a block of 13 layers, half as large as one of 26
    tensor 0    layer 0 of the windowed group and layer 0 of the full group, in different blocks
    tensor 1    layer 1 of either ...

Where the numbers of layers do not divide, the last group of a kind has tensors that it does not use.

The planner counts with it what the engine allocates, so it imports nothing but the standard library.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

# Planning a step costs as much again for each group.
MOST_GROUPS = 8
# The last two computed tokens may be of steps that are not read yet. If these gave NaN, their blocks must still be held
# by the sequence to be zeroed.
LEAST_WINDOW_TOKENS = 3
# More blocks than a device can use well would only make their bookkeeping slow: 4 million tokens in blocks of 16.
MOST_BLOCKS = 1 << 18


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Where the keys and values of each layer are kept.

    Attributes:
        windows: of each group, in tokens; ascending, None (all tokens) last.
        group_of: of each layer.
        place_of: of each layer, its tensor among `layers_per_group`.
        layers_per_group: tensors of the pool.
    """

    windows: tuple[int | None, ...]
    group_of: tuple[int, ...]
    place_of: tuple[int, ...]
    layers_per_group: int

    @property
    def num_groups(self) -> int:
        """Block tables of a sequence."""
        return len(self.windows)


def one_group(num_layers: int, window_tokens: int | None) -> KVLayout:
    """All layers in one group. `window_tokens`: of the layer that reads furthest back; None: it reads all."""
    return KVLayout((window_tokens,), (0,) * num_layers, tuple(range(num_layers)), num_layers)


def group_layers(windows: Sequence[int | None], max_model_len: int) -> KVLayout:
    """Group layers by their window, which is None where it never ends within `max_model_len` tokens."""
    kinds = [None if one is None or one >= max_model_len else one for one in windows]
    counts = Counter(kinds)
    ascending = sorted(counts, key=lambda one: (one is None, one or 0))
    if len(ascending) == 1 or len(ascending) > MOST_GROUPS:
        limited = [one for one in kinds if one is not None]
        return one_group(len(kinds), max(limited) if len(limited) == len(kinds) else None)
    size = _layers_per_group([counts[kind] for kind in ascending])
    first_group: dict[int | None, int] = {}
    group_windows: list[int | None] = []
    for kind in ascending:
        first_group[kind] = len(group_windows)
        group_windows += [kind] * -(-counts[kind] // size)
    seen: Counter[int | None] = Counter()
    group_of, place_of = [], []
    for kind in kinds:
        group_of.append(first_group[kind] + seen[kind] // size)
        place_of.append(seen[kind] % size)
        seen[kind] += 1
    return KVLayout(tuple(group_windows), tuple(group_of), tuple(place_of), size)


def _layers_per_group(counts: Sequence[int]) -> int:
    """The size that wastes least of a long request, which fills the last kind's groups alone, and of a short one, which
    fills all alike. `counts`: layers of each kind, those that read furthest back last."""

    def share_used(size: int) -> float:
        groups = [-(-count // size) for count in counts]
        return groups[-1] * size / counts[-1] + sum(groups) * size / sum(counts)

    sizes = range(1, max(counts) + 1)
    fit = [size for size in sizes if sum(-(-count // size) for count in counts) <= MOST_GROUPS]
    return min(fit, key=lambda size: (share_used(size), -size))


def longest_window(windows: Sequence[int | None]) -> int | None:
    """The window of the layer that reads furthest back, by layer; None where one reads all, or there are no windows."""
    limited = [one for one in windows if one is not None]
    return max(limited) if limited and len(limited) == len(windows) else None


def choose_layout(
    windows: Sequence[int | None],
    num_layers: int,
    *,
    max_model_len: int,
    block_size_tokens: int,
    max_num_batched_tokens: int,
    is_grouped: bool | None,
) -> KVLayout:
    """Return one group of all layers, or one for each kind of layers where the model mixes windows.

    Args:
        windows: by layer; () where no layer has one.
        is_grouped: what was asked for. None: groups where a request of `max_model_len` holds less memory in them.
    """
    single = one_group(num_layers, longest_window(windows))
    if not windows or is_grouped is False:
        return single
    grouped = group_layers(windows, max_model_len)
    if is_grouped:
        return grouped
    if grouped.num_groups == 1:
        return single
    grouped_size, single_size = (
        RequestBlocks(layout, block_size_tokens, max_num_batched_tokens).most(max_model_len) * layout.layers_per_group
        for layout in (grouped, single)
    )
    return grouped if grouped_size < single_size else single


@dataclass(frozen=True, slots=True)
class RequestBlocks:
    """The blocks that a request holds, of all groups together.

    Attributes:
        lookahead_tokens: what a step may compute, `max_num_batched_tokens`. With several groups, a windowed one has
            places for its window and so many tokens, not for the whole prompt.
    """

    layout: KVLayout
    block_size_tokens: int
    lookahead_tokens: int

    def most(self, num_tokens: int) -> int:
        """What a request of `num_tokens` holds at any time, at most."""
        return self._sum(num_tokens, self.lookahead_tokens)

    def settled(self, num_tokens: int) -> int:
        """What it holds behind its prompt, at most: windowed groups hold their window and the block being filled."""
        return self._sum(num_tokens, 1)

    def longest_request(self, num_blocks: int, max_model_len: int) -> int:
        """The tokens of the longest request that a pool of so many blocks holds; 0 where not one token fits."""
        return bisect.bisect_right(range(max_model_len + 1), num_blocks, lo=1, key=self.most) - 1

    def tokens(self, num_blocks: int, max_model_len: int) -> int:
        """What the pool holds of requests of `max_model_len` tokens, in tokens."""
        if self.layout.num_groups == 1:
            return num_blocks * self.block_size_tokens
        return num_blocks * max_model_len // self.most(max_model_len)

    def _sum(self, num_tokens: int, lookahead_tokens: int) -> int:
        lookahead = None if self.layout.num_groups == 1 else lookahead_tokens
        return sum(
            held_blocks_limit(num_tokens, self.block_size_tokens, window, lookahead) for window in self.layout.windows
        )


def held_blocks_limit(
    num_tokens: int, block_size_tokens: int, window_tokens: int | None, lookahead_tokens: int | None
) -> int:
    """Blocks that a sequence of `num_tokens` holds at most at any time in one group of layers.

    A windowed group sets whole blocks of lookahead aside, and neither their end nor the window's start need be where a
    block ends.
    """
    all_blocks = -(-num_tokens // block_size_tokens)
    if window_tokens is None or lookahead_tokens is None:
        return all_blocks
    lookahead_blocks = -(-lookahead_tokens // block_size_tokens)
    window_blocks = -(-(max(window_tokens, LEAST_WINDOW_TOKENS) - 1) // block_size_tokens) + 1
    return min(all_blocks, window_blocks + lookahead_blocks)
