"""Token counts for the rows of a check: the tokens that a request has, and the drafts before the row.

    row 0    known tokens                      counted from the host, once per request
    row 1    known tokens, draft 1             the same and one more
    row 2    known tokens, draft 1, draft 2

Most drafts may fall, so nothing of it is kept on the device: the request's row of `TokenCounts` is loaded anew when it
is needed again.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from millstream_runtime.engine.sampling.token_counts import (
    CHUNK_ENTRIES,
    CountedRows,
    History,
    TokenCounts,
    count_entries,
)
from millstream_runtime.engine.transfer import on_device


def select(counts: TokenCounts, histories: Seq[History]) -> CountedRows | CheckedRows:
    """Return the entries of a step's penalised rows, in their order."""
    kept = [place for place, history in enumerate(histories) if history.drafts is None]
    if len(kept) == len(histories):
        return counts.select(histories)
    counted = counts.select([histories[place] for place in kept]) if kept else None
    checks = [(place, history) for place, history in enumerate(histories) if history.drafts is not None]
    return CheckedRows(counted, kept, checks, counts.device)


class CheckedRows:
    """As `CountedRows`, for a step in which some rows, or all, are of checks."""

    def __init__(
        self, counted: CountedRows | None, kept: list[int], checks: Seq[tuple[int, History]], device: torch.device
    ) -> None:
        """`kept`: the places of the rows of `counted`. `checks`: the places and histories of the others."""
        self._counted, self._kept = counted, kept
        ids, amounts, places = _chunks(checks)
        self.ids = on_device(ids, device).view(-1, CHUNK_ENTRIES)
        self.counts = on_device(amounts, device, torch.int32).view(-1, CHUNK_ENTRIES)
        self.places = on_device(places, device)
        if counted is not None:
            at = on_device(kept, device).index_select(0, counted.places)
            self.ids = torch.cat([counted.ids, self.ids])
            self.counts = torch.cat([counted.counts, self.counts])
            self.places = torch.cat([at, self.places])

    def add(self, tokens: Tensor) -> None:
        """Count the sampled tokens of the rows that are of no check. `tokens`: `[P]` int64, of all rows."""
        if self._counted is not None:
            self._counted.add(tokens.index_select(0, on_device(self._kept, tokens.device)))


def _chunks(checks: Seq[tuple[int, History]]) -> tuple[list[int], list[int], list[int]]:
    """Token ids and counts of all rows, each padded to whole chunks, and the place of each chunk's row."""
    ids: list[int] = []
    amounts: list[int] = []
    places: list[int] = []
    known: dict[int, dict[int, int]] = {}  # by request
    for place, history in checks:
        if history.owner not in known:
            known[history.owner] = count_entries(history)
        counted = known[history.owner].copy()
        for token_id in history.drafts or ():
            counted[token_id] = counted.get(token_id, 0) + 1
        num_chunks = max(1, -(-len(counted) // CHUNK_ENTRIES))
        # As in `TokenCounts`: what is left of a chunk repeats an entry, and an empty answer does not have token 0.
        filler, missing = next(iter(counted.items()), (0, 0)), num_chunks * CHUNK_ENTRIES - len(counted)
        ids += [*counted, *([filler[0]] * missing)]
        amounts += [*counted.values(), *([filler[1]] * missing)]
        places += [place] * num_chunks
    return ids, amounts, places
