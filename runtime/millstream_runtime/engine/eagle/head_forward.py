"""A pass of an EAGLE head over its KV pool, with the embedding and the output head of its target."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from millstream_runtime.engine.device_policy import DevicePolicy
from millstream_runtime.engine.eagle.hidden_state_pool import HiddenStatePool
from millstream_runtime.engine.execution.pass_input import PassInput
from millstream_runtime.engine.execution.step_input import ChunkInput
from millstream_runtime.engine.kv.kv_cache import KVCache
from millstream_runtime.engine.sampling.sampler import greedy
from millstream_runtime.engine.transfer import on_device
from millstream_runtime.models.eagle.heads import DraftHead
from millstream_runtime.models.layers.decoder import Decoder


class HeadForward:
    """See above. The blocks of its pool are the slots of the target's pool: chunks name slots."""

    def __init__(
        self,
        head: DraftHead,
        target: Decoder,
        states: HiddenStatePool,
        cache: KVCache,
        policy: DevicePolicy,
        longest_window: int | None,
    ) -> None:
        """`states`: the target's. `longest_window`: no layer reads further back; None: no bound."""
        self.head, self.longest_window = head, longest_window
        self._target, self._states, self._cache = target, states, cache
        self._pass_input = PassInput(cache, policy, longest_window=longest_window)

    def target_states(self, slots: list[int]) -> Tensor:
        """Of the target's tokens in these slots, as the head reads them: `[len(slots), hidden]`."""
        return self.head.read_states(self._target, self._states.read(slots))

    def forward(self, token_ids: list[int], states: Tensor, chunks: Sequence[ChunkInput]) -> Tensor:
        """Return the states of the chunks' tokens `[T, hidden]`. `states` `[T, hidden]`: of the tokens before them."""
        tensors = self._pass_input.of(token_ids, chunks)
        embedded = self._target.embed(tensors.token_ids)
        return self.head.forward(embedded, states, tensors.positions, tensors.attention)

    def tokens(self, states: Tensor) -> list[int]:
        """`[rows, hidden]` of `forward` to the most probable token of each; -1 where it is not finite."""
        found, ids = greedy(self.head.logits(self._target, states)), self.head.token_ids
        return found if ids is None else [ids[token] if token >= 0 else token for token in found]

    def most_probable(self, states: Tensor, count: int) -> list[list[int]]:
        """The same, the `count` most probable tokens of each, the first before the second."""
        logits, ids = self.head.logits(self._target, states), self.head.token_ids
        highest, ranked = logits.topk(count, dim=-1)  # NaN is higher than any number
        found: list[list[int]] = torch.where(highest[:, :1].isfinite(), ranked, -1).tolist()
        return found if ids is None else [[ids[token] if token >= 0 else token for token in row] for row in found]

    def rows(self, states: Tensor, rows: Sequence[int]) -> Tensor:
        """Some rows of `[T, hidden]`."""
        return states[on_device(rows, states.device)]

    def zero_slots(self, slots: list[int]) -> None:
        """Zero keys and values, before another request gets them."""
        self._cache.zero_blocks(slots)
