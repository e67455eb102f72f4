"""What attention knows of a sequence in one step."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionChunk:
    """`num_tokens` new tokens of one sequence, the last of `context_len` cached ones.

    `num_drafts` of them, the last, are drafts: the chunk is a check. `parents`: of each draft the draft before it, -1
    where it follows the known tokens; () where each follows the one before it. See `draft_tree`.
    """

    num_tokens: int
    context_len: int
    block_table: Seq[int]
    is_contiguous: bool  # whether each block of the table follows the one before it
    num_drafts: int = 0
    parents: tuple[int, ...] = ()
