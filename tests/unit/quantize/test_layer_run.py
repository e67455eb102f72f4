"""Layers run one by one, with only their own tensors in memory, compute what the whole model computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from millstream_runtime.engine.attention.attention_chunk import AttentionChunk
from millstream_runtime.engine.attention.paged_attention import TorchAttention
from millstream_runtime.engine.kv.kv_cache import KVCache
from millstream_runtime.models.registry import load_model, load_model_config
from millstream_runtime.quantize.layers.layer_run import LayerRun, embed
from millstream_runtime.quantize.layers.layer_weights import LayerWeights
from millstream_runtime.quantize.source_model import SourceModel
from tests.support.family_cases import CASES
from tests.support.tiny_families import prompts_of, write_family

CPU = torch.device("cpu")
FAMILIES = (
    "llama", "llama-biases", "qwen2-windows", "qwen3-head-80-tied-biases", "gemma2", "gemma3", "phi3", "mixtral",
    "qwen3-moe", "deepseek-v2", "deepseek-v3",
)  # fmt: skip


@torch.inference_mode()
@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_are_those_of_the_whole_model(family: str, tmp_path: Path) -> None:
    write_family(tmp_path, **CASES[family].config)
    (prompt,) = prompts_of([18])
    source = SourceModel.open(tmp_path)
    config = source.config_for(len(prompt))
    (hidden,) = embed(config, source.tensors["model.embed_tokens.weight"], [prompt])
    observed: set[str] = set()
    for number, layer in enumerate(source.outline.layers):
        weights = LayerWeights(layer.prefix, source.load_layer(layer), CPU)
        weights.observe = lambda modules, x: observed.update(modules)
        hidden = LayerRun(config, number, weights)(hidden)

    whole = load_model_config(tmp_path)
    model = load_model(whole, tmp_path, torch.float32, CPU)
    positions = torch.arange(len(prompt))
    attention = TorchAttention(
        KVCache(whole, 2, 16, torch.float32, CPU), positions, [AttentionChunk(18, 18, range(2), is_contiguous=True)]
    )
    expected = model.forward(torch.tensor(prompt), positions, attention)
    assert torch.allclose(hidden, expected, atol=1e-4, rtol=1e-4)
    groups = [group for layer in source.outline.layers for group in layer.groups]
    always = {module for group in groups for module in group.modules if ".experts." not in module}
    assert always <= observed
