"""A GGUF file's metadata as the fields of a config.json.

    llama.block_count                  num_hidden_layers
    llama.attention.head_count_kv      num_key_value_heads
    llama.rope.freq_base               rope_theta
    tokenizer.ggml.eos_token_id        eos_token_id
    the tensors' types                 quantization_config {"quant_method": "gguf", "elements": …, "modules": …}

What a file does not say, llama.cpp's code does: the same is done here, and named. Mixtures of experts are refused.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from millstream_runtime.gguf.header import GgufTensor, invalid_gguf
from millstream_runtime.gguf.metadata_fields import MetadataFields
from millstream_runtime.gguf.special_tokens import end_tokens
from millstream_runtime.gguf.tensor_names import LINEAR

EMBEDDING, HEAD_WEIGHT = "model.embed_tokens.weight", "lm_head.weight"
ATTENTION_BIAS, MLP_BIAS = "model.layers.0.self_attn.q_proj.bias", "model.layers.0.mlp.gate_proj.bias"
DTYPES = {"F16": "float16", "BF16": "bfloat16"}  # of the embedding; quantized ones are computed in float32
NO_MODELS = ("adapter", "imatrix", "mmproj")  # what else a GGUF file may hold, by `general.type`
ROPE_TYPES, ATTENTION_FACTOR = ("none", "linear", "yarn"), "rope.scaling.attn_factor"
GEMMA3_WINDOW_PATTERN, GEMMA3_LOCAL_THETA = 6, 10_000.0
# Of 27 billion parameters: scores are divided by the root of hidden size / heads, not of a head's size.
GEMMA_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}

ATTENTION_FACTOR = "rope.scaling.attn_factor"
# What else llama.cpp knows for YaRN; here it must have the value at which it changes nothing.
NEUTRAL_IN_YARN = {
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
}
ROPE_FIELDS = (
    "rope.dimension_count",
    "rope.freq_base",
    "rope.freq_base_swa",
    "rope.scale_linear",  # older files' name of scaling.factor
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",  # says where the model comes from; llama.cpp computes nothing with it
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    ATTENTION_FACTOR,
    *NEUTRAL_IN_YARN,
)

Tensors = Mapping[str, GgufTensor]  # by their names in a Hugging Face checkpoint


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """`model_type` and `architecture` as config.json names them. `permuted`: query and key rows are in pairs."""

    model_type: str
    architecture: str
    permuted: bool = False
    more: Callable[[MetadataFields, dict[str, Any], str], dict[str, Any]] | None = None


def config_values(
    metadata: Mapping[str, Any], tensors: Tensors, where: str, rope_factors: Sequence[float] = ()
) -> dict[str, Any]:
    """The fields. `rope_factors`: of `rope_freqs.weight`, one for each pair.

    Raises:
        RuntimeFailure: CheckpointInvalid or UnsupportedByRuntime, naming the field.
    """
    general = MetadataFields(metadata, where)
    name = general.word("general.architecture")
    if (content := general.word("general.type", "model")) in NO_MODELS:
        raise general.unsupported("general.type", content, "model")
    if name not in ARCHITECTURES:
        raise general.unsupported("general.architecture", name or "missing", ", ".join(ARCHITECTURES))
    known, fields = ARCHITECTURES[name], MetadataFields(metadata, where, f"{name}.")
    if "expert_count" in fields and fields.integer("expert_count", least=0):
        raise fields.unsupported("expert_count", fields.integer("expert_count"), "models without experts")
    values = _sizes(fields, tensors, where) | {
        "architectures": [known.architecture],
        "model_type": known.model_type,
        "torch_dtype": DTYPES.get(tensors[EMBEDDING].type.name, "float32"),
        "tie_word_embeddings": HEAD_WEIGHT not in tensors,
        "attention_bias": ATTENTION_BIAS in tensors and known.model_type == "llama",
        "mlp_bias": MLP_BIAS in tensors,
        "quantization_config": _quantization(tensors),
    }
    if ends := end_tokens(metadata):
        values["eos_token_id"] = ends
    values |= _rope(fields, values, rope_factors)
    if known.more is not None:
        values |= known.more(fields, values, name)
    return values


def _sizes(fields: MetadataFields, tensors: Tensors, where: str) -> dict[str, Any]:
    embedding = tensors.get(EMBEDDING)
    if embedding is None or len(embedding.shape) != 2:
        raise invalid_gguf(where, "has no tensor token_embd.weight of two dimensions")
    hidden, heads = fields.integer("embedding_length"), fields.integer("attention.head_count")
    head_dim = fields.integer("attention.key_length", hidden // heads)
    if (value_dim := fields.integer("attention.value_length", head_dim)) != head_dim:
        raise fields.unsupported("attention.value_length", value_dim, f"{head_dim}, that of attention.key_length")
    return {
        "hidden_size": hidden,
        "intermediate_size": fields.integer("feed_forward_length"),
        "num_hidden_layers": fields.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": embedding.shape[0],
        "max_position_embeddings": fields.integer("context_length"),
        "rms_norm_eps": fields.decimal("attention.layer_norm_rms_epsilon"),
    }


def _quantization(tensors: Tensors) -> dict[str, Any] | None:
    """`elements`: weights of the layers' linear modules by type. `modules`: the quantized ones."""
    linear = tuple(f".{name}.weight" for name in LINEAR.values())
    of_layers = {name: one for name, one in tensors.items() if name.endswith(linear)}
    modules = {name.removesuffix(".weight"): one.type.name for name, one in of_layers.items() if one.type.is_quantized}
    if not modules:
        return None
    elements: Counter[str] = Counter()
    for one in of_layers.values():
        elements[one.type.name] += one.num_elements
    return {"quant_method": "gguf", "elements": dict(sorted(elements.items())), "modules": modules}


