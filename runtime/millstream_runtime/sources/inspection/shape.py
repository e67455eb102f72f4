"""The shape of a model, as JSON of at most 4 KiB: what a planner needs to know about a checkpoint. Pure.

    {"version": 1,
     "source": {"kind": "huggingFace", "repository": "org/name"},     or image + reference, or path + path
     "requested_revision": "main", "revision": "<commit, manifest digest>",            null for a path
     "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16",
     "max_position_embeddings": 8192,
     "config": {…},                 config.json's own names and nesting, only the fields that decide sizes
     "quantization_config": {…},    its method and numbers; null where the checkpoint is not quantised
     "weights": {"files": 4, "file_bytes": …, "tensor_bytes": …, "tensors": 291,
                 "elements": …, "elements_by_dtype": {"BF16": …},      counted in the headers
                 "tied_lm_head": false,                                true: no lm_head tensor is stored
                 "stored_lm_head": true,                               one is next to the embedding that it is tied to
                 "format": "gguf",                                     of GGUF files alone
                 "gguf_left_out": "name-Q4_K_M.gguf"},                 one in place of which *.safetensors are read
     "tokenizer": {"class": …, "model_max_length": …, "has_chat_template": true},
     "generation": {"eos_token_id": [128001, 128009]},
     "draft_head": {"kind": "EAGLE-1", …},     of draft heads alone: see `draft_heads.describe_head`
     "unread_fields": ["logit_multiplier"],    of config.json, that the runtime refuses; absent where there are none
     "omitted": []}                 names that were left out to stay within 4 KiB

`config` is itself a small config.json, except that a list of more than 16 words, such as the `layer_types` of a deep
model, is written as {word: how often}, and a number beyond 64 bits as text. In the modules that `quantization_config`
names there, numbers of layers and experts become `*`: {"model.layers.*.self_attn.q_proj": 80}. A reader must refuse a
`version` that it does not know and ignore keys that it does not know. `elements` of a quantised checkpoint counts
stored values: eight 4-bit weights packed in one I32 are one element.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from millstream_runtime.config_json_fields import unread_fields
from millstream_runtime.draft_heads import describe_head
from millstream_runtime.errors import TERMINATION_MESSAGE_LIMIT_BYTES
from millstream_runtime.model_families import defaults_to_state, family_of, with_class_defaults
from millstream_runtime.quantization_config.modelopt import MODELOPT_NAME, refuse_modelopt
from millstream_runtime.sources.safetensors_header import WeightsSummary
from millstream_runtime.sources.selection import CONFIG_NAME, invalid
from millstream_runtime.strict_json import read_strict_json

SHAPE_VERSION = 1
TEXT_LIMIT = 200
LIST_LIMIT = 16
NUMBERS_LIMIT = 1024  # of a list: one for each layer
_NUMBER_OF_MODULE = re.compile(r"\.[0-9]+(?=\.|$)")  # of `model.layers.7.mlp`
HEAD_NAME, EMBEDDING_NAME = "lm_head.weight", "embed_tokens.weight"
LONG_BYTES = 64  # no number, and no word, is as long
ESSENTIAL_QUANTIZATION_FIELDS = 8  # the first of QUANTIZATION_FIELDS

# What decides the size of the architectures that `millstream plan` knows; the order is the order of importance.
# fmt: off
CONFIG_FIELDS = (
    "architectures", "model_type", "hidden_size", "n_embd", "d_model", "num_hidden_layers", "n_layer",
    "num_layers", "num_attention_heads", "n_head", "num_heads", "num_key_value_heads", "num_kv_heads",
    "n_head_kv", "multi_query", "new_decoder_architecture", "head_dim", "intermediate_size", "n_inner",
    "ffn_hidden_size", "ffn_dim", "vocab_size", "max_position_embeddings", "n_positions", "n_ctx", "seq_length",
    "tie_word_embeddings", "torch_dtype", "dtype", "hidden_act", "hidden_activation", "activation_function",
    "rope_theta", "rope_local_base_freq", "rope_parameters", "rope_scaling", "original_max_position_embeddings",
    "partial_rotary_factor", "rotary_pct", "rotary_emb_base",
    "sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "sliding_window_pattern",
    "attention_bias", "mlp_bias", "qkv_bias", "bias", "use_qk_norm", "num_local_experts", "num_experts",
    "n_routed_experts", "num_experts_per_tok", "n_shared_experts", "moe_intermediate_size",
    "shared_expert_intermediate_size", "first_k_dense_replace", "moe_layer_freq", "decoder_sparse_step",
    "mlp_only_layers", "n_group", "topk_group", "norm_topk_prob", "q_lora_rank", "kv_lora_rank",
    "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "num_nextn_predict_layers", "parallel_attn",
    "num_ln_in_parallel_attn", "alibi",
    "use_parallel_residual", "attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar",
    "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "bos_token_id", "eos_token_id",
)
# fmt: on
NULL_COUNTS = ("sliding_window",)  # no window; where the field is absent, Mistral and Gemma have their default one
NESTED_CONFIGS = ("text_config", "llm_config", "language_config")  # where multimodal models keep the decoder's sizes
# fmt: off
QUANTIZATION_FIELDS = (
    "quant_method", "elements", "bits", "w_bit", "group_size", "q_group_size", "zero_point", "sym", "desc_act",
    "version", "format", "fmt", "checkpoint_format", "activation_scheme", "weight_block_size", "load_in_4bit",
    "load_in_8bit", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant", "bnb_4bit_compute_dtype",
    "bnb_4bit_quant_storage", "llm_int8_threshold",
    "kv_cache_scheme", "quant_algo", "kv_cache_quant_algo", "lm_head", "is_marlin_format", "dynamic", "sparsity_config",
    "modules_to_not_convert", "modules_in_block_to_quantize", "llm_int8_skip_modules", "config_groups",
    "ignored_layers", "ignore",
)
# fmt: on


def describe(
    source: Mapping[str, str],
    requested_revision: str | None,
    revision: str | None,
    files: Mapping[str, bytes],
    weights: WeightsSummary,
    config_name: str = CONFIG_NAME,
) -> dict[str, Any]:
    """The shape.

    Args:
        files: the content of config.json and, where there are any, the generation and tokenizer configs.
        config_name: of the file that config.json came from, for messages.

    Raises:
        RuntimeFailure: CheckpointInvalid, config.json is not a JSON object; UnsupportedByRuntime, ModelOpt's format.
    """
    config = read_object(files[CONFIG_NAME], config_name, is_strict=True)
    inner: dict[str, Any] = next((config[name] for name in NESTED_CONFIGS if isinstance(config.get(name), dict)), {})
    quantization = _quantization(config, inner, config_name)
    if MODELOPT_NAME in files and not quantization:
        refuse_modelopt(_optional(files, MODELOPT_NAME), MODELOPT_NAME)
    kept = _pick(config, CONFIG_FIELDS)
    kept |= {name: _pick(config[name], CONFIG_FIELDS) for name in NESTED_CONFIGS if isinstance(config.get(name), dict)}
    both = {**inner, **{name: value for name, value in config.items() if value is not None}}
    head = describe_head(config, weights.shapes)
    family = family_of(str(inner.get("model_type") or config.get("model_type")))
    unread = unread_fields({**config, **inner}, family.model_type) if family is not None else []
    if family is not None:
        kept |= defaults_to_state({**config, **inner}, family)
    return {
        "version": SHAPE_VERSION,
        "source": dict(source),
        "requested_revision": requested_revision,
        "revision": revision,
        "architectures": _short(config.get("architectures")),
        "model_type": _short(config.get("model_type")),
        "dtype": _short(both.get("dtype") or both.get("torch_dtype")),
        "max_position_embeddings": _short(
            both.get("max_position_embeddings") or both.get("n_positions") or both.get("seq_length")
        ),
        "config": kept,
        "quantization_config": _pick(quantization, QUANTIZATION_FIELDS) if quantization else None,
        "weights": _counted(weights) | ({"stored_lm_head": True} if _has_tied_head_stored(both, weights) else {}),
        "tokenizer": _tokenizer(files),
        "generation": _pick(_optional(files, "generation_config.json"), ("eos_token_id",)),
        **({"draft_head": _short(head)} if head is not None else {}),
        **({"unread_fields": _short(unread)} if head is None and not weights.is_gguf and unread else {}),
        "omitted": [],
    }


def _counted(weights: WeightsSummary) -> dict[str, Any]:
    return {
        "files": weights.files,
        "file_bytes": weights.file_bytes,
        "tensor_bytes": weights.tensor_bytes,
        "tensors": weights.tensors,
        "elements": weights.elements_by_dtype.total(),
        "elements_by_dtype": _short(dict(sorted(weights.elements_by_dtype.items()))),
        "tied_lm_head": not any(name.endswith(("lm_head.weight", "embed_out.weight")) for name in weights.names),
        **({"format": "gguf"} if weights.is_gguf else {}),
        **({"gguf_left_out": _short(weights.gguf_left_out[0])} if weights.gguf_left_out else {}),
    }


def _has_tied_head_stored(config: Mapping[str, Any], weights: WeightsSummary) -> bool:
    """Whether files hold an embedding and a head that config.json ties to it: the runtime uses the head if its numbers
    differ. A head alone is the embedding."""
    family = family_of(str(config.get("model_type")))
    has_both = all(any(name.endswith(end) for name in weights.names) for end in (HEAD_NAME, EMBEDDING_NAME))
    if family is None or weights.is_gguf or not has_both:
        return False
    return bool(with_class_defaults(config, family)["tie_word_embeddings"])


def to_json(shape: Mapping[str, Any], limit_bytes: int = TERMINATION_MESSAGE_LIMIT_BYTES) -> str:
    """One line of at most `limit_bytes`; the least important fields are dropped first and named in `omitted`."""
    fitted = json.loads(json.dumps(shape))
    text = _line(fitted)
    for path in _dispensable(fitted):
        if len(text.encode()) <= limit_bytes:
            break
        parent = fitted
        for name in path[:-1]:
            parent = parent[name]
        del parent[path[-1]]
        fitted["omitted"].append(".".join(path))
        text = _line(fitted)
    return text


def read_object(text: bytes, name: str, *, is_strict: bool = False) -> dict[str, Any]:
    """A JSON object; `is_strict`: see `strict_json`. Raises RuntimeFailure: CheckpointInvalid."""
    try:
        value = read_strict_json(text) if is_strict else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise invalid(f"{name} is not readable JSON: {str(error)[:120]}.") from None
    if not isinstance(value, dict):
        raise invalid(f"{name} must be a JSON object; it is a {type(value).__name__}.")
    return value


def _quantization(config: dict[str, Any], inner: dict[str, Any], config_name: str) -> dict[str, Any]:
    """The format of the weights; empty where none is given.

    Raises:
        RuntimeFailure: CheckpointInvalid, it is no object.
    """
    for name, values in _quantization_places(config, inner):
        found = values.get(name.rpartition(".")[2])
        if found is not None and not isinstance(found, dict):
            raise invalid(
                f"{config_name}: {name} is {found!r:.60}; it must be an object such as "
                '{"quant_method": "awq", "bits": 4}, or absent for weights in 16 bit.'
            )
        if found:
            return found
    return {}


def _quantization_places(config: dict[str, Any], inner: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The older name is that of llm-compressor's first releases."""
    names = ("quantization_config", "compression_config")
    return [(name, config) for name in names] + [(f"text_config.{name}", inner) for name in names]


