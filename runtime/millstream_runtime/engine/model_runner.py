"""One step on the device: chunks -> input tensors -> forward -> sampled tokens."""

from __future__ import annotations

import torch

from millstream_runtime.engine.attention import AttentionChunk, TorchAttention
from millstream_runtime.engine.kv_cache import KVCache
from millstream_runtime.engine.sampler import SamplingRow, sample
from millstream_runtime.engine.scheduler import Chunk
from millstream_runtime.engine.sequence import Sequence
from millstream_runtime.models.decoder import Decoder


class ModelRunner:
    """Owner of the model and of the KV pool. The device is read once a step, when the tokens come back."""

    def __init__(self, model: Decoder, cache: KVCache, device: torch.device, eos_token_ids: frozenset[int]) -> None:
        self._model = model
        self._cache = cache
        self._device = device
        self._eos_token_ids = eos_token_ids

    @torch.inference_mode()
    def execute(self, chunks: list[Chunk]) -> dict[Sequence, int | None]:
        """Compute all chunks; the next token of each whose chunk samples, None where its logits were not finite."""
        # Decodes first, in the order of their places in the pool: see TorchAttention.
        ordered = sorted(chunks, key=lambda chunk: (chunk.num_tokens > 1, chunk.sequence.block_table[0]))
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        last_rows: list[int] = []
        for chunk in ordered:
            sequence, start = chunk.sequence, chunk.sequence.num_computed_tokens
            stop = start + chunk.num_tokens
            token_ids += sequence.token_ids[start:stop]
            rotary_row = start + self._model.config.rotary_offset(len(sequence.token_ids))
            positions += range(rotary_row, rotary_row + chunk.num_tokens)
            slots += _slots(sequence.block_table, start, stop, self._cache.block_size_tokens)
            if chunk.samples:
                last_rows.append(len(token_ids) - 1)
        inputs = torch.tensor([token_ids, positions, slots], device=self._device)
        attention = TorchAttention(self._cache, inputs[2], [_attention_chunk(chunk) for chunk in ordered])
        residual = self._model.forward(inputs[0], inputs[1], attention)
        sampling = [chunk.sequence for chunk in ordered if chunk.samples]
        if not sampling:
            return {}
        if len(last_rows) < residual.shape[0]:
            residual = residual[torch.tensor(last_rows, device=self._device)]
        tokens = sample(self._model.logits(residual), [self._sampling_row(one) for one in sampling]).tolist()
        return {one: token if token >= 0 else None for one, token in zip(sampling, tokens, strict=True)}

    def scrub(self, sequence: Sequence) -> None:
        """Zero the KV blocks of a sequence whose numbers went wrong, before anyone else is given them."""
        self._cache.scrub(sequence.block_table)

    def must_recompute(self, sequence: Sequence) -> bool:
        """Whether the token just appended made all cached keys of the sequence stale (longrope)."""
        return self._model.config.must_recompute(len(sequence.token_ids))

    def _sampling_row(self, sequence: Sequence) -> SamplingRow:
        params = sequence.request.sampling
        suppressed: frozenset[int] = frozenset()
        if sequence.num_generated_tokens < params.min_tokens:
            suppressed = params.stop_token_ids | (frozenset() if params.ignore_eos else self._eos_token_ids)
        return SamplingRow(params, sequence.seed, len(sequence.token_ids), suppressed)


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
