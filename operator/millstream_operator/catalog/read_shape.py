"""config.json -> ModelShape, for every family that the catalogue knows.

    {"model_type": "qwen2", …} -> row of model_families.py -> families/*.py, by the row's traits -> ModelShape

Torch-free, and bounded: a hostile file gives a `ConfigError`, never a long computation. Models that hold a language
model and a vision tower (`text_config`) are read as the language model, which is what is served.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from json import JSONDecodeError
from pathlib import Path
from typing import Any, assert_never

from millstream_operator.catalog.checkpoint_quantization import gguf_quantized_elements, read_quantization
from millstream_operator.catalog.config_decimals import check_decimals
from millstream_operator.catalog.config_fields import ConfigError, ConfigFields, UnsupportedModelError
from millstream_operator.catalog.families import classic, dense, experts, latent
from millstream_operator.catalog.model_shape import ModelShape
from millstream_operator.catalog.unquantized_layers import dequantized_parameters, unquantized_parameters
from millstream_runtime.config_json_fields import problem_with_unread, unread_fields
from millstream_runtime.context_limit import extended_context_tokens, unserved_rope_type
from millstream_runtime.layer_windows import WindowError, layer_windows
from millstream_runtime.model_families import (
    FAMILIES,
    WITH_VISION,
    DenseTraits,
    ExpertTraits,
    FalconTraits,
    GptNeoxTraits,
    LatentTraits,
    ModelFamily,
    family_of,
    with_class_defaults,
)
from millstream_runtime.strict_json import read_strict_json

MAX_CONFIG_BYTES = 1 << 20
MAX_WIDTH_RATIO = 8  # between all heads and the hidden size; published models have up to 3.5
_DTYPE_BYTES = {"float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2}
# As the runtime chooses it on a GPU (`engine/execution/shard.py`): float32 where the file names none.
_RUNTIME_DTYPES = {"": "FP32", "float32": "FP32", "float16": "FP16"}


def read_shape_file(path: Path) -> ModelShape:
    """As `read_shape`, from a file.

    Raises:
        ConfigError: it cannot be read, is no JSON object, or describes no model that the catalogue knows.
    """
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ConfigError(f"{path}: larger than 1 MiB, so it is no model's config.json.")
        values = read_strict_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}.") from None
    except (JSONDecodeError, UnicodeError, RecursionError):
        raise ConfigError(f"{path}: not a JSON file in UTF-8.") from None
    except ValueError as error:
        raise ConfigError(f"{path}: {error}.") from None
    shape = read_shape(values, str(path))
    text = values.get("text_config")
    if unread := unread_fields({**values, **text} if isinstance(text, Mapping) else values, shape.family):
        raise ConfigError(f"{path}: {problem_with_unread(unread)}")
    return shape


def has_tower(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json is that of a model with a vision tower.

    Older folders of Qwen's have the fields of their language model outside of any `text_config`.
    """
    names = config.get("architectures")
    named = names if isinstance(names, list) else []
    return "text_config" in config or any(isinstance(name, str) and name in WITH_VISION for name in named)


