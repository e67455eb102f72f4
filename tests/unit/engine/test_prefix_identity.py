"""Equal tokens are equal blocks only where the keys and values are: of one checkpoint, in one dtype and layout."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from millstream_runtime.config import DType, KVCacheDType
from millstream_runtime.engine.engine import Engine
from millstream_runtime.engine.kv.prefix_root import prefix_root
from millstream_runtime.engine.request import Request
from millstream_runtime.engine.scheduling.prefix_cache import PrefixCache, extend_hashes
from millstream_runtime.engine.scheduling.sequence import Sequence
from millstream_runtime.models.config.model_config import ModelConfig
from millstream_runtime.models.loading.checkpoint_digest import checkpoint_digest
from millstream_runtime.models.registry import load_model_config
from millstream_runtime.sources.folder import MARKER_NAME, Marker
from tests.support.engines import MakeEngine, WriteModel, generate, greedy

PROMPT = list(range(3, 43))


def cached_hashes(engine: Engine) -> set[bytes]:
    """What the prefix cache of an engine knows after one prompt."""
    generate(engine, [Request("one", PROMPT, greedy(2))])
    assert engine._blocks._cache is not None
    return set(engine._blocks._cache._block_of)


def test_engines_of_one_model_agree_on_the_hashes_of_a_prompt(make_engine: MakeEngine, write_model: WriteModel) -> None:
    folder = write_model()
    assert cached_hashes(make_engine(folder)) == cached_hashes(make_engine(folder, max_num_seqs=2))


def test_blocks_of_another_model_dtype_or_block_size_never_match(
    make_engine: MakeEngine, write_model: WriteModel, tmp_path: Path
) -> None:
    folder = write_model()
    stretched = shutil.copytree(folder, tmp_path / "stretched")
    config = json.loads((folder / "config.json").read_text())
    (stretched / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    known = cached_hashes(make_engine(folder))
    others = [
        cached_hashes(make_engine(stretched)),
        cached_hashes(make_engine(folder, dtype=DType.BFLOAT16)),
        cached_hashes(make_engine(folder, block_size_tokens=8)),
    ]
    assert all(len(found) > 0 and not found & known for found in others)


def test_the_root_is_part_of_every_hash() -> None:
    def hashes(root: bytes) -> list[bytes]:
        return extend_hashes(Sequence(Request("0", PROMPT, greedy(1)), 0, 0, list(PROMPT), len(PROMPT)), 16, root)

    assert len(hashes(b"one")) == 2
    assert not {*hashes(b"one")} & {*hashes(b"another")}
    assert len(PrefixCache(b"one")) == 0


@pytest.fixture
def config(write_model: WriteModel) -> ModelConfig:
    return load_model_config(write_model())


def test_each_part_of_the_layout_counts(config: ModelConfig) -> None:
    root = prefix_root(b"digest", config, torch.float32, block_size_tokens=16, num_ranks=1)
    assert root == prefix_root(b"digest", replace(config, max_model_len=9), torch.float32, 16, 1)
    rope = replace(config.rope, theta=5.0)
    others = [
        prefix_root(b"other", config, torch.float32, 16, 1),
        prefix_root(b"digest", config, torch.float16, 16, 1),
        prefix_root(b"digest", config, torch.float32, 32, 1),
        prefix_root(b"digest", config, torch.float32, 16, 2),
        prefix_root(b"digest", replace(config, num_layers=9), torch.float32, 16, 1),
        prefix_root(b"digest", replace(config, head_dim=2), torch.float32, 16, 1),
        prefix_root(b"digest", replace(config, rope=rope), torch.float32, 16, 1),
        prefix_root(b"digest", replace(config, windows=(4, None)), torch.float32, 16, 1),
        prefix_root(b"digest", config, torch.float32, 16, 1, stored=KVCacheDType.INT8),
        prefix_root(b"digest", config, torch.float32, 16, 1, stored=KVCacheDType.FP8),
    ]
    assert len({root, *others}) == len(others) + 1


def test_other_weights_of_the_same_shapes_are_another_checkpoint(write_model: WriteModel, tmp_path: Path) -> None:
    folder = shutil.copytree(write_model(), tmp_path / "tuned")
    before = checkpoint_digest(folder)
    (path,) = folder.glob("*.safetensors")
    times = path.stat()
    tensors = load_file(path)
    tensors["lm_head.weight"].mul_(1.01)
    save_file(tensors, path, metadata={"format": "pt"})
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # images made reproducibly give all files one time
    assert path.stat().st_size == times.st_size
    assert checkpoint_digest(folder) != before


def test_a_fetched_folder_is_known_by_its_digests_wherever_it_lies(write_model: WriteModel, tmp_path: Path) -> None:
    def fetched(name: str, sha256: str) -> Path:
        folder = shutil.copytree(write_model(), tmp_path / name, copy_function=shutil.copyfile)
        files = {path.name: (path.stat().st_size, sha256) for path in folder.glob("*.safetensors")}
        marker = Marker({"repository": "a/b"}, "main", "0" * 40, files)
        (folder / MARKER_NAME).write_text(json.dumps(marker.as_json()))
        return folder

    one, same, other = fetched("one", "a" * 64), fetched("same", "a" * 64), fetched("other", "b" * 64)
    assert checkpoint_digest(one) == checkpoint_digest(same) != checkpoint_digest(other)
