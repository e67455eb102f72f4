"""A step of decodes in tensors whose shapes depend on a bucket alone: what a CUDA graph can record and replay.

Lengths, tables and slots are numbers in persistent buffers on the device, not shapes and not Python integers. So the
same operations on the same addresses compute every step of a bucket, and nothing in them waits for the host:

    host     one pinned array:  token ids, positions, lengths, rows of the batch [4, rows]
                                per group of layers: slots, first slots [2, rows]
    device   the same in `_buffer`  ->  tables of these rows of the batch (`device_tables`, which a step brings up to
             date)  ->  blocks gathered by the tables  ->  scores masked by the lengths  ->  residual

A bucket that reads in place uses no tables and gathers nothing: each row begins at its first slot (`varlen_attention`).

Padding goes to two blocks that the pool has beyond those that requests get. A row that is only padding writes into the
*sink*, which is never read. Whatever reads beyond a request's blocks (a padded row, the end of a shorter table)
reads the *zero block*, which is never written. The mask takes these tokens out, but it does so by a weight of 0, and
0 * NaN is NaN: so padding must never name memory that holds another request's numbers, nor what padded rows made. The
rest of a request's last block may hold what an earlier owner left, so it is set to 0 in the copy.

The gather copies every key and value once, which the eager path avoids by views (`attention`). It is the price of
fixed shapes in torch; Triton's paged kernel, which reads tables and lengths on the device, takes the place of
`StaticAttention` where it was chosen (`kernel_choice`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from millstream_runtime.engine.attention import varlen_attention
from millstream_runtime.engine.attention.grouped_attention import GroupedAttention
from millstream_runtime.engine.attention.pool_attention import PoolAttention
from millstream_runtime.engine.attention.scaled_dot_product import attend_decodes, keys_values
from millstream_runtime.engine.attention.varlen_attention import PlacedSequences
from millstream_runtime.engine.execution.graphs.buckets import Bucket
from millstream_runtime.engine.execution.graphs.device_tables import DeviceTables
from millstream_runtime.engine.execution.step_input import StepInput
from millstream_runtime.engine.kernel_backends import Backend
from millstream_runtime.engine.kv.kv_cache import KVCache
from millstream_runtime.engine.transfer import staging
from millstream_runtime.models.layers.attention import Attention, AttentionSpec
from millstream_runtime.models.layers.decoder import Decoder

SHARED_VECTORS = 4  # token ids, positions, lengths, rows of the batch
GROUP_VECTORS = 2  # slots, first slots


@dataclass(frozen=True, slots=True)
class DecodeBuffers:
    """One bucket's view of what a step is filled into, for one group of layers; all int64 but the tables, int32."""

    token_ids: Tensor  # [rows]
    positions: Tensor  # [rows], rows of the rotary table
    slots: Tensor  # [rows], places in the pool of the new tokens
    lengths: Tensor  # [rows], tokens in the cache after the step, at least 1
    rows: Tensor  # [rows], of the batch
    first_slots: Tensor  # [rows], places in the pool of the first tokens
    batch_tables: Tensor  # [rows of the batch and one of padding, width]

    @property
    def tables(self) -> Tensor:
        """`[rows, width]`, gathered at each call."""
        return self.batch_tables.index_select(0, self.rows)


