"""The decoder layers of an EAGLE head, as its config.json has them: a Llama's fields, whatever the target's family."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from millstream_runtime.model_families import FAMILIES, with_class_defaults
from millstream_runtime.models.config.fields import Fields
from millstream_runtime.models.config.model_config import ModelConfig, common_fields

LLAMA = next(family for family in FAMILIES if family.model_type == "llama")


class LayerConfig(NamedTuple):
    """`fields`: what `config` was read from. `output_bias`: of attention."""

    fields: Fields
    config: ModelConfig
    output_bias: bool  # `config.attention_bias` is that of queries, keys and values


def read_layer_config(path: Path, layer: Fields) -> LayerConfig:
    """Read the fields of the layers. `path`: of config.json, for messages.

    Raises:
        RuntimeFailure: CheckpointInvalid, or UnsupportedByRuntime where the head is quantized.
    """
    output_bias = layer.flag("attention_bias")
    biases = {"attention_bias": output_bias or layer.flag("qkv_bias")}
    # `speculators` names no architecture of the layer; the published heads of other families have Llama's layer, too.
    values = {**layer.values, **biases, "architectures": [LLAMA.architecture]}
    fields = Fields(path, with_class_defaults(values, LLAMA))
    config = ModelConfig(**common_fields(fields))
    if config.quantization is not None:
        raise fields.unsupported("quantization_config", config.quantization.method, "EAGLE heads of 16 and 32 bits")
    return LayerConfig(fields, config, output_bias)
