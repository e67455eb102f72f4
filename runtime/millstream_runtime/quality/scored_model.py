"""A model that computes the logits of given tokens: the engine's own forward pass over a KV pool for one document.

    token ids ─► chunks of a step ─► Forward.residual ─► Forward.logits, a slab of rows at a time

So the figures are those of what is served: the same weights, layouts, attention and arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from millstream_runtime.config import RuntimeConfig
from millstream_runtime.engine.execution import shard
from millstream_runtime.engine.execution.forward import Forward
from millstream_runtime.engine.execution.shard_config import resolve_shard_config
from millstream_runtime.engine.execution.step_input import ChunkInput, StepInput
from millstream_runtime.job_memory.judging import CHUNK_TOKENS

SLAB_BYTES = 64 << 20  # of float32 logits at a time


class Slab(NamedTuple):
    """`logits` float32 `[rows, vocab]`; row i predicts the token at position `first + i`."""

    first: int
    logits: Tensor


class ScoredModel:
    """One model on one device. `logits` and `greedy` use the same KV pool, one after the other."""

    def __init__(self, config: RuntimeConfig) -> None:
        """Load the model; `config.max_model_len` bounds the documents.

        Raises:
            RuntimeFailure: CheckpointInvalid, UnsupportedByRuntime, InvalidConfig or OutOfMemory.
        """
        shard_config = resolve_shard_config(config)
        self._policy = shard_config.policy
        model = shard.load(config, shard_config)
        self.max_model_len = shard_config.model_config.max_model_len
        self.weights_bytes = model.weight_bytes
        self.vocab_size = shard_config.model_config.vocab_size
        self.eos_token_ids = shard_config.model_config.eos_token_ids
        self._config = shard_config.model_config
        self._num_blocks = -(-self.max_model_len // config.block_size_tokens)
        cache = shard.make_kv_cache(config, shard_config, self._num_blocks)
        self._forward = Forward(model, cache, self._policy)
        self._policy.after_loading()
        self._slab_rows = slab_rows(self.vocab_size)

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int], first: int) -> Iterator[Slab]:
        """The logits that predict `token_ids[first:]`, ascending; `first` is at least 1."""
        last = len(token_ids) - 1
        offset = self._config.rotary_offset(len(token_ids))
        for start in range(0, last, CHUNK_TOKENS):
            stop = min(start + CHUNK_TOKENS, last)
            residual = self._residual(token_ids[start:stop], stop, offset)
            for row in range(max(start, first - 1), stop, self._slab_rows):
                rows = range(row - start, min(row + self._slab_rows, stop) - start)
                self._policy.before_compute(len(rows))
                yield Slab(row + 1, self._forward.logits(residual, rows).float())

    @torch.inference_mode()
    def greedy(self, prompt_token_ids: Sequence[int], max_tokens: int) -> list[int]:
        """The greedy answer, with the end-of-sequence token if it comes within `max_tokens`."""
        known = list(prompt_token_ids)
        limit = min(len(known) + max_tokens, self.max_model_len)
        offset = self._config.rotary_offset(limit)
        num_computed = 0
        while len(known) < limit:
            for start in range(num_computed, len(known), CHUNK_TOKENS):
                num_computed = min(start + CHUNK_TOKENS, len(known))
                residual = self._residual(known[start:num_computed], num_computed, offset)
            self._policy.before_compute(1)
            known.append(int(self._forward.logits(residual, [len(residual) - 1]).argmax()))
            if known[-1] in self.eos_token_ids:
                break
        return known[len(prompt_token_ids) :]

    def _residual(self, token_ids: Sequence[int], context_len: int, rotary_offset: int) -> Tensor:
        chunk = ChunkInput(len(token_ids), context_len, rotary_offset, 0, self._num_blocks)
        self._policy.before_compute(len(token_ids))
        return self._forward.residual(StepInput(list(token_ids), [chunk], []))


def slab_rows(vocab_size: int) -> int:
    """Return how many rows of logits are computed at a time."""
    return max(1, SLAB_BYTES // (4 * vocab_size))


def with_max_model_len(config: RuntimeConfig, max_tokens: int) -> RuntimeConfig:
    """The configuration for documents of at most `max_tokens`, or of what the model takes if that is less."""
    longest = resolve_shard_config(config).model_config.max_model_len
    return replace(config, max_model_len=min(max_tokens, longest))
