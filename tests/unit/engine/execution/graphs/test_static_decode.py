"""Padded decodes: equal to the reference mathematics whatever the padding, and nothing spreads from or into it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from millstream_runtime.engine.device_policy import AcceleratorPolicy
from millstream_runtime.engine.execution.forward import Forward
from millstream_runtime.engine.execution.graphs.buckets import Bucket
from millstream_runtime.engine.execution.graphs.static_decode import StaticAttention, StaticDecode
from millstream_runtime.engine.execution.step_input import ChunkInput, StepInput
from millstream_runtime.engine.kv.kv_cache import KVCache
from millstream_runtime.models.layers.attention import AttentionSpec
from millstream_runtime.models.layers.decoder import Decoder
from millstream_runtime.models.registry import load_model, load_model_config
from tests.support.family_cases import CASES, Models
from tests.unit.engine.attention.test_paged_attention import BLOCK, SPECS, cache_of, naive

TABLES = {  # context lengths and the blocks that hold them
    "at home": [(33, [0, 1, 2]), (50, [8, 9, 10, 11]), (64, [16, 17, 18, 19])],
    "scattered": [(40, [9, 2, 30]), (3, [60]), (17, [4, 1])],
    "mixed, the end of the pool": [(60, [40, 41, 42, 43]), (5, [61]), (16, [7]), (17, [50, 3]), (1, [20])],
    "one token": [(1, [5])],
}
BUCKETS = [Bucket(5, 4), Bucket(8, 9)]


def chunk_input(context_len: int, table: list[int]) -> ChunkInput:
    contiguous = all(after == before + 1 for before, after in pairwise(table))
    return ChunkInput(1, context_len, 0, table[0], len(table), None if contiguous else table)


def padded(cache: KVCache) -> KVCache:
    """The last two blocks of a pool taken from requests, for padding."""
    cache.num_blocks -= KVCache.PADDING_BLOCKS
    cache.num_padding_blocks = KVCache.PADDING_BLOCKS
    for heads in cache.heads:
        heads[:, cache.zero_block * BLOCK :] = 0.0
    return cache


class Tables:
    """A model of the least that `StaticDecode` asks when only its buffers are wanted."""

    class config:  # noqa: N801 - it stands where a Decoder has its ModelConfig
        longest_window: int | None = None
        hidden_size = 1


@pytest.mark.parametrize("bucket", BUCKETS)
@pytest.mark.parametrize("latent_dim", [None, 10])
@pytest.mark.parametrize("spec_name", SPECS)
@pytest.mark.parametrize("name", TABLES)
def test_padded_decodes_equal_the_reference(name: str, spec_name: str, latent_dim: int | None, bucket: Bucket) -> None:
    rows, spec = TABLES[name], replace(SPECS[spec_name], latent_dim=latent_dim)
    cache = cache_of(num_kv_heads=3, head_dim=16)
    if latent_dim:
        cache.heads = [heads[:1].contiguous() for heads in cache.heads]
        cache.layers = [heads.view(1, -1, BLOCK, 16).permute(1, 2, 0, 3) for heads in cache.heads]
    cache = padded(cache)
    static = StaticDecode(Tables(), cache, BUCKETS)  # type: ignore[arg-type]
    step = StepInput([7] * len(rows), [chunk_input(*row) for row in rows], [])
    generator = torch.Generator().manual_seed(2)
    query = torch.randn(bucket.rows, 6, 16, generator=generator)
    key_value = torch.randn(bucket.rows, cache.heads[0].shape[0], 16, generator=generator)
    query[len(rows) :], key_value[len(rows) :] = float("nan"), float("nan")  # what padded rows compute is nobody's
    attention = StaticAttention(cache, static.fill(bucket, step))
    attention(0, query, key_value, replace(spec, window=7))  # another layer's rule must leave no trace in the plan
    attended = attention(0, query, key_value, spec)
    for row, (context_len, table) in enumerate(rows):
        tokens = cache.layers[0][torch.tensor(table)].flatten(0, 1)[:context_len]
        assert torch.equal(tokens[-1], key_value[row]), "the new token is where the table says"
        keys, values = (tokens, tokens[..., :latent_dim]) if latent_dim else tokens.chunk(2, dim=1)
        keys, values = (part.repeat_interleave(6 // part.shape[1], dim=1) for part in (keys, values))
        expected = naive(query[row : row + 1], keys, values, spec)
        torch.testing.assert_close(attended[row : row + 1], expected.flatten(1), rtol=1e-5, atol=1e-5)
    assert (cache.layers[0][cache.zero_block] == 0).all()


def test_blocks_that_a_window_has_passed_are_not_read_whoever_has_them_now() -> None:
    """They may belong to a request whose numbers went wrong."""
    cache = padded(cache_of(num_kv_heads=1, head_dim=8))
    model = Tables()
    model.config = type("config", (), {"longest_window": 20, "hidden_size": 1})  # type: ignore[assignment]
    static = StaticDecode(model, cache, BUCKETS)  # type: ignore[arg-type]
    cache.layers[0][3] = float("nan")
    buffers = static.fill(Bucket(5, 4), StepInput([7], [chunk_input(60, [3, 9, 5, 6])], []))
    spec = AttentionSpec(1.0, window=20)
    attended = StaticAttention(cache, buffers)(0, torch.randn(5, 1, 8), torch.randn(5, 2, 8), spec)
    assert attended[0].isfinite().all()
    assert buffers.tables[0].tolist() == [cache.zero_block, cache.zero_block, 5, 6]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("static"))


def loaded(models: Models, family: str) -> Decoder:
    folder = models.folder(family)
    return load_model(load_model_config(folder), folder, torch.float64, torch.device("cpu"))


@pytest.mark.matrix
@pytest.mark.parametrize("family", CASES)
@torch.inference_mode()
def test_every_family_computes_the_same_as_the_eager_pass(family: str, models: Models) -> None:
    """Three sequences after prompts of 37, 5 and 16 tokens; one of them lies in scattered blocks."""
    model = loaded(models, family)  # in float64: the order of sums makes no difference to speak of
    cache = KVCache(model.config, 16, BLOCK, torch.float64, torch.device("cpu"), num_padding_blocks=2)
    forward = Forward(model, cache, AcceleratorPolicy(torch.device("cpu")))
    tables = [[4, 1, 9], [2], [12, 13]]
    prompts = [[1 + i * 3 % 40 for i in range(length)] for length in (37, 5, 16)]
    chunks = [
        replace_chunk(chunk_input(len(prompt), table), len(prompt))
        for prompt, table in zip(prompts, tables, strict=True)
    ]
    forward.residual(StepInput([one for prompt in prompts for one in prompt], chunks, []))
    step = StepInput([3, 8, 5], [chunk_input(len(p) + 1, t) for p, t in zip(prompts, tables, strict=True)], [])
    before = [layer.clone() for layer in cache.layers]
    expected = forward.residual(step)
    for layer, saved in zip(cache.layers, before, strict=True):
        layer.copy_(saved)
    static = StaticDecode(model, cache, BUCKETS)
    for bucket in (*BUCKETS, BUCKETS[0]):
        static.fill(bucket, step)
        static.compute(bucket)
        torch.testing.assert_close(static.residual(3), expected, rtol=1e-9, atol=1e-9)
    other = [block for block in range(16) if block not in {9, 2, 13}]  # the new tokens' blocks
    for layer, saved in zip(cache.layers, before, strict=True):
        assert torch.equal(layer[other], saved[other]), "a padded row wrote into a request's block"


def replace_chunk(chunk: ChunkInput, num_tokens: int) -> ChunkInput:
    return ChunkInput(num_tokens, chunk.context_len, 0, chunk.first_block, chunk.num_blocks, chunk.scattered_blocks)


def test_a_pool_without_padding_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="padding blocks"):
        StaticDecode(Tables(), cache_of(1, 8), BUCKETS)  # type: ignore[arg-type]
