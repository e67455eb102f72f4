"""On a CPU the planner accepts the checkpoints that the runtime loads, no others, and counts their bytes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from millstream_operator.catalog.config_fields import ConfigError, UnsupportedModelError
from millstream_operator.catalog.inspected_model import read_answer, read_inspected
from millstream_operator.catalog.model_shape import ModelShape
from millstream_operator.catalog.read_shape import read_shape
from millstream_operator.planning.choices.rounded_weights import as_loaded
from millstream_operator.planning.facts import Facts
from millstream_operator.planning.plan import PlanDefaults
from millstream_operator.planning.sizing.cpu_memory import FLOAT32_BYTES, cpu_weights_bytes
from millstream_operator.planning.sizing.weights import rank_weights, weight_format
from millstream_operator.planning.spec_plan import plan_from_spec
from millstream_runtime.config import CAPABILITIES
from millstream_runtime.errors import RuntimeFailure
from millstream_runtime.models.arithmetic import Arithmetic
from millstream_runtime.models.registry import expected_weights, load_model_config
from millstream_runtime.quantization_config.scheme import rounded_while_loading
from millstream_runtime.sources.inspection.inspect import inspect_folder
from millstream_runtime.sources.inspection.shape import describe, to_json
from millstream_runtime.sources.safetensors_header import WeightsSummary
from tests.support.family_cases import dense
from tests.support.gguf_files import TypeOf, q4_k_m, write_gguf
from tests.support.llmdeployments import deployment
from tests.support.tiny_families import write_family

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
    "max_position_embeddings": 2048,
    "torch_dtype": "float16",
}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
DEEPSEEK: dict[str, Any] = LLAMA | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_key_value_heads": 16,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "kv_lora_rank": 256,
    "q_lora_rank": 384,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 512,
    "n_group": 1,
    "topk_group": 1,
}
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}
NF4: dict[str, Any] = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
INT8: dict[str, Any] = {"quant_method": "bitsandbytes", "load_in_8bit": True}
FP8: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic"}


def compressed(packing: str, **weights: Any) -> dict[str, Any]:
    """A quantization_config of compressed-tensors with one group."""
    group = {"targets": ["Linear"], "weights": {"type": "int", "symmetric": True, **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": packing,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


SERVED: dict[str, dict[str, Any]] = {
    "awq, symmetric": AWQ | {"zero_point": False},
    "awq": AWQ,
    "awq, groups of 64, other spelling": {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "version": "GEMM"},
    "awq, one group": AWQ | {"group_size": -1},
    "awq, a layer kept": AWQ | {"modules_to_not_convert": ["model.layers.0", "lm_head"]},
    "awq, a glob": AWQ | {"modules_to_not_convert": ["model.layers.*.mlp"]},
    "awq, layers by their first digit": AWQ | {"ignore": ["re:model.layers.(0|2).*"]},
    "awq, a trailing dot": AWQ | {"modules_to_not_convert": ["model.layers.0.", ".self_attn."]},
    "awq, one group by a large size": AWQ | {"group_size": 1 << 17},
    "awq, all kept": AWQ | {"modules_to_not_convert": ["Linear"]},
    "gptq": GPTQ,
    "gptq, act-order": GPTQ | {"desc_act": True},
    "gptq, attention alone": GPTQ | {"modules_in_block_to_quantize": [["self_attn.q_proj"], ["self_attn.o_proj"]]},
    "gptq, 8 bit": GPTQ | {"bits": 8, "group_size": 32},
    "gptq, second version": GPTQ | {"checkpoint_format": "gptq_v2"},
    "fp8, dynamic": FP8,
    "fp8, static": FP8 | {"activation_scheme": "static", "ignored_layers": ["lm_head"]},
    "fp8, layers kept": FP8 | {"ignored_layers": ["lm_head", "model.layers.0", "model.layers.1.mlp.down_proj"]},
    "fp8, one name": FP8 | {"modules_to_not_convert": "self_attn"},
    "fp8, lists of names": FP8
    | {"modules_to_not_convert": [["self_attn.k_proj", "self_attn.v_proj"], ["mlp.up_proj"]]},
    "fp8, blocks": FP8 | {"weight_block_size": [128, 128]},
    "fp8, fbgemm": {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["model.layers.2"]},
    "int8, bitsandbytes": INT8,
    "int8, another threshold": INT8 | {"llm_int8_threshold": 0.0, "llm_int8_skip_modules": ["lm_head"]},
    "nf4": NF4,
    "nf4, double quantization": NF4 | {"bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": "bfloat16"},
    "nf4, layers kept": NF4 | {"llm_int8_skip_modules": ["lm_head", "model.layers.0"]},
    "int4, compressed-tensors": compressed("pack-quantized", num_bits=4, strategy="group", group_size=128),
    "int4, asymmetric": compressed("pack-quantized", num_bits=4, strategy="group", group_size=128, symmetric=False),
    "int4, act-order": compressed("pack-quantized", num_bits=4, strategy="group", group_size=128, actorder="group"),
    "int4, channel": compressed("pack-quantized", num_bits=4, strategy="channel", group_size=None),
    "int8, weights only": compressed("pack-quantized", num_bits=8, strategy="group", group_size=64),
    "int8, W8A8": compressed("int-quantized", num_bits=8, strategy="channel"),
    "fp8, compressed-tensors": compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
    "fp8, compressed blocks": compressed(
        "float-quantized", num_bits=8, type="float", strategy="block", block_structure=[128, 128]
    ),
}
REFUSED: dict[str, dict[str, Any]] = {
    "gptq, 3 bit": GPTQ | {"bits": 3},
    "gptq, 2 bit": GPTQ | {"bits": 2},
    "gptq, marlin": GPTQ | {"checkpoint_format": "marlin"},
    "gptq, marlin by a flag": GPTQ | {"is_marlin_format": True},
    "gptq, quantized head": GPTQ | {"lm_head": True},
    "awq, a group that does not divide": AWQ | {"group_size": 96},
    "awq, gemv": AWQ | {"version": "gemv"},
    "awq, marlin": AWQ | {"version": "marlin"},
    "awq, 8 bit": AWQ | {"bits": 8},
    "fp8, e5m2": FP8 | {"fmt": "e5m2"},
    "fp4": NF4 | {"bnb_4bit_quant_type": "fp4"},
    "nf4 in bfloat16": NF4 | {"bnb_4bit_quant_storage": "bfloat16"},
    "int8, an impossible threshold": INT8 | {"llm_int8_threshold": -1},
    "int2, compressed-tensors": compressed("pack-quantized", num_bits=2, strategy="channel"),
    "naive, int4 in bytes": compressed("naive-quantized", num_bits=4, strategy="channel"),
    "int4 in bytes": compressed("int-quantized", num_bits=4, strategy="channel"),
    "int8, asymmetric": compressed("int-quantized", num_bits=8, strategy="channel", symmetric=False),
    "marlin, compressed-tensors": compressed("marlin-24", num_bits=4, strategy="channel"),
    "sparse": compressed("pack-quantized", num_bits=4, strategy="channel")
    | {"sparsity_config": {"format": "sparse-24-bitmask"}},
    "a quantized head": compressed("int-quantized", num_bits=8, strategy="channel") | {"ignore": []},
    "nvfp4, compressed-tensors": compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group"),
    "mxfp4, compressed-tensors": compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group"),
    "sparseml": compressed("pack-quantized", num_bits=4, strategy="channel") | {"quant_method": "sparseml"},
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "mxfp4": {"quant_method": "mxfp4"},
    "unknown": {"quant_method": "quip"},
    "no method": {"bits": 4},
    "a pattern that may take years": AWQ | {"modules_to_not_convert": ["re:(a+)+$"]},
}


def held_bytes(folder: Path, weights_dtype: torch.dtype = torch.float16) -> int:
    """What the runtime holds of a folder's weights; of those that are not quantized, in 16 bits."""
    model = load_model_config(folder)
    return expected_weights(model, Arithmetic(torch.float32, weights_dtype, weights_dtype)).num_bytes


