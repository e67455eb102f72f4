"""The order of a step's chunks, which decides how many calls attention takes."""

from __future__ import annotations

from collections.abc import Callable

from millstream_runtime.engine.execution.forward import Forward
from millstream_runtime.engine.scheduling.step_plan import Chunk


def order_of(forward: Forward) -> Callable[[list[Chunk]], list[Chunk]]:
    """How `forward` wants the chunks of each step ordered."""
    if forward.reads_in_place:
        return _longest_first
    return _by_kind if forward.device.type == "cpu" else _by_place


def _by_kind(chunks: list[Chunk]) -> list[Chunk]:
    """Decodes first, then checks, then prompts: each kind has its calls of attention."""
    return sorted(chunks, key=lambda chunk: (chunk.num_tokens > 1, not chunk.sequence.draft_ids))


def _by_place(chunks: list[Chunk]) -> list[Chunk]:
    """The same, each kind in the order of its places in the pool: those of one length are read as one view."""

    def key(chunk: Chunk) -> tuple[bool, bool, int]:
        return chunk.num_tokens > 1, not chunk.sequence.draft_ids, chunk.sequence.block_table[0]

    return sorted(chunks, key=key)


def _longest_first(chunks: list[Chunk]) -> list[Chunk]:
    """Decodes first, scattered ones last of these, so that FlashAttention takes the others in one call. In it the
    longest begin first, or the call would end with one of them alone on the device."""

    def key(chunk: Chunk) -> tuple[bool, bool, int]:
        sequence, num_tokens = chunk
        return num_tokens > 1, not sequence.blocks_are_contiguous, -sequence.num_computed_tokens - num_tokens

    return sorted(chunks, key=key)
