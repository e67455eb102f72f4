"""Static trees of drafts (SpecInfer, arXiv 2305.09781; Medusa, arXiv 2401.10774): which drafts a step checks. No torch.

    "[(0,), (1,), (0, 0), (0, 1)]"      as vLLM's `speculative_token_tree` and Medusa's choices are written

    known ─┬─ (0,) ─┬─ (0, 0)           each tuple is a node: the ranks of the tokens on the way to it.
           │        └─ (0, 1)           (0, 1): behind the likeliest first token, the second likeliest of the next head
           └─ (1,)

Nodes are ordered by depth, then by rank. So a parent comes before its children, and the first n nodes are a tree, too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

MAX_NODES = 64  # the drafts that a step may have
MAX_DEPTH = 16
MAX_TEXT_CHARACTERS = 8192
EXAMPLE = '"[(0,), (1,), (0, 0)]"'

_NODE = r"\((?:\d{1,2},|\d{1,2}(?:,\d{1,2})+,?)\)"
_TREE = re.compile(rf"\[{_NODE}(?:,{_NODE})*,?\]", re.ASCII)
_SPLIT_RANK = re.compile(r"\d\s+\d")  # two ranks without a comma, which would be one without the space


@dataclass(frozen=True, slots=True)
class DraftTree:
    """`nodes`: in the order above, all parents included. Equal nodes are equal trees."""

    nodes: tuple[tuple[int, ...], ...]

    @staticmethod
    def parse(text: str) -> DraftTree:
        """Read a list of tuples.

        Raises:
            ValueError: what is wrong with it, as the end of a sentence that begins with its name.
        """
        compact = "".join(text.split()) if len(text) <= MAX_TEXT_CHARACTERS else ""
        if not _TREE.fullmatch(compact) or _SPLIT_RANK.search(text):
            raise ValueError(
                f"is {text!r:.200}; it must be a list of tuples of ranks, such as {EXAMPLE}, each rank 0 to 99"
            )
        nodes = sorted(
            (tuple(int(one) for one in re.findall(r"\d+", node)) for node in re.findall(_NODE, compact)),
            key=_by_depth,
        )
        known = {*nodes}
        if len(nodes) > MAX_NODES or len(nodes[-1]) > MAX_DEPTH:
            raise ValueError(
                f"has {len(nodes)} nodes, the deepest {len(nodes[-1])} levels down; there may be {MAX_NODES} nodes on "
                f"{MAX_DEPTH} levels"
            )
        for before, node in zip([(), *nodes], nodes, strict=False):
            if before == node:
                raise ValueError(f"has the node {node} twice; name it once")
            if len(node) > 1 and node[:-1] not in known:
                raise ValueError(f"has the node {node}, but not {node[:-1]}, which comes before it; add that one")
        return DraftTree(tuple(nodes))

    @staticmethod
    def chain(num_drafts: int) -> DraftTree:
        """The likeliest token on each level."""
        return DraftTree(tuple((0,) * depth for depth in range(1, num_drafts + 1)))

    @property
    def num_levels(self) -> int:
        return len(self.nodes[-1])

    @property
    def parents(self) -> tuple[int, ...]:
        """The index of each node's parent; -1: it follows the known tokens."""
        return _parents(self.nodes)

    def num_nodes(self, num_levels: int, most: int) -> int:
        """How many nodes the first levels have, the last of them cut so that there are at most `most`."""
        return min(most, sum(len(node) <= num_levels for node in self.nodes))

    def levels_of(self, num_nodes: int) -> int:
        """On how many levels the first nodes are, as many as there are up to `num_nodes`."""
        return len(self.nodes[min(num_nodes, len(self.nodes)) - 1]) if num_nodes > 0 else 0

    def path(self, node: int) -> list[int]:
        """The indices of the nodes from the first level to `node`; of -1 none."""
        found = []
        while node >= 0:
            found.append(node)
            node = self.parents[node]
        return found[::-1]

    def accepted(self, drafts: Sequence[int], draws: Sequence[int | None]) -> list[int]:
        """The indices of the drafts that stand, one per level.

        Args:
            drafts: tokens of the first nodes.
            draws: the token that comes behind the known tokens, then behind each of the drafts.
        """
        found: list[int] = []
        node, parents = -1, self.parents
        for child, draft in enumerate(drafts):  # ordered by depth: a child comes behind its parent
            if parents[child] == node and draft == draws[node + 1]:
                found.append(child)
                node = child
        return found


def depths(parents: Sequence[int]) -> list[int]:
    """On which level each node is, from 1 on."""
    found: list[int] = []
    for parent in parents:
        found.append(1 if parent < 0 else found[parent] + 1)
    return found


def _by_depth(node: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    return len(node), node


@lru_cache(maxsize=32)
def _parents(nodes: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    index_of = {node: index for index, node in enumerate(nodes)}
    return tuple(index_of.get(node[:-1], -1) for node in nodes)
