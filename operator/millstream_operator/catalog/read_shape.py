"""config.json -> ModelShape, for every family that the catalogue knows.

    {"model_type": "qwen2", …} -> row of model_families.py -> families/*.py, by the row's traits -> ModelShape

Torch-free, and bounded: a hostile file gives a `ConfigError`, never a long computation. Models that hold a language
model and a vision tower (`text_config`) are read as the language model, which is what is served.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, assert_never

from millstream_operator.catalog.checkpoint_quantization import UnknownQuantizationError, read_quantization
from millstream_operator.catalog.config_fields import ConfigError, ConfigFields
from millstream_operator.catalog.families import classic, dense, experts, latent
from millstream_operator.catalog.model_shape import ModelShape
from millstream_runtime.model_families import (
    FAMILIES,
    DenseTraits,
    ExpertTraits,
    FalconTraits,
    GptNeoxTraits,
    LatentTraits,
    ModelFamily,
    family_of,
)

MAX_CONFIG_BYTES = 1 << 20
_DTYPE_BYTES = {"float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2}


def read_shape_file(path: Path) -> ModelShape:
    """As `read_shape`, from a file.

    Raises:
        ConfigError: it cannot be read, is no JSON object, or describes no model that the catalogue knows.
    """
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ConfigError(f"{path}: larger than 1 MiB, so it is no model's config.json.")
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError):
        raise ConfigError(f"{path}: not a JSON file in UTF-8.") from None
    return read_shape(values, str(path))


def read_shape(config: Mapping[str, Any], source: str = "config.json") -> ModelShape:
    """The shape of a model from the values of its config.json.

    Raises:
        ConfigError: an unknown family, or a field that is missing or impossible.
    """
    if not isinstance(config, Mapping):
        raise ConfigError(f"{source}: holds no JSON object.")
    text = config.get("text_config")
    values = {**config, **text} if isinstance(text, Mapping) else dict(config)
    fields = ConfigFields(values, source)
    family = family_of(fields.text("model_type"))
    if family is None:
        raise ConfigError(
            f"{source}: model_type is {fields.text('model_type') or 'missing'!r}; "
            f"the catalogue knows {', '.join(family.model_type for family in FAMILIES)}."
        )
    try:
        quantization = read_quantization(config)
    except UnknownQuantizationError as error:
        raise ConfigError(f"{source}: {error}") from None
    dtype = fields.text("dtype") or fields.text("torch_dtype")
    shape = _count(fields, family)
    return _checked(replace(shape, quantization=quantization, weight_bytes=_DTYPE_BYTES.get(dtype, 2)), source)


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


def _checked(shape: ModelShape, source: str) -> ModelShape:
    if shape.num_heads % shape.num_kv_heads:
        raise ConfigError(
            f"{source}: num_key_value_heads is {shape.num_kv_heads}; it must divide num_attention_heads "
            f"({shape.num_heads})."
        )
    if shape.num_experts_per_token > shape.num_experts:
        raise ConfigError(
            f"{source}: {shape.num_experts_per_token} experts a token; there are only {shape.num_experts}."
        )
    return shape