def read_shape(config: Mapping[str, Any], source: str = "config.json") -> ModelShape:
    """The shape of a model from the values of its config.json.

    Raises:
        ConfigError: a field that is missing or impossible; UnsupportedModelError for a family or a format of weights
            that the catalogue does not know.
    """
    if not isinstance(config, Mapping):
        raise ConfigError(f"{source}: holds no JSON object.")
    text = config.get("text_config")
    values = {**config, **text} if isinstance(text, Mapping) else dict(config)
    fields = ConfigFields(values, source)
    check_decimals(fields)
    model_type = fields.text("model_type")
    family = family_of(model_type)
    if family is None:
        raise UnsupportedModelError(
            f"{source}: model_type is {repr(model_type[:60]) if model_type else 'missing'}; "
            f"the catalogue knows {', '.join(family.model_type for family in FAMILIES)}."
        )
    fields = ConfigFields(with_class_defaults(values, family), source)
    kind = unserved_rope_type(fields.values, family.model_type, has_tower=has_tower(config))
    if kind is not None:
        raise UnsupportedModelError(f"{source}: rope_type is {kind[:60]!r}, which no runtime of this version computes.")
    quantization = read_quantization(config, source) or read_quantization(values, source)
    dtype = fields.text("dtype") or fields.text("torch_dtype")
    shape = replace(
        _count(fields, family),
        quantization=quantization,
        weight_bytes=_DTYPE_BYTES.get(dtype, 2),
        dtype=_RUNTIME_DTYPES.get(dtype, "BF16"),
    )
    extended = extended_context_tokens(values, shape.max_position_embeddings)
    shape = replace(shape, extended_context_tokens=extended, windowed_layers=_windowed_layers(fields, family, shape))
    if quantization is not None and quantization.elements:
        plain = shape.parameters.linear - gguf_quantized_elements(quantization.elements)
        if plain < 0:
            raise fields.contradiction(
                f"quantization_config.elements counts {-plain} weights more than the model's layers have"
            )
        shape = replace(shape, unquantized_parameters=plain)
    elif quantization is not None:
        lists = quantization.kept, quantization.targets
        shape = replace(
            shape,
            unquantized_parameters=unquantized_parameters(shape, *lists),
            dequantized_parameters=dequantized_parameters(shape, *lists),
        )
    return _checked(shape, fields)


def _windowed_layers(
    fields: ConfigFields, family: ModelFamily, shape: ModelShape
) -> tuple[tuple[int | None, int], ...]:
    """By the runtime's own rule. An inspection writes a long `layer_types` as how often each word occurs."""
    values, types = fields.values, fields.values.get("layer_types")
    if isinstance(types, Mapping):
        counted = ((word, count) for word, count in types.items() if isinstance(count, int))
        words = (word for word, count in counted for _ in range(count))
        values = {**values, "layer_types": [*islice(words, shape.num_layers + 1)]}
    try:
        windows = layer_windows(values, shape.num_layers, family.windows)
    except WindowError as error:
        raise fields.contradiction(str(error)) from None
    return tuple(Counter(windows).items())


def _count(fields: ConfigFields, family: ModelFamily) -> ModelShape:
    """The shape by the reader for this family's traits."""
    match family.traits:
        case DenseTraits() as traits:
            return dense.read(fields, family, traits)
        case ExpertTraits() as traits:
            return experts.read(fields, family, traits)
        case LatentTraits() as traits:
            return latent.read(fields, family, traits)
        case FalconTraits():
            return classic.read_falcon(fields, family)
        case GptNeoxTraits():
            return classic.read_gpt_neox(fields, family)
        case _:
            assert_never(family.traits)


def _checked(shape: ModelShape, fields: ConfigFields) -> ModelShape:
    """Refuse numbers that are possible alone and not together."""
    heads, kv_heads, hidden = shape.num_heads, shape.num_kv_heads, shape.hidden_size
    if heads % kv_heads:
        raise fields.contradiction(f"num_key_value_heads is {kv_heads}; it must divide num_attention_heads ({heads})")
    width = heads * shape.head_size
    if not hidden <= width * MAX_WIDTH_RATIO <= hidden * MAX_WIDTH_RATIO**2:
        raise fields.contradiction(
            f"{heads} attention heads of {shape.head_size} are {width} columns, and hidden_size is {hidden}; more "
            f"than {MAX_WIDTH_RATIO} times apart, they belong to no model"
        )
    experts, per_token = shape.num_experts, shape.num_experts_per_token
    if per_token > experts or (experts and not per_token):
        raise fields.contradiction(f"num_experts_per_tok is {per_token}; the model has {experts} experts")
    _check_groups(shape, fields)
    return shape


def _check_groups(shape: ModelShape, fields: ConfigFields) -> None:
    """AWQ cuts each row into whole groups, or takes it as one; its kernels have no rest."""
    stored = shape.quantization
    if stored is None or stored.method != "AWQ" or not stored.group_size or shape.unquantized_parameters:
        return
    for name, size in (("hidden_size", shape.hidden_size), *(("an MLP width", w) for w in shape.intermediate_sizes)):
        if size > stored.group_size and size % stored.group_size:
            raise fields.contradiction(
                f"quantization_config.group_size is {stored.group_size}, which does not divide {name} of {size}"
            )
