"""The token sampled last for each row of the batch, kept on the device.

The next step of a sequence needs that token as input, and need not wait until the host has read it: it is gathered
here, by row. (As in mini-sglang's overlap loop and vLLM's asynchronous scheduling.)
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch
from torch import Tensor

from millstream_runtime.engine.transfer import on_device


class UnreadInputs(NamedTuple):
    """Tokens of a step that only the device has: their indices among the step's tokens, and the rows they are of."""

    places: list[int]
    rows: list[int]


class LastTokens:
    """`[num_rows]` int64."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self._tokens = torch.zeros(num_rows, dtype=torch.int64, device=device)

    def keep(self, rows: Seq[int], tokens: Tensor) -> None:
        """Store `tokens` `[len(rows)]` int64, sampled for `rows`.

        -1, which stands for NaN, becomes 0: the sequence ends, but the step after may be launched already, and it must
        look up some token.
        """
        self._tokens.index_copy_(0, on_device(rows, tokens.device), tokens.clamp(min=0))

    def fill(self, token_ids: Tensor, unread: UnreadInputs) -> None:
        """Put the unread tokens into a step's `token_ids` `[T]` int64, in place."""
        if unread.places:
            places, rows = on_device([unread.places, unread.rows], token_ids.device)
            token_ids.index_copy_(0, places, self._tokens.index_select(0, rows))
