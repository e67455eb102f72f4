"""The memory that the planner counts for a draft head is what the engine takes, for every kind and layout of heads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from millstream_operator.catalog.inspected_model import read_inspected_head
from millstream_operator.catalog.model_shape import ModelShape
from millstream_operator.catalog.read_shape import read_shape_file
from millstream_operator.planning.choices.cpu_dtype import draft_as_held
from millstream_operator.planning.sizing.cpu_memory import FLOAT32_BYTES, cpu_weights_bytes
from millstream_operator.planning.sizing.kv_pool import kv_pool
from millstream_operator.planning.sizing.memory_ledger import draft_token_bytes, kv_bytes_per_token
from millstream_runtime.config import CAPABILITIES, KVCacheDType, SpeculationMethod
from millstream_runtime.models.eagle.heads import expected_weights, read_head_folder
from millstream_runtime.sources.inspection.inspect import inspect_folder
from tests.support.eagle3_heads import to_eagle3_speculators, write_eagle3_head
from tests.support.eagle_heads import head_config, random_head, save_head, to_speculators
from tests.support.family_cases import dense
from tests.support.llmdeployments import deployment
from tests.support.medusa_heads import write_medusa_heads
from tests.support.tiny_families import make_engine, write_family

LENGTH, CHUNK, REQUESTS = 1024, 128, 4
ROOT = Path(__file__).resolve().parents[3]
SHAPE = {"head_dim": 32, "vocab_size": 199, "max_position_embeddings": LENGTH}


def eagle1(folder: Path, target: Path) -> Path:
    folder.mkdir()
    save_head(folder, head_config(target), random_head(target))
    return folder


def eagle1_of_two_layers(folder: Path, target: Path) -> Path:
    folder.mkdir()
    save_head(folder, head_config(target, num_hidden_layers=2), random_head(target, num_hidden_layers=2))
    return folder


def eagle1_of_speculators(folder: Path, target: Path) -> Path:
    folder.mkdir()
    return to_speculators(eagle1(folder / "published", target), folder)


def eagle3_of_speculators(folder: Path, target: Path) -> Path:
    folder.mkdir()
    return to_eagle3_speculators(write_eagle3_head(folder / "published", target), folder)


def medusa(folder: Path, target: Path) -> Path:
    of_target = read_shape_file(target / "config.json")
    return write_medusa_heads(folder, of_target.hidden_size, of_target.vocab_size, layers=2, prefix="medusa_head.")


Write = Callable[[Path, Path], Path]
EAGLE_HEADS = [eagle1, eagle1_of_two_layers, eagle1_of_speculators, write_eagle3_head, eagle3_of_speculators]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    write_family(folder, **dense("llama", num_hidden_layers=8, **SHAPE))
    return folder


def planned(head: Path, method: str) -> ModelShape:
    """As a replica on a CPU holds it: in float32, as the hidden states that it reads are."""
    shape = read_inspected_head(inspect_folder(head), method).shape
    return draft_as_held(deployment(accelerator={"type": "CPU"}).spec, None, shape, CAPABILITIES)


@pytest.mark.parametrize("write", [*EAGLE_HEADS, medusa])
@pytest.mark.parametrize("stored", [KVCacheDType.AUTO, KVCacheDType.INT8])
def test_the_engine_takes_what_was_planned(target: Path, tmp_path: Path, write: Write, stored: KVCacheDType) -> None:
    folder = write(tmp_path / "head", target)
    method = SpeculationMethod.MEDUSA if write is medusa else SpeculationMethod.EAGLE
    head, shape = planned(folder, method), read_shape_file(target / "config.json")
    pool = kv_pool(
        shape,
        kv_bytes_per_token(shape, stored.method, dtype_bytes=FLOAT32_BYTES),
        max_model_len=LENGTH,
        max_num_batched_tokens=CHUNK,
        max_num_seqs=REQUESTS,
        is_grouped=False,
        draft_token_bytes=draft_token_bytes(head, stored.method, dtype_bytes=FLOAT32_BYTES),
    )
    pool_bytes = pool.bytes_for([(REQUESTS, LENGTH)])
    engine = make_engine(
        target,
        speculation_method=method,
        draft_model=str(folder),
        kv_cache_memory_bytes=pool_bytes,
        kv_cache_dtype=stored,
        max_model_len=LENGTH,
        max_num_batched_tokens=CHUNK,
        max_num_seqs=REQUESTS,
    )
    use = engine.memory_use
    assert use.draft_kv_cache_bytes is not None
    assert use.draft_weights_bytes is not None
    assert use.kv_cache_bytes + use.draft_kv_cache_bytes == pytest.approx(pool_bytes, rel=0.01)
    assert use.kv_cache_tokens == pytest.approx(pool.tokens(pool_bytes), rel=0.01)
    assert use.draft_weights_bytes >= cpu_weights_bytes(head) * 0.99, "second copies come on top"


@pytest.mark.parametrize("write", EAGLE_HEADS)
def test_the_weights_are_counted_as_the_engine_expects_them(target: Path, tmp_path: Path, write: Write) -> None:
    folder = write(tmp_path / "head", target)
    expected = expected_weights(read_head_folder(folder), torch.float32).num_bytes
    assert cpu_weights_bytes(planned(folder, "EAGLE")) == pytest.approx(expected, rel=0.01)


def test_the_demo_head_is_counted_as_its_weights_are() -> None:
    folder = ROOT / "models/demo-eagle"
    expected = expected_weights(read_head_folder(folder), torch.float32).num_bytes
    shape = planned(folder, "EAGLE")
    assert cpu_weights_bytes(shape) == pytest.approx(expected, rel=0.01)
    assert shape.parameters.total * 2 == pytest.approx((folder / "model.safetensors").stat().st_size, rel=0.01)
