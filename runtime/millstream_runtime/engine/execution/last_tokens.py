"""The token sampled last for each row of the batch, kept on the device.

The next step of a sequence needs that token as input, and need not wait until the host has read it: it is gathered
here, by row. (As in mini-sglang's overlap loop and vLLM's asynchronous scheduling.)

    rank 0    sample ── broadcast ──▶ keep      next step: fill ──▶ forward
    others              broadcast ──▶ keep                 fill ──▶ forward

Each rank has its own copy. Rank 0 samples, and a collective on the device brings the tokens to the others: it is one
more entry in the queue of each device, and no host waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from millstream_runtime.engine.execution.step_input import StepInput
from millstream_runtime.engine.transfer import on_device
from millstream_runtime.models.linear.tensor_parallel import SINGLE_PROCESS, Ranks


class LastTokens:
    """`[num_rows]` int64."""

    def __init__(self, num_rows: int, device: torch.device, ranks: Ranks = SINGLE_PROCESS) -> None:
        self._tokens = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._ranks = ranks

    def keep(self, rows: Seq[int], tokens: Tensor) -> None:
        """Store `tokens` `[len(rows)]` int64, sampled by rank 0 for `rows`, on every rank: all ranks call this or
        `receive` together.

        -1, which stands for NaN, becomes 0: the sequence ends, but the step after may be launched already, and it must
        look up some token.
        """
        self._ranks.broadcast(tokens)
        self._tokens.index_copy_(0, on_device(rows, tokens.device), tokens.clamp(min=0))

    def receive(self, rows: Seq[int]) -> None:
        """Store on a rank beyond 0 what rank 0 has sampled for `rows`."""
        self.keep(rows, self._tokens.new_empty(len(rows)))

    def fill(self, token_ids: Tensor, step: StepInput) -> None:
        """Put the unread tokens of a step into its `token_ids` `[T]` int64, in place."""
        if step.unread_places:
            places, rows = on_device([step.unread_places, step.unread_rows], token_ids.device)
            token_ids.index_copy_(0, places, self._tokens.index_select(0, rows))
