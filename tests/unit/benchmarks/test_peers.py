"""The parts of `benchmarks.vs_peers` that would make a comparison unfair if they were wrong."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from benchmarks import vs_peers
from benchmarks.cases import make_cases
from benchmarks.contenders import Contender
from benchmarks.gguf_llama import gguf_name, interleave_rotary_halves, read_safetensors
from benchmarks.llama_cpp_side import NotInstalledError, find_interpreter
from benchmarks.memory_stream import weight_bytes_per_token
from tests.support.tiny_model import write_tiny_model


def rotate_halves(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """Hugging Face: dimension i turns with i + half. `x` is [heads, head_dim]."""
    one, other = np.split(x, 2, axis=-1)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([one * cos - other * sin, other * cos + one * sin], axis=-1)


def rotate_pairs(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """llama.cpp: dimension 2i turns with 2i + 1."""
    one, other = x[..., 0::2], x[..., 1::2]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.stack([one * cos - other * sin, other * cos + one * sin], axis=-1).reshape(x.shape)


def test_a_converted_projection_gives_llama_cpp_the_same_attention_scores() -> None:
    rng = np.random.default_rng(0)
    heads, head_dim, hidden = 3, 8, 12
    query, key = (rng.standard_normal((heads * head_dim, hidden)).astype(np.float32) for _ in range(2))
    tokens = rng.standard_normal((2, hidden)).astype(np.float32)
    angles = [position * 10000.0 ** (-np.arange(0, head_dim, 2) / head_dim) for position in (3, 7)]

    def scores(rotate: object, q_weight: np.ndarray, k_weight: np.ndarray) -> np.ndarray:
        assert callable(rotate)
        q = rotate((q_weight @ tokens[0]).reshape(heads, head_dim), angles[0])
        k = rotate((k_weight @ tokens[1]).reshape(heads, head_dim), angles[1])
        return np.asarray((q * k).sum(-1))

    wanted = scores(rotate_halves, query, key)
    converted = scores(rotate_pairs, interleave_rotary_halves(query, heads), interleave_rotary_halves(key, heads))
    np.testing.assert_allclose(converted, wanted, rtol=1e-4, atol=1e-5)
    assert not np.allclose(scores(rotate_pairs, query, key), wanted)


def test_every_tensor_of_a_llama_has_a_gguf_name_and_others_are_refused() -> None:
    assert gguf_name("model.layers.11.mlp.up_proj.weight") == "blk.11.ffn_up.weight"
    assert gguf_name("lm_head.weight") == "output.weight"
    assert gguf_name("model.layers.0.self_attn.rotary_emb.inv_freq") is None
    with pytest.raises(ValueError, match=r"q_norm\.weight is not a tensor of the Llama family"):
        gguf_name("model.layers.0.self_attn.q_norm.weight")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_checkpoints_of_every_float_type_are_read_exactly(tmp_path: Path, dtype: torch.dtype) -> None:
    weights = {"a": torch.randn(3, 5).to(dtype), "b": torch.tensor([1.5, -0.25, 3e-5]).to(dtype)}
    save_file(weights, tmp_path / "m.safetensors", metadata={"format": "pt"})
    found = dict(read_safetensors(tmp_path / "m.safetensors"))
    assert found.keys() == weights.keys()
    for name, weight in weights.items():
        np.testing.assert_array_equal(found[name], weight.float().numpy())


def test_rounds_ask_for_the_same_lengths_and_never_for_the_same_prompt() -> None:
    first, second = make_cases(4096, 0), make_cases(4096, 1)
    for one, other in zip(first, second, strict=True):
        assert [len(prompt) for prompt in one.prompts] == [len(prompt) for prompt in other.prompts]
        assert one.new_tokens == other.new_tokens
        assert all(a != b for a, b in zip(one.prompts, other.prompts, strict=True))
    assert (min(first[2].new_tokens), max(first[2].new_tokens)) == (32, 512)


def test_only_the_slow_types_of_a_kind_are_dropped() -> None:
    seconds = {
        "millstream float32": 9.0,
        "transformers generate float32": 1.0,
        "transformers generate bfloat16": 1.7,
        "transformers continuous float32 eager": 5.0,
        "transformers continuous float16 sdpa": 6.0,
    }
    assert vs_peers.far_behind(seconds) == {"transformers generate bfloat16": 1.7}


def test_the_ratio_is_against_the_best_of_transformers() -> None:
    case = make_cases(100)[0]
    timings = {
        "millstream float32": vs_peers.Timing([2.0, 1.0, 3.0], [[1]]),
        "transformers generate float32": vs_peers.Timing([8.0, 8.0, 9.0], [[1]]),
        "transformers continuous float32 sdpa": vs_peers.Timing([4.0, 5.0, 3.0], [[2]]),
        "llama.cpp float32": vs_peers.Timing([1.0, 1.0, 1.0], [[1]]),
    }
    result = vs_peers.summarise(case, timings, {})
    assert result["best_transformers"] == "transformers continuous float32 sdpa"
    assert result["ratio_to_best_transformers"] == 2.0
    assert result["ratio_to_llama_cpp"] == 0.5
    assert result["equal_answers"]["transformers continuous float32 sdpa"] == 0


def test_a_peer_that_cannot_run_leaves_a_reason_and_no_crash(tmp_path: Path) -> None:
    sides = vs_peers.Field()

    def fail() -> Contender:
        raise RuntimeError("no such\n instruction")

    sides.invite("peer", fail)
    assert sides.absent == {"peer": "no such instruction"}
    with pytest.raises(NotInstalledError, match="make peers"):
        find_interpreter(tmp_path / "python")


def test_weights_read_for_a_token_leave_out_an_embedding_table_that_is_not_the_head(tmp_path: Path) -> None:
    untied = write_tiny_model(tmp_path / "untied")
    tied = write_tiny_model(tmp_path / "tied", tie_word_embeddings=True)
    # Both read one [vocabulary, hidden] matrix, as the head.
    assert weight_bytes_per_token(untied) == weight_bytes_per_token(tied)
    per_layer = 64 * (64 + 32 + 32) + 64 * 64 + 3 * 64 * 128 + 2 * 64
    assert weight_bytes_per_token(tied) == 4 * (272 * 64 + 2 * per_layer + 64)