@pytest.mark.parametrize("name", SERVED)
def test_what_the_runtime_loads_can_be_planned(name: str, tmp_path: Path) -> None:
    config = LLAMA | {"quantization_config": SERVED[name]}
    assert _runtime_loads(config, tmp_path)
    assert _missing(config) == []


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_runtime_refuses_is_not_planned(name: str, tmp_path: Path) -> None:
    config = LLAMA | {"quantization_config": REFUSED[name]}
    assert not _runtime_loads(config, tmp_path)
    assert _missing(config) != []


@pytest.mark.parametrize("name", SERVED)
def test_planned_bytes_are_those_of_the_tensors(name: str, tmp_path: Path) -> None:
    config = LLAMA | {"quantization_config": SERVED[name]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    planned_bytes, taken_bytes = cpu_weights_bytes(read_shape(config)), held_bytes(tmp_path)
    assert 0.99 * taken_bytes <= planned_bytes <= 1.02 * taken_bytes, "zero points are counted of symmetric ones, too"


@pytest.mark.parametrize("kept", [[], ["kv_b_proj"], ["re:.*self_attn.*"]])
@pytest.mark.parametrize("name", ["awq", "gptq, 8 bit", "fp8, dynamic"])
def test_what_is_dequantized_once_is_planned_dequantized(name: str, kept: list[str], tmp_path: Path) -> None:
    """DeepSeek's `kv_b_proj`."""
    settings = SERVED[name] | {"modules_to_not_convert": kept}
    config = DEEPSEEK | {"quantization_config": settings}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert cpu_weights_bytes(read_shape(config)) == pytest.approx(held_bytes(tmp_path), rel=0.01)


@pytest.mark.deep
@pytest.mark.matrix("mix")
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2"])
@pytest.mark.parametrize("mix", ["Q8_0", "Q4_K_M", "Q2_K"])
def test_a_gguf_file_is_planned_as_it_is_loaded(mix: str, family: str, tmp_path: Path) -> None:
    """From an inspection, as the operator plans it: the header says all."""
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 3, "head_dim": 128}
    write_family(tmp_path / "plain", **dense(family, **sizes))
    types: dict[str, TypeOf] = {
        "Q8_0": lambda module: "Q8_0",
        "Q4_K_M": q4_k_m,
        "Q2_K": lambda module: "Q3_K" if module.endswith("v_proj") else "Q2_K",
    }
    write_gguf(tmp_path / "plain", tmp_path / "packed" / "model.gguf", types[mix])
    shape = read_inspected(read_answer(to_json(inspect_folder(tmp_path / "packed")))).shape
    taken = expected_weights(load_model_config(tmp_path / "packed"), torch.float32).num_bytes
    assert cpu_weights_bytes(shape) == pytest.approx(taken, rel=0.01)
    assert _requires(shape) == []