def _dispensable(shape: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Paths in the order in which they may be dropped: long values first, then the least important numbers."""
    fields: list[tuple[tuple[str, ...], Any]] = []
    quantization = shape["quantization_config"] or {}
    for name in reversed(QUANTIZATION_FIELDS[ESSENTIAL_QUANTIZATION_FIELDS:]):
        if name in quantization:
            fields.append((("quantization_config", name), quantization[name]))
    fields += [(("generation", name), value) for name, value in shape["generation"].items()]
    for name in reversed(CONFIG_FIELDS):
        for nested in NESTED_CONFIGS:
            if name in shape["config"].get(nested, {}):
                fields.append((("config", nested, name), shape["config"][nested][name]))
        if name in shape["config"]:
            fields.append((("config", name), shape["config"][name]))

    def length(field: tuple[tuple[str, ...], Any]) -> int:
        size_bytes = len(_line(field[1]))
        return size_bytes if size_bytes > LONG_BYTES else 0

    return [path for path, _ in sorted(fields, key=length, reverse=True)]


def _pick(values: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: _short(values[name]) for name in names if values.get(name) is not None or _is_null(values, name)}


def _is_null(values: Mapping[str, Any], name: str) -> bool:
    """Whether the file says `null` of a field where that differs from saying nothing."""
    return name in NULL_COUNTS and name in values


def _short(value: Any, depth: int = 0) -> Any:
    """A value with bounded texts, lists and depth: a config.json is untrusted and may have any size."""
    if isinstance(value, str):
        return value[:TEXT_LIMIT]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, bool | None):
        return value
    if isinstance(value, int):
        return value if abs(value) < 1 << 63 else str(value)[:TEXT_LIMIT]  # to be refused, and not to be absent
    if depth >= 4:
        return None
    if isinstance(value, list):
        if len(value) > LIST_LIMIT and all(isinstance(one, str) for one in value):
            return _counts(value)
        if len(value) > LIST_LIMIT and all(isinstance(one, int) for one in value):
            return _numbers(value, depth)
        return [_short(one, depth + 1) for one in value[:LIST_LIMIT]]
    return {str(key)[:TEXT_LIMIT]: _short(one, depth + 1) for key, one in list(value.items())[:LIST_LIMIT]}


def _counts(values: list[str]) -> dict[str, int]:
    """A long list of words (`layer_types` of 60 layers) as how often each occurs; modules of all layers are one."""
    counts: dict[str, int] = {}
    for value in values:
        word = _NUMBER_OF_MODULE.sub(".*", value[:TEXT_LIMIT])
        counts[word] = counts.get(word, 0) + 1
    return dict(list(counts.items())[:LIST_LIMIT])


def _numbers(values: list[int], depth: int) -> list[Any] | str:
    """Whole, because a list that ends early means another model."""
    if len(values) > NUMBERS_LIMIT:
        return f"a list of {len(values)} numbers"
    return [_short(one, depth + 1) for one in values]


def _tokenizer(files: Mapping[str, bytes]) -> dict[str, Any]:
    settings = _optional(files, "tokenizer_config.json")
    length = settings.get("model_max_length")
    sane = isinstance(length, int) and length < 1 << 32  # transformers writes 10^30 for "no limit"
    return {
        "class": _short(settings.get("tokenizer_class")),
        "model_max_length": length if sane else None,
        "has_chat_template": bool(settings.get("chat_template"))
        or "chat_template.jinja" in files
        or bool(_optional(files, "chat_template.json").get("chat_template")),
    }


def _optional(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    return read_object(files[name], name) if name in files else {}


def _line(shape: Any) -> str:
    """A lone surrogate, which JSON can hold and UTF-8 cannot, becomes a question mark."""
    return json.dumps(shape, ensure_ascii=False, separators=(",", ":")).encode(errors="replace").decode()
