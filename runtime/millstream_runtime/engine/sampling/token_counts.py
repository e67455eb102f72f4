"""Which tokens each request has, and how often its answer has them: kept on the device for the penalties.

    ids     [num_chunks, 256] int64      request A: chunks 0, 3     request B: chunk 1     free: 2, ...
    counts  [num_chunks, 256] int32

Each entry says "this request has token `ids`, `counts` times in its answer" (0: only in its prompt), and it is true of
every entry: what is not filled yet repeats another entry. So nothing needs to know how many are filled, and a token
that comes up again gets a second entry: entries of equal tokens are equal, and writing both to a logit is writing one.

A sampled token is counted on the device by the step that samples it, so the next step may be launched before the host
has read it. Memory and time follow the tokens that the requests have, not the vocabulary: 12 bytes per token, where its
keys and values take thousands. (vLLM counts over the whole vocabulary: on a CPU that is 5 to 30 times as slow, see
`benchmarks/penalties.py`.)

Requests are identified by `owner` and number of tokens. A row that another request had, or that this one had before a
preemption, is loaded anew from the host.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from millstream_runtime.engine.transfer import on_device

CHUNK_ENTRIES = 256
LEAST_CHUNKS = 8


class History(NamedTuple):
    """The tokens of a penalised request before the one that is sampled."""

    row: int  # of the batch; a request keeps it while steps of it are in flight
    owner: int  # different for every request of an engine
    token_ids: Seq[int]  # prompt and answer; the last of them may be unread
    num_prompt_tokens: int
    counts_prompt: bool  # whether a token of the prompt is penalised (repetition penalty)
    drafts: Seq[int] | None = None  # of a row of a check: the drafts before its token; see `checked_counts`


@dataclass(slots=True)
class _Row:
    owner: int
    num_tokens: int  # of the request, counted so far
    num_entries: int
    chunks: list[int] = field(default_factory=list)


class CountedRows:
    """The entries of `P` requests of one step."""

    def __init__(
        self, ids: Tensor, counts: Tensor, chunks: Tensor, places: Tensor, last: Tensor, num_rows: int
    ) -> None:
        """`ids`, `counts`: of all requests. `chunks` `[C]`: those of this step's. `places` `[C]`: which of the `P`.
        `last` `[P]`: the flat index of the entry for the next token."""
        self._all_ids, self._all_counts, self._chunks, self._last = ids, counts, chunks, last
        self._num_rows = num_rows
        self.places = places
        self.ids = ids.index_select(0, chunks)  # [C, 256]
        self.counts = counts.index_select(0, chunks)  # [C, 256]

    def add(self, tokens: Tensor) -> None:
        """Count `tokens` `[P]` int64. A negative one, which stands for NaN, ends its request: any count will do."""
        same = self.ids == tokens.index_select(0, self.places)[:, None]
        counts = self.counts + same
        most = torch.where(same, counts, 1).amax(dim=1)
        count = torch.ones(self._num_rows, dtype=torch.int32, device=tokens.device)
        count.scatter_reduce_(0, self.places, most, "amax")
        self._all_counts.index_copy_(0, self._chunks, counts)
        self._all_counts.view(-1).index_copy_(0, self._last, count)
        self._all_ids.view(-1).index_copy_(0, self._last, tokens.clamp(min=0))


class TokenCounts:
    """Entries of all penalised requests of a batch."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.device = self._device = device
        self._ids = torch.zeros(0, CHUNK_ENTRIES, dtype=torch.int64, device=device)
        self._counts = torch.zeros(0, CHUNK_ENTRIES, dtype=torch.int32, device=device)
        self._rows: list[_Row | None] = [None] * num_rows
        self._free: list[int] = []

    @property
    def num_bytes(self) -> int:
        """Device memory of all entries, free ones included."""
        return self._ids.nbytes + self._counts.nbytes

    def select(self, histories: Seq[History]) -> CountedRows:
        """The entries of a step's requests, brought up to date, with room for one more token each."""
        stale = [one for one in histories if not self._is_current(one)]
        for one in stale:
            self._release(one.row)
        busy = {one.row for one in histories}
        if stale:
            self._load(stale, busy)
        self._make_room([one.row for one in histories], busy)
        rows = [self._row(one.row) for one in histories]
        chunks = [chunk for row in rows for chunk in row.chunks]
        places = [place for place, row in enumerate(rows) for _ in row.chunks]
        last = [_flat(row) for row in rows]
        for row in rows:
            row.num_entries += 1
            row.num_tokens += 1
        at = on_device([chunks, places], self._device)
        return CountedRows(self._ids, self._counts, at[0], at[1], on_device(last, self._device), len(rows))

    def _is_current(self, history: History) -> bool:
        row = self._rows[history.row]
        return row is not None and row.owner == history.owner and row.num_tokens == len(history.token_ids)

    def _row(self, row: int) -> _Row:
        found = self._rows[row]
        if found is None:
            raise RuntimeError(f"row {row} has no token counts")
        return found

    def _load(self, histories: list[History], busy: set[int]) -> None:
        """Copy the tokens of requests from the host, which has read them all."""
        entries = [count_entries(one) for one in histories]
        for one, counted in zip(histories, entries, strict=True):
            chunks = self._allocate(len(counted) // CHUNK_ENTRIES + 1, busy)  # room for the next token
            self._rows[one.row] = _Row(one.owner, len(one.token_ids), len(counted), chunks)
        ids: list[int] = []
        counts: list[int] = []
        for one, counted in zip(histories, entries, strict=True):
            # Token 0 is not in an empty answer, whose prompt does not count: so this is true, too.
            filler = next(iter(counted.items()), (0, 0))
            missing = len(self._row(one.row).chunks) * CHUNK_ENTRIES - len(counted)
            ids += [*counted, *([filler[0]] * missing)]
            counts += [*counted.values(), *([filler[1]] * missing)]
        places = on_device([chunk for one in histories for chunk in self._row(one.row).chunks], self._device)
        self._ids.index_copy_(0, places, on_device(ids, self._device).view(-1, CHUNK_ENTRIES))
        self._counts.index_copy_(0, places, on_device(counts, self._device, torch.int32).view(-1, CHUNK_ENTRIES))

    def _make_room(self, rows: list[int], busy: set[int]) -> None:
        full = [self._row(row) for row in rows]
        full = [row for row in full if row.num_entries == len(row.chunks) * CHUNK_ENTRIES]
        if not full:
            return
        for row in full:
            row.chunks += self._allocate(1, busy)
        new, first = on_device([[row.chunks[-1] for row in full], [row.chunks[0] for row in full]], self._device)
        for table in (self._ids, self._counts):
            table.index_copy_(0, new, table.index_select(0, first)[:, :1].expand(-1, CHUNK_ENTRIES))

    def _allocate(self, num_chunks: int, busy: set[int]) -> list[int]:
        """Free chunks; first those of rows that are not in this step, then new ones."""
        if len(self._free) < num_chunks:
            for row in range(len(self._rows)):
                if row not in busy:
                    self._release(row)
        if len(self._free) < num_chunks:
            self._grow(num_chunks - len(self._free))
        return [self._free.pop() for _ in range(num_chunks)]

    def _grow(self, num_chunks: int) -> None:
        there = len(self._ids)
        more = max(num_chunks, there // 2, LEAST_CHUNKS)
        self._ids = torch.cat([self._ids, self._ids.new_zeros(more, CHUNK_ENTRIES)])
        self._counts = torch.cat([self._counts, self._counts.new_zeros(more, CHUNK_ENTRIES)])
        self._free += range(there + more - 1, there - 1, -1)

    def _release(self, row: int) -> None:
        found, self._rows[row] = self._rows[row], None
        if found is not None:
            self._free += found.chunks


def _flat(row: _Row) -> int:
    chunk, entry = divmod(row.num_entries, CHUNK_ENTRIES)
    return row.chunks[chunk] * CHUNK_ENTRIES + entry


def count_entries(history: History) -> dict[int, int]:
    """Each token, and how often the answer has it."""
    known = history.token_ids
    counted = dict.fromkeys(known[: history.num_prompt_tokens], 0) if history.counts_prompt else {}
    for token_id in known[history.num_prompt_tokens :]:
        counted[token_id] = counted.get(token_id, 0) + 1
    if any(token_id < 0 for token_id in counted):
        raise RuntimeError("a token that is not read cannot be counted from the host")
    return counted