@pytest.mark.parametrize("name", SERVED | REFUSED)
def test_an_inspection_says_what_the_config_says(name: str) -> None:
    """The operator plans from an inspection, `millstream plan` from a folder: both accept the same, and count alike."""
    config = LLAMA | {"quantization_config": (SERVED | REFUSED)[name]}
    described = describe({"kind": "path"}, None, None, {"config.json": json.dumps(config).encode()}, WeightsSummary())
    answer = json.loads(to_json(described))
    inspected = answer["config"] | {"quantization_config": answer["quantization_config"]}
    assert bool(_missing(inspected)) == (name in REFUSED)
    if name in SERVED:
        assert cpu_weights_bytes(read_shape(inspected)) == cpu_weights_bytes(read_shape(config))


@pytest.mark.parametrize("config", [LLAMA, DEEPSEEK], ids=["llama", "deepseek"])
def test_weights_that_are_rounded_while_they_are_loaded_are_planned_so(config: dict[str, Any], tmp_path: Path) -> None:
    """On a CPU and on a GPU, where DeepSeek's `kv_b_proj` keeps its type."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = replace(load_model_config(tmp_path), quantization=rounded_while_loading())
    asked = deployment(quantization={"method": "FP8"}).spec
    shape = as_loaded(asked, read_shape(config), CAPABILITIES)
    taken = expected_weights(model, Arithmetic(torch.float32, torch.float16, torch.float16)).num_bytes
    assert cpu_weights_bytes(shape) == pytest.approx(taken, rel=0.01)
    on_a_gpu = rank_weights(shape, weight_format(shape, "FP8")).total_bytes
    assert on_a_gpu == pytest.approx(expected_weights(model, torch.float16).num_bytes, rel=0.01)


@pytest.mark.parametrize("stored", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("config", [LLAMA, DEEPSEEK], ids=["llama", "deepseek"])
def test_plain_weights_are_counted_as_they_are_held(config: dict[str, Any], stored: str, tmp_path: Path) -> None:
    """Norms, routers and DeepSeek's `kv_b_proj` in float32, whatever the checkpoint's dtype."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = read_shape(config | {"torch_dtype": stored})
    assert cpu_weights_bytes(shape) == held_bytes(tmp_path, getattr(torch, stored))
    if stored == "float32":
        assert cpu_weights_bytes(shape) == shape.parameters.total * FLOAT32_BYTES


PUBLISHED = Path(__file__).resolve().parents[2] / "data" / "model_configs"


@pytest.mark.parametrize("name", sorted(path.stem for path in PUBLISHED.glob("*.json")))
def test_a_published_model_is_counted_as_it_is_held(name: str, tmp_path: Path) -> None:
    config = json.loads((PUBLISHED / f"{name}.json").read_text(encoding="utf-8"))
    shape = read_shape(config)
    if shape.family not in CAPABILITIES.model_families or shape.quantization is not None:
        pytest.skip("not served by this runtime, or quantized, which the tests above compare")
    (tmp_path / "config.json").write_text(json.dumps(config))
    dtypes = {"BF16": torch.bfloat16, "FP16": torch.float16, "FP32": torch.float32}
    assert cpu_weights_bytes(shape) == pytest.approx(held_bytes(tmp_path, dtypes[shape.dtype]), rel=0.001)


def _runtime_loads(config: dict[str, Any], folder: Path) -> bool:
    (folder / "config.json").write_text(json.dumps(config))
    try:
        model = load_model_config(folder)
        expected_weights(model, torch.float32)
    except RuntimeFailure:
        return False
    scheme = model.quantization
    return scheme is not None and scheme.method in CAPABILITIES.cpu_quantization_methods


def _missing(config: dict[str, Any]) -> list[str]:
    """What a plan on a CPU lacks; or why there is none."""
    try:
        shape = read_shape(config)
    except (ConfigError, UnsupportedModelError) as problem:
        return [str(problem)]
    return _requires(shape)


def _requires(shape: ModelShape) -> list[str]:
    planned = plan_from_spec(
        deployment(accelerator={"type": "CPU"}), PlanDefaults("registry.example.com/runtime:1"), Facts(shape=shape)
    )
    return [*planned.requires]
