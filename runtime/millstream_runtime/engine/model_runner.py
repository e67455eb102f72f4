"""One step on the device: chunks -> input tensors -> forward -> sampled tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from millstream_runtime.engine import logprobs
from millstream_runtime.engine.attention import AttentionChunk, TorchAttention
from millstream_runtime.engine.kv_cache import KVCache
from millstream_runtime.engine.request import TokenLogprobs
from millstream_runtime.engine.sampler import SamplingRow, greedy, sample
from millstream_runtime.engine.scheduler import Chunk
from millstream_runtime.engine.sequence import Sequence
from millstream_runtime.models.decoder import Decoder


class Sampled(NamedTuple):
    """A sequence's next token; `token_id` is None where its logits were not finite."""

    token_id: int | None
    logprobs: TokenLogprobs | None = None


class ModelRunner:
    """Owner of the model and of the KV pool. The device is read once a step, when the tokens come back."""

    def __init__(self, model: Decoder, cache: KVCache, device: torch.device, eos_token_ids: frozenset[int]) -> None:
        self._model = model
        self._cache = cache
        self._device = device
        # A checkpoint may name an end-of-sequence token that its vocabulary lacks: it can never come up.
        self._eos_token_ids = frozenset(one for one in eos_token_ids if 0 <= one < model.config.vocab_size)

    @torch.inference_mode()
    def execute(self, chunks: list[Chunk]) -> dict[Sequence, Sampled]:
        """Compute all chunks; the next token of each sequence whose chunk samples."""
        # Decodes first, in the order of their places in the pool: see TorchAttention.
        ordered = sorted(chunks, key=lambda chunk: (chunk.num_tokens > 1, chunk.sequence.block_table[0]))
        residual = self._forward(ordered)
        last_rows: list[int] = []
        sampling: list[Sequence] = []
        row = -1
        for chunk in ordered:
            if chunk.sequence.request.sampling.prompt_logprobs is not None:
                self._record_prompt_logprobs(chunk, residual[row + 1 : row + 1 + chunk.num_tokens])
            row += chunk.num_tokens
            if chunk.samples:
                last_rows.append(row)
                sampling.append(chunk.sequence)
        if not sampling:
            return {}
        if len(last_rows) < residual.shape[0]:
            residual = residual[torch.tensor(last_rows, device=self._device)]
        return dict(zip(sampling, self._sample(self._model.logits(residual), sampling), strict=True))

    def _forward(self, chunks: list[Chunk]) -> Tensor:
        """The last layer's residual stream of all tokens, `[T, hidden]`."""
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        for sequence, num_tokens in chunks:
            start = sequence.num_computed_tokens
            stop = start + num_tokens
            token_ids += sequence.token_ids[start:stop]
            rotary_row = start + self._model.config.rotary_offset(len(sequence.token_ids))
            positions += range(rotary_row, rotary_row + num_tokens)
            slots += _slots(sequence.block_table, start, stop, self._cache.block_size_tokens)
        inputs = torch.tensor([token_ids, positions, slots], device=self._device)
        attention = TorchAttention(self._cache, inputs[2], [_attention_chunk(chunk) for chunk in chunks])
        return self._model.forward(inputs[0], inputs[1], attention)

    def _sample(self, logits: Tensor, sequences: list[Sequence]) -> list[Sampled]:
        if all(sequence.is_plain_greedy for sequence in sequences):
            return [Sampled(token if token >= 0 else None) for token in greedy(logits).tolist()]
        asked = [sequence.request.sampling.logprobs for sequence in sequences]
        wanted = [index for index, count in enumerate(asked) if count is not None]
        raw = logprobs.log_softmax(logits[wanted]) if wanted else None  # before the sampler changes the logits
        sampled = sample(logits, [self._sampling_row(sequence) for sequence in sequences])
        details: dict[int, TokenLogprobs] = {}
        if raw is not None:
            entries = logprobs.describe(raw, sampled[wanted].clamp(min=0), [asked[index] or 0 for index in wanted])
            details = dict(zip(wanted, entries, strict=True))
        return [
            Sampled(token, details.get(index)) if token >= 0 else Sampled(None)
            for index, token in enumerate(sampled.tolist())
        ]

    def _record_prompt_logprobs(self, chunk: Chunk, residual: Tensor) -> None:
        """`residual` `[num_tokens, hidden]` of the chunk predicts the tokens behind each; known ones are skipped."""
        sequence, start = chunk.sequence, chunk.sequence.num_computed_tokens
        known = sequence.prompt_logprobs
        if not known:
            known.append(None)  # nothing comes before the first token
        stop = min(start + chunk.num_tokens, sequence.num_prompt_tokens - 1)
        count = sequence.request.sampling.prompt_logprobs or 0
        for first in range(max(start, len(known) - 1), stop, logprobs.PROMPT_SLAB_ROWS):
            last = min(first + logprobs.PROMPT_SLAB_ROWS, stop)
            raw = logprobs.log_softmax(self._model.logits(residual[first - start : last - start]))
            targets = torch.tensor(sequence.token_ids[first + 1 : last + 1], device=self._device)
            known += logprobs.describe(raw, targets, [count] * (last - first))

    def scrub(self, blocks: list[int]) -> None:
        """Zero the KV blocks of a sequence whose numbers went wrong, before anyone else is given them."""
        self._cache.scrub(blocks)

    def must_recompute(self, sequence: Sequence) -> bool:
        """Whether the token just appended made all cached keys of the sequence stale (longrope)."""
        return self._model.config.must_recompute(len(sequence.token_ids))

    def kv_variant(self, num_known_tokens: int) -> int:
        """Equal numbers: equal tokens have equal keys. It differs where the length turns the angles (longrope)."""
        return self._model.config.rotary_offset(num_known_tokens)

    def _sampling_row(self, sequence: Sequence) -> SamplingRow:
        params = sequence.request.sampling
        suppressed: frozenset[int] = frozenset()
        if sequence.num_generated_tokens < params.min_tokens:
            suppressed = params.stop_token_ids | (frozenset() if params.ignore_eos else self._eos_token_ids)
        return SamplingRow(
            params,
            sequence.seed,
            len(sequence.token_ids),
            suppressed,
            sequence.token_counts,
            sequence.token_ids[sequence.num_prompt_tokens :] if sequence.processors else (),
            sequence.processors,
        )


def _attention_chunk(chunk: Chunk) -> AttentionChunk:
    sequence = chunk.sequence
    return AttentionChunk(
        num_tokens=chunk.num_tokens,
        context_len=sequence.num_computed_tokens + chunk.num_tokens,
        block_table=sequence.block_table,
        is_contiguous=sequence.blocks_are_contiguous,
    )


def _slots(block_table: list[int], start: int, stop: int, block_size_tokens: int) -> list[int]:
    """Places in the pool of tokens `start .. stop - 1`."""
    return [
        block_table[position // block_size_tokens] * block_size_tokens + position % block_size_tokens
        for position in range(start, stop)
    ]
