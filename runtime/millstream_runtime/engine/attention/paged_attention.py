"""Paged attention by torch alone: one plan per step, used by every layer.

The plan sorts the step's work once, so that a layer makes as few calls as possible and copies nothing it can view:

    on a CPU        one call of a compiled kernel for decodes and checks (`compiled_decodes`), one for prompt chunks
                    (`compiled_prompts`), wherever blocks lie; else
    decodes         blocks gathered into a padded batch, one call for up to GATHER_LIMIT_BYTES; quantized keys and
                    values are dequantized in the copy. A view where that has no padding (`side_by_side`)
    checks          like decodes, in calls of their own
    prompt chunks   one call each, over a view (contiguous blocks) or a gathered copy

On CUDA, FlashAttention takes all decodes in their regions in one call, all such chunks in another (`varlen_attention`).

Query heads that share a key/value head are taken as rows of one query (`[.., KV, group, D]`), so that keys and
values are read once and never repeated. A layer with a sliding window reads only the tokens within it.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager
from enum import Enum
from itertools import accumulate, groupby
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from millstream_runtime.engine.attention import compiled_decodes, compiled_prompts, varlen_attention
from millstream_runtime.engine.attention.attention_chunk import AttentionChunk
from millstream_runtime.engine.attention.checks import CheckCall
from millstream_runtime.engine.attention.compiled_decodes import CompiledDecodes
from millstream_runtime.engine.attention.compiled_prompts import CompiledPrompts
from millstream_runtime.engine.attention.decodes import DecodeCall
from millstream_runtime.engine.attention.pool_attention import PoolAttention
from millstream_runtime.engine.attention.prefill import KeptMasks, PromptCall
from millstream_runtime.engine.attention.side_by_side import side_by_side
from millstream_runtime.engine.attention.varlen_attention import VarlenCall
from millstream_runtime.engine.kv.kv_cache import KVCache
from millstream_runtime.engine.kv.layer_pool import LayerPool
from millstream_runtime.models.layers.attention import AttentionSpec

if TYPE_CHECKING:
    from millstream_kernels.cpu.loaded_code import LoadedCode

KVRead = Callable[[int], AbstractContextManager[None]]
"""Returns a context for a call that reads this many bytes of the KV pool; see `DevicePolicy.kv_read`."""


Call = CompiledDecodes | CompiledPrompts | DecodeCall | CheckCall | PromptCall | VarlenCall


class TorchAttention(PoolAttention):
    """Attention of one step. Its chunks come in the order of the query's rows: decodes, then checks, then prompts."""

    def __init__(
        self,
        cache: KVCache,
        slots: Tensor,
        chunks: Seq[AttentionChunk],
        kv_read: KVRead | None = None,
        kept: KeptMasks | None = None,
        code: LoadedCode | None = None,
    ) -> None:
        """`slots`: `[T]` int64, the slot in the pool of every new token. `kept`: masks of the same step, to share.
        `code`: computes decodes and prompts on a CPU where it takes the model; None: torch does."""
        super().__init__(cache, slots)
        self._kv_read = kv_read
        self._chunks = chunks
        self._longest = max((chunk.context_len for chunk in chunks), default=0)
        self._may_use_varlen = varlen_attention.can_read(cache.heads[0])
        self._kept = kept if kept is not None else KeptMasks()
        dtype = cache.like.dtype
        self._decode_code = code if compiled_decodes.unsupported(dtype) is None else None
        self._prompt_code = code if compiled_prompts.unsupported(dtype) is None else None
        self._plans: dict[bool, list[Call]] = {}  # with calls of `varlen_attention` or without

    def attend(self, layer: int, query: Tensor, spec: AttentionSpec) -> Tensor:
        """See `models.attention.Attention`."""
        pool = self._cache.layer(layer)
        num_tokens, num_heads, head_dim = query.shape
        num_kv_heads = 1 if spec.latent_dim else pool.shape[0] // 2
        grouped = query.view(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)
        calls = self._calls(spec)
        if len(calls) == 1:
            attended = self._attend(calls[0], pool, grouped, spec)
        else:
            attended = torch.cat([self._attend(call, pool, grouped[call.rows], spec) for call in calls])
        return attended.reshape(num_tokens, -1)

    def _calls(self, spec: AttentionSpec) -> list[Call]:
        use_varlen = self._may_use_varlen and varlen_attention.can_compute(spec, self._longest)
        if use_varlen not in self._plans:
            codes = self._decode_code, self._prompt_code
            self._plans[use_varlen] = _plan(self._cache, self._chunks, self._kept, codes, use_varlen=use_varlen)
        return self._plans[use_varlen]

    def _attend(self, call: Call, pool: LayerPool, query: Tensor, spec: AttentionSpec) -> Tensor:
        if self._kv_read is None:
            attended = call(pool, query, spec)
        else:
            with self._kv_read(call.tokens_read(spec.window) * self._cache.token_bytes):
                attended = call(pool, query, spec)
        return attended[..., : spec.latent_dim] if spec.latent_dim else attended


class _Kind(Enum):
    """What computes a chunk, as far as it decides which neighbours it shares a call with."""

    COMPILED, COMPILED_PROMPT, VARLEN, VARLEN_PROMPT, CHECK, PROMPT, DECODE = range(7)


def _kind_of_torch(chunk: AttentionChunk, *, is_on_cpu: bool, use_varlen: bool) -> _Kind:
    if use_varlen and chunk.is_contiguous:
        return _Kind.VARLEN_PROMPT if chunk.num_tokens > 1 else _Kind.VARLEN
    if is_on_cpu and chunk.num_drafts > 0:
        return _Kind.CHECK
    return _Kind.PROMPT if chunk.num_tokens > 1 else _Kind.DECODE


def _plan(
    cache: KVCache,
    chunks: Seq[AttentionChunk],
    kept: KeptMasks,
    codes: tuple[LoadedCode | None, LoadedCode | None],
    *,
    use_varlen: bool,
) -> list[Call]:
    """The calls for all chunks, in the order of their rows. `codes`: for decodes and checks, and for prompts."""
    is_on_cpu, (decode_code, prompt_code) = cache.like.device.type == "cpu", codes

    def kind(chunk: AttentionChunk) -> _Kind:
        if decode_code is not None and compiled_decodes.is_taken(chunk):
            return _Kind.COMPILED
        if prompt_code is not None and compiled_prompts.is_taken(chunk):
            return _Kind.COMPILED_PROMPT
        return _kind_of_torch(chunk, is_on_cpu=is_on_cpu, use_varlen=use_varlen)

    calls: list[Call] = []
    row = 0
    for what, group in groupby(chunks, kind):
        alike = list(group)
        starts = [*accumulate((chunk.num_tokens for chunk in alike), initial=row)]
        if what is _Kind.COMPILED and decode_code is not None:
            calls.append(CompiledDecodes(decode_code, cache, alike, row))
        elif what is _Kind.COMPILED_PROMPT and prompt_code is not None:
            calls.append(CompiledPrompts(prompt_code, cache, alike, row))
        elif what in (_Kind.VARLEN, _Kind.VARLEN_PROMPT):
            calls.append(VarlenCall(cache, alike, row))
        elif what is _Kind.CHECK:
            for part, tokens in side_by_side(cache, alike):
                calls.append(CheckCall(tokens, alike[part], starts[part.start], kept))
        elif what is _Kind.PROMPT:
            calls += [PromptCall(cache, chunk, start, kept) for chunk, start in zip(alike, starts, strict=False)]
        else:
            calls += [DecodeCall(tokens, row + part.start) for part, tokens in side_by_side(cache, alike)]
        row = starts[-1]
    return calls