class StaticDecode:
    """The model's pass over a padded step of decodes: `fill` the buffers, `compute` (or replay it), read `residual`."""

    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        buckets: Iterable[Bucket],
        backend: Backend = Backend.TORCH,
        num_rows: int | None = None,
    ) -> None:
        """`cache` has padding blocks. The buffers are as large as the largest of `buckets` needs.

        `backend`: what computes attention; Triton's kernel reads tables on the device and gathers nothing. `num_rows`:
        of the batch; by default those of the largest bucket.
        """
        if cache.num_padding_blocks < KVCache.PADDING_BLOCKS:
            raise ValueError("static decodes need a pool with padding blocks")
        self._model = model
        self._backend = backend
        self._cache = cache
        self.device = cache.like.device
        sizes = list(buckets)
        num_groups = cache.layout.num_groups
        num_elements = max(_num_elements(size, num_groups) for size in sizes)
        self._buffer = torch.zeros(num_elements, dtype=torch.int64, device=self.device)
        # Blocks that every layer of a group has passed may be another's by now.
        self._windows = cache.layout.windows if num_groups > 1 else (model.config.longest_window,)
        most_rows = num_rows if num_rows is not None else max(size.rows for size in sizes)
        width = max((size.width_blocks for size in sizes if not size.in_place), default=0)
        self._tables = [DeviceTables(most_rows, width, cache.zero_block, self.device) for _ in self._windows]
        hidden, dtype = model.config.hidden_size, cache.like.dtype
        self._residual = torch.zeros(max(size.rows for size in sizes), hidden, dtype=dtype, device=self.device)

    def fill(self, bucket: Bucket, step: StepInput) -> DecodeBuffers:
        """Enqueue the copies of a step's numbers into the bucket's buffers and of what has changed of its block tables:
        the only things that differ between steps. Returns the buffers of the first group of layers.

        The step has decodes only, at most `bucket.rows` of them, none longer than `bucket.width_blocks`.
        """
        rows = [place if chunk.row is None else chunk.row for place, chunk in enumerate(step.chunks)]
        if not bucket.in_place:
            self._update_tables(rows, step)
        host = staging(_num_elements(bucket, len(self._windows)), self.device)
        for group, buffers in enumerate(_views(host, bucket, self._tables)):
            _write(buffers, rows, self._tables[group].padding_row, step, self._cache, group)
        self._buffer[: len(host)].copy_(host, non_blocking=True)
        return self._views(bucket)[0]

    def _update_tables(self, rows: list[int], step: StepInput) -> None:
        block = self._cache.block_size_tokens
        for group, (tables, window) in enumerate(zip(self._tables, self._windows, strict=True)):
            chunks = [chunk.of_group(group) for chunk in step.chunks]
            seen = [
                range(0 if window is None else max(0, one.context_len - window) // block, -(-one.context_len // block))
                for one in chunks
            ]
            tables.update(rows, chunks, seen)

    def fill_with_padding(self, bucket: Bucket) -> None:
        """A step without requests: it changes no block of a request."""
        self.fill(bucket, StepInput([], [], []))

    def compute(self, bucket: Bucket) -> None:
        """The pass itself, from the buffers into the residual buffer. No shape, address or branch depends on a step."""
        groups = self._views(bucket)
        inputs = groups[0]
        attention: Attention
        if bucket.in_place:
            attention = InPlaceAttention(self._cache, inputs, bucket.width_blocks * self._cache.block_size_tokens)
        elif len(groups) == 1:
            attention = self._attention(inputs)
        else:
            own = [self._attention(group) for group in groups]
            attention = GroupedAttention(own, self._cache.layout.group_of)
        residual = self._model.forward(inputs.token_ids, inputs.positions, attention)
        self._residual[: bucket.rows].copy_(residual)

    def _attention(self, inputs: DecodeBuffers) -> Attention:
        if self._backend is Backend.TRITON:
            from millstream_runtime.engine.attention.triton_attention import TritonStaticAttention

            return TritonStaticAttention(self._cache, inputs.slots, inputs.tables, inputs.lengths)
        return StaticAttention(self._cache, inputs)

    def residual(self, num_rows: int) -> Tensor:
        """`[num_rows, hidden]` of the pass before: a view, until the next pass."""
        return self._residual[:num_rows]

    def _views(self, bucket: Bucket) -> list[DecodeBuffers]:
        """Of each group of layers."""
        return _views(self._buffer, bucket, self._tables)


class InPlaceAttention(PoolAttention):
    """Attention of one padded step of decodes whose blocks follow one another. One object a pass."""

    def __init__(self, cache: KVCache, inputs: DecodeBuffers, max_length: int) -> None:
        super().__init__(cache, inputs.slots)
        num_rows, device = len(inputs.slots), inputs.slots.device
        self._placed = PlacedSequences(
            query_starts=torch.arange(num_rows + 1, dtype=torch.int32, device=device),
            first_slots=F.pad(inputs.first_slots, (0, 1)).int(),
            lengths=inputs.lengths.int(),
            max_queries=1,
            max_length=max_length,
        )

    def attend(self, layer: int, query: Tensor, spec: AttentionSpec) -> Tensor:
        """See `models.attention.Attention`."""
        pool = self._cache.layer(layer)
        return varlen_attention.attend(pool.in_place, query, self._placed, spec).view(query.shape[0], -1)


class _WindowPlan(NamedTuple):
    """What layers of one window gather and mask. A run is one head of a block."""

    runs: Tensor  # [rows * heads * n], of the pool
    mask: Tensor  # [rows, 1, 1, n * block], added to the scores
    last_runs: Tensor  # [rows * heads], of those gathered: the block that holds a row's last token
    stale: Tensor  # [rows, 1, block, 1], whether a token of that block lies behind the last


class StaticAttention(PoolAttention):
    """Attention of one padded step of decodes; see `models.attention.Attention`. One object a pass."""

    def __init__(self, cache: KVCache, inputs: DecodeBuffers) -> None:
        super().__init__(cache, inputs.slots)
        self._inputs = inputs
        self._plans: dict[int | None, _WindowPlan] = {}

    def attend(self, layer: int, query: Tensor, spec: AttentionSpec) -> Tensor:
        """See `models.attention.Attention`."""
        pool = self._cache.layer(layer)
        num_rows, num_heads, head_dim = query.shape
        num_pool_heads = pool.shape[0]
        num_kv_heads = 1 if spec.latent_dim else num_pool_heads // 2
        plan, block = self._plan(spec.window), self._cache.block_size_tokens
        # Every head of a block is one run of memory; they are copied as such.
        gathered = pool.runs(plan.runs, block)
        last = gathered.index_select(0, plan.last_runs).view(num_rows, num_pool_heads, block, head_dim)
        gathered.index_copy_(0, plan.last_runs, last.masked_fill_(plan.stale, 0.0).view(-1, block * head_dim))
        tokens = gathered.view(num_rows, num_pool_heads, -1, head_dim)
        grouped = query.view(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
        attended = attend_decodes(grouped, *keys_values(tokens, spec), plan.mask, spec)
        if spec.latent_dim:
            attended = attended[..., : spec.latent_dim]
        return attended.reshape(num_rows, -1)

    def _plan(self, window: int | None) -> _WindowPlan:
        """The same for all layers of a window, so the first of them makes it."""
        if window not in self._plans:
            blocks, positions = self._seen_blocks(window)
            pool, block, like = self._cache.layer(0), self._cache.block_size_tokens, self._cache.like
            heads = torch.arange(pool.shape[0], device=like.device)
            lengths = self._inputs.lengths[:, None]
            seen = positions < lengths
            if window is not None:
                seen &= positions >= lengths - window
            mask = torch.zeros(seen.shape, dtype=like.dtype, device=like.device).masked_fill_(~seen, float("-inf"))
            runs = blocks[:, None, :] + (heads * (pool.shape[1] // block))[None, :, None]  # [rows, heads, n]
            last = lengths - 1
            last_columns = (last - positions[:, :1]).div(block, rounding_mode="floor")  # [rows, 1]
            rows = torch.arange(len(lengths), device=like.device)[:, None]
            last_runs = (rows * len(heads) + heads) * blocks.shape[1] + last_columns
            stale = torch.arange(block, device=like.device) > last % block
            self._plans[window] = _WindowPlan(
                runs.flatten(), mask[:, None, None, :], last_runs.flatten(), stale[:, None, :, None]
            )
        return self._plans[window]

    def _seen_blocks(self, window: int | None) -> tuple[Tensor, Tensor]:
        """The blocks that a layer reads, `[rows, n]`, and the positions of their tokens, `[rows or 1, n * block]`.

        All of the table, or the n columns that a window may touch wherever it begins within its first block.
        """
        tables, block = self._inputs.tables, self._cache.block_size_tokens
        width = tables.shape[1]
        within = torch.arange(block, device=tables.device)
        touched = width if window is None else min(width, -(-(window - 1) // block) + 1)
        columns = torch.arange(touched, device=tables.device)[None, :]
        if window is None or touched == width:
            return tables, (columns[:, :, None] * block + within).flatten(1)
        columns = (self._inputs.lengths[:, None] - window).clamp_(min=0).div_(block, rounding_mode="floor") + columns
        # Columns beyond the table exist for no token.
        blocks = tables.gather(1, columns.clamp(max=width - 1)).masked_fill_(columns >= width, self._cache.zero_block)
        return blocks, (columns[:, :, None] * block + within).flatten(1)


def _num_elements(bucket: Bucket, num_groups: int) -> int:
    return bucket.rows * (SHARED_VECTORS + num_groups * GROUP_VECTORS)


def _views(buffer: Tensor, bucket: Bucket, tables: Sequence[DeviceTables]) -> list[DecodeBuffers]:
    """The parts of a buffer `[_num_elements]`, with the tables, for each group of layers."""
    count, stop = bucket.rows, SHARED_VECTORS * bucket.rows
    token_ids, positions, lengths, rows = buffer[:stop].view(SHARED_VECTORS, count).unbind(0)
    vectors = buffer[stop : _num_elements(bucket, len(tables))].view(len(tables), GROUP_VECTORS, count)
    width = 0 if bucket.in_place else bucket.width_blocks
    return [
        DecodeBuffers(token_ids, positions, slots, lengths, rows, first_slots, one.view(width))
        for (slots, first_slots), one in zip(vectors.unbind(0), tables, strict=True)
    ]


def _write(
    buffers: DecodeBuffers, rows: list[int], padding_row: int, step: StepInput, cache: KVCache, group: int
) -> None:
    """A step's numbers, and padding behind them, for one group of layers. `buffers`: on the host."""
    chunks, block = [chunk.of_group(group) for chunk in step.chunks], cache.block_size_tokens
    token_ids, positions, slots = buffers.token_ids.numpy(), buffers.positions.numpy(), buffers.slots.numpy()
    lengths, first_slots, of_batch = buffers.lengths.numpy(), buffers.first_slots.numpy(), buffers.rows.numpy()
    used = len(chunks)
    token_ids[used:], positions[used:], lengths[used:], of_batch[used:] = 0, 0, 1, padding_row
    slots[used:] = cache.sink_block * block
    first_slots[used:] = cache.zero_block * block
    token_ids[:used], of_batch[:used] = step.token_ids, rows
    lengths[:used] = [chunk.context_len for chunk in chunks]
    last = lengths[:used] - 1
    positions[:used] = last + np.array([chunk.rotary_offset for chunk in chunks], dtype=np.int64)
    first_slots[:used] = np.array([chunk.first_block for chunk in chunks], dtype=np.int64) * block
    last_blocks = [chunk.block_table[(chunk.context_len - 1) // block] for chunk in chunks]
    slots[:used] = np.array(last_blocks, dtype=np.int64) * block + last % block
