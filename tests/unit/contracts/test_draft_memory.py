"""The memory that the planner counts for a draft model is what the engine takes, however keys and values are stored."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from millstream_operator.catalog.read_shape import read_shape_file
from millstream_operator.planning.sizing.cpu_memory import FLOAT32_BYTES, cpu_weights_bytes
from millstream_operator.planning.sizing.kv_pool import kv_pool
from millstream_operator.planning.sizing.memory_ledger import kv_bytes_per_token
from millstream_runtime.config import KVCacheDType, SpeculationMethod
from millstream_runtime.models.registry import expected_weights, load_model_config
from tests.support.family_cases import dense
from tests.support.tiny_families import make_engine, write_family

LENGTH, CHUNK, REQUESTS = 1024, 128, 4
ALTERNATING = ["sliding_attention", "full_attention"]
SHAPE = {"head_dim": 32, "max_position_embeddings": LENGTH}
WINDOWS = {"sliding_window": 64, "use_sliding_window": True, "layer_types": ALTERNATING * 4}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model that mixes windows, and its draft."""
    target, draft = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("draft")
    write_family(target, **dense("qwen2", num_hidden_layers=8, **SHAPE, **WINDOWS))
    write_family(draft, **dense("llama", num_hidden_layers=2, **SHAPE))
    return target, draft


@pytest.mark.parametrize("stored", KVCacheDType)
@pytest.mark.parametrize("is_grouped", [None, True])
def test_the_engine_takes_what_was_planned(
    folders: tuple[Path, Path], stored: KVCacheDType, is_grouped: bool | None
) -> None:
    target, draft = (read_shape_file(folder / "config.json") for folder in folders)
    of_target, of_draft = (kv_bytes_per_token(one, stored.method, dtype_bytes=FLOAT32_BYTES) for one in (target, draft))
    pool = kv_pool(
        target,
        of_target,
        max_model_len=LENGTH,
        max_num_batched_tokens=CHUNK,
        max_num_seqs=REQUESTS,
        is_grouped=bool(is_grouped),  # with a draft model the engine has groups only where it is asked for them
        draft_token_bytes=of_draft,
    )
    pool_bytes = pool.bytes_for([(REQUESTS, LENGTH)])
    engine = make_engine(
        folders[0],
        speculation_method=SpeculationMethod.DRAFT_MODEL,
        draft_model=str(folders[1]),
        kv_cache_memory_bytes=pool_bytes,
        kv_cache_dtype=stored,
        enable_hybrid_kv_cache_manager=is_grouped,
        max_model_len=LENGTH,
        max_num_batched_tokens=CHUNK,
        max_num_seqs=REQUESTS,
    )
    use = engine.memory_use
    assert use.draft_kv_cache_bytes is not None
    assert use.kv_cache_bytes + use.draft_kv_cache_bytes == pytest.approx(pool_bytes, rel=0.01)
    assert use.kv_cache_tokens == pytest.approx(pool.tokens(pool_bytes), rel=0.01)
    assert use.kv_cache_tokens == pytest.approx(REQUESTS * LENGTH, rel=0.01)


def test_the_weights_of_a_draft_are_counted_as_the_engine_expects_them(folders: tuple[Path, Path]) -> None:
    expected = expected_weights(load_model_config(folders[1]), torch.float32).num_bytes
    assert cpu_weights_bytes(read_shape_file(folders[1] / "config.json")) == pytest.approx(expected, rel=0.01)
