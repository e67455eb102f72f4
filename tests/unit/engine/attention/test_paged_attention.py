"""Strided, gathered and chunked attention against the reference mathematics of millstream_kernels."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from millstream_kernels.cpu.decode import load
from millstream_kernels.cpu.loaded_code import LoadedCode
from millstream_kernels.reference import paged_attention, rms_norm, rotary_embedding
from millstream_runtime.engine.attention import checks
from millstream_runtime.engine.attention.attention_chunk import AttentionChunk
from millstream_runtime.engine.attention.paged_attention import TorchAttention
from millstream_runtime.engine.kv.kv_cache import KVCache
from millstream_runtime.models.config.model_config import ModelConfig
from millstream_runtime.models.config.rope_config import RopeConfig
from millstream_runtime.models.layers.attention import AttentionSpec
from millstream_runtime.models.layers.rope import rotary_table, rotate_
from tests.support.pairs import every_pair

BLOCK = 16


def config_of(num_kv_heads: int, head_dim: int) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_layers=1,
        num_heads=num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=10000.0),
        tie_word_embeddings=False,
        attention_bias=False,
        mlp_bias=False,
        checkpoint_dtype="float32",
        max_position_embeddings=256,
        eos_token_ids=frozenset(),
        max_model_len=256,
    )


def cache_of(num_kv_heads: int, head_dim: int, num_blocks: int = 64) -> KVCache:
    cache = KVCache(config_of(num_kv_heads, head_dim), num_blocks, BLOCK, torch.float32, torch.device("cpu"))
    cache.layers[0].normal_(generator=torch.Generator().manual_seed(1))
    return cache


def chunk(num_tokens: int, context_len: int, table: list[int], *, num_drafts: int = 0) -> AttentionChunk:
    contiguous = all(after == before + 1 for before, after in pairwise(table))
    return AttentionChunk(num_tokens, context_len, table, contiguous, num_drafts)


def check(num_drafts: int, context_len: int, table: list[int]) -> AttentionChunk:
    """A decode with drafts. `context_len`: with them."""
    return chunk(1 + num_drafts, context_len, table, num_drafts=num_drafts)


CASES = {
    "decodes an equal distance apart": [chunk(1, n, list(range(8 * i, 8 * i + 4))) for i, n in enumerate([33, 50, 64])],
    "decodes at odd distances": [chunk(1, 40, [0, 1, 2]), chunk(1, 40, [3, 4, 5]), chunk(1, 20, [20, 21])],
    "scattered decodes": [chunk(1, 40, [9, 2, 30]), chunk(1, 3, [60]), chunk(1, 17, [4, 1])],
    "the end of the pool": [chunk(1, 60, [40, 41, 42, 43]), chunk(1, 5, [63])],
    "very different lengths": [chunk(1, 500, list(range(32))), chunk(1, 2, [32])],
    "whole prompts": [chunk(20, 20, [3, 4]), chunk(33, 33, [9, 5, 30])],
    "later chunks": [chunk(20, 70, [3, 4, 5, 6, 7]), chunk(2, 33, [19, 15, 30])],
    "everything at once": [
        chunk(1, 33, [0, 1, 2]),
        chunk(1, 17, [9, 5]),
        chunk(4, 40, [30, 31, 32]),
        chunk(9, 9, [50]),
    ],
    "a check": [check(3, 40, [5, 6, 7])],
    "equal checks": [check(4, 33, list(range(8 * i, 8 * i + 4))) for i in range(3)],
    "checks an equal distance apart": [
        check(drafts, n, list(range(8 * i, 8 * i + 5)))
        for i, (drafts, n) in enumerate([(1, 33), (4, 50), (16, 17), (2, 70)])
    ],
    "scattered checks": [check(2, 40, [9, 2, 30]), check(5, 7, [60]), check(1, 17, [4, 1])],
    "checks of very different lengths": [check(3, 500, list(range(32))), check(16, 20, [32, 33])],
    "decodes, checks and prompts": [
        chunk(1, 33, [0, 1, 2]),
        chunk(1, 17, [9, 5]),
        check(2, 35, [12, 13, 14]),
        check(7, 40, [30, 31, 32]),
        check(1, 21, [40, 37]),
        chunk(4, 60, [50, 51, 52, 53]),
    ],
}


# Parents of the drafts of three trees.
BUSH, FAN, TWO_BRANCHES = (-1, -1, -1, 0, 1, 1, 3, 5), (-1, -1, -1), (-1, -1, 0, 1, 2, 3, 4, 5)


def tree(parents: tuple[int, ...], context_len: int, table: list[int]) -> AttentionChunk:
    """A decode with a tree of drafts. `context_len`: with them."""
    return replace(check(len(parents), context_len, table), parents=parents)


TREES = {
    "a tree": [tree(BUSH, 40, [5, 6, 7])],
    "equal trees": [tree(BUSH, 33, list(range(8 * i, 8 * i + 4))) for i in range(3)],
    "starts of a tree": [tree(BUSH[: 2 * i + 1], 20 + 9 * i, list(range(8 * i, 8 * i + 4))) for i in range(4)],
    "scattered trees and chains": [tree(BUSH, 40, [9, 2, 30]), check(5, 7, [60]), tree(FAN, 17, [4, 1])],
    "with decodes and prompts": [
        chunk(1, 33, [0, 1, 2]),
        tree(TWO_BRANCHES, 35, [12, 13, 14]),
        tree(FAN, 4, [20]),
        check(7, 40, [30, 31, 32]),
        chunk(4, 60, [50, 51, 52, 53]),
    ],
}
SPECS = {
    "all": AttentionSpec(0.3),
    "window": AttentionSpec(0.3, window=19),
    "window of one": AttentionSpec(0.3, window=1),
    "soft cap": AttentionSpec(0.3, softcap=0.8),
    "window and soft cap": AttentionSpec(0.3, window=33, softcap=0.8),
}


def slots_of(chunks: list[AttentionChunk]) -> list[int]:
    return [
        one.block_table[position // BLOCK] * BLOCK + position % BLOCK
        for one in chunks
        for position in range(one.context_len - one.num_tokens, one.context_len)
    ]


@pytest.mark.matrix("name")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 4, 16), (6, 2, 80), (5, 1, 8)])
def test_every_plan_equals_the_reference(
    name: str, num_heads: int, num_kv_heads: int, head_dim: int, compiled_code: LoadedCode | None
) -> None:
    chunks = CASES[name]
    cache = cache_of(num_kv_heads, head_dim)
    generator = torch.Generator().manual_seed(2)
    num_tokens = sum(one.num_tokens for one in chunks)
    query = torch.randn(num_tokens, num_heads, head_dim, generator=generator)
    key_value = torch.randn(num_tokens, 2 * num_kv_heads, head_dim, generator=generator)
    slots = slots_of(chunks)
    attention = TorchAttention(cache, torch.tensor(slots), chunks, code=compiled_code)
    attended = attention(0, query, key_value, AttentionSpec(head_dim**-0.5))
    assert torch.equal(cache.heads[0][:, slots], key_value.transpose(0, 1))
    expected = paged_attention(
        query,
        cache.layers[0],
        [torch.tensor(one.block_table) for one in chunks],
        [one.num_tokens for one in chunks],
        [one.context_len for one in chunks],
        head_dim**-0.5,
    )
    torch.testing.assert_close(attended, expected.flatten(1), rtol=1e-5, atol=1e-5)


def naive(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """The newest `query` `[n, H, D]` over all `keys`, `values` `[context, H, D]`, token by token."""
    rows, first = [], keys.shape[0] - query.shape[0]
    for index, one in enumerate(query):
        seen = slice(0 if spec.window is None else max(0, first + index + 1 - spec.window), first + index + 1)
        scores = torch.einsum("hd,thd->ht", one, keys[seen]) * spec.scale
        if spec.softcap is not None:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        rows.append(torch.einsum("ht,thd->hd", scores.softmax(dim=-1), values[seen]))
    return torch.stack(rows)


@pytest.mark.matrix("name", "spec_name")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("latent_dim", [None, 10])
@pytest.mark.parametrize("spec_name", SPECS)
def test_windows_soft_caps_and_latents_in_every_plan(
    name: str, latent_dim: int | None, spec_name: str, compiled_code: LoadedCode | None
) -> None:
    """One plan serves layers with different rules, as in Gemma; a latent row is the key, and its start the value."""
    chunks, spec = CASES[name], replace(SPECS[spec_name], latent_dim=latent_dim)
    cache = cache_of(num_kv_heads=3, head_dim=16)
    if latent_dim:
        cache.heads = [heads[:1].contiguous() for heads in cache.heads]
        cache.layers = [heads.view(1, -1, BLOCK, 16).permute(1, 2, 0, 3) for heads in cache.heads]
    generator = torch.Generator().manual_seed(2)
    num_tokens = sum(one.num_tokens for one in chunks)
    query = torch.randn(num_tokens, 6, 16, generator=generator)
    key_value = torch.randn(num_tokens, cache.heads[0].shape[0], 16, generator=generator)
    attention = TorchAttention(cache, torch.tensor(slots_of(chunks)), chunks, code=compiled_code)
    attention(0, query, key_value, replace(spec, window=7))  # another layer's rule must leave no trace in the plan
    attended = attention(0, query, key_value, spec)
    expected, start = [], 0
    for one in chunks:
        tokens = cache.layers[0][torch.tensor(one.block_table)].flatten(0, 1)[: one.context_len]
        keys, values = (tokens, tokens[..., :latent_dim]) if latent_dim else tokens.chunk(2, dim=1)
        keys, values = (part.repeat_interleave(6 // part.shape[1], dim=1) for part in (keys, values))
        expected.append(naive(query[start : start + one.num_tokens], keys, values, spec))
        start += one.num_tokens
    torch.testing.assert_close(attended, torch.cat(expected).flatten(1), rtol=1e-5, atol=1e-5)


def seen_in(one: AttentionChunk, spec: AttentionSpec) -> list[list[int]]:
    """The places that each query of a chunk sees, by following its path back to the known tokens."""
    start = one.context_len - one.num_tokens
    parents = one.parents or tuple(range(-1, one.num_drafts - 1))
    num_known = one.context_len - len(parents)
    seen = []
    for place in range(start, one.context_len):
        path, at = [], place
        while at >= num_known:
            path.append(at)
            parent = parents[at - num_known]
            at = num_known - 1 if parent < 0 else num_known + parent
        path += range(at, -1, -1)  # from itself to the first token
        seen.append(path if spec.window is None else path[: spec.window])
    return seen


@pytest.mark.matrix("name", "spec_name")
@pytest.mark.parametrize(
    ("name", "spec_name", "latent_dim", "slab_bytes"), every_pair(TREES, SPECS, [None, 10], [None, 700])
)
def test_a_draft_of_a_tree_sees_known_tokens_and_its_own_path(
    name: str,
    latent_dim: int | None,
    spec_name: str,
    slab_bytes: int | None,
    compiled_code: LoadedCode | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Against a reference in float64."""
    chunks, spec = TREES[name], replace(SPECS[spec_name], latent_dim=latent_dim)
    if slab_bytes is not None:
        monkeypatch.setattr(checks, "MASK_LIMIT_BYTES", slab_bytes)
    cache = cache_of(num_kv_heads=3, head_dim=16)
    if latent_dim:
        cache.heads = [heads[:1].contiguous() for heads in cache.heads]
        cache.layers = [heads.view(1, -1, BLOCK, 16).permute(1, 2, 0, 3) for heads in cache.heads]
    generator = torch.Generator().manual_seed(2)
    num_tokens = sum(one.num_tokens for one in chunks)
    query = torch.randn(num_tokens, 6, 16, generator=generator)
    key_value = torch.randn(num_tokens, cache.heads[0].shape[0], 16, generator=generator)
    attention = TorchAttention(cache, torch.tensor(slots_of(chunks)), chunks, code=compiled_code)
    attention(0, query, key_value, replace(spec, window=7))
    attended = attention(0, query, key_value, spec)
    expected, start = [], 0
    for one in chunks:
        tokens = cache.layers[0][torch.tensor(one.block_table)].flatten(0, 1)[: one.context_len].double()
        keys, values = (tokens, tokens[..., :latent_dim]) if latent_dim else tokens.chunk(2, dim=1)
        keys, values = (part.repeat_interleave(6 // part.shape[1], dim=1) for part in (keys, values))
        for row, places in enumerate(seen_in(one, spec)):
            own = query[start + row : start + row + 1].double()
            expected.append(naive(own, keys[places], values[places], replace(spec, window=None)))
        start += one.num_tokens
    torch.testing.assert_close(attended, torch.cat(expected).flatten(1).float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("spec_name", SPECS)
def test_a_row_of_a_check_has_the_bits_of_its_decode(spec_name: str) -> None:
    """By the compiled kernel: what stands of a draft does not hang on rounding in attention."""
    drafts, tables = (3, 0, 16), ([9, 2, 30], [60], [4, 1, 7, 8])
    lengths = (40, 9, 63)
    together = [check(*of) for of in zip(drafts, lengths, tables, strict=True)]
    cache = cache_of(num_kv_heads=2, head_dim=16)
    query = torch.randn(sum(1 + n for n in drafts), 6, 16, generator=torch.Generator().manual_seed(2))
    code, no_slots = load(), torch.zeros(0, dtype=torch.int64)
    attended = TorchAttention(cache, no_slots, together, code=code).attend(0, query, SPECS[spec_name])
    alone = [
        chunk(1, length - num_drafts + place, table)
        for num_drafts, length, table in zip(drafts, lengths, tables, strict=True)
        for place in range(num_drafts + 1)
    ]
    for row, one in enumerate(alone):
        own = TorchAttention(cache, no_slots, [one], code=code).attend(0, query[row : row + 1], SPECS[spec_name])
        assert torch.equal(own[0], attended[row])


def test_rms_norm_is_torch_s() -> None:
    x, weight = torch.randn(5, 48), torch.randn(48)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), F.rms_norm(x, (48,), weight, 1e-5))


@pytest.mark.parametrize("head_dim", [8, 80])
def test_rotating_in_place_is_the_reference(head_dim: int) -> None:
    heads = torch.randn(3, 6, head_dim)
    cos, signed_sin = rotary_table(RopeConfig(theta=10000.0), head_dim, 100, torch.device("cpu"))
    positions = torch.tensor([0, 7, 99])
    half = head_dim // 2
    expected = rotary_embedding(heads[:, :4], cos[positions, :half], signed_sin[positions, half:])
    untouched = heads[:, 4:].clone()
    rotate_(heads[:, :4], cos[positions].unsqueeze(1), signed_sin[positions].unsqueeze(1))
    torch.testing.assert_close(heads[:, :4], expected)
    torch.testing.assert_close(heads[:, 4:], untouched)


def test_rotary_embedding_turns_and_keeps_lengths() -> None:
    x = torch.randn(3, 2, 8)
    angles = torch.outer(torch.tensor([0.0, 1.0, 2.5]), torch.tensor([1.0, 0.5, 0.2, 0.1]))
    turned = rotary_embedding(x, angles.cos(), angles.sin())
    torch.testing.assert_close(turned[0], x[0])  # position 0 is not turned
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    complex_x = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angles), angles)[:, None]
    torch.testing.assert_close(turned, torch.cat((complex_x.real, complex_x.imag), dim=-1))
