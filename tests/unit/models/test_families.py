"""Every model family computes what transformers computes: the same logits, and greedy answers token for token.

A case is a config.json in miniature. `counts` names the fields that set the family apart, each with another value: with
that value this runtime must compute something else, or the case would prove nothing about the field.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from millstream_runtime.errors import Reason, RuntimeFailure
from millstream_runtime.models.registry import FAMILIES, load_model, load_model_config
from tests.support.tiny_families import (
    engine_answers,
    make_engine,
    model_logits,
    prompts_of,
    reference_answers,
    reference_logits,
    with_fields,
    write_family,
)

PROMPT_LENGTHS = (5, 18, 41)
NEW_TOKENS = 8


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
REFUSED = {name: CASES[name] for name in CASES if name.split("-")[0] != "llama" or name == "llama-biases"}


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


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("families"))


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Any:
    """Tiny products gain nothing from a second thread, and lose a lot to one that has to wait for a core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", CASES)
def test_greedy_answers_equal_transformers_alone_batched_and_chunked(name: str, models: Models) -> None:
    prompts = prompts_of(PROMPT_LENGTHS)
    expected = reference_answers(models.reference(name), prompts, NEW_TOKENS)
    engine = make_engine(models.folder(name))
    assert [engine_answers(engine, [prompt], NEW_TOKENS)[0] for prompt in prompts] == expected
    assert engine_answers(engine, prompts, NEW_TOKENS) == expected
    chunked = make_engine(models.folder(name), max_num_batched_tokens=17)
    assert engine_answers(chunked, prompts, NEW_TOKENS) == expected


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers_in_float64_and_every_field_counts(name: str, models: Models, tmp_path: Path) -> None:
    """Tolerances are float32's: transformers keeps norms, routers and angles in it whatever the model's type."""
    [prompt] = prompts_of([41])
    expected = reference_logits(models.reference(name), prompt)
    torch.testing.assert_close(
        model_logits(models.folder(name), prompt, chunk_tokens=23), expected, rtol=1e-4, atol=1e-4
    )
    for field_name, other in CASES[name].counts.items():
        folder = with_fields(models.folder(name), tmp_path / field_name, **{field_name: other})
        difference = (model_logits(folder, prompt, chunk_tokens=41) - expected).abs().max()
        assert difference > 1e-2, f"{field_name} = {other} computes the same"


@pytest.mark.parametrize("name", CASES)
def test_bfloat16_is_as_exact_as_in_transformers(name: str, models: Models) -> None:
    """Both against float64: rounded in the same places or fewer, the error is of the same size."""
    [prompt] = prompts_of([41])
    exact = reference_logits(models.reference(name), prompt)

    def error(logits: torch.Tensor) -> float:
        return float((logits.double() - exact).square().mean().sqrt())

    ours = model_logits(models.folder(name), prompt, chunk_tokens=23, dtype=torch.bfloat16)
    theirs = reference_logits(models.reference(name), prompt, torch.bfloat16)
    assert error(ours) <= 2 * error(theirs)


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("damage", ["missing", "shape", "dtype", "nan"])
def test_damaged_tensors_are_refused_by_name(name: str, damage: str, models: Models, tmp_path: Path) -> None:
    source, tensor_name = models.folder(name), CASES[name].tensor
    tensors = {key: value for path in source.glob("*.safetensors") for key, value in load_file(path).items()}
    tensor = tensors.pop(tensor_name)
    if damage == "shape":
        tensors[tensor_name] = tensor[:-1].clone()
    elif damage == "dtype":
        tensors[tensor_name] = tensor.to(torch.int8)
    elif damage == "nan":
        tensors[tensor_name] = tensor.fill_(float("nan"))
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(RuntimeFailure) as caught:
        load_model(load_model_config(tmp_path), tmp_path, torch.float32, torch.device("cpu"))
    assert caught.value.reason is Reason.CHECKPOINT_INVALID
    assert tensor_name in caught.value.message
    assert "\n" not in caught.value.message


def test_an_unsupported_architecture_is_refused_with_the_list_of_the_supported(models: Models, tmp_path: Path) -> None:
    folder = with_fields(models.folder("llama"), tmp_path / "falcon", architectures=["FalconForCausalLM"])
    with pytest.raises(RuntimeFailure) as caught:
        load_model_config(folder)
    assert caught.value.reason is Reason.UNSUPPORTED_BY_RUNTIME
    assert "'FalconForCausalLM'" in caught.value.message
    assert all(architecture in caught.value.message for architecture in FAMILIES)
    assert "\n" not in caught.value.message


def test_every_architecture_of_the_registry_has_a_case(models: Models) -> None:
    assert {load_model_config(models.folder(name)).architecture for name in CASES} == set(FAMILIES)


@pytest.mark.parametrize(
    ("name", "fields", "says"),
    [
        ("gemma2", {"layer_types": ["sliding_attention"]}, "layer_types"),
        ("gemma2", {"hidden_activation": "silu"}, "hidden_activation 'silu'"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma2", {"attn_logit_softcapping": -1.0}, "attn_logit_softcapping is -1.0"),
        ("mistral", {"sliding_window": 0}, "sliding_window is 0"),
        ("phi4-longrope", {"rope_parameters": rope("longrope", short_factor=[1.0])}, "short_factor is [1.0]"),
        ("phi3", {"rope_parameters": rope("llama3")}, "rope_type 'llama3'"),
        (
            "phi4-partial-rotary",
            {"rope_parameters": rope("default", partial_rotary_factor=0.26)},
            "partial_rotary_factor",
        ),
        ("llama", {"rope_parameters": rope("default", partial_rotary_factor=0.5)}, "partial_rotary_factor 0.5"),
        ("llama", {"rope_parameters": rope("yarn", factor="4")}, "rope_parameters.factor is '4'"),
        ("llama", {"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ("mixtral", {"num_experts_per_tok": 6}, "num_experts_per_tok is 6"),
        ("qwen3-moe", {"mlp_only_layers": "1"}, "mlp_only_layers is '1'"),
        ("deepseek-v2", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc'"),
        ("deepseek-v3", {"n_group": 3}, "n_group is 3"),
        ("deepseek-v3", {"first_k_dense_replace": -1}, "first_k_dense_replace is -1"),
    ],
)
def test_impossible_fields_are_refused_by_name(
    name: str, fields: dict[str, Any], says: str, models: Models, tmp_path: Path
) -> None:
    folder = with_fields(models.folder(name), tmp_path / "model", **fields)
    with pytest.raises(RuntimeFailure) as caught:
        load_model_config(folder)
    assert says in caught.value.message
    assert "\n" not in caught.value.message
