"""Scales of an FP8 KV cache in what `millstream quantize` makes: from the calibration data, and they help outliers."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from millstream_runtime.config import Device, KVCacheDType, RuntimeConfig
from millstream_runtime.engine.attention.attention_chunk import AttentionChunk
from millstream_runtime.engine.attention.paged_attention import TorchAttention
from millstream_runtime.engine.kv.kv_cache import KVCache
from millstream_runtime.models.loading.kv_scales import read_kv_scales
from millstream_runtime.models.registry import load_model, load_model_config
from millstream_runtime.quality.documents import TokenizedDocument
from millstream_runtime.quality.scored_model import ScoredModel
from millstream_runtime.quality.token_scores import score
from millstream_runtime.quantize.calibration import read_calibration
from millstream_runtime.quantize.output.kv_scales import HEADROOM
from millstream_runtime.tokenizing.tokenizer import Tokenizer
from tests.support.family_cases import CASES
from tests.support.tiny_families import write_family
from tests.unit.quantize.conftest import quantize

pytestmark = pytest.mark.deep

CPU = torch.device("cpu")
NUM_LAYERS, SEQUENCES, TOKENS = 4, 32, 128
FEW = (f"--max-sequences={SEQUENCES}", f"--sequence-tokens={TOKENS}", "--no-quality")
LARGE = 4000.0  # of keys of one rotary pair, by those before: beyond the 448 of FP8


@pytest.fixture(scope="module")
def outliers(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with two large channels per key head, by whose inverse the queries are divided: no other function.

    The two are one pair of the rotation, or it would mix them with others.
    """
    folder = tmp_path_factory.mktemp("outliers") / "model"
    shutil.copytree(tiny, folder)
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        factor = LARGE if "k_proj" in name else 1 / LARGE if "q_proj" in name else None
        if factor is not None:
            weight.view(-1, 16, weight.shape[1])[:, [3, 11]] *= factor
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def made(outliers: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made") / "gptq"
    assert quantize(outliers, out, "--method=gptq", f"--calibration={data}", *FEW) == 0
    return out


def sequences_of(model: Path, data: Path) -> list[list[int]]:
    """Those that `made` was calibrated with."""
    return read_calibration(
        data,
        Tokenizer.from_folder(model),
        load_model_config(model).eos_token_ids,
        sequence_tokens=TOKENS,
        max_sequences=SEQUENCES,
        seed=0,
        least_tokens=4096,
        hold_out=True,
        must_judge=False,
        judged_tokens=2048,
    ).sequences


@torch.inference_mode()
def test_they_are_of_the_largest_keys_and_values_that_the_model_stores(made: Path, data: Path) -> None:
    """Of the whole quantized model, on the calibration's sequences."""
    config = load_model_config(made)
    model = load_model(config, made, torch.float64, CPU)
    largest = torch.zeros(NUM_LAYERS, 2, dtype=torch.float64)
    positions = torch.arange(TOKENS)
    for sequence in sequences_of(made, data):
        cache = KVCache(config, TOKENS // 16, 16, torch.float64, CPU)
        chunk = AttentionChunk(TOKENS, TOKENS, range(TOKENS // 16), is_contiguous=True)
        model.forward(torch.tensor(sequence), positions, TorchAttention(cache, positions, [chunk]))
        found = [one.abs().amax((1, 2)).view(2, -1).amax(1) for one in cache.heads]
        largest = torch.maximum(largest, torch.stack(found))
    scales = torch.tensor(read_kv_scales(made, NUM_LAYERS), dtype=torch.float64)
    torch.testing.assert_close(scales, largest * HEADROOM / 448, rtol=1e-4, atol=0)
    assert largest[:, 0].min() > 448


def test_a_cache_of_large_keys_is_nearer_with_them(made: Path, tmp_path: Path) -> None:
    without = tmp_path / "without"
    shutil.copytree(made, without)
    for file in without.glob("*.safetensors"):
        kept = {name: one for name, one in load_file(file).items() if not name.endswith(("k_scale", "v_scale"))}
        save_file(kept, file, metadata={"format": "pt"})
    assert read_kv_scales(without, NUM_LAYERS) == [(1.0, 1.0)] * NUM_LAYERS
    exact = scored(made, KVCacheDType.AUTO)
    nearer, farther = (distance(exact, scored(folder, KVCacheDType.FP8)) for folder in (made, without))
    assert nearer < 0.1 * farther


def scored(folder: Path, kv_cache_dtype: KVCacheDType) -> ScoredModel:
    return ScoredModel(
        RuntimeConfig(
            model=str(folder),
            served_model_name="m",
            device=Device.CPU,
            max_model_len=256,
            kv_cache_dtype=kv_cache_dtype,
        )
    )


def distance(base: ScoredModel, candidate: ScoredModel) -> float:
    """Mean KL on texts that are not those of the calibration."""
    generator = torch.Generator().manual_seed(7)
    texts = [torch.randint(97, 105, (150,), generator=generator).tolist() for _ in range(4)]
    documents = [TokenizedDocument(line, "all", ids, 1, is_cut=False) for line, ids in enumerate(texts, start=1)]
    return float(np.concatenate([score(base, candidate, one).kl for one in documents]).mean())


def test_a_latent_has_scales_too(tiny: Path, data: Path, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "vocab_size": 272}
    write_family(tmp_path / "model", **CASES["deepseek-v3"].config | sizes)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny / name, tmp_path / "model" / name)
    flags = ("--method=int8", f"--calibration={data}", *FEW)
    assert quantize(tmp_path / "model", tmp_path / "out", *flags) == 0
    scales = read_kv_scales(tmp_path / "out", load_model_config(tmp_path / "out").num_layers)
    assert all(keys == values != 1 for keys, values in scales)


@pytest.mark.parametrize("method", ["rtn", "nf4", "fp8"])
def test_without_a_pass_over_the_data_there_are_none(method: str, tiny: Path, data: Path, tmp_path: Path) -> None:
    assert quantize(tiny, tmp_path / "out", f"--method={method}", f"--calibration={data}", *FEW) == 0
    assert read_kv_scales(tmp_path / "out", NUM_LAYERS) == [(1.0, 1.0)] * NUM_LAYERS
