"""Groups of layers that share one pool of KV blocks (vLLM's hybrid KV cache manager). Pure: no torch.

Layers with one window form a group, or several groups of `layers_per_group` layers; so do the layers that attend to all
tokens. A sequence has a block table per group. A block holds `block_size_tokens` tokens of the layers of one group,
whichever needs it: all groups have equally many layers, so a block has the same bytes in each, and the pool is counted
in blocks alone. What a windowed group has passed is free for the others.

    26 layers, every second one windowed: 2 groups of 13         a block of 13 layers, half as large as one of 26
    tensor 0    layer 0 of the windowed group and layer 0 of the full group, in different blocks
    tensor 1    layer 1 of either ...

Where the numbers of layers do not divide, the last group of a kind has tensors that it does not use.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

# Planning a step costs as much again for each group.
MOST_GROUPS = 8


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
