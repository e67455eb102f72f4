"""The rows of a step, a token each: which tokens they are, which only the device knows, and whose logits are read."""

from __future__ import annotations

from typing import NamedTuple

from millstream_runtime.engine.sampling import logprobs
from millstream_runtime.engine.scheduling.sequence import Sequence
from millstream_runtime.engine.scheduling.step_plan import Chunk


class SampledRow(NamedTuple):
    """A row of logits: a token of `sequence` is sampled from it, behind its known tokens and, where `num_drafts` is not
    0, behind that many drafts: all of a chain, or its path in a tree."""

    sequence: Sequence
    num_drafts: int = 0


class PromptSlab(NamedTuple):
    """Rows of a step whose logits give the probabilities of a prompt's next tokens, few enough for one product.

    `first`: the position in the sequence of the first row's token.
    """

    sequence: Sequence
    first: int
    rows: range


def tokens_of(chunks: list[Chunk]) -> list[int]:
    """The token of each row; `UNREAD` where only the device has it."""
    token_ids: list[int] = []
    for sequence, num_tokens in chunks:
        start = sequence.num_computed_tokens
        token_ids += sequence.token_ids[start : start + num_tokens]  # the drafts are behind all known tokens
        token_ids += sequence.draft_ids
    return token_ids


def unread_inputs(chunks: list[Chunk]) -> tuple[list[int], list[int]]:
    """Which of the chunks' tokens only the device has, by place and row: of decodes whose last step is not read."""
    places: list[int] = []
    rows: list[int] = []
    num_rows = 0
    for sequence, num_tokens in chunks:
        num_rows += num_tokens
        if sequence.num_unread_tokens and sequence.row is not None:
            places.append(num_rows - 1)
            rows.append(sequence.row)
    return places, rows


def rows_with_logits(chunks: list[Chunk]) -> tuple[list[PromptSlab], list[int], list[SampledRow]]:
    """Rows of the chunks, one after another: those of prompt log-probabilities, those that are sampled, for whom."""
    slabs: list[PromptSlab] = []
    last_rows: list[int] = []
    sampled: list[SampledRow] = []
    num_rows = 0
    for chunk in chunks:
        sequence = chunk.sequence
        if sequence.request.sampling.prompt_logprobs is not None:
            if not sequence.prompt_logprobs:
                sequence.prompt_logprobs.append(None)  # nothing comes before the first token
            slabs += _prompt_slabs(chunk, first_row=num_rows)
        num_rows += chunk.num_tokens
        if not chunk.samples:
            continue
        num_drafts = len(sequence.draft_ids)
        if not num_drafts:  # the most frequent case, without lists of one
            last_rows.append(num_rows - 1)
            sampled.append(SampledRow(sequence))
        else:
            last_rows += range(num_rows - 1 - num_drafts, num_rows)
            sampled += [SampledRow(sequence, before) for before in range(num_drafts + 1)]
    return slabs, last_rows, sampled


def _prompt_slabs(chunk: Chunk, first_row: int) -> list[PromptSlab]:
    """The rows of a chunk, which begins at `first_row`, whose predictions are asked for and not known yet."""
    sequence, start = chunk.sequence, chunk.sequence.num_computed_tokens
    stop = min(start + chunk.num_tokens, sequence.num_prompt_tokens - 1)
    known, step = len(sequence.prompt_logprobs) - 1, logprobs.PROMPT_SLAB_ROWS
    shift = first_row - start
    return [
        PromptSlab(sequence, first, range(first + shift, min(first + step, stop) + shift))
        for first in range(max(start, known), stop, step)
    ]
