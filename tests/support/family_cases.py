"""The cases by which every model family is tested: a config.json in miniature each, and what sets the family apart.

`counts` names the fields that do, each with another value: with that value this runtime must compute something else, or
the case would prove nothing about the field.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.tiny_families import write_family


@dataclass(frozen=True)
class Case:
    config: dict[str, Any]
    counts: dict[str, Any] = field(default_factory=dict)
    tensor: str = "model.layers.1.self_attn.q_proj.weight"  # one that only this family's loader asks for
    seed: int = 0  # another where two logits come too close to call


def dense(model_type: str, **fields: Any) -> dict[str, Any]:
    """Two layers, four query heads of 12 over two key/value heads."""
    shape = {
        "model_type": model_type,
        "hidden_size": 48,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
    }
    return shape | fields


def rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10000.0, **parameters}


LLAMA3_ROPE = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32}
UNSCALED = {"rope_parameters": rope("default")}
LONGROPE = {
    "short_factor": [1.0, 1.1, 1.2],
    "long_factor": [1.5, 3.0, 6.0],
    "original_max_position_embeddings": 20,  # the second prompt crosses it while it is answered
}
MLA = {
    "num_key_value_heads": 4,
    "head_dim": 8,  # what transformers writes: the rotated part
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
    "kv_lora_rank": 20,
    "q_lora_rank": 24,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
}
YARN_MSCALE = {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9, "beta_fast": 16, "beta_slow": 2}
WINDOW = {"sliding_window": 11}
MIXED_LAYERS = {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}

CASES = {
    # Llama 2 and 3: grouped heads of odd ratios and sizes, biases, tied embeddings, and each rope scaling.
    "llama": Case(dense("llama"), counts={"rms_norm_eps": 0.1}),
    "llama-ratio-5-tied": Case(
        dense("llama", num_attention_heads=5, num_key_value_heads=1, hidden_size=60, tie_word_embeddings=True),
    ),
    "llama-ratio-6-head-80": Case(
        dense("llama", num_attention_heads=6, num_key_value_heads=1, head_dim=80),
    ),
    "llama-ratio-7-head-96": Case(
        dense("llama", num_attention_heads=14, num_key_value_heads=2, head_dim=96, hidden_size=56),
    ),
    "llama-biases": Case(
        dense("llama", attention_bias=True, mlp_bias=True),
        counts={"attention_bias": False, "mlp_bias": False},
        tensor="model.layers.1.mlp.down_proj.bias",
    ),
    "llama-rope-linear": Case(dense("llama", rope_parameters=rope("linear", factor=3.0)), counts=UNSCALED),
    "llama-rope-dynamic": Case(dense("llama", rope_parameters=rope("dynamic", factor=3.0))),
    "llama-rope-llama3": Case(dense("llama", rope_parameters=rope("llama3", **LLAMA3_ROPE)), counts=UNSCALED, seed=1),
    "llama-rope-yarn": Case(dense("llama", rope_parameters=rope("yarn", **YARN)), counts=UNSCALED),
    # Mistral: every layer sees a window.
    "mistral": Case(dense("mistral", **WINDOW), counts={"sliding_window": None}),
    "mistral-no-window": Case(dense("mistral", sliding_window=None), counts={"sliding_window": 11}),
    # Qwen2 and Qwen2.5: bias on queries, keys and values; windows in later layers on request.
    "qwen2": Case(dense("qwen2"), tensor="model.layers.1.self_attn.k_proj.bias"),
    "qwen2-ratio-7-tied": Case(
        dense("qwen2", num_attention_heads=7, num_key_value_heads=1, hidden_size=84, tie_word_embeddings=True),
    ),
    "qwen2-windows": Case(
        dense("qwen2", use_sliding_window=True, max_window_layers=1, **WINDOW),
        counts={"layer_types": ["sliding_attention"] * 2, "use_sliding_window": False},
    ),
    "qwen2.5-yarn": Case(dense("qwen2", rope_parameters=rope("yarn", **YARN)), counts=UNSCALED),
    # Qwen3: norms on query and key heads.
    "qwen3": Case(dense("qwen3"), tensor="model.layers.1.self_attn.q_norm.weight"),
    "qwen3-head-80-tied-biases": Case(
        dense("qwen3", head_dim=80, num_key_value_heads=1, tie_word_embeddings=True, attention_bias=True),
        counts={"attention_bias": False},
    ),
    # Gemma 2: four norms a layer, scaled embeddings, soft caps, windows in every other layer.
    "gemma2": Case(
        dense(
            "gemma2",
            num_hidden_layers=3,
            tie_word_embeddings=True,
            query_pre_attn_scalar=20,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=12.0,
            **WINDOW,
        ),
        counts={
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "query_pre_attn_scalar": 12,
            "sliding_window": 12,
            "layer_types": ["full_attention"] * 3,
        },
        tensor="model.layers.1.post_feedforward_layernorm.weight",
    ),
    # Gemma 3: norms on query and key heads instead of caps; windowed layers turn by their own base.
    "gemma3": Case(
        dense(
            "gemma3_text",
            tie_word_embeddings=True,
            rope_parameters={
                "full_attention": rope("linear", factor=4.0) | {"rope_theta": 1000.0},
                "sliding_attention": rope("default") | {"rope_theta": 100.0},
            },
            **MIXED_LAYERS,
            **WINDOW,
        ),
        counts={
            "layer_types": ["sliding_attention"] * 3,
            "rope_parameters": {"full_attention": rope("default"), "sliding_attention": rope("default")},
        },
        tensor="model.layers.1.self_attn.k_norm.weight",
    ),
    # Phi-3 and Phi-4: fused tensors; partial rotary embedding; LongRoPE.
    "phi3": Case(
        dense("phi3", **WINDOW), counts={"sliding_window": None}, tensor="model.layers.1.mlp.gate_up_proj.weight"
    ),
    "phi4-partial-rotary": Case(
        dense("phi3", tie_word_embeddings=True, rope_parameters=rope("default", partial_rotary_factor=0.5)),
        counts={"rope_parameters": rope("default")},
        tensor="model.layers.1.self_attn.qkv_proj.weight",
    ),
    "phi4-longrope": Case(
        dense(
            "phi3",
            original_max_position_embeddings=20,
            rope_parameters=rope("longrope", partial_rotary_factor=0.5, **LONGROPE),
        ),
        counts={"rope_parameters": rope("default", partial_rotary_factor=0.5)},
        tensor="model.layers.0.self_attn.qkv_proj.weight",
    ),
    # Mixtral: every token goes through two of the experts.
    "mixtral": Case(
        dense("mixtral", num_local_experts=5, num_experts_per_tok=2, **WINDOW),
        counts={"num_experts_per_tok": 1, "sliding_window": None},
        tensor="model.layers.1.block_sparse_moe.experts.4.w3.weight",
    ),
    # Qwen3-MoE: smaller experts, of which some layers have none.
    "qwen3-moe": Case(
        dense(
            "qwen3_moe",
            num_hidden_layers=3,
            num_experts=6,
            num_experts_per_tok=3,
            moe_intermediate_size=16,
            norm_topk_prob=True,
            mlp_only_layers=[1],
        ),
        counts={"norm_topk_prob": False, "num_experts_per_tok": 2},
        tensor="model.layers.2.mlp.experts.5.down_proj.weight",
    ),
    # DeepSeek-V2 and V2-Lite: latent attention, shared experts, softmax routing with and without groups.
    "deepseek-v2": Case(
        dense("deepseek_v2", topk_method="group_limited_greedy", rope_parameters=rope("yarn", **YARN_MSCALE), **MLA),
        counts={"topk_method": "greedy", "routed_scaling_factor": 1.0, **UNSCALED},
        tensor="model.layers.1.self_attn.kv_a_proj_with_mqa.weight",
    ),
    "deepseek-v2-lite": Case(
        dense("deepseek_v2", **MLA | {"q_lora_rank": None, "topk_method": "greedy", "attention_bias": True}),
        tensor="model.layers.1.mlp.shared_experts.up_proj.weight",
    ),
    # DeepSeek-V3: sigmoid routing by groups, with a bias for the choice alone.
    "deepseek-v3": Case(
        dense("deepseek_v3", rope_parameters=rope("yarn", **YARN_MSCALE), **MLA),
        counts={"norm_topk_prob": False, "topk_group": 4, "rope_interleave": False, **UNSCALED},
        tensor="model.layers.1.mlp.gate.e_score_correction_bias",
    ),
    "deepseek-v3-half-split": Case(
        dense("deepseek_v3", rope_interleave=False, **MLA),
        counts={"rope_interleave": True},
        tensor="model.layers.1.self_attn.q_b_proj.weight",
    ),
}


UNEVEN_HEADS = {"llama-ratio-5-tied", "qwen2-ratio-7-tied"}  # odd numbers of query heads: no two ranks can share them


class Models:
    """Cases written once: `folder(name)` and the transformers model of it, `reference(name)`."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._references: dict[str, Any] = {}

    def reference(self, name: str) -> Any:
        if name not in self._references:
            self._references[name] = write_family(self._root / name, seed=CASES[name].seed, **CASES[name].config)
        return self._references[name]

    def folder(self, name: str) -> Path:
        self.reference(name)
        return self._root / name