def _rope(fields: MetadataFields, values: Mapping[str, Any], factors: Sequence[float]) -> dict[str, Any]:
    """`factors`: of `rope_freqs.weight`. Scaling is llama.cpp's: a factor without a type is linear."""
    fields.refuse_unknown("rope.", ROPE_FIELDS)
    theta, head_dim = fields.decimal("rope.freq_base", 10_000.0), values["head_dim"]
    if (turned := fields.integer("rope.dimension_count", head_dim)) != head_dim:
        raise fields.unsupported("rope.dimension_count", turned, f"{head_dim}, all of a head")
    kind, factor = _rope_scaling(fields, values["model_type"])
    found: dict[str, Any] = {"rope_theta": theta}
    if factors:
        if len(factors) != head_dim // 2:
            raise fields.wrong("rope_freqs.weight", f"a list of {len(factors)}", f"one of {head_dim // 2}")
        if kind != "none" and factor != 1.0:
            raise fields.unsupported("rope.scaling.type", kind, "none, where the file holds rope_freqs.weight")
        # As Llama 3's: each pair divided by its own number at every length.
        length = values["max_position_embeddings"]
        scaling = {"rope_type": "longrope", "factor": 1.0, "attention_factor": 1.0, "short_factor": list(factors)}
        found["rope_scaling"] = scaling | {"long_factor": list(factors), "original_max_position_embeddings": length}
    elif kind == "yarn":
        found["rope_scaling"] = _yarn(fields, factor, values["max_position_embeddings"])
    elif kind == "linear" and factor != 1.0:
        found["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    return found


def _rope_scaling(fields: MetadataFields, model_type: str) -> tuple[str, float]:
    """The type and the factor: `rope.scale_linear` is the factor's older name, and a factor without a type is linear.

    A factor of 0 is none, as in llama.cpp. A type without a factor is a mistake of the file's writer.
    """
    name = next((name for name in ("rope.scaling.factor", "rope.scale_linear") if name in fields), None)
    factor = 1.0 if name is None or fields.is_zero(name) else fields.decimal(name)
    kind = fields.word("rope.scaling.type", "linear" if factor != 1.0 else "none")
    if kind not in ROPE_TYPES:
        raise fields.unsupported("rope.scaling.type", kind, ", ".join(ROPE_TYPES))
    if kind != "none" and name is None:
        raise fields.wrong("rope.scaling.factor", None, "a positive number")
    # Of Gemma 3 llama.cpp multiplies the layers with a window, too, which config.json cannot say.
    is_read = kind == "yarn" and model_type != "gemma3"
    for name, value in (NEUTRAL_IN_YARN if is_read else NEUTRAL_IN_YARN | {ATTENTION_FACTOR: 1.0}).items():
        if name in fields and fields.any_number(name) != value:
            raise fields.unsupported(name, fields.any_number(name), f"{value:g}")
    return kind, factor


def _yarn(fields: MetadataFields, factor: float, context_length: int) -> dict[str, Any]:
    """`attn_factor` is on cosines and sines, on top of YaRN's own temperature."""
    original = fields.integer("rope.scaling.original_context_length", context_length)
    scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    if (attention_factor := fields.decimal(ATTENTION_FACTOR, 1.0)) != 1.0:
        scaling["attention_factor"] = attention_factor * (1.0 + 0.1 * math.log(max(factor, 1.0)))
    for name in ("beta_fast", "beta_slow"):
        if f"rope.scaling.yarn_{name}" in fields:
            scaling[name] = fields.decimal(f"rope.scaling.yarn_{name}")
    return scaling


def _gemma(fields: MetadataFields, values: dict[str, Any], name: str) -> dict[str, Any]:
    """What Gemma 2 and 3 share."""
    heads, hidden = values["num_attention_heads"], values["hidden_size"]
    is_27b = values["num_hidden_layers"] == GEMMA_LAYERS_OF_27B[name]
    found: dict[str, Any] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": hidden // heads if is_27b else values["head_dim"],
    }
    if "attention.sliding_window" in fields:
        found["sliding_window"] = fields.integer("attention.sliding_window")
    for field in ("attn_logit_softcapping", "final_logit_softcapping"):
        if field in fields:
            found[field] = fields.decimal(field)
    return found


def _gemma3(fields: MetadataFields, values: dict[str, Any], name: str) -> dict[str, Any]:
    local = fields.decimal("rope.freq_base_swa", GEMMA3_LOCAL_THETA)
    theta = fields.decimal("rope.freq_base", 1_000_000.0)
    found = {"sliding_window_pattern": GEMMA3_WINDOW_PATTERN, "rope_local_base_freq": local, "rope_theta": theta}
    return _gemma(fields, values, name) | found


ARCHITECTURES = {
    "llama": GgufArchitecture("llama", "LlamaForCausalLM", permuted=True),
    "qwen2": GgufArchitecture("qwen2", "Qwen2ForCausalLM"),
    "qwen3": GgufArchitecture("qwen3", "Qwen3ForCausalLM"),
    "gemma2": GgufArchitecture("gemma2", "Gemma2ForCausalLM", more=_gemma),
    "gemma3": GgufArchitecture("gemma3", "Gemma3ForCausalLM", more=_gemma3),
}
