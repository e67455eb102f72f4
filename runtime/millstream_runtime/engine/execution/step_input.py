"""What one step computes, as plain data: all that the model needs to know of requests. No torch.

With several ranks it is also the message that rank 0 sends before each step, so it is small: a token id for each new
token and a few numbers per request. Positions and slots in the KV pool follow from those.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from millstream_runtime.engine.execution.graphs.buckets import Bucket


class BlockRun(msgspec.Struct, frozen=True, array_like=True):
    """The block table of one sequence in a group of layers beyond the first."""

    first_block: int
    num_blocks: int
    scattered_blocks: list[int] | None = None


class ChunkInput(msgspec.Struct, frozen=True, array_like=True):
    """`num_tokens` new tokens of one sequence, the last of `context_len` that are in the cache after the step.

    `num_drafts` of them, the last, are drafts: the chunk is a check. `parents`: see `AttentionChunk`.
    `num_read_rows`: how many of its last rows are read behind the last layer; None: all.
    """

    num_tokens: int
    context_len: int
    rotary_offset: int  # see ModelConfig.rotary_offset
    first_block: int
    num_blocks: int
    scattered_blocks: list[int] | None = None  # None: each block follows the one before it, as nearly always
    other_tables: list[BlockRun] = []
    num_drafts: int = 0
    parents: tuple[int, ...] = ()
    row: int | None = None  # of the batch, which the sequence keeps while it runs; None: it has none
    owner: tuple[int, int] | None = None  # of the block table: while they are the same, it has only grown
    num_read_rows: int | None = None

    def of_group(self, group: int) -> ChunkInput:
        """The same tokens with the block table of a group of layers."""
        if group == 0:
            return self
        run = self.other_tables[group - 1]
        return ChunkInput(
            self.num_tokens,
            self.context_len,
            self.rotary_offset,
            run.first_block,
            run.num_blocks,
            run.scattered_blocks,
            num_drafts=self.num_drafts,
            parents=self.parents,
            row=self.row,
            owner=self.owner,
            num_read_rows=self.num_read_rows,
        )

    @property
    def num_unread_rows(self) -> int:
        return 0 if self.num_read_rows is None else self.num_tokens - self.num_read_rows

    @property
    def block_table(self) -> Sequence[int]:
        if self.scattered_blocks is not None:
            return self.scattered_blocks
        return range(self.first_block, self.first_block + self.num_blocks)

    @property
    def is_contiguous(self) -> bool:
        return self.scattered_blocks is None


class StepInput(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One forward pass, and the calls of the output head after it."""

    token_ids: list[int]  # of all chunks, one after another
    chunks: list[ChunkInput]  # decodes first, then checks, then prompts
    logits_rows: list[list[int]]  # for each call of the head its rows of the residual stream, ascending
    # Where steps overlap, rows of the batch (`last_tokens`): those whose last token is only on the device, and the
    # places of these tokens in `token_ids`; and those that the sampled tokens are for.
    unread_places: list[int] = []
    unread_rows: list[int] = []
    kept_rows: list[int] = []
    bucket: Bucket | None = None  # of the graph that every rank replays; None: the step is eager

    @property
    def reads_all_rows(self) -> bool:
        """Whether the last layer computes all rows. A graph does, and so does a step whose rows are all read.

        A prompt's last row attends as a decode where others are left out. So how many a step leaves out may not decide:
        they are other requests' rows, too, and would change the last bits of this one's logits.
        """
        return self.bucket is not None or not any(chunk.num_unread_rows for chunk in self.chunks)

    @property
    def last_layer_rows(self) -> list[int] | None:
        """The rows that the last layer computes, ascending; None: all."""
        if self.reads_all_rows:
            return None
        rows: list[int] = []
        stop = 0
        for chunk in self.chunks:
            start, stop = stop + chunk.num_unread_rows, stop + chunk.num_tokens
            rows += range(start, stop)
        return rows

    @property
    def head_rows(self) -> list[list[int]]:
        """`logits_rows` as rows of what the last layer computes."""
        rows = self.last_layer_rows
        if rows is None:
            return self.logits_rows
        places = {row: place for place, row in enumerate(rows)}
        return [[places[row] for row in call] for call in self.logits_rows]


class ZeroBlocks(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Zero these KV blocks: a request met numbers that are not finite."""

    blocks: list[int]
