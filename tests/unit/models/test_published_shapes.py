"""Shapes of published models, in their own folders' spelling: all is read, and the tensors add up to the known size.

No weights are needed: config.json alone says what a checkpoint must hold. The counts are the models' exact sizes.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from millstream_runtime.models.registry import expected_weights, load_model_config


def shape(
    architecture: str, hidden: int, intermediate: int, layers: int, heads: str, vocabulary: int
) -> dict[str, Any]:
    """`heads`: query heads / key and value heads."""
    num_heads, num_kv_heads = (int(one) for one in heads.split("/"))
    return {
        "architectures": [architecture],
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "vocab_size": vocabulary,
        "torch_dtype": "bfloat16",
    }


LLAMA3_ROPE = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
LONGROPE = {"long_factor": [1.08] * 48, "short_factor": [1.0] * 48}
YARN = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}
PUBLISHED: dict[str, tuple[int, dict[str, Any]]] = {
    "Llama-3.1-8B": (
        8_030_261_248,
        shape("LlamaForCausalLM", 4096, 14336, 32, "32/8", 128256)
        | {"rope_scaling": LLAMA3_ROPE, "rope_theta": 500000.0, "max_position_embeddings": 131072},
    ),
    "Mistral-7B-v0.3": (
        7_248_023_552,
        shape("MistralForCausalLM", 4096, 14336, 32, "32/8", 32768) | {"sliding_window": None, "rope_theta": 1e6},
    ),
    "Qwen2.5-7B": (
        7_615_616_512,
        shape("Qwen2ForCausalLM", 3584, 18944, 28, "28/4", 152064)
        | {"use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 28},
    ),
    "Qwen3-8B": (
        8_190_735_360,
        shape("Qwen3ForCausalLM", 4096, 12288, 36, "32/8", 151936) | {"head_dim": 128, "rope_scaling": None},
    ),
    "gemma-2-2b": (
        2_614_341_888,
        shape("Gemma2ForCausalLM", 2304, 9216, 26, "8/4", 256000)
        | {"head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 4096},
    ),
    "gemma-3-1b": (
        999_885_952,
        shape("Gemma3ForCausalLM", 1152, 6912, 26, "4/1", 262144)
        | {"head_dim": 256, "sliding_window": 512, "sliding_window_pattern": 6, "rope_local_base_freq": 10000}
        | {"rope_theta": 1000000, "rope_scaling": None, "attn_logit_softcapping": None},
    ),
    "Phi-3-mini-128k": (
        3_821_079_552,
        shape("Phi3ForCausalLM", 3072, 8192, 32, "32/32", 32064)
        | {"original_max_position_embeddings": 4096, "max_position_embeddings": 131072, "sliding_window": 262144}
        | {"rope_scaling": LONGROPE | {"type": "su"}},
    ),
    "Phi-4-mini": (
        3_836_021_760,
        shape("Phi3ForCausalLM", 3072, 8192, 32, "24/8", 200064)
        | {"partial_rotary_factor": 0.75, "tie_word_embeddings": True, "max_position_embeddings": 131072}
        | {"original_max_position_embeddings": 4096, "rope_scaling": LONGROPE | {"type": "longrope"}},
    ),
    "Mixtral-8x7B": (
        46_702_792_704,
        shape("MixtralForCausalLM", 4096, 14336, 32, "32/8", 32000)
        | {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None, "rope_theta": 1000000.0},
    ),
    "Qwen3-30B-A3B": (
        30_532_122_624,
        shape("Qwen3MoeForCausalLM", 2048, 6144, 48, "32/4", 151936)
        | {"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
        | {"norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 1},
    ),
    "DeepSeek-V2-Lite": (
        15_706_484_224,
        shape("DeepseekV2ForCausalLM", 2048, 10944, 27, "16/16", 102400)
        | {"q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
        | {"first_k_dense_replace": 1, "n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1408}
        | {"num_experts_per_tok": 6, "n_group": 1, "topk_group": 1, "topk_method": "greedy", "rope_scaling": YARN},
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_tensors_of_a_published_model_add_up(name: str, tmp_path: Path) -> None:
    num_parameters, fields = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    weights = expected_weights(load_model_config(tmp_path), torch.bfloat16)
    assert sum(math.prod(tensor) for tensor in weights.expected.values()) == num_parameters


def test_a_latent_cache_is_small(tmp_path: Path) -> None:
    """What MLA is for: DeepSeek-V2-Lite keeps 576 elements a token and layer, not 16 * (192 + 128)."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["DeepSeek-V2-Lite"][1]))
    assert load_model_config(tmp_path).kv_bytes_per_token(dtype_bytes=2) == 27 * 576 * 2


@pytest.mark.deep
def test_asking_what_a_checkpoint_must_hold_imports_nothing(tmp_path: Path) -> None:
    """It happens at every start: an operation that pulls in torch's symbolic shapes (sympy) would cost five seconds."""
    for name, (_, fields) in PUBLISHED.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(fields))
    script = """
import sys, pathlib, torch
from millstream_runtime.models.registry import expected_weights, load_model_config
configs = [load_model_config(folder) for folder in pathlib.Path(sys.argv[1]).iterdir()]
before = set(sys.modules)
for config in configs:
    assert expected_weights(config, torch.bfloat16).expected
print(sorted(set(sys.modules) - before))
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
